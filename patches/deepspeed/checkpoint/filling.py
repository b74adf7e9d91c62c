"""Fills live memory from a checkpoint's files, and proves it.

Before anything is written, the files' storages are compared with torch's checksums. A rank reads
pieces, and a checksum covers a whole storage: so storages read by any rank are dealt out, each
whole to one rank. Then each rank reads its parts through one small buffer. Fingerprints of the read
bytes are taken by the source's geometry, those of live memory by the engine's.
"""

from collections.abc import Sequence
from itertools import compress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from scalai.converters.checkpoint import CheckpointFile, PlacedTensors
from scalai.converters.checksums import FileStorage, is_damaged, refuse_damaged
from scalai.converters.recorded import check_reports
from scalai.converters.streaming import Gatherer, wanted_box
from scalai.converters.work import Work, work_between
from scalai.core.errors import LayoutError, MemoryShortError, ProofError, StoreError
from scalai.core.tensors.collection import Collection, concatenate
from scalai.core.tensors.coverage import check_coverage
from scalai.core.tensors.dtypes import Bits
from scalai.core.tensors.fingerprint import combine, tensor_fingerprints
from scalai.core.tensors.region import Piece, box_text
from scalai.patches.deepspeed.checkpoint.agreement import packed, unpacked
from scalai.runtime.at_once import at_once
from scalai.runtime.live import Slot, collection_of, piece_view
from scalai.runtime.live_fingerprints import live_fingerprints

THREADS = 4
"""Storages read at once by a rank."""
_FILE_BITS = 44
"""A file has less than 2^44 bytes (16 TiB): its number and a byte in it make one key."""
_UNTOUCHED = "The engine is as it was."


def touched(storages: Sequence[FileStorage], pieces: PlacedTensors) -> npt.NDArray[np.bool_]:
    """Return the storages with pieces in them, [storages]."""
    number = {file.path: at for at, file in enumerate(pieces.files)}
    keys = np.array([(number[s.file] << _FILE_BITS) + s.begin for s in storages], dtype=np.int64)
    ends = keys + np.array([s.size_bytes for s in storages], dtype=np.int64)
    order = np.argsort(keys)
    rows = (pieces.file.astype(np.int64) << _FILE_BITS) + pieces.begin
    before = np.searchsorted(keys[order], rows, side="right") - 1
    at = order[before[before >= 0]]
    is_touched = np.zeros(len(storages), dtype=bool)
    is_touched[at[rows[before >= 0] < ends[at]]] = True
    return is_touched


