"""A training that makes no steps is started again, once no pause of its own has taken so long; and
for whom the others wait in it."""

from typing import Any

import pytest

from scalai.core.job import membership as m
from scalai.core.job.membership import Phase, active
from scalai.core.job.overdue import behind
from scalai.core.job.resize import advance
from scalai.core.messages import events
from scalai.core.messages.commands import Freeze
from scalai.core.messages.reports import SILENT, Stalled
from support.laws import assign_all, but, joined, lines, ordered, training, until

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
    is_frozen = any(isinstance(ordered(action), Freeze) for action in due)
    assert is_frozen == (after.phase is Phase.FREEZING)
    return after, lines(list(due))


def hangs(job: m.Job, a: Stalled | None, b: Stalled | None) -> bool:
    stalled = {name: each for name, each in {"a": a, "b": b}.items() if each is not None}
    return look(job, **stalled)[0].phase is Phase.FREEZING


def at(for_s: float, longest_s: float = 0.0, step: int = 25) -> Stalled:
    return Stalled((0, 1), step, for_s, longest_s)


def within(
    for_s: float, usual_s: float = 1.0, longest_s: float = 0.0, *, is_within: bool = True
) -> Stalled:
    return Stalled((0,), 25, for_s, longest_s, usual_s, is_within)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("hang_s", "a", "b", "is_hang"),
    [
        pytest.param(100, at(99), at(300), False, id="one trained until just now"),
        pytest.param(100, at(101), at(300), True, id="nobody makes a step"),
        pytest.param(100, at(1000), None, False, id="one makes steps"),
        pytest.param(100, at(290, 100), at(290), False, id="three times the longest pause"),
        pytest.param(100, at(310, 100), at(310), True, id="longer than three pauses"),
        pytest.param(0, at(1e6), at(1e6), False, id="no limit"),
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
    assert not hangs(trained(**facts), at(1e6), at(1e6))


def test_the_host_that_is_behind_is_named_and_the_hang_costs_a_restart() -> None:
    after, said = look(trained(), a=at(200), b=Stalled((2,), 24, 201))
    assert "hangs: no worker has made a step for 200 s (limit 100) at step 24" in said
    assert "behind are b: rank 2" in said and after.budget.left == 8
    assert after.health.hangs == {"b": 1} and not after.health.barred and not after.health.strikes


@pytest.mark.fault
def test_a_job_that_hangs_again_without_a_step_waits_twice_as_long() -> None:
    """It may be an evaluation that is longer than any pause before."""
    again = trained(hung=(25, 2))
    assert not hangs(again, at(390), at(390))
    assert look(again, a=at(410), b=at(410))[0].budget.hung == (25, 3)
    assert look(but(again, hung=(24, 2)), a=at(110), b=at(110))[0].budget.hung == (25, 1)


@pytest.mark.fault
@pytest.mark.parametrize(("minimum", "left"), [(1, 9), (2, 8)], ids=["others go on", "none can"])
def test_a_second_hang_on_a_host_leaves_it_out_at_the_price_of_a_lost_host(
    minimum: int, left: int
) -> None:
    job = trained(is_loss_free=True, hangs={"b": 1}, assign=assign_all(minimum))
    after, said = look(job, a=at(200), b=Stalled((2,), 24, 200))
    assert after.phase is Phase.FREEZING and after.budget.left == left
    assert after.health.barred == {"b": after.now + 800.0}
    assert "host b has kept the others waiting at 2 hangs" in said


@pytest.mark.fault
def test_what_hung_is_forgotten_when_the_agent_of_the_host_is_started_anew() -> None:
    job = trained(is_loss_free=True, hangs={"b": 2}, barred={"b": 1e6, "c": 1e6})
    job, _ = advance(job, joined(job, "b"))
    assert job.health.hangs == {} and job.health.barred == {"c": 1e6}
    flapping = trained(hangs={"b": 2}, barred={"b": 1e6}, strikes={"b": (99.0, 99.0, 99.0)})
    assert "b" in advance(flapping, joined(flapping, "b"))[0].health.barred


@pytest.mark.fault
@pytest.mark.parametrize("hosts", ["ab", "abc"])
def test_a_host_that_hangs_in_every_round_never_keeps_the_job_from_stepping(hosts: str) -> None:
    """For a day; each time it is taken again it is left out for longer."""
    job = training(hosts, hang_s=1800.0, left=3, does_refill=True, is_loss_free=True, hangs={})
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


@pytest.mark.fault
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
