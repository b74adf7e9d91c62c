"""The data plane: an agent serves its host's committed generations; others fetch parts of pieces.

Plain sockets: membership may change, and they are as fast as gloo here. After the handshake,
requests and answers are one message each; after the answer to a ``Fetch`` the parts' bytes follow
in order, in frames of at most ``BLOCK_BYTES``, sealed and numbered by the framing.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from scalai.core.errors import DamageError, MessageError, PeerError, ScalaiError, StoreError
from scalai.core.fields import mapped
from scalai.core.jsonable import Json
from scalai.core.messages.shared import JsonText, Named
from scalai.core.tensors.collection import MAX_NDIM, Collection, Columns
from scalai.core.tensors.dtypes import Bits
from scalai.core.tensors.fingerprint import CommitStatement
from scalai.core.tensors.holders import Pieces, Reference
from scalai.core.tensors.region import Box
from scalai.runtime.codec import decode, encode
from scalai.runtime.connections import ANY_PORT, Listener, connect
from scalai.runtime.failpoints import reached
from scalai.runtime.framing import FramedSocket
from scalai.runtime.handshake import DATA_PLANE, service_key
from scalai.store.files import contiguous_chunks, write_at
from scalai.store.host import HostStore
from scalai.store.parts import pieces_of

Address = tuple[str, int]

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 20.0
IDLE_TIMEOUT_S = 60.0
BLOCK_BYTES = 1 << 20
"""Bytes of a frame: sealing copies it, and the copy should fit the cache."""
REQUEST_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class ReadPieces:
    """Ask for the first ``rows`` pieces of a committed generation of ``host``."""

    host: str
    generation: int
    rows: int


@dataclass(frozen=True, slots=True)
class ReadRankStates:
    """Ask for the states of ranks of ``host`` at these coordinates; absent ones are left out."""

    host: str
    generation: int
    coordinates: tuple[str, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Fetch:
    """Ask for parts of pieces of a committed generation of ``host``.

    Rows ``row`` [parts] of its manifest, with the ``fingerprint`` [parts] of each whole piece:
    found damage renumbers them. Boxes at ``offset`` of ``shape`` [parts, MAX_NDIM], in elements,
    right-aligned. ``is_checked``: first compare partly requested pieces with the committed state;
    the requester can compare whole ones itself.
    """

    host: str
    generation: int
    row: npt.NDArray[np.int64]
    fingerprint: npt.NDArray[np.uint64]
    offset: npt.NDArray[np.int64]
    shape: npt.NDArray[np.int64]
    is_checked: bool = False

    def __post_init__(self) -> None:
        boxes = {self.offset.shape, self.shape.shape}
        is_list = self.row.ndim == 1 and self.fingerprint.shape == self.row.shape
        if not is_list or boxes != {(len(self.row), MAX_NDIM)}:
            raise ValueError(
                f"rows of shape {self.row.shape} with fingerprints of {self.fingerprint.shape} and "
                f"boxes of {sorted(boxes)}"
            )


Request = ReadPieces | ReadRankStates | Fetch


@dataclass(frozen=True, eq=False, slots=True)
class PiecesHeld:
    """The answer to ``ReadPieces``; ``committed``: statements on the tensors."""

    pieces: Pieces
    committed: CommitStatement | None


@dataclass(frozen=True, slots=True)
class RankStates:
    """The answer to ``ReadRankStates``: states by coordinate."""

    states: JsonText


@dataclass(frozen=True, slots=True)
class Parts:
    """The answer to ``Fetch``: so many parts follow."""

    count: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The host lacks the requested data, with the reason. ``is_damaged``: it differs from the
    committed state."""

    reason: str
    is_damaged: bool = False


Answer = PiecesHeld | RankStates | Parts | Refused
A = TypeVar("A", bound=Answer)


