"""The data plane: an agent serves its host's committed generations, others fetch parts of pieces.

Plain sockets, because membership may change and because they are as fast as gloo here. After the
mutual challenge a request is one JSON frame; the answer is one JSON frame, and then, for a fetch,
the parts' bytes in order, in blocks with a checksum each.
"""

import logging
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalai.core.collection import MAX_NDIM, Collection, Columns
from scalai.core.errors import PeerError, ScalaiError, StoreError
from scalai.core.region import Box
from scalai.runtime.framing import FramedSocket, connect
from scalai.runtime.listening import Listener
from scalai.store.files import CHUNK_BYTES, contiguous_chunks
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest, manifest_from_message, manifest_message

Json = Any
Address = tuple[str, int]

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 20.0
IDLE_TIMEOUT_S = 60.0
_BLOCK = struct.Struct(">II")
"""Length and CRC-32 of the block that follows."""


class DataPlaneServer:
    """Serves one host's store to peers that know the job's token, one thread a connection.

    Bound to one interface: ``address`` is where it listens. ``close`` ends it and its connections.
    """

    def __init__(
        self, store: HostStore, token: bytes, interface: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._store = store
        self._listener = Listener(
            (interface, port), token, self._talk, timeout_s=DEFAULT_TIMEOUT_S, name="data-plane"
        )
        address = self._listener.address
        assert not isinstance(address, str)
        self.address: Address = address

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
                self._answer(framed, framed.recv_json())
        except PeerError:
            raise
        except ScalaiError as error:
            log.warning("event=request_refused peer=%s: %s", framed.peer, error)

    def _answer(self, framed: FramedSocket, request: dict[str, Json]) -> None:
        try:
            generation = int(request["generation"])
            if request["do"] == "manifest":
                manifest = manifest_message(self._store.manifest(generation))
                framed.send_json({"manifest": manifest})
            elif request["do"] == "fetch":
                self._send_parts(framed, generation, request)
            else:
                raise PeerError(f"{framed.peer} asks to {request['do']!r}. Do the versions differ?")
        except StoreError as error:
            framed.send_json({"refused": str(error)})
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise PeerError(f"{framed.peer} asks for nonsense ({error!r}).") from error

    def _send_parts(self, framed: FramedSocket, generation: int, request: dict[str, Json]) -> None:
        with self._store.open_rows(generation) as rows:
            collection = rows.manifest.collection
            parts = []
            # All of it is checked before the first byte goes, so that a refusal can be said.
            for row, offset, shape in zip(
                request["row"], request["offset"], request["shape"], strict=True
            ):
                if not 0 <= row < len(collection):
                    raise StoreError(
                        f"piece {row} of generation {generation} is asked for; host "
                        f"{rows.manifest.host!r} has {len(collection)}. Plan again."
                    )
                skip = MAX_NDIM - len(collection.tensors[collection.tensor[row]].shape)
                parts.append(rows.part(row, Box(tuple(offset[skip:]), tuple(shape[skip:]))))
            framed.send_json({"parts": len(parts)})
            for part in parts:
                for chunk in contiguous_chunks(part):
                    framed.send_parts(_BLOCK.pack(len(chunk), zlib.crc32(chunk)), chunk)


@dataclass(frozen=True, slots=True)
class Peer:
    """Another host's data plane: where it listens, and the job's token."""

    address: Address
    token: bytes = field(repr=False)
    timeout_s: float = DEFAULT_TIMEOUT_S

    def manifest(self, generation: int) -> HostManifest:
        """Fetch the manifest of a committed generation.

        Raises:
            StoreError: It is not committed there, or arrives damaged.
            PeerError: The peer is dead or not of this job.
        """
        with connect(self.address, self.token, self.timeout_s) as framed:
            answer = _ask(framed, {"do": "manifest", "generation": generation})
            return manifest_from_message(answer["manifest"], f"the manifest from {framed.peer}")

    def fetch(
        self,
        generation: int,
        row: Columns,
        pieces: Collection,
        path: Path,
        begin: Columns,
        arrived: Callable[[int], None] = lambda count: None,
    ) -> int:
        """Fetch parts of stored pieces into a local file; returns the bytes. Blocks.

        Args:
            generation: A generation that is committed there.
            row: The pieces' rows in that host's manifest, [parts].
            pieces: Which box of each piece, [parts].
            path: An existing file, long enough.
            begin: Where each part goes, row-major, in bytes [parts].
            arrived: Is told of each block that has come, in bytes.

        Raises:
            StoreError: The generation is not committed there, a box is outside of its piece, or the
                file cannot be written.
            PeerError: The peer is dead, silent, not of this job, or a block arrives damaged. What
                is in the file is undefined then; fetch again, or from another host.
        """
        with connect(self.address, self.token, self.timeout_s) as framed:
            _ask(
                framed,
                {
                    "do": "fetch",
                    "generation": generation,
                    "row": row.tolist(),
                    "offset": pieces.offset.tolist(),
                    "shape": pieces.shape.tolist(),
                },
            )
            try:
                sizes = pieces.size_bytes().tolist()
                return _receive(framed, sizes, path, begin.tolist(), arrived)
            except OSError as error:
                raise StoreError(
                    f"{path} cannot be written ({error.strerror}). Stage it again."
                ) from error


def _ask(framed: FramedSocket, request: dict[str, Json]) -> dict[str, Json]:
    framed.send_json(request)
    answer = framed.recv_json()
    if "refused" in answer:
        raise StoreError(f"{framed.peer} refuses: {answer['refused']}")
    return answer


def _receive(
    framed: FramedSocket,
    sizes: Sequence[int],
    path: Path,
    begins: Sequence[int],
    arrived: Callable[[int], None],
) -> int:
    """Receive parts of ``sizes`` bytes into ``path`` at ``begins``, block by block."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    head = memoryview(bytearray(_BLOCK.size))
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for number, (size, begin) in enumerate(zip(sizes, begins, strict=True)):
            end = begin + size
            while begin < end:
                framed.recv_into(head)
                length, checksum = _BLOCK.unpack(head)
                if not 0 < length <= min(CHUNK_BYTES, end - begin):
                    raise PeerError(
                        f"{framed.peer} announces a block of {length} bytes; {end - begin} are "
                        f"left of part {number}. Do the versions differ?"
                    )
                block = buffer[:length]
                framed.recv_into(block)
                if zlib.crc32(block) != checksum:
                    raise PeerError(
                        f"a block of part {number} from {framed.peer} arrived damaged. Fetch again."
                    )
                begin += _write_all(descriptor, block, begin)
                arrived(length)
    finally:
        os.close(descriptor)
    return sum(sizes)


def _write_all(descriptor: int, data: memoryview, begin: int) -> int:
    """Write ``data`` at byte ``begin``; returns its length."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], begin + done)
    return done
