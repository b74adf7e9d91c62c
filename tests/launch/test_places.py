"""Finding a job's coordinator: who is slow about it holds nobody up for ever."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scalai.core.errors import PeerError, ScalaiError, UsageError
from scalai.launch import host_signals
from scalai.launch.config.endpoint import CARD, join_endpoint, write_card
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator import discovery as places
from scalai.launch.coordinator import process as coordinator_process
from scalai.launch.coordinator.server import Coordinator
from scalai.runtime.calls import Server
from support.lines import Lines
from support.ports import free_port
from support.waiting import wait_until

pytestmark = pytest.mark.fault

HOLD = """
import sys
from pathlib import Path
from scalai.launch.coordinator import discovery as places
from support.waiting import stay
with places.one_at_a_time(Path(sys.argv[1])):
    print("held", flush=True)
    stay()
"""


def test_an_agent_that_stands_still_while_it_looks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o700)
    folder = tmp_path / "job"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            os.kill(holder.pid, signal.SIGSTOP)
            monkeypatch.setattr(places, "LOCK_QUIET_S", 0.1)
            monkeypatch.setattr(places, "LOCK_TIMEOUT_S", 0.3)
            with (
                caplog.at_level(logging.WARNING),
                pytest.raises(PeerError, match=f"process {holder.pid} has been looking"),
                places.one_at_a_time(folder),
            ):
                pass
            assert f"waiting for process {holder.pid}" in caplog.text
        finally:
            holder.kill()
    with places.one_at_a_time(folder):  # the lock went with its holder
        pass


class EndingCoordinator:
    """One whose job ends while ``meanwhile`` happens."""

    address, term, lease, ended_by, watch = ("127.0.0.1", 1), 1, None, "finished", None

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self._meanwhile = meanwhile
        self.heard: host_signals.HeardSignals | None = None

    def run(self) -> int:
        self._meanwhile()
        return 0


def end_coordinator(folder: Path, meanwhile: Callable[[], object], *flags: str) -> int:
    """Return the job's exit code."""
    spec = JobSpec.read(parse_options([*flags, "--job", folder.name, "script.py"]))
    ending = EndingCoordinator(meanwhile)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_signals.HeardSignals, "listen", lambda heard: None)
        patch.setattr(coordinator_process, "open_coordinator", lambda *given, **how: ending)
        return coordinator_process.serve(spec, folder, "127.0.0.1", 1, b"of the first run")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    path = tmp_path / "job"
    path.mkdir(0o700)
    return path


def test_a_coordinator_that_ends_takes_its_card_away(folder: Path) -> None:
    end_coordinator(folder, lambda: None)
    assert not (folder / CARD).exists()


def test_a_coordinator_that_ends_leaves_the_card_of_its_successor(folder: Path) -> None:
    cards: list[bytes] = []

    def succeed() -> None:
        write_card(folder, ("127.0.0.1", 2), b"of the second run")
        cards.append((folder / CARD).read_bytes())

    end_coordinator(folder, succeed)
    assert (folder / CARD).read_bytes() == cards[0]


def test_a_coordinator_that_ends_leaves_the_card_while_another_is_started(folder: Path) -> None:
    """Whoever holds the lock has seen that nobody answers there, or replaces the card."""
    with ExitStack() as lock:
        end_coordinator(folder, lambda: lock.enter_context(places.one_at_a_time(folder)))
        assert (folder / CARD).exists()


def test_a_standalone_job_that_ends_leaves_the_lock_to_one_that_holds_it(folder: Path) -> None:
    with ExitStack() as lock:
        hold = partial(lock.enter_context, places.one_at_a_time(folder))
        end_coordinator(folder, hold, "--standalone")
        assert (folder / places.LOCK).exists()
    end_coordinator(folder, lambda: None, "--standalone")
    assert not folder.exists()


def test_whoever_waited_for_a_lock_that_was_removed_takes_the_new_one(folder: Path) -> None:
    """Two must not hold the same lock under two files."""
    waiting = threading.Event()
    found: list[bool] = []

    def wait_for_it() -> None:
        waiting.set()
        with places.one_at_a_time(folder):
            found.append((folder / places.LOCK).exists())

    thread = threading.Thread(target=wait_for_it, daemon=True)
    with places.one_at_a_time(folder):
        thread.start()
        waiting.wait(60)
        (folder / places.LOCK).unlink()
    thread.join(60)
    assert found == [True]


