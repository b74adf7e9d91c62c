"""A host's part of a generation with pieces of other hosts added: they outlive the hosts they came
from."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scalai.core.collection import Collection, Columns, concatenate
from scalai.core.fingerprint import piece_fingerprint
from scalai.store.files import bits_dtype, box_view, map_file
from scalai.store.manifest import Generation, HostManifest, StoredFile


def fingerprints_of(path: Path, pieces: Collection, begins: Columns) -> npt.NDArray[np.uint64]:
    """Return the fingerprint of each piece, [rows], that lies row-major in a file at byte
    ``begins`` [rows]."""
    data, values = map_file(path), []
    for row, begin in enumerate(begins.tolist()):
        tensor, box = pieces.box(row)
        bits = box_view(data, begin, box.shape, bits_dtype(tensor))
        values.append(piece_fingerprint(bits, box, tensor.shape))
    return np.array(values, dtype=np.uint64)


def empty_part(like: HostManifest, host: str) -> HostManifest:
    """Return a part of the same generation for a host that deposited nothing."""
    none = np.zeros(0, dtype=np.int64)
    return replace(
        like,
        host=host,
        ranks=(),
        collection=like.collection.select(none),
        file=none,
        begin=none,
        fingerprint=like.fingerprint[:0],
        files=(),
    )


def extended(
    own: HostManifest,
    file: StoredFile,
    pieces: Collection,
    begins: Columns,
    fingerprints: npt.NDArray[np.uint64],
    of: Generation | None = None,
) -> HostManifest:
    """Return ``own`` with the pieces of one more file, and with the scalars and rank states of all
    hosts where ``of`` brings them."""
    return replace(
        own,
        collection=concatenate([own.collection, pieces]),
        file=np.concatenate([own.file, np.full(len(pieces), len(own.files), dtype=np.int64)]),
        begin=np.concatenate([own.begin, begins]),
        fingerprint=np.concatenate([own.fingerprint, fingerprints]),
        files=(*own.files, file),
        scalars=own.scalars if of is None else of.scalars,
        rank_state=own.rank_state if of is None else of.rank_state,
    )
