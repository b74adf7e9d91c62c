"""The ledger as a value: what it proves of random trainings, and that it finds what breaks them."""

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example as case
from hypothesis import given
from hypothesis import strategies as st

from scalai.core.dataset import ledger as module
from scalai.core.dataset.drawn import COUNTED, Draw, Number, split
from scalai.core.dataset.intervals import Intervals
from scalai.core.dataset.ledger import Ledger, Lost, judge
from scalai.core.degrees.batches import BatchRamp


def trained(ledger: Ledger, steps: int, batch: int = 4, length: int | None = None) -> Ledger:
    """Return the ledger after so many steps more, counted over passes of this length."""
    for _ in range(steps):
        step, samples = ledger.at[0] + 1, ledger.at[1] or 0
        draws = split("train", samples, samples + batch, length, is_dealt=True)
        assert not list(ledger.objections(draws))
        ledger = ledger.stepped(step, samples + batch, draws)
    return ledger


def verdict(ledger: Ledger) -> tuple[str, ...]:
    return judge(ledger, *ledger.at).breaks


def test_a_training_is_one_interval_however_often_it_changes() -> None:
    ledger = Ledger.begun(0, 0)
    for number, dp in enumerate((2, 4, 1, 3)):
        ledger = trained(ledger.with_round(f"run-{number + 1}", {"dp": dp}), 5, batch=12)
    (found,) = ledger.passes
    assert found.taken == Intervals.of((0, 240)) and not verdict(ledger)
    assert [(s.round, s.step, end) for s, end, _ in ledger.rounds()] == [
        ("run-1", 0, 5), ("run-2", 5, 10), ("run-3", 10, 15), ("run-4", 15, 20)
    ]  # fmt: skip


def test_a_job_without_a_ledger_begins_one_that_proves_nothing_of_before() -> None:
    ledger = trained(Ledger.begun(100, 400).with_round("run-1", {}), 3)
    assert ledger.passes[0].taken == Intervals.of((400, 412)) and not verdict(ledger)
    assert "steps 1 to 100 (400 samples) are unproven" in judge(ledger, 103, 412).notes[0]


def test_passes_that_are_whole_stand_as_one_and_a_step_may_wrap() -> None:
    ledger = trained(Ledger.begun(0, 0), 2500, batch=4, length=10)  # 1000 passes of 2.5 steps
    *_, whole, newest = ledger.passes
    assert (whole.first, whole.last, whole.count) == (Number(0), Number(998), 999)
    assert newest.first == Number(999) and newest.taken.end == 10 and not verdict(ledger)
    assert len(json.dumps(ledger.to_json())) < 1000


def test_repeats_of_an_epoch_that_no_one_sets_stand_as_one_too() -> None:
    ledger = Ledger.begun(0, 0)
    for number in range(12):
        draw = Draw("loader-0", Number(0, number), 0, 8, length=8, size=6)
        ledger = ledger.stepped(number + 1, 8 * (number + 1), [draw])
    assert [each.count for each in ledger.passes] == [11, 1] and not verdict(ledger)
    assert "filled with the first 2 samples" in " ".join(judge(ledger, 12, 96).notes)


def test_a_growing_batch_is_counted_as_it_grows() -> None:
    ramp, ledger = BatchRamp(2, 2, 24, 8), Ledger.begun(0, 0)
    while ledger.at[0] < 12:
        assert ledger.at[1] is not None
        ledger = trained(ledger, 1, batch=next(
            size for size in reversed(ramp.sizes) if ledger.at[1] >= 8 * ramp.sizes.index(size)
        ))  # fmt: skip
    assert ledger.passes[0].taken == Intervals.of((0, ledger.at[1] or 0)) and not verdict(ledger)


@pytest.mark.parametrize(
    ("draw", "text"),
    [
        (Draw("train", Number(1), 8, 12, 20), "samples 8:12 a second time"),
        (Draw("train", Number(1), 10, 18, 20), "samples 10:12 a second time"),
        (Draw("train", Number(1), 16, 20, 20), "samples 12:16 are passed over"),
        (Draw("train", Number(2), 4, 8, 20), "pass 2: samples 0:4 are passed over"),
        (Draw("train", Number(0), 0, 4, 20), "pass 0: samples 0:4 a second time"),
        (Draw("train", Number(1), 12, 24, 20), "samples to 24 of a pass of 20"),
    ],
)  # fmt: skip
def test_what_breaks_the_order_is_objected_to_and_found_later(draw: Draw, text: str) -> None:
    ledger = trained(Ledger.begun(0, 0), 8, batch=4, length=20)
    ledger = trained(ledger, 0)
    assert text in " ".join(ledger.objections([draw]))
    broken = ledger.stepped(9, 32 + draw.stop - draw.start, [draw])
    assert verdict(broken)


