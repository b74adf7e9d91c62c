"""What a load reads is compared with the checksums that torch keeps in its files.

A rank reads the pieces that it wants, while a checksum is of a whole storage. So the storages that
any rank reads are dealt out: each is read whole by one rank, before anything is written.
"""

from collections.abc import Sequence
from itertools import compress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import Placed
from scalai.converters.checksums import FileStorage, is_damaged, refuse_damaged
from scalai.core.errors import MemoryShortError, ProofError, StoreError
from scalai.runtime.at_once import at_once

THREADS = 4
"""Storages that a rank reads at once."""
_FILE_BITS = 44
"""A file has less than 2^44 bytes (16 TiB): its number and a byte in it make one key."""
_UNTOUCHED = "The engine is as it was."


def touched(storages: Sequence[FileStorage], pieces: Placed) -> npt.NDArray[np.bool_]:
    """Return in which storages pieces lie, [storages]."""
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
    """Return the storages that a rank checks: as many bytes a rank as whole storages allow.

    Ranks take neighbours, because what a rank wants of a flat buffer lies in few files: most of
    what it checks here it reads again from its host's page cache.
    """
    ends = np.cumsum([stored.size_bytes for stored in storages])
    if not len(ends):
        return []
    middles = ends - np.array([stored.size_bytes for stored in storages]) / 2
    taker = np.minimum(middles * world_size // max(int(ends[-1]), 1), world_size - 1)
    return [storages[at] for at in np.flatnonzero(taker == rank).tolist()]


def check_storages(directory: Path, storages: Sequence[FileStorage], pieces: Placed) -> None:
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
