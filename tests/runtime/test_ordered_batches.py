"""The samples of a worker: the sampler for loops of one's own, with one order at any degrees from
the consumed samples alone, and the ledger: what it takes up, what it refuses, and the way out."""

import json
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import scalai
from scalai.core.dataset.drawn import Draw, Number
from scalai.core.dataset.ledger import Ledger, Lost, judge
from scalai.core.dataset.order import GlobalBatches
from scalai.core.errors import RefusedError, UsageError
from scalai.runtime.consumption import LEDGER, Consumption
from scalai.runtime.session import Session

RAMP = scalai.BatchRamp(4, 4, 60, 12)
WIKI, CODE = scalai.Shuffled(50, 1, "wiki"), scalai.Shuffled(21, 2, "code", whole=4)
BLEND = scalai.Blend((WIKI, CODE), (3, 1))


def session(dp: int = 1, rank: int = 0, consumed: int = 0) -> Session:
    """Return an inert session of a round."""
    job = Session()
    job.rank, job.world_size, job.dp, job.consumed_samples = rank, dp, dp, consumed
    return job


class Numbers(Dataset[int]):
    """A data set whose samples are their numbers."""

    def __len__(self) -> int:
        return 71

    def __getitem__(self, index: int) -> int:
        return index


def step_of(dp: int, consumed: int, *, workers: int = 0) -> tuple[list[int], int]:
    """Return what the replicas draw for one step, without fillers, and its size."""
    drawn: list[int] = []
    for rank in range(dp):
        job = session(dp, rank, consumed)
        batches = scalai.OrderedBatches(job, BLEND, RAMP, micro_batch_size=2, is_weighted=dp == 3)
        loader: Any = DataLoader(Numbers(), batch_sampler=batches, num_workers=workers)
        for _, batch in zip(job.passes, loader, strict=False):
            drawn += [] if job.is_filler else batch.tolist()
    return drawn, batches.now.global_batch_size


def test_a_dp_that_does_not_divide_the_batch_is_refused() -> None:
    batches = scalai.OrderedBatches(session(3), BLEND, 8)
    with pytest.raises(RefusedError, match="dp=3 does not divide"):
        next(iter(batches))


# ------------------------------------------------------------------ uneven shares


def weighs(job: Session, batch: int = 8, **more: Any) -> scalai.OrderedBatches:
    return scalai.OrderedBatches(job, WIKI, batch, is_weighted=True, **more)


@pytest.mark.parametrize(
    ("batch", "dp", "decided", "passes"),
    [(8, 3, None, 3), (8, 3, 2, 2), (16, 5, 2, 2), (12, 4, 2, 2), (8, 4, None, 1), (8, 8, None, 1)],
)
def test_a_mean_over_weighted_passes_and_replicas_is_one_over_the_samples(
    batch: int, dp: int, decided: int | None, passes: int
) -> None:
    values = np.random.default_rng(1).standard_normal(50)
    drawn, mean = [], 0.0
    for rank in range(dp):
        job = session(dp, rank, consumed=20)
        job.micro_batch_size = decided
        given, made = iter(weighs(job, batch, micro_batch_size=4)), list[list[int]]()
        assert job.passes == passes
        for number in job.passes:
            made.append(next(given))
            mean += values[made[-1]].mean() * job.weight / job.passes / dp
            if job.is_filler:
                assert job.weight == 0 and number == passes - 1 and made[-1] == made[0]
            else:
                drawn += made[-1]
    assert drawn == WIKI.samples_at(np.arange(20, 20 + batch)).tolist()
    assert mean == pytest.approx(values[drawn].mean(), rel=1e-12)


def test_replicas_with_other_numbers_of_passes_weigh_each_sample_alike() -> None:
    model, total = torch.nn.Linear(1, 1), torch.zeros(())
    seen: list[int] = []
    for rank, passes in enumerate((5, 5, 2)):
        job = session(3, rank)
        job.paces = (100, 100, 300)
        batches = weighs(job, 12, micro_batch_size=1, may_differ=True)
        assert int(job.passes) == passes
        for _, samples in zip(job.passes, batches, strict=False):
            assert not job.is_filler
            loss = model(torch.tensor([[float(each)] for each in samples])).mean()
            total = total + loss * job.weight / job.passes / job.dp
            seen += samples
    assert sorted(seen) == sorted(step_samples(12))
    whole = model(torch.tensor([[float(each)] for each in seen])).mean()
    assert total.item() == pytest.approx(whole.item(), rel=1e-6)


