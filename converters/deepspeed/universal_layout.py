"""DeepSpeed's universal checkpoints: a folder per parameter, for a job of any degree.

``ds_to_universal`` writes for the stages of its source: 1 and 2, or 3. Scalai writes for both.

Source: ``load_hp_checkpoint_state`` and ``SubparamShape`` of
deepspeed/checkpoint/universal_checkpoint.py, the former also of runtime/zero/stage3.py,
``load_hp_checkpoint_state_from_checkpoint_dir`` of runtime/base_optimizer.py, and
checkpoint/ds_to_universal.py, all of 0.19.8. The target's notes name the values these loaders do
not restore, or restore wrongly.

    <save directory>/latest_universal
    <save directory>/<tag>_universal/
        mp_rank_00_model_states.pt  zero_pp_rank_0_mp_rank_00_model_states.pt
        zero/optimizer_state.pt  zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt

Parameters lie whole beside the ranks' model_states files, with the cuts of the ranks' weights and
of a target's.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from typing import Any

from scalai.converters.bounded import read_pointer
from scalai.converters.checkpoint import (
    MAIN,
    PARAM,
    Checkpoint,
    CheckpointFile,
    CheckpointTarget,
    FilePiece,
    ReadOptions,
    WriteOptions,
    place,
    step_piece,
    stored_files,
)
from scalai.converters.deepspeed.cuts import INFO, WHOLE, CutRule, CutRules, ShardCut, read_cuts
from scalai.converters.deepspeed.drafts import Archives, Draft, Filled, Ranks, job_of, naming
from scalai.converters.deepspeed.flat import Shape
from scalai.converters.deepspeed.grid import Grid, RankState
from scalai.converters.deepspeed.job import DeepSpeedJob, check_config, enables_bf16, round_robins
from scalai.converters.deepspeed.model_reader import ModelStates
from scalai.converters.deepspeed.model_writer import add_model
from scalai.converters.deepspeed.optimizer_writer import Buffer, buffers_of, global_state, members
from scalai.converters.deepspeed.pipeline import TIED, LayerFile, unit_of
from scalai.converters.deepspeed.tag_files import Tag, carried, read_dictionary, scalar_of
from scalai.converters.pickles import Foreign, foreign, made
from scalai.converters.torch_archive import (
    ArchiveLayout,
    NewTensor,
    StoredTensor,
    lay_out_archive,
    read_archive,
)
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import Box, row_major, whole

LATEST = "latest_universal"
SUFFIX = "_universal"
MASTERS, STEPS = "fp32", "step"
GLOBAL_STATE = "zero/optimizer_state.pt"


def find_universal(path: Path, step: int | None) -> Path | None:
    """Return a tag's directory: ``path`` itself, the tag in ``latest_universal``, or the step's."""
    if step is None and (path / GLOBAL_STATE).is_file():
        return path
    tag = read_pointer(path / LATEST) if step is None else f"global_step{step}{SUFFIX}"
    if not tag or "/" in tag or not (path / tag / GLOBAL_STATE).is_file():
        return None
    return path / tag


_FILE = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_DEGREES = "checkpoint_parallel_dimensions"


def read_ranks(directory: Path, trust: bool) -> list[ModelStates]:
    """Read the model_states files of every model-parallel rank, in order.

    Raises:
        RefusedError: Files are missing.
    """
    whole: dict[int, list[str]] = {}
    parts: dict[int, dict[int, str]] = {}
    for path in directory.glob("*mp_rank_*_model_states.pt"):
        if (match := _FILE.fullmatch(path.name)) is None:
            continue
        if match["dp"] is None:
            whole[int(match["mp"])] = [path.name]
        else:
            parts.setdefault(int(match["mp"]), {})[int(match["dp"])] = path.name
    names = whole or {rank: [of[dp] for dp in sorted(of)] for rank, of in parts.items()}
    if sorted(names) != list(range(len(names))) or not names:
        raise RefusedError(
            f"{directory} has model_states.pt of the model-parallel ranks {sorted(names)}: some are"
            " missing. Convert again, or use another checkpoint."
        )
    models = [
        _read(directory, names[rank], is_stage_3=not whole, trust=trust) for rank in sorted(names)
    ]
    for model in models:
        if len(model.files) != (1 if whole else model.dp):
            raise RefusedError(
                f"{directory} was made of {model.dp} data-parallel ranks, and has model_states.pt "
                f"of {len(model.files)}. Convert to universal again, or use another checkpoint."
            )
    return models


def _read(directory: Path, names: Sequence[str], *, is_stage_3: bool, trust: bool) -> ModelStates:
    state = read_dictionary(directory / names[0], trust=trust)
    check_config(state.get("ds_config"), str(directory / names[0]))
    layers: dict[str, StoredTensor] | None = None
    if not is_stage_3 and state.get("module") is None:
        # A pipeline's layer files are missing: its weights are the rounded masters.
        layers = {
            name: StoredTensor(_weight_dtype(state), tuple(shape), (), 0)
            for shapes in state.get("param_shapes") or ()
            for name, shape in shapes.items()
        }
    return ModelStates.read(directory, names, is_stage_3=is_stage_3, trust=trust, layers=layers)


def _weight_dtype(state: Mapping[str, Any]) -> str:
    config = state.get("ds_config") or {}
    if enables_bf16(config):
        return "BF16"
    return "F16" if (config.get("fp16") or {}).get("enabled") else "F32"


def degrees_of(models: Sequence[ModelStates]) -> tuple[int, int]:
    """Return ``tp`` and ``pp``: as the files state, else by the ranks with equal parameters."""
    stated = models[0].first.get(_DEGREES)
    if stated is not None and stated["tp_degree"] * stated["pp_degree"] == len(models):
        return stated["tp_degree"], stated["pp_degree"]
    names = [[list(shapes) for shapes in model.shapes()] for model in models]
    tp = next((rank for rank, of in enumerate(names) if of != names[0]), len(names))
    return tp, len(models) // tp


def layer_files(models: Sequence[ModelStates]) -> tuple[LayerFile, ...]:
    """Return the layers of a pipeline with trained parameters.

    Raises:
        RefusedError: They have buffers; a universal checkpoint keeps none.
    """
    lost = [name for model in models for name in model.first.get("buffer_names") or ()]
    if lost:
        raise RefusedError(
            f"{models[0].directory} is of a pipeline with buffers ({lost[0]}), which universal "
            "checkpoints do not keep. Convert the checkpoint that it was made of instead."
        )
    units: dict[str, list[str]] = {}
    for model in models:
        for shapes in model.shapes():
            for name in shapes:
                found = units.setdefault(unit_of(name), [])
                local = name.removeprefix(f"{unit_of(name)}.")
                found.extend([local] if local not in found else [])
    places = {unit: int(unit) for unit in units if not unit.startswith(TIED)}
    count = len(units) + max(places.values(), default=0)
    free = iter(sorted(set(range(count)) - {*places.values()}))
    places |= {unit: next(free) for unit in units if unit.startswith(TIED)}
    return tuple(
        LayerFile(places[unit], unit, tuple(units[unit]))
        for unit in sorted(units, key=lambda unit: places[unit])
    )


def cuts_of(
    entries: Mapping[str, Mapping[str, Any]],
    models: Sequence[ModelStates],
    tp: int,
    options: ReadOptions,
) -> dict[str, ShardCut]:
    """Return the cuts of parameters.

    Args:
        entries: By parameter, its file's entries beside the values.
        options: May have a file of cuts.

    Raises:
        RefusedError: A parameter has no rule, or its shapes do not fit.
    """
    shapes: dict[str, list[Shape]] = {}
    for model in models:
        for group in model.shapes():
            for name, shape in group.items():
                shapes.setdefault(name, []).append(shape)
    found = {name: _stated(entries[name]) for name in shapes}
    if tp == 1:
        # At tp=1 all entries are the default and mean nothing.
        if all(rule == CutRule(0) for rule in found.values()):
            return {}
        found = {name: rule or CutRule() for name, rule in found.items()}
    rules = CutRules(models[0].first.get(INFO) or {}, read_cuts(options.cuts))
    rest = rules.cuts({name: shapes[name][:tp] for name, rule in found.items() if rule is None})
    return rest | {
        name: rule.cut(name, shapes[name][:tp]) for name, rule in found.items() if rule is not None
    }


def _stated(entry: Mapping[str, Any]) -> CutRule | None:
    parts = entry.get("sub_param_shape")
    if isinstance(parts, Foreign):
        dim = parts.state["partition_dim"]
        sizes = parts.state["shape"][dim]
        return CutRule(dim, tuple(sizes) if isinstance(sizes, list | tuple) else int(sizes))
    if "cat_dim" in entry:
        return CutRule(entry["cat_dim"], int(entry.get("param_n_sub_params", 1)))
    return None


def names_of(models: Sequence[ModelStates]) -> Iterator[str]:
    """Yield the trained parameters of all ranks, once each."""
    yield from dict.fromkeys(name for model in models for of in model.shapes() for name in of)


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
        self.files.setdefault(name, *stored_files(self.directory, [name]))

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
        piece, file = step_piece(name, step)
        self.files[file.path] = file
        self.pieces.append(piece)


def _as_dictionary(entry: Any) -> Mapping[str, Any]:
    return entry if isinstance(entry, dict) else {}


def _rows(entry: Mapping[str, Any], shape: Shape) -> Shape:
    """Return the shape in a parameter's file: for a vocabulary without padding."""
    stored = entry.get("param")
    if not entry.get("vocab_tensor") or not isinstance(stored, StoredTensor):
        return shape
    return (min(stored.shape[0], shape[0]), *shape[1:])