class DataPlaneServer:
    """Serves one host's store to peers with the job's token, one thread per connection.

    Bound to one interface; ``address``: the listening address. ``close`` ends it and its
    connections.
    """

    def __init__(
        self, store: HostStore, token: bytes, interface: str = "127.0.0.1", ports: range = ANY_PORT
    ) -> None:
        self._store, self._mutex, self._giving = store, threading.Lock(), 0
        self._listener = Listener(
            (interface, 0), service_key(token, DATA_PLANE, store.host), self._talk,
            timeout_s=DEFAULT_TIMEOUT_S, name="data-plane", ports=ports,
        )  # fmt: skip
        address = self._listener.address
        assert not isinstance(address, str)
        self.address: Address = address

    @property
    def is_giving(self) -> bool:
        """Whether parts of pieces are being sent. Any thread may ask."""
        return self._giving > 0

    def close(self) -> None:
        """Stop listening and cut all connections; a second call does nothing."""
        self._listener.close()

    def __enter__(self) -> "DataPlaneServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _talk(self, framed: FramedSocket) -> None:
        """Serve one peer until it leaves."""
        framed.timeout_s = IDLE_TIMEOUT_S
        try:
            while True:
                data = framed.receive(REQUEST_BYTES)
                self._answer(framed, decode(data, Named[Request]).message)
        except MessageError as error:
            log.warning("event=request_refused peer=%s: %s", framed.peer, error)
        except PeerError:
            raise
        except ScalaiError as error:
            log.warning("event=request_refused peer=%s: %s", framed.peer, error)

    def _answer(self, framed: FramedSocket, request: Request) -> None:
        try:
            if request.host != self._store.host:
                raise StoreError(
                    f"host {request.host!r} is asked, and this is host {self._store.host!r}. Its "
                    "address has changed: ask the coordinator again."
                )
            match request:
                case ReadPieces(_, generation, rows):
                    _send(framed, self._pieces(generation, rows))
                case ReadRankStates(_, generation, coordinates):
                    held = self._store.manifest(generation).rank_state
                    found = {name: held[name] for name in coordinates if name in held}
                    _send(framed, RankStates(JsonText.of(found)))
                case Fetch():
                    with self._is_giving_more():
                        self._send_parts(framed, request)
        except StoreError as error:
            _send(framed, Refused(str(error), isinstance(error, DamageError)))

    @contextmanager
    def _is_giving_more(self) -> Iterator[None]:
        with self._mutex:
            self._giving += 1
        try:
            yield
        finally:
            with self._mutex:
                self._giving -= 1

    def _pieces(self, generation: int, rows: int) -> PiecesHeld:
        manifest = self._store.manifest(generation)
        pieces = pieces_of(manifest, rows)
        names = [tensor.name for tensor in pieces.collection.tensors]
        stated = manifest.committed
        return PiecesHeld(pieces, None if stated is None else stated.of_tensors(names))

    def _send_parts(self, framed: FramedSocket, request: Fetch) -> None:
        generation = request.generation
        with self._store.open_rows(generation) as rows:
            collection = rows.manifest.collection
            parts, cut = list[Bits](), set[int]()
            # Everything is checked before the first byte, so a refusal is still possible.
            columns = (request.row, request.fingerprint, request.offset, request.shape)
            held = rows.manifest.fingerprint
            for row, stated, offset, shape in zip(*(c.tolist() for c in columns), strict=True):
                if not 0 <= row < len(collection) or held[row] != stated:
                    raise StoreError(
                        f"piece {row} of generation {generation} is asked for with fingerprint "
                        f"{stated:016x}; host {rows.manifest.host!r} has {len(collection)} pieces, "
                        "and another one there. Plan again."
                    )
                skip = MAX_NDIM - len(collection.tensors[collection.tensor[row]].shape)
                parts.append(rows.part(row, Box(tuple(offset[skip:]), tuple(shape[skip:]))))
                cut |= {row} if shape != collection.shape[row].tolist() else set()
            for row in sorted(cut) if request.is_checked else ():
                rows.check(row)
            _send(framed, Parts(len(parts)))
            reached("give")
            for part in parts:
                for block in contiguous_chunks(part, BLOCK_BYTES):
                    framed.send(block)


