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
from support.steps import DEADLINE_S, Beside
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

    def __init__(self, address: Any) -> None:
        self.gone: queue.Queue[str | None] = queue.Queue()
        self.waits, self.release = threading.Event(), threading.Event()
        self.server = Server(
            address, TOKEN, Requests, self.handle, lambda peer: self.gone.put(peer.name)
        )
        self._channels = contextlib.ExitStack()

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
                self.waits.set()
                assert self.release.wait(DEADLINE_S)
        return None

    def connect(self, token: bytes = TOKEN, **limits: float | None) -> Channel:
        """Return a channel that is closed with the server."""
        channel = Channel(self.server.address, token, **limits)  # type: ignore[arg-type]
        return self._channels.enter_context(contextlib.closing(channel))

    def close(self) -> None:
        self.release.set()
        self._channels.close()
        self.server.close()


def echoes(channel: Channel, number: int = 1) -> bool:
    """Whether a server answers."""
    return channel.call(Say("", number)) == Said("", number)


@pytest.fixture(params=["tcp", "unix"])
def echo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Echo]:
    echo = Echo(("127.0.0.1", 0) if request.param == "tcp" else str(tmp_path / "socket"))
    yield echo
    echo.close()


@pytest.fixture
def tcp_echo() -> Iterator[tuple[Echo, tuple[str, int]]]:
    echo = Echo(("127.0.0.1", 0))
    assert isinstance(echo.server.address, tuple)
    yield echo, echo.server.address
    echo.close()


@pytest.fixture
def channel(echo: Echo) -> Channel:
    return echo.connect()


