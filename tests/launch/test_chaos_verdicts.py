"""What counts as survived: a fault that was not seen never does, and one step that differs fails
the whole."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from scalai.launch.chaos.kinds import KINDS, At, Fault
from scalai.launch.chaos.verdicts import (
    Outcome,
    Round,
    Verdict,
    compare,
    problems,
    step_to_pass,
    table,
    to_json,
)


def fault(name: str = "kill-worker") -> Fault:
    return Fault(KINDS[name], ("a",), 0, At(), 20)


def begun(steps_lost: int = 3, noticed_s: float = 0.2) -> Round:
    return Round("rank 0 was killed", 14, steps_lost, noticed_s, 1.5, {"relaunch": 1.0})


GOOD = Outcome(fault(), 40, "was killed by SIGKILL", 0.3, (begun(),), 4.0, 14)
NOTED = Outcome(fault("full-disk"), 40, "event=not_archived", 0.3, (), 4.0, 0)


def test_a_job_that_has_gone_back_trains_again_before_it_has_made_up_for_what_was_lost() -> None:
    """Who loses 400 steps needs minutes for them, and trains all the same."""
    begun = Round("a worker was killed", 288, 415, 0.1, 5.0, {})
    assert step_to_pass(703, []) == step_to_pass(703, [replace(begun, step=None)]) == 703
    assert step_to_pass(703, [replace(begun, step=100), begun]) == 288
    assert step_to_pass(703, [replace(begun, step=710)]) == 703


def test_what_was_seen_and_cost_no_more_than_stated_passed() -> None:
    assert not problems(GOOD) and not problems(NOTED)
    assert GOOD.detect_s == 0.2 and NOTED.detect_s == 0.3


def test_a_fault_that_was_not_seen_failed_whatever_the_job_did() -> None:
    assert any("not seen" in each for each in problems(replace(GOOD, sign="")))
    assert any("did not strike" in each for each in problems(Outcome(fault())))


def test_a_job_that_is_not_back_or_lost_too_much_or_began_no_round_failed() -> None:
    assert any("on all hosts" in each for each in problems(replace(GOOD, back_s=None)))
    assert any("15 steps" in each for each in problems(replace(GOOD, rounds=(begun(15),))))
    assert any("no round" in each for each in problems(replace(GOOD, rounds=())))
    assert any("cost a round" in each for each in problems(replace(NOTED, rounds=(begun(0),))))


def test_a_fault_that_cannot_be_injected_neither_passes_nor_fails() -> None:
    skipped = Outcome(fault("slow-link"), skipped="no link")
    verdict = Verdict(0, (GOOD, skipped))
    assert verdict.holds and verdict.figures()["faults"] == 1
    assert verdict.figures()["skipped"] == {"slow-link": "no link"}
    assert not Verdict(0, (skipped,)).holds, "nothing was injected"


def test_a_kind_passes_only_where_all_of_its_faults_do() -> None:
    verdict = Verdict(0, (GOOD, replace(GOOD, rounds=(begun(99),)), NOTED))
    figures = verdict.figures()
    assert (figures["faults"], figures["passed"], figures["failed"]) == (2, 1, ["kill-worker"])
    assert figures["steps_lost_max"]["kill-worker"] == {"lost": 99, "limit": 14}
    assert not verdict.holds and "NOT as stated" in table(verdict)


def test_one_step_that_differs_fails_all() -> None:
    reference = {1: 5, 2: 7, 3: 9}
    same = compare([(1, 5), (2, 7), (2, 7), (3, 9)], reference)
    assert (same.steps, same.again, same.wrong) == (3, 1, ())
    for made in ([(1, 5), (2, 8)], [(1, 5), (3, 9)], [(1, 5), (2, 7), (3, 9), (4, 1)], []):
        found = compare(made, reference)
        assert found.wrong and Verdict(0, (GOOD,), found).figures()["passed"] == 0


def test_a_step_that_was_wrong_once_is_found_though_it_was_made_again() -> None:
    assert compare([(1, 5), (2, 8), (2, 7)], {1: 5, 2: 7}).wrong


def test_final_states_that_differ_or_are_missing_fail_all() -> None:
    assert Verdict(0, (GOOD,), None, ({"w": 1}, {"w": 1})).holds
    for own, other in (({"w": 1}, {"w": 2}), ({"w": 1}, {"w": 1, "v": 3}), ({}, {})):
        assert not Verdict(0, (GOOD,), None, (own, other)).holds


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 20), st.booleans()), min_size=1),
)
def test_the_figures_never_count_more_passed_than_seen(
    found: list[tuple[int, int, bool]],
) -> None:
    names = list(KINDS)
    outcomes = tuple(
        replace(
            GOOD, fault=fault(names[number % len(names)]), rounds=(begun(lost),),
            sign="said" if is_seen else "",
        )
        for number, lost, is_seen in found
    )  # fmt: skip
    figures = Verdict(1, outcomes).figures()
    assert figures["passed"] <= figures["faults"] <= len({e.fault.kind for e in outcomes})
    assert all(to_json(each)["kind"] in KINDS for each in outcomes)
