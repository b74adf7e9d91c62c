"""The layout ``dcp``: torch.distributed.checkpoint, as trainings with FSDP2 save it.

    .metadata  __<rank>_<n>.distcp                       torchtitan (step-<n>), scripts of one's own
    pytorch_model_fsdp_0/  optimizer_0/                  Trainer and Accelerate: the same, in two

Which keys are weights, states and groups: ``dcp_job``. Other objects are carried byte by byte,
other tensors as a script's registered ones. A state of another framework gets the tree of
``get_state_dict``, and its own values stay beside it (``stored_values``), so that it can go back.

The chunks of a target are those of FSDP2 at ``dp`` ranks; DCP loads them at any.

Source: torch/distributed/checkpoint of torch 2.13; utils/fsdp_utils.py of Accelerate 1.15.
"""

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
    REPORT,
    STEP,
    USER,
    AuxiliaryFile,
    Checkpoint,
    CheckpointFile,
    CheckpointTarget,
    FilePiece,
    Order,
    ReadOptions,
    Values,
    WriteOptions,
    place,
    step_piece,
    stored_files,
)
from scalai.converters.dcp_described import described
from scalai.converters.dcp_files import StoredArchives, TreeFiles
from scalai.converters.dcp_job import (
    DCP,
    MEMBERS,
    NUMBER,
    OF_GROUP,
    DcpJob,
    OptimizerTree,
    SplitKeys,
    kind_of,
    same_groups,
    split_keys,
)
from scalai.converters.dcp_metadata import (
    Extent,
    Metadata,
    ObjectPath,
    key_of,
    read_metadata,
    read_objects,
    stray_notes,
)
from scalai.converters.foreign import is_of_megatron
from scalai.converters.stored_values import STORED, keep_values, kept_values
from scalai.converters.torch_archive import (
    NewTensor,
    read_archive_bytes,
)
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.dtypes import ITEM_BYTES, NUMPY_DTYPES
from scalai.core.tensors.region import Box, Index, whole
from scalai.store.atomic import replace_file
from scalai.store.files import number_of

METADATA = ".metadata"
MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
"""Of Accelerate, for a job of one model."""
FRAMEWORK = "torch"

_SAVE = re.compile(r"step-(\d{1,18})")
"""Folders of torchtitan."""
_STEPS = ("step", "global_step", "iteration")
"""Names of the training's step, at most one level below the top."""


def find_saves(path: Path) -> dict[int, Path]:
    """Return torchtitan's saves below a folder, by step."""
    if not path.is_dir():
        return {}
    named = ((entry, _SAVE.fullmatch(entry.name)) for entry in path.iterdir())
    return {int(m[1]): entry for entry, m in named if m and (entry / METADATA).is_file()}


@dataclass(frozen=True, slots=True)
class DcpLayout:
    """The layout ``dcp``."""

    name: str = "dcp"
    framework: str = ""

    def find(self, path: Path) -> bool:
        here = path / METADATA
        if here.is_file():
            return not is_of_megatron(path)
        return (path / MODEL_FOLDER / METADATA).is_file() or bool(find_saves(path))

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Read the metadata of a checkpoint; of several saves the newest, or the one asked for."""
        directory, folders = path, ("", "")
        if (path / MODEL_FOLDER / METADATA).is_file():
            has_optimizer = (path / OPTIMIZER_FOLDER / METADATA).is_file()
            folders = MODEL_FOLDER, OPTIMIZER_FOLDER if has_optimizer else MODEL_FOLDER
        elif not (path / METADATA).is_file():
            saves = find_saves(path)
            number = max(saves) if options.iteration is None else options.iteration
            if number not in saves:
                raise RefusedError(
                    f"{path} holds no step {number}, but {sorted(saves)}. Name one that is there."
                )
            directory = saves[number]
        return _DcpReader(directory, folders, options.trust_pickle, options.order).read()

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
        """Lay out the source's own tree, or that of ``get_state_dict``."""
        return _lay_out(source, options)


