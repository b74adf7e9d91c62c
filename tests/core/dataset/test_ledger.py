"""The ledger and the lines of steps: what they prove of trainings, and what they find broken."""

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example as case
from hypothesis import given
from hypothesis import strategies as st

from scalai.core import fields
from scalai.core.dataset import ledger as module
from scalai.core.dataset.drawn import COUNTED, Draw, Intervals, Number, split
from scalai.core.dataset.ledger import Ledger, Lost, judge
from scalai.core.dataset.step_lines import (
    StepEntry,
    StepLine,
    judge_lines,
    line_text,
    read_lines,
    united,
)
from scalai.core.degrees.batches import BatchRamp
from scalai.core.errors import StoreError

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def places(pairs: list[tuple[int, int]]) -> set[int]:
    return {place for start, stop in pairs for place in range(start, stop)}


def in_it(intervals: Intervals) -> set[int]:
    return places(list(intervals.pairs))


@given(PAIRS, PAIRS, st.integers(0, 40))
def test_intervals_are_the_sets_of_their_places(
    one: list[tuple[int, int]], two: list[tuple[int, int]], begin: int
) -> None:
    a, b = Intervals.of(*one), Intervals.of(*two)
    assert in_it(a) == places(one) and len(a) == len(places(one))
    assert in_it(a | b) == places(one) | places(two)
    assert in_it(a & b) == places(one) & places(two)
    assert in_it(a - b) == places(one) - places(two)
    assert in_it(a.holes(begin)) == set(range(begin, a.end)) - places(one)
    pair = a.end + begin % 3, a.end + begin % 3 + 1
    assert a.followed_by(*pair) == a | Intervals.of(pair)


@given(PAIRS)
def test_equal_sets_are_equal_values_and_survive_json(pairs: list[tuple[int, int]]) -> None:
    intervals = Intervals.of(*pairs)
    assert Intervals.of(*reversed(pairs)) == intervals
    assert Intervals.from_json(intervals.to_json(), "taken") == intervals


@pytest.mark.parametrize("pairs", [((3, 3),), ((5, 4),), ((0, 2), (2, 4)), ((4, 6), (0, 2))])
def test_other_forms_of_a_set_are_refused(pairs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="not ascending intervals"):
        Intervals(pairs)


@pytest.mark.parametrize("value", [[0, 2, 4], [0, 2.0], "0:2", [-1, 2], [0, True]])
def test_damaged_json_is_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match="taken"):
        Intervals.from_json(value, "taken")


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
    ("steps", "length", "draw", "text"),
    [
        (8, 20, Draw("train", Number(1), 8, 12, 20), "samples 8:12 a second time"),
        (8, 20, Draw("train", Number(1), 10, 18, 20), "samples 10:12 a second time"),
        (8, 20, Draw("train", Number(1), 16, 20, 20), "samples 12:16 are passed over"),
        (8, 20, Draw("train", Number(2), 4, 8, 20), "pass 2: samples 0:4 are passed over"),
        (8, 20, Draw("train", Number(0), 0, 4, 20), "pass 0: samples 0:4 a second time"),
        (8, 20, Draw("train", Number(1), 12, 24, 20), "samples to 24 of a pass of 20"),
        # Of whole passes that stand as one any is known.
        (25, 10, Draw("train", Number(3), 4, 8, 10, 10, is_dealt=True),
         "pass 3: samples 4:8 a second time"),
    ],
)  # fmt: skip
def test_what_breaks_the_order_is_objected_to_and_found_later(
    steps: int, length: int, draw: Draw, text: str
) -> None:
    ledger = trained(Ledger.begun(0, 0), steps, batch=4, length=length)
    assert text in " ".join(ledger.objections([draw]))
    found = verdict(ledger.stepped(steps + 1, 4 * steps + draw.stop - draw.start, [draw]))
    assert found if steps == 8 else "samples 4:8 were seen twice" in " ".join(found)


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
        return {**content, "digest": fields.digest_of(content)}

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
)


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


# ------------------------------------------------------------------ lines of steps

Files = dict[str, tuple[tuple[StepLine, ...], bool]]