def test_a_call_is_answered(channel: Channel) -> None:
    assert channel.call(Say("ä" * 5_000_000, -(2**63))) == Said("ä" * 5_000_000, -(2**63))
    assert channel.call(Name("a")) is None
    # Names of files are bytes.
    assert channel.call(Say("/caf\udce9", 1)) == Said("/caf\udce9", 1)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (Refuse(), "Ask for something else"),
        (Refuse("/caf\udce9 is full"), "/caf\udce9 is full"),
        (Fail(), r"KeyError.*The log of the process"),
    ],
    ids=["ours", "no UTF-8", "unforeseen"],
)
def test_an_error_of_the_server_reaches_the_caller_who_may_go_on(
    channel: Channel, request_: Request[None], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(AnswerError, match=why):
        channel.call(request_)
    assert echoes(channel)
    assert ("event=call_failed" in caplog.text) == isinstance(request_, Fail)


def test_an_answer_that_is_too_long_is_an_error_that_says_so(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the caller would take the server for gone, and ask for it again and again."""
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 300)
    with pytest.raises(AnswerError, match="too long"):
        channel.call(Repeat("a", 1000))
    with pytest.raises(MessageError, match="too long"):
        channel.call(Say("a" * 1000))
    assert echoes(channel)


def test_a_wrong_token_is_refused_and_the_error_says_what_to_do(echo: Echo) -> None:
    with pytest.raises(PeerError, match="Give all agents of a job the same token"):
        echo.connect(b"another")
    assert echoes(echo.connect())


def test_nobody_there_is_an_error() -> None:
    with pytest.raises(PeerError, match="nobody answers"):
        Channel(("127.0.0.1", free_port("127.0.0.1")), TOKEN)


def test_a_silent_client_and_noise_do_not_block_others(
    tcp_echo: tuple[Echo, tuple[str, int]],
) -> None:
    echo, address = tcp_echo
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(5)]
        silent[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert echoes(echo.connect())


def test_a_call_that_takes_long_does_not_block_other_connections(
    echo: Echo, channel: Channel
) -> None:
    slow = Beside(lambda: channel.call(Wait()))
    assert echo.waits.wait(DEADLINE_S)
    assert echoes(echo.connect()) and slow.is_alive()
    echo.release.set()
    assert slow.end().result == [None]


def test_threads_may_share_a_channel(channel: Channel) -> None:
    threads = [Beside(lambda n=n: echoes(channel, n)) for n in range(20)]  # type: ignore[misc]
    assert [thread.end().result for thread in threads] == [[True]] * 20


def test_a_peer_that_goes_away_is_noticed_by_its_name(echo: Echo, channel: Channel) -> None:
    channel.call(Name("a"))
    channel.close()
    assert echo.gone.get(timeout=DEADLINE_S) == "a"


def test_a_server_that_goes_away_during_a_call_is_an_error(echo: Echo, channel: Channel) -> None:
    """The caller learns it at once, whatever it waits for."""
    waiting = Beside(lambda: channel.call(Wait()))
    assert echo.waits.wait(DEADLINE_S)
    echo.server.close()
    (error,) = waiting.end().errors
    assert isinstance(error, PeerError) and "went away during Wait" in str(error)


@pytest.mark.fault
def test_a_silent_listener_is_an_error_in_time() -> None:
    """It takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(SilentError, match=r"silent for 0\.3 s"):
            Channel(listener.getsockname(), TOKEN, connect_s=0.3)


@pytest.mark.fault
def test_a_call_that_is_not_answered_in_time_is_an_error(echo: Echo) -> None:
    channel = echo.connect(call_s=0.3)
    with pytest.raises(SilentError, match=r"silent for 0\.3 s.*asked to Wait"):
        channel.call(Wait())
    echo.release.set()
    with pytest.raises(PeerError):  # the late answer is not taken for that of another call
        channel.call(Name("a"))


@pytest.mark.fault
def test_a_client_that_proves_nothing_is_cut_off(
    tcp_echo: tuple[Echo, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.3)
    with socket.create_connection(tcp_echo[1], timeout=DEADLINE_S) as silent:
        while silent.recv(4096):
            pass  # nothing, and then the end


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
    echo: Echo, channel: Channel, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert "Do the versions differ" in call_raw(echo.server.address, TOKEN, sent)
    assert echoes(channel)
    assert all(record.exc_info is None for record in caplog.records)


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
    command = [sys.executable, "-c", CROWDED, TOKEN.decode()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process, contextlib.ExitStack() as stack:  # type: ignore[call-overload]
        stack.callback(process.kill)
        address = ("127.0.0.1", int(process.stdout.readline()))

        def answers() -> bool:
            with contextlib.closing(Channel(address, TOKEN, connect_s=60)) as channel:
                return channel.call(Status()).text == "{}"

        friend = Channel(address, TOKEN, connect_s=60, call_s=60)
        stack.enter_context(contextlib.closing(friend))
        idle = [socket.create_connection(address, timeout=60) for _ in range(120)]
        assert friend.call(Status()).value() == {} and answers()
        for connection in idle:
            connection.close()
        assert answers()
        log = process.communicate("", timeout=60)[1]
        assert "Traceback" not in log and log.count("event=listener") <= 3, log


@pytest.mark.fault
def test_a_path_that_no_socket_takes_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the kernel takes 107. Use a shorter --store-dir"):
        Echo(str(tmp_path / ("x" * 120)))


def test_who_waits_for_this_process_is_not_silent_and_who_does_not_read_is() -> None:
    near, far = socket.socketpair()
    framed, other = framing.FramedSocket(near, "the peer", None), framing.FramedSocket(far, "", 30)
    peer = Peer(framed, 30.0)
    with framed, other:
        requests = peer.requests()
        other.send(b"one")
        assert peer.silence_s() == 0.0, "what it has sent lies there"
        assert next(requests) == b"one"
        assert peer.silence_s() == 0.0, "it waits for its answer"
        answering = Beside(lambda: peer.answer(bytes(64 << 20)))
        end = time.monotonic() + 30.0
        while peer.silence_s() < 0.1:  # it reads nothing of it
            assert time.monotonic() < end
        assert len(other.receive()) == 64 << 20
        assert not answering.end().errors
        other.send(b"two")
        assert next(requests) == b"two" and peer.silence_s() == 0.0


def test_an_address_of_ipv6_serves_and_is_named_in_brackets() -> None:
    try:
        port = free_port("::1")
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with pytest.raises(PeerError, match=rf"\[::1\]:{port} cannot be reached"):
        Channel(("::1", port), TOKEN)
    server = Server(("::1", port), TOKEN, Say, lambda peer, asked: Said(asked.text, 1))
    with contextlib.closing(server), contextlib.closing(Channel(("::1", port), TOKEN)) as channel:
        assert channel.call(Say("hello")) == Said("hello", 1)


def test_listeners_share_a_range_of_ports_until_all_are_in_use() -> None:
    first = free_port("127.0.0.1")
    ports, servers = range(first, first + 2), list[Server]()
    try:
        for _ in ports:
            servers.append(Server(("127.0.0.1", 0), TOKEN, Say, lambda *call: None, ports=ports))
        assert {server.address[1] for server in servers} == set(ports)
        with pytest.raises(PeerError, match=f"all of --port-range {first}-{first + 1} are in use"):
            Server(("127.0.0.1", 0), TOKEN, Say, lambda *call: None, ports=ports)
    finally:
        for server in servers:
            server.close()
