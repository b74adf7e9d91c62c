"""What a ``torch_dist`` checkpoint has beside tensors: keys, objects of the layers, ``common.pt``.

Source: ``save_checkpoint`` of megatron/training/checkpointing.py (core_v0.16.1). Differs in: no
common state of other ranks; new RNG states where the degrees change.
"""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from scalai.converters.archive_layout import Archive, lay_out_archive
from scalai.converters.checkpoint import MAIN, PARAM, STEP, Checkpoint, Values
from scalai.converters.megatron.names import expert_of, fold, layer_of
from scalai.converters.megatron.rank_rng_states import rng_states_of
from scalai.converters.megatron.values import (
    are_several_kinds,
    has_hyperparameters,
    is_same_group,
    optimizer_tree,
    with_degrees,
)
from scalai.converters.scalars import read_steps
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor, split_name

_WEIGHTS = {PARAM, MAIN, STEP}
LINKS = "links"
"""In ``Values.extra``: how many parameter groups each optimizer of a chain has."""


_IDENTITY: Mapping[str, Any] = {"lr_mult": 1.0, "is_decoupled_lr": False}
"""What Megatron tells parameter groups apart by, and groups of older releases do not have."""


class Keys:
    """Under which key a parameter is stored: that of the source, if it was a torch_dist checkpoint;
    else with the layer as an axis, if the layers are alike.

    Where of alike layers only some are trained, their optimizer's tensors would have holes, which
    Megatron does not load: then no layer is an axis (``non_homogeneous_layers``).
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
    names: Keys,
    degrees: Mapping[str, int],
    notes: list[str],
) -> dict[str, bytes]:
    """Return the objects to store: extra state by layer; others where no degree changes."""
    objects: Mapping[str, bytes] | None = source.values.extra.get("objects")
    if objects is None:
        notes.append("_extra_state of the layers is invented as None: the source has none")
        none = content_of(lay_out_archive([None]))
        extra = {key: none for key in sorted(_extra_states(tensors, names))}
        return {**extra, **_rng_states(source, degrees, notes)}
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
    """Return the key of an object whose layers are an axis, with the layer in the name instead."""
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
    """Return the objects of ``rng_state``, which Megatron asks for at the arguments' degrees: one
    for each PP and TP rank, and with expert parallelism for each data-parallel rank too."""
    if source.values.arguments is None:
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


def _extra_states(tensors: Mapping[str, Tensor], names: Keys) -> Iterator[str]:
    """Yield the keys of the extra state that every linear layer of Megatron asks for."""
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
    """Return what ``common.pt`` holds: iteration, arguments, schedule, the optimizer's scalars.

    ``notes`` gets a line for what is invented.

    Raises:
        RefusedError: Hyperparameters of the optimizer are nowhere.
    """
    values = source.values
    common: dict[str, Any] = {"iteration": values.step}
    arguments = values.arguments
    if arguments is None and reference is not None and reference.arguments is not None:
        arguments = {**reference.arguments, **values.counters, "iteration": values.step}
        notes.append("Megatron's arguments are those of --args-from")
    if arguments is not None:
        common["args"] = argparse.Namespace(**with_degrees(arguments, degrees))
    else:
        notes.append("the source has no Megatron arguments: give all model flags when loading")
    common["checkpoint_version"] = values.extra.get("checkpoint_version", 3.0)
    flops = "num_floating_point_operations_so_far"
    if flops in values.extra:
        common[flops] = values.extra[flops]
    if values.scheduler is not None:
        common["opt_param_scheduler"] = values.scheduler
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
    """Return whole parameter groups; what the source lacks is the reference's.

    Raises:
        RefusedError: Hyperparameters that the optimizer needs are nowhere: it would go on with
            others.
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
    """Return how many groups each optimizer of a chain has that is of several kinds (Muon's, beside
    Adam's for vectors and embeddings); None: it follows from the experts.

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


def content_of(archive: Archive) -> bytes:
    """Return the bytes of an archive that has no open tensors."""
    assert not archive.tensors
    data = bytearray(archive.size_bytes)
    for at, part in archive.fixed:
        data[at : at + len(part)] = part
    return bytes(data)
