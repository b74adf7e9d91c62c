"""Who fetches replicas is held back by the rate, and by nothing else."""

import logging
from dataclasses import replace

import pytest

from scalai.core.errors import StoreError
from scalai.core.messages.reports import Replicated
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.replica_pace import FIRST_RATE, Traffic
from scalai.launch.agent.replica_rate import ReplicaRate
from support.keeping_hosts import KeepingHosts
from support.store_states import Opener
from support.wire import travelled


class Clock:
    """Time that passes where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def still_needed() -> None: ...


def rate(clock: Clock, slowdown: float = 0.01, every: int = 0) -> ReplicaRate:
    made = ReplicaRate("a", slowdown, clock, clock.sleep)
    made.space(every)
    return made


def test_replicas_come_at_the_rate() -> None:
    clock = Clock()
    made = rate(clock)
    made.begin(8, is_urgent=False)
    made.expect(int(FIRST_RATE))
    for _ in range(20):
        made.came(int(FIRST_RATE / 20), still_needed)
    assert clock.now - 100 == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize(("slowdown", "is_urgent"), [(1.0, False), (0.01, True)])
def test_urgent_ones_and_those_of_who_wants_no_limit_are_not_held_back(
    slowdown: float, is_urgent: bool
) -> None:
    clock = Clock()
    made = rate(clock, slowdown)
    made.begin(8, is_urgent=is_urgent)
    made.came(1 << 50, still_needed)
    assert clock.now == 100


@pytest.mark.fault
def test_the_next_snapshot_ends_the_waiting_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    made = rate(clock, every=10)
    made.look((1, 9))
    made.begin(8, is_urgent=False)
    made.expect(1 << 50)

    def comes() -> None:
        made.look((1, 18))

    with caplog.at_level(logging.INFO):
        made.came(int(100 * FIRST_RATE), comes)
        made.came(1 << 49, still_needed)
        assert clock.now == pytest.approx(100.0, abs=0.2)
        assert caplog.text.count("event=replica_hurried host=a step=8") == 1
        for step, is_late in ((18, True), (28, True), (38, False), (48, True)):
            made.end()
            made.look((1, step + 10 * is_late))
            made.begin(step, is_urgent=False)
            made.came(1, still_needed)
    assert caplog.text.count("event=replica_hurried") == 2, "once for each time that it begins"


def test_who_is_not_needed_any_more_does_not_wait_to_the_end() -> None:
    clock = Clock()
    made = rate(clock)
    made.begin(8, is_urgent=False)

    def is_over() -> None:
        if clock.now > 100.5:
            raise StoreError("over")

    with pytest.raises(StoreError, match="over"):
        made.came(int(1000 * FIRST_RATE), is_over)
    assert clock.now < 101


def test_workers_that_are_gone_hold_nobody_back_for_ever() -> None:
    clock = Clock()
    made = rate(clock, every=10)
    made.begin(8, is_urgent=False)
    made.look((1, 9))
    made.look(None)
    made.came(int(FIRST_RATE), still_needed)
    assert clock.now - 100 == pytest.approx(0.9, abs=0.05)


class Training:
    """Workers that step, seen by ticks."""

    def __init__(self, made: ReplicaRate, clock: Clock) -> None:
        self._made, self._clock, self._step, self._ends_at = made, clock, 0, clock.now

    def run(self, seconds: float, step_s: float, *, is_giving: bool = False) -> None:
        until = self._clock.now + seconds
        while self._clock.now < until:
            while self._ends_at <= self._clock.now:
                self._step, self._ends_at = self._step + 1, self._ends_at + step_s
            self._made.look((1, self._step), is_giving=is_giving)
            self._clock.now += 0.1


def test_a_change_of_the_rate_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Steps take twice as long beside replicas."""
    clock = Clock()
    training = Training(made := rate(clock), clock)
    with caplog.at_level(logging.INFO):
        training.run(40, 0.5)
        made.begin(8, is_urgent=False)
        training.run(100, 1.0)
    first = f"event=replica_rate host=a bytes_per_s={FIRST_RATE / 2:.0f} before={FIRST_RATE:.0f}"
    assert first in caplog.text and made.pace.rate < FIRST_RATE / 2


def test_steps_beside_what_others_fetch_here_are_not_taken_for_usual_ones() -> None:
    clock = Clock()
    training = Training(made := rate(clock), clock)
    training.run(40, 0.5)
    training.run(100, 1.0, is_giving=True)
    assert made.pace.step_s == pytest.approx(0.5, rel=0.1)
    made.begin(8, is_urgent=False)
    training.run(100, 1.0, is_giving=True)
    assert made.pace.rate < FIRST_RATE, "all fetch and give at once, as a rule"


def test_what_is_hurried_says_nothing_of_the_rate() -> None:
    """It comes faster than the rate: that the steps suffer is no reason to lower it."""
    clock = Clock()
    training = Training(made := rate(clock, every=1000), clock)
    training.run(40, 0.5)
    made.begin(8, is_urgent=False)
    made.expect(1 << 50)
    made.came(1 << 20, still_needed)
    training.run(100, 1.0)
    assert made.pace.rate == FIRST_RATE
    made.end()
    made.begin(1008, is_urgent=False)
    made.expect(1 << 20)
    training.run(100, 1.0)
    assert made.pace.rate < FIRST_RATE


BIG = Tensor("main/b", (3, 6 << 20), "F32")
"""A third of it is more than the buffers of a connection hold."""


def slow(clock: Clock) -> ReplicaRate:
    made = rate(clock)
    made.pace = replace(made.pace, rate=1e7)
    return made


def test_what_crosses_takes_as_long_as_the_rate_says(open_store: Opener) -> None:
    clock = Clock()
    job = KeepingHosts(open_store, {"b": slow(clock)})
    try:
        job.write(1, {BIG: 0})
        kept = job.keep("b")
        assert kept.size_bytes == 4 * (6 << 20)
        assert clock.now - 100 == pytest.approx(kept.size_bytes / 1e7, abs=0.2)
    finally:
        job.close()


def test_a_host_that_goes_while_its_bytes_come_slowly_is_named_and_holds_nobody_up(
    open_store: Opener,
) -> None:
    clock = Clock()
    made = slow(clock)
    job, gave = KeepingHosts(open_store, {"b": made}), list[bool]()

    def sleep(seconds: float) -> None:
        clock.now += seconds
        gave.append(job.servers["a"].is_giving)
        job.servers["a"].close()

    made._sleep = sleep
    assert not job.servers["a"].is_giving
    try:
        job.write(1, {BIG: 0})
        command = job.command()
        job.keepers["b"].begin(command.order)
        (found,) = job.keepers["b"].replicated(travelled(command))
        assert isinstance(found, Replicated)
        assert found.reason and not found.is_lasting, found
        assert made._traffic is Traffic.NONE and gave[0]
        store = job.stores["b"]
        assert store.manifest(1).files == job.parts["b"].files
        assert not list(store.directory.glob("fetched-*"))
    finally:
        job.close()
