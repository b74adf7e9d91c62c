"""Which parameters the unnamed state of an optimizer belongs to, found by what fits.

Given is that every group keeps the module's order. Parameters may be in no group: frozen ones.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

Advance = Callable[[int, int, str], int | None]
"""(group, place, name) -> the place behind a parameter that begins there; None: it does not fit."""

_Way = tuple["_Way", str, int] | None
"""A chain of parameters and their groups, the last one first."""


def match_names(
    names: Sequence[str], sizes: Sequence[int], ends: Sequence[int], advance: Advance
) -> list[list[tuple[str, ...]]]:
    """Return up to two ways to deal parameters to groups, each way by group the names.

    Args:
        names: The parameters, in the module's order.
        sizes: How far each moves a group's place.
        ends: By group the place at which it is full; it begins at 0.
        advance: What fits where.
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
