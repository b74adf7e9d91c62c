"""Lays out a ``torch_dist`` checkpoint that megatron-core loads at any degrees.

The optimizer's state is written as whole tensors: for the distributed optimizer this is
``fully_reshardable``, whose loader (other than its writer) is right in every release. The degrees
decide only the chunks of tensors, so that a rank reads its own part.

Source: megatron/core/dist_checkpointing of 0.16.1. Differs in: chunks need not be those of a rank,
and files not those of a writer.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    Values,
    WriteOptions,
    place,
)
from scalai.converters.dcp_files import ArchiveFiles
from scalai.converters.dcp_metadata import Chunk, Extent, StoredKey, write_metadata
from scalai.converters.megatron.beside_tensors import (
    TRACKER,
    are_several_kinds,
    folder_of,
    has_hyperparameters,
    is_same_group,
    optimizer_tree,
    with_degrees,
)
from scalai.converters.megatron.common_state import (
    COMMON_FILE,
    COMMON_OBJECT,
    MARKER,
    form_for,
    lay_out_common,
    marker_for,
)
from scalai.converters.megatron.iteration_files import RUN
from scalai.converters.megatron.model_limits import padding_note
from scalai.converters.megatron.modules import (
    expert_of,
    fold,
    layer_of,
    tensor_parallel_axis,
)
from scalai.converters.megatron.rng_states import rng_states_of
from scalai.converters.source_files import read_steps
from scalai.converters.torch_archive import content_of, lay_out_archive
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import Box
from scalai.store.atomic import replace_file

_WEIGHTS = {PARAM, MAIN, STEP}
SCHEDULER = "lr_scheduler"
"""The schedule's entry of verl, SkyRL and AReaL, which save by megatron-core alone."""
LINKS = "links"
"""In ``Values.extra``: how many parameter groups each optimizer of a chain has."""


_IDENTITY: Mapping[str, Any] = {"lr_mult": 1.0, "is_decoupled_lr": False}
"""Keys of Megatron's parameter groups, absent in older releases."""


