"""TLS under the frames: who has no certificate of the authority is not spoken to, and whoever
stalls, lies or leaves costs the others nothing."""

import contextlib
import logging
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from scalai.core.errors import PeerError, SilentError, TlsError, UnprovenError
from scalai.runtime import listening, tls
from scalai.runtime.connecting import connect
from scalai.runtime.framing import FramedSocket
from scalai.runtime.listening import Listener
from scalai.runtime.tls_stream import TlsStream
from support.certificates import DAY, Authority
from support.tls_ends import TOKEN, WAIT_S, bare_client, listening_as, wait_for


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def refusal_of(address: tuple[str, int], context: ssl.SSLContext) -> str:
    """Shake hands and read. Returns with what the server ends it."""
    with socket.create_connection(address, timeout=WAIT_S) as plain:
        try:
            with context.wrap_socket(plain) as secured:
                assert not secured.recv(1), "it is served"
                return "ended"
        except ssl.SSLError as error:
            return str(error.reason)


# ---------------------------------------------------------------------- it works


def test_two_hosts_of_one_authority_hear_each_other_whatever_their_names(
    authority: Authority,
) -> None:
    with listening_as(authority.identity("a")) as echo:
        with connect(echo.address, TOKEN, WAIT_S, tls=authority.identity("b")) as framed:
            for size in (0, 1, 70_000, 3_000_000):
                framed.send(b"x" * size)
                assert framed.receive() == b"x" * size


def test_the_token_is_needed_inside_of_it_as_well(authority: Authority) -> None:
    with listening_as(authority.identity("a")) as echo, pytest.raises(UnprovenError, match="token"):
        connect(echo.address, b"another", WAIT_S, tls=authority.identity("b"))


