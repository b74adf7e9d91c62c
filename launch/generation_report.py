"""What a stored generation holds, as plain values: for people and for ``--json``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.core.collection import Collection, Tensor, concatenate
from scalai.core.coverage import find_gaps
from scalai.core.errors import LayoutError, ProofError, StoreError, UsageError
from scalai.core.fingerprint import sure_fingerprints
from scalai.core.region import Box, whole
from scalai.store.files import bits_dtype, slices
from scalai.store.manifest import Generation, load_generation
from scalai.store.places import find_generations
from scalai.store.rows import StoredRows
from scalai.store.values import decode

Json = Any


def open_generation(path: Path, number: int | None) -> tuple[Generation, list[int]]:
    """Read the generation of this number below ``path``, or the newest; also list all numbers.

    Raises:
        UsageError: There is none.
        StoreError: It is damaged; names the file.
    """
    found = find_generations(path)
    if not found:
        below = sorted(entry.name for entry in path.glob("*/") if find_generations(entry))
        hint = f" There are some below: {', '.join(below)}." if below else ""
        raise UsageError(
            f"{path} holds no committed generation. Name a generation's directory, a host's, a "
            f"job's or a durable one.{hint}"
        )
    number = max(found) if number is None else number
    if number not in found:
        raise UsageError(
            f"{path} holds no generation {number}, but {list(found)}. Name one of them."
        )
    return load_generation(found[number], number), list(found)


def describe(generation: Generation) -> dict[str, Json]:
    """Return all of a generation that is not its values: what ``--json`` prints."""
    rows = concatenate([part.collection for part in generation.hosts])
    gaps = find_gaps(rows)
    return {
        "generation": generation.generation,
        "step": generation.step,
        "about": dict(generation.about),
        "size_bytes": sum(part.size_bytes for part in generation.hosts),
        "is_whole": not gaps,
        "fingerprint_version": generation.fingerprint_version,
        "missing": [{"tensor": tensor.name, **_box(box)} for tensor, box in gaps],
        "hosts": [
            {
                "host": part.host,
                "directory": str(directory),
                "ranks": list(part.ranks),
                "pieces": len(part.collection),
                "size_bytes": part.size_bytes,
                "files": [{"name": f.name, "size_bytes": f.size_bytes} for f in part.files],
            }
            for part, directory in zip(generation.hosts, generation.directories, strict=True)
        ],
        "scalars": generation.scalars,
        "rank_state": sorted(generation.rank_state),
        "tensors": _tensors(generation, rows),
    }


def _tensors(generation: Generation, rows: Collection) -> list[dict[str, Json]]:
    values = np.concatenate([part.fingerprint for part in generation.hosts])
    prints = sure_fingerprints(rows, values, generation.fingerprint_version)
    table: dict[str, dict[str, Json]] = {
        tensor.name: {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "size_bytes": tensor.size_bytes,
            "fingerprint": None if tensor.name not in prints else f"{prints[tensor.name]:016x}",
            "pieces": [],
        }
        for tensor in rows.tensors
    }
    for part in generation.hosts:
        for row, (file, begin, value) in enumerate(
            zip(part.file.tolist(), part.begin.tolist(), part.fingerprint.tolist(), strict=True)
        ):
            tensor, box = part.collection.box(row)
            piece = {
                "host": part.host,
                "file": part.files[file].name,
                "begin": begin,
                **_box(box),
                "fingerprint": f"{value:016x}",
            }
            table[tensor.name]["pieces"].append(piece)
    return list(table.values())


def _box(box: Box) -> dict[str, Json]:
    return {"offset": list(box.offset), "shape": list(box.shape)}


def read_tensor(generation: Generation, name: str) -> tuple[Tensor, npt.NDArray[Any]]:
    """Return a tensor's values, put together from the parts.

    Raises:
        UsageError: No tensor has this name.
        LayoutError: A part of it is on none of the hosts at hand.
    """
    rows = concatenate([part.collection for part in generation.hosts])
    tensors = {tensor.name: tensor for tensor in rows.tensors}
    if name not in tensors:
        similar = [known for known in tensors if name in known][:5] or list(tensors)[:5]
        raise UsageError(f"there is no tensor {name!r} among {len(tensors)}, but {similar}.")
    tensor = tensors[name]
    gaps = [box for gap, box in find_gaps(rows) if gap.name == name]
    if gaps:
        raise LayoutError(
            f"{len(gaps)} boxes of {name!r} are on none of the hosts "
            f"{[part.host for part in generation.hosts]}, first {gaps[0]}. Name the directory of "
            "all hosts."
        )
    bits = np.zeros(tensor.shape, dtype=bits_dtype(tensor))
    for stored in _stored(generation):
        collection = stored.manifest.collection
        for row in range(len(collection)):
            held, box = collection.box(row)
            if held.name == name:
                bits[slices(box)] = stored.view(row)
    assert bits.shape == whole(tensor.shape).shape
    return tensor, decode(bits, tensor.dtype)


def verify(generation: Generation) -> None:
    """Compute the fingerprint of every piece again, and add them up to what was committed. Raises
    ``ProofError`` where one differs."""
    damage = [line for stored in _stored(generation) for line in stored.damage()]
    if damage:
        raise ProofError(
            f"{len(damage)} pieces are not what was written: {'; '.join(damage[:5])}. Use another "
            "generation."
        )
    rows = concatenate([part.collection for part in generation.hosts])
    values = np.concatenate([part.fingerprint for part in generation.hosts])
    prints = sure_fingerprints(rows, values, generation.fingerprint_version)
    stated = generation.stated
    differ = sorted(name for name in prints if stated.get(name, prints[name]) != prints[name])
    if differ:
        raise ProofError(
            f"{len(differ)} tensors are not what was committed: {', '.join(differ[:5])}. Use "
            "another generation."
        )


def _stored(generation: Generation) -> Sequence[StoredRows]:
    stored = []
    for part, directory in zip(generation.hosts, generation.directories, strict=True):
        if directory is None:
            raise StoreError(f"the part of host {part.host!r} lies on another machine.")
        stored.append(StoredRows(directory, part))
    return stored
