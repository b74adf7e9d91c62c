"""Where workers meet: on one interface, and for as long as they need it."""

import array
import fcntl
import os
import queue
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from scalai.core.errors import PeerError
from scalai.launch.coordinator.rendezvous_store import OpenStores, RendezvousStores, connections
from support.ports import free_port
from support.stopping import stop
from support.waiting import wait_until

pytestmark = pytest.mark.fault

DEADLINE_S = 120.0
LINGER_S = 1.0
STOPPED_S = 5.0
"""Many times what a ready process needs to open a store."""
FIRST = free_port("127.0.0.1")
PORTS = range(FIRST, FIRST + 100)
Answers = queue.SimpleQueue[int | PeerError]


@pytest.fixture(scope="module")
def stores() -> Iterator[RendezvousStores]:
    stores = RendezvousStores("127.0.0.1", print, LINGER_S, ports=PORTS)
    yield stores
    stores.end()
    assert stores.process.wait(DEADLINE_S) == 0


def opened(stores: RendezvousStores) -> int:
    """Open a store and return its port."""
    answers = Answers()
    stores.open(answers.put)
    answer = answers.get(timeout=DEADLINE_S)
    assert isinstance(answer, int), answer
    return answer


def is_open(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=DEADLINE_S).close()
        return True
    except (ConnectionRefusedError, ConnectionResetError):  # reset: it closes at this moment
        return False


def test_a_store_listens_on_one_interface_alone_until_it_is_closed(
    stores: RendezvousStores,
) -> None:
    ports = {opened(stores) for _ in range(3)}
    assert len(ports) == 3 and ports <= set(PORTS)
    for port in ports:
        assert is_open("127.0.0.1", port) and not is_open("127.0.0.2", port)
        stores.close(port)
        wait_until(lambda: not is_open("127.0.0.1", port), "it is closed")  # noqa: B023


def test_workers_meet_there(stores: RendezvousStores) -> None:
    from torch.distributed import TCPStore  # not in its __all__

    port = opened(stores)
    first, second = (TCPStore("127.0.0.1", port, is_master=False) for _ in range(2))
    first.set("key", "value")
    assert second.get("key") == b"value"
    # One is the store's own. On a busy machine a client tries twice.
    wait_until(lambda: connections([port]) == 3, "they are counted")


def test_it_outlives_its_coordinator_while_workers_are_connected_and_no_longer(
    stores: RendezvousStores,
) -> None:
    port = opened(stores)
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S):
        process = stores.process
        assert process.stdin is not None
        process.stdin.close()  # as when the coordinator is killed
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2 * LINGER_S)
        assert is_open("127.0.0.1", port)
    assert process.wait(DEADLINE_S) == 0
    assert is_open("127.0.0.1", opened(stores)), "who still opens one gets it of another process"


@pytest.mark.parametrize("is_deaf", [False, True], ids=["", "no signal ends it in time"])
def test_where_its_process_is_stopped_another_one_opens_the_store(
    is_deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job would end by it."""
    stores = RendezvousStores("127.0.0.1", print, LINGER_S, open_s=STOPPED_S)
    try:
        stores.wait_ready()
        stopped, answers = stores.process, Answers()
        stop(stopped.pid)
        if is_deaf:
            monkeypatch.setattr(stopped, "kill", lambda: None)
        stores.open(answers.put)
        stores.close(1)
        assert answers.empty(), "nobody has waited for it"
        port = answers.get(timeout=DEADLINE_S)
        assert isinstance(port, int) and is_open("127.0.0.1", port)
        if is_deaf:
            os.kill(stopped.pid, signal.SIGKILL)
        assert stopped.wait(DEADLINE_S) == -signal.SIGKILL
    finally:
        stores.end()


def test_where_its_process_dies_of_the_question_another_one_opens_the_store(
    stores: RendezvousStores,
) -> None:
    """It may be killed for memory at any time, also just after it was seen alive."""
    opened(stores)
    dies, answers, unread = stores.process, Answers(), array.array("i", [0])

    def is_asked() -> bool:
        assert dies.stdin is not None
        fcntl.ioctl(dies.stdin, termios.FIONREAD, unread)
        return unread[0] > 0

    stop(dies.pid)
    stores.open(answers.put)
    wait_until(is_asked, "it is asked")
    dies.kill()
    port = answers.get(timeout=DEADLINE_S)
    assert isinstance(port, int) and is_open("127.0.0.1", port) and stores.process is not dies


def test_where_no_process_can_begin_that_is_the_answer_and_the_next_try_may_succeed(
    stores: RendezvousStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory, or no room for another process, for a while."""

    def refuse(*given: object, **how: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    answers = Answers()
    stores.process.kill()
    stores.process.wait(DEADLINE_S)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", refuse)
        stores.open(answers.put)
        answer = answers.get(timeout=DEADLINE_S)
    assert isinstance(answer, PeerError) and "temporarily unavailable" in str(answer)
    stores.close(1)
    assert is_open("127.0.0.1", opened(stores))


def test_what_others_write_to_its_output_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = ["welcome to the cluster", '{"level": "info"}', "{"]
    (tmp_path / "sitecustomize.py").write_text(f"print(*{noise!r}, sep='\\n')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    stores = RendezvousStores("127.0.0.1", print, LINGER_S)
    try:
        assert is_open("127.0.0.1", opened(stores))
    finally:
        stores.end()
        assert stores.process.wait(DEADLINE_S) == 0


def test_a_next_store_that_cannot_be_made_ends_none_that_is_open() -> None:
    """Workers are connected to it."""
    ports, is_full = iter((1, 2)), list[bool]()

    def make() -> SimpleNamespace:
        if is_full:
            raise OSError("Too many open files")
        return SimpleNamespace(port=next(ports))

    stores = OpenStores(make)
    assert stores.open() == 1
    is_full.append(True)
    stores.prepare()
    with pytest.raises(OSError, match="Too many open files"):
        stores.open()
    is_full.clear()
    assert stores.open() == 2


def test_one_whose_coordinator_has_gone_before_it_was_ready_ends_without_a_word() -> None:
    module = "scalai.launch.coordinator.rendezvous_store"
    command = [sys.executable, "-m", module, "127.0.0.1", "0.1", "0", "1"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdin.close()
    process.stdout.close()
    with process.stderr:
        assert process.wait(DEADLINE_S) == 0
        assert b"Traceback" not in process.stderr.read()
