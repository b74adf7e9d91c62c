"""The optimizer's state of an engine without ZeRO: a tensor per parameter, or flat buffers.

Neither names a parameter. Its shape identifies it, and in 16 bits its weights: the masters round to
them. The match assumes the module's order within each group. Parameters without a distinct state
are reported (``untold``). Frozen parameters may be in no group.

Source: deepspeed 0.19.8: the ``state_dict`` of runtime/fp16/unfused_optimizer.py and of
fused_optimizer.py; torch.optim's ``state_dict`` in fp32.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, Protocol

from scalai.converters.checkpoint import STEP
from scalai.converters.deepspeed.files import with_bytes
from scalai.converters.deepspeed.shards.expert_names import expert_of
from scalai.converters.source_files import rounds_to
from scalai.converters.torch_archive import StoredTensor
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import row_major

MASTERS = "fp32"
"""Key of the masters here, beside the optimizer's own names."""
CHECKED = 4096
"""Elements of a parameter to compare with its masters."""

Advance = Callable[[int, int, str], int | None]
"""(group, place, name) -> the place after a parameter at this place; None: it does not fit."""

_Way = tuple["_Way", str, int] | None
"""A chain of parameters and their groups, the last one first."""


class PlainState(Protocol):
    """An optimizer's state by parameter group; places count from 0."""

    @property
    def path(self) -> Path: ...

    def ends(self) -> list[int]:
        """Return each group's end."""
        ...

    def size(self, weight: StoredTensor) -> int:
        """Return the places of a parameter."""
        ...

    def fits(self, group: int, place: int, weight: StoredTensor, file: Path) -> bool:
        """Tell whether a parameter's state, with its weight in ``file``, can begin there."""
        ...

    def at(self, group: int, place: int, shape: tuple[int, ...]) -> Mapping[str, Any]:
        """Return the state at a place."""
        ...


@dataclass(frozen=True, slots=True)
class Separate:
    """A tensor per parameter: torch's own optimizers, also in ``FP16_UnfusedOptimizer``."""

    path: Path
    groups: Sequence[Sequence[Mapping[str, Any]]]

    def ends(self) -> list[int]:
        return [len(group) for group in self.groups]

    def size(self, weight: StoredTensor) -> int:
        return 1

    def fits(self, group: int, place: int, weight: StoredTensor, file: Path) -> bool:
        if place == len(self.groups[group]):
            return False
        state = self.groups[group][place]
        shapes = {entry.shape for key, entry in state.items() if _is_of_elements(key, entry)}
        return shapes == {weight.shape} and _rounds(state.get(MASTERS), self.path, weight, file)

    def at(self, group: int, place: int, shape: tuple[int, ...]) -> Mapping[str, Any]:
        return self.groups[group][place]


@dataclass(frozen=True, slots=True)
class Flattened:
    """A flat buffer per group, without padding: ``FP16_Optimizer``, around FusedAdam."""

    path: Path
    groups: Sequence[Mapping[str, Any]]

    def ends(self) -> list[int]:
        return [prod(group[MASTERS].shape) for group in self.groups]

    def size(self, weight: StoredTensor) -> int:
        return prod(weight.shape)

    def fits(self, group: int, place: int, weight: StoredTensor, file: Path) -> bool:
        if place + prod(weight.shape) > self.ends()[group]:
            return False
        masters = self.at(group, place, weight.shape)[MASTERS]
        return _rounds(masters, self.path, weight, file)

    def at(self, group: int, place: int, shape: tuple[int, ...]) -> Mapping[str, Any]:
        return {
            key: _part(entry, place, shape) if _is_of_elements(key, entry) else entry
            for key, entry in self.groups[group].items()
        }


def _is_of_elements(key: str, entry: Any) -> bool:
    return isinstance(entry, StoredTensor) and key != STEP


def _part(buffer: StoredTensor, place: int, shape: tuple[int, ...]) -> StoredTensor:
    begin = buffer.begin + place * ITEM_BYTES[buffer.dtype]
    return replace(buffer, shape=shape, stride=row_major(shape), begin=begin)


