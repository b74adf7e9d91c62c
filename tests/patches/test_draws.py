"""What is read at Megatron-LM's samplers, on classes that give what its own do."""

import sys
import types
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from scalai.core.dataset.drawn import Draw, Number
from scalai.core.dataset.ledger import Ledger, difference, judge
from scalai.core.errors import RefusedError
from scalai.patches.megatron.samplers import TRAIN, TrainingDraws
from scalai.runtime.consumption import Consumption


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
