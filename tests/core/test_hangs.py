"""A training that makes no steps is started again, once no pause of its own has taken so long."""

from dataclasses import replace
from typing import Any

from scalai.core import events
from scalai.core import membership as m
from scalai.core.actions import Freeze, Say
from scalai.core.events import Stalled
from scalai.core.resize import advance
from support.membership_simulation import Simulation, job


def trained(**settings: Any) -> Simulation:
    """Return a job that trains on hosts a and b, and counts 100 s without a step as a hang."""
    simulation = Simulation(
        job(hang_s=100.0, max_hosts=2, has_emergency=True, failures_left=9, **settings)
    )
    for name in "ab":
        simulation.join(name, 2)
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING
    simulation.job = replace(simulation.job, newest=40)
    return simulation


def look(simulation: Simulation, **stalled: Stalled) -> tuple[m.Job, list[Any]]:
    """Return what the law makes of hosts that make no steps."""
    after, due = advance(simulation.job, events.Ticked(simulation.now + 1.0, 40, stalled))
    return after, list(due)


def at(step: int, for_s: float, longest_s: float = 0.0) -> Stalled:
    return Stalled((0, 1), step, for_s, longest_s)


def is_frozen(found: tuple[m.Job, list[Any]]) -> bool:
    job, due = found
    assert (job.phase is m.Phase.FREEZING) == any(isinstance(a, Freeze) for a in due)
    return job.phase is m.Phase.FREEZING


def test_where_nobody_makes_a_step_the_round_is_started_again() -> None:
    simulation = trained()
    assert not is_frozen(look(simulation, a=at(40, 99), b=at(40, 300)))
    after, due = look(simulation, a=at(40, 101), b=at(40, 300))
    assert is_frozen((after, due)) and after.failures_left == 8 and not after.strikes
    (said,) = [action.text for action in due if isinstance(action, Say)]
    assert "hangs: no worker has made a step for 101 s (limit 100) at step 40" in said


def test_where_some_make_steps_nothing_is_ended() -> None:
    simulation = trained()
    assert not is_frozen(look(simulation, a=at(40, 1000)))
    assert not is_frozen(look(simulation))


def test_one_may_pause_three_times_as_long_as_ever_before() -> None:
    simulation = trained()
    assert not is_frozen(look(simulation, a=at(40, 290, 100), b=at(40, 290)))
    assert is_frozen(look(simulation, a=at(40, 310, 100), b=at(40, 310)))


def test_a_job_that_hangs_again_without_a_step_waits_twice_as_long() -> None:
    """It may be an evaluation that is longer than any pause before."""
    simulation = trained()
    simulation.job = replace(simulation.job, hung=(40, 2))
    assert not is_frozen(look(simulation, a=at(40, 390), b=at(40, 390)))
    after, due = look(simulation, a=at(40, 410), b=at(40, 410))
    assert is_frozen((after, due)) and after.hung == (40, 3)
    simulation.job = replace(simulation.job, hung=(39, 2))
    after, due = look(simulation, a=at(40, 110), b=at(40, 110))
    assert is_frozen((after, due)) and after.hung == (40, 1)


def test_the_host_that_is_behind_is_named_and_counts_as_one_that_breaks_rounds() -> None:
    after, due = look(trained(), a=at(40, 200), b=Stalled((2,), 39, 201))
    assert is_frozen((after, due)) and set(after.strikes) == {"b"}
    assert any("behind are b: rank 2" in a.text for a in due if isinstance(a, Say))


def test_no_hang_is_seen_where_none_is_to_be() -> None:
    stalls = {"a": at(40, 1e6), "b": at(40, 1e6)}
    simulation = trained()
    for settings in (
        {"hang_s": 0.0}, {"is_hooked": False}, {"finished": frozenset("a")},
        {"phase": m.Phase.DRAINING}, {"phase": m.Phase.STARTING},
    ):  # fmt: skip
        was = replace(simulation.job, **settings)
        after, due = advance(was, events.Ticked(simulation.now + 1.0, 40, stalls))
        assert after.phase is was.phase and not any(isinstance(a, Freeze) for a in due)