def test_a_folder_that_cannot_be_cleared_away_leaves_the_jobs_end_as_it_is(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert end_coordinator(folder, lambda: folder.chmod(0o777)) == 0
    assert "event=card_left" in caplog.text and "may be written to by other users" in caplog.text


def test_a_coordinator_by_hand_listens_nowhere_while_an_agent_starts_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(places, "LOCK_QUIET_S", 0.1)
    monkeypatch.setattr(host_signals.HeardSignals, "listen", lambda heard: None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    spec = JobSpec.read(parse_options(["--job", folder.name, "script.py"]))
    errors: list[ScalaiError] = []

    def serve() -> None:
        try:
            coordinator_process.serve(spec, folder, "127.0.0.1", port, b"by hand")
        except ScalaiError as error:
            errors.append(error)

    by_hand = threading.Thread(target=serve, daemon=True)
    with places.one_at_a_time(folder):
        by_hand.start()
        wait_until(lambda: "event=waiting for process" in caplog.text, "it waits for the lock")
        # As the coordinator that this agent starts.
        address, token = ("127.0.0.1", port), b"of the agent"
        started = Coordinator(spec, address, token, Lines(), alone_s=0.0)
        write_card(folder, address, token)
    by_hand.join(60)
    assert started.run() == 1  # nobody is there
    (error,) = errors
    assert isinstance(error, UsageError)
    assert f"already, at 127.0.0.1:{port}" in str(error)


@pytest.mark.parametrize("size", [0, 1 << 20], ids=["small", "more than a pipe holds"])
def test_a_coordinator_that_ends_at_once_is_heard(
    folder: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Before it has read what it is to do."""
    text = "import sys; print('no such job, says the coordinator'); sys.exit(2)"
    monkeypatch.setattr(places, "COORDINATOR", ["-c", text])
    spec = JobSpec.read(parse_options(["--job", "job", "script.py", "x" * size]))
    with pytest.raises(UsageError, match="no such job, says the coordinator"):
        places.start_coordinator(spec, folder, None, None)


TOKEN = "a token of the job"


@pytest.fixture
def other_container() -> Iterator[str]:
    """The endpoint of a coordinator that has left no card in this machine's shared memory."""
    server = Server(("127.0.0.1", 0), TOKEN.encode(), object, lambda peer, request: None)
    yield f"127.0.0.1:{server.address[1]}"
    server.close()


def job_at(folder: Path, endpoint: str) -> JobSpec:
    flags = ["--job", "j", "--store-dir", str(folder), "--coordinator", endpoint, "script.py"]
    return JobSpec.read(parse_options(flags))


def test_who_answers_at_the_named_address_is_joined_whoever_owns_the_address(
    other_container: str, tmp_path: Path
) -> None:
    """Two containers with the host's network, each with a shared memory of its own."""
    place = places.find_coordinator(job_at(tmp_path, other_container), TOKEN)
    assert f"{place.address[0]}:{place.address[1]}" == other_container
    assert place.started is None and not place.is_here, "it has no card here to follow it by"


def test_of_two_containers_that_start_at_once_the_later_one_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, tokens = ("127.0.0.1", free_port("127.0.0.1")), [TOKEN, "another token"]
    with ExitStack() as others:

        def taken(*given: object, **named: object) -> None:
            other = Server(address, tokens.pop(0).encode(), object, lambda peer, request: None)
            others.callback(other.close)
            raise PeerError("cannot listen: Address already in use")

        monkeypatch.setattr(places, "start_coordinator", taken)
        spec = job_at(tmp_path, join_endpoint(*address))
        place = places.find_coordinator(spec, TOKEN)
        assert place.address == address and not place.is_here
        others.close()
        with pytest.raises(PeerError, match="already in use"):  # by somebody without the token
            places.find_coordinator(spec, TOKEN)


def test_a_name_that_nobody_knows_yet_is_waited_for_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resolve, asked = socket.getaddrinfo, list[str]()

    def late(host: str, *more: Any, **named: Any) -> Any:
        asked.append(host)
        if len(asked) < 4:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1", *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    monkeypatch.setattr(places, "WAITING_S", 0.01)
    monkeypatch.setattr(places, "LOOK_S", 0.1)
    here = places.Place(("127.0.0.1", 1), TOKEN.encode(), is_here=True)
    monkeypatch.setattr(places, "start_coordinator", lambda *given, **named: here)
    spec = job_at(tmp_path, f"head-0:{free_port('127.0.0.1')}")
    assert places.find_coordinator(spec, TOKEN) is here
    assert "event=waiting for the name head-0" in caplog.text
    monkeypatch.setattr(places, "JOIN_TIMEOUT_S", 0.0)
    asked.clear()
    with pytest.raises(UsageError, match="which is unknown"):
        places.find_coordinator(spec, TOKEN)


WAITS_IN_VAIN = ("--coordinator", "192.0.2.1:29400", "--nproc-per-node", "1", "script.py")


def test_an_agent_says_that_it_waits_for_a_coordinator_and_a_signal_ends_it_with_75(
    tmp_path: Path,
) -> None:
    log = tmp_path / "a.log"
    command = [str(Path(sys.executable).with_name("scalai-run")), "--store-dir", str(tmp_path)]
    (tmp_path / "script.py").touch()
    environment = {**os.environ, "SCALAI_JOB_TOKEN": "ab" * 16}
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, *WAITS_IN_VAIN], env=environment, cwd=tmp_path, stdout=output, stderr=output
        ) as agent,
    ):
        try:
            waiting = "event=waiting for the coordinator at 192.0.2.1:29400"
            wait_until(lambda: waiting in log.read_text(), "it says so")
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(60) == 75
        finally:
            agent.kill()
    assert "event=exit" in log.read_text()
