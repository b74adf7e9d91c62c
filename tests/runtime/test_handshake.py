"""Who takes part in a connection proves it, in a version that both sides speak."""

import hashlib
import hmac
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from scalai.core.errors import PeerError, UnprovenError, VersionError
from scalai.runtime.framing import FramedSocket
from scalai.runtime.handshake import accept, offer, service_key
from support.steps import Beside

pytestmark = pytest.mark.fault

TOKEN = b"a secret of this job"
Side = Callable[[FramedSocket], object]


def meet(client: Side, server: Side) -> tuple[object, object]:
    """Return what each side returns, or raises."""
    ends = [FramedSocket(end, "the other", 5) for end in socket.socketpair()]

    def run(side: Side, end: FramedSocket) -> object:
        try:
            return side(end)
        except PeerError as error:
            end.close()
            return error

    sides = [Beside(partial(run, *each)) for each in zip((client, server), ends, strict=True)]
    first, second = (side.end().result[0] for side in sides)
    for end in ends:
        end.close()
    return first, second


def test_both_speak_the_newest_version_that_both_know() -> None:
    for mine, its, chosen in ((range(2, 3), range(2, 3), 2), (range(2, 5), range(1, 4), 3)):
        found = meet(lambda f: offer(f, TOKEN, mine), lambda f: accept(f, TOKEN, its))  # noqa: B023
        assert found == (chosen, chosen)


@pytest.mark.parametrize(("mine", "its"), [(range(2, 4), range(4, 6)), (range(4, 6), range(2, 4))])
def test_releases_without_a_common_version_say_so(mine: range, its: range) -> None:
    found = meet(lambda f: offer(f, TOKEN, mine), lambda f: accept(f, TOKEN, its))
    for error in found:
        assert isinstance(error, VersionError) and "Install the same release" in str(error)


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
        first = client.receive()
        server.send(first[:8] + (2).to_bytes(2, "big") + first[10:])
        with client, server, suppress(PeerError):
            for _ in range(2):
                client.send(server.receive())
                server.send(client.receive())

    def serve() -> None:
        with FramedSocket(far, "client", 5) as framed:
            accept(framed, TOKEN, range(2, 4))

    between, server = Beside(lower), Beside(serve)
    with FramedSocket(near, "server", 5) as framed, pytest.raises(PeerError):
        offer(framed, TOKEN, range(2, 4))
    assert isinstance(server.end().errors[0], UnprovenError) and not between.end().errors


def hello(key: bytes) -> bytes:
    """What a client sends first, by the text of the module alone."""
    return b"scalai" + b"\0\5\0\5" + key


def by_hand(shared: bytes, token: bytes, seen: bytes) -> list[bytes]:
    """HKDF as RFC 5869 has it: the proofs of client and server, the keys to server and client."""
    extracted = hmac.new(b"scalai 4", shared + token, hashlib.sha256).digest()
    made = [b""]
    for number in range(1, 5):
        last = made[-1] + seen + bytes([number])
        made.append(hmac.new(extracted, last, hashlib.sha256).digest())
    return made[1:]


def served(framed: FramedSocket) -> bytes:
    """Answer one message in capitals."""
    accept(framed, TOKEN)
    came = framed.receive()
    framed.send(came.upper())
    return came


def test_the_proofs_and_the_keys_follow_from_the_token_and_a_secret_that_was_not_sent() -> None:
    """So a thief of the token reads nothing that was recorded. An independent client."""

    def client(framed: FramedSocket) -> bytes:
        own = X25519PrivateKey.generate()
        mine = hello(own.public_key().public_bytes_raw())
        framed.send(mine)
        theirs = framed.receive()
        shared = own.exchange(X25519PublicKey.from_public_bytes(theirs[-32:]))
        proof, expected, to_server, to_client = by_hand(shared, TOKEN, mine + theirs)
        framed.send(proof)
        assert framed.receive() == expected
        framed.seal(to_server, to_client)
        framed.send(b"over the sealed connection")
        return framed.receive()

    sent = b"over the sealed connection"
    assert meet(client, served) == (sent.upper(), sent)


def test_no_two_connections_have_a_fresh_key_in_common() -> None:
    heard: list[bytes] = []

    def client(framed: FramedSocket) -> None:
        framed.send(hello(X25519PrivateKey.generate().public_key().public_bytes_raw()))
        heard.append(framed.receive()[-32:])
        framed.close()

    def server(framed: FramedSocket) -> None:
        heard.append(framed.receive()[-32:])
        framed.close()

    for _ in range(3):
        meet(client, served)
        meet(lambda f: offer(f, TOKEN), server)
    assert len(set(heard)) == 6


def test_a_stranger_who_connects_is_sent_nothing_that_hangs_on_the_token() -> None:
    answers: list[bytes] = []

    def stranger(framed: FramedSocket) -> None:
        framed.send(hello(X25519PrivateKey.generate().public_key().public_bytes_raw()))
        framed.receive()
        framed.send(bytes(32))
        answers.append(framed.receive())

    _, error = meet(stranger, served)
    assert answers == [b"refused"] and isinstance(error, UnprovenError)


@pytest.mark.parametrize("key", [bytes(32), b"\1" + bytes(31)], ids=["0", "1"])
def test_a_key_of_small_order_is_refused_by_both_sides(key: bytes) -> None:
    """The secret of the two keys would be known to anybody (RFC 7748, section 6.1)."""

    def client(framed: FramedSocket) -> None:
        framed.send(hello(key))
        framed.receive()
        framed.receive()

    def server(framed: FramedSocket) -> None:
        framed.receive()
        framed.send(hello(key))
        framed.receive()

    for found in (meet(client, served)[1], meet(lambda f: offer(f, TOKEN), server)[0]):
        assert isinstance(found, UnprovenError)
