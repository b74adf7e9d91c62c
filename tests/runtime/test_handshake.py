"""Who takes part in a connection proves it, in a version that both sides speak."""

import hashlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable

import pytest

from scalai.core.errors import PeerError, UnprovenError, VersionError
from scalai.runtime.framing import FramedSocket
from scalai.runtime.handshake import VERSIONS, accept, offer, service_key

TOKEN = b"a secret of this job"
Side = Callable[[FramedSocket], object]


def meet(client: Side, server: Side) -> tuple[object, object]:
    """Return what each side returns, or raises."""
    ends = [FramedSocket(end, "the other", 5) for end in socket.socketpair()]
    found: list[object] = [None, None]

    def run(number: int, side: Side) -> None:
        try:
            found[number] = side(ends[number])
        except PeerError as error:
            found[number] = error
            ends[number].close()

    threads = [threading.Thread(target=run, args=each) for each in enumerate((client, server))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for end in ends:
        end.close()
    return found[0], found[1]


def test_both_speak_the_newest_version_that_both_know() -> None:
    for mine, its, chosen in ((range(2, 3), range(2, 3), 2), (range(2, 5), range(1, 4), 3)):
        found = meet(lambda f: offer(f, TOKEN, mine), lambda f: accept(f, TOKEN, its))  # noqa: B023
        assert found == (chosen, chosen)


@pytest.mark.parametrize(("mine", "its"), [(range(2, 4), range(4, 6)), (range(4, 6), range(2, 4))])
def test_releases_without_a_common_version_say_so(mine: range, its: range) -> None:
    found = meet(lambda f: offer(f, TOKEN, mine), lambda f: accept(f, TOKEN, its))
    for error in found:
        assert isinstance(error, VersionError) and "Install the same release" in str(error)


def test_a_server_of_the_first_version_is_named() -> None:
    def first(framed: FramedSocket) -> None:
        framed.send(b"scalai-1" + secrets.token_bytes(32))
        framed.receive()

    error, _ = meet(lambda f: offer(f, TOKEN), first)
    assert isinstance(error, VersionError) and "speaks version 1" in str(error)


@pytest.mark.parametrize("noise", [b"", b"x", b"HTTP/1.1 400 Bad Request", bytes(42)])
def test_what_is_no_process_of_the_job_is_no_peer(noise: bytes) -> None:
    def other(framed: FramedSocket) -> None:
        framed.send(noise)
        framed.receive()

    error, _ = meet(lambda f: offer(f, TOKEN), other)
    assert isinstance(error, UnprovenError)


def test_neither_side_is_taken_in_without_the_token() -> None:
    client, server = meet(lambda f: offer(f, b"guessed"), lambda f: accept(f, TOKEN))
    assert isinstance(client, UnprovenError) and isinstance(server, UnprovenError)


def test_what_serves_for_another_host_or_under_another_name_is_not_taken_for_it() -> None:
    meant = service_key(TOKEN, "data plane", "a")
    for other in (TOKEN, service_key(TOKEN, "data plane", "b"), service_key(TOKEN, "other", "a")):
        client, server = meet(lambda f: offer(f, meant), lambda f: accept(f, other))  # noqa: B023
        assert isinstance(client, UnprovenError) and isinstance(server, UnprovenError)


def test_a_version_that_somebody_on_the_way_has_lowered_is_no_version() -> None:
    """The proofs are over what each side has sent itself."""
    near, tap = socket.socketpair()
    inlet, far = socket.socketpair()

    def lower() -> None:
        client, server = FramedSocket(tap, "client", 5), FramedSocket(inlet, "server", 5)
        hello = client.receive()
        server.send(hello[:8] + (2).to_bytes(2, "big") + hello[10:])
        try:
            for _ in range(2):
                client.send(server.receive())
                server.send(client.receive())
        except PeerError:
            client.close()
            server.close()

    threading.Thread(target=lower, daemon=True).start()
    found: list[object] = []

    def serve() -> None:
        with FramedSocket(far, "client", 5) as framed:
            try:
                found.append(accept(framed, TOKEN, range(2, 4)))
            except PeerError as error:
                found.append(error)

    server = threading.Thread(target=serve)
    server.start()
    with FramedSocket(near, "server", 5) as framed, pytest.raises(PeerError):
        offer(framed, TOKEN, range(2, 4))
    server.join(30)
    assert isinstance(found[0], UnprovenError)


def test_the_proofs_and_the_keys_are_what_the_module_says() -> None:
    """An independent client, by the text of the module alone."""

    def by_hand(framed: FramedSocket) -> bytes:
        mine = b"scalai" + b"\0\3\0\3" + secrets.token_bytes(32)
        framed.send(mine)
        seen = mine + framed.receive()
        extracted = hmac.new(b"scalai 3", TOKEN, hashlib.sha256).digest()

        def derive(role: bytes) -> bytes:
            return hmac.new(extracted, role + b"\0" + seen, hashlib.sha256).digest()

        framed.send(derive(b"client"))
        assert framed.receive() == derive(b"server")
        framed.seal(derive(b"to server"), derive(b"to client"))
        framed.send(b"over the sealed connection")
        return framed.receive()

    def serve(framed: FramedSocket) -> bytes:
        accept(framed, TOKEN)
        came = framed.receive()
        framed.send(came.upper())
        return came

    assert 3 in VERSIONS
    sent = b"over the sealed connection"
    assert meet(by_hand, serve) == (sent.upper(), sent)
