"""What comes of a phase that takes too long."""

from pathlib import Path

import pytest

from scalai.core.host.state import HostSettings
from scalai.core.job import membership as m
from scalai.core.job.deadlines import (
    ANSWER_S,
    FROZEN_S,
    GONE_S,
    JOIN_S,
    LIMITS,
    SNAPSHOT_PATIENCES,
    STORE_READY_S,
    TABLE,
    TELL_S,
)
from scalai.core.job.membership import Phase, active
from scalai.core.messages import actions, commands, events, reports
from support.laws import (
    advance_all,
    assign_all,
    at,
    but,
    joined,
    kinds,
    lines,
    made,
    ordered,
    ticked,
    told,
    training,
    until,
)

pytestmark = pytest.mark.fault

EXIT_GRACE_S = HostSettings("a", is_elastic=True, drain_timeout_s=120.0).exit_grace_s
ARCHITECTURE = Path(__file__).parents[3] / "docs" / "architecture.md"


def test_every_phase_has_its_line_and_the_docs_repeat_it() -> None:
    assert set(LIMITS) == set(Phase) - {Phase.ENDED}
    text = ARCHITECTURE.read_text()
    for line in TABLE:
        row = f"| {line.phase.value} | {line.clock} | {line.default} | {line.consequence} |"
        assert row in text, f"docs/architecture.md lacks: {row}"


def test_limits_that_hang_together_end_one_after_the_other() -> None:
    """What was lost on its way is told again before its host counts as lost; a join outlasts what
    it waits for; who waits for killed workers is waited for."""
    assert 2 * TELL_S < ANSWER_S and STORE_READY_S < JOIN_S
    stopping = LIMITS[Phase.STOPPING].seconds(training("a"))
    assert stopping is not None and GONE_S + EXIT_GRACE_S < stopping


def silent_for(job: m.Job, seconds: float) -> tuple[m.Job, list[actions.Action]]:
    """Return the job after nobody has answered for so long, and what came of it at last."""
    return ticked(ticked(job)[0], seconds)


@pytest.mark.parametrize(
    ("phase", "limit_s"),
    [
        (Phase.PREPARING, ANSWER_S),
        (Phase.SNAPSHOTTING, SNAPSHOT_PATIENCES * 20.0),
        (Phase.COMMITTING, ANSWER_S),
        (Phase.STOPPING, GONE_S + ANSWER_S),
    ],
)
def test_a_host_that_does_not_answer_counts_as_lost_where_others_can_go_on(
    phase: Phase, limit_s: float
) -> None:
    """Workers that the kernel cannot end do not cost their host: it waits for the memory of their
    devices, and answers once others may start."""
    job = but(at(phase, training("ab", drain_timeout_s=20.0)), awaited=frozenset("b"))
    early, due = silent_for(job, limit_s)
    assert early.phase is phase and not any(isinstance(each, actions.Lose) for each in due)
    job, due = silent_for(job, limit_s + 1.0)
    assert [each.hosts for each in due if isinstance(each, actions.Lose)] == [("b",)]
    # Where it is not lost all the same, it is asked for again after as long.
    again = [ticked(job, seconds)[1] for seconds in (limit_s, limit_s + 1.0)]
    assert [any(isinstance(each, actions.Lose) for each in due) for due in again] == [False, True]
    job = but(job, is_loss_free=True)
    job, _ = advance_all(job, events.HostLost("b", job.states.generations, job.now))
    job = until(job, Phase.RUNNING)
    assert active(job) == {"a"} and job.budget.left == 3


