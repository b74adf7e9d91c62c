"""A host's part of a generation with pieces of other hosts added: they outlive the hosts they came
from. What was fetched counts as unproven until a proof of the whole state has passed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scalai.core.collection import Collection, Columns, concatenate
from scalai.core.dtypes import bits_dtype
from scalai.core.fingerprint import Committed, piece_fingerprint
from scalai.core.jsonable import Json
from scalai.core.source_list import used_only
from scalai.store.files import box_view, map_file
from scalai.store.manifest import HostManifest, StoredFile


def fingerprints_of(
    path: Path, pieces: Collection, begins: Columns, version: int
) -> npt.NDArray[np.uint64]:
    """Return the fingerprint of each piece, [rows], that lies row-major in a file at byte
    ``begins`` [rows]; ``version``: of the generation's fingerprints."""
    data, values = map_file(path), []
    for row, begin in enumerate(begins.tolist()):
        tensor, box = pieces.box(row)
        bits = box_view(data, begin, box.shape, bits_dtype(tensor.dtype))
        values.append(piece_fingerprint(bits, box, tensor.shape, version))
    return np.array(values, dtype=np.uint64)


def piece_keys(collection: Collection) -> list[tuple[str, bytes, bytes]]:
    """Return what tells the pieces of a state apart: tensor and box of each row, [rows]."""
    names = [collection.tensors[number].name for number in collection.tensor.tolist()]
    boxes = zip(collection.offset, collection.shape, strict=True)
    return [
        (name, offset.tobytes(), shape.tobytes())
        for name, (offset, shape) in zip(names, boxes, strict=True)
    ]


@dataclass(frozen=True, eq=False, slots=True)
class Extras:
    """What goes with pieces that are fetched: the scalars of all hosts; the states of the ranks
    that run here now (``rank_state`` by coordinate, of ``ranks``); and what is stated of the
    tensors."""

    scalars: Mapping[str, Json]
    rank_state: Mapping[str, Json]
    ranks: tuple[int, ...]
    committed: Committed | None


def empty_part(like: HostManifest, host: str) -> HostManifest:
    """Return a part of the same generation for a host that wrote nothing."""
    none = np.zeros(0, dtype=np.int64)
    return replace(
        like,
        host=host,
        about={key: value for key, value in like.about.items() if key != "attached"},
        ranks=(),
        collection=like.collection.select(none),
        file=none,
        begin=none,
        fingerprint=like.fingerprint[:0],
        files=(),
        rank_state={},
        unproven=(),
    )


def extended(
    own: HostManifest,
    file: StoredFile,
    pieces: Collection,
    begins: Columns,
    fingerprints: npt.NDArray[np.uint64],
    extras: Extras | None = None,
) -> HostManifest:
    """Return ``own`` with the pieces of one more file, behind those that it has, and with what goes
    with them."""
    grown = replace(
        own,
        collection=concatenate([own.collection, used_only(pieces)]),
        file=np.concatenate([own.file, np.full(len(pieces), len(own.files), dtype=np.int64)]),
        begin=np.concatenate([own.begin, begins]),
        fingerprint=np.concatenate([own.fingerprint, fingerprints]),
        files=(*own.files, file),
        unproven=(*own.unproven, len(own.files)),
    )
    if extras is None:
        return grown
    stated = own.committed
    return replace(
        grown,
        scalars=extras.scalars,
        rank_state={**own.rank_state, **extras.rank_state},
        ranks=tuple(sorted({*own.ranks, *extras.ranks})),
        committed=extras.committed if stated is None else stated.united(extras.committed),
    )


def proven_only(own: HostManifest) -> HostManifest:
    """Return ``own`` without the files that no proof has passed, and what lies in them."""
    return with_files(own, [n for n in range(len(own.files)) if n not in own.unproven])


def with_files(own: HostManifest, kept: Sequence[int]) -> HostManifest:
    """Return ``own`` with only these of its files, and what lies in them."""
    place = np.full(len(own.files), -1, dtype=np.int64)
    place[list(kept)] = np.arange(len(kept))
    rows = np.flatnonzero(place[own.file] >= 0) if len(own.file) else own.file
    return replace(
        own,
        collection=own.collection.select(rows),
        file=place[own.file[rows]],
        begin=own.begin[rows],
        fingerprint=own.fingerprint[rows],
        files=tuple(own.files[number] for number in kept),
        unproven=tuple(int(place[number]) for number in own.unproven if place[number] >= 0),
    )
