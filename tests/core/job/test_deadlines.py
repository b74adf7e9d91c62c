"""What comes of a phase that takes too long, and of a training that makes no steps: it is started
again, once no pause of its own has taken so long."""

from pathlib import Path
from typing import Any

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
from scalai.core.job.overdue import behind
from scalai.core.job.resize import advance
from scalai.core.messages import actions, commands, events, reports
from scalai.core.messages.reports import SILENT, Stalled
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


def test_who_waits_for_hosts_says_so_every_half_minute() -> None:
    job, said = made(assign=assign_all(minimum=2), max_hosts=2), list[actions.Action]()
    job, _ = advance_all(job, joined(job, "a"))
    for _ in range(40):
        job, due = ticked(job, 5.0)
        said += due
    assert lines(said).count("event=slow phase=waiting") == 6


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


# ---------------------------------------------------------------------- hangs

BACKWARD = '"torch/autograd/graph.py", line 829 in _engine_run_backward < "t.py", line 9 in main'
REDUCE = '"/x/torch/distributed/c10d.py", line 2 in all_reduce < "train.py", line 11 in main'
SLEEP = '"train.py", line 7 in load'
STOPPED = f"{SILENT}: state='T (stopped)' wchan=do_signal_stop"


def trained(**facts: Any) -> m.Job:
    """Return a job on hosts a and b at step 25 that counts 100 s without a step as a hang."""
    return training("ab", **{"hang_s": 100.0, "has_emergency": True, "left": 9, **facts})


def look(job: m.Job, **stalled: Stalled) -> tuple[m.Job, str]:
    """Return what the law makes of hosts that make no steps, and says of them."""
    after, due = advance(job, events.Ticked(job.now + 1.0, 25, stalled))
    is_frozen = any(isinstance(ordered(action), commands.Freeze) for action in due)
    assert is_frozen == (after.phase is Phase.FREEZING)
    return after, lines(list(due))


def hangs(job: m.Job, a: Stalled | None, b: Stalled | None) -> bool:
    stalled = {name: each for name, each in {"a": a, "b": b}.items() if each is not None}
    return look(job, **stalled)[0].phase is Phase.FREEZING


def still(for_s: float, longest_s: float = 0.0, step: int = 25) -> Stalled:
    return Stalled((0, 1), step, for_s, longest_s)


def within(
    for_s: float, usual_s: float = 1.0, longest_s: float = 0.0, *, is_within: bool = True
) -> Stalled:
    return Stalled((0,), 25, for_s, longest_s, usual_s, is_within)


@pytest.mark.parametrize(
    ("hang_s", "a", "b", "is_hang"),
    [
        pytest.param(100, still(99), still(300), False, id="one trained until just now"),
        pytest.param(100, still(101), still(300), True, id="nobody makes a step"),
        pytest.param(100, still(1000), None, False, id="one makes steps"),
        pytest.param(100, still(290, 100), still(290), False, id="three times the longest pause"),
        pytest.param(100, still(310, 100), still(310), True, id="longer than three pauses"),
        pytest.param(0, still(1e6), still(1e6), False, id="no limit"),
        pytest.param(1800, within(299), within(299, 0.5), False, id="five minutes"),
        pytest.param(1800, within(301), within(301, 0.5), True, id="more than five minutes"),
        pytest.param(1800, within(590), within(590, 20), False, id="30 usual steps"),
        pytest.param(1800, within(610), within(610, 20), True, id="more than 30 usual steps"),
        pytest.param(1800, within(1700, 100), within(1700), False, id="a person's limit"),
        pytest.param(1800, within(1801, 100), within(1801), True, id="beyond a person's limit"),
        pytest.param(1800, within(590, 1, 200), within(590), False, id="three pauses in a step"),
        pytest.param(50, within(51), within(51), True, id="a person's shorter limit"),
        pytest.param(1800, within(1700), within(1700, is_within=False), False, id="an evaluation"),
        pytest.param(1800, within(1801), within(1801, is_within=False), True, id="a long one"),
        pytest.param(1800, within(1700), within(1700, 0.0), False, id="the first steps"),
        pytest.param(1800, within(1801), within(1801, 0.0), True, id="first steps that hang"),
    ],
)
def test_a_hang_is_longer_than_any_pause_and_within_a_step_by_the_usual_one(
    hang_s: float, a: Stalled, b: Stalled | None, is_hang: bool
) -> None:
    assert hangs(trained(hang_s=float(hang_s)), a, b) is is_hang


@pytest.mark.parametrize(
    "facts",
    [{"is_hooked": False}, {"finished": frozenset("a")}, {"phase": Phase.DRAINING},
     {"phase": Phase.STARTING}],
    ids=str,
)  # fmt: skip
def test_no_hang_is_seen_where_none_is_to_be(facts: dict[str, Any]) -> None:
    assert not hangs(trained(**facts), still(1e6), still(1e6))


