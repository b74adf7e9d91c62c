"""What is read at Megatron-LM's samplers, on classes that give what its own do."""

import sys
import types
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from scalai.core.dataset.drawn import Draw, Number
from scalai.core.dataset.ledger import Ledger, difference, judge
from scalai.core.dataset.order import ShuffledBlocks
from scalai.core.errors import RefusedError
from scalai.patches.megatron.samplers import (
    MANY_STEPS,
    TRAIN,
    TrainingDraws,
    hook_fim,
    hook_samplers,
    micro_batches,
)
from scalai.runtime.consumption import Consumption

pytestmark = pytest.mark.fault


def samplers() -> Any:
    """Return a module of samplers, as of megatron/training/datasets/data_samplers.py (0.16)."""

    class MegatronPretrainingSampler:
        def __init__(
            self, total_samples: int, consumed_samples: int, micro_batch_size: int,
            data_parallel_rank: int, data_parallel_size: int, drop_last: bool = True,
        ) -> None:  # fmt: skip
            self.total_samples, self.micro_batch_size = total_samples, micro_batch_size
            self.data_parallel_size = data_parallel_size
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

    return SimpleNamespace(**{
        cls.__name__: cls for cls in (MegatronPretrainingSampler, MegatronPretrainingRandomSampler)
    })  # fmt: skip


class Rerun:
    """Stands for RerunDataIterator."""

    def __init__(self, iterable: Iterator[Any]) -> None:
        self.iterable = iterable