def _rounds(masters: StoredTensor | None, path: Path, weight: StoredTensor, file: Path) -> bool:
    """Tell whether the compared masters round to the weights; true in fp32, without masters."""
    if masters is None:
        return True
    rows = _first_rows(weight.shape)
    stored = ((replace(masters, shape=rows), path), (replace(weight, shape=rows), file))
    mine, its = ((part.dtype, with_bytes(part, at).content or b"") for part, at in stored)
    return rounds_to(mine[1], mine[0], its[1], its[0])


def _first_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    if not shape:
        return shape
    return (min(shape[0], max(CHECKED // max(prod(shape[1:]), 1), 1)), *shape[1:])


def untold(
    groups: Sequence[Sequence[str]],
    state: PlainState,
    weights: Mapping[str, StoredTensor],
    file_of: Callable[[str], Path],
) -> frozenset[str]:
    """Return parameters with exchangeable but different states: of equal shapes and, if there are
    masters, equal weights."""
    alike: dict[Any, list[Mapping[str, Any]]] = {}
    names: dict[Any, list[str]] = {}
    for group, members in enumerate(groups):
        place = 0
        for name in members:
            weight = weights[name]
            found = state.at(group, place, weight.shape)
            place += state.size(weight)
            key: Any = weight.shape
            if MASTERS in found:
                content, _ = _sample(weight, file_of(name))
                width = ITEM_BYTES[weight.dtype]
                # In a flat buffer, constant weights of any shape look alike.
                is_one = content == content[:width] * (len(content) // width)
                shape = None if isinstance(state, Flattened) else weight.shape
                key = shape, content[:width] if is_one else content
            key = key, bool(expert_of(name))
            alike.setdefault(key, []).append(found)
            names.setdefault(key, []).append(name)
    return frozenset(
        name for key, states in alike.items() if _differ(states, state.path) for name in names[key]
    )


def _differ(states: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Tell whether states differ, or may differ beyond the compared rows."""

    def content(state: Mapping[str, Any]) -> list[Any]:
        parts = (v for key, v in sorted(state.items()) if _is_of_elements(key, v))
        return [(part.shape, _sample(part, path)) for part in parts]

    if len(states) < 2:
        return False
    first = content(states[0])
    return not all(is_whole for _, (_, is_whole) in first) or any(
        content(state) != first for state in states[1:]
    )


def _sample(tensor: StoredTensor, path: Path) -> tuple[bytes, bool]:
    rows = _first_rows(tensor.shape)
    return with_bytes(replace(tensor, shape=rows), path).content or b"", rows == tensor.shape


def match_names(
    names: Sequence[str], sizes: Sequence[int], ends: Sequence[int], advance: Advance
) -> list[list[tuple[str, ...]]]:
    """Return up to two ways to deal parameters to groups: names by group.

    Args:
        names: Parameters in the module's order.
        sizes: Places of each parameter.
        ends: End of each group; groups begin at 0.
        advance: Next place of a group after a parameter.
    """
    left = [*accumulate(reversed(sizes), initial=0)][-2::-1]
    ways: dict[tuple[int, ...], list[_Way]] = {(0,) * len(ends): [None]}
    for name, rest in zip(names, left, strict=True):
        after: dict[tuple[int, ...], list[_Way]] = {}
        for places, found in ways.items():
            moves: list[tuple[tuple[int, ...], list[_Way]]] = [(places, found)]
            for group, place in enumerate(places):
                beyond = advance(group, place, name)
                if beyond is not None:
                    moved = (*places[:group], beyond, *places[group + 1 :])
                    moves.append((moved, [(way, name, group) for way in found]))
            for moved, longer in moves:
                if sum(ends) - sum(moved) <= rest:
                    after[moved] = (after.get(moved, []) + longer)[:2]
        ways = after
    return [_by_group(way, len(ends)) for way in ways.get(tuple(ends), [])]


def _by_group(way: _Way, groups: int) -> list[tuple[str, ...]]:
    names: list[list[str]] = [[] for _ in range(groups)]
    while way is not None:
        way, name, group = way
        names[group].append(name)
    return [tuple(reversed(group)) for group in names]
