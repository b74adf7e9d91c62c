"""The data plane: parts of committed pieces, to peers that know the token, or an error soon."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from scalai.core.errors import PeerError, StoreError, UnprovenError
from scalai.core.messages.shared import Named
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.holders import Reference
from scalai.core.tensors.region import Box
from scalai.launch.agent import data_plane
from scalai.launch.agent.data_plane import DataPlaneServer, Peer, PiecesHeld
from scalai.runtime.codec import encode
from scalai.runtime.framing import FramedSocket
from scalai.runtime.handshake import DATA_PLANE, accept, service_key
from scalai.store.files import slices
from scalai.store.host import HostStore
from scalai.store.parts import reference_of
from support.store_states import Opener, generation, snapshot, values_of

TOKEN = b"the job's token"
ANY = Reference(1, "0" * 64)


@pytest.fixture
def server(store: HostStore) -> Iterator[DataPlaneServer]:
    """A server of a store with generation 1, at step 1."""
    generation(store, 1, step=1)
    with DataPlaneServer(store, TOKEN) as running:
        yield running


@pytest.fixture
def peer(server: DataPlaneServer, store: HostStore) -> Peer:
    return Peer(server.address, TOKEN, store.host, timeout_s=5)


def pieces_through(store: HostStore, peer: Peer) -> PiecesHeld:
    """Return what the peer says of the pieces of generation 1."""
    return peer.pieces(1, reference_of(store.manifest(1)))


def fetch_into(tmp_path: Path, peer: Peer, row: int, pieces: Collection) -> bytes:
    """Fetch one part into a file of noise, at byte 100; return what came."""
    path = tmp_path / "fetched"
    path.write_bytes(b"\xaa" * 1000)
    size = peer.fetch(1, np.array([row]), pieces, path, np.array([100]))
    content = path.read_bytes()
    assert len(content) == 1000 and content[:100] == b"\xaa" * 100
    assert content[100 + size :] == b"\xaa" * (900 - size)
    return content[100 : 100 + size]


def test_all_pieces_arrive_and_what_they_are(store: HostStore, peer: Peer, tmp_path: Path) -> None:
    held = pieces_through(store, peer).pieces
    assert (held.fingerprint == store.manifest(1).fingerprint).all()
    for row in range(len(held)):
        tensor, box = held.collection.box(row)
        found = fetch_into(tmp_path, peer, row, held.collection.select(np.array([row])))
        assert found == values_of(tensor, 1)[slices(box)].tobytes()


@pytest.mark.fault
def test_bytes_are_told_of_as_they_arrive(
    store: HostStore, peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = store.manifest(1).collection
    sizes = pieces.size_bytes()
    path = tmp_path / "fetched"
    path.write_bytes(bytes(int(sizes.sum())))
    reported: list[int] = []
    begins = np.cumsum(sizes) - sizes
    came = peer.fetch(1, np.arange(len(pieces)), pieces, path, begins, reported.append)
    assert sum(reported) == came == sizes.sum() and len(reported) >= (sizes > 0).sum()


def test_the_server_cuts_parts_out_of_pieces(store: HostStore, peer: Peer, tmp_path: Path) -> None:
    collection = store.manifest(1).collection
    row = next(r for r in range(len(collection)) if collection.box(r)[0].name == "param/w")
    tensor, box = collection.box(row)
    part = Box((2, box.offset[1] + 1), (3, 2))
    found = fetch_into(tmp_path, peer, row, Collection.of([(tensor, part)]))
    assert found == values_of(tensor, 1)[slices(part)].tobytes()


def test_pieces_of_many_blocks_arrive(
    store: HostStore, peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_plane, "BLOCK_BYTES", 7)
    test_all_pieces_arrive_and_what_they_are(store, peer, tmp_path)


def test_a_peer_with_another_token_is_refused(server: DataPlaneServer, peer: Peer) -> None:
    with pytest.raises(PeerError, match="does not have this job's token"):
        Peer(server.address, b"another token", "h", timeout_s=5).pieces(1, ANY)
    assert peer.rank_states(1, ["nobody"]) == {}


def test_a_server_with_another_token_is_refused(store: HostStore, tmp_path: Path) -> None:
    with DataPlaneServer(store, b"another token") as other:
        with pytest.raises(PeerError, match="does not have this job's token"):
            Peer(other.address, TOKEN, store.host, timeout_s=5).pieces(1, ANY)


NOISE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "large": b"\xff" * 64,
    "small": b"\0\0\0\1x",
    "none": b"",
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=list(NOISE))
def test_a_stranger_gets_nothing_and_does_no_harm(
    server: DataPlaneServer, peer: Peer, noise: bytes
) -> None:
    with socket.create_connection(server.address, timeout=5) as stranger:
        # The server's challenge, then the end of the connection: orderly, or by a reset, which may
        # come before everything is said.
        with contextlib.suppress(OSError):
            stranger.sendall(noise)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    assert peer.rank_states(1, ["nobody"]) == {}


def test_only_committed_generations_are_served(
    store: HostStore, peer: Peer, tmp_path: Path
) -> None:
    _, sealed = snapshot(store, step=2)
    store.reserve({})
    for number in (2, -1, sealed.generation):
        with pytest.raises(StoreError, match="is not committed here"):
            peer.pieces(number, ANY)
        with pytest.raises(StoreError, match="is not committed here"):
            peer.fetch(
                number, np.array([0]), sealed.collection.select(np.array([0])),
                tmp_path / "none", np.array([0]),
            )  # fmt: skip


def test_parts_outside_of_a_piece_are_refused(store: HostStore, peer: Peer, tmp_path: Path) -> None:
    collection = store.manifest(1).collection
    tensor, box = collection.box(0)
    outside = Box(tuple(n + 1 for n in box.offset), box.shape)
    wrong = Collection(collection.tensors, collection.tensor[:1], collection.offset[:1] + 1,
                       collection.shape[:1])  # fmt: skip
    assert wrong.box(0)[1] == outside and tensor.shape
    with pytest.raises(StoreError, match="Ask for a part"):
        fetch_into(tmp_path, peer, 0, wrong)
    with pytest.raises(StoreError, match="piece 99"):
        fetch_into(tmp_path, peer, 99, collection.select(np.array([0])))


@pytest.mark.fault
def test_another_host_than_is_meant_hands_out_nothing(server: DataPlaneServer) -> None:
    """Its port may be that of one which is gone."""
    with pytest.raises(UnprovenError, match="not the host that is meant"):
        Peer(server.address, TOKEN, "gone", timeout_s=5).pieces(1, ANY)


NONE = [(0,), b""]
COLUMNS = {"row": [(1,), bytes(8)], "offset": NONE, "shape": NONE}
NONSENSE = {
    "empty": b"",
    "no message": b"\xc1",
    "unknown": encode(("Delete", {"host": "h", "generation": 1})),
    "no number": encode(("ReadPieces", {"host": "h", "generation": "one", "rows": 1})),
    "columns": encode(("Fetch", {"host": "h", "generation": 1, **COLUMNS})),
    "an array of another size": encode(
        ("Fetch", {"host": "h", "generation": 1, **COLUMNS, "row": [(1 << 62,), bytes(8)]})
    ),
    "depth": b"\x91" * 100_000,
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=list(NONSENSE))
def test_nonsense_ends_the_connection_alone(
    server: DataPlaneServer, peer: Peer, nonsense: bytes
) -> None:
    with peer._connect() as framed:
        framed.send(nonsense)
        with pytest.raises(PeerError, match="closed the connection"):
            framed.receive()
    assert peer.rank_states(1, ["nobody"]) == {}


def has_frames(seen: bytes, count: int) -> bool:
    """Whether more than so many whole frames have come."""
    at = 0
    for _ in range(count):
        if at + 4 > len(seen):
            return False
        at += 4 + int.from_bytes(seen[at : at + 4], "big")
    return at + 5 < len(seen)


BEFORE_BLOCKS = 3
"""Frames of a server before the first block: two of the handshake, and the answer."""


def relay(server: DataPlaneServer, damage: str, host: str) -> Peer:
    """Return a peer that is reached over a relay which does damage to what the server sends."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        client, _ = listener.accept()
        upstream = socket.create_connection(server.address)

        def forward() -> None:
            while data := client.recv(1 << 16):
                upstream.sendall(data)

        threading.Thread(target=forward, daemon=True).start()
        seen = bytearray()
        while data := upstream.recv(1 << 16):
            seen += data
            is_answer = has_frames(bytes(seen), BEFORE_BLOCKS)
            if is_answer and damage == "flip":
                data = data[:-1] + bytes([data[-1] ^ 1])
            if is_answer and damage == "cut":
                client.sendall(data[:-1])
                break
            client.sendall(data)
        listener.close()
        client.shutdown(socket.SHUT_RDWR)
        upstream.close()

    threading.Thread(target=run, daemon=True).start()
    return Peer(listener.getsockname()[:2], TOKEN, host, timeout_s=5)


