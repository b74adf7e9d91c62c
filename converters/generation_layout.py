"""The layout ``scalai``: Scalai's own generations on a disk, ``generation-<n>/<host>/``.

``scalai-run --durable-dir`` writes and resumes them; see ``scalai.store.manifest``. The state does
not depend on the degrees: a conversion writes the part of one host, with whole tensors.

Source: own.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import (
    Checkpoint,
    CheckpointFile,
    CheckpointTarget,
    PlacedTensors,
    ReadOptions,
    Values,
    WriteOptions,
    unite,
)
from scalai.converters.torch_archive import NewTensor
from scalai.core.errors import LayoutError, UsageError
from scalai.core.tensors.collection import MAX_NDIM, Collection, Tensor
from scalai.core.tensors.dtypes import FROM_TORCH, NUMPY_DTYPES, TORCH_NAMES
from scalai.core.tensors.region import whole
from scalai.store.files import FileLayout, lay_out
from scalai.store.generation import UnitedGeneration, load_generation
from scalai.store.manifest import HostManifest, StoredFile, write_manifest
from scalai.store.places import find_generations, generation_name

HOST = "offline"
"""The host of a converted generation."""
NUMBER = 1
FILE_BYTES = 4 << 30
"""Bytes of tensors in one file."""

_IDENTITY = ("wd_mult", "lr_mult", "is_decoupled_lr")
"""Megatron's keys for matching parameter groups, but ``is_expert_parallel``, as in live state."""

PARTS = "generation"
"""The key of a ``StoredGeneration`` in ``Values.extra``."""


@dataclass(frozen=True, eq=False, slots=True)
class StoredGeneration:
    """A generation by its manifests, and the numbers of all generations beside it."""

    generation: UnitedGeneration
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerationLayout:
    """The layout ``scalai``."""

    name: str = "scalai"
    framework: str = ""

    def find(self, path: Path) -> bool:
        return path.is_dir() and bool(find_generations(path))

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Read the manifests of the newest generation, or of the one asked for."""
        found = find_generations(path)
        number = max(found) if options.iteration is None else options.iteration
        if number not in found:
            raise UsageError(
                f"{path} holds no generation {number}, but {list(found)}. Name one of them."
            )
        generation = load_generation(found[number], number)
        if not options.is_part:
            _check_tensors(generation)
        base = Path(*_common_parts(found[number]))
        parts = [
            _placed(part, directory.absolute().relative_to(base))
            for part, directory in zip(generation.hosts, generation.directories, strict=True)
            if directory is not None
        ]
        return Checkpoint(
            self.name,
            base,
            unite(parts),
            _values(generation, tuple(found)),
            may_overlap=True,
            recorded=np.concatenate([part.fingerprint for part in generation.hosts]),
            stated=generation.stated,
        )

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
        """Lay out one host's part with every tensor whole."""
        degrees = {**source.values.degrees, **options.degrees}
        notes = list(source.notes)
        tensors = source.placed.collection.tensors
        folder = f"{generation_name(NUMBER)}/{HOST}"
        groups = list(_files(tensors))
        layouts = [_lay_out(group) for group in groups]
        files = tuple(
            StoredFile(f"rank-{number}.safetensors", layout.size_bytes)
            for number, layout in enumerate(layouts)
        )
        collection = Collection.of((t, whole(t.shape)) for group in groups for t in group)
        stride = np.zeros((len(collection), MAX_NDIM), dtype=np.int64)
        placed = PlacedTensors(
            collection,
            np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
            np.concatenate([np.zeros(0, np.int64), *(layout.begin for layout in layouts)]),
            stride,
            tuple(CheckpointFile(f"{folder}/{file.name}", file.size_bytes) for file in files),
        )
        scalars = _scalars(source.values, notes)
        is_same = all(degrees.get(axis, 1) == size for axis, size in source.values.degrees.items())
        rank_state = dict(source.values.rank_state) if is_same else {}
        if source.values.rank_state and not is_same:
            notes.append("RNG states are left out: the degrees change, so new ones begin")

        def finish(directory: Path, rows: npt.NDArray[np.uint64]) -> None:
            manifest = HostManifest(
                generation=NUMBER,
                step=source.values.step,
                host=HOST,
                about=_about(source, degrees, len(tensors)),
                ranks=(0,),
                collection=collection,
                file=placed.file,
                begin=placed.begin,
                fingerprint=rows,
                files=files,
                scalars=scalars,
                rank_state=rank_state,
            )
            write_manifest(directory / folder, manifest)

        fixed = {number: [(0, layout.header)] for number, layout in enumerate(layouts)}
        return CheckpointTarget(self.name, placed, fixed, finish, tuple(notes))


