"""The layout ``fsdp_dtensor``: Megatron-FSDP's checkpoints, torch.distributed.checkpoint's files.

    [<root>/latest_checkpointed_iteration.txt]  <root>/iter_0000006/
        .metadata  __<rank>_<n>.distcp

    args  iteration  checkpoint_version  opt_param_scheduler.<key>  rng_state.(<pp>, <tp>).0.<key>
    model.module.<parameter>                                         fp32: the masters
    optimizer.state.module.module.module.<parameter>.exp_avg
    optimizer.param_to_group_meta.module.module.module.<parameter>.lr

Parameters have their modules' names, experts counted over all ranks. A SwiGLU's first layer is in
two, ``<parameter>_w`` and ``_v``: the gate and the up projection. The names begin with the
wrappers around the model.

Source: ``preprocess_fsdp_dtensor_state_dict``, ``generate_state_dict`` and ``load_checkpoint`` of
megatron/training/checkpointing.py, transformer/fsdp_dtensor_checkpoint.py and
``sharded_param_state_fsdp_dtensor`` of optimizer/distrib_optimizer.py (core_v0.14.0 to 0.19.0).
"""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import (
    MAIN,
    PARAM,
    STEP,
    Checkpoint,
    CheckpointTarget,
    FilePiece,
    ReadOptions,
    Values,
    WriteOptions,
    place,
    step_piece,
    stored_files,
)
from scalai.converters.dcp_described import members_of
from scalai.converters.dcp_files import StoredArchives, TreeFiles
from scalai.converters.dcp_job import same_groups
from scalai.converters.dcp_layout import fsdp_boxes
from scalai.converters.dcp_metadata import (
    Metadata,
    ObjectPath,
    StoredKey,
    read_metadata,
    read_objects,
    stray_notes,
)
from scalai.converters.foreign import is_fsdp_dtensor
from scalai.converters.megatron.beside_tensors import (
    TRACKER,
    argument_degrees,
    check_found,
    check_iteration,
    counters_of,
    find_below,
    folder_of,
    with_degrees,
)
from scalai.converters.megatron.iteration_files import RUN, read_run
from scalai.converters.megatron.model_limits import check_model, padding_note
from scalai.converters.megatron.modules import Naming, gated
from scalai.converters.megatron.rng_states import rng_states_of
from scalai.converters.megatron.torch_dist_writer import whole_groups
from scalai.converters.megatron.torch_legacy_writer import naming_of
from scalai.converters.source_files import read_steps
from scalai.converters.torch_archive import (
    NewTensor,
    content_of,
    lay_out_archive,
    read_archive_bytes,
)
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.dtypes import HALF, ITEM_BYTES
from scalai.core.tensors.region import Box, Index, whole
from scalai.store.atomic import replace_file
from scalai.store.files import number_of

METADATA = ".metadata"
MEMBERS = "fsdp_dtensor_members"
"""In ``Values.extra``: the parameters of each group."""

_WRAPPERS = re.compile(r"(?:module\.)*")
_OF_MODEL, _OF_OPTIMIZER = "module.", "module.module.module."
"""Wrappers in the names of a model's and an optimizer's parameters: Float16Module among them."""
_HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias)\d*)_([wv])")
_FLOPS = "num_floating_point_operations_so_far"
_KNOWN = {"args", "iteration", "checkpoint_version", "opt_param_scheduler", "rng_state", _FLOPS}
_RNG = re.compile(r"\((\d{1,6}), (\d{1,6})\)")
_FUSED = "bias_correction"
"""An entry of the groups of Transformer Engine's FusedAdam, which counts steps there."""


@dataclass(frozen=True, slots=True)
class FsdpDtensorLayout:
    """The layout ``fsdp_dtensor``."""

    name: str = "fsdp_dtensor"
    framework: str = "megatron"

    def find(self, path: Path) -> bool:
        directory = _directory(path, None)
        return directory is not None and is_fsdp_dtensor(directory)

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Read the metadata of a checkpoint, or of the newest below a save directory."""
        directory = check_found(_directory(path, options.iteration), path, options.iteration)
        metadata = read_metadata(directory, trust=options.trust_pickle)
        return _Reader(directory, metadata, options.trust_pickle).read()

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
        """Lay out ``iter_<n>`` and the tracker file, as Megatron's ``--load`` finds them."""
        return _Writer(source, options).target()