def line(step: int, round: int = 0, run: str = "r", **values: Any) -> StepLine:
    given = {"samples_hash": None, "loss": None, "rate": None, "consumed_samples": 8 * step}
    return StepLine(run, round, step, **{**given, **values})


def files(*ranks: list[StepLine]) -> Files:
    return {f"rank-{number}.jsonl": (tuple(each), False) for number, each in enumerate(ranks)}


def hashed(step: int, round: int = 0, value: int = 0, **values: Any) -> StepLine:
    return line(step, round, samples_hash=value or step, **values)


def test_a_step_unites_what_replicas_and_stages_know() -> None:
    ranks = [
        [line(1, samples_hash=2**64 - 1, rate=0.1)], [line(1, samples_hash=3, rate=0.1)],
        [line(1, loss=2.5, rate=0.1)],
    ]  # fmt: skip
    assert united(ranks)[1] == StepEntry(0, 1, 8, samples_hash=2, loss=2.5, lr=0.1)


def test_of_a_step_done_twice_the_newest_round_counts() -> None:
    one = [line(1, samples_hash=4), line(2, samples_hash=5), line(2, 1, samples_hash=7)]
    assert [entry.samples_hash for entry in united([one]).values()] == [4, 7]


def test_a_job_that_was_started_again_counts_its_rounds_anew() -> None:
    one = [hashed(1, 1), hashed(2, 1), hashed(3, 1, run="s"), hashed(4, 1, run="s")]
    assert judge_lines(files(one)).is_kept
    again = [hashed(1, 5), hashed(2, 5), hashed(2, 1, 9, run="s")]
    assert united([again])[2].samples_hash == 9, "of the later run"


@pytest.mark.fault
def test_lines_survive_being_written_and_a_torn_one_is_left_out() -> None:
    text = line_text(line(1, rate=0.5)) + line_text(line(2, loss=1.5))
    assert read_lines(text, "f") == ((line(1, rate=0.5), line(2, loss=1.5)), False)
    found, is_torn = read_lines(text[:-9], "f")
    assert found == (line(1, rate=0.5),) and is_torn
    torn = judge_lines({"rank-0.jsonl": (found, is_torn)})
    assert torn.is_kept and torn.notes == ("rank-0.jsonl: its last line was torn",)


@pytest.mark.parametrize("damaged", ["{", "[]", '{"round": 1}', ""])
def test_damage_before_the_last_line_is_no_tear(damaged: str) -> None:
    with pytest.raises(StoreError, match=r"line 2 of rank-0\.jsonl is damaged"):
        read_lines(line_text(line(1)) + damaged + "\n" + line_text(line(3)), "rank-0.jsonl")


def test_steps_that_were_lost_and_done_again_with_the_same_samples_are_told() -> None:
    one = [hashed(s) for s in (1, 2, 3, 4)] + [hashed(s, 1) for s in (3, 4, 5)]
    found = judge_lines(files(one))
    assert found.is_kept and found.notes == ("steps 3 to 4 of round 0 were lost and done again",)


@pytest.mark.fault
def test_a_worker_that_was_killed_before_it_wrote_proves_nothing_against_the_others() -> None:
    full, killed = [hashed(s) for s in (1, 2, 3)], [hashed(s) for s in (1, 2)]
    again = [hashed(s, 1, 2 * s) for s in (3, 4)]
    assert judge_lines(files([*full, *again], killed)).is_kept


@pytest.mark.fault
@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([hashed(1), hashed(3)], "steps 2 to 2 are in no file"),
        ([hashed(1), hashed(2, consumed_samples=8)], "step 2 ends at 8 samples"),
        ([hashed(1), hashed(2), hashed(2, 1, 7)], "step 2 had other samples when round 1"),
        ([hashed(1), hashed(2), hashed(2, 1, consumed_samples=17)], "step 2 had other samples"),
        ([hashed(1), hashed(2), hashed(2)], "two processes have written it"),
        ([hashed(1), hashed(2), hashed(1)], "two processes have written it"),
    ],
)
def test_what_breaks_the_order_of_lines_is_found(lines: list[StepLine], text: str) -> None:
    assert text in " ".join(judge_lines(files(lines)).breaks)
