"""A training that makes no steps is started again, once no pause of its own has taken so long."""

from dataclasses import replace
from typing import Any

import pytest

from scalai.core.job import membership as m
from scalai.core.job.resize import advance
from scalai.core.messages import events
from scalai.core.messages.actions import Say
from scalai.core.messages.commands import Freeze
from scalai.core.messages.reports import Stalled
from support.law_jobs import but
from support.law_words import ordered
from support.membership_choice import assign_all
from support.membership_jobs import rounds
from support.membership_simulation import Simulation, job


def trained(**settings: Any) -> Simulation:
    """Return a job that trains on hosts a and b, and counts 100 s without a step as a hang."""
    simulation = Simulation(job(hang_s=100.0, max_hosts=2, has_emergency=True, left=9, **settings))
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
    assert (job.phase is m.Phase.FREEZING) == any(isinstance(ordered(a), Freeze) for a in due)
    return job.phase is m.Phase.FREEZING


def test_where_nobody_makes_a_step_the_round_is_started_again() -> None:
    simulation = trained()
    assert not is_frozen(look(simulation, a=at(40, 99), b=at(40, 300)))
    after, due = look(simulation, a=at(40, 101), b=at(40, 300))
    assert is_frozen((after, due)) and after.budget.left == 8 and not after.health.strikes
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


@pytest.mark.fault
def test_a_job_that_hangs_again_without_a_step_waits_twice_as_long() -> None:
    """It may be an evaluation that is longer than any pause before."""
    simulation = trained()
    simulation.job = but(simulation.job, hung=(40, 2))
    assert not is_frozen(look(simulation, a=at(40, 390), b=at(40, 390)))
    after, due = look(simulation, a=at(40, 410), b=at(40, 410))
    assert is_frozen((after, due)) and after.budget.hung == (40, 3)
    simulation.job = but(simulation.job, hung=(39, 2))
    after, due = look(simulation, a=at(40, 110), b=at(40, 110))
    assert is_frozen((after, due)) and after.budget.hung == (40, 1)


def test_the_host_that_is_behind_is_named() -> None:
    after, due = look(trained(), a=at(40, 200), b=Stalled((2,), 39, 201))
    assert is_frozen((after, due)) and after.health.hangs == {"b": 1} and not after.health.barred
    assert any("behind are b: rank 2" in a.text for a in due if isinstance(a, Say))


def test_no_hang_is_seen_where_none_is_to_be() -> None:
    stalls = {"a": at(40, 1e6), "b": at(40, 1e6)}
    simulation = trained()
    for settings in (
        {"hang_s": 0.0}, {"is_hooked": False}, {"finished": frozenset("a")},
        {"phase": m.Phase.DRAINING}, {"phase": m.Phase.STARTING},
    ):  # fmt: skip
        was = but(simulation.job, **settings)
        after, due = advance(was, events.Ticked(simulation.now + 1.0, 40, stalls))
        assert after.phase is was.phase and not any(isinstance(ordered(a), Freeze) for a in due)


def within(for_s: float, usual_s: float, longest_s: float = 0.0) -> Stalled:
    return Stalled((0,), 40, for_s, longest_s, usual_s, True)


@pytest.mark.fault
def test_within_a_step_the_usual_one_says_what_is_too_long() -> None:
    """Never less than five minutes, nor than three pauses; a person's limit is the highest."""
    simulation = trained()
    simulation.job = but(simulation.job, hang_s=1800.0)
    assert not is_frozen(look(simulation, a=within(299, 1.0), b=within(299, 0.5)))
    assert is_frozen(look(simulation, a=within(301, 1.0), b=within(301, 0.5)))
    assert not is_frozen(look(simulation, a=within(590, 1.0), b=within(590, 20.0)))
    assert is_frozen(look(simulation, a=within(610, 1.0), b=within(610, 20.0)))
    assert not is_frozen(look(simulation, a=within(1700, 100.0), b=within(1700, 1.0)))
    assert is_frozen(look(simulation, a=within(1801, 100.0), b=within(1801, 1.0)))
    assert not is_frozen(look(simulation, a=within(590, 1.0, 200.0), b=within(590, 1.0)))
    simulation.job = but(simulation.job, hang_s=50.0)
    assert is_frozen(look(simulation, a=within(51, 1.0), b=within(51, 1.0)))


@pytest.mark.fault
@pytest.mark.parametrize("one", [{"is_within": False}, {"usual_s": 0.0}])
def test_an_evaluation_a_save_or_the_first_steps_may_take_as_long_as_a_person_said(
    one: dict[str, Any],
) -> None:
    simulation = trained()
    simulation.job = but(simulation.job, hang_s=1800.0)
    other = replace(within(1700, 1.0), **one)
    assert not is_frozen(look(simulation, a=within(1700, 1.0), b=other))
    assert is_frozen(look(simulation, a=within(1801, 1.0), b=replace(other, for_s=1801.0)))


@pytest.mark.fault
def test_a_second_hang_on_a_host_leaves_it_out_at_the_price_of_a_lost_host() -> None:
    simulation = trained(is_loss_free=True)
    stalls = {"a": at(40, 200), "b": Stalled((2,), 39, 200)}
    simulation.job = but(simulation.job, hangs={"b": 1})
    after, due = look(simulation, **stalls)
    assert is_frozen((after, due)) and after.budget.left == 9
    assert after.health.barred == {"b": after.now + 800.0}
    assert any("host b has kept the others waiting at 2 hangs" in a.text for a in due
               if isinstance(a, Say))  # fmt: skip


def test_where_none_can_go_on_without_it_it_is_a_failure_as_any() -> None:
    simulation = trained(is_loss_free=True, assign=assign_all(minimum=2))
    simulation.job = but(simulation.job, hangs={"b": 1})
    after, due = look(simulation, a=at(40, 200), b=Stalled((2,), 39, 200))
    assert is_frozen((after, due)) and after.budget.left == 8


@pytest.mark.fault
def test_what_hung_is_forgotten_when_the_agent_of_the_host_is_started_anew() -> None:
    simulation = trained(is_loss_free=True)
    simulation.job = but(simulation.job, hangs={"b": 2}, barred={"b": 1e6, "c": 1e6})
    simulation.lose("b")
    simulation.join("b", 2)
    assert simulation.job.health.hangs == {} and simulation.job.health.barred == {"c": 1e6}


@pytest.mark.fault
@pytest.mark.parametrize("hosts", ["ab", "abc"])
def test_a_host_that_hangs_in_every_round_never_keeps_the_job_from_stepping(hosts: str) -> None:
    """For a day; each time it is taken again it is left out for longer."""
    simulation = Simulation(
        job(hang_s=1800.0, max_hosts=len(hosts), left=3, does_refill=True,
            is_loss_free=True)
    )  # fmt: skip
    simulation.hangers = {"b"}
    for name in hosts:
        simulation.join(name, 2)
    made, steps = 0.0, 0
    while simulation.now < 86400.0:
        simulation.deliver()
        before = simulation.job
        simulation.train(1)
        simulation.tick(10.0)
        is_training = before.phase is m.Phase.RUNNING and "b" not in m.active(before)
        made, steps = made + 10.0 * is_training, steps + is_training
        assert simulation.job.phase is not m.Phase.ENDED
    assert made > 0.75 * 86400.0, f"{made} s of a day were trained in {len(rounds(simulation))}"