def test_of_whole_passes_that_stand_as_one_any_is_known() -> None:
    ledger = trained(Ledger.begun(0, 0), 25, batch=4, length=10)
    draw = Draw("train", Number(3), 4, 8, 10, 10, is_dealt=True)
    assert "pass 3: samples 4:8 a second time" in " ".join(ledger.objections([draw]))
    assert "samples 4:8 were seen twice" in " ".join(verdict(ledger.stepped(26, 104, [draw])))


def test_the_rest_of_a_pass_that_the_script_leaves_is_told_and_no_break() -> None:
    ledger = trained(Ledger.begun(0, 0), 2, batch=4, length=20)
    ledger = ledger.stepped(3, 12, [Draw("train", Number(1), 0, 4, 20, 20, is_dealt=True)])
    found = judge(ledger, 3, 12)
    assert found.is_kept and found.notes == (
        "train, pass 0: samples 8:20 were left when the next pass began",
    )


def test_passes_that_a_script_breaks_off_at_one_place_stand_as_one_too() -> None:
    ledger = Ledger.begun(0, 0)
    for epoch in range(9):
        for start in (0, 4):
            draw = Draw("train", Number(epoch), start, start + 4, 10, 10, is_dealt=True)
            assert not list(ledger.objections([draw]))
            ledger = ledger.stepped(ledger.at[0] + 1, (ledger.at[1] or 0) + 4, [draw])
    assert [each.count for each in ledger.passes] == [8, 1] and not verdict(ledger)


def test_without_draws_samples_are_counted_and_it_is_said() -> None:
    ledger = Ledger.begun(0, 0).stepped(1, 3).stepped(2, 6)
    assert ledger.passes[0].data_set == COUNTED and ledger.passes[0].samples == 6
    assert "counted, not seen at a sampler" in judge(ledger, 2, 6).notes[0]
    assert Ledger.begun(0, None).stepped(1, None).passes == ()


def test_lost_steps_are_kept_and_their_repeat_is_told() -> None:
    saved = trained(Ledger.begun(0, 0).with_round("run-1", {"dp": 2}), 10)
    lost = [Lost("run-1", 10, 15), Lost("run-2", 10, 12)]
    again = saved.with_round("run-3", {"dp": 1}, lost)
    assert "none of them done again" in judge(again, 10, 40).notes[0]
    again = trained(again, 3)
    notes = judge(again, 13, 52).notes
    assert notes == (
        "steps 11 to 15 of round run-1 were lost, 3 of them done again so far",
        "steps 11 to 12 of round run-2 were lost and done again",
    )
    assert not verdict(trained(again, 9)) and again.with_round("run-4", {}, lost).lost == again.lost


def test_what_a_later_generation_of_the_same_round_has_was_not_lost() -> None:
    later = trained(Ledger.begun(0, 0).with_round("run-1", {}), 14)
    assert later.with_round("run-3", {}, [Lost("run-1", 10, 15)]).lost == (Lost("run-1", 14, 15),)
    assert later.with_round("run-3", {}, [Lost("run-1", 10, 14)]).lost == ()


def test_of_many_rounds_the_oldest_stand_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_STRETCHES", 3)
    ledger = Ledger.begun(0, 0)
    for number in range(6):
        ledger = trained(ledger.with_round(f"run-{number}", {"dp": 1}), 2)
    assert [(s.round, s.step, end) for s, end, _ in ledger.rounds()] == [
        ("earlier rounds", 0, 8), ("run-4", 8, 10), ("run-5", 10, 12)
    ]  # fmt: skip
    assert not verdict(ledger)


@pytest.mark.parametrize("step", [9, 11])
def test_a_ledger_of_another_step_than_the_state_is_a_break(step: int) -> None:
    assert "its ledger of step 10" in judge(trained(Ledger.begun(0, 0), 10), step, 40).breaks[0]


def test_a_count_that_its_draws_do_not_make_up_is_a_break() -> None:
    ledger = trained(Ledger.begun(0, 0), 2)
    assert "the state counts 9 samples" in judge(ledger, 2, 9).breaks[0]
    assert "9 samples were counted" in judge(replace(ledger, at=(2, 9)), 2, 9).breaks[0]


