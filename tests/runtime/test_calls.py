"""Calls between the processes of a job: who has the token is answered, nobody blocks others."""

import contextlib
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scalai.core.errors import AnswerError, MessageError, PeerError, SilentError, UsageError
from scalai.core.messages.shared import Request
from scalai.launch.coordinator.person_calls import Status
from scalai.runtime import connections, framing
from scalai.runtime.calls import Channel, Peer, Server
from scalai.runtime.codec import encode
from support.ports import free_port
from support.wire_words import call_raw

TOKEN = b"a secret of this job"


@dataclass(frozen=True, slots=True)
class Said:
    """What an ``Echo`` answers."""

    text: str
    number: int


@dataclass(frozen=True, slots=True)
class Say(Request[Said]):
    text: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class Name(Request[None]):
    name: str


@dataclass(frozen=True, slots=True)
class Refuse(Request[None]):
    text: str = "this is refused. Ask for something else."


@dataclass(frozen=True, slots=True)
class Repeat(Request[Said]):
    text: str
    times: int


@dataclass(frozen=True, slots=True)
class Fail(Request[None]):
    pass


@dataclass(frozen=True, slots=True)
class Wait(Request[Said | None]):
    pass


Requests = Say | Name | Refuse | Repeat | Fail | Wait


class Echo:
    """A server that answers with what it is sent, and notes who has gone."""

    def __init__(self, address: Any, token: bytes = TOKEN) -> None:
        self.gone: queue.Queue[str | None] = queue.Queue()
        self.release = threading.Event()
        self.server = Server(
            address, token, Requests, self.handle, lambda peer: self.gone.put(peer.name)
        )

    def handle(self, peer: Peer, request: Requests) -> object:
        match request:
            case Say(text, number):
                return Said(text, number)
            case Name(name):
                peer.name = name
            case Repeat(text, times):
                return Said(text * times, times)
            case Refuse(text):
                raise UsageError(text)
            case Fail():
                raise KeyError("name")
            case Wait():
                assert self.release.wait(30)
        return None


def echoes(channel: Channel, number: int) -> bool:
    """Whether a server answers."""
    return channel.call(Say("", number)) == Said("", number)


@pytest.fixture(params=["tcp", "unix"])
def echo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Echo]:
    echo = Echo(("127.0.0.1", 0) if request.param == "tcp" else str(tmp_path / "socket"))
    yield echo
    echo.release.set()
    echo.server.close()


def test_a_call_is_answered(echo: Echo) -> None:
    channel = Channel(echo.server.address, TOKEN)
    assert channel.call(Say("ä" * 5_000_000, -(2**63))) == Said("ä" * 5_000_000, -(2**63))
    assert channel.call(Name("a")) is None
    channel.close()


def test_an_error_of_the_server_reaches_the_caller_who_may_go_on(echo: Echo) -> None:
    channel = Channel(echo.server.address, TOKEN)
    with pytest.raises(PeerError, match="Ask for something else"):
        channel.call(Refuse())
    assert echoes(channel, 1)


def test_texts_that_are_no_utf_8_are_answered_and_refused_like_others(echo: Echo) -> None:
    """Errors name files, whose names are bytes."""
    channel = Channel(echo.server.address, TOKEN)
    assert channel.call(Say("/caf\udce9", 1)) == Said("/caf\udce9", 1)
    with pytest.raises(AnswerError, match="/caf\udce9 is full"):
        channel.call(Refuse("/caf\udce9 is full"))
    assert echoes(channel, 2)


def test_an_answer_that_is_too_long_is_an_error_that_says_so(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the caller would take the server for gone, and ask for it again and again."""
    channel = Channel(echo.server.address, TOKEN)
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 300)
    with pytest.raises(AnswerError, match="too long"):
        channel.call(Repeat("a", 1000))
    with pytest.raises(MessageError, match="too long"):
        channel.call(Say("a" * 1000))
    assert echoes(channel, 3)


def test_a_wrong_token_is_refused_and_the_error_says_what_to_do(echo: Echo) -> None:
    with pytest.raises(PeerError, match="Give all agents of a job the same token"):
        Channel(echo.server.address, b"another")
    assert echoes(Channel(echo.server.address, TOKEN), 2)


def test_a_server_that_does_not_know_the_token_is_refused(tmp_path: Path) -> None:
    stranger = Echo(str(tmp_path / "stranger"), b"guessed")
    with pytest.raises(PeerError):
        Channel(stranger.server.address, TOKEN)
    stranger.server.close()


def test_nobody_there_is_an_error() -> None:
    with pytest.raises(PeerError, match="nobody answers"):
        Channel(("127.0.0.1", free_port("127.0.0.1")), TOKEN)


def test_a_silent_client_and_noise_do_not_block_others(tmp_path: Path) -> None:
    echo = Echo(("127.0.0.1", 0))
    silent = [socket.create_connection(echo.server.address) for _ in range(5)]  # type: ignore[arg-type]  # TCP
    with contextlib.suppress(OSError):
        silent[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert echoes(Channel(echo.server.address, TOKEN), 3)
    for connection in silent:
        connection.close()
    echo.server.close()


def test_a_call_that_takes_long_does_not_block_other_connections(echo: Echo) -> None:
    slow, quick = Channel(echo.server.address, TOKEN), Channel(echo.server.address, TOKEN)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append([slow.call(Wait())]), daemon=True)
    thread.start()
    assert echoes(quick, 4)
    assert not answers
    echo.release.set()
    thread.join(30)
    assert answers


def test_threads_may_share_a_channel(echo: Echo) -> None:
    channel = Channel(echo.server.address, TOKEN)
    wrong: list[int] = []

    def ask(n: int) -> None:
        if not echoes(channel, n):
            wrong.append(n)

    threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


def test_a_peer_that_goes_away_is_noticed_by_its_name(echo: Echo) -> None:
    channel = Channel(echo.server.address, TOKEN)
    channel.call(Name("a"))
    channel.close()
    assert echo.gone.get(timeout=30) == "a"


def test_a_server_that_dies_during_a_call_is_an_error(tmp_path: Path) -> None:
    """The caller learns it at once, whatever it waits for."""
    import multiprocessing

    path = str(tmp_path / "socket")
    process = multiprocessing.get_context("fork").Process(target=_serve_forever, args=(path,))
    process.start()
    end = time.monotonic() + 30
    while True:
        try:
            channel = Channel(path, TOKEN)
            break
        except PeerError:
            assert time.monotonic() < end
            time.sleep(0.01)
    failed: list[str] = []

    def wait() -> None:
        try:
            channel.call(Wait())
        except PeerError as error:
            failed.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    process.kill()
    process.join(30)
    thread.join(30)
    assert len(failed) == 1 and "went away during Wait" in failed[0]


@pytest.mark.fault
def test_a_silent_listener_is_an_error_in_time() -> None:
    """It takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(SilentError, match=r"silent for 0\.3 s"):
            Channel(listener.getsockname(), TOKEN, connect_s=0.3)


@pytest.mark.fault
def test_a_call_that_is_not_answered_in_time_is_an_error(echo: Echo) -> None:
    channel = Channel(echo.server.address, TOKEN, call_s=0.3)
    with pytest.raises(SilentError, match=r"silent for 0\.3 s.*asked to Wait"):
        channel.call(Wait())
    with pytest.raises(PeerError):  # the late answer is not taken for that of another call
        channel.call(Say())


@pytest.mark.fault
def test_a_client_that_proves_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.3)
    echo = Echo(("127.0.0.1", 0))
    with socket.create_connection(echo.server.address, timeout=30) as silent:  # type: ignore[arg-type]  # TCP
        while silent.recv(4096):
            pass  # nothing, and then the end
    echo.server.close()


