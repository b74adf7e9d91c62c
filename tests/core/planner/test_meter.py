"""What a step and a change take, by what the coordinator hears of them."""

from dataclasses import replace

import pytest

from scalai.core.degrees.degrees import Degrees
from scalai.core.job.spacing import Pace
from scalai.core.planner.meter import (
    KEPT,
    WARM_STEPS,
    ChangeTime,
    Meter,
    Moves,
    Reading,
    change_time,
    host_ratios,
    replica_hosts,
    replica_paces,
)


def run(
    seconds: float, steps: int, *, meter: Meter | None = None, start: int = 0, at: float = 0.0,
    burst_s: float = 0.0,
) -> tuple[Meter, list[Reading]]:  # fmt: skip
    """Hear of each of so many steps as it is made, or every ``burst_s`` seconds."""
    meter, found = meter or Meter(), list[Reading]()
    for number in range(steps + 1):
        now = number * (burst_s or seconds)
        meter, reading = meter.look(1, start + int(now / seconds + 1e-9), at + now)
        found += [reading] if reading else []
    return meter, found


@pytest.mark.parametrize(
    ("seconds", "burst_s"), [(0.01, 0.0), (0.7, 0.0), (3.0, 0.0), (40.0, 0.0), (0.3, 1.0)]
)
def test_it_says_what_a_step_takes_and_again_only_as_much_more_is_known(
    seconds: float, burst_s: float
) -> None:
    meter, found = run(seconds, 40_000, burst_s=burst_s)
    assert 0 < len(found) <= 6 and len(meter.windows) == KEPT
    assert all(each.seconds == pytest.approx(seconds, rel=0.06) for each in found)


def test_the_first_steps_and_another_rounds_do_not_count() -> None:
    meter, found = run(100.0, WARM_STEPS)
    assert not found and not meter.windows
    meter, _ = run(1.0, 25, meter=meter, start=WARM_STEPS + 1, at=1000.0)
    assert meter.windows and meter.look(1, 3, 1e9) == (meter, None), "a step back says nothing"
    meter, _ = meter.look(2, 30, 2000.0)
    assert meter == Meter(2, 30, None, 30)


def test_a_pause_is_no_usual_step() -> None:
    meter, _ = run(1.0, 25)
    meter, _ = run(1.0, 200, meter=meter.interrupted(), start=26, at=5000.0)
    assert max(meter.windows) == pytest.approx(1.0)


PACE = Pace(step_s=1.0, write_s=10.0, start_s=30.0)
REPORT = {
    "detect": 3.0, "build": 50.0, "drain": 1.0, "snapshot": 8.0, "commit": 2.0, "relaunch": 6.0,
    "plan": 1.0, "move": 12.0, "restore": 5.0, "proof": 2.0, "first_step": 4.0,
}  # fmt: skip
STOP = Moves().reported(REPORT, is_stop=True)


@pytest.mark.parametrize(
    ("pace", "moves", "found"),
    [
        (PACE, STOP, ChangeTime(fixed_s=16.0, moves_s=25.0)),
        (PACE, Moves(snapshot_s=99.0, arrival_s=99.0), ChangeTime(fixed_s=1.0, moves_s=40.0)),
        (replace(PACE, write_s=None), STOP, None),
        (replace(PACE, start_s=None), STOP, None),
    ],
    ids=["told apart", "within the part in which bytes move", "never stopped", "never started"],
)
def test_a_change_takes_what_any_does_and_what_its_bytes_take(
    pace: Pace, moves: Moves, found: ChangeTime | None
) -> None:
    assert change_time(pace, moves) == found


def test_after_a_failure_the_snapshot_of_the_last_stop_counts() -> None:
    failure = {**REPORT, "snapshot": 4.0, "move": 2.0, "restore": 1.0}
    assert STOP.reported(failure, is_stop=False) == Moves(snapshot_s=8.0, arrival_s=3.0)


@pytest.mark.parametrize(
    ("fixed_s", "moves_s"), [(-1.0, 2.0), (1.0, -1.0), (0.0, 0.0), (float("nan"), 1.0)]
)
def test_what_is_no_time_is_refused(fixed_s: float, moves_s: float) -> None:
    with pytest.raises(ValueError, match="no time of a change"):
        ChangeTime(fixed_s, moves_s)


ALONE = tuple((host,) for host in "abcd")
"""Each replica on a host of its own."""


@pytest.mark.parametrize(
    ("windows", "before", "found"),
    [
        ({"b": (2.0, 2.1, 1.9)}, {}, {"b": 2.0}),
        ({"b": (2.0, 2.1, 1.05)}, {}, {}),  # not in each window
        ({"b": (2.0, 2.1, 1.05)}, {"b": 1.8}, {"b": 2.0}),  # it counts until it is alike
        ({"b": (1.07, 1.08, 1.06)}, {"b": 1.8}, {"b": 1.07}),
        ({"b": (1.07, 1.08, 1.06)}, {}, {}),
        ({"b": (1.04, 1.2, 1.0)}, {"b": 1.8}, {}),
        ({"b": (0.5, 0.5, 0.6)}, {}, {"b": 0.5}),  # faster than the usual one
        ({"c": (2.0,) * 3, "d": (3.0,) * 3}, {}, {"c": 2.0, "d": 3.0}),  # half of them
    ],
)
def test_a_host_is_slower_if_each_window_says_so_and_until_they_are_alike(
    windows: dict[str, tuple[float, ...]], before: dict[str, float], found: dict[str, float]
) -> None:
    all_of = {host: windows.get(host, (1.0, 1.0, 1.0)) for host in "abcd"}
    assert host_ratios(all_of, ALONE, before) == pytest.approx(found)
    in_hours = {host: [3600 * each for each in its] for host, its in all_of.items()}
    assert host_ratios(in_hours, ALONE, before) == pytest.approx(found)


def test_a_replica_is_as_slow_as_its_slowest_host() -> None:
    """Two replicas in two stages: the first stage of each does not wait for the last one."""
    replicas = replica_hosts((("a", 1), ("b", 1), ("c", 1), ("d", 1)), Degrees(1, 2, 2))
    assert replicas == (("a", "c"), ("b", "d"))
    times = {"a": (0.4,) * 3, "b": (0.5,) * 3, "c": (1.0,) * 3, "d": (2.0,) * 3}
    ratios = host_ratios(times, replicas, {})
    assert ratios == {"b": 2.0, "d": 2.0}
    assert replica_paces(replicas, ratios) == (100, 200)
    # Elsewhere the hosts of the slow replica are in two.
    others = replica_hosts((("a", 1), ("b", 1), ("d", 1), ("c", 1)), Degrees(1, 2, 2))
    assert others == (("a", "d"), ("b", "c")) and replica_paces(others, ratios) == ()
    shared = replica_hosts((("a", 2), ("b", 2)), Degrees(1, 2, 2))
    assert shared == (("a", "b"), ("a", "b"))
    assert host_ratios({"a": (1.0,) * 3, "b": (2.0,) * 3}, shared, {}) == {}