def step_samples(batch: int) -> list[int]:
    """Return the samples of a first step on one replica."""
    return [each for samples in [next(iter(weighs(session(), batch)))] for each in samples]


def test_shares_are_even_without_a_loops_word_that_passes_may_differ(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for job, says, why in (
        (session(2), {}, "may_differ=True"),
        (session(4), {"may_differ": True, "dp_rank": 0}, "only axis"),
    ):
        job.dp, job.paces = 2, (100, 300)
        weighs(job, 8, micro_batch_size=1, **says)
        assert int(job.passes) == 4 and why in caplog.text
    with pytest.raises(UsageError, match="is_weighted=True"):
        scalai.OrderedBatches(session(), BLEND, 8, may_differ=True)


def test_even_shares_weigh_exactly_one() -> None:
    job = session(4, 1)
    weighs(job)
    assert [(job.weight, job.is_filler) for _ in job.passes] == [(1.0, False)]
    assert type(deepcopy(job.passes)) is int, "as it is logged, or sent to other ranks"


def test_a_loop_that_says_nothing_has_even_shares_and_may_go_over_its_passes() -> None:
    job = session(2)
    next(iter(scalai.OrderedBatches(job, WIKI, 8)))
    assert [(number, job.weight) for number in job.passes] == [(0, 1.0)]
    assert not job.boundary(samples=8)


@pytest.mark.fault
def test_uneven_shares_are_refused_without_a_loops_word_or_against_its_state() -> None:
    job = session(3)
    with pytest.raises(RefusedError, match=r"global_batch_size=8, .*does not say is_weighted=True"):
        next(iter(scalai.OrderedBatches(job, WIKI, 8)))
    batches = weighs(job)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))
    job.attach(scalai.ReplicatedState(model, torch.optim.SGD(model.parameters(), 0.1)))
    with pytest.raises(RefusedError, match=r"shares are even: SyncBatchNorm \(1\) counts"):
        next(iter(batches))
    with pytest.raises(RefusedError, match="dp=3 is larger than global_batch_size=2"):
        next(iter(weighs(session(3), 2)))


@pytest.mark.parametrize(
    ("says", "why_even", "told"), [(True, "", True), (True, "batch norm", False),
                                   (False, "", False), (None, "", False)],
)  # fmt: skip
def test_a_loops_word_holds_for_the_rounds_whose_script_gives_it(
    says: bool | None, why_even: str, told: bool
) -> None:
    job = session()
    job.facts, job.why_even = {"is_weighted": True, "batch_sizes": [4]}, why_even
    if says is not None:
        scalai.OrderedBatches(job, WIKI, RAMP, is_weighted=says)
    sizes = [4] if says is None else [4, 8, 12]
    assert job._facts() == {"is_weighted": told, "batch_sizes": sizes}


def step_of_weights(job: Session, given: Any, *, asks: int, ends: bool = True) -> None:
    for number in job.passes:
        next(given)
        if number < asks:
            assert job.weight
        if not ends:
            break


@pytest.mark.fault
@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize(
    ("asks", "ends", "found"),
    [(0, True, "3 of 3 passes asked"), (2, True, "1 of 3 passes asked"),
     (3, False, "0 passes were made .* not ended")],
)  # fmt: skip
def test_a_loop_that_says_that_it_weighs_and_does_not_is_refused_at_any_degrees(
    dp: int, asks: int, ends: bool, found: str
) -> None:
    job = session(dp)
    given = iter(weighs(job, 3 * dp, micro_batch_size=1))
    step_of_weights(job, given, asks=3)
    assert not job.boundary(samples=3 * dp)
    step_of_weights(job, given, asks=asks, ends=ends)
    if not ends:
        next(given), next(given)
    with pytest.raises(RefusedError, match=f"step 2 {found}.*Multiply the loss"):
        job.boundary(samples=3 * dp)


