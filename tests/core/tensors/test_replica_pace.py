"""Replicas come as fast as the steps of the training bear it, and never so slowly that they would
be late."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.tensors import replica_pace as pace_of
from scalai.core.tensors.replica_pace import (
    BURST_S,
    FIRST_RATE,
    IN_TIME,
    LEAST_RATE,
    RISE,
    Bucket,
    Limit,
    ReplicaLook,
    ReplicaPace,
    Traffic,
    limit,
    looked,
    take,
)

pytestmark = pytest.mark.fault

TICK_S = 0.1


class Training:
    """Workers whose step takes longer the more bytes a second come beside it; seen by ticks."""

    def __init__(
        self, step_s: float = 0.5, per_rate: float = 0.1 / FIRST_RATE, seed: int = 0
    ) -> None:
        self.pace, self.step_s, self.per_rate = ReplicaPace(0.01), step_s, per_rate
        self.now, self.size_bytes, self.step, self.round = 0.0, 0, 0, 1
        self.most = float("inf")
        """Bytes a second that others give at most."""
        self._random, self._ends_at = Random(seed), 0.0
        self.noise = 0.0

    def run(self, seconds: float, traffic: Traffic) -> None:
        until = self.now + seconds
        while self.now < until:
            came = min(self.pace.rate, self.most) if traffic is Traffic.REPLICAS else 0.0
            while self._ends_at <= self.now:
                self.step += 1
                slow = 1 + self.per_rate * came + self._random.uniform(-self.noise, self.noise)
                self._ends_at += self.step_s * slow
            self.size_bytes += int(came * TICK_S)
            look = ReplicaLook(self.now, self.round, self.step, traffic, self.size_bytes)
            self.pace = looked(self.pace, look)
            self.now += TICK_S

    def pause(self, seconds: float) -> None:
        """No step ends: an evaluation."""
        self._ends_at += seconds


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_rate_falls_until_the_steps_bear_it(noise: float) -> None:
    training = Training()  # 10 % at the first rate: a tenth of it is what they bear
    training.noise = noise
    training.run(120, Traffic.NONE)
    training.run(400, Traffic.REPLICAS)
    rates = []
    for _ in range(20):
        training.run(30, Traffic.REPLICAS)
        rates.append(training.pace.rate)
    assert sorted(rates)[len(rates) // 2] * training.per_rate < 0.03, rates
    assert min(rates) >= LEAST_RATE


def test_the_rate_rises_where_nothing_becomes_slower() -> None:
    training = Training(per_rate=0.0)
    training.run(60, Traffic.NONE)
    training.run(60, Traffic.REPLICAS)
    assert training.pace.rate >= FIRST_RATE + 3 * RISE


def test_the_rate_does_not_rise_where_something_else_limits_it() -> None:
    training = Training(per_rate=0.0)
    training.most = FIRST_RATE / 2
    training.run(60, Traffic.NONE)
    training.run(120, Traffic.REPLICAS)
    assert training.pace.rate == FIRST_RATE


def test_what_was_learnt_beside_one_pass_holds_for_the_next_ones() -> None:
    """Each of them is too short to decide anything."""
    training = Training(step_s=0.5)
    for _ in range(12):
        training.run(20, Traffic.NONE)
        training.run(6, Traffic.REPLICAS)
    assert training.pace.rate < FIRST_RATE / 2


@pytest.mark.parametrize("traffic", [Traffic.NONE, Traffic.REPLICAS])
def test_an_evaluation_changes_nothing(traffic: Traffic) -> None:
    training = Training(per_rate=0.0)
    training.run(60, Traffic.NONE)
    if traffic is Traffic.REPLICAS:
        training.run(2, traffic)
    training.pause(300)
    training.run(60, traffic)
    training.run(60, Traffic.REPLICAS)
    assert training.pace.rate >= FIRST_RATE and training.pace.step_s == pytest.approx(0.5, rel=0.1)


def test_nothing_is_decided_where_it_is_not_known_how_long_a_step_takes() -> None:
    training = Training(per_rate=1.0)
    training.run(120, Traffic.REPLICAS)
    assert training.pace.rate == FIRST_RATE and training.pace.excess is None


def test_steps_of_another_round_take_another_time() -> None:
    training = Training()
    training.run(60, Traffic.NONE)
    training.round, training.step, training.step_s = 2, 0, 2.0
    training.run(60, Traffic.REPLICAS)
    assert training.pace.rate == FIRST_RATE, "slower than before says nothing"
    training.run(100, Traffic.NONE)
    assert training.pace.step_s == pytest.approx(2.0, rel=0.1)


def test_urgent_copies_say_nothing_of_the_rate() -> None:
    training = Training()
    training.run(60, Traffic.NONE)
    training.step_s = 5.0
    training.run(300, Traffic.OTHER)
    assert training.pace.rate == FIRST_RATE and training.pace.step_s == pytest.approx(0.5, rel=0.1)


@settings(deadline=None)
@given(st.lists(st.tuples(
    st.floats(0, 100), st.integers(0, 3), st.integers(-1, 50), st.sampled_from(Traffic),
    st.integers(0, 1 << 40),
)))  # fmt: skip
def test_any_history_leaves_a_rate_within_its_bounds(
    looks: list[tuple[float, int, int, Traffic, int]],
) -> None:
    """Clocks that stand, steps that fall, rounds that come back: none divides by zero."""
    pace, now, size = ReplicaPace(0.01), 0.0, 0
    for after, round, step, traffic, more in looks:
        now, size = now + after, size + more
        pace = looked(pace, ReplicaLook(now, round, step, traffic, size))
        assert LEAST_RATE <= pace.rate <= pace_of.MOST_RATE
        found = limit(pace, more, step)
        assert found.rate is None or found.rate >= LEAST_RATE


def known(step_s: float, slowdown: float = 0.01) -> ReplicaPace:
    return ReplicaPace(slowdown, free=(step_s,) * 5)


LEFT = int(100 * FIRST_RATE)


@pytest.mark.parametrize(
    ("pace", "left", "steps", "found"),
    [
        (known(1.0), LEFT, 1000, Limit(FIRST_RATE)),
        (known(1.0), LEFT, 10, Limit(LEFT / (IN_TIME * 10), is_hurried=True)),
        (known(1.0), 1, 0, Limit(None, is_hurried=True)),
        (known(0.0), 1 << 40, 5, Limit(FIRST_RATE)),
        (ReplicaPace(0.01), 1 << 40, 5, Limit(FIRST_RATE)),
        (known(1.0), 1 << 40, None, Limit(FIRST_RATE)),
        (known(1.0, slowdown=1.0), 1 << 40, None, Limit(None)),
    ],
    ids=["in time", "due soon", "the training waits", "a step without time", "nothing is known",
         "no snapshots", "a slowdown of one is no limit"],
)  # fmt: skip
def test_what_is_due_soon_comes_faster_than_the_steps_bear(
    pace: ReplicaPace, left: int, steps: int | None, found: Limit
) -> None:
    assert limit(pace, left, steps) == found


def test_bytes_pass_at_the_rate_whoever_takes_them() -> None:
    bucket, now, waited = Bucket(), 100.0, 0.0
    for _ in range(50):
        bucket, wait_s = take(bucket, 1 << 20, 1e7, now)
        now, waited = now + wait_s, waited + wait_s
    assert waited == pytest.approx(50 * (1 << 20) / 1e7 - BURST_S, abs=0.01)
    bucket, wait_s = take(bucket, 10_000_000, 1e7, now + 1000.0)
    assert wait_s == pytest.approx(1.0 - BURST_S), "a pause saves up a moment and no more"
    bucket, wait_s = take(bucket, 1 << 40, None, now + 2000.0)
    assert wait_s == 0.0 and take(bucket, 1, 1e7, now + 2000.0)[1] < 1e-3, "nothing is owed later"
