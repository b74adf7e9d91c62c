"""What it costs that a job's order of samples is kept and proven.

Figures:

* ``step_ratio``: a loader alone, samples a second, Megatron-LM's own path over ours: 20 blocks of
  each in turns, the ratio of their medians. Both are a GPTDataset of 1,024 tokens a sample under
  torch's loader and Megatron-LM's sampler; ours is watched as in a job, and each step goes into a
  ledger.
* ``ledger_kb``: the ledger of a blend of five data sets, as a generation keeps it, after 1,000
  changes of the degrees at random samples, of which 20 went back behind steps that were done again.
"""

import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from report import Report
from torch.utils.data import DataLoader

from scalai.core.dataset.drawn import Draw
from scalai.core.dataset.ledger import Ledger, Lost, judge
from scalai.core.dataset.order import Blend, Shuffled
from scalai.patches.megatron.samplers import TrainingDraws
from scalai.runtime.consumption import Consumption

BLOCKS = 20
SAMPLES, TOKENS, VOCABULARY = 16_384, 1_024, 50_000
MICRO_BATCH, MICRO_BATCHES = 4, 8
STEPS = 200
"""Of a block."""
CHANGES, REPLAYS = 1_000, 20
SEED = 15


class MegatronPretrainingSampler:
    """Megatron-LM's, which is in no package.

    Source: megatron/training/datasets/data_samplers.py (0.16).
    """

    def __init__(
        self, total_samples: int, consumed_samples: int, micro_batch_size: int,
        data_parallel_rank: int, data_parallel_size: int, drop_last: bool = True,
    ) -> None:  # fmt: skip
        self.total_samples, self.consumed_samples = total_samples, consumed_samples
        self.micro_batch_size, self.drop_last = micro_batch_size, drop_last
        self.block = micro_batch_size * data_parallel_size
        self.first = data_parallel_rank * micro_batch_size

    def __len__(self) -> int:
        return self.total_samples

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in range(self.consumed_samples, self.total_samples):
            batch.append(index)
            if len(batch) == self.block:
                yield batch[self.first : self.first + self.micro_batch_size]
                batch = []


class RerunDataIterator:
    """Stands for Megatron-LM's, which passes on what a loader gives."""

    def __init__(self, iterable: Iterator[Any]) -> None:
        self.iterable = iterable


def write_tokens(path: Path) -> None:
    """Write an indexed data set of random tokens."""
    generator = np.random.default_rng(SEED)
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    for _ in range(SAMPLES):
        sample = generator.integers(1, VOCABULARY, TOKENS + 1, dtype=np.uint16)
        builder.add_document(sample, [len(sample)])
    builder.finalize(f"{path}.idx")


def data_in(folder: Path) -> Any:
    """Return Megatron-LM's data set of such tokens."""
    write_tokens(folder / "tokens")
    tokenizer = SimpleNamespace(eod=0, pad=0, vocab_size=VOCABULARY, unique_identifiers={})
    config = GPTDatasetConfig(
        random_seed=SEED, sequence_length=TOKENS, blend=([str(folder / "tokens")], None),
        split="1,0,0", path_to_cache=str(folder / "cache"), reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        tokenizer=tokenizer, mid_level_dataset_surplus=0.005,
    )  # fmt: skip
    wanted = [SAMPLES - 1, 0, 0]
    return BlendedMegatronDatasetBuilder(GPTDataset, wanted, lambda: True, config).build()[0]


def loader_of(data: Any, sampler: type[MegatronPretrainingSampler]) -> Iterator[Any]:
    return iter(DataLoader(data, batch_sampler=sampler(len(data), 0, MICRO_BATCH, 0, 1)))


def plain_block(data: Any) -> float:
    """Return the samples a second of Megatron-LM's own path."""
    batches = loader_of(data, MegatronPretrainingSampler)
    began = time.perf_counter()
    for _ in range(STEPS * MICRO_BATCHES):
        next(batches)
    return STEPS * MICRO_BATCHES * MICRO_BATCH / (time.perf_counter() - began)