def test_a_damaged_block_is_noticed(
    store: HostStore, server: DataPlaneServer, tmp_path: Path
) -> None:
    piece = store.manifest(1).collection.select(np.array([0]))
    with pytest.raises(PeerError, match="arrived damaged"):
        fetch_into(tmp_path, relay(server, "flip", store.host), 0, piece)


def test_a_peer_that_dies_in_the_middle_is_noticed(
    store: HostStore, server: DataPlaneServer, tmp_path: Path
) -> None:
    piece = store.manifest(1).collection.select(np.array([0]))
    with pytest.raises(PeerError, match=r"closed the connection|broke"):
        fetch_into(tmp_path, relay(server, "cut", store.host), 0, piece)


def test_a_peer_that_falls_silent_is_noticed(store: HostStore, tmp_path: Path) -> None:
    generation(store, 1, step=1)
    listener = socket.create_server(("127.0.0.1", 0))

    def accept_and_say_nothing() -> None:
        connection, _ = listener.accept()
        with FramedSocket(connection, "client", 5) as framed:
            accept(framed, service_key(TOKEN, DATA_PLANE, store.host))
            framed.receive()
            framed.send(encode(Named(data_plane.Parts(1))))
            connection.recv(1)

    threading.Thread(target=accept_and_say_nothing, daemon=True).start()
    silent = Peer(listener.getsockname()[:2], TOKEN, store.host, timeout_s=0.2)
    with pytest.raises(PeerError, match=r"silent for 0\.2 s"):
        fetch_into(tmp_path, silent, 0, store.manifest(1).collection.select(np.array([0])))
    listener.close()


def test_nobody_there_is_noticed(server: DataPlaneServer, peer: Peer) -> None:
    server.close()
    server.close()
    with pytest.raises(PeerError, match="cannot be reached"):
        peer.pieces(1, ANY)


def test_a_closing_server_cuts_its_peers(server: DataPlaneServer, peer: Peer) -> None:
    with peer._connect() as framed:
        server.close()
        with pytest.raises(PeerError):
            framed.receive()


def test_a_generation_that_is_dropped_is_served_to_its_end(
    open_store: Opener, tmp_path: Path
) -> None:
    store = open_store(host="z")
    generation(store, 1, step=1)
    with store.open_rows(1) as rows:
        store.drop(1)
        assert rows.view(0).tobytes() == rows.part(0, rows.manifest.collection.box(0)[1]).tobytes()
