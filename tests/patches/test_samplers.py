"""What is read at Megatron-LM's samplers, on classes that give what its own do, and which changes
of flags and of data sets mean another order of the training data."""

import json
import sys
import types
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice, product, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from scalai.core.dataset.drawn import Draw, Number
from scalai.core.dataset.ledger import Ledger, difference, judge
from scalai.core.dataset.order import ShuffledBlocks
from scalai.core.degrees.batches import Shares
from scalai.core.errors import RefusedError
from scalai.patches.megatron.data_facts import facts_of
from scalai.patches.megatron.samplers import (
    MANY_STEPS,
    TRAIN,
    TrainingDraws,
    hook_fim,
    hook_samplers,
    micro_batches,
)
from scalai.patches.megatron.shares import Filler
from scalai.runtime.consumption import Consumption

pytestmark = pytest.mark.fault


def samplers(batch: int = 8, dp: int = 1, micro: int = 2) -> Any:
    """Return a module of samplers, as of megatron/training/datasets/data_samplers.py (0.16), of a
    job with these sizes."""

    class MegatronPretrainingSampler:
        def __init__(
            self, total_samples: int, consumed_samples: int, micro_batch_size: int,
            data_parallel_rank: int, data_parallel_size: int, drop_last: bool = True,
        ) -> None:  # fmt: skip
            self.total_samples, self.micro_batch_size = total_samples, micro_batch_size
            self.data_parallel_size, self.data_parallel_rank = (
                data_parallel_size,
                data_parallel_rank,
            )
            self.consumed_samples = consumed_samples
            self.places = range(consumed_samples, total_samples)
            self.share = micro_batch_size, data_parallel_rank, data_parallel_size

        def __iter__(self) -> Iterator[list[int]]:
            size, rank, dp = self.share
            for begin in range(0, len(self.places) - size * dp + 1, size * dp):
                yield list(self.places[begin + rank * size : begin + (rank + 1) * size])

    class MegatronPretrainingRandomSampler(MegatronPretrainingSampler):
        def __init__(
            self, dataset: Any, total_samples: int, consumed_samples: int, micro_batch_size: int,
            data_parallel_rank: int, data_parallel_size: int, data_sharding: bool,
        ) -> None:  # fmt: skip
            super().__init__(
                total_samples, consumed_samples % total_samples, micro_batch_size,
                data_parallel_rank, data_parallel_size,
            )  # fmt: skip
            self.dataset, self.data_sharding = dataset, data_sharding
            self.consumed_samples = consumed_samples

    job = SimpleNamespace(global_batch_size=batch, micro_batch_size=micro, data_parallel_size=dp)
    return SimpleNamespace(get_args=lambda: job, **{
        cls.__name__: cls for cls in (MegatronPretrainingSampler, MegatronPretrainingRandomSampler)
    })  # fmt: skip


class Rerun:
    """Stands for RerunDataIterator."""

    def __init__(self, iterable: Iterator[Any]) -> None:
        self.iterable = iterable


def watched(module: Any = None, *, train: Any = None, consumed: int = 0) -> TrainingDraws:
    """Return a watch on samplers, with an iterator of the training data."""
    draws = TrainingDraws()
    if module is not None:
        draws.hook(module)
    draws.build(consumed, lambda: (train, None, None), (), {})
    return draws


def built(
    module: Any, consumed: int, dp: int, rank: int, workers: int = 0, *, total: int = 96,
    begins: int | None = None,
) -> tuple[TrainingDraws, Any]:  # fmt: skip
    """Return the watch of one rank, and its training iterator."""
    draws = TrainingDraws()
    draws.hook(module)

    def build() -> Any:
        place = consumed if begins is None else begins
        made = [module.MegatronPretrainingSampler(total, at, 2, rank, dp) for at in (place, 0)]
        data: Any = range(total)
        loaders = [DataLoader(data, batch_sampler=each, num_workers=workers) for each in made]
        return tuple(Rerun(iter(loader)) for loader in loaders)

    train, valid = draws.build(consumed, build, (), {})
    next(valid.iterable)  # an evaluation counts for nothing
    return draws, train.iterable