def test_a_rank_without_batches_goes_over_the_passes_alone() -> None:
    job = session(3)
    weighs(job)
    list(job.passes)
    assert not job.boundary(samples=8)


def test_the_passes_of_an_evaluation_within_a_step_are_its_own() -> None:
    job = session(dp=3, rank=2)
    given = iter(weighs(job))
    seen = scalai.OrderedBatches(
        job, scalai.Shuffled(12, is_shuffled=False, name="seen"), 4, samples=12,
        is_training=False, is_weighted=True,
    )  # fmt: skip
    looked = iter(seen)
    weights = []
    for _ in job.passes:
        next(given)
        if _ == 0:
            weights += [job.weight for _ in seen.passes]
            assert [next(looked) for _ in seen.passes] == [[3], [3]]
        weights.append(job.weight)
    assert weights == [1.5, 0, 9 / 8, 9 / 8, 0]
    assert not job.boundary(samples=8)


def test_the_weight_of_no_pass_is_refused() -> None:
    job = session()
    with pytest.raises(UsageError, match=r"make scalai\.OrderedBatches before"):
        list(job.passes)
    weighs(job)
    list(job.passes)
    with pytest.raises(UsageError, match=r"ask within `for _ in job\.passes`"):
        _ = job.weight


def test_a_rank_whose_replica_is_not_known_is_refused() -> None:
    job = session(4)
    job.dp = 2
    with pytest.raises(RefusedError, match="Say dp_rank="):
        scalai.OrderedBatches(job, BLEND, 8)
    assert len(next(iter(scalai.OrderedBatches(job, BLEND, 8, dp_rank=1)))) == 4


def test_a_second_order_of_steps_is_refused() -> None:
    job = session()
    scalai.OrderedBatches(job, WIKI, 8)
    scalai.OrderedBatches(job, scalai.Shuffled(50, 1, "wiki"), 8)  # the same one
    with pytest.raises(RefusedError, match=r"from 'wiki' already.*'code'. Say is_training=False"):
        scalai.OrderedBatches(job, CODE, 8)


def test_an_evaluation_leaves_the_ledger_alone_and_begins_at_its_first_sample() -> None:
    job = session(dp=2, rank=1, consumed=24)
    trained = scalai.OrderedBatches(job, WIKI, 8)
    seen = scalai.Shuffled(12, is_shuffled=False, name="seen")
    batches = scalai.OrderedBatches(job, seen, 4, micro_batch_size=2, samples=12, is_training=False)
    for _ in range(2):
        assert list(batches) == [[2, 3], [6, 7], [10, 11]]
    job.consumed_samples = 32
    assert next(iter(batches)) == [2, 3] and batches.now.global_batch_size == 4
    assert next(iter(trained)) == WIKI.samples_at(np.arange(36, 40)).tolist()
    with pytest.raises(RefusedError, match="from 'wiki' already"):
        scalai.OrderedBatches(job, CODE, 8)


def test_over_any_degrees_each_step_draws_its_places_of_the_order() -> None:
    consumed, number = 0, 0
    for dp in [1, 2, 3, 4, 2, 3, 1, 4, 4, 1, 2, 3, 2, 1, 4, 1] * 2:
        drawn, size = step_of(dp, consumed)
        start, stop = GlobalBatches.of(RAMP).places(number)
        assert (start, stop) == (consumed, consumed + size)
        assert drawn == BLEND.samples_at(np.arange(start, stop)).tolist()
        consumed, number = stop, number + 1
    assert consumed > 100, "passes and stages of the ramp lie behind it"


def test_workers_of_a_loader_read_ahead_and_change_nothing() -> None:
    assert step_of(2, 20, workers=2) == step_of(1, 20)


@pytest.mark.parametrize("consumed", [0, 1, 7, 49, 50, 51])
def test_a_round_may_begin_at_any_sample(consumed: int) -> None:
    drawn, size = step_of(1, consumed)
    assert drawn == BLEND.samples_at(np.arange(consumed, consumed + size)).tolist()