def watched_block(data: Any) -> float:
    """Return the samples a second where each step is watched and goes into a ledger."""
    watched = type("Watched", (MegatronPretrainingSampler,), {})
    draws, size = TrainingDraws(), MICRO_BATCHES * MICRO_BATCH
    draws.hook(
        SimpleNamespace(
            MegatronPretrainingSampler=watched,
            MegatronPretrainingRandomSampler=type("Random", (watched,), {}),
        )
    )
    ledger = Consumption("run-1", {"dp": 1})
    ledger.begin(0, 0)
    train, *_ = draws.build(
        0, lambda: (RerunDataIterator(loader_of(data, watched)), None, None), (), {}
    )
    began = time.perf_counter()
    for step in range(1, STEPS + 1):
        for _ in range(MICRO_BATCHES):
            next(train.iterable)
        ledger.note(draws.step() or ())
        ledger.step_ended(step, step * size)
    seconds = time.perf_counter() - began
    assert ledger.ledger is not None and judge(ledger.ledger, STEPS, STEPS * size).is_kept
    return STEPS * size / seconds


def step_ratio() -> float:
    """Return samples a second of Megatron-LM's own path over those of ours."""
    with tempfile.TemporaryDirectory() as folder:
        data = data_in(Path(folder))
        plain_block(data), watched_block(data)  # pages and code are there
        pairs = [(plain_block(data), watched_block(data)) for _ in range(BLOCKS)]
    return median(plain for plain, _ in pairs) / median(watched for _, watched in pairs)


class Training:
    """A training that changes its degrees, goes back, and keeps its ledger."""

    def __init__(self) -> None:
        names = ("web", "books", "code", "papers", "wiki")
        sizes = (90_000, 20_000, 50_000, 7_000, 3_000)
        parts = tuple(Shuffled(size, SEED, name) for size, name in zip(sizes, names, strict=True))
        self._order = Blend(parts, (0.5, 0.12, 0.28, 0.06, 0.04))
        self._random = random.Random(SEED)
        self.ledger = Ledger.begun(0, 0)
        for name, facts in self._order.facts().items():
            self.ledger = self.ledger.with_source(name, facts)
        self.lost: list[Lost] = []
        self._round = 0

    def change(self) -> None:
        """Begin a round at other degrees."""
        self._round += 1
        sizes = {axis: self._random.choice((1, 2, 4, 8)) for axis in ("tp", "pp", "dp", "cp", "ep")}
        self.ledger = self.ledger.with_round(f"3f2a9c01-{self._round}", sizes, self.lost)

    def train(self) -> None:
        """Make a random number of steps of random sizes."""
        for _ in range(self._random.randint(1, 12)):
            step, before = self.ledger.at
            samples = (before or 0) + self._random.randint(1, 512)
            draws: tuple[Draw, ...] = self._order.draws(before or 0, samples)
            assert not list(self.ledger.objections(draws, samples))
            self.ledger = self.ledger.stepped(step + 1, samples, draws)

    def go_back(self, saved: Ledger) -> None:
        """Lose what was done since a generation."""
        self.lost.append(Lost(f"3f2a9c01-{self._round}", saved.at[0], self.ledger.at[0]))
        self.ledger = saved


def ledger_kb() -> float:
    """Return the size of a ledger after many changes, in KB of 1,000 bytes."""
    training = Training()
    for number in range(CHANGES):
        training.change()
        saved = training.ledger
        training.train()
        if number % (CHANGES // REPLAYS) == 0:
            training.go_back(saved)
    ledger = training.ledger
    verdict = judge(ledger, *ledger.at)
    assert verdict.is_kept and len(ledger.lost) == REPLAYS, verdict
    return len(json.dumps(ledger.to_json(), separators=(",", ":"))) / 1_000


def measure() -> dict[str, float]:
    """Return both figures."""
    return {"step_ratio": step_ratio(), "ledger_kb": ledger_kb()}


def main() -> None:
    report = Report("dataset_order")
    units = {"ledger_kb": "KB"}
    for name, figure in measure().items():
        report.add(name, figure, units.get(name, ""))
    report.finish()


if __name__ == "__main__":
    main()