@dataclass(frozen=True)
class _DcpReader:
    """One checkpoint during its reading."""

    directory: Path
    folders: tuple[str, str]
    trust: bool
    order: Order | None

    @cached_property
    def _archives(self) -> StoredArchives:
        return StoredArchives(self.directory, self.trust)

    def read(self) -> Checkpoint:
        metadata = self._metadata()
        split = split_keys(
            metadata.tensors, metadata.objects, metadata.paths, self.directory, self.order
        )
        objects = read_objects(self.directory, metadata.objects)
        pieces, files, job = self._pieces(metadata, split, objects)
        job, groups = self._with_groups(metadata, split, objects, job)
        pieces, files, job = _with_group_steps(pieces, files, job, groups)
        names = sorted({chunk.extent.file for t in metadata.tensors for chunk in t.chunks})
        placed = place(pieces, [*stored_files(self.directory, names), *files])
        kept = kept_values(self.directory, trust=self.trust)
        if kept is None:
            has_optimizer = bool(split.trees)
            step = self._step(metadata, split, objects, placed.files)
            kept = Values(
                step=step,
                degrees={"dp": _ranks(names)},
                framework=FRAMEWORK,
                is_split=True if has_optimizer else None,
                param_groups=groups,
                extra={DCP: job},
            )
        return Checkpoint(
            "dcp", self.directory, placed, kept, notes=tuple(self._notes(metadata, split))
        )

    def _metadata(self) -> Metadata:
        """Return the metadata of both folders as one; files by their paths from the directory."""
        found = [
            _below(folder, read_metadata(self.directory / folder, trust=self.trust))
            for folder in dict.fromkeys(self.folders)
        ]
        both = set[str]()
        for part in found:
            keys = {*part.objects, *(tensor.key for tensor in part.tensors)}
            if both & keys:
                raise RefusedError(
                    f"{self.directory}: {MODEL_FOLDER} and {OPTIMIZER_FOLDER} both hold "
                    f"{min(both & keys)}. Files of two checkpoints are mixed: use another one."
                )
            both |= keys
        return Metadata(
            tuple(tensor for part in found for tensor in part.tensors),
            {key: at for part in found for key, at in part.objects.items()},
            {},
            {key: path for part in found for key, path in part.paths.items()},
        )

    def _pieces(
        self, metadata: Metadata, split: SplitKeys, objects: Mapping[str, bytes]
    ) -> tuple[list[FilePiece], list[CheckpointFile], DcpJob]:
        """Return all tensors, and steps that are none in the files."""
        dtypes = {
            split.weights[stored.key]: stored.dtype
            for stored in metadata.tensors
            if stored.key in split.weights
        }
        pieces: list[FilePiece] = []
        steps: dict[str, str | tuple[str, tuple[int, ...]]] = {}
        numbers: dict[str, float] = {}
        masters: dict[str, str] = {}
        owners: dict[str, str] = {}
        paths = dict(metadata.paths)
        for stored in metadata.tensors:
            if stored.key in split.values:
                continue
            if stored.key in split.weights:
                kind, name = PARAM, split.weights[stored.key]
            elif stored.key in split.states:
                state = split.states[stored.key]
                kind, name = kind_of(state, stored.dtype, dtypes[state.name]), state.name
                if kind == MAIN and state.kind != MAIN:
                    masters[name] = state.kind
                if kind == STEP and (stored.dtype, stored.shape) != ("F32", ()):
                    numbers[name] = self._archives.number(stored)
                    steps[name] = stored.dtype, stored.shape
                    continue
            else:
                kind, name = USER, stored.key
            full = f"{kind}/{name}"
            if owners.setdefault(full, stored.key) != stored.key:
                raise RefusedError(
                    f"{self.directory}: {owners[full]} and {stored.key} both are {kind} of {name}. "
                    "Two optimizers of one parameter are not read: save one of them."
                )
            pieces += self._archives.pieces(Tensor(full, stored.shape, stored.dtype), stored)
        for key, state in split.states.items():
            if key in objects and state.kind == STEP:
                value = read_archive_bytes(objects[key], self._file(key), trust=self.trust)
                if isinstance(value, int | float):
                    numbers[state.name], steps[state.name] = float(value), NUMBER
        made = {}
        for name, number in numbers.items():
            piece, file = step_piece(name, number)
            pieces.append(piece)
            made[file.path] = file
        own = {
            key
            for key, state in split.states.items()
            if key in objects and state.kind == STEP and steps.get(state.name) == NUMBER
        }
        others = {k: v for k, v in objects.items() if k not in own and k not in split.values}
        job = DcpJob(
            split.model, split.trees, steps, masters, others,
            {key: path for key, path in paths.items() if key not in split.weights},
            self.folders,
        )  # fmt: skip
        return pieces, list(made.values()), job

    def _file(self, key: str) -> Path:
        return self.directory / f"({key})"

    def _with_groups(
        self, metadata: Metadata, split: SplitKeys, objects: Mapping[str, bytes], job: DcpJob
    ) -> tuple[DcpJob, tuple[Mapping[str, Any], ...]]:
        """Return the job with its groups' members, and the groups' values."""
        stored = {tensor.key: tensor for tensor in metadata.tensors}
        found: list[dict[int | str, dict[str, Any]]] = [{} for _ in split.trees]
        for key, (number, owner, entry) in split.values.items():
            value = (
                read_archive_bytes(objects[key], self._file(key), trust=self.trust)
                if key in objects
                else self._archives.small(stored[key])
            )
            found[number].setdefault(owner, {})[entry] = value
        trees, groups = [], list[Mapping[str, Any]]()
        order = list(split.weights.values())
        for tree, values in zip(split.trees, found, strict=True):
            if tree.is_flat:
                named = {str(owner): of for owner, of in values.items()}
                members, of_tree = same_groups(named, order)
            else:
                members, of_tree = self._nested(tree, values, set(order), split.numbers)
            trees.append(replace(tree, groups=members))
            groups += of_tree
        grouped = [name for tree in trees for members in tree.groups for name in members]
        lost = {state.name for state in split.states.values()} - set(grouped)
        if lost or len(grouped) > len(set(grouped)):
            what = f"{min(lost)} is in none" if lost else "one is in several"
            raise RefusedError(
                f"{self.directory}: the optimizer's parameters are not those of its param_groups "
                f"({what}). It is mixed from two saves: use another one."
            )
        return replace(job, optimizers=tuple(trees)), tuple(groups)

    def _nested(
        self,
        tree: OptimizerTree,
        values: Mapping[int | str, dict[str, Any]],
        names: set[str],
        numbers: Sequence[str],
    ) -> tuple[tuple[tuple[str, ...], ...], tuple[dict[str, Any], ...]]:
        members, groups = [], []
        for number in range(len(values)):
            of = values.get(number, {})
            listed = of.pop(MEMBERS, None)
            if numbers and isinstance(listed, list):
                listed = [numbers[n] if n in range(len(numbers)) else n for n in listed]
            is_named = isinstance(listed, list) and all(isinstance(n, str) for n in listed)
            if not is_named or not names >= set(listed):
                raise RefusedError(
                    f"{self.directory}: {key_of((*tree.path, 'param_groups', number))} lists "
                    f"{listed!r:.80} as its params, and names of the model's parameters are "
                    "expected. Save the optimizer by get_optimizer_state_dict, which names them."
                )
            members.append(tuple(listed))
            groups.append(of)
        return tuple(members), tuple(groups)

    def _step(
        self,
        metadata: Metadata,
        split: SplitKeys,
        objects: Mapping[str, bytes],
        files: Sequence[CheckpointFile],
    ) -> int:
        """Return the training's step: where the script keeps it, by the folder's name, or the
        optimizer's; 0: nothing says it."""
        stored = {tensor.key: tensor for tensor in metadata.tensors}
        for key in (*stored, *objects):
            path = metadata.paths.get(key, (key,))
            is_other = not {key} & {*split.weights, *split.states, *split.values}
            if len(path) > 2 or str(path[-1]) not in _STEPS or not is_other:
                continue
            if key in objects:
                value = read_archive_bytes(objects[key], self._file(key), trust=self.trust)
            elif stored[key].shape in ((), (1,)):
                value = self._archives.number(stored[key])
            else:
                continue
            if isinstance(value, int | float) and 0 <= value < 1 << 60 and value == int(value):
                return int(value)
        named = _SAVE.fullmatch(self.directory.name) or re.fullmatch(
            r"checkpoint-(\d{1,18})", self.directory.name
        )
        if named:
            return int(named[1])
        for key, state in split.states.items():
            if state.kind == STEP and key in stored and stored[key].shape in ((), (1,)):
                return int(self._archives.number(stored[key]))
        made = [file.content for file in files if file.path.startswith("(step ") and file.content]
        return int(number_of(made[0], "F32")) if made else 0

    def _notes(self, metadata: Metadata, split: SplitKeys) -> Iterator[str]:
        if split.numbers:
            yield (
                "the optimizer's states were under numbers and get names, in the order given by "
                "--args-from: load what is written by set_optimizer_state_dict"
            )
        for folder in dict.fromkeys(self.folders):
            prefix = f"{folder}/" if folder else ""
            yield from stray_notes(
                self.directory / folder, _below(prefix, metadata, is_removed=True)
            )
        own = {METADATA, STORED, REPORT, *self.folders}
        others = sorted(
            entry.name
            for entry in self.directory.iterdir()
            if entry.name not in own and entry.suffix != ".distcp"
        )
        if others:
            yield f"not carried: {', '.join(others[:8])}{' ...' * (len(others) > 8)}"