def test_the_host_that_is_behind_is_named_and_the_hang_costs_a_restart() -> None:
    after, said = look(trained(), a=still(200), b=Stalled((2,), 24, 201))
    assert "hangs: no worker has made a step for 200 s (limit 100) at step 24" in said
    assert "behind are b: rank 2" in said and after.budget.left == 8
    assert after.health.hangs == {"b": 1} and not after.health.barred and not after.health.strikes


def test_a_job_that_hangs_again_without_a_step_waits_twice_as_long() -> None:
    """It may be an evaluation that is longer than any pause before."""
    again = trained(hung=(25, 2))
    assert not hangs(again, still(390), still(390))
    assert look(again, a=still(410), b=still(410))[0].budget.hung == (25, 3)
    assert look(but(again, hung=(24, 2)), a=still(110), b=still(110))[0].budget.hung == (25, 1)


@pytest.mark.parametrize(("minimum", "left"), [(1, 9), (2, 8)], ids=["others go on", "none can"])
def test_a_second_hang_on_a_host_leaves_it_out_at_the_price_of_a_lost_host(
    minimum: int, left: int
) -> None:
    job = trained(is_loss_free=True, hangs={"b": 1}, assign=assign_all(minimum))
    after, said = look(job, a=still(200), b=Stalled((2,), 24, 200))
    assert after.phase is Phase.FREEZING and after.budget.left == left
    assert after.health.barred == {"b": after.now + 800.0}
    assert "host b has kept the others waiting at 2 hangs" in said


def test_what_hung_is_forgotten_when_the_agent_of_the_host_is_started_anew() -> None:
    job = trained(is_loss_free=True, hangs={"b": 2}, barred={"b": 1e6, "c": 1e6})
    job, _ = advance(job, joined(job, "b"))
    assert job.health.hangs == {} and job.health.barred == {"c": 1e6}
    flapping = trained(hangs={"b": 2}, barred={"b": 1e6}, strikes={"b": (99.0, 99.0, 99.0)})
    assert "b" in advance(flapping, joined(flapping, "b"))[0].health.barred


@pytest.mark.parametrize("hosts", ["ab", "abc"])
def test_a_host_that_hangs_in_every_round_never_keeps_the_job_from_stepping(hosts: str) -> None:
    """For a day; each time it is taken again it is left out for longer."""
    job = training(hosts, hang_s=1800.0, left=3, is_loss_free=True, hangs={})
    made_s, still_s, step = 0.0, 0.0, 25
    while job.now < 86400.0:
        assert job.phase is not Phase.ENDED
        job = until(job, Phase.RUNNING) if job.phase is not Phase.RUNNING else job
        does_hang = "b" in active(job)
        still_s = still_s + 10.0 if does_hang else 0.0
        made_s, step = (made_s, step) if does_hang else (made_s + 10.0, step + 1)
        stalled = {
            name: Stalled((rank,), step - (name == "b"), still_s)
            for rank, name in enumerate(sorted(active(job)))
        }
        newest = max(step, job.newest)
        job, _ = advance(job, events.Ticked(job.now + 10.0, newest, stalled if does_hang else {}))
        step = max(step, job.newest)
    assert made_s > 0.75 * 86400.0


def stalls(*hosts: list[str]) -> dict[str, Stalled]:
    """Return what hosts a, b, c say whose ranks stand at these places, all behind step 5."""
    found, first = {}, 0
    for name, places in zip("abc", hosts, strict=False):
        ranks = tuple(range(first, first + len(places)))
        found[name] = Stalled(ranks, 5, 400.0, where=tuple(zip(ranks, places, strict=True)))
        first += len(places)
    return found


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ([[REDUCE, REDUCE], [REDUCE, STOPPED]], {"b": (3,)}),
        ([[REDUCE], [STOPPED]], {"b": (1,)}),
        ([[STOPPED], [STOPPED], [REDUCE]], {}),
        ([[STOPPED], [STOPPED]], {}),
        ([[REDUCE, REDUCE], [REDUCE, SLEEP]], {"b": (3,)}),
        ([[SLEEP, SLEEP], [REDUCE, REDUCE]], {"a": (0, 1)}),
        ([[SLEEP, SLEEP, SLEEP], [REDUCE]], {}),
        ([[BACKWARD, BACKWARD], [BACKWARD, SLEEP]], {"b": (3,)}),
        ([[BACKWARD, BACKWARD], [SLEEP, SLEEP]], {}),
        ([[BACKWARD, BACKWARD], [BACKWARD, REDUCE]], {}),
        ([[REDUCE, REDUCE], [REDUCE, REDUCE]], {}),
        ([[], []], {}),
        ([[BACKWARD], []], {}),
    ],
)
def test_who_stands_apart_is_named_where_that_tells(
    hosts: list[list[str]], expected: dict[str, tuple[int, ...]]
) -> None:
    assert behind(stalls(*hosts)) == expected


def test_who_has_made_fewer_steps_is_behind_wherever_it_stands() -> None:
    found = stalls([SLEEP], [REDUCE])
    found["b"] = Stalled((1,), 4, 400.0, where=found["b"].where)
    assert behind(found) == {"b": (1,)}