def _check_tensors(generation: UnitedGeneration) -> None:
    """Refuse a generation without some tensor."""
    hosts = generation.hosts
    names = {tensor.name for part in hosts for tensor in part.collection.tensors}
    expected = max(part.about["tensors"] for part in hosts)
    if len(names) < expected:
        raise LayoutError(
            f"{len(names)} of {expected} tensors of generation {generation.generation} are held by "
            f"{[part.host for part in hosts]}: the part of a host is missing. Name the directory "
            "that holds all of them."
        )


def _common_parts(directories: Iterable[Path]) -> tuple[str, ...]:
    """Return the path parts of the directory around all parts of a generation."""
    parts = [directory.absolute().parts for directory in directories]
    common = []
    for same in zip(*parts, strict=False):
        if len(set(same)) != 1:
            break
        common.append(same[0])
    return tuple(common)


def _placed(part: HostManifest, folder: Path) -> PlacedTensors:
    stride = np.zeros((len(part.collection), MAX_NDIM), dtype=np.int64)
    if len(part.collection):
        behind = np.cumprod(part.collection.shape[:, ::-1], axis=1)[:, ::-1]
        stride[:, :-1], stride[:, -1] = behind[:, 1:], 1
    files = [CheckpointFile(str(folder / file.name), file.size_bytes) for file in part.files]
    return PlacedTensors(part.collection, part.file, part.begin, stride, tuple(files))