def test_what_goes_over_the_wire_is_tls(authority: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard: queue.Queue[bytes] = queue.Queue()

        def listen() -> None:
            connection, _ = server.accept()
            with connection:
                heard.put(connection.recv(4096))

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(PeerError):
            connect(server.getsockname(), TOKEN, WAIT_S, tls=authority.identity())
        thread.join(WAIT_S)
    record = heard.get()
    assert record[:2] == b"\x16\x03" and b"scalai" not in record


def test_what_has_arrived_and_was_not_read_is_seen(authority: Authority) -> None:
    """By the side that listens: it has heard all of the handshake."""
    seen: list[bool] = []
    has_sent, has_seen = threading.Event(), threading.Event()

    def look(framed: FramedSocket) -> None:
        seen.append(framed.has_unread())
        has_seen.set()
        has_sent.wait(WAIT_S)
        end = time.monotonic() + WAIT_S
        while not framed.has_unread() and time.monotonic() < end:
            time.sleep(0.01)
        seen.append(framed.has_unread())
        framed.receive()
        seen.append(framed.has_unread())
        has_seen.set()

    identity = authority.identity("a")
    listener = Listener(("127.0.0.1", 0), TOKEN, look, tls=identity)
    try:
        with connect(listener.address, TOKEN, WAIT_S, tls=identity) as framed:
            assert has_seen.wait(WAIT_S)
            has_seen.clear()
            framed.send(b"word")
            has_sent.set()
            assert has_seen.wait(WAIT_S)
    finally:
        listener.close()
    assert seen == [False, True, False]


def test_one_thread_sends_while_another_receives(authority: Authority) -> None:
    near, far = both_ends(authority)
    blocks = [bytes([number]) * 300_000 for number in range(40)]
    problems: queue.Queue[BaseException] = queue.Queue()

    def beside(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                problems.put(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def send(framed: FramedSocket) -> None:
        for block in blocks:
            framed.send(block)

    def receive(framed: FramedSocket) -> None:
        assert [framed.receive() for _ in blocks] == blocks

    threads = [beside(partial(w, f)) for f in (near, far) for w in (send, receive)]
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert problems.empty(), problems.get()
    near.close()
    far.close()


def both_ends(authority: Authority, timeout_s: float | None = WAIT_S) -> list[FramedSocket]:
    """Return a client's and a server's end."""
    ends = zip(socket.socketpair(), ("a", "b"), (False, True), strict=True)
    return [
        FramedSocket(
            TlsStream(end, name, authority.identity(name), is_server=role), name, timeout_s
        )
        for end, name, role in ends
    ]


def test_sockets_of_the_file_system_stay_plain(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "socket")
    monkeypatch.setattr(tls, "_own", authority.identity())
    listener = Listener(path, TOKEN, lambda framed: framed.send(framed.receive()))
    monkeypatch.setattr(tls, "_own", None)
    with connect(path, TOKEN, WAIT_S) as framed:
        framed.send(b"word")
        assert framed.receive() == b"word"
    listener.close()


def test_a_process_that_is_secured_leaves_no_connection_plain(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "_own", authority.identity())
    with listening_as(None) as echo:
        assert echo.answers(None)
        monkeypatch.setattr(tls, "_own", None)
        with pytest.raises(TlsError):
            echo.answers(None)


# ---------------------------------------------------------------------- the other side is no friend


def test_a_plain_client_at_a_tls_port_is_told_so(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    with listening_as(authority.identity()) as echo:
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(TlsError, match="speaks TLS, and this"),
        ):
            connect(echo.address, TOKEN, WAIT_S)
        assert echo.answers(authority.identity())
        wait_for("does not speak TLS", caplog)


def test_a_tls_client_at_a_plain_port_is_told_so(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    with listening_as(None) as echo:
        with caplog.at_level(logging.WARNING), pytest.raises(TlsError, match="do not agree on TLS"):
            connect(echo.address, TOKEN, WAIT_S, tls=authority.identity())
        assert echo.answers(None)
        wait_for("speaks TLS, and this process does not", caplog)


def test_another_authority_is_taken_by_neither_side(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Authority(tmp_path, "stranger").identity("intruder")
    with listening_as(authority.identity()) as echo, caplog.at_level(logging.WARNING):
        with pytest.raises(TlsError, match="its certificate is not taken"):
            connect(echo.address, TOKEN, WAIT_S, tls=stranger)
        assert echo.answers(authority.identity())
        wait_for("it refuses this side's certificate", caplog)


def test_a_client_with_another_authoritys_certificate_is_not_served(
    authority: Authority, tmp_path: Path
) -> None:
    shown = Authority(tmp_path, "stranger").files("intruder")
    with listening_as(authority.identity()) as echo:
        refusal = refusal_of(echo.address, bare_client(authority, shown))
        assert refusal == "TLSV1_ALERT_UNKNOWN_CA"


def test_a_client_without_a_certificate_is_not_served(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    with listening_as(authority.identity()) as echo, caplog.at_level(logging.WARNING):
        refusal = refusal_of(echo.address, bare_client(authority, None))
        assert refusal == "TLSV13_ALERT_CERTIFICATE_REQUIRED"
        wait_for("it shows no certificate", caplog)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_hears_that_its_certificate_has_expired(
    authority: Authority, version: ssl.TLSVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = authority.identity("mine")
    expired = authority.files("expired", until=-DAY)
    for context in (mine.contexts().client, mine.contexts().server):
        context.maximum_version = version
    mine.contexts().client.load_cert_chain(expired.certificate, expired.key)
    with (
        listening_as(authority.identity()) as echo,
        pytest.raises(TlsError, match=r"refuses this side's certificate.*expired"),
    ):
        connect(echo.address, TOKEN, WAIT_S, tls=mine)


def test_a_server_whose_certificate_has_expired_is_not_spoken_to(authority: Authority) -> None:
    old = authority.identity("old")
    expired = authority.files("expired", until=-DAY)
    old.contexts().server.load_cert_chain(expired.certificate, expired.key)
    with (
        listening_as(old) as echo,
        pytest.raises(TlsError, match=r"is not taken \(certificate has expired\)"),
    ):
        connect(echo.address, TOKEN, WAIT_S, tls=authority.identity())


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_versions_before_1_2_are_not_spoken(authority: Authority) -> None:
    context = bare_client(authority, authority.files("old"))
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with listening_as(authority.identity()) as echo:
        assert refusal_of(echo.address, context) == "TLSV1_ALERT_PROTOCOL_VERSION"


def test_who_stalls_in_the_handshake_keeps_nobody_waiting_and_is_cut_off(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = ssl.MemoryBIO()
    bare = bare_client(authority, None).wrap_bio(ssl.MemoryBIO(), hello)
    with pytest.raises(ssl.SSLWantReadError):
        bare.do_handshake()
    greeting = hello.read()
    with listening_as(authority.identity()) as echo:
        stalled = [socket.create_connection(echo.address, timeout=WAIT_S) for _ in range(5)]
        for connection, length in zip(
            stalled, (0, 1, 5, len(greeting) // 2, len(greeting)), strict=True
        ):
            connection.sendall(greeting[:length])
        assert echo.answers(authority.identity())
        monkeypatch.setattr(listening, "HANDSHAKE_S", 0.2)
        with socket.create_connection(echo.address, timeout=WAIT_S) as late:
            late.sendall(greeting[: len(greeting) // 2])
            assert late.recv(1) == b"", "it is cut off"
        for connection in stalled:
            connection.close()


def test_a_server_that_trickles_its_handshake_has_one_deadline_for_all(
    authority: Authority,
) -> None:
    enough = threading.Event()

    def trickle(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"\x16\x03\x03\x40\x00")  # a record of 16 KB begins
            while not enough.wait(0.02):
                connection.sendall(b"\x00")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=trickle, args=(server,))
        thread.start()
        with pytest.raises(SilentError, match=r"silent for 0\.5 s"):
            connect(server.getsockname(), TOKEN, 0.5, tls=authority.identity())
        enough.set()
        thread.join(WAIT_S)


def test_who_leaves_in_the_middle_is_an_error_that_may_be_tried_again(
    authority: Authority,
) -> None:
    def leave(server: socket.socket) -> None:
        server.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=leave, args=(server,))
        thread.start()
        with pytest.raises(PeerError, match="middle of the TLS handshake") as raised:
            connect(server.getsockname(), TOKEN, WAIT_S, tls=authority.identity())
        assert not isinstance(raised.value, TlsError)
        thread.join(WAIT_S)


@pytest.mark.parametrize("end", ["cut", "close"])
def test_whoever_waits_gets_an_error_when_this_side_ends_it(authority: Authority, end: str) -> None:
    near, far = both_ends(authority, timeout_s=None)
    heard: queue.Queue[PeerError] = queue.Queue()

    def wait() -> None:
        try:
            near.receive()
        except PeerError as error:
            heard.put(error)

    thread = threading.Thread(target=wait)
    thread.start()
    sender = threading.Thread(target=lambda: far.send(b"a word"))  # ends the handshake
    sender.start()
    thread.join(0.05)
    if end == "cut":
        near.cut()
    else:
        near.close()
    with contextlib.suppress(PeerError):
        sender.join(WAIT_S)
    thread.join(WAIT_S)
    assert not thread.is_alive() and not sender.is_alive()
    with pytest.raises(PeerError):
        near.send(b"after")
    far.close()
    near.close()