def _below(folder: str, metadata: Metadata, *, is_removed: bool = False) -> Metadata:
    """Return metadata with the paths of files from the directory above, or from their own."""
    if not folder:
        return metadata

    def moved(extent: Extent) -> Extent:
        if is_removed:
            return replace(extent, file=extent.file.removeprefix(folder))
        return replace(extent, file=f"{folder}/{extent.file}")

    tensors = tuple(
        replace(
            stored,
            chunks=tuple(replace(chunk, extent=moved(chunk.extent)) for chunk in stored.chunks),
        )
        for stored in metadata.tensors
    )
    objects = {key: moved(extent) for key, extent in metadata.objects.items()}
    return replace(metadata, tensors=tensors, objects=objects)


def _ranks(files: Sequence[str]) -> int:
    """Return the number of ranks that wrote the files."""
    found = (re.fullmatch(r"(?:.*/)?__(\d{1,5})_\d+\.distcp", file) for file in files)
    return max((int(match[1]) for match in found if match), default=0) + 1


def _with_group_steps(
    pieces: list[FilePiece],
    files: list[CheckpointFile],
    job: DcpJob,
    groups: Sequence[Mapping[str, Any]],
) -> tuple[list[FilePiece], list[CheckpointFile], DcpJob]:
    """Return the steps that groups count, as FusedAdam's do, as steps of their parameters."""
    counted = {piece.tensor.name for piece in pieces}
    moving = {name for kind, name in map(split_name, counted) if kind not in (PARAM, USER)}
    steps = dict(job.steps)
    for group, names in zip(groups, job.groups, strict=True):
        step = group.get(STEP)
        if isinstance(step, NewTensor) and len(step.content or b"") == ITEM_BYTES[step.dtype]:
            step = number_of(step.content or b"", step.dtype)
        if isinstance(step, bool) or not isinstance(step, int | float):
            continue
        for name in moving & set(names):
            if f"{STEP}/{name}" not in counted:
                piece, file = step_piece(name, float(step))
                pieces.append(piece)
                files += [] if file.path in {known.path for known in files} else [file]
                steps[name] = OF_GROUP
    return pieces, files, replace(job, steps=steps)


