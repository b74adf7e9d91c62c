"""Sockets whose other side is gone without a word."""

import socket
from collections.abc import Iterator

import pytest

from scalai.core.errors import PeerError, SilentError
from scalai.runtime import framing
from scalai.runtime.framing import FramedSocket

MEGABYTES = 64
"""More than the kernel's buffers take."""


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FramedSocket, socket.socket]]:
    monkeypatch.setattr(framing, "GONE_AFTER_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    framed = FramedSocket(near, "the peer", None)
    yield framed, far
    framed.close()
    far.close()


def test_a_write_into_the_void_ends(pair: tuple[FramedSocket, socket.socket]) -> None:
    """Nobody waits for bytes that the other host never takes, though no deadline was given."""
    framed, _ = pair
    with pytest.raises(PeerError, match=r"broke.*Is its host alive") as raised:
        framed.send_bytes(bytes(MEGABYTES << 20))
    assert not isinstance(raised.value, SilentError)  # the connection is of no use any more


def test_unacknowledged_bytes_and_unanswered_probes_end_a_connection_after_one_time(
    pair: tuple[FramedSocket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    _, far = pair
    framed = FramedSocket(far.dup(), "the peer", None)
    get = framed.socket.getsockopt
    tcp = socket.IPPROTO_TCP
    probing_s = get(tcp, socket.TCP_KEEPINTVL) * get(tcp, socket.TCP_KEEPCNT)
    assert get(tcp, socket.TCP_USER_TIMEOUT) == 1000 * (get(tcp, socket.TCP_KEEPIDLE) + probing_s)
    framed.close()