def take(iterator: Any, count: int) -> list[list[int]]:
    return [batch.tolist() for batch in islice(iterator, count)]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_read_ahead_counts_once_a_step_has_drawn_it(workers: int) -> None:
    draws, train = built(samplers(), 8, dp=2, rank=1, workers=workers)
    assert take(train, 2) == [[10, 11], [14, 15]]
    assert draws.step() == [Draw("train", Number(0), 8, 16, 96, 96, is_dealt=True)]
    take(train, 1)
    assert draws.step() == [Draw("train", Number(0), 16, 20, 96, 96, is_dealt=True)]
    assert draws.step() == ()


def test_a_later_stage_that_draws_in_a_skipped_iteration_alone_says_nothing() -> None:
    draws, train = built(samplers(), 8, dp=2, rank=1)
    take(train, 2)
    assert draws.step(stage=1) == ()


def test_ranks_at_any_degrees_have_one_ledger_over_changes() -> None:
    ledgers = []
    for rank_of in (0, -1):
        ledger = Ledger.begun(0, 0)
        for dp in (2, 4, 1):
            draws, train = built(samplers(), ledger.at[1] or 0, dp, rank_of % dp)
            for _ in range(3):
                take(train, 8 // (2 * dp))
                drawn = draws.step()
                assert drawn and not list(ledger.objections(drawn))
                ledger = ledger.stepped(ledger.at[0] + 1, (ledger.at[1] or 0) + 8, drawn)
        assert judge(ledger, 9, 72).is_kept and ledger.passes[0].is_dealt
        ledgers.append(ledger)
    assert ledgers[0] == ledgers[1]


@pytest.mark.parametrize(
    ("begins", "said"), [(0, "0:8 a second time"), (12, "8:12 are passed over")]
)
def test_a_loader_at_another_place_than_the_training_is_objected_to(begins: int, said: str) -> None:
    ledger = Ledger.begun(0, 0).stepped(1, 8, [Draw("train", Number(0), 0, 8, 96)])
    draws, train = built(samplers(), begins, dp=2, rank=0)
    take(train, 2)
    assert said in " ".join(ledger.objections(draws.step() or ()))


def test_a_script_that_throws_a_batch_away_is_objected_to() -> None:
    draws, train = built(samplers(), 0, dp=2, rank=0)
    take(train, 3)
    (said,) = Ledger.begun(0, 0).objections(draws.step() or (), 8)
    assert "drew 12 samples and counts 8" in said


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_with_uneven_shares_have_the_ledger_of_one(workers: int) -> None:
    """Three replicas share steps of four micro-batches; fillers count for nothing."""
    drawn, told = [], []
    for rank in range(3):
        draws, train = built(samplers(8, dp=3), 16, dp=3, rank=rank, workers=workers)
        for _ in range(3):
            batches: list[Any] = []
            for batch in islice(train, 2):
                assert draws.newest is not None
                batches += [] if draws.newest.is_filler else batch.tolist()
            drawn.append(batches)
            told.append(draws.step())
    each = [[Draw("train", Number(0), b, b + 8, 96, 96, is_dealt=True)] for b in (16, 24, 32)]
    assert told == each * 3
    assert sorted(sample for batch in drawn for sample in batch) == [*range(16, 40)]


def _random(dp: int, rank: int, is_sharded: bool) -> Any:
    """Return a random sampler of 13 samples behind 8, in the order of two replicas."""
    module, draws, made = samplers(8, dp=dp), TrainingDraws(), []
    draws.first = 2, 2
    draws.hook(module)

    def build() -> Any:
        kind = module.MegatronPretrainingRandomSampler
        made.append(kind([None] * 13, 13, 8, 2, rank, dp, is_sharded))
        return None, None, None

    draws.build(8, build, (), {})
    return made[0]


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_random_order_is_the_same_with_uneven_shares(is_sharded: bool) -> None:
    """Steps of 8 over passes of 12: three replicas draw the samples of two."""

    def steps(dp: int) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(4)]
        for rank, passes in product(range(dp), [-(-4 // dp)]):
            micro = chain.from_iterable(repeat(_random(dp, rank, is_sharded)))
            for number, batch in enumerate(islice(micro, 4 * passes)):
                found[number // passes] += [] if isinstance(batch, Filler) else batch
        return [sorted(each) for each in found]

    assert steps(3) == steps(2)


def test_seeds_of_a_pass_do_not_go_with_uneven_shares() -> None:
    module = samplers(8, dp=3)
    watched(module)
    dataset = type("RandomSeedDataset", (), {})()
    with pytest.raises(RefusedError, match="3 replicas do not divide the batch"):
        module.MegatronPretrainingRandomSampler(dataset, 12, 0, 2, 0, 3, False)


def test_samplers_that_somebody_else_has_changed_are_refused() -> None:
    module = samplers()
    module.MegatronPretrainingSampler.__iter__ = lambda self: iter([[5, 3]])
    _, train = built(module, 0, dp=1, rank=0)
    with pytest.raises(RefusedError, match=r"gave samples \[5, 3\], where"):
        next(train)


def test_a_later_phase_has_a_data_set_of_its_own() -> None:
    draws, train = built(samplers(), 40, dp=2, rank=0, begins=8)
    take(train, 2)
    assert draws.step() == [Draw("train-32", Number(0), 8, 16, 96, 96, is_dealt=True)]


def test_a_random_order_is_counted_over_its_epochs() -> None:
    draws, module = TrainingDraws(), samplers()
    draws.hook(module)

    def build() -> Any:
        sampler = module.MegatronPretrainingRandomSampler(None, 12, 8, 2, 0, 2, False)
        data: Any = range(12)
        loader = DataLoader(data, batch_sampler=sampler)
        return Rerun(batch for _ in range(3) for batch in loader), None, None

    train, *_ = draws.build(8, build, (), {})
    take(train.iterable, 2)
    assert draws.step() == [
        Draw("train", Number(0), 8, 12, 12, 12, is_dealt=True),
        Draw("train", Number(1), 0, 4, 12, 12, is_dealt=True),
    ]


def test_a_data_set_that_fills_no_block_is_refused_with_its_numbers() -> None:
    """The sampler itself divides by the length of an empty pass."""
    module = samplers()
    watched(module)
    sampler = module.MegatronPretrainingRandomSampler(None, 3, 0, 2, 0, 2, False)
    with pytest.raises(RefusedError, match=r"has 3 samples.*draw 4 at once.*smaller DP"):
        next(iter(sampler))


def test_a_rank_without_data_draws_and_says_nothing_and_a_scripts_own_loader_is_not_known() -> None:
    alone, own = watched(), watched(train=Rerun(iter(())))
    assert (alone.step(), alone.sources(FLAGS)) == ((), {})
    assert own.step() is None


def test_energon_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.energon", types.ModuleType("megatron.energon"))
    watched()
    with pytest.raises(RefusedError, match="Energon: its loaders keep their place by rank"):
        watched(train=Rerun(iter(())))


# ------------------------------------------------------------------ facts of the data

BLEND = ["1", "/en/text", "3", "/de/text"]
FLAGS = {"seed": 1, "split": "9,1,0", "data_path": BLEND}


class Part(SimpleNamespace):
    """As a ``GPTDataset``: it has its files inside."""

    samples = 90

    def __len__(self) -> int:
        return self.samples


def told(dataset: Any = range(90), size: int = 90, **flags: Any) -> Any:
    return facts_of({**FLAGS, **flags}, dataset, size)


def test_the_same_data_may_be_stated_otherwise(tmp_path: Path) -> None:
    (tmp_path / "blend").write_text("0.25 /en/text\n0.75 /de/text\n")
    train = {"train": BLEND, "valid": BLEND, "test": BLEND}
    (tmp_path / "splits").write_text(json.dumps(train))
    for same in (
        {"data_path": ["0.5", "/x/en/text", "1.5", "/x/de/text"]},
        {"data_path": None, "data_args_path": str(tmp_path / "blend")},
        {"data_path": None, "per_split_data_args_path": str(tmp_path / "splits")},
        {"split": "90, 10"},
    ):
        assert not difference(told(), told(**same)), same


@pytest.mark.parametrize("tree", ["scalai://gpt", "/mnt/gpt"])
def test_data_that_are_mounted_are_what_they_were(tree: str) -> None:
    for names in (("en/source", "de/source"), ("all/source/en", "all/source/de")):
        prefixes = [f"{tree}/dataset/{name}/text" for name in names]
        assert not difference(told(), told(data_path=["1", prefixes[0], "3", prefixes[1]]))
        assert difference(told(), told(data_path=["1", prefixes[1], "3", prefixes[0]]))


def test_other_data_are_others_wherever_they_are_stated(tmp_path: Path) -> None:
    (tmp_path / "blend").write_text(" ".join(BLEND).replace("de", "fr"))
    for other in (
        {"data_path": ["1", "/de/text", "3", "/en/text"]},
        {"data_path": ["1", "/en/text", "4", "/de/text"]},
        {"data_path": ["/en/text", "/de/text"]}, {"data_path": None},
        {"data_path": None, "data_args_path": str(tmp_path / "blend")},
        {"split": "8,2,0"}, {"seed": 2},
    ):  # fmt: skip
        assert difference(told(), told(**other)), other


def test_data_that_are_shuffled_for_more_epochs_are_others_and_a_longer_blend_is_not() -> None:
    longer = {"train_iters": 900}
    assert difference(told(range(90)), told(range(180), 180, **longer))
    blend = SimpleNamespace(datasets=[range(90), range(40)])
    assert not difference(told(blend, 80), told(blend, 120, **longer))
    alone = [Part(dataset=range(30)) for _ in range(2)]
    alone[1].samples *= 2
    assert difference(told(alone[0]), told(alone[1])), "its samples count, not its documents"
    wrapped = SimpleNamespace(dataset=blend)
    assert not difference(told(blend, 80), told(wrapped, 80))
    assert not difference(told(range(90), mock_data=True), told(range(180), mock_data=True))
    assert not difference(told(None, 90, train_iters=9), told(None, 180, train_iters=18))
    assert difference(told(None, 90, train_iters=9), told(None, 180, train_iters=9))


@pytest.mark.parametrize("path", ["none", "torn"])
def test_a_list_that_cannot_be_read_is_left_to_the_framework(tmp_path: Path, path: str) -> None:
    (tmp_path / "torn").write_text("{")
    stated: dict[str, Any] = {"data_path": None, "per_split_data_args_path": str(tmp_path / path)}
    assert "blend" not in told(**stated)


def sources(total: int = 96, **flags: Any) -> Any:
    draws, _ = built(samplers(), 0, 2, 0, total=total)
    return draws.sources({**FLAGS, "train_iters": 12, **flags})


@pytest.mark.parametrize("other", [{"total": 97}, {"seed": 8}])
def test_training_data_that_became_another_one_between_rounds_is_refused(other: Any) -> None:
    ledger = Ledger.begun(0, 0).with_source(TRAIN, sources()[TRAIN])
    later = Consumption("run-2", {"dp": 4})
    later.restore(ledger.to_json(), 0, 0)
    later.know(sources())
    later.know(sources(data_path=["1", "/x/en/text", "3", "/x/de/text"]))  # it has moved
    with pytest.raises(RefusedError, match="data set 'train' is another one"):
        later.know(sources(**other))


# ------------------------------------------------------------------ a random order


def theirs(
    samples: int, consumed: int, size: int, rank: int, dp: int, *, is_sharded: bool
) -> Iterator[list[int]]:
    """Yield what the sampler itself draws, over all epochs."""
    block = size * dp
    while True:
        active = samples - samples % block
        epoch, offset = consumed // active, consumed % active
        generator = torch.Generator()
        generator.manual_seed(epoch)
        if is_sharded:
            bucket = samples // block * size
            order = torch.randperm(bucket, generator=generator).tolist()
            drawn = [rank * bucket + x for x in order[offset // dp :]]
        else:
            full = samples // size * size
            order = torch.randperm(full, generator=generator).tolist()
            drawn = order[offset:][rank::dp]
        for begin in range(0, len(drawn) - size + 1, size):
            consumed += block
            yield drawn[begin : begin + size]


def ours(
    first: ShuffledBlocks, consumed: int, size: int, rank: int, dp: int, dataset: Any = None
) -> Iterator[list[int]]:
    sampler = SimpleNamespace(
        dataset=dataset, consumed_samples=consumed, micro_batch_size=size, data_parallel_rank=rank,
        data_parallel_size=dp,
    )  # fmt: skip
    while True:
        yield from micro_batches(sampler, first)


SIZES = [(96, 2, 3), (100, 2, 4), (37, 3, 2), (12, 1, 4), (13, 1, 1)]


@pytest.mark.parametrize("is_sharded", [True, False])
@pytest.mark.parametrize(("samples", "size", "dp"), SIZES)
def test_at_the_first_degrees_the_order_is_the_samplers_own(
    samples: int, size: int, dp: int, is_sharded: bool
) -> None:
    """But for ends of an epoch where replicas of its own would draw unequally often."""
    first = ShuffledBlocks(samples, size, dp, is_sharded)
    if not is_sharded and samples // size * size != first.length:
        pytest.skip("its replicas part at the end of the first epoch")
    for rank in range(dp):
        expected = islice(theirs(samples, 0, size, rank, dp, is_sharded=is_sharded), 60)
        assert list(islice(ours(first, 0, size, rank, dp), 60)) == list(expected)


@pytest.mark.parametrize("is_sharded", [True, False])
@pytest.mark.parametrize(("samples", "size", "dp"), SIZES)
def test_a_job_that_changes_draws_what_one_that_does_not_does(
    samples: int, size: int, dp: int, is_sharded: bool
) -> None:
    first, batch, consumed = ShuffledBlocks(samples, size, dp, is_sharded), 24, 0

    def step(each: int, ranks: int) -> Counter[int]:
        """Return the samples of the next step, of all ranks."""
        draws = [ours(first, consumed, each, rank, ranks) for rank in range(ranks)]
        micro = [m for draw in draws for m in islice(draw, batch // (each * ranks))]
        return Counter(sample for each in micro for sample in each)

    degrees = [(size, dp), (1, 4), (2, 3), (4, 1), (1, 2)]
    for now in [each for each in degrees if batch % (each[0] * each[1]) == 0]:
        for _ in range(3):
            assert step(*now) == step(1, 1)
            consumed += batch


@pytest.mark.parametrize("is_sharded", [True, False])
def test_an_epoch_has_each_sample_once(is_sharded: bool) -> None:
    first = ShuffledBlocks(100, 2, 4, is_sharded)
    for epoch in (0, 3):
        drawn = [s for each in islice(ours(first, 96 * epoch, 1, 0, 1), 96) for s in each]
        assert len(set(drawn)) == first.length == 96


def test_data_that_is_seeded_by_epoch_needs_whole_blocks() -> None:
    epochs: list[int] = []
    dataset = type("RandomSeedDataset", (), {"set_epoch": lambda self, n: epochs.append(n)})()
    first = ShuffledBlocks(12, 1, 4, is_sharded=False)
    assert len(list(islice(ours(first, 0, 2, 0, 2, dataset), 6))) == 6 and epochs == [0, 1]
    with pytest.raises(RefusedError, match="an epoch has 12 samples"):
        next(ours(first, 0, 4, 0, 2, dataset))  # before anything is drawn


# ------------------------------------------------------------------ a whole validation

BATCH = 12


class Rows(Dataset[int]):
    """A validation set of so many rows, of which each is its own number."""

    def __init__(self, size: int, split: str = "valid") -> None:
        self.size, self.index_split = size, SimpleNamespace(name=split)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> int:
        return row


def loader_of(rows: Rows, dp: int, rank: int, micro: int, *, is_full: bool = True) -> Any:
    """Return a loader of the module of loaders, hooked:
    megatron/training/datasets/data_samplers.py (0.16)."""
    job = SimpleNamespace(global_batch_size=BATCH, micro_batch_size=micro, full_validation=is_full)

    def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
        size = len(dataset) - len(dataset) % (micro * dp)
        dealt = [
            [*range(begin + rank * micro, begin + (rank + 1) * micro)]
            for begin in range(consumed_samples, size, micro * dp)
        ]
        return DataLoader(dataset, batch_sampler=dealt)

    module = SimpleNamespace(
        build_pretraining_data_loader=build_pretraining_data_loader, get_args=lambda: job,
        mpu=SimpleNamespace(
            get_data_parallel_world_size=lambda: dp, get_data_parallel_rank=lambda: rank
        ),
    )  # fmt: skip
    hook_samplers(module)
    return module.build_pretraining_data_loader(rows, 0)


def evaluated(rows: int, dp: int, micro: int, evaluations: int) -> list[Counter[int]]:
    """Return how often each row is in each of some evaluations."""
    loaders = [loader_of(Rows(rows), dp, rank, micro) for rank in range(dp)]
    drawn, steps = [iter(loader.batch_sampler) for loader in loaders], {*map(len, loaders)}
    assert len(steps) == 1, "ranks make equally many steps"
    passes = steps.pop() * Shares(BATCH // micro, dp).passes
    found = []
    for _ in range(evaluations):
        batches = [next(it) for it in drawn for _ in range(passes)]
        found.append(Counter(chain(*(each for each in batches if not isinstance(each, Filler)))))
    return found


@pytest.mark.parametrize("rows", [1, 5, 10, 12, 24, 36])
def test_a_whole_validation_has_each_row_equally_often_at_any_layout(rows: int) -> None:
    for dp, micro in ((1, 1), (2, 1), (3, 2), (4, 3), (12, 1), (5, 1), (5, 2)):
        for found in evaluated(rows, dp, micro, evaluations=3):
            assert set(found) == set(range(rows))
            assert len(set(found.values())) == 1


def test_a_whole_validation_of_many_rows_takes_few_passes_and_is_the_same_at_any_layout() -> None:
    rows = MANY_STEPS * BATCH + 1
    first, *others = [
        found
        for dp, micro in ((1, 1), (3, 2), (12, 1))
        for found in evaluated(rows, dp, micro, evaluations=2)
    ]
    assert set(first) == set(range(rows)) and first.total() < rows + BATCH
    assert all(found == first for found in others)


def test_other_data_is_dealt_as_megatron_does() -> None:
    assert len(loader_of(Rows(10, "train"), 3, 0, 1)) == 3
    assert len(loader_of(Rows(10), 3, 0, 1, is_full=False)) == 3


def test_a_sample_of_fim_is_permuted_alike_in_any_order_of_accesses() -> None:
    class GPTFIMDataset:
        def __init__(self) -> None:
            self.config = SimpleNamespace(random_seed=2**32 - 3)
            self.np_rng = np.random.RandomState(seed=1)

        def _query_document_sample_shuffle_indices(self, idx: int) -> list[int]:
            return [idx, *self.np_rng.randint(0, 2**30, 4).tolist()]

    hook_fim(SimpleNamespace(GPTFIMDataset=GPTFIMDataset))
    one, other = GPTFIMDataset(), GPTFIMDataset()
    forwards = {i: one._query_document_sample_shuffle_indices(i) for i in range(8)}
    backwards = {i: other._query_document_sample_shuffle_indices(idx=i) for i in range(7, -1, -1)}
    assert forwards == backwards
    assert len({tuple(found[1:]) for found in forwards.values()}) == 8
