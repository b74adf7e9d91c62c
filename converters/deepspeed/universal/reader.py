"""Reads DeepSpeed's universal checkpoints, of any stage and any model-parallel ranks.

Source: as ``layout``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
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
    FilePiece,
    ReadOptions,
    place,
)
from scalai.converters.deepspeed.files import Tag, carried, read_dictionary, scalar_of
from scalai.converters.deepspeed.job import DeepSpeedJob, enables_bf16, round_robins
from scalai.converters.deepspeed.reading.grid import Grid, RankState
from scalai.converters.deepspeed.reading.model import ModelStates
from scalai.converters.deepspeed.shards.cuts import WHOLE
from scalai.converters.deepspeed.shards.flat import Shape
from scalai.converters.deepspeed.universal.files import GLOBAL_STATE, MASTERS, STEPS, SUFFIX
from scalai.converters.deepspeed.universal.ranks import (
    cuts_of,
    degrees_of,
    layer_files,
    names_of,
    read_ranks,
)
from scalai.converters.torch_archive import StoredTensor, read_archive
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import Box, row_major, whole


def open_universal(directory: Path, options: ReadOptions) -> "UniversalReader":
    """Read a tag's metadata, except its parameters'. Raises ``RefusedError``."""
    models = read_ranks(directory, options.trust_pickle)
    first = models[0]
    if not first.is_stage_3 and first.dp > 1 and round_robins(first.config):
        raise RefusedError(
            f"{directory} was made by ds_to_universal of a job with round_robin_gradients, which "
            "mixes up its parameters (deepspeed 0.19.8). Convert the checkpoint that it was made "
            "of instead."
        )
    state = read_dictionary(directory / GLOBAL_STATE, trust=options.trust_pickle)
    tp, pp = degrees_of(models)
    files = (layer_files(models),) * tp if first.has_layers else ()
    return UniversalReader(Grid(Tag(directory, (), ()), options, tp, pp, (), files), models, state)


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter: its whole shape, the content of its files by kind, and whether to round the
    weights from the masters."""

    name: str
    shape: Shape
    entries: Mapping[str, Any]
    is_rounded: bool


