"""Megatron's ``torch_dist`` checkpoints: one tensor a key, in chunks, at any layout of the job.

    [<root>/latest_checkpointed_iteration.txt]  <root>/iter_0000006/
        metadata.json  .metadata  __<rank>_<n>.distcp  [common.pt]

Up to megatron-core 0.18 there is a ``common.pt``; later its content is among the shards
(``common_state``).

Megatron has four forms of the optimizer's state, and all are read: whole tensors
(``fully_reshardable``, and the optimizer without distribution), flat ranges of them
(``fully_sharded_model_space``), and the distributed optimizer's buckets (``dp_reshardable``, the
default; Megatron itself loads it at the same TP and PP only). The form written is
``fully_reshardable``, or whole tensors for an optimizer without distribution.

Source: megatron/core/dist_checkpointing of 0.16.1 and megatron/training/checkpointing.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from scalai.converters.checkpoint import (
    MAIN,
    PARAM,
    STEP,
    Checkpoint,
    CheckpointFile,
    CheckpointTarget,
    FilePiece,
    ReadOptions,
    Values,
    WriteOptions,
    place,
)
from scalai.converters.dcp_files import StoredArchives
from scalai.converters.dcp_metadata import (
    Chunk,
    Metadata,
    StoredKey,
    read_metadata,
    read_objects,
    stray_notes,
)
from scalai.converters.foreign import foreign_text, is_fsdp_dtensor, is_megatron_dcp
from scalai.converters.megatron import torch_dist_writer
from scalai.converters.megatron.beside_tensors import (
    argument_degrees,
    check_found,
    check_iteration,
    counters_of,
    find_links,
    find_param_groups,
    find_scaler,
    find_step,
)
from scalai.converters.megatron.common_state import (
    COMMON_OBJECT,
    FORM,
    Common,
    find_iteration,
    marker_of,
    read_common,
)
from scalai.converters.megatron.dp_reshardable import is_bucket, read_buckets
from scalai.converters.megatron.iteration_files import read_run
from scalai.converters.megatron.model_limits import check_model
from scalai.converters.megatron.modules import leading_axes, name_at, tensor_parallel_axis
from scalai.converters.megatron.torch_dist_writer import LINKS, SCHEDULER
from scalai.converters.opening import MAX_PIECES
from scalai.converters.torch_archive import read_archive_bytes
from scalai.converters.wrappers import step_above
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import Box, flat_range, whole

_CARRIED = {
    "args", "checkpoint_version", "content_metadata", "iteration", "optimizer",
    "num_floating_point_operations_so_far", "opt_param_scheduler", SCHEDULER,
}  # fmt: skip


def check_marker(directory: Path) -> None:
    marker = marker_of(directory)
    if "sharded_backend" not in marker and is_megatron_dcp(directory):
        raise RefusedError(f"{directory}: {foreign_text(directory)}.")
    if "sharded_backend" not in marker:
        raise RefusedError(
            f"{directory} has no metadata.json that names torch_dist: Megatron writes it last, "
            "so the save was interrupted. Use an older checkpoint."
        )
    if marker["sharded_backend"] != "torch_dist":
        raise RefusedError(
            f"{directory} is of the format {marker['sharded_backend']!r}, and torch_dist is read. "
            "Load it in Megatron and save it with --ckpt-format torch_dist."
        )
    for key in ("sharded_backend_version", "common_backend_version"):
        if marker.get(key, 1) != 1:
            raise RefusedError(
                f"{directory} has {key} {marker[key]!r}, and 1 is read. Use a later release of "
                "Scalai, or save it with a Megatron of 0.14 to 0.19."
            )


def notes_of(directory: Path, common: Common, metadata: Metadata) -> Iterator[str]:
    """Yield a note for each loss."""
    for key in sorted(set(common.content) - _CARRIED):
        yield f"{common.form} holds {key!r}, which is not carried"
    yield from stray_notes(directory, metadata)


STEP_FILE = "(step)"
"""The file in memory with the optimizer's step."""

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_MASTERS = ("param", "fp32_param")
_FIRST_MOMENT = "exp_avg"


