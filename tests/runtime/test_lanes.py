"""Work beside a loop: no error is lost, and no lane waits for another."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from scalai.core.errors import StoreError
from scalai.runtime import lanes
from scalai.runtime.lanes import Lanes

pytestmark = pytest.mark.fault

WAIT_S = 60.0


class Loop:
    def __init__(self) -> None:
        self.due: queue.Queue[Callable[[], None]] = queue.Queue()
        self.lanes = Lanes({"memory": 2, "disk": 2, "ordered": 1}, self.due.put)
        self.lanes.start()
        self.hang, self.hangs = threading.Event(), threading.Event()

    def fill(self, lane: str, count: int) -> None:
        """Give a lane work that hangs."""
        for _ in range(count):
            self.lanes.run(lane, "hung", self._wait, lambda result: None)
        assert self.hangs.wait(WAIT_S)

    def _wait(self) -> None:
        self.hangs.set()
        self.hang.wait(WAIT_S)

    def done(self, lane: str) -> None:
        """Wait until a lane has done a piece of work."""
        done: queue.Queue[None] = queue.Queue()
        self.lanes.run(lane, "quick", lambda: None, done.put)
        done.get(timeout=WAIT_S)


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.hang.set()


@pytest.mark.parametrize("error", [StoreError("it cannot be read"), OSError("no room")])
def test_a_failure_for_no_round_in_particular_is_logged(
    loop: Loop, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    loop.lanes.submit("ordered", "looking", fail)
    loop.done("ordered")
    assert "event=error: looking has failed" in caplog.text and str(error) in caplog.text
    assert loop.due.empty()


@pytest.mark.parametrize("fails_in", ["work", "then"])
def test_an_error_of_ours_ends_the_loop_and_not_the_lane(loop: Loop, fails_in: str) -> None:
    def fail(*_: object) -> None:
        raise KeyError("h7")

    work, then = (fail, print) if fails_in == "work" else (lambda: None, fail)
    loop.lanes.run("ordered", "a slip", work, then)
    with pytest.raises(KeyError, match="h7"):
        loop.due.get(timeout=WAIT_S)()
    loop.done("ordered")


def test_it_works_where_no_further_thread_can_begin(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **named: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    for _ in range(8):
        loop.done("memory")


def test_a_disk_that_answers_nobody_leaves_the_threads_for_memory_free(loop: Loop) -> None:
    loop.fill("disk", 20)
    loop.done("memory")


def test_work_of_a_lane_with_one_thread_is_done_in_order(loop: Loop) -> None:
    found: list[int] = []
    for number in range(50):
        loop.lanes.run("ordered", "counting", lambda number=number: number, found.append)  # type: ignore[misc]
    loop.done("ordered")
    assert found == list(range(50))


def test_a_full_lane_says_so_once_and_what_its_threads_do(
    loop: Loop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    loop.fill("ordered", 2)
    loop.lanes.look()
    assert not caplog.text, "work may wait for a while"
    monkeypatch.setattr(lanes, "FULL_S", -1.0)
    for _ in range(2):
        loop.lanes.look()
    (said,) = [line for line in caplog.messages if "event=lane_full" in line]
    assert "lane=ordered waiting=" in said and "hung for 0 s" in said
    loop.hang.set()
    loop.done("ordered")
    loop.lanes.look()
    assert caplog.messages[-1] == "event=lane_free lane=ordered"