def _directory(path: Path, iteration: int | None) -> Path | None:
    if iteration is None and (path / METADATA).is_file():
        return path
    return find_below(path, iteration)


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of a parameter: all of it, or a half of a SwiGLU's."""

    name: str
    half: str
    stored: StoredKey


@dataclass(frozen=True)
class _Reader:
    """One checkpoint during its reading."""

    directory: Path
    metadata: Metadata
    trust: bool

    @cached_property
    def archives(self) -> StoredArchives:
        return StoredArchives(self.directory, self.trust)

    def read(self) -> Checkpoint:
        weights, states, meta = self._split()
        values = self._values()
        pieces = list(self._weights(weights, states, _precision(values.arguments)))
        shapes = {split_name(piece.tensor.name)[1]: piece.tensor.shape for piece in pieces}
        steps: dict[str, float] = {}
        for name, kinds in states.items():
            if name not in weights:
                raise RefusedError(
                    f"{self.directory} has an optimizer's state of {name}, which is no parameter "
                    "in it. It is mixed from two saves, or incomplete: use another one."
                )
            for kind, parts in kinds.items():
                if kind == STEP:
                    steps[name] = self._step(name, parts)
                else:
                    pieces += self._state(kind, parts, shapes[name])
        groups, members = self._groups(meta, list(weights), set(states))
        for group, names in zip(groups, members, strict=True):
            step = _number(group.get(STEP))
            if step is not None:
                steps |= dict.fromkeys(states.keys() & set(names) - steps.keys(), step)
        made = [step_piece(name, number) for name, number in sorted(steps.items())]
        extents = {chunk.extent.file for of in self.metadata.tensors for chunk in of.chunks}
        files = {
            file.path: file
            for file in (*stored_files(self.directory, sorted(extents)), *(of for _, of in made))
        }
        placed = place([*pieces, *(piece for piece, _ in made)], list(files.values()))
        values = replace(
            values,
            param_groups=groups,
            is_split=True if states else None,
            extra={**values.extra, MEMBERS: members},
        )
        check_model(self.directory, values, placed.collection.tensors)
        notes = tuple(self._notes(values, bool(states)))
        return Checkpoint("fsdp_dtensor", self.directory, placed, values, notes=notes)

    def _weights(
        self,
        weights: Mapping[str, Sequence[_Part]],
        states: Mapping[str, Mapping[str, Sequence[_Part]]],
        dtype: str,
    ) -> Iterator[FilePiece]:
        """Yield weights; trained ones of 16 bits are there as masters alone."""
        for name, parts in weights.items():
            is_master = name in states and dtype in HALF and parts[0].stored.dtype == "F32"
            if not is_master:
                yield from self._pieces(PARAM, parts)
                continue
            for piece in self._pieces(MAIN, parts):
                yield piece
                rounded = Tensor(f"{PARAM}/{name}", piece.tensor.shape, dtype)
                yield replace(piece, tensor=rounded, is_rounded=True)

    def _state(self, kind: str, parts: Sequence[_Part], shape: Index) -> Iterator[FilePiece]:
        for piece in self._pieces(kind, parts):
            if piece.tensor.shape != shape:
                raise RefusedError(
                    f"{self.directory}: {piece.tensor.name} is {list(piece.tensor.shape)}, and the "
                    f"parameter {list(shape)}. Such a state is not read: save with torch's or "
                    "Transformer Engine's Adam."
                )
            yield piece

    @cached_property
    def _stored(self) -> Mapping[str, StoredKey]:
        return {stored.key: stored for stored in self.metadata.tensors}

    @cached_property
    def _objects(self) -> Mapping[str, bytes]:
        return read_objects(self.directory, self.metadata.objects)

    @cached_property
    def _read(self) -> dict[bytes, Any]:
        return {}

    def _path(self, key: str) -> ObjectPath:
        path = self.metadata.paths.get(key)
        if path is None:
            raise RefusedError(
                f"{self.directory}/.metadata does not note the place of {key} in the saved tree, "
                "as torch's planner does. It is damaged: use another checkpoint."
            )
        return path

    def _value(self, key: str) -> Any:
        if key in self._stored:
            return self.archives.small(self._stored[key])
        data = self._objects[key]
        if data not in self._read:  # parameters of a group have equal entries
            self._read[data] = read_archive_bytes(data, self.directory / key, trust=self.trust)
        return self._read[data]

    def _below(self, head: str) -> dict[str, Any]:
        """Return the dictionary saved under a key of the tree."""
        grown: dict[Any, Any] = {}
        for key in (*self._stored, *self.metadata.objects):
            path = self._path(key)
            if path[0] != head or len(path) < 2:
                continue
            at = grown
            for step in path[1:-1]:
                at = at.setdefault(step, {})
                if not isinstance(at, dict):
                    raise RefusedError(f"{self.directory}/.metadata: {key} lies inside of a value.")
            at[path[-1]] = self._value(key)
        return {key: _with_lists(value) for key, value in grown.items()}

    def _split(
        self,
    ) -> tuple[
        dict[str, list[_Part]], dict[str, dict[str, list[_Part]]], dict[str, dict[str, Any]]
    ]:
        """Return weights by parameter, states by parameter and kind, and groups by parameter."""
        weights: dict[str, list[_Part]] = {}
        states: dict[str, dict[str, list[_Part]]] = {}
        meta: dict[str, dict[str, Any]] = {}
        naming = self._naming
        for key in (*self._stored, *self.metadata.objects):
            path = self._path(key)
            match path:
                case ("model", str(name)) if key in self._stored:
                    part = _part(naming, name, self._stored[key])
                    weights.setdefault(part.name, []).append(part)
                case ("optimizer", "state", str(name), str(kind)) if key in self._stored:
                    part = _part(naming, name, self._stored[key])
                    states.setdefault(part.name, {}).setdefault(kind, []).append(part)
                case ("optimizer", "param_to_group_meta", str(name), str(entry)):
                    bare = naming.to_global(_WRAPPERS.sub("", name, count=1), 0, 0)
                    meta.setdefault(bare, {})[entry] = self._value(key)
                case ("optimizer", *_):
                    raise RefusedError(
                        f"{self.directory}: {key} is of an optimizer other than one Adam, which "
                        "alone is read. Save with --optimizer adam, and one model chunk."
                    )
        return weights, states, meta

    @cached_property
    def _naming(self) -> Naming:
        paths = [self._path(key) for key in self._stored]
        chunk = next((p[0] for p in paths if re.fullmatch(r"model\d+", str(p[0]))), None)
        if chunk is not None:
            raise RefusedError(
                f"{self.directory} has {chunk}: virtual pipeline stages, whose layers have the "
                "same names in this format. Save at pp=1."
            )
        names = [str(path[1]) for path in paths if path[0] == "model" and len(path) == 2]
        return Naming.of_rank(names)

    def _pieces(self, kind: str, parts: Sequence[_Part]) -> Iterator[FilePiece]:
        """Yield the pieces of a tensor: of one key, or of a gate and an up projection."""
        by_half = {part.half: part.stored for part in parts}
        name, stored = parts[0].name, parts[0].stored
        if by_half.keys() == {""} and len(parts) == 1:
            yield from self.archives.pieces(
                Tensor(f"{kind}/{name}", stored.shape, stored.dtype), stored
            )
            return
        alike = {(of.shape, of.dtype) for of in by_half.values()}
        if by_half.keys() != {"w", "v"} or len(parts) != 2 or len(alike) != 1 or not stored.shape:
            keys = ", ".join(part.stored.key for part in parts)
            raise RefusedError(
                f"{self.directory}: {keys} are not the gate (_w) and the up projection (_v) of "
                f"{name}, of one shape each. It is mixed from two saves: use another one."
            )
        rows = stored.shape[0]
        tensor = Tensor(f"{kind}/{name}", (2 * rows, *stored.shape[1:]), stored.dtype)
        yield from self.archives.pieces(tensor, by_half["w"])
        yield from self.archives.pieces(tensor, by_half["v"], row=rows)

    def _step(self, name: str, parts: Sequence[_Part]) -> float:
        found = {self.archives.number(part.stored) for part in parts}
        if len(found) > 1:
            raise RefusedError(
                f"{self.directory}: the halves of {name} have made {sorted(found)} steps. It is "
                "mixed from two saves: use another one."
            )
        return found.pop()

    def _groups(
        self, meta: Mapping[str, Mapping[str, Any]], order: Sequence[str], trained: set[str]
    ) -> tuple[tuple[Mapping[str, Any], ...], tuple[tuple[str, ...], ...]]:
        """Return the groups of parameters, and their members."""
        members, groups = same_groups(meta, order)
        lost = (trained ^ set(meta)) & (trained | (set(meta) - set(order)))
        if lost:
            raise RefusedError(
                f"{self.directory}: {min(lost)} has an optimizer's state without a parameter "
                "group, or a group without a weight. It is mixed from two saves: use another one."
            )
        return groups, members

    def _values(self) -> Values:
        def known(key: str, other: Any = None) -> Any:
            return self._value(key) if key in self.metadata.objects else other

        iteration = known("iteration")
        if not isinstance(iteration, int) or not 0 <= iteration < 1 << 60:
            raise RefusedError(
                f"{self.directory} has iteration {iteration!r:.40}. Use another checkpoint."
            )
        check_iteration(self.directory, METADATA, iteration)
        given = known("args")
        arguments = None if given is None else vars(given)
        run = read_run(self.directory, iteration)
        degrees = {**run.degrees, **argument_degrees(arguments or {})}
        if degrees.get("pp", 1) > 1:
            raise RefusedError(
                f"{self.directory} is of pp={degrees['pp']}, whose stages' layers have the same "
                "names in this format. Save at pp=1."
            )
        streams = {}
        for place_, of in self._below("rng_state").items():
            found = _RNG.fullmatch(str(place_))
            if found and isinstance(of, list):
                streams[int(found[2]), int(found[1]), 0] = of
        extra = {key: known(key) for key in ("checkpoint_version", _FLOPS)}
        return Values(
            step=iteration,
            degrees=degrees,
            framework="megatron",
            scheduler=self._below("opt_param_scheduler") or None,
            arguments=arguments,
            counters={**run.counters, **counters_of(arguments or {})},
            extra={
                **run.extra,
                **{key: value for key, value in extra.items() if value is not None},
                "is_local": self._naming.is_local, "is_grouped": self._naming.is_grouped,
                "rng_state": streams,
            },
        )  # fmt: skip

    def _notes(self, values: Values, has_states: bool) -> Iterator[str]:
        heads = {str(self._path(key)[0]) for key in (*self._stored, *self.metadata.objects)}
        for head in sorted(heads - _KNOWN - {"model", "optimizer"}):
            yield f"{head} is not carried"
        if values.arguments is None and has_states:
            yield "there are no Megatron arguments: weights are taken as fp32, as they are stored"
        yield from stray_notes(self.directory, self.metadata)