@dataclass(frozen=True, slots=True)
class TorchDistLayout:
    """The layout ``torch_dist``."""

    name: str = "torch_dist"
    framework: str = "megatron"

    def find(self, path: Path) -> bool:
        """Whether there is a ``metadata.json`` of torch_dist, or files of a save without one."""
        directory = find_iteration(path, None)
        if directory is None:
            return False
        is_named = marker_of(directory).get("sharded_backend") == self.name
        is_saved = (directory / ".metadata").is_file() and not is_fsdp_dtensor(directory)
        return is_named or is_saved

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Read the metadata of a checkpoint, or of the newest below a save directory."""
        directory = check_found(find_iteration(path, options.iteration), path, options.iteration)
        check_marker(directory)
        metadata = read_metadata(directory, trust=options.trust_pickle)
        common = read_common(directory, metadata.objects, trust=options.trust_pickle)
        stored = {key: at for key, at in metadata.objects.items() if key != COMMON_OBJECT}
        objects = read_objects(directory, stored)
        archives = StoredArchives(directory, options.trust_pickle)
        return TorchDistReader(archives, metadata, common, objects).read()

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
        """Lay out ``iter_<n>`` and the tracker file, as Megatron's ``--load`` finds them."""
        return torch_dist_writer.lay_out(source, options)


