"""Share of the time of a command beside a training: as much as its steps bear."""

from collections.abc import Callable
from random import Random

import pytest

from scalai.core.host.background import YIELD_S, Background, seen, share

TICK_S = 0.05
STEP_S = 0.2


def mean_slowdown(
    cost: float, budget: float, step_s: Callable[[float], float] = lambda now: STEP_S
) -> tuple[float, float]:
    """Mean slowdown and share in the second half of 20 virtual minutes, beside a command that would
    make a step longer by the part ``cost``."""
    state, random = Background(budget), Random(1)
    now = done = ran_s = ran_before = 0.0
    while now < 1200.0:
        now += TICK_S
        part = share(state, now)
        ran_s += part * TICK_S
        noise = random.uniform(0.9, 1.1)
        done += TICK_S / (step_s(now) * noise * (1 + cost * part))
        state = seen(state, now, 1, int(done))
        if now <= 600.0:
            ran_before = ran_s
    mean = (ran_s - ran_before) / 600.0
    return cost * mean, mean


@pytest.mark.parametrize("cost", [0.05, 0.5])
@pytest.mark.parametrize("budget", [0.01, 0.05])
def test_the_steps_stay_within_the_budget(cost: float, budget: float) -> None:
    slowdown, mean = mean_slowdown(cost, budget)
    assert slowdown <= 1.5 * budget and mean > 0.0


def test_a_command_that_costs_nothing_runs_nearly_always() -> None:
    assert mean_slowdown(0.0, 0.01)[1] > 0.75


def test_a_training_that_becomes_slower_by_itself_does_not_end_the_command() -> None:
    assert mean_slowdown(0.0, 0.01, lambda now: STEP_S * (1 + now / 1200.0))[1] > 0.3


def test_a_training_that_stands_still_has_the_host_until_it_may_be_none() -> None:
    state = trained(step_s=0.5)
    assert share(state, state.at + 1) > 0.0
    assert share(state, state.at + 4) == share(state, state.at + YIELD_S - 1) == 0.0
    assert share(state, state.at + YIELD_S + 1) == 1.0
    again = seen(state, state.at + YIELD_S + 2, 2, state.step)
    assert share(again, again.at + 1) == 0.0, "another round is measured alone first"


def test_long_steps_are_timed_too() -> None:
    state = trained(step_s=90.0)
    assert state.step_s == 90.0 and share(state, state.at + 400) > 0.0


def trained(step_s: float) -> Background:
    """A training at the begin of a window with the command."""
    state = Background(0.05)
    while state.window is None or not state.window.is_busy:
        state = seen(state, state.at + step_s, 1, state.step + 1)
    return state