@pytest.mark.parametrize(("given", "decided", "expected"), [(4, None, 4), (4, 2, 2), (None, 3, 3)])
def test_micro_batches_are_those_that_the_job_has_decided_on(
    given: int | None, decided: int | None, expected: int
) -> None:
    job = session(2)
    job.micro_batch_size = decided
    batches = scalai.OrderedBatches(job, WIKI, 24, micro_batch_size=given)
    assert batches.now.micro_batch_size == expected == len(next(iter(batches)))


def test_no_batch_begins_that_would_go_beyond_the_training() -> None:
    found = list(scalai.OrderedBatches(session(), WIKI, 8, micro_batch_size=8, samples=30))
    assert len(found) == 3


def consuming(order: Any, sizes: Sequence[int]) -> Consumption:
    found = Consumption("run-1", {"dp": 1})
    found.order = order
    found.know(order.facts())
    found.begin(0, 0)
    consumed = 0
    for step, size in enumerate(sizes):
        consumed += size
        found.step_ended(step + 1, consumed)
    return found


def goes_on(saved: Consumption, order: Any) -> Consumption:
    """Return a later round with the ledger of an earlier one, which draws in this order."""
    assert saved.ledger is not None
    found = Consumption("run-2", {"dp": 2})
    found.order = order
    found.know(order.facts())
    found.restore(saved.scalars()[LEDGER], *saved.ledger.at)
    return found


def test_the_ledger_has_the_places_of_each_data_set() -> None:
    found = goes_on(consuming(BLEND, [4, 4, 8, 12]), BLEND)
    found.step_ended(5, 40)
    ledger = found.ledger
    assert ledger is not None and judge(ledger, 5, 40).is_kept
    assert {each.data_set: each.samples for each in ledger.passes if each.data_set == "wiki"} == {
        "wiki": 30
    }
    assert sum(each.samples for each in ledger.passes if each.data_set == "code") == 10


CHANGED = [
    (scalai.Blend((scalai.Shuffled(51, 1, "wiki"), CODE), (3, 1)), r"size=51 \(it was 50\)"),
    (scalai.Blend((scalai.Shuffled(50, 9, "wiki"), CODE), (3, 1)), r"seed=9 \(it was 1\)"),
    (scalai.Blend((WIKI, CODE), (2, 1)), r"weight="),
    (scalai.Blend((WIKI, scalai.Shuffled(21, 2, "code")), (3, 1)), r"whole=1 \(it was 4\)"),
]


@pytest.mark.fault
@pytest.mark.parametrize(("order", "what"), CHANGED)
def test_a_data_set_that_changed_between_rounds_is_refused_at_the_start(
    order: Any, what: str
) -> None:
    with pytest.raises(RefusedError, match=f"another one than.*{what}.*scalai resume.*reshard"):
        goes_on(consuming(BLEND, [4, 4]), order)
    found = goes_on(consuming(BLEND, [4, 4]), BLEND)
    with pytest.raises(RefusedError, match="'wiki' is another one"):
        found.know({"wiki": {"size": 3}})  # known only after the state


def test_what_a_script_says_of_its_draws_goes_before_the_order() -> None:
    found = consuming(BLEND, [])
    found.note([Draw("mine", Number(0), 0, 4)])
    found.step_ended(1, 4)
    assert isinstance(found.ledger, Ledger)
    assert [each.data_set for each in found.ledger.passes] == ["mine"]


@pytest.mark.fault
@pytest.mark.parametrize("samples", [32, 4, 0])
def test_a_step_that_consumes_other_samples_than_its_batch_has_is_refused_at_once(
    samples: int,
) -> None:
    job = session()
    batches = scalai.OrderedBatches(job, WIKI, 8, micro_batch_size=8)
    next(iter(batches))
    with pytest.raises(RefusedError, match=f"0 to {samples}, and .* from sample 0 on has 8"):
        job.boundary(samples=samples)