NO_REQUESTS = {
    "bytes": b"no message",
    "nothing": b"",
    "list": encode([1]),
    "unknown": encode(("Sing", {})),
    "missing": encode(("Name", {})),
    "types": encode(("Say", {"text": 1})),
    "depth": b"\x91" * 1_000_000,
}


@pytest.mark.fault
@pytest.mark.parametrize("sent", NO_REQUESTS.values(), ids=list(NO_REQUESTS))
def test_what_is_no_request_is_refused(
    echo: Echo, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    other = Channel(echo.server.address, TOKEN)
    assert "Do the versions differ" in call_raw(echo.server.address, TOKEN, sent)
    assert echoes(other, 1)
    assert all(record.exc_info is None for record in caplog.records)


def test_an_exception_of_the_server_is_an_answer_and_a_line_in_its_log(
    echo: Echo, caplog: pytest.LogCaptureFixture
) -> None:
    channel = Channel(echo.server.address, TOKEN)
    with pytest.raises(AnswerError, match=r"KeyError.*The log of the process"):
        channel.call(Fail())
    assert echoes(channel, 1)
    assert any("event=call_failed" in record.getMessage() for record in caplog.records)


CROWDED = """
import resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
from scalai.launch.coordinator.person_calls import Status
from scalai.core.messages.shared import JsonText
from scalai.runtime.calls import Server
answer = JsonText("{}")
server = Server(("127.0.0.1", 0), sys.argv[1].encode(), Status, lambda peer, request: answer)
print(server.address[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.fault
def test_more_idle_connections_than_files_may_be_open_deafen_nobody() -> None:
    """Neither while they are there nor afterwards."""
    token = "a secret of this job"
    with subprocess.Popen(
        [sys.executable, "-c", CROWDED, token], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            address = ("127.0.0.1", int(process.stdout.readline()))
            friend = Channel(address, token.encode(), connect_s=60, call_s=60)
            idle = [socket.create_connection(address, timeout=60) for _ in range(120)]
            assert friend.call(Status()).value() == {}
            assert Channel(address, token.encode(), connect_s=60).call(Status()).text == "{}"
            for connection in idle:
                connection.close()
            assert Channel(address, token.encode(), connect_s=60).call(Status()).text == "{}"
            log = process.communicate("", timeout=60)[1]
            assert "Traceback" not in log and log.count("event=listener") <= 3, log
        finally:
            process.kill()


def _serve_forever(path: str) -> None:
    Echo(path)
    threading.Event().wait(120)


@pytest.mark.fault
def test_a_path_that_no_socket_takes_is_refused_with_the_way_out(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    with pytest.raises(UsageError, match=r"the kernel takes 107. Use a shorter --store-dir"):
        Echo(str(long))


def test_who_waits_for_this_process_is_not_silent_and_who_does_not_read_is() -> None:
    near, far = socket.socketpair()
    framed, other = framing.FramedSocket(near, "the peer", None), framing.FramedSocket(far, "", 30)
    peer = Peer(framed, 30.0)
    with contextlib.closing(framed), contextlib.closing(other):
        requests = peer.requests()
        other.send(b"one")
        assert peer.silence_s() == 0.0, "what it has sent lies there"
        assert next(requests) == b"one"
        time.sleep(0.01)
        assert peer.silence_s() == 0.0, "it waits for its answer"
        answering = threading.Thread(target=peer.answer, args=(bytes(64 << 20),))
        answering.start()
        end = time.monotonic() + 30.0
        while peer.silence_s() < 0.1:  # it reads nothing of it
            assert time.monotonic() < end
            time.sleep(0.01)
        assert len(other.receive()) == 64 << 20
        answering.join(30)
        other.send(b"two")
        assert next(requests) == b"two" and peer.silence_s() == 0.0
