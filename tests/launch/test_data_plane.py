"""The data plane: parts of committed pieces, to peers that know the token, or an error soon."""

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
from scalai.launch.agent.data_plane import DataPeer, DataPlaneServer
from scalai.runtime.codec import encode
from scalai.runtime.connections import connect
from scalai.runtime.framing import FramedSocket
from scalai.runtime.handshake import DATA_PLANE, accept, service_key
from scalai.store.files import slices
from scalai.store.host import HostStore
from scalai.store.parts import reference_of
from support.store_states import generation, snapshot, values_of

TOKEN = b"the job's token"
ANY = Reference(1, "0" * 64)
FIRST = np.array([0])


@pytest.fixture
def server(store: HostStore) -> Iterator[DataPlaneServer]:
    """A server of a store with generation 1, at step 1."""
    generation(store, 1, step=1)
    with DataPlaneServer(store, TOKEN) as running:
        yield running


@pytest.fixture
def peer(server: DataPlaneServer, store: HostStore) -> DataPeer:
    return DataPeer(server.address, TOKEN, store.host, timeout_s=5)


def fetch_into(
    tmp_path: Path, peer: DataPeer, store: HostStore, row: int, pieces: Collection, salt: int = 0
) -> bytes:
    """Fetch one part into a file of noise, at byte 100; return its bytes. ``salt`` makes the
    piece's fingerprint another one."""
    path, held = tmp_path / "fetched", store.manifest(1).fingerprint
    path.write_bytes(b"\xaa" * 1000)
    stated = held[[min(row, len(held) - 1)]] ^ np.uint64(salt)
    size = peer.fetch(1, np.array([row]), stated, pieces, path, np.array([100]))
    content = path.read_bytes()
    assert len(content) == 1000 and content[:100] == b"\xaa" * 100
    assert content[100 + size :] == b"\xaa" * (900 - size)
    return content[100 : 100 + size]