@pytest.mark.parametrize("phase", [Phase.FREEZING, Phase.RESCUING, Phase.EXAMINING])
def test_what_survivors_write_and_what_hosts_examine_is_done_without_the_silent(
    phase: Phase,
) -> None:
    if phase is Phase.EXAMINING:
        job = but(training("ab"), phase=Phase.STARTING, attempt=m.Attempt(2))
        job, _ = advance_all(job, events.ProofFailed(1, "it differs", False, True))
    else:
        job = training("ab", has_emergency=True)
        job, _ = advance_all(job, *told("a", reports.WorkersFailed(1, "died")))
        if phase is Phase.RESCUING:
            job, _ = advance_all(job, *told("ab", reports.Frozen(1, (25,))))
    assert job.phase is phase
    limit_s = LIMITS[phase].seconds(job)
    assert limit_s is not None and silent_for(job, limit_s)[0].phase is phase
    job, due = silent_for(job, limit_s + 1.0)
    assert (job.phase is not phase or not job.awaited) and "done without" in lines(due)


def test_the_only_host_is_waited_for_and_told_of() -> None:
    job, said = training("a"), list[actions.Action]()
    job, _ = advance_all(job, *told("a", reports.Slots(2)))
    assert job.phase is Phase.PREPARING
    for _ in range(80):
        job, due = ticked(job, 5.0)
        said += due
    assert job.phase is Phase.PREPARING and not any(isinstance(a, actions.Lose) for a in said)
    assert 2 <= lines(said).count("event=slow") <= 4
    assert until(job, Phase.RUNNING)


def test_who_waits_for_hosts_says_so_every_minute() -> None:
    job, said = made(assign=assign_all(minimum=2), max_hosts=2), list[actions.Action]()
    job, _ = advance_all(job, joined(job, "a"))
    for _ in range(40):
        job, due = ticked(job, 5.0)
        said += due
    assert lines(said).count("event=slow phase=waiting") == 3


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.SNAPSHOTTING])
def test_a_host_whose_agent_comes_back_in_a_stop_has_no_workers_to_wait_for(phase: Phase) -> None:
    job = at(phase)
    job, _ = advance_all(job, joined(job, "b"))
    assert job.awaited == {"a"} and job.phase is phase
    job, due = advance_all(job, joined(job, "a"))
    assert actions.JudgeStop(("a", "b")) in due, "they may have brought what they had sealed"


def test_a_stop_without_workers_that_were_lost_is_not_taken_back_for_their_new_agent() -> None:
    """The others are in a collective with those that are lost."""
    job = at(Phase.DRAINING)
    job, _ = advance_all(job, joined(job, "b"))
    job, _ = silent_for(job, 121.0)
    assert job.phase is Phase.STOPPING and job.budget.left == 2


# ---------------------------------------------------------------------- a start


def test_a_start_that_makes_no_progress_goes_back_to_what_ran() -> None:
    job = at(Phase.STARTING, training("ab", start_timeout_s=100.0, left=0))
    job, due = silent_for(job, 95.0)
    assert job.phase is Phase.STARTING and "a (nothing so far)" in lines(due)
    job, _ = advance_all(job, *told("a", reports.Moved(job.round, 1 << 30)))
    job, _ = silent_for(job, 95.0)
    assert job.phase is Phase.STARTING, "the clock begins anew with each progress"
    job, _ = ticked(job, 20.0)
    assert job.phase is Phase.STOPPING
    job = until(job, Phase.RUNNING)
    assert active(job) == {"a", "b"} and job.budget.left == 0 and not job.states.lost


def test_a_first_start_that_makes_no_progress_is_a_failure() -> None:
    job = made(assign=assign_all(), max_hosts=1, start_timeout_s=100.0, left=1)
    job, _ = advance_all(job, joined(job, "a"))
    job, due = silent_for(job, 101.0)
    assert job.budget.left == 0 and commands.Stop(1, False) in map(ordered, due)


def test_what_takes_too_long_is_told_of_with_the_stacks_of_those_awaited() -> None:
    _, due = silent_for(at(Phase.DRAINING), 61.0)
    assert kinds(due) == [commands.LogStacks] and "event=slow phase=draining" in lines(due)
    assert FROZEN_S < ANSWER_S