def share(storages: Sequence[FileStorage], rank: int, world_size: int) -> list[FileStorage]:
    """Return a rank's storages to check: as many bytes a rank as whole storages allow.

    Ranks take neighbours, because a rank's parts of a flat buffer lie in few files: it reads most
    of them again from its host's page cache.
    """
    ends = np.cumsum([stored.size_bytes for stored in storages])
    if not len(ends):
        return []
    middles = ends - np.array([stored.size_bytes for stored in storages]) / 2
    taker = np.minimum(middles * world_size // max(int(ends[-1]), 1), world_size - 1)
    return [storages[at] for at in np.flatnonzero(taker == rank).tolist()]


def check_storages(directory: Path, storages: Sequence[FileStorage], pieces: PlacedTensors) -> None:
    """Read storages whole, some side by side, and compare them with their checksums.

    Raises:
        ProofError: One differs; names file, storage, and the tensors of ``pieces`` in it.
        StoreError: A file cannot be read.
        MemoryShortError: Memory ran out.
    """
    damaged = [False] * len(storages)

    def check(number: int) -> None:
        damaged[number] = is_damaged(directory, storages[number])

    try:
        at_once(check, range(len(storages)), threads=THREADS)
        refuse_damaged(directory, list(compress(storages, damaged)), pieces)
    except ProofError as error:
        raise ProofError(f"{error} {_UNTOUCHED}") from error
    except OSError as error:
        raise StoreError(f"{directory} cannot be read ({error}). {_UNTOUCHED}") from error
    except MemoryError as error:
        raise MemoryShortError(
            f"memory ran out while {len(storages)} storages of {directory} were compared with "
            f"their checksums. Let this process have more. {_UNTOUCHED}"
        ) from error


Row = tuple[Slot, Piece]
BUFFER_BYTES = 4 << 20
_SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_SPOILT = (
    "The engine now holds parts of this checkpoint and parts of what it had: load a checkpoint "
    "again, or start the job anew."
)


def work_into(source: PlacedTensors, wanted: Collection) -> Work:
    """Plan the filling of the wanted rows.

    Args:
        source: Pieces in files, under the names and dtypes of ``wanted``.
        wanted: The rows of live memory.

    Raises:
        LayoutError: No piece holds a wanted element.
    """
    rows = np.zeros(len(wanted), dtype=np.int64)
    memory = (CheckpointFile("live memory", 0),)
    return work_between(
        source, PlacedTensors(wanted, rows, rows, np.zeros_like(wanted.shape), memory), BUFFER_BYTES
    )


def fill(directory: Path, work: Work, rows: Sequence[Row]) -> npt.NDArray[np.uint64]:
    """Read the wanted rows into live memory; return their fingerprints, [rows].

    Raises:
        StoreError: A file cannot be read; the engine's state is spoilt.
        ProofError: Live memory differs from the read bytes; the engine's state is spoilt.
    """
    read: list[list[int]] = [[] for _ in rows]
    units = [unit for task in work.tasks for unit in task.units]
    try:
        with Gatherer(work, directory) as gatherer:
            for unit in units:
                slot, piece = rows[unit.row]
                bits, fingerprint = gatherer.gather(unit)
                part = wanted_box(piece.box, unit)
                piece_view(slot, piece.sub(part)).copy_(_signed(bits))
                read[unit.row].append(fingerprint)
    except OSError as error:
        raise StoreError(
            f"{directory} could not be read to its end ({error}). {_SPOILT}"
        ) from error
    prints = np.array([combine(parts) for parts in read], dtype=np.uint64)
    _check(rows, prints, live_fingerprints(rows))
    return prints


def _check(rows: Sequence[Row], read: npt.NDArray[np.uint64], live: npt.NDArray[np.uint64]) -> None:
    differing = np.flatnonzero(read != live).tolist()
    if differing:
        named = (rows[row] for row in differing[:5])
        raise ProofError(
            f"{len(differing)} pieces of live memory are not what was read: "
            f"{', '.join(slot.tensor.name + box_text(piece.box) for slot, piece in named)}. "
            f"The memory is not sound. {_SPOILT}"
        )


def _signed(bits: Bits) -> torch.Tensor:
    """Return bits as integers, like ``piece_view``."""
    return torch.from_numpy(bits.view(_SIGNED[bits.itemsize]))


def proof(rows: Sequence[Row], prints: npt.NDArray[np.uint64]) -> bytes:
    """Return a rank's part for ``check_proofs``: its rows and their fingerprints."""
    return packed(collection_of(rows), None, {"prints": prints})


def check_proofs(directory: Path, source: Collection, proofs: Sequence[bytes]) -> None:
    """Add up the fingerprints of all ranks to those of tensors, and compare them with a
    conversion's report beside the checkpoint.

    Args:
        proofs: Each rank's result of ``proof``.

    Raises:
        LayoutError: The ranks together miss elements of a tensor.
        ProofError: Ranks with the same elements differ, or tensors differ from the conversion's.
    """
    parts = [unpacked(part) for part in proofs]
    rows = concatenate([collection for collection, _, _ in parts])
    try:
        check_coverage(rows)
        held = set(source.tensors)
        prints = np.concatenate([columns["prints"] for _, _, columns in parts])
        found = tensor_fingerprints(rows, prints)
        check_reports(directory, {t.name: found[t.name] for t in rows.tensors if t in held})
    except (LayoutError, ProofError) as error:
        raise type(error)(f"{error} {_SPOILT}") from error