def _lay_out(source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
    """Lay out a universal checkpoint, for engines of every stage.

    Raises:
        RefusedError: The source has no DeepSpeed job's names, lacks some of its tensors, or has
            experts.
    """
    job, archives = job_of(source, options), Archives()
    if job.experts is not None:
        raise RefusedError(
            f"{source.directory} has experts ({job.experts.layers[0].name}), for which DeepSpeed "
            "0.19.8 has no universal checkpoints: it takes those of all ranks for one. Convert to "
            "deepspeed_zero0, deepspeed_zero1 or deepspeed_zero2."
        )
    folder = f"{job.tag}{SUFFIX}"
    alone = replace(options, degrees={**options.degrees, "tp": 1, "pp": 1, "dp": 1})
    stages = (2, 3) if job.pipeline is None else (1,)
    for stage in stages:
        (draft,) = Ranks.of(source, job, stage, alone).drafts(archives, folder)
        add_model(draft, 0, list(buffers_of(draft)))
    ranks = Ranks.of(source, job, stages[0], alone)
    (draft,) = ranks.drafts(archives, folder)
    buffers = list(buffers_of(draft))
    _add_global_state(draft, buffers)
    for buffer in buffers:
        kinds = draft.kinds(list(buffer.shapes))
        for name in buffer.shapes:
            _add_parameter(draft, ranks, name, kinds)

    return CheckpointTarget(
        "deepspeed_universal",
        archives.placed(),
        archives.fixed,
        naming(LATEST, folder),
        (*source.notes, *_notes(draft)),
    )


def _notes(draft: Draft) -> Iterator[str]:
    job = draft.job
    yield (
        "DeepSpeed 0.19.8 loads universal checkpoints with ZeRO alone: for a job of stage 0 write "
        "deepspeed_zero0"
    )
    yield (
        "with stage 3 and load_checkpoint(load_optimizer_states=False) DeepSpeed 0.19.8 asks for "
        "the checkpoint that `latest` names beside a universal one: for that write deepspeed_zero3"
    )
    if job.buffers:
        yield f"DeepSpeed does not restore {len(job.buffers)} buffers from universal checkpoints"
    if job.frozen:
        yield f"DeepSpeed does not restore {len(job.frozen)} frozen parameters from them either"
    if len(job.groups) > 1:
        yield (
            "with stage 3 DeepSpeed will give all parameter groups the hyperparameters of the first"
        )
    if not job.has_number_steps:
        yield (
            "with stage 3 DeepSpeed lets all sub-groups count in one step tensor, which is wrong "
            "where there are several: after load_checkpoint give each its own, by `for state in "
            "engine.optimizer.optimizer.state.values(): state['step'] = state['step'].clone()`, or "
            "write deepspeed_zero3"
        )


def _add_global_state(draft: Draft, buffers: Sequence[Buffer]) -> None:
    filled = Filled()
    param_groups = draft.param_groups(members(draft, buffers))
    state: Mapping[str, Any] = {
        **global_state(draft),
        "param_groups": param_groups,
        "optimizer_state_dict": {
            "state": {0: draft.step(next(iter(buffers[0].shapes)), filled)},
            "param_groups": param_groups,
        },
    }
    draft.archives.add(f"{draft.folder}/{GLOBAL_STATE}", state, filled)


def _add_parameter(draft: Draft, ranks: Ranks, name: str, kinds: Sequence[str]) -> None:
    for kind in (None, *kinds):
        tensor = draft.stored(kind, name)
        stem, cut = kind or MASTERS, ranks.known.get(name)
        archive = _parameter_file(stem, tensor.dtype, tensor.shape, cut)
        pieces = [FilePiece(tensor, whole(tensor.shape), "", 0)]
        draft.archives.add_laid_out(f"{draft.folder}/zero/{name}/{stem}.pt", archive, [pieces])
    steps = Filled()
    step = draft.step(name, steps)
    path = f"{draft.folder}/zero/{name}/{STEPS}.pt"
    if steps:
        draft.archives.add_laid_out(path, _step_file(step["step"].dtype), [*steps.values()])
    elif step:
        draft.archives.add(path, step["step"], steps)


# Pickling is slow, and the parameters of a model's layers are alike.
@lru_cache(maxsize=1024)
def _parameter_file(
    stem: str, dtype: str, shape: tuple[int, ...], cut: ShardCut | None
) -> ArchiveLayout:
    value = {**_cut_entries(cut, shape), "param": NewTensor(dtype, shape)}
    return lay_out_archive(value, stem)


@cache
def _step_file(dtype: str) -> ArchiveLayout:
    return lay_out_archive(NewTensor(dtype, ()), STEPS)


def _cut_entries(cut: ShardCut | None, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the entries of a parameter's cut; empty: each rank has all of it. Without a known cut,
    as ds_to_universal writes it."""
    if cut is None:
        return {"cat_dim": 0}
    if cut.dim is None:
        return {}
    if len(cut.parts) == 1:
        return {"cat_dim": cut.dim}
    if len(cut.parts) == 2 and len(set(cut.parts)) == 1:
        return {"cat_dim": cut.dim, "param_n_sub_params": 2}
    parts = (*shape[: cut.dim], cut.parts, *shape[cut.dim + 1 :])
    return {"sub_param_shape": _sub_parameters(parts, cut.dim)}


def _sub_parameters(shape: tuple[Any, ...], dim: int) -> Foreign:
    """Return the entry of a fused parameter; ``shape`` has the sizes of its parts as a tuple at
    ``dim``."""
    cls = foreign("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
    return made(cls, {"patterns": [], "shape": shape, "partition_dim": dim})


@dataclass(frozen=True, slots=True)
class DeepSpeedUniversalLayout:
    """The layout ``deepspeed_universal``."""

    name: str = "deepspeed_universal"
    framework: str = "deepspeed"

    def find(self, path: Path) -> bool:
        """Tell whether there is a tag with folders of parameters."""
        return find_universal(path, None) is not None

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Read the metadata of a tag, or of the tag in ``latest_universal``."""
        directory = find_universal(path, options.iteration)
        if directory is None:
            raise RefusedError(
                f"{path} holds no universal checkpoint of step {options.iteration}. Name another "
                "--iteration."
            )
        return open_universal(directory, options).read()

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
        """Lay out a tag and ``latest_universal``. Degrees do not matter."""
        return _lay_out(source, options)