@pytest.mark.parametrize("block", [None, 7], ids=["whole", "many blocks"])
def test_all_pieces_arrive_and_what_they_are(
    store: HostStore,
    peer: DataPeer,
    tmp_path: Path,
    block: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if block is not None:
        monkeypatch.setattr(data_plane, "BLOCK_BYTES", block)
    held = peer.pieces(1, reference_of(store.manifest(1))).pieces
    assert (held.fingerprint == store.manifest(1).fingerprint).all()
    for row in range(len(held)):
        tensor, box = held.collection.box(row)
        found = fetch_into(tmp_path, peer, store, row, held.collection.select(np.array([row])))
        assert found == values_of(tensor, 1)[slices(box)].tobytes()


@pytest.mark.fault
def test_bytes_are_told_of_as_they_arrive(store: HostStore, peer: DataPeer, tmp_path: Path) -> None:
    held = store.manifest(1)
    pieces, stated = held.collection, held.fingerprint
    sizes, reported, path = pieces.size_bytes(), list[int](), tmp_path / "fetched"
    path.write_bytes(bytes(int(sizes.sum())))
    begins = np.cumsum(sizes) - sizes
    came = peer.fetch(1, np.arange(len(pieces)), stated, pieces, path, begins, reported.append)
    assert sum(reported) == came == sizes.sum() and len(reported) >= (sizes > 0).sum()


def test_the_server_cuts_parts_out_of_pieces(
    store: HostStore, peer: DataPeer, tmp_path: Path
) -> None:
    collection = store.manifest(1).collection
    row = next(r for r in range(len(collection)) if collection.box(r)[0].name == "param/w")
    tensor, box = collection.box(row)
    part = Box((2, box.offset[1] + 1), (3, 2))
    found = fetch_into(tmp_path, peer, store, row, Collection.of([(tensor, part)]))
    assert found == values_of(tensor, 1)[slices(part)].tobytes()


def test_who_has_another_token_is_refused_on_either_side(
    store: HostStore, server: DataPlaneServer, peer: DataPeer
) -> None:
    with DataPlaneServer(store, b"another token") as other:
        for address, token in ((server.address, b"another token"), (other.address, TOKEN)):
            with pytest.raises(PeerError, match="does not have this job's token"):
                DataPeer(address, token, store.host, timeout_s=5).pieces(1, ANY)
    assert peer.rank_states(1, ["nobody"]) == {}


def test_only_committed_generations_are_served(
    store: HostStore, peer: DataPeer, tmp_path: Path
) -> None:
    _, sealed = snapshot(store, step=2)
    first, stated = sealed.collection.select(FIRST), sealed.fingerprint[FIRST]
    for number in (2, -1, sealed.generation):
        with pytest.raises(StoreError, match="is not committed here"):
            peer.pieces(number, ANY)
        with pytest.raises(PeerError, match="is not committed here"):
            peer.fetch(number, FIRST, stated, first, tmp_path / "none", FIRST)


def test_parts_outside_of_a_piece_are_refused(
    store: HostStore, peer: DataPeer, tmp_path: Path
) -> None:
    all_, one = store.manifest(1).collection, store.manifest(1).collection.select(FIRST)
    outside = Collection(all_.tensors, one.tensor, one.offset + 1, one.shape)
    for row, pieces, why in ((0, outside, "Ask for a part"), (99, one, "piece 99")):
        with pytest.raises(PeerError, match=why):
            fetch_into(tmp_path, peer, store, row, pieces)


@pytest.mark.fault
def test_a_piece_that_has_another_number_by_now_is_refused(
    store: HostStore, peer: DataPeer, tmp_path: Path
) -> None:
    """Found damage takes rows out of a part while others fetch from it."""
    first = store.manifest(1).collection.select(FIRST)
    with pytest.raises(PeerError, match=r"piece 0 .* and another one there"):
        fetch_into(tmp_path, peer, store, 0, first, salt=1)


@pytest.mark.fault
def test_another_host_than_is_meant_hands_out_nothing(server: DataPlaneServer) -> None:
    """Its port may be that of one which is gone."""
    with pytest.raises(UnprovenError, match="not the host that is meant"):
        DataPeer(server.address, TOKEN, "gone", timeout_s=5).pieces(1, ANY)


COLUMNS = {
    "row": [(1,), bytes(8)],
    "fingerprint": [(1,), bytes(8)],
    "offset": [(0,), b""],
    "shape": [(0,), b""],
}


@pytest.mark.parametrize(
    "nonsense",
    [b"\xc1", encode(("Fetch", {"host": "h", "generation": 1, **COLUMNS}))],
    ids=["no message", "columns"],
)
def test_nonsense_ends_the_connection_alone(
    server: DataPlaneServer, peer: DataPeer, nonsense: bytes
) -> None:
    with connect(server.address, service_key(TOKEN, DATA_PLANE, peer.host), 5) as framed:
        framed.send(nonsense)
        with pytest.raises(PeerError, match="closed the connection"):
            framed.receive()
    assert peer.rank_states(1, ["nobody"]) == {}


def test_a_peer_that_falls_silent_is_noticed(store: HostStore, tmp_path: Path) -> None:
    generation(store, 1, step=1)

    def accept_and_say_nothing() -> None:
        connection, _ = listener.accept()
        with FramedSocket(connection, "client", 5) as framed:
            accept(framed, service_key(TOKEN, DATA_PLANE, store.host))
            framed.receive()
            framed.send(encode(Named(data_plane.Parts(1))))
            connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept_and_say_nothing, daemon=True)
        thread.start()
        silent = DataPeer(listener.getsockname()[:2], TOKEN, store.host, timeout_s=0.2)
        with pytest.raises(PeerError, match=r"silent for 0\.2 s"):
            fetch_into(tmp_path, silent, store, 0, store.manifest(1).collection.select(FIRST))
        thread.join(60)