@dataclass(frozen=True, slots=True)
class DataPeer:
    """Another host's data plane: its address, the job's token, and its expected name."""

    address: Address
    token: bytes = field(repr=False)
    host: str
    timeout_s: float = DEFAULT_TIMEOUT_S

    def _connect(self) -> FramedSocket:
        key = service_key(self.token, DATA_PLANE, self.host)
        return connect(self.address, key, self.timeout_s)

    def pieces(self, generation: int, reference: Reference) -> PiecesHeld:
        """Ask for the host's pieces of a committed generation.

        Raises:
            StoreError: It is not committed there, or its pieces differ from the ``reference``.
            PeerError: The peer is dead or not of this job.
        """
        with self._connect() as framed:
            request = ReadPieces(self.host, generation, reference.rows)
            held = _ask(framed, request, PiecesHeld)
        if held.pieces.digest().hex() != reference.digest:
            raise StoreError(
                f"host {self.host!r} has other pieces of generation {generation} than the "
                "coordinator knows of it. The next round asks anew."
            )
        return held

    def rank_states(self, generation: int, coordinates: Sequence[str]) -> Mapping[str, Json]:
        """Fetch the host's states of ranks by their coordinates; absent ones are left out.

        Raises:
            StoreError: The generation is not committed there.
            PeerError: The peer is dead or not of this job, or its answer is invalid.
        """
        with self._connect() as framed:
            request = ReadRankStates(self.host, generation, tuple(coordinates))
            states = _ask(framed, request, RankStates).states
        try:
            return mapped(states.value(), "states of ranks")
        except ValueError as error:
            raise PeerError(f"host {self.host!r} sends no states of ranks ({error}).") from error

    def fetch(
        self,
        generation: int,
        row: Columns,
        stated: npt.NDArray[np.uint64],
        pieces: Collection,
        path: Path,
        begin: Columns,
        arrived: Callable[[int], None] = lambda count: None,
        *,
        is_checked: bool = False,
    ) -> int:
        """Fetch parts of stored pieces into a local file; returns the bytes. Blocks.

        Args:
            generation: Number of a generation committed there.
            row: Rows of the pieces in the host's manifest, [parts].
            stated: Fingerprints of these whole pieces there, [parts].
            pieces: Box of each piece, [parts].
            path: Path of an existing file, long enough.
            begin: Start of each part in the file, row-major, in bytes [parts].
            arrived: Callback for each arrived block, in bytes.
            is_checked: Whether the host first compares partly requested pieces with the committed
                state; a part has no fingerprint of its own.

        Raises:
            StoreError: The file cannot be written.
            DamageError: The host finds a damaged piece.
            PeerError: The peer is dead, silent, not of this job, does not hold a piece, or a block
                arrives damaged. The file's content is then undefined; fetch again, or from another
                host.
        """
        with self._connect() as framed:
            asked = Fetch(
                self.host, generation, row, stated, pieces.offset, pieces.shape, is_checked
            )
            try:
                _ask(framed, asked, Parts)
            except DamageError:
                raise
            except StoreError as error:
                raise PeerError(str(error)) from error
            try:
                sizes = pieces.size_bytes().tolist()
                return _receive(framed, sizes, path, begin.tolist(), arrived)
            except OSError as error:
                raise StoreError(
                    f"{path} cannot be written ({error.strerror}). Stage it again."
                ) from error


def _send(framed: FramedSocket, message: Request | Answer) -> None:
    framed.send(encode(Named(message)))


def _ask(framed: FramedSocket, request: Request, expected: type[A]) -> A:
    _send(framed, request)
    answer = decode(framed.receive(), Named[Answer]).message
    if isinstance(answer, Refused):
        kind = DamageError if answer.is_damaged else StoreError
        raise kind(f"{framed.peer} refuses: {answer.reason}")
    if not isinstance(answer, expected):
        raise MessageError(
            f"{framed.peer} answers with {type(answer).__name__}, not {expected.__name__}. Do the "
            "versions differ?"
        )
    return answer


def _receive(
    framed: FramedSocket,
    sizes: Sequence[int],
    path: Path,
    begins: Sequence[int],
    arrived: Callable[[int], None],
) -> int:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for number, (size, begin) in enumerate(zip(sizes, begins, strict=True)):
            end = begin + size
            while begin < end:
                block = framed.receive(min(BLOCK_BYTES, end - begin))
                if not block:
                    raise PeerError(
                        f"{framed.peer} sent an empty block; {end - begin} bytes are left of part "
                        f"{number}. Do the versions differ?"
                    )
                write_at(descriptor, memoryview(block), begin)
                begin += len(block)
                arrived(len(block))
    finally:
        os.close(descriptor)
    return sum(sizes)