@pytest.mark.fault
def test_a_step_is_refused_before_all_of_its_micro_batches_were_given() -> None:
    job = session()
    drawn = iter(scalai.OrderedBatches(job, WIKI, 8, micro_batch_size=4))
    for step in range(3):
        next(drawn)
        if step != 1:
            next(drawn)
            job.boundary(samples=8)
        else:
            with pytest.raises(RefusedError, match="samples were given up to 8 alone"):
                job.boundary(samples=8)
            next(drawn)


def test_a_growing_batch_and_a_rank_without_a_loader_are_taken() -> None:
    job, idle = session(), session()
    drawing, silent = (scalai.OrderedBatches(each, WIKI, RAMP) for each in (job, idle))
    drawn = iter(drawing)
    for _ in range(12):
        for each, batches in ((job, drawing), (idle, silent)):
            size = batches.now.global_batch_size
            if each is job:
                next(drawn)
            assert not each.boundary(samples=size)
    assert job.consumed_samples == idle.consumed_samples > 40


# ------------------------------------------------------------------ the ledger


def trained(steps: int = 4) -> Consumption:
    found = Consumption("run-1", {"dp": 2})
    found.begin(0, 0)
    for step in range(1, steps + 1):
        found.note([Draw("train", Number(0), 3 * step - 3, 3 * step)])
        found.step_ended(step, 3 * step)
    return found


def saved(steps: int = 4) -> Any:
    return json.loads(json.dumps(trained(steps).scalars()[LEDGER]))


def test_the_next_round_goes_on_with_it_and_knows_what_was_lost() -> None:
    found = Consumption("run-3", {"dp": 1})
    found.restore(saved(), 4, 12, [Lost("run-2", 4, 6)])
    assert found.ledger is not None and found.ledger.lost == (Lost("run-2", 4, 6),)
    assert [each.round for each in found.ledger.stretches] == ["run-1", "run-3"]


@pytest.mark.fault
def test_a_state_without_one_begins_one_at_its_step() -> None:
    found = Consumption("run-2", {})
    found.restore(None, 7, 21)
    assert found.ledger is not None and found.ledger.since == (7, 21)


@pytest.mark.fault
@pytest.mark.parametrize(("step", "samples"), [(5, 15), (3, 9), (4, 13), (4, None)])
def test_a_state_at_another_place_than_its_ledger_is_refused_with_the_way_out(
    step: int, samples: int | None
) -> None:
    found = Consumption("run-2", {})
    with pytest.raises(RefusedError, match=r"ledger of samples at step 4 .*resume.*scalai reshard"):
        found.restore(saved(), step, samples)


@pytest.mark.fault
def test_a_torn_ledger_is_refused() -> None:
    torn = saved()
    torn["passes"][0]["taken"] = [0, 9]
    with pytest.raises(RefusedError, match="damaged: its digest"):
        Consumption("run-2", {}).restore(torn, 4, 12)


@pytest.mark.fault
@pytest.mark.parametrize("start", [9, 15])
def test_a_step_that_would_break_the_order_is_refused(start: int) -> None:
    draw = Draw("train", Number(0), start, start + 3)
    found = trained()
    found.note([draw])
    with pytest.raises(RefusedError, match=r"step 5 would break .*scalai reshard"):
        found.step_ended(5, 15)


def test_a_rank_that_draws_nothing_leaves_it_to_others() -> None:
    found = trained()
    found.note(())
    found.step_ended(5, 15)
    assert found.scalars() == {}


def test_counts_that_are_no_whole_numbers_are_not_counted() -> None:
    found = Consumption("run-1", {})
    found.begin(0, 0.5)
    found.step_ended(1, 1.5)
    assert found.ledger == Ledger.begun(0, None).with_round("run-1", {}).stepped(1, None)


def test_a_checkpoint_that_does_not_say_how_far_it_is_is_no_break() -> None:
    found = Consumption("run-1", {})
    found.begin(100, 0)
    value = json.loads(json.dumps(found.scalars()[LEDGER]))
    found.restore(value, 100, 0)
    found.note([Draw("train", Number(0), 400, 404, 800, 800)])
    found.step_ended(101, 404)
    assert found.ledger is not None and found.ledger.passes[0].unproven == 400
    assert judge(found.ledger, 101, 404).is_kept
