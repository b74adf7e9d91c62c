"""Lays out a ``torch_dist`` checkpoint that megatron-core loads at any degrees.

The optimizer's state is written as whole tensors: for the distributed optimizer that is
``fully_reshardable``, whose loader (other than its writer) is right in every release. The degrees
decide no more than how tensors are cut into chunks, so that a rank reads what it needs.

Source: megatron/core/dist_checkpointing of 0.16.1. Differs in: chunks need not be those of a rank,
and files not those of a writer.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.converters.archive_layout import Archive, lay_out_archive
from scalai.converters.checkpoint import (
    MAIN,
    PARAM,
    STEP,
    Checkpoint,
    CheckpointFile,
    Piece,
    Target,
    WriteOptions,
    place,
)
from scalai.converters.megatron.common_state import (
    COMMON_FILE,
    COMMON_OBJECT,
    MARKER,
    form_for,
    lay_out_common,
    marker_for,
)
from scalai.converters.megatron.iterations import TRACKER, folder_of
from scalai.converters.megatron.names import (
    expert_of,
    tensor_parallel_axis,
)
from scalai.converters.megatron.padding import padding_note
from scalai.converters.megatron.torch_dist_common import Keys, common_of, content_of, objects_of
from scalai.converters.megatron.torch_dist_metadata import Chunk, Extent, StoredKey, write_metadata
from scalai.converters.torch_archive import NewTensor
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import Box
from scalai.store.atomic import replace_file


@dataclass(frozen=True, slots=True)
class _Item:
    """A tensor to be stored: where it comes from, under which key and index on leading axes."""

    tensor: Tensor
    key: str
    index: tuple[int, ...]


def lay_out(source: Checkpoint, options: WriteOptions) -> Target:
    """Lay out a checkpoint of ``source`` at other degrees.

    Raises:
        RefusedError: Masters are missing, layers are, or parameters made unequally many steps.
    """
    degrees = {**source.values.degrees, **options.degrees}
    is_split = _is_split(source, options)
    tensors = {tensor.name: tensor for tensor in source.placed.collection.tensors}
    names = Keys(source, tensors)
    keys = _stacked(list(_items(tensors, is_split, names)))
    notes = list(source.notes)
    objects = objects_of(source, tensors, names, degrees, notes)
    folder = folder_of(source.values.step)
    layout = _Files(folder, max(degrees.get("tp", 1) * degrees.get("pp", 1), 1))
    total = sum(item.tensor.size_bytes for _, items in keys for item in items)
    common = common_of(source, tensors, degrees, is_split, options.reference, notes)
    if names.are_partly_trained:
        common["content_metadata"]["non_homogeneous_layers"] = True
    note = padding_note(source, tensors, degrees, options.reference)
    notes += [] if note is None else [note]
    form = form_for(source, options.reference, notes)
    common_data = content_of(lay_out_common(common, form))
    if form == COMMON_OBJECT:
        objects[COMMON_OBJECT] = common_data
    extents = {key: layout.add_object(data) for key, data in objects.items()}
    stored = [layout.add(key, items, degrees, total) for key, items in keys]
    placed = place(layout.pieces, layout.files())
    metadata = write_metadata(stored, extents)

    def finish(directory: Path, _: npt.NDArray[np.uint64]) -> None:
        here = directory / folder
        here.mkdir(exist_ok=True)
        if form == COMMON_FILE:
            replace_file(here / COMMON_FILE, common_data)
        replace_file(here / ".metadata", metadata)
        replace_file(here / MARKER, json.dumps(marker_for(form)).encode())
        replace_file(directory / TRACKER, str(source.values.step).encode())

    return Target("torch_dist", placed, layout.fixed, finish, tuple(notes))


def _is_split(source: Checkpoint, options: WriteOptions) -> bool | None:
    """Tell whether the optimizer is to be the distributed one; None: there is no state of one."""
    kinds = {split_name(tensor.name)[0] for tensor in source.placed.collection.tensors}
    if kinds <= {PARAM, MAIN, STEP}:
        return None
    requested = options.is_split if options.is_split is not None else source.values.is_split
    return True if requested is None else requested


def _items(tensors: Mapping[str, Tensor], is_split: bool | None, names: Keys) -> Iterator[_Item]:
    """Yield what is stored, parameters first."""
    ordered = sorted(tensors, key=_in_order)
    for name in ordered:
        kind, parameter = split_name(name)
        if kind == PARAM:
            yield _Item(tensors[name], *names.of(parameter))
    for name in ordered:
        kind, parameter = split_name(name)
        if kind in (PARAM, MAIN, STEP) or is_split is None:
            continue
        key, index = names.of(parameter)
        yield _Item(tensors[name], f"optimizer.state.{kind}.{key}", index)
    for parameter in sorted(_trained(tensors), key=_in_order):
        weight, main = tensors[f"{PARAM}/{parameter}"], tensors.get(f"{MAIN}/{parameter}")
        if main is None and weight.dtype != "F32":
            raise RefusedError(
                f"there is no fp32 master of {parameter} ({weight.dtype}) beside its optimizer "
                "state. Use a checkpoint that was saved with its optimizer."
            )
        key, index = names.of(parameter)
        if is_split:
            yield _Item(main or weight, f"optimizer.state.param.{key}", index)
        elif main is not None:
            yield _Item(main, f"optimizer.state.fp32_param.{key}", index)


def _trained(tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the parameters that have an optimizer state."""
    pairs = (split_name(name) for name in tensors)
    return {parameter for kind, parameter in pairs if kind not in (PARAM, MAIN, STEP)}


