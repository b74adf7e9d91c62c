"""A checkpoint's content as plain values, for people and for ``--json``.

A generation also lists its hosts and their pieces.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import Checkpoint
from scalai.converters.generation_layout import PARTS
from scalai.converters.source_files import SourceFiles
from scalai.converters.trainer_files import describe_companions
from scalai.core.errors import LayoutError, UsageError
from scalai.core.jsonable import Json
from scalai.core.tensors.collection import Collection, Tensor, concatenate
from scalai.core.tensors.coverage import find_gaps
from scalai.core.tensors.dtypes import bits_dtype
from scalai.core.tensors.fingerprint import sure_fingerprints
from scalai.core.tensors.region import Box, box_text
from scalai.store.files import decode, slices
from scalai.store.generation import UnitedGeneration


def describe(checkpoint: Checkpoint) -> dict[str, Json]:
    """Return a checkpoint's facts without values; of a generation also each host's pieces."""
    stored = checkpoint.values.extra.get(PARTS)
    parts = describe_parts(stored.generation, stored.numbers) if stored is not None else {}
    return {**_describe(checkpoint), **parts}


def _describe(checkpoint: Checkpoint) -> dict[str, Json]:
    collection, values = checkpoint.placed.collection, checkpoint.values
    gaps = find_gaps(collection)
    rows = np.bincount(collection.tensor, minlength=len(collection.tensors))
    return {
        "layout": checkpoint.layout,
        "directory": str(checkpoint.directory),
        "framework": values.framework,
        "step": values.step,
        "degrees": dict(values.degrees),
        "optimizer": {None: None, True: "split over data-parallel ranks", False: "whole"}[
            values.is_split
        ],
        "counters": dict(values.counters),
        "param_groups": len(values.param_groups),
        "has_scheduler": values.scheduler is not None,
        "has_grad_scaler": values.grad_scaler is not None,
        "has_arguments": values.arguments is not None,
        "size_bytes": sum(tensor.size_bytes for tensor in collection.tensors),
        "files": len(checkpoint.placed.files),
        "is_whole": not gaps,
        "missing": [{"tensor": tensor.name, **box_fields(box)} for tensor, box in gaps],
        "notes": list(checkpoint.notes),
        "beside": describe_companions(checkpoint),
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "size_bytes": tensor.size_bytes,
                "pieces": int(count),
            }
            for tensor, count in zip(collection.tensors, rows, strict=True)
        ],
    }


def read_tensor(checkpoint: Checkpoint, name: str) -> tuple[Tensor, npt.NDArray[Any]]:
    """Return a tensor's values, put together from its pieces.

    Raises:
        UsageError: No tensor has this name.
        LayoutError: A part of it is nowhere.
    """
    placed = checkpoint.placed
    tensors: Mapping[str, Tensor] = {t.name: t for t in placed.collection.tensors}
    if name not in tensors:
        similar = [known for known in tensors if name in known][:5] or list(tensors)[:5]
        raise UsageError(f"there is no tensor {name!r} among {len(tensors)}, but {similar}.")
    gaps = [box for tensor, box in find_gaps(placed.collection) if tensor.name == name]
    if gaps:
        raise LayoutError(
            f"{len(gaps)} boxes of {name!r} are in no file below {checkpoint.directory}, first "
            f"{box_text(gaps[0])}. Name the directory of all hosts, or use another checkpoint."
        )
    tensor = tensors[name]
    bits = np.zeros(tensor.shape, dtype=bits_dtype(tensor.dtype))
    with SourceFiles(checkpoint.directory) as files:
        for row in range(len(placed.collection)):
            held, box = placed.collection.box(row)
            if held.name == name:
                bits[slices(box)] = files.view(placed, row, box)
    return tensor, decode(bits, tensor.dtype)


_FRAMEWORKS = ("megatron", "deepspeed")
"""Names of live state's scalars."""


def describe_parts(generation: UnitedGeneration, numbers: Sequence[int]) -> dict[str, Json]:
    """Return a generation's facts beyond those of other layouts.

    Args:
        numbers: Numbers of all generations beside this one.
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
        "tensors": _tensor_table(generation, rows),
    }


def _tensor_table(generation: UnitedGeneration, rows: Collection) -> list[dict[str, Json]]:
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
    return {"offset": list(box.offset), "shape": list(box.shape)}
