"""What runs beside the agent's loop: nothing that goes wrong there is lost."""

import queue
import threading
import time
from collections.abc import Callable

import pytest

from scalai.core.errors import StoreError
from scalai.launch.agent.background import Background


def submitted(error: Exception) -> Callable[[], None]:
    """Return what the agent's loop is handed when work for no round in particular fails."""
    put: queue.Queue[Callable[[], None]] = queue.Queue()

    def work() -> None:
        raise error

    background = Background(put.put)
    background.start()
    background.submit(work)
    return put.get(timeout=60)


@pytest.mark.parametrize("error", [StoreError("it cannot be read"), OSError("no room")])
def test_a_failure_for_no_round_in_particular_is_logged(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    done: queue.Queue[None] = queue.Queue()
    background = Background(lambda due: None)
    background.start()

    def work() -> None:
        done.put(None)
        raise error

    background.submit(work)
    done.get(timeout=60)
    end = time.monotonic() + 60
    while str(error) not in caplog.text and time.monotonic() < end:
        time.sleep(0.01)
    assert "event=error" in caplog.text and str(error) in caplog.text


def test_it_works_where_no_further_thread_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    put: queue.Queue[Callable[[], None]] = queue.Queue()
    done: queue.Queue[int] = queue.Queue()
    background = Background(put.put)
    background.start()

    def full(*arguments: object, **named: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    for number in range(8):
        background.submit(lambda number=number: done.put(number))  # type: ignore[misc]
    assert sorted(done.get(timeout=60) for _ in range(8)) == list(range(8))
    assert put.empty()


def test_a_disk_that_answers_nobody_leaves_the_threads_for_memory_free() -> None:
    hang, done = threading.Event(), queue.Queue[bool]()
    background = Background(lambda due: None)
    background.start()

    def wait() -> None:
        hang.wait(300)

    for _ in range(20):
        background.submit(wait, on_disk=True)
    background.submit(lambda: done.put(True))
    assert done.get(timeout=60)
    hang.set()


def test_what_must_not_happen_beside_the_loop_ends_the_agent() -> None:
    with pytest.raises(KeyError, match="h7"):
        submitted(KeyError("h7"))()
