"""Checks of readers' input from outside, before any number of it is believed.

Readers check their own formats; paths, sizes and small files are the same for all.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from scalai.converters.checkpoint import PARAM, USER, Checkpoint, PlacedTensors, Values
from scalai.core.errors import RefusedError
from scalai.core.jsonable import MAX_JSON_BYTES, parse_json
from scalai.core.tensors.boxes import check_inside, right_aligned
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import box_text

MAX_PIECES = 1 << 24
"""Of one checkpoint: ten thousand tensors on a thousand ranks."""
MAX_BYTES = 1 << 60
"""Of all tensors: far below the limit of a 64-bit number."""
MAX_DEGREE = 1 << 16
"""Ranks on one axis."""


def file_inside(directory: Path, name: str, named_by: str) -> Path:
    """Return the path of a file named by a checkpoint.

    Raises:
        RefusedError: It lies outside of the directory, also by a link, or is no file.
    """
    path, parts = directory / name, PurePosixPath(name).parts
    if PurePosixPath(name).is_absolute() or ".." in parts or not parts or "\0" in name:
        raise RefusedError(f"{directory}/{named_by} names {name!r}, outside of the checkpoint.")
    if not any(path.resolve().is_relative_to(root) for root in _roots(directory)):
        raise RefusedError(f"{path} is a link to outside of the checkpoint. Copy the file there.")
    if not path.is_file():
        raise RefusedError(
            f"{path} is missing; {named_by} places tensors in it. Copy it too, or use another "
            "checkpoint."
        )
    return path


def _roots(directory: Path) -> tuple[Path, ...]:
    """Return the directories of files: the checkpoint's; for a snapshot in the cache of
    huggingface_hub also the blobs beside it, to which its files are links."""
    here = directory.resolve()
    is_snapshot = here.parent.name == "snapshots"
    return (here, here.parents[1] / "blobs") if is_snapshot else (here,)


def read_json(path: Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no JSON, too large or nested too deep, or a key comes twice.
    """
    if not path.is_file():
        raise FileNotFoundError(2, "no such file", str(path))
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ValueError(f"{size} bytes of JSON, and at most {MAX_JSON_BYTES} are read")
    return parse_json(path.read_bytes())


def layers_of(names: Iterable[str]) -> dict[str, dict[int, set[str]]]:
    """Return the tensors of each layer, by the names before its number and by its number: the first
    one in a parameter's name. Further numbers, as of experts, are stars."""
    layers: dict[str, dict[int, set[str]]] = {}
    for name in names:
        found = re.fullmatch(r"(.*?)\.?\b([0-9]{1,9})\.(.+)", name)
        if found:
            of = layers.setdefault(found[1], {}).setdefault(int(found[2]), set())
            of.add(re.sub(r"\b[0-9]+\b", "*", found[3]))
    return layers


def short_layers(names: Iterable[str], *, is_usual: bool = False) -> Iterator[str]:
    """Yield tensors missing in one layer and present in another, by their place. A layer with
    something of its own, as experts beside dense layers, lacks nothing.

    Args:
        is_usual: Count only tensors of modules within layers, and those of at least half of the
            layers: in an unknown model, one layer may have something of its own.
    """
    for stem, of in sorted(layers_of(names).items()):
        held = Counter(kind for kinds in of.values() for kind in kinds)
        fullest = max(sorted(of), key=lambda number: len(of[number]))
        for number, kinds in sorted(of.items()):
            lacking = of[fullest] - kinds if kinds < of[fullest] else set()
            if is_usual:
                lacking = {kind for kind in lacking if "." in kind and 2 * held[kind] >= len(of)}
            yield from (f"{stem}.{number}.{kind}" for kind in sorted(lacking))


def check_opened(checkpoint: Checkpoint) -> None:
    """Check that files lie in the checkpoint, tensors have possible sizes, and pieces lie in their
    tensors and their files.

    Raises:
        RefusedError: Something does not; names it.
    """
    _check_values(checkpoint.directory, checkpoint.values)
    _check_kinds(checkpoint.directory, checkpoint.placed.collection.tensors)
    for placed in (checkpoint.placed, checkpoint.duplicates):
        if placed is not None:
            _check_files(checkpoint.directory, placed)
            _check_tensors(checkpoint.directory, placed.collection.tensors)
            _check_rows(checkpoint.directory, placed)


def _check_values(directory: Path, values: Values) -> None:
    degrees: Mapping[str, Any] = values.degrees
    for axis, size in degrees.items():
        if not isinstance(size, int) or not 1 <= size <= MAX_DEGREE:
            raise RefusedError(
                f"{directory} says that {axis} was {size!r}. Use another checkpoint."
            )
    if not 0 <= values.step <= MAX_BYTES:
        raise RefusedError(f"{directory} is of step {values.step}. Use another checkpoint.")


def _check_kinds(directory: Path, tensors: tuple[Tensor, ...]) -> None:
    names = {tensor.name for tensor in tensors}
    for name in names:
        kind, parameter = split_name(name)
        if kind != USER and (not kind or f"{PARAM}/{parameter}" not in names):
            raise RefusedError(
                f"{directory} has {kind} of {parameter!r}, and no such parameter. It is not whole, "
                "or mixed from two checkpoints: use another one."
            )


def _check_files(directory: Path, placed: PlacedTensors) -> None:
    for file in placed.files:
        if file.content is None:
            size = file_inside(directory, file.path, "the checkpoint").stat().st_size
            if size != file.size_bytes:
                raise RefusedError(
                    f"{directory / file.path} has {size} bytes, and had {file.size_bytes} before. "
                    "Wait until the save or the copy has ended."
                )


def _check_tensors(directory: Path, tensors: tuple[Tensor, ...]) -> None:
    total = 0
    for tensor in tensors:
        shape = tensor.shape
        if not tensor.is_possible:
            raise RefusedError(
                f"{directory}: {tensor.name} is {tensor.dtype}{list(shape)}, which no tensor is. "
                "Use another checkpoint."
            )
        # An empty tensor too must have a countable shape.
        total += prod(max(size, 1) for size in shape) * ITEM_BYTES[tensor.dtype]
        if total > MAX_BYTES:
            raise RefusedError(
                f"{directory}: {tensor.name} is {tensor.dtype}{list(shape)}, more than any disk "
                "holds. Use another checkpoint."
            )


def _check_rows(directory: Path, placed: PlacedTensors) -> None:
    """Check boxes and bytes of all rows; in floating point, safe from overflow."""
    collection = placed.collection
    if not len(collection):
        return
    columns = collection.tensor, collection.offset, collection.shape
    check_inside(collection.tensors, right_aligned(collection.tensors), *columns)
    items = np.array([ITEM_BYTES[tensor.dtype] for tensor in collection.tensors], dtype=np.int64)
    item = np.where(placed.rounded(), 4, items[collection.tensor])
    reach = ((collection.shape - 1.0) * placed.stride).sum(axis=1)
    ends = placed.begin + (reach + 1.0) * item
    sizes = np.array([file.size_bytes for file in placed.files], dtype=np.float64)
    wrong = (placed.begin < 0) | (placed.stride < 0).any(axis=1) | (ends > sizes[placed.file])
    wrong &= (collection.shape > 0).all(axis=1)
    if wrong.any():
        row = int(wrong.argmax())
        tensor, box = collection.box(row)
        file = placed.files[placed.file[row]]
        raise RefusedError(
            f"{directory / file.path} has {file.size_bytes} bytes, and {tensor.name}"
            f"{box_text(box)} would end at byte {int(ends[row])}. It is damaged or truncated: use "
            "another checkpoint."
        )
