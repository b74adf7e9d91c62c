"""Frames: sealed, bounded; and sockets whose other side is gone without a word."""

import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator

import pytest

from scalai.core.errors import PeerError, SilentError
from scalai.runtime import framing
from scalai.runtime.framing import FramedSocket, tune

pytestmark = pytest.mark.fault

MEGABYTES = 64
"""More than the kernel's buffers take."""
Pair = tuple[FramedSocket, socket.socket]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(framing, "GONE_AFTER_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    tune(near)
    with FramedSocket(near, "the peer", None) as framed, far:
        yield framed, far


def test_a_write_into_the_void_ends(pair: Pair) -> None:
    """Nobody waits for bytes that the other host never takes, though no deadline was given."""
    framed, _ = pair
    with pytest.raises(PeerError, match=r"broke.*Is its host alive") as raised:
        framed.send(bytes(MEGABYTES << 20))
    assert not isinstance(raised.value, SilentError)  # the connection is of no use any more


def test_what_has_arrived_and_was_not_read_is_seen(pair: Pair) -> None:
    framed, far = pair
    assert not framed.has_unread()
    FramedSocket(far, "near", None).send(b"word")
    end = time.monotonic() + 20.0
    while not framed.has_unread():
        assert time.monotonic() < end
    assert framed.receive() == b"word"
    assert not framed.has_unread()
    far.close()
    assert not framed.has_unread(), "the end is no byte"
    framed.close()
    assert not framed.has_unread()


def test_unacknowledged_bytes_and_unanswered_probes_end_a_connection_after_one_time(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    _, far = pair
    tune(far)
    idle_s, each_s, count, most_ms = (
        far.getsockopt(socket.IPPROTO_TCP, option)
        for option in (
            socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT,
        )
    )  # fmt: skip
    assert most_ms == 1000 * (idle_s + each_s * count)


class Sealed:
    """Two ends of a sealed connection, and the bytes that are on their way from near to far."""

    def __init__(self) -> None:
        near, self.tap = socket.socketpair()
        self.inlet, far = socket.socketpair()
        keys = bytes(32), bytes([1]) * 32
        self.near, self.far = FramedSocket(near, "near", 5), FramedSocket(far, "far", 5)
        self.near.seal(*keys)
        self.far.seal(*reversed(keys))

    def sent(self, data: bytes) -> bytes:
        """Return what is on its way once this is sent."""
        self.near.send(data)
        return self.tap.recv(1 << 20)

    def arrive(self, data: bytes) -> bytes:
        """Return what is received where these bytes come."""
        self.inlet.sendall(data)
        return self.far.receive()

    def close(self) -> None:
        for each in (self.near, self.far, self.tap, self.inlet):
            each.close()


@pytest.fixture
def ends() -> Iterator[Sealed]:
    made = Sealed()
    yield made
    made.close()


def test_what_is_sealed_arrives_and_nobody_on_the_way_reads_it(ends: Sealed) -> None:
    for data in (b"", b"a secret of the training", bytes(100_000)):
        sealed = ends.sent(data)
        assert not data or data not in sealed
        assert ends.arrive(sealed) == data
    assert ends.sent(b"the same") != ends.sent(b"the same")


@pytest.mark.parametrize("damage", ["changed", "length", "repeated", "left out", "mirrored"])
def test_what_was_changed_left_out_repeated_or_moved_ends_the_connection(
    ends: Sealed, damage: str
) -> None:
    first, second = ends.sent(b"first"), ends.sent(b"again")
    came = {
        "changed": first[:-1] + bytes([first[-1] ^ 1]),
        "length": (20).to_bytes(4, "big") + first[4:24],
        "left out": second,
    }
    if damage == "repeated":
        assert ends.arrive(first) == b"first"
    with pytest.raises(PeerError, match="arrived damaged, or was changed on its way"):
        if damage == "mirrored":  # its own words come back to it
            ends.tap.sendall(first)
            ends.near.receive()
        ends.arrive(came.get(damage, first))


def test_a_fork_cannot_use_the_connection_and_costs_its_process_nothing(ends: Sealed) -> None:
    """Two processes would seal different frames under one key and number."""
    assert ends.arrive(ends.sent(b"before")) == b"before"
    pid = os.fork()
    if not pid:
        try:
            ends.near.send(b"of the fork")
        except PeerError as error:
            os._exit(7 if "a fork of it" in str(error) else 8)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert ends.arrive(ends.sent(b"after")) == b"after"


def test_a_frame_that_is_too_long_is_neither_taken_nor_sent(
    ends: Sealed, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends.inlet.sendall(ends.sent(bytes(100)))
    with pytest.raises(PeerError, match="announces a message of 100 bytes; 0 to 99"):
        ends.far.receive(99)
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(PeerError, match="a message of 985 bytes is too long"):
        ends.near.send(bytes(985))


def test_what_is_only_announced_takes_no_memory(ends: Sealed) -> None:
    """Of who knows the token, too: what has come is held, and as much again."""
    come = 5 << 20
    ends.inlet.settimeout(30)

    def announce() -> None:
        ends.inlet.sendall((framing.MAX_FRAME_BYTES + 16).to_bytes(4, "big") + bytes(come))
        ends.inlet.close()

    sender = threading.Thread(target=announce)
    tracemalloc.start()
    try:
        sender.start()
        with pytest.raises(PeerError, match="closed the connection"):
            ends.far.receive()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        sender.join(30)
    assert peak < 5 * come


def test_frames_of_any_length_arrive_whole() -> None:
    room = 2 << 20  # the first that is made for a frame
    near, far = (FramedSocket(end, "the other", 30) for end in socket.socketpair())
    with near, far:
        for size in (0, room, room + 1, 5 * room + 3):
            sent = os.urandom(size)
            sender = threading.Thread(target=near.send, args=(sent,))
            sender.start()
            assert far.receive() == sent
            sender.join(30)