def example() -> Any:
    ledger = trained(Ledger.begun(0, 0).with_round("run-1", {"tp": 2, "dp": 1}), 6, length=10)
    return json.loads(json.dumps(ledger.with_round("run-2", {}, [Lost("run-1", 6, 9)]).to_json()))


def test_it_survives_json() -> None:
    assert Ledger.from_json(example()).to_json() == example()


def damages() -> list[Any]:
    def sealed(change: dict[str, Any]) -> Any:
        content = {name: value for name, value in {**example(), **change}.items()
                   if name != "digest" and value is not None}  # fmt: skip
        return {**content, "digest": module._digest(content)}

    torn = {**example(), "at": [7, 28]}
    run = {**example()["passes"][0], "pass": [0, 0, 1, 0], "taken": [2, 9]}
    changes: list[dict[str, Any]] = [
        {"version": 2}, {"passes": None}, {"at": [7]}, {"lost": [["a", 1]]}, {"stretches": "none"},
        {"passes": [run]}, {"passes": [{**run, "taken": [4]}]}, {"passes": [{}]},
    ]  # fmt: skip
    return [None, [], {}, torn, *(sealed(change) for change in changes)]


@pytest.mark.parametrize("value", damages())
def test_a_damaged_ledger_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Ledger.from_json(value)


def test_two_ledgers_that_were_mixed_have_no_digest() -> None:
    """Ranks whose values are united field by field must not make up a third one."""
    mixed = {**example(), **{"lost": [], "since": [0, 0]}}
    with pytest.raises(ValueError, match="digest"):
        Ledger.from_json(mixed)


@dataclass
class Job:
    """A job as the world sees it: what was really consumed, generation by generation."""

    ledger: Ledger
    seen: list[int]
    saved: list[tuple[Ledger, list[int]]]
    lost: list[Lost]
    round: int = 1


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, 7)),
        st.tuples(st.just("save"), st.just(0)),
        st.tuples(st.just("change"), st.integers(1, 8)),
        st.tuples(st.just("fail"), st.integers(0, 3)),
        st.tuples(st.just("skip"), st.integers(1, 3)),
        st.tuples(st.just("again"), st.integers(1, 3)),
    ),
    max_size=25,
)  # fmt: skip


def is_once(seen: list[int], length: int | None) -> bool:
    """Whether no place over all passes came twice, and none was passed over but rests of passes,
    which a script may leave."""
    there = sorted({*seen})
    jumps = [now for before, now in pairwise([-1, *there]) if now != before + 1]
    return len(there) == len(seen) and not any(length is None or at % length for at in jumps)


@given(ACTIONS, st.sampled_from([None, 7, 12]))
@case([("train", 1), ("skip", 3), ("train", 1)], 7)
@case([("train", 1), ("skip", 2), ("train", 1)], 7)
def test_a_ledger_is_kept_exactly_where_every_sample_was_seen_once(
    actions: list[tuple[str, int]], length: int | None
) -> None:
    """Against the list of samples that the steps which count have really seen."""
    start = Ledger.begun(0, 0).with_round("run-1", {"dp": 1})
    job = Job(start, [], [(start, [])], [])
    shift = 0
    for kind, number in actions:
        if kind == "train":
            for _ in range(number):
                begin = len(job.seen) + shift
                draws = split("train", max(begin, 0), max(begin, 0) + 4, length, is_dealt=True)
                job.seen = [*job.seen, *range(max(begin, 0), max(begin, 0) + 4)]
                job.ledger = job.ledger.stepped(job.ledger.at[0] + 1, len(job.seen), draws)
        elif kind == "save":
            job.saved.append((Ledger.from_json(job.ledger.to_json()), job.seen))
        elif kind == "skip":
            shift += number
        elif kind == "again":
            shift -= number
        else:
            if kind == "fail":
                reached, back = job.ledger.at[0], job.saved[-1 - min(number, len(job.saved) - 1)]
                job.ledger, job.seen = back
                if reached > job.ledger.at[0]:
                    job.lost.append(Lost(f"run-{job.round}", job.ledger.at[0], reached))
            job.round += 1
            job.ledger = job.ledger.with_round(f"run-{job.round}", {"dp": number + 1}, job.lost)
    assert judge(job.ledger, *job.ledger.at).is_kept == is_once(job.seen, length)