def _part(naming: Naming, name: str, stored: StoredKey) -> _Part:
    """Return a stored tensor under its parameter's global name."""
    bare = _WRAPPERS.sub("", name, count=1)
    found = _HALF.fullmatch(bare)
    half = found[2] if found else ""
    return _Part(naming.to_global(found[1] if found else bare, 0, 0), half, stored)


def _with_lists(value: Any) -> Any:
    """Return a tree with dictionaries of indices as the lists they were."""
    if type(value) is not dict:
        return value
    whole_ = {key: _with_lists(of) for key, of in value.items()}
    if whole_ and all(type(key) is int for key in whole_):
        return [whole_[key] for key in sorted(whole_)]
    return whole_


def _precision(arguments: Mapping[str, Any] | None) -> str:
    """Return the dtype of the weights for computing."""
    given = arguments or {}
    return "BF16" if given.get("bf16") else "F16" if given.get("fp16") else "F32"


def _number(value: Any) -> float | None:
    if isinstance(value, NewTensor) and len(value.content or b"") == ITEM_BYTES[value.dtype]:
        return number_of(value.content or b"", value.dtype)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


class _Writer:
    """Lays out a target."""

    def __init__(self, source: Checkpoint, options: WriteOptions) -> None:
        self._source, self._reference = source, options.reference
        self._notes = list(source.notes)
        self._degrees = {**source.values.degrees, **options.degrees}
        if self._degrees.get("pp", 1) > 1:
            raise RefusedError(
                f"pp={self._degrees['pp']} is asked of fsdp_dtensor, whose names do not tell "
                "pipeline stages apart. Give --pp 1."
            )
        self._degrees |= {"pp": 1, "vpp": 1}
        self._tensors = {tensor.name: tensor for tensor in source.placed.collection.tensors}
        self._ranks = max(self._degrees.get("dp", 1) * self._degrees.get("cp", 1), 1)
        self._files = TreeFiles(folder_of(source.values.step), self._ranks)
        self._arguments = self._given_arguments()
        self._naming = naming_of(source, self._arguments, self._notes)
        shapes = {split_name(n)[1]: t.shape for n, t in self._tensors.items() if _is_weight(n)}
        is_split = (self._arguments or {}).get("swiglu", True)
        self._gated = gated(shapes) if is_split else frozenset[str]()

    def target(self) -> CheckpointTarget:
        values = self._source.values
        trained = self._trained()
        for name, tensor in self._tensors.items():
            kind, parameter = split_name(name)
            if kind == PARAM and f"{MAIN}/{parameter}" not in self._tensors:
                if parameter in trained and tensor.dtype in HALF:
                    raise RefusedError(
                        f"there is no fp32 master of {parameter} ({tensor.dtype}) beside its "
                        "optimizer state. Use a checkpoint that was saved with its optimizer."
                    )
                self._add_weight(parameter, tensor)
            elif kind == MAIN:
                self._add_weight(parameter, tensor)
            elif kind not in (PARAM, STEP):
                self._add_state(parameter, kind, tensor)
        if trained:
            self._add_groups(trained)
        self._add_values()
        note = padding_note(self._source, self._tensors, self._degrees, self._reference)
        self._notes += [] if note is None else [note]
        metadata, folder = self._files.metadata(), folder_of(values.step)

        def finish(directory: Path, _: npt.NDArray[np.uint64]) -> None:
            (directory / folder).mkdir(exist_ok=True)
            replace_file(directory / folder / METADATA, metadata)
            replace_file(directory / TRACKER, str(values.step).encode())

        placed = place(self._files.pieces, self._files.files())
        return CheckpointTarget(
            "fsdp_dtensor", placed, self._files.fixed, finish, tuple(self._notes)
        )

    def _given_arguments(self) -> Mapping[str, Any] | None:
        values, reference = self._source.values, self._reference
        if values.arguments is not None:
            return values.arguments
        if reference is None or reference.arguments is None:
            if RUN not in values.extra:
                self._notes.append(
                    "the source has no Megatron arguments: give all model flags when loading"
                )
            return None
        self._notes.append(
            "Megatron's arguments are of --args-from, else by the tensors and config.json"
        )
        return {**reference.arguments, **values.counters, "iteration": values.step}

    def _trained(self) -> dict[str, None]:
        pairs = map(split_name, self._tensors)
        return {name: None for kind, name in pairs if kind not in (PARAM, MAIN, STEP)}

    def _add_weight(self, name: str, tensor: Tensor) -> None:
        for path, low, stop in self._parts(("model",), _OF_MODEL, name, tensor):
            self._files.add_tensor(path, tensor, self._boxes(tensor, low, stop), low)

    def _add_state(self, name: str, kind: str, tensor: Tensor) -> None:
        for path, low, stop in self._parts(("optimizer", "state"), _OF_OPTIMIZER, name, tensor):
            self._files.add_tensor((*path, kind), tensor, self._boxes(tensor, low, stop), low)

    def _parts(
        self, head: ObjectPath, wrappers: str, name: str, tensor: Tensor
    ) -> Iterator[tuple[ObjectPath, int, int]]:
        """Yield the places of a parameter's tensor, each with the rows kept there."""
        called = wrappers + self._naming.to_rank(name, 0, 0)
        rows = tensor.shape[0] if tensor.shape else 0
        if name in self._gated and tensor.shape:
            yield (*head, f"{called}_w"), 0, rows // 2
            yield (*head, f"{called}_v"), rows // 2, rows
        else:
            yield (*head, called), 0, rows

    def _boxes(self, tensor: Tensor, low: int, stop: int) -> Iterator[tuple[int, Box]]:
        if not tensor.shape:
            yield 0, whole(())
            return
        shape: Index = (stop - low, *tensor.shape[1:])
        for rank, box in fsdp_boxes(shape, self._ranks):
            yield rank, Box((box.offset[0] + low, *box.offset[1:]), box.shape)

    def _add_groups(self, trained: Mapping[str, None]) -> None:
        """Add the group and the step of every parameter."""
        groups = whole_groups(self._source, self._reference, self._notes)
        members: Sequence[Sequence[str]] | None = self._source.values.extra.get(MEMBERS)
        members = members or members_of(self._source, list(trained))
        step = read_steps(self._source)
        for group, names in zip(groups, members, strict=True):
            meta = {key: value for key, value in group.items() if key not in (STEP, "params")}
            is_fused = _FUSED in meta
            if is_fused and step is not None:
                meta[STEP] = int(step)
            data = {
                key: content_of(lay_out_archive(value))
                for key, value in meta.items()
                if not isinstance(value, NewTensor | Mapping | list)
            }
            for name in names:
                if name not in trained:
                    continue
                called = _OF_OPTIMIZER + self._naming.to_rank(name, 0, 0)
                for key, value in meta.items():
                    path = ("optimizer", "param_to_group_meta", called, key)
                    if key in data:
                        self._files.add_object_at(path, data[key])
                    else:
                        self._add(path, value)
                if is_fused or step is None or "betas" not in group:
                    continue
                halves = [f"{called}_w", f"{called}_v"] if name in self._gated else [called]
                for half in halves:
                    number = NewTensor("F32", (), np.float32(step).tobytes())
                    self._files.add_value(("optimizer", "state", half, STEP), number)

    def _add_values(self) -> None:
        values, degrees = self._source.values, self._degrees
        self._add(("iteration",), values.step)
        self._add(("checkpoint_version",), values.extra.get("checkpoint_version", 3.0))
        self._add((_FLOPS,), values.extra.get(_FLOPS, 0))
        if self._arguments is not None:
            known = with_degrees(self._arguments, degrees)
            known |= {"ckpt_format": "fsdp_dtensor"} if "ckpt_format" in known else {}
            self._add(("args",), argparse.Namespace(**known))
        if self._arguments is not None or RUN in values.extra:
            for tp_rank in range(degrees.get("tp", 1)):
                streams = rng_states_of(self._source, degrees, (tp_rank, 0, 0), self._notes)
                self._add(("rng_state", f"(0, {tp_rank})"), list(streams))
        if values.scheduler is not None:
            self._add(("opt_param_scheduler",), values.scheduler)
        if values.grad_scaler is not None:
            self._notes.append("left out: grad_scaler, for which Megatron-FSDP keeps no place")

    def _add(self, path: ObjectPath, value: Any) -> None:
        """Add a tree as torch flattens it: dictionaries, and lists of dictionaries or tensors."""
        if isinstance(value, Mapping):
            for key, entry in value.items():
                self._add((*path, str(key)), entry)
        elif isinstance(value, list) and any(isinstance(of, dict | NewTensor) for of in value):
            for at, entry in enumerate(value):
                self._add((*path, at), entry)
        else:
            self._files.add_value(path, value)


def _is_weight(name: str) -> bool:
    return name.startswith(f"{PARAM}/")