class KeyNames:
    """A parameter's key: the source's, in a torch_dist checkpoint; else with the layer as an axis,
    if the layers are alike.

    If only some of alike layers are trained, their optimizer's tensors would have holes; Megatron
    does not load those: then no layer is an axis (``non_homogeneous_layers``).
    """

    def __init__(self, source: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
        self._known: frozenset[str] = source.values.extra.get("keys", frozenset())
        trained = {split_name(n)[1] for n in tensors if split_name(n)[0] not in _WEIGHTS}
        by_layer: dict[int, set[tuple[str, Tensor]]] = {}
        by_key: dict[str, set[bool]] = {}
        for tensor in tensors.values():
            kind, name = split_name(tensor.name)
            layer = layer_of(name)
            if kind == PARAM and layer is not None:
                key = fold(name, True)[0]
                by_layer.setdefault(layer, set()).add(
                    (str(expert_of(name)), Tensor(key, tensor.shape, tensor.dtype))
                )
                by_key.setdefault(key, set()).add(name in trained)
        self.are_partly_trained = any(len(found) > 1 for found in by_key.values())
        self._is_homogeneous = len({frozenset(alike) for alike in by_layer.values()}) == 1
        if self.are_partly_trained:
            self._known, self._is_homogeneous = frozenset(), False

    def of(self, parameter: str) -> tuple[str, tuple[int, ...]]:
        """Return the key and the index on its leading axes."""
        forms = fold(parameter, True), fold(parameter, False), (parameter, ())
        known = (form for form in forms if form[0] in self._known)
        return next(known, fold(parameter, self._is_homogeneous))


def objects_of(
    source: Checkpoint,
    tensors: Mapping[str, Tensor],
    names: KeyNames,
    degrees: Mapping[str, int],
    notes: list[str],
) -> dict[str, bytes]:
    """Return the objects to store: extra state by layer; others if no degree changes."""
    objects: Mapping[str, bytes] | None = source.values.extra.get("objects")
    if objects is None:
        notes.append("_extra_state of the layers is invented as None: the source has none")
        none = content_of(lay_out_archive([None]))
        extra = {key: none for key in sorted(_extra_states(tensors, names))}
        return {**extra, **_rng_states(source, degrees, notes)}
    if not any("_extra_state/" in key for key in objects):
        notes.append(
            "there is no _extra_state of the layers (--ckpt-drop-redundant-extra-state): a "
            "Megatron without this flag needs --dist-ckpt-strictness log_all to load the target"
        )
    is_same = all(degrees.get(axis, 1) == size for axis, size in source.values.degrees.items())
    kept = {}
    for key, data in objects.items():
        if "_extra_state/" in key and names.are_partly_trained:
            kept[_without_layers(key)] = data
        elif "_extra_state/" in key or is_same:
            kept[key] = data
        elif not key.startswith("rng_state/"):
            notes.append(f"{key} belongs to the old degrees and is left out")
    return kept if is_same else {**kept, **_rng_states(source, degrees, notes)}


def _without_layers(key: str) -> str:
    """Return the key of an object with its layer in the name instead of an axis."""
    name, _, place = key.partition("/shard_")
    index, _, shape = place.partition("_")
    at, sizes = index.split("."), shape.split(".")
    if not re.search(r"(^|\.)layers\.(?!\d)", name):
        return key
    name = re.sub(r"((?:^|\.)layers\.)(?!\d)", rf"\g<1>{at[0]}.", name, count=1)
    return f"{name}/shard_{'.'.join(at[1:]) or '0'}_{'.'.join(sizes[1:]) or '1'}"


def _rng_states(
    source: Checkpoint, degrees: Mapping[str, int], notes: list[str]
) -> dict[str, bytes]:
    """Return the objects of ``rng_state`` for the arguments' degrees: one for each PP and TP rank,
    and with expert parallelism for each data-parallel rank too."""
    if source.values.arguments is None and RUN not in source.values.extra:
        return {}
    pp, tp, ep = (degrees.get(axis, 1) for axis in ("pp", "tp", "ep"))
    sizes = (pp, tp) if ep == 1 else (pp, tp, degrees.get("dp", 1) * degrees.get("cp", 1))
    shape = ".".join(map(str, sizes))
    found = {}
    for at in np.ndindex(*sizes):
        coordinate = at[1], at[0], at[2] % ep if ep > 1 else 0
        rng_states = rng_states_of(source, degrees, coordinate, notes)
        key = f"rng_state/shard_{'.'.join(map(str, at))}_{shape}"
        found[key] = content_of(lay_out_archive([rng_states]))
    return found


def _extra_states(tensors: Mapping[str, Tensor], names: KeyNames) -> Iterator[str]:
    """Yield the keys of the extra state of every linear layer in Megatron."""
    weights = [
        names.of(split_name(tensor.name)[1])
        for tensor in tensors.values()
        if tensor.name.startswith(f"{PARAM}/") and tensor.name.endswith(".weight")
    ]
    linear = [(key, index) for key, index in weights if ".linear_" in key or "output_layer" in key]
    sizes: dict[str, tuple[int, ...]] = {}
    for key, index in linear:
        known = sizes.get(key, index)
        sizes[key] = tuple(max(a, b) for a, b in zip(known, index, strict=True))
    for key, index in linear:
        shape = [size + 1 for size in sizes[key]] or [1]
        place_ = ".".join(map(str, index or (0,)))
        base = key.removesuffix(".weight")
        yield f"{base}._extra_state/shard_{place_}_{'.'.join(map(str, shape))}"


def common_of(
    source: Checkpoint,
    tensors: Mapping[str, Tensor],
    degrees: Mapping[str, int],
    is_split: bool | None,
    reference: Values | None,
    notes: list[str],
) -> dict[str, Any]:
    """Return the content of ``common.pt``: iteration, arguments, schedule, the optimizer's scalars.
    ``notes`` gets a line for each invention.

    Raises:
        RefusedError: Hyperparameters of the optimizer are nowhere.
    """
    values = source.values
    common: dict[str, Any] = {"iteration": values.step}
    arguments = values.arguments
    if arguments is None and reference is not None and reference.arguments is not None:
        arguments = {**reference.arguments, **values.counters, "iteration": values.step}
        notes.append("Megatron's arguments are of --args-from, else by the tensors and config.json")
    if arguments is not None:
        common["args"] = argparse.Namespace(**with_degrees(arguments, degrees))
    elif RUN not in values.extra:
        notes.append("the source has no Megatron arguments: give all model flags when loading")
    common["checkpoint_version"] = values.extra.get("checkpoint_version", 3.0)
    flops = "num_floating_point_operations_so_far"
    if flops in values.extra:
        common[flops] = values.extra[flops]
    if values.scheduler is not None:
        common["opt_param_scheduler"] = values.scheduler
    if SCHEDULER in values.extra:
        common[SCHEDULER] = values.extra[SCHEDULER]
        notes.append(
            f"saved by megatron-core alone, as verl, SkyRL and AReaL do: {folder_of(values.step)} "
            "of the target takes the place of the source's own folder"
        )
    if is_split is not None:
        is_mixed = any(name.startswith(f"{MAIN}/") for name in tensors)
        groups = whole_groups(source, reference, notes)
        common["optimizer"] = optimizer_tree(
            groups,
            read_steps(source),
            values.grad_scaler,
            is_split=is_split,
            is_mixed=is_mixed,
            is_chained=degrees.get("ep", 1) > 1
            and any(expert_of(name) is not None for name in tensors),
            sizes=_link_sizes(source, groups, degrees, reference, is_split=is_split),
        )
    common["content_metadata"] = {
        **values.extra.get("content_metadata", {}),
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
    }
    return common


def whole_groups(
    source: Checkpoint, reference: Values | None, notes: list[str]
) -> list[Mapping[str, Any]]:
    """Return whole parameter groups; the reference fills gaps of the source.

    Raises:
        RefusedError: Hyperparameters of the optimizer are nowhere: it would go on with others.
    """
    groups: list[Mapping[str, Any]] = []
    given = tuple(reference.param_groups) if reference else ()
    for at, group in enumerate(source.values.param_groups):
        same = [base for base in given if is_same_group(base, group)]
        if are_several_kinds(same):
            # Of Muon and Adam: they are told apart by their place alone.
            is_aligned = len(given) == len(source.values.param_groups)
            same = [given[at]] if is_aligned and given[at] in same else []
        base = next(iter(same), {})
        added = sorted(set(base) - set(group) - {"step"})
        if added:
            notes.append(f"parameter groups take {', '.join(added)} from --args-from")
        groups.append({**{name: base[name] for name in added}, **group})
    for name, value in _IDENTITY.items():
        lacking = [at for at, of in enumerate(groups) if not {name, f"pre_{name}"} & of.keys()]
        if lacking:
            notes.append(f"parameter groups {lacking} have no {name}: {value}, as of old releases")
            groups = [{name: value, **of} if at in lacking else of for at, of in enumerate(groups)]
    if not groups or not all(has_hyperparameters(group) for group in groups):
        raise RefusedError(
            f"{source.directory} keeps no betas and eps, nor a momentum, of its optimizer's "
            "parameter groups, and the optimizer must not go on with others. Pass --args-from "
            "with a torch_dist checkpoint of the same job."
        )
    return groups


def _link_sizes(
    source: Checkpoint,
    groups: Sequence[Mapping[str, Any]],
    degrees: Mapping[str, int],
    reference: Values | None,
    *,
    is_split: bool,
) -> Sequence[int] | None:
    """Return the numbers of groups of a chain's optimizers of several kinds (Muon's, beside Adam's
    for vectors and embeddings); None: they follow from the experts.

    Raises:
        RefusedError: The source does not say, or the target's chain is another one.
    """
    if not are_several_kinds(groups):
        return None
    old = source.values
    known = (values.extra.get(LINKS) for values in (old, reference) if values is not None)
    sizes: Sequence[int] = next((sizes for sizes in known if sizes), ())
    if sum(sizes) != len(groups) or is_split:
        raise RefusedError(
            f"{source.directory} is of a chain of several kinds of optimizers (Muon beside Adam), "
            "which is written as it was, and not split over ranks. Write it from a torch_dist "
            "checkpoint, without --optimizer distributed."
        )
    if (old.degrees.get("ep", 1) > 1) != (degrees.get("ep", 1) > 1) and any(
        group.get("is_expert_parallel") for group in groups
    ):
        raise RefusedError(
            f"{source.directory} is of a chain of several kinds of optimizers (Muon beside Adam), "
            "which has other links with expert parallelism than without. Keep --ep."
        )
    return sizes


@dataclass(frozen=True, slots=True)
class _Item:
    """A tensor to be stored: its origin, its key and its index on leading axes."""

    tensor: Tensor
    key: str
    index: tuple[int, ...]


def lay_out(source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
    """Lay out a checkpoint of ``source`` at other degrees.

    Raises:
        RefusedError: Masters are missing, layers are, or parameters made unequally many steps.
    """
    degrees = {**source.values.degrees, **options.degrees}
    is_split = _is_split(source, options)
    tensors = {tensor.name: tensor for tensor in source.placed.collection.tensors}
    names = KeyNames(source, tensors)
    keys = _stacked(list(_items(tensors, is_split, names)))
    notes = list(source.notes)
    objects = objects_of(source, tensors, names, degrees, notes)
    folder = folder_of(source.values.step)
    total = sum(item.tensor.size_bytes for _, items in keys for item in items)
    layout = _Files(folder, max(degrees.get("tp", 1) * degrees.get("pp", 1), 1), total)
    common = common_of(source, tensors, degrees, is_split, options.reference, notes)
    if names.are_partly_trained:
        common["content_metadata"]["non_homogeneous_layers"] = True
    note = padding_note(source, tensors, degrees, options.reference)
    notes += [] if note is None else [note]
    form = form_for(source, options.reference, notes)
    common_data = content_of(lay_out_common(common, form))
    if form == COMMON_OBJECT:
        objects[COMMON_OBJECT] = common_data
    extents = {key: layout.add(data) for key, data in objects.items()}
    stored = [layout.add_key(key, items, degrees) for key, items in keys]
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

    return CheckpointTarget("torch_dist", placed, layout.fixed, finish, tuple(notes))


def _is_split(source: Checkpoint, options: WriteOptions) -> bool | None:
    """Whether to write the distributed optimizer; None: there is no optimizer state."""
    kinds = {split_name(tensor.name)[0] for tensor in source.placed.collection.tensors}
    if kinds <= {PARAM, MAIN, STEP}:
        return None
    requested = options.is_split if options.is_split is not None else source.values.is_split
    return True if requested is None else requested


def _items(
    tensors: Mapping[str, Tensor], is_split: bool | None, names: KeyNames
) -> Iterator[_Item]:
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
    pairs = (split_name(name) for name in tensors)
    return {parameter for kind, parameter in pairs if kind not in (PARAM, MAIN, STEP)}


def _in_order(name: str) -> tuple[Any, ...]:
    """Order names by their numbers, not by their digits."""
    return tuple(
        (0, int(part), "") if part.isdigit() else (1, 0, part)
        for part in name.replace("/", ".").split(".")
    )


def _stacked(items: Sequence[_Item]) -> list[tuple[str, list[_Item]]]:
    """Group items by key; refuse keys without some layer or expert."""
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


class _Files(ArchiveFiles):
    """Fills files of about equal size, one after the other."""

    def __init__(self, folder: str, count: int, total: int) -> None:
        super().__init__(folder)
        self._count, self._total = count, total
        self._number = 0
        self._done = 0

    def add(self, data: bytes) -> Extent:
        return self.add_object(self._number, data)

    def add_key(self, key: str, items: Sequence[_Item], degrees: Mapping[str, int]) -> StoredKey:
        """Store all tensors of a key, cut as tensor parallelism will."""
        chunks = []
        for item in items:
            for box in _cut(item, degrees):
                extent = self._add_chunk(item, box)
                offset, shape = (*item.index, *box.offset), (*[1] * len(item.index), *box.shape)
                chunks.append(Chunk(Box(offset, shape), extent))
        tensor = items[0].tensor
        sizes = tuple(max(index) + 1 for index in zip(*(i.index for i in items), strict=True))
        return StoredKey(key, (*sizes, *tensor.shape), tensor.dtype, tuple(chunks))

    def _add_chunk(self, item: _Item, box: Box) -> Extent:
        is_full = self._done * self._count > self._total * (self._number + 1)
        if is_full and self.size_of(self._number):
            self._number += 1
        self._done += box.numel * ITEM_BYTES[item.tensor.dtype]
        return self.add_chunk(self._number, item.tensor, box, leading=len(item.index))


def _cut(item: _Item, degrees: Mapping[str, int]) -> Iterator[Box]:
    """Yield the boxes of a tensor on the ranks."""
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