@dataclass(frozen=True, slots=True)
class UniversalReader:
    """One universal checkpoint that is being read."""

    grid: Grid
    models: list[ModelStates]
    state: dict[str, Any]
    pieces: list[FilePiece] = field(default_factory=list)
    duplicates: list[FilePiece] = field(default_factory=list)
    files: dict[str, CheckpointFile] = field(default_factory=dict)
    number_steps: list[bool] = field(default_factory=list)
    steps: dict[float, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        """The tag's directory."""
        return self.grid.tag.directory

    def read(self) -> Checkpoint:
        """Return the checkpoint. Raises ``RefusedError`` if a parameter's file is missing."""
        self._check_folders()
        entries = {name: self._entries(name) for name in names_of(self.models)}
        stated = {name: _as_dictionary(kinds[MASTERS]) for name, kinds in entries.items()}
        cuts = cuts_of(stated, self.models, self.grid.tp, self.grid.options)
        own = {
            n: shape for model in self.models for of in model.shapes() for n, shape in of.items()
        }
        has_weights = not (self.models[0].is_stage_3 or self.models[0].has_layers)
        rounded = set()
        for name, kinds in entries.items():
            shape = cuts.get(name, WHOLE).whole(own[name])
            is_short = _rows(stated[name], shape) != shape
            parameter = _Parameter(name, shape, kinds, is_short or not has_weights)
            if parameter.is_rounded:
                rounded.add(f"{PARAM}/{name}")
            self._place(parameter)
        self._check_steps()
        states = [self._rank(model) for model in self.models]
        pieces, duplicates = self.grid.gather(states, cuts)
        self.pieces.extend(piece for piece in pieces if piece.tensor.name not in rounded)
        self.duplicates.extend(piece for piece in duplicates if piece.tensor.name not in rounded)
        job = replace(self.grid.job(states, cuts), has_number_steps=any(self.number_steps))
        files = list(self.files.values())
        values = self.models[0].values(job, states[0].param_groups)
        return Checkpoint(
            "deepspeed_universal",
            self.directory,
            place(self.pieces, files),
            replace(values, degrees={**values.degrees, "tp": self.grid.tp, "pp": self.grid.pp}),
            duplicates=place(self.duplicates, files) if self.duplicates else None,
            notes=tuple(self.notes),
        )

    def _rank(self, model: ModelStates) -> RankState:
        path = self.directory / GLOBAL_STATE
        groups = self.state.get("param_groups")
        if not isinstance(groups, list):
            raise RefusedError(f"{path} has no param_groups.")
        for name in model.files:
            self._add_file(name)
        return RankState(
            model, self._job(model, groups), carried(groups, path), list(model.pieces()), (), ()
        )

    def _job(self, model: ModelStates, groups: list[dict[str, Any]]) -> DeepSpeedJob:
        names = [tuple(shapes) for shapes in model.shapes()]
        if model.is_stage_3:
            parts = [group["params"] for group in groups]
            names = [tuple(name for part in group for name in names[part]) for group in parts]
        kept = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
        path = self.directory / GLOBAL_STATE
        rest = carried({key: self.state[key] for key in kept if key in self.state}, path)
        is_bf16 = enables_bf16(model.config)
        job = model.job(names, rest, has_number_steps=False, is_bf16=is_bf16)
        return replace(job, tag=job.tag.removesuffix(SUFFIX))

    def _check_folders(self) -> None:
        """Refuse folders unknown to the model; stages 1 and 2 also have untrained parameters'."""
        names = {name for model in self.models for name in model.first["module"]}
        folders = sorted(path.name for path in (self.directory / "zero").iterdir() if path.is_dir())
        stray = next((name for name in folders if name not in names), None)
        if stray is not None:
            raise RefusedError(
                f"{self.directory} has zero/{stray}, and no such parameter by "
                f"{self.models[0].files[0]}. Files of two checkpoints are mixed: use another one."
            )

    def _check_steps(self) -> None:
        if len(self.steps) > 1:
            few = ", ".join(f"{name}: {step:g}" for step, name in list(self.steps.items())[:3])
            raise RefusedError(
                f"{self.directory}: parameters have made unequally many optimizer steps ({few}). "
                "Files of two checkpoints are mixed: use another one."
            )

    def _add_file(self, name: str) -> None:
        size = (self.directory / name).stat().st_size
        self.files.setdefault(name, CheckpointFile(name, size))

    def _entries(self, name: str) -> dict[str, Any]:
        folder = self.directory / "zero" / name
        found = sorted(path.stem for path in folder.glob("*.pt"))
        if MASTERS not in found:
            raise RefusedError(
                f"{self.directory} has no zero/{name}/{MASTERS}.pt: the conversion to universal "
                "was interrupted, or files are missing. Convert again."
            )
        trust = self.grid.options.trust_pickle
        return {kind: read_archive(folder / f"{kind}.pt", trust=trust) for kind in found}

    def _place(self, parameter: _Parameter) -> None:
        name = parameter.name
        for kind, entry in parameter.entries.items():
            if kind != STEPS:
                self._place_kind(parameter, kind, entry)
        step, path = parameter.entries.get(STEPS), self.directory / f"zero/{name}/{STEPS}.pt"
        if STEPS not in parameter.entries:
            inner = self.state.get("optimizer_state_dict", {}).get("state", {})
            step, path = inner.get(0, {}).get("step"), self.directory / GLOBAL_STATE
        self._place_step(name, step, path)

    def _place_kind(self, parameter: _Parameter, kind: str, entry: Any) -> None:
        name, shape = parameter.name, parameter.shape
        file = f"zero/{name}/{kind}.pt"
        stored = entry.get("param") if isinstance(entry, dict) else entry
        rows = _rows(_as_dictionary(entry), shape)
        if not isinstance(stored, StoredTensor) or stored.shape not in (rows, (prod(rows),)):
            raise RefusedError(
                f"{self.directory / file} holds {getattr(stored, 'shape', stored)!r}, and {name} "
                f"is {list(shape)} by {self.models[0].files[0]}. Files of two checkpoints are "
                "mixed: use another one."
            )
        self._add_file(file)
        weight = self._weight_dtype(name)
        is_weight = kind == MASTERS and stored.dtype == weight
        known = PARAM if is_weight else MAIN if kind == MASTERS else kind
        into = self.duplicates if is_weight and not parameter.is_rounded else self.pieces
        stride = stored.stride if stored.shape == rows else row_major(rows)
        tensor = Tensor(f"{known}/{name}", shape, stored.dtype)
        placed = [FilePiece(tensor, whole(rows), file, stored.begin, stride)]
        placed += self._padding(tensor, rows[0] if rows != shape else None)
        into.extend(placed)
        if kind == MASTERS and not is_weight and parameter.is_rounded:
            rounded = Tensor(f"{PARAM}/{name}", shape, weight)
            self.pieces.extend(replace(p, tensor=rounded, is_rounded=True) for p in placed)

    def _padding(self, tensor: Tensor, first: int | None) -> Iterator[FilePiece]:
        """Yield a vocabulary's padding, rows from ``first`` on: ds_to_universal cuts it off, and
        DeepSpeed's loader fills in zeros."""
        if first is None:
            return
        count = tensor.shape[0] - first
        box = Box((first, *[0] * (len(tensor.shape) - 1)), (count, *tensor.shape[1:]))
        size = box.numel * ITEM_BYTES[tensor.dtype]
        file = f"(zeros {size})"
        self.files[file] = CheckpointFile(file, size, bytes(size))
        yield FilePiece(tensor, box, file, 0)
        if tensor.name.startswith((MAIN, PARAM)):
            name = split_name(tensor.name)[1]
            self.notes.append(
                f"ds_to_universal cut {count} rows of padding off {name}: they are zero here, as "
                "DeepSpeed makes them"
            )

    def _weight_dtype(self, name: str) -> str:
        has = next(model for model in self.models if name in model.first["module"])
        return has.weight_dtype(name)

    def _place_step(self, name: str, value: Any, path: Path) -> None:
        step = scalar_of(value, path)
        if step is None:
            return
        self.number_steps.append(isinstance(value, int))
        self.steps.setdefault(step, name)
        file = f"(step {step:g})"
        content = np.float32(step).tobytes()
        self.files[file] = CheckpointFile(file, len(content), content)
        self.pieces.append(FilePiece(Tensor(f"{STEP}/{name}", (), "F32"), whole(()), file, 0))


def _as_dictionary(entry: Any) -> Mapping[str, Any]:
    return entry if isinstance(entry, dict) else {}


def _rows(entry: Mapping[str, Any], shape: Shape) -> Shape:
    """Return the shape in a parameter's file: for a vocabulary without padding."""
    stored = entry.get("param")
    if not entry.get("vocab_tensor") or not isinstance(stored, StoredTensor):
        return shape
    return (min(stored.shape[0], shape[0]), *shape[1:])