def built(
    module: Any, consumed: int, dp: int, rank: int, workers: int = 0, *, total: int = 96,
    begins: int | None = None,
) -> tuple[TrainingDraws, Any]:  # fmt: skip
    """Return the watch of one rank, and its training iterator."""
    draws = TrainingDraws()
    draws.hook(module)

    def build() -> Any:
        place = consumed if begins is None else begins
        made = [
            module.MegatronPretrainingSampler(total, place, 2, rank, dp),
            module.MegatronPretrainingSampler(total, 0, 2, rank, dp),
        ]
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
            consumed = ledger.at[1] or 0
            draws, train = built(samplers(), consumed, dp, rank_of % dp)
            for _ in range(3):
                take(train, 8 // (2 * dp))
                drawn = draws.step()
                assert drawn and not list(ledger.objections(drawn))
                ledger = ledger.stepped(ledger.at[0] + 1, (ledger.at[1] or 0) + 8, drawn)
        assert judge(ledger, 9, 72).is_kept and ledger.passes[0].is_dealt
        ledgers.append(ledger)
    assert ledgers[0] == ledgers[1]


def test_a_loader_at_another_place_than_the_training_is_objected_to() -> None:
    ledger = Ledger.begun(0, 0).stepped(1, 8, [Draw("train", Number(0), 0, 8, 96)])
    for begins, text in ((0, "0:8 a second time"), (12, "8:12 are passed over")):
        draws, train = built(samplers(), begins, dp=2, rank=0)
        take(train, 2)
        assert text in " ".join(ledger.objections(draws.step() or ()))


def test_a_script_that_throws_a_batch_away_is_objected_to() -> None:
    draws, train = built(samplers(), 0, dp=2, rank=0)
    take(train, 3)
    assert "drew 12 samples and counts 8" in " ".join(
        Ledger.begun(0, 0).objections(draws.step() or (), 8)
    )


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
        again = (batch for _ in range(3) for batch in loader)
        return Rerun(again), None, None

    train, *_ = draws.build(8, build, (), {})
    take(train.iterable, 2)
    assert draws.step() == [
        Draw("train", Number(0), 8, 12, 12, 12, is_dealt=True),
        Draw("train", Number(1), 0, 4, 12, 12, is_dealt=True),
    ]  # fmt: skip


def test_a_data_set_that_fills_no_block_is_refused_with_its_numbers() -> None:
    """The sampler itself divides by the length of an empty pass."""
    draws, module = TrainingDraws(), samplers()
    draws.hook(module)
    sampler = module.MegatronPretrainingRandomSampler(None, 3, 0, 2, 0, 2, False)
    with pytest.raises(RefusedError, match=r"has 3 samples.*draw 4 at once.*smaller DP"):
        next(iter(sampler))


def test_a_rank_without_data_draws_nothing_and_a_loader_of_the_scripts_own_is_not_known() -> None:
    draws = TrainingDraws()
    draws.build(0, lambda: (None, None, None), (), {})
    assert draws.step() == ()
    draws.build(0, lambda: (Rerun(iter(())), None, None), (), {})
    assert draws.step() is None


def test_energon_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.energon", types.ModuleType("megatron.energon"))
    draws = TrainingDraws()
    draws.build(0, lambda: (None, None, None), (), {})
    with pytest.raises(RefusedError, match="Energon: its loaders keep their place by rank"):
        draws.build(0, lambda: (Rerun(iter(())), None, None), (), {})


FLAGS = {"seed": 7, "split": "9,1,0", "data_path": ["0.3", "/a/web", "0.7", "/a/code"]}


def told(total: int = 96, **flags: Any) -> Any:
    draws, _ = built(samplers(), 0, 2, 0, total=total)
    return draws.sources({**FLAGS, "train_iters": 12, **flags})


@pytest.mark.parametrize(
    "other",
    [
        {"total": 97}, {"seed": 8}, {"split": "8,1,1"},
        {"data_path": ["0.4", "/a/web", "0.6", "/a/code"]},
        {"data_path": ["0.3", "/a/other", "0.7", "/a/code"]}, {"data_path": None},
    ],
)  # fmt: skip
def test_training_data_that_became_another_one_between_rounds_is_refused(other: Any) -> None:
    ledger = Ledger.begun(0, 0).with_source(TRAIN, told()[TRAIN])
    later = Consumption("run-2", {"dp": 4})
    later.restore(ledger.to_json(), 0, 0)
    later.know(told())
    with pytest.raises(RefusedError, match="data set 'train' is another one"):
        later.know(told(**other))


def test_training_data_may_move_into_another_folder() -> None:
    moved = told(data_path=["0.3", "/b/c/web", "0.7", "/b/c/code"])
    assert not difference(told()[TRAIN], moved[TRAIN])


def test_a_rank_that_draws_nothing_says_nothing_of_the_data() -> None:
    draws = TrainingDraws()
    draws.build(0, lambda: (None, None, None), (), {})
    assert draws.sources(FLAGS) == {}


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


BATCH = 12


class Rows(Dataset[int]):
    """A validation set of so many rows, of which each is its own number."""

    def __init__(self, size: int, split: str = "valid") -> None:
        self.size, self.index_split = size, SimpleNamespace(name=split)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> int:
        return row


def loading_module(dp: int, rank: int, micro: int, **flags: Any) -> Any:
    """Return the module of loaders, hooked: megatron/training/datasets/data_samplers.py (0.16)."""
    job = SimpleNamespace(global_batch_size=BATCH, micro_batch_size=micro, **flags)

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
    return module


def evaluated(rows: int, dp: int, micro: int, evaluations: int) -> list[Counter[int]]:
    """Return how often each row is in each of some evaluations."""
    loaders = [
        loading_module(dp, rank, micro, full_validation=True).build_pretraining_data_loader(
            Rows(rows), 0
        )
        for rank in range(dp)
    ]
    drawn, steps = [iter(loader) for loader in loaders], {len(loader) for loader in loaders}
    assert len(steps) == 1, "ranks make equally many steps"
    passes = steps.pop() * BATCH // (micro * dp)
    return [
        Counter(chain.from_iterable(next(it).tolist() for it in drawn for _ in range(passes)))
        for _ in range(evaluations)
    ]


@pytest.mark.parametrize("rows", [1, 5, 10, 12, 24, 36])
def test_a_whole_validation_has_each_row_equally_often_at_any_layout(rows: int) -> None:
    for dp, micro in ((1, 1), (2, 1), (3, 2), (4, 3), (12, 1)):
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
    module = loading_module(3, 0, 1, full_validation=True)
    assert len(module.build_pretraining_data_loader(Rows(10, "train"), 0)) == 3
    module = loading_module(3, 0, 1, full_validation=False)
    assert len(module.build_pretraining_data_loader(Rows(10), 0)) == 3


def test_a_sample_of_fim_is_permuted_alike_in_any_order_of_accesses() -> None:
    class GPTFIMDataset:
        def __init__(self) -> None:
            self.config = SimpleNamespace(random_seed=2**32 - 3)
            self.np_rng = np.random.RandomState(seed=1)

        def _query_document_sample_shuffle_indices(self, idx: int) -> list[int]:
            return [idx, *self.np_rng.randint(0, 2**30, 4).tolist()]

    module = SimpleNamespace(GPTFIMDataset=GPTFIMDataset)
    hook_fim(module)
    one, other = GPTFIMDataset(), GPTFIMDataset()
    forwards = {i: one._query_document_sample_shuffle_indices(i) for i in range(8)}
    backwards = {i: other._query_document_sample_shuffle_indices(idx=i) for i in range(7, -1, -1)}
    assert forwards == backwards
    assert len({tuple(found[1:]) for found in forwards.values()}) == 8