def _in_order(name: str) -> tuple[Any, ...]:
    """Order names by their numbers, not by their digits."""
    return tuple(
        (0, int(part), "") if part.isdigit() else (1, 0, part)
        for part in name.replace("/", ".").split(".")
    )


def _stacked(items: Sequence[_Item]) -> list[tuple[str, list[_Item]]]:
    """Group items by key; refuse keys of which a layer or an expert is missing."""
    by_key: dict[str, list[_Item]] = {}
    for item in items:
        by_key.setdefault(item.key, []).append(item)
    for key, group in by_key.items():
        sizes = tuple(max(index) + 1 for index in zip(*(i.index for i in group), strict=True))
        alike = {(item.tensor.shape, item.tensor.dtype) for item in group}
        if len(group) != int(np.prod(sizes, dtype=np.int64)) or len(alike) != 1:
            raise RefusedError(
                f"{key} has {len(group)} tensors for layers and experts {list(sizes)}, of "
                f"{len(alike)} shapes. The source is incomplete: run scalai verify on it."
            )
    return list(by_key.items())


class _Files:
    """Lays archives one behind the other into files of about equal size."""

    def __init__(self, folder: str, count: int) -> None:
        self._folder, self._count = folder, count
        self._sizes = [0]
        self._done = 0
        self.pieces: list[Piece] = []
        self.fixed: dict[int, list[tuple[int, bytes]]] = {0: []}

    def files(self) -> list[CheckpointFile]:
        return [CheckpointFile(self._path(n), size) for n, size in enumerate(self._sizes)]

    def add_object(self, data: bytes) -> Extent:
        """Store an archive whose bytes are known."""
        begin = self._sizes[-1]
        self.fixed[len(self._sizes) - 1].append((begin, data))
        self._sizes[-1] += len(data)
        return Extent(self._name(), begin, len(data))

    def add(
        self, key: str, items: Sequence[_Item], degrees: Mapping[str, int], total: int
    ) -> StoredKey:
        """Store all tensors of a key, cut as tensor parallelism will."""
        chunks = []
        for item in items:
            for box in _cut(item, degrees):
                extent = self._add_chunk(item, box, total)
                offset, shape = (*item.index, *box.offset), (*[1] * len(item.index), *box.shape)
                chunks.append(Chunk(Box(offset, shape), extent))
        tensor = items[0].tensor
        sizes = tuple(max(index) + 1 for index in zip(*(i.index for i in items), strict=True))
        return StoredKey(key, (*sizes, *tensor.shape), tensor.dtype, tuple(chunks))

    def _add_chunk(self, item: _Item, box: Box, total: int) -> Extent:
        if self._done * self._count > total * len(self._sizes) and self._sizes[-1]:
            self._sizes.append(0)
            self.fixed[len(self._sizes) - 1] = []
        archive = _archive(item.tensor.dtype, (*[1] * len(item.index), *box.shape))
        begin = self._sizes[-1]
        self.fixed[len(self._sizes) - 1] += [(begin + at, data) for at, data in archive.fixed]
        self.pieces.append(Piece(item.tensor, box, self._path(), begin + archive.begin[0]))
        self._sizes[-1] += archive.size_bytes
        self._done += box.numel * ITEM_BYTES[item.tensor.dtype]
        return Extent(self._name(), begin, archive.size_bytes)

    def _name(self, number: int | None = None) -> str:
        return f"__{len(self._sizes) - 1 if number is None else number}_0.distcp"

    def _path(self, number: int | None = None) -> str:
        return f"{self._folder}/{self._name(number)}"


@cache
def _archive(dtype: str, shape: tuple[int, ...]) -> Archive:
    return lay_out_archive(NewTensor(dtype, shape))


def _cut(item: _Item, degrees: Mapping[str, int]) -> Iterator[Box]:
    """Yield the boxes of a tensor that ranks will ask for."""
    name, shape = item.tensor.name, item.tensor.shape
    axis = tensor_parallel_axis(name)
    tp = degrees.get("tp", 1)
    parts = degrees.get("etp", tp) if expert_of(name) is not None else tp
    if "linear_fc1." in name:
        parts *= 2  # a gate and an up projection are cut each on its own
    if axis is None or axis >= len(shape) or parts < 2 or shape[axis] % parts:
        yield Box((0,) * len(shape), shape)
        return
    size = shape[axis] // parts
    for part in range(parts):
        yield Box(
            tuple(part * size if at == axis else 0 for at in range(len(shape))),
            tuple(size if at == axis else full for at, full in enumerate(shape)),
        )
