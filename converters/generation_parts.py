"""Which host holds what of a stored generation, as plain values: for people and for ``--json``."""

from collections.abc import Sequence

import numpy as np

from scalai.core.jsonable import Json
from scalai.core.tensors.collection import Collection, concatenate
from scalai.core.tensors.fingerprint import sure_fingerprints
from scalai.core.tensors.region import Box
from scalai.store.generation import Generation

_FRAMEWORKS = ("megatron", "deepspeed")
"""Under which names live state keeps its scalars."""


def describe_parts(generation: Generation, numbers: Sequence[int]) -> dict[str, Json]:
    """Return what a generation has beyond other layouts.

    Args:
        numbers: Of all generations that lie where this one does.
    """
    rows = concatenate([part.collection for part in generation.hosts])
    return {
        # The reader takes any generation for Megatron's.
        "framework": next((name for name in _FRAMEWORKS if name in generation.scalars), ""),
        "generation": generation.generation,
        "generations": list(numbers),
        "about": dict(generation.about),
        "size_bytes": sum(part.size_bytes for part in generation.hosts),
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
    prints = sure_fingerprints(rows, values)
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
                **box_fields(box),
                "fingerprint": f"{value:016x}",
            }
            table[tensor.name]["pieces"].append(piece)
    return list(table.values())


def box_fields(box: Box) -> dict[str, Json]:
    """Return a box as JSON."""
    return {"offset": list(box.offset), "shape": list(box.shape)}
