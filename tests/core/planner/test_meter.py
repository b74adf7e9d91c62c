"""What a step takes, by what the coordinator hears of it."""

import pytest

from scalai.core.planner.meter import KEPT, WARM_STEPS, Meter, Reading


def run(
    seconds: float, steps: int, *, meter: Meter | None = None, round: int = 1, start: int = 0,
    at: float = 0.0,
) -> tuple[Meter, list[Reading]]:  # fmt: skip
    """Hear of each of so many steps as it is made."""
    meter, found = meter or Meter(), list[Reading]()
    for number in range(steps + 1):
        meter, reading = meter.look(round, start + number, at + number * seconds)
        found += [reading] if reading else []
    return meter, found


@pytest.mark.parametrize("seconds", [0.01, 0.7, 3.0, 40.0])
def test_it_says_what_a_step_takes(seconds: float) -> None:
    _, found = run(seconds, 20_000)
    assert found
    assert all(each.seconds == pytest.approx(seconds) for each in found)


def test_it_is_said_again_only_as_much_more_is_known() -> None:
    _, found = run(1.0, 10_000)
    assert len(found) <= 6


def test_the_first_steps_and_another_rounds_do_not_count() -> None:
    meter, found = run(100.0, WARM_STEPS)
    assert not found
    assert not meter.windows
    meter, _ = run(1.0, 25, meter=meter, start=WARM_STEPS + 1, at=1000.0)
    assert meter.windows
    meter, _ = meter.look(2, 30, 2000.0)
    assert meter == Meter(2, 30, None, 30)


def test_steps_that_are_heard_of_in_bursts_are_evened_out() -> None:
    meter, found = Meter(), list[Reading]()
    for second in range(200):
        meter, reading = meter.look(1, int(second / 0.3), float(second))
        found += [reading] if reading else []
    assert found
    assert all(each.seconds == pytest.approx(0.3, rel=0.06) for each in found)


def test_a_pause_is_no_usual_step() -> None:
    meter, _ = run(1.0, 25)
    meter = meter.interrupted()
    meter, _ = run(1.0, 200, meter=meter, start=26, at=5000.0)
    assert max(meter.windows) == pytest.approx(1.0)


def test_it_keeps_a_bounded_number_of_windows() -> None:
    meter, _ = run(1.0, 10_000)
    assert len(meter.windows) == KEPT


def test_a_step_back_says_nothing() -> None:
    meter, _ = run(1.0, 25)
    assert meter.look(1, 3, 1e9) == (meter, None)