@dataclass(frozen=True, slots=True)
class TorchDistReader:
    """One checkpoint during its reading.

    Attributes:
        objects: Archives of objects by key.
        replicas: Second copies of chunks, under the same keys.
    """

    archives: StoredArchives
    metadata: Metadata
    kept: Common
    objects: Mapping[str, bytes]
    replicas: tuple[StoredKey, ...] = ()

    @property
    def directory(self) -> Path:
        return self.archives.directory

    @property
    def common(self) -> Mapping[str, Any]:
        return self.kept.content

    @property
    def _arguments(self) -> Mapping[str, Any] | None:
        given = self.common.get("args")
        return None if given is None else vars(given)

    def read(self) -> Checkpoint:
        groups = find_param_groups(self.common) or self._bucket_groups()
        self._check_count()
        weights = {}
        model, moments, buckets = [], [], []
        for stored in self.metadata.tensors:
            state = _STATE.fullmatch(stored.key)
            if is_bucket(stored.key):
                buckets.append(stored)
            elif state:
                moments.append((state[1], state[2], stored))
            else:
                model.append(stored)
                weights[stored.key] = stored.dtype
        pieces = [piece for stored in model for piece in self._pieces(PARAM, stored.key, stored)]
        duplicates: list[FilePiece] = []
        for stored in self.replicas:
            state = _STATE.fullmatch(stored.key)
            kind, key = (state[1], state[2]) if state else (PARAM, stored.key)
            if kind in _MASTERS:
                kind = PARAM if stored.dtype == weights.get(key) else MAIN
            duplicates.extend(self._pieces(kind, key, stored))
        for kind, key, stored in moments:
            if key not in weights:
                raise RefusedError(
                    f"{self.directory}: {stored.key} has no parameter {key}. The checkpoint is "
                    "mixed from two, or incomplete: use another one."
                )
            is_duplicate = kind in _MASTERS and stored.dtype == weights[key]
            kind = MAIN if kind in _MASTERS else kind
            into, as_kind = (duplicates, PARAM) if is_duplicate else (pieces, kind)
            into.extend(self._pieces(as_kind, key, stored))
        if buckets:
            rescued = read_buckets(
                self.directory, buckets, model, self._chunk_begin, self._arguments or {}
            )
            pieces += rescued.pieces
            duplicates += rescued.duplicates
        step = find_step(self.directory, self.common, groups)
        files = self._files()
        if step is not None:
            pieces += _steps(pieces, STEP_FILE)
            content = np.float32(step).tobytes()
            files.append(CheckpointFile(STEP_FILE, len(content), content))
        placed, values = place(pieces, files), self._values(groups, model)
        check_model(self.directory, values, placed.collection.tensors)
        return Checkpoint(
            "torch_dist",
            self.directory,
            placed,
            values,
            duplicates=place(duplicates, files) if duplicates else None,
            notes=tuple(notes_of(self.directory, self.kept, self.metadata)),
        )

    def _check_count(self) -> None:
        """Refuse keys of impossibly many layers and experts."""
        count = sum(
            prod(chunk.box.shape[: leading_axes(stored.key)])
            for stored in self.metadata.tensors
            for chunk in stored.chunks
        )
        if count > MAX_PIECES:
            raise RefusedError(
                f"{self.directory}/.metadata has {count} pieces of layers, and at most "
                f"{MAX_PIECES} are read. It is damaged: use another checkpoint."
            )

    def _files(self) -> list[CheckpointFile]:
        stored = (*self.metadata.tensors, *self.replicas)
        names = {chunk.extent.file for tensor in stored for chunk in tensor.chunks}
        return [
            CheckpointFile(name, (self.directory / name).stat().st_size) for name in sorted(names)
        ]

    def _pieces(self, kind: str, key: str, stored: StoredKey) -> Iterator[FilePiece]:
        for chunk in stored.chunks:
            yield from self._chunk_pieces(kind, key, stored, chunk)

    def _chunk_pieces(
        self, kind: str, key: str, stored: StoredKey, chunk: Chunk
    ) -> Iterator[FilePiece]:
        if stored.key in self.metadata.flat:
            yield from self._flat_pieces(kind, key, stored, chunk)
            return
        axes = leading_axes(key)
        begin, stride, item = self._chunk_begin(stored, chunk)
        shape = stored.shape[axes:]
        for index in np.ndindex(*chunk.box.shape[:axes]):
            layer = tuple(low + at for low, at in zip(chunk.box.offset, index, strict=False))
            shift = sum(at * step for at, step in zip(index, stride, strict=False))
            tensor = Tensor(f"{kind}/{name_at(key, layer)}", shape, stored.dtype)
            box = Box(chunk.box.offset[axes:], chunk.box.shape[axes:])
            yield FilePiece(tensor, box, chunk.extent.file, begin + shift * item, stride[axes:])

    def _flat_pieces(
        self, kind: str, key: str, stored: StoredKey, chunk: Chunk
    ) -> Iterator[FilePiece]:
        """Yield the boxes of a flat range of one shard (``fully_sharded_model_space``)."""
        axes, shape = leading_axes(key), self.metadata.flat[stored.key]
        grid, (*at, low), count = stored.shape[:-1], chunk.box.offset, chunk.box.shape[-1]
        is_cut = len(grid) == len(shape) and all(n > 0 for n in grid)
        if not is_cut or any(size < 0 or size % n for size, n in zip(shape, grid, strict=True)):
            raise RefusedError(
                f"{self.directory}/.metadata: {stored.key} of shape {list(shape)} is cut into a "
                f"grid of {list(grid)}. It is damaged: use another checkpoint."
            )
        shard = tuple(size // parts for size, parts in zip(shape, grid, strict=True))
        origin = tuple(index * size for index, size in zip(at, shard, strict=True))
        if low + count > prod(shard):
            raise RefusedError(
                f"{self.directory}: a range of {stored.key} ends at element {low + count} of a "
                f"shard of {prod(shard)}. The checkpoint is damaged: use another one."
            )
        begin, _, item = self._chunk_begin(stored, chunk)
        tensor = Tensor(f"{kind}/{name_at(key, origin[:axes])}", shape[axes:], stored.dtype)
        for box in flat_range(shard[axes:], low, low + count):
            offset = tuple(a + b for a, b in zip(origin[axes:], box.offset, strict=True))
            yield FilePiece(tensor, Box(offset, box.shape), chunk.extent.file, begin)
            begin += box.numel * item

    def _chunk_begin(self, stored: StoredKey, chunk: Chunk) -> tuple[int, tuple[int, ...], int]:
        """Return the byte of a chunk's first element in its file, its strides and item size."""
        if chunk.stored is not None:
            return chunk.stored.begin, chunk.stored.stride, ITEM_BYTES[chunk.stored.dtype]
        return *self.archives.begin(stored, chunk), ITEM_BYTES[stored.dtype]

    def _bucket_groups(self) -> tuple[Mapping[str, Any], ...]:
        """Return the parameter groups of a dp_reshardable checkpoint, objects there."""
        groups = []
        for key in sorted(self.objects):
            if re.fullmatch(
                r"(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_0\.optimizer/.*", key
            ):
                value = self._object(key)
                groups += value["param_groups"]
        return tuple(groups)

    def _object(self, key: str) -> Any:
        path = self.directory / self.metadata.objects[key].file
        value = read_archive_bytes(self.objects[key], path, trust=self.archives.trust)
        return value[0] if isinstance(value, list) else value

    def _values(self, groups: Sequence[Mapping[str, Any]], model: Sequence[StoredKey]) -> Values:
        common = self.common
        iteration = common.get("iteration", step_above(self.directory))
        if iteration is None:
            raise RefusedError(
                f"{self.directory}: {self.kept.form} has no iteration, and no folder above is "
                "named by one (global_step_10). Use another checkpoint, or name the folder back."
            )
        check_iteration(self.directory, self.kept.form, iteration)
        arguments = self._arguments
        scaler = find_scaler(common)
        if scaler is None:
            scalers = [key for key in sorted(self.objects) if ".grad_scaler/" in key]
            scaler = self._object(scalers[0]) if scalers else None
        run = read_run(self.directory, int(iteration))
        degrees = {**run.degrees, **argument_degrees(arguments or {})}
        degrees.setdefault("tp", _inferred_tp(model))
        carried = {
            "content_metadata", "checkpoint_version", "num_floating_point_operations_so_far",
            SCHEDULER,
        }  # fmt: skip
        return Values(
            step=int(iteration),
            degrees=degrees,
            framework="megatron",
            is_split=_is_split(common),
            scheduler=common.get("opt_param_scheduler", common.get(SCHEDULER)),
            grad_scaler=scaler,
            param_groups=tuple(groups),
            arguments=arguments,
            counters={**run.counters, **counters_of(arguments or {})},
            extra={
                **run.extra,
                FORM: self.kept.form,
                LINKS: find_links(common),
                **{key: common[key] for key in sorted(carried & common.keys())},
                "objects": {
                    key: data
                    for key, data in self.objects.items()
                    if "optimizer.distributed." not in key
                },
                "keys": frozenset(stored.key for stored in model),
            },
        )


def _steps(pieces: Sequence[FilePiece], file: str) -> list[FilePiece]:
    """Return a 0-d step for every parameter whose optimizer counts steps: Adam's do, Muon's not."""
    pairs = (split_name(piece.tensor.name) for piece in pieces)
    states = [(kind, name) for kind, name in pairs if kind not in (PARAM, MAIN)]
    counted = {name for kind, name in states if kind == _FIRST_MOMENT}
    names = {name: None for _, name in states if not counted or name in counted}
    return [FilePiece(Tensor(f"{STEP}/{name}", (), "F32"), whole(()), file, 0) for name in names]


def _is_split(common: Mapping[str, Any]) -> bool | None:
    """Whether the optimizer was the distributed one; None: there is no optimizer."""
    optimizer = common.get("optimizer")
    if optimizer is None:
        return None
    text = optimizer if "param_state_sharding_type" in optimizer else optimizer.get(0, {})
    return "param_state_sharding_type" in text


def _inferred_tp(model: Sequence[StoredKey]) -> int:
    """Return the number of parts of parameters under tensor parallelism."""
    parts = 1
    for stored in model:
        axis = tensor_parallel_axis(stored.key)
        if axis is not None and ".experts." not in stored.key:
            axis += leading_axes(stored.key)
            sizes = {chunk.box.shape[axis] for chunk in stored.chunks}
            if len(sizes) == 1 and "linear_fc1" not in stored.key:
                parts = max(parts, stored.shape[axis] // sizes.pop())
    return parts