def _lay_out(source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
    notes = list(source.notes)
    job, groups = source.values.extra.get(DCP), source.values.param_groups
    auxiliary: tuple[AuxiliaryFile, ...] = ()
    if not isinstance(job, DcpJob):
        job, groups = described(source, notes)
        data = keep_values(source.values)
        auxiliary = (AuxiliaryFile(STORED, len(data), content=data),)
    degrees = {**source.values.degrees, **options.degrees}
    for axis, size in options.degrees.items():
        if axis != "dp" and size != 1 and source.values.framework == FRAMEWORK:
            raise RefusedError(
                f"{axis}={size} is asked of dcp, whose ranks are data-parallel: DTensors of other "
                f"axes load from it too. Give --dp, and no --{axis}."
            )
    before = source.values.degrees.get("dp", 1)
    ranks = degrees.get("dp", 1)
    notes += _loader_notes(job, before, ranks)
    writer = _DcpWriter(job, ranks)
    writer.add_tensors(source)
    writer.add_steps(source)
    writer.add_groups(groups)
    writer.add_objects()
    return writer.target(tuple(notes), auxiliary)


def _loader_notes(job: DcpJob, before: int, after: int) -> Iterator[str]:
    others = sorted({str(job.paths.get(key, (key,))[0]) for key in job.objects})
    if others:
        yield f"carried as they are, unread: {', '.join(others[:8])}{' ...' * (len(others) > 8)}"
    loaders = [name for name in others if "loader" in name]
    if loaders and before != after:
        yield (
            f"{loaders[0]} is the place in the data of {before} ranks: leave it out when loading "
            f"at {after}, if its loader refuses another number"
        )


class _DcpWriter:
    """Collects the keys of a target."""

    def __init__(self, job: DcpJob, ranks: int) -> None:
        self._job, self._ranks = job, ranks
        self._folders = {folder: TreeFiles(folder, ranks) for folder in dict.fromkeys(job.folders)}
        self._trees = {
            name: tree for tree in job.optimizers for names in tree.groups for name in names
        }

    def add_tensors(self, source: Checkpoint) -> None:
        """Add weights, states and other tensors, in chunks of FSDP2's ranks."""
        for tensor in source.placed.collection.tensors:
            kind, name = split_name(tensor.name)
            if kind == STEP and self._job.steps.get(name) is not None:
                continue
            path = self._path(kind, name)
            self._of(path).add_tensor(path, tensor, fsdp_boxes(tensor.shape, self._ranks))

    def add_steps(self, source: Checkpoint) -> None:
        """Add steps that are no 0-d fp32 tensors."""
        numbers = _numbers(source)
        for name, form in self._job.steps.items():
            if form == OF_GROUP or name not in numbers:
                continue
            number, path = numbers[name], self._path(STEP, name)
            if isinstance(form, str):
                value = int(number) if number == int(number) else number
                self._of(path).add_value(path, value)
                continue
            dtype, shape = form
            data = np.array(number).astype(NUMPY_DTYPES[dtype]).tobytes()
            self._of(path).add_value(path, NewTensor(dtype, shape, data))

    def add_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        at = 0
        for tree in self._job.optimizers:
            for number, names in enumerate(tree.groups):
                group = dict(groups[at])
                at += 1
                if not tree.is_flat:
                    group[MEMBERS] = list(names)
                for key, value in group.items():
                    for path in tree.value_paths(number, key):
                        self._of(path).add_value(path, value)

    def add_objects(self) -> None:
        for key, data in self._job.objects.items():
            path = self._job.paths.get(key, (key,))
            self._of(path).add_object_at(path, data)

    def target(
        self, notes: tuple[str, ...], auxiliary: tuple[AuxiliaryFile, ...]
    ) -> CheckpointTarget:
        pieces, files, fixed = list[FilePiece](), list[CheckpointFile](), {}
        metadata = {}
        for folder, written in self._folders.items():
            fixed.update({len(files) + n: parts for n, parts in written.fixed.items()})
            pieces += written.pieces
            files += written.files()
            metadata[folder] = written.metadata()

        def finish(directory: Path, _: npt.NDArray[np.uint64]) -> None:
            for folder, data in reversed(metadata.items()):
                replace_file(directory / folder / METADATA, data)

        return CheckpointTarget("dcp", place(pieces, files), fixed, finish, notes, auxiliary)

    def _path(self, kind: str, name: str) -> ObjectPath:
        if kind == PARAM:
            return (*self._job.model, name)
        if kind == USER:
            return self._job.paths.get(name, (name,))
        if kind == MAIN:
            kind = self._job.masters.get(name, MAIN)
        if name not in self._trees:
            raise RefusedError(
                f"{kind} of {name} belongs to no optimizer of the target. Name another --args-from."
            )
        return self._trees[name].state_path(name, kind)

    def _of(self, path: ObjectPath) -> TreeFiles:
        is_optimizer = any(path[: len(t.path)] == t.path for t in self._job.optimizers if t.path)
        return self._folders[self._job.folders[is_optimizer]]


def _numbers(source: Checkpoint) -> dict[str, float]:
    """Return the steps in memory, by parameter."""
    placed, found = source.placed, {}
    for row in range(len(placed.collection)):
        kind, name = split_name(placed.collection.box(row)[0].name)
        content = placed.files[placed.file[row]].content
        if kind == STEP and content is not None:
            begin = int(placed.begin[row])
            found[name] = number_of(content[begin : begin + 4], "F32")
    return found


def fsdp_boxes(shape: Index, ranks: int) -> Iterator[tuple[int, Box]]:
    """Yield the ranks with a part of a tensor, and its box: FSDP2 cuts the first axis."""
    if not shape or 0 in shape or ranks < 2:
        yield 0, whole(shape)
        return
    rows = -(-shape[0] // ranks)
    for rank, low in enumerate(range(0, shape[0], rows)):
        count = min(rows, shape[0] - low)
        yield rank, Box((low, *[0] * (len(shape) - 1)), (count, *shape[1:]))