def _files(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    group: list[Tensor] = []
    size = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        if group and size + tensor.size_bytes > FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.size_bytes
    if group:
        yield group


def _lay_out(group: Iterable[Tensor]) -> FileLayout:
    rows = Collection.of((tensor, whole(tensor.shape)) for tensor in group)
    return lay_out(rows, {"format": "pt"})


def _about(source: Checkpoint, degrees: Mapping[str, int], tensors: int) -> dict[str, Any]:
    world = degrees.get("tp", 1) * degrees.get("pp", 1) * degrees.get("dp", 1)
    return {
        "snapshot": f"offline-{source.values.step}",
        "consumed_samples": source.values.counters.get("consumed_train_samples"),
        "degrees": dict(degrees),
        "world_size": world,
        "tensors": tensors,
        "converted_from": {"layout": source.layout, "path": str(source.directory)},
    }


def _values(generation: UnitedGeneration, numbers: tuple[int, ...]) -> Values:
    about, scalars = generation.about, generation.scalars
    megatron = scalars.get("megatron", {})
    offline = scalars.get("offline", {})
    progress = scalars.get("user", {}).get("megatron_training", {}).get("progress", {})
    counters = {name: value for name, value in progress.items() if value is not None}
    if about.get("consumed_samples") is not None:
        counters.setdefault("consumed_train_samples", about["consumed_samples"])
    return Values(
        step=generation.step,
        degrees={axis: int(size) for axis, size in about.get("degrees", {}).items()},
        framework="megatron",
        scheduler=_live(megatron.get("scheduler")),
        grad_scaler=_live(megatron.get("grad_scaler")),
        is_split=offline.get("is_split"),
        param_groups=tuple(
            _live(offline["param_groups"]) if "param_groups" in offline else _groups(megatron)
        ),
        arguments=_live(offline.get("arguments")),
        counters=counters,
        rank_state=generation.rank_state,
        extra={"scalars": dict(scalars), PARTS: StoredGeneration(generation, numbers)},
    )


def _scalars(values: Values, notes: list[str]) -> dict[str, Any]:
    """Return the scalars as live state keeps them: the source's own, or made from Megatron's.

    ``offline`` has the values of a framework's layout beyond live state.
    """
    if "scalars" in values.extra:
        return dict(values.extra["scalars"])
    names = "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"
    progress = {
        "iteration": values.step,
        **{name: values.counters.get(name, 0) for name in names},
        "num_floating_point_operations_so_far": float(
            values.extra.get("num_floating_point_operations_so_far", 0.0)
        ),
        "padded_vocab_size": values.counters.get("padded_vocab_size"),
    }
    arguments = {
        name: _plain(value) for name, value in (values.arguments or {}).items() if _is_plain(value)
    }
    left = sorted(set(values.arguments or {}) - set(arguments))
    if left:
        notes.append(f"arguments that are no plain values are left out: {', '.join(left)}")
    return {
        "megatron": {
            "scheduler": _plain(values.scheduler),
            "grad_scaler": _plain(values.grad_scaler),
            "param_groups": _by_identity(values.param_groups, notes),
        },
        "fixed_degrees": {"cp": values.degrees.get("cp", 1)},
        "user": {"megatron_training": {"progress": progress}},
        "offline": {
            "param_groups": _plain(list(values.param_groups)),
            "arguments": arguments if values.arguments is not None else None,
            "is_split": values.is_split,
        },
    }


def _groups(megatron: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parameter groups of a live state: by their parameters, or, after a conversion, by
    the keys of Megatron-LM's matching."""
    if "groups" in megatron:
        yield from (_live(values) for values in megatron["groups"]["values"].values())
    for identity, values in megatron.get("param_groups", {}).items():
        yield {**json.loads(identity), **_live(values)}


def _by_identity(
    param_groups: Iterable[Mapping[str, Any]], notes: list[str]
) -> dict[str, dict[str, Any]]:
    """Return the values of groups by their identity: those in which groups of one identity agree.
    The rest follows from a live job's flags."""
    groups: dict[str, dict[str, Any]] = {}
    differing: set[str] = set()
    for group in param_groups:
        identity = {key: group.get(key, group.get(f"pre_{key}")) for key in _IDENTITY}
        known = {"params", "is_expert_parallel", *_IDENTITY, *(f"pre_{key}" for key in _IDENTITY)}
        kept = {
            key: _plain(value)
            for key, value in group.items()
            if key not in known and value is not None and _is_plain(value)
        }
        of = groups.setdefault(json.dumps(identity, sort_keys=True), kept)
        for key in {key for key in of.keys() | kept.keys() if of.get(key) != kept.get(key)}:
            differing.add(key)
            of.pop(key, None)
    if differing:
        notes.append(
            f"parameter groups that {', '.join(_IDENTITY)} do not tell apart differ in "
            f"{', '.join(sorted(differing))}: a job that goes on from this has those by its flags"
        )
    return groups


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(entry) for key, entry in value.items())
    return value is None or isinstance(value, bool | int | float | str | NewTensor)


def _plain(value: Any) -> Any:
    """Return values as JSON; a tensor as live state writes it."""
    if isinstance(value, NewTensor):
        numbers: npt.NDArray[Any] = np.frombuffer(
            value.content or b"", dtype=NUMPY_DTYPES[value.dtype]
        )
        plain = numbers.reshape(value.shape).tolist()
        return {"tensor": plain, "dtype": TORCH_NAMES[value.dtype]}
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _live(value: Any) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {"tensor", "dtype"}:
            dtype = FROM_TORCH[value["dtype"]]
            numbers: npt.NDArray[Any] = np.array(value["tensor"], dtype=NUMPY_DTYPES[dtype])
            return NewTensor(dtype, numbers.shape, numbers.tobytes())
        return {
            # JSON has no tuples; torch's optimizers have this one.
            key: tuple(entry) if key == "betas" else _live(entry)
            for key, entry in value.items()
        }
    if isinstance(value, list):
        return [_live(entry) for entry in value]
    return value
