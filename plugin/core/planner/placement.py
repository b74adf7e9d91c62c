"""Orders the hosts of a new layout so that the fewest bytes cross between hosts.

Ranks of a host stay neighbours, so a layout has *slots*: places in the order of hosts, each with a
number of ranks. Each host holds a part of a slot's bytes; the rest crosses. The best order is a
linear assignment of hosts to slots. The choice among replicas of a byte does not affect it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm

import numpy as np
import numpy.typing as npt

from scalai.core.degrees.degrees import Degrees
from scalai.core.errors import RefusedError, UsageError
from scalai.core.job.membership import LOST, Assignment, Place
from scalai.core.planner.columns import Layout, Workload
from scalai.core.planner.overlaps import Overlap, needed_and_held, overlaps_of
from scalai.core.planner.reconfiguration import Hosts
from scalai.core.planner.shape import ModelShape
from scalai.core.tensors.collection import Columns

EXACT_HOSTS = 128
"""Most hosts for an exact assignment; above it is greedy, with a bound."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An order of hosts.

    Attributes:
        hosts: Hosts in the order of the ranks, with their numbers of ranks.
        moves: Bytes to another host.
        unplaced_moves: Bytes to another host in the given order.
        least_moves: Lower bound over all orders; equals ``moves`` for an exact assignment.
        needed: Bytes wanted by the hosts, each once a host.
    """

    hosts: Hosts
    moves: int
    unplaced_moves: int
    least_moves: int
    needed: int


def place_by(
    overlaps: Sequence[Overlap],
    before_hosts: Hosts,
    after_hosts: Hosts,
    *,
    devices: Mapping[str, int] | None = None,
    lost: frozenset[str] = frozenset(),
    exact_hosts: int = EXACT_HOSTS,
) -> Placed:
    """Return the order of the new hosts with the fewest crossing bytes.

    A host takes any slot within its devices. Among equal orders the one with the most unmoved hosts
    wins, up to ``exact_hosts``; the given order wins over any equal one.

    Args:
        overlaps: Common boxes of ranks of the old and the new layout.
        after_hosts: Initial order, such as the order of joining. A host without ranks may replace
            one with ranks.
        devices: Number of devices of each host; None: its number of ranks.
        lost: Old hosts without their memory.
        exact_hosts: Most hosts for an exact assignment; above it is greedy, within hosts of one
            size.

    Raises:
        UsageError: Too few devices for a host's ranks.
    """
    slots, names = [count for _, count in after_hosts], [name for name, _ in after_hosts]
    room = dict(after_hosts)
    room |= {name: size for name, size in (devices or {}).items() if name in room}
    for name, count in after_hosts:
        if count > room[name]:
            raise UsageError(f"{name} has {room[name]} devices for {count} ranks; give it fewer.")
    old_names = [name for name, _ in before_hosts]
    number = {name: place for place, name in enumerate(old_names)}
    before = np.repeat(
        [-1 if name in lost else number[name] for name in old_names],
        [count for _, count in before_hosts],
    )
    after = np.repeat(np.arange(len(slots)), slots)
    needed, common = needed_and_held(overlaps, before, after, len(slots), len(old_names))
    held = np.zeros((len(slots), len(names)), dtype=np.int64)
    for place, name in enumerate(names):
        if name in number:
            held[:, place] = common[:, number[name]]
    rooms = np.array([room[name] for name in names])
    is_allowed = rooms[None, :] >= np.array(slots)[:, None]
    order, most = _assign(held, is_allowed, rooms, exact_hosts)
    total = int(needed.sum())
    kept = int(held[np.arange(len(slots)), order].sum())
    given = int(np.trace(held))
    hosts = tuple((names[place], count) for place, count in zip(order.tolist(), slots, strict=True))
    return Placed(hosts, total - kept, total - given, total - most, total)


def _assign(
    held: npt.NDArray[np.int64], is_allowed: npt.NDArray[np.bool_], rooms: Columns, exact_hosts: int
) -> tuple[Columns, int]:
    """Return the host of each slot, and an upper bound of kept bytes over all assignments."""
    count = len(held)
    given = np.arange(count)
    gain = np.where(is_allowed, held, 0)
    if count <= exact_hosts:
        # Ties: prefer more unmoved hosts.
        worth = gain * (count + 1) + np.eye(count, dtype=np.int64)
        # A forbidden pair costs more than the largest total gain.
        chosen = assignment(np.where(is_allowed, worth, -count * int(worth.max(initial=0)) - 1))
        most = int(held[given, chosen].sum())
    else:
        chosen = given.copy()
        for size in np.unique(rooms):
            members = np.flatnonzero(rooms == size)
            chosen[members] = members[_greedy(held[np.ix_(members, members)])]
        most = min(int(gain.max(axis=1).sum()), int(gain.max(axis=0).sum()))
    if int(held[given, chosen].sum()) <= int(np.trace(held)):
        chosen = given
    return chosen, most


def assignment(gain: npt.NDArray[np.int64]) -> Columns:
    """Return the column of each row of a square table, each once, with the largest sum.

    Source: the Hungarian method with potentials, one shortest augmenting path a row (Jonker and
    Volgenant, Computing 38, 1987, without its initial reductions). Cubic in the number of rows.
    """
    count = len(gain)
    cost = int(gain.max(initial=0)) - gain
    row_price = np.zeros(count + 1, dtype=np.int64)
    column_price = np.zeros(count + 1, dtype=np.int64)
    # Column ``count`` stands for the row in progress.
    row_of = np.full(count + 1, -1, dtype=np.int64)
    far = np.iinfo(np.int64).max
    for row in range(count):
        row_of[count] = row
        column = count
        distance = np.full(count, far, dtype=np.int64)
        came_from = np.full(count, count, dtype=np.int64)
        done = np.zeros(count + 1, dtype=bool)
        while row_of[column] >= 0:
            done[column] = True
            here = int(row_of[column])
            reached = cost[here] - row_price[here] - column_price[:count]
            is_open = ~done[:count]
            nearer = is_open & (reached < distance)
            distance[nearer], came_from[nearer] = reached[nearer], column
            step_to = int(np.argmin(np.where(is_open, distance, far)))
            step = distance[step_to]
            row_price[row_of[done]] += step
            column_price[done] -= step
            distance[is_open] -= step
            column = step_to
        while column != count:
            back = int(came_from[column])
            row_of[column] = row_of[back]
            column = back
    chosen = np.empty(count, dtype=np.int64)
    chosen[row_of[:count]] = np.arange(count)
    return chosen


def _greedy(held: npt.NDArray[np.int64]) -> Columns:
    """Take the largest entries with free row and column first; the rest stay in order. Keeps at
    least half of the optimum."""
    count = len(held)
    chosen = np.full(count, -1, dtype=np.int64)
    is_taken = np.zeros(count, dtype=bool)
    rows, columns = np.nonzero(held)
    for entry in np.argsort(-held[rows, columns], kind="stable").tolist():
        row, column = int(rows[entry]), int(columns[entry])
        if chosen[row] < 0 and not is_taken[column]:
            chosen[row], is_taken[column] = column, True
    chosen[chosen < 0] = np.flatnonzero(~is_taken)
    return chosen


KNOWN_CHANGES = 16
"""Changes with cached results."""
WIDTH = 4096
"""Width of an unknown model's layer: divisible enough for any degree of data parallelism."""
FINENESS = 8
"""Most layers by stage of an unknown model."""
WORTH = 0.01
"""Least saved share of the wanted bytes for a change of order; below it the first rank, with its
logs and files, stays on its host."""
MOST_PAIRS = 1 << 15
"""Most pairs of host and replica. Above, the order of joining stays: the whole job would wait for
the computation, a good part of a second."""


def make_place(work: Workload | None, sharding: Callable[[int], int]) -> Place:
    """Return a function to order the hosts of an assignment.

    It returns the same assignment if no other order is worth it. Ranks of a host stay neighbours;
    only hosts with equal slots change places.

    Args:
        work: Computation of a step; None: unknown, or not modelled.
        sharding: Sharding (``columns.py``) by number of ranks.
    """

    @lru_cache(maxsize=KNOWN_CHANGES)
    def overlaps(before: Degrees, after: Degrees) -> tuple[tuple[Overlap, ...], bool]:
        """Return the overlaps; True: of the job's own model."""
        layouts = [Layout(each, 1, sharding=sharding(each.world_size)) for each in (before, after)]
        if work is not None:
            try:
                return overlaps_of(work, *layouts), True
            except RefusedError:  # a layout unknown to the formulas
                pass
        return overlaps_of(_even_model(before, after), *layouts), False

    @lru_cache(maxsize=KNOWN_CHANGES)
    def placed(
        ran: Hosts, before: Degrees, hosts: Hosts, after: Degrees, slots: Hosts
    ) -> tuple[Placed, bool]:
        found, is_own = overlaps(before, after)
        return place_by(found, ran, hosts, devices=dict(slots), lost=frozenset({LOST})), is_own

    def place(target: Assignment, ran: Assignment, slots: Hosts) -> Assignment:
        held, wanted = (tuple(w for w in each.workers if w[1]) for each in (ran, target))
        is_as_before = held == wanted and ran.degrees == target.degrees
        if is_as_before or not dict(held).keys() & dict(slots).keys():
            return target
        if len(wanted) * ran.degrees.dp * ran.degrees.cp > MOST_PAIRS:
            return target
        best, is_own = placed(held, ran.degrees, target.workers, target.degrees, slots)
        if best.unplaced_moves - best.moves <= WORTH * best.needed:
            return target
        if not _is_settled(best.hosts, target.workers, dict(slots)):
            return target
        reason = f"{target.reason}; hosts placed: {_saved(best, is_own)}"
        return replace(target, workers=best.hosts, reason=reason)

    return place


def _is_settled(hosts: Hosts, given: Hosts, slots: Mapping[str, int]) -> bool:
    """Whether only hosts with equal slots change places: assigning ranks in this order then gives
    the same result, without another change."""
    return [slots.get(name) for name, _ in hosts] == [slots.get(name) for name, _ in given]


def _saved(best: Placed, is_own: bool) -> str:
    if is_own:
        return f"{best.moves} bytes cross, {best.unplaced_moves} in the order of joining"
    share, before = best.moves / best.needed, best.unplaced_moves / best.needed
    return f"{share:.1%} of what is wanted crosses, {before:.1%} in the order of joining"


def _even_model(before: Degrees, after: Degrees) -> Workload:
    """Return a model of equal layers, cut evenly by both degrees."""
    heads = lcm(before.tp, after.tp)
    chunks = before.pp * before.vpp, after.pp * after.vpp
    layers = min(lcm(*chunks), FINENESS * max(chunks))
    size = -(-WIDTH // heads)
    hidden = heads * size
    experts = lcm(before.ep, after.ep) if max(before.ep, after.ep) > 1 else 0
    shape = ModelShape(
        layers=layers, hidden=hidden, heads=heads, kv_groups=heads, head_dim=size, ffn=4 * hidden,
        vocab=heads, seq=1, has_bias=False, has_norm_bias=False, experts=experts,
        moe_layers=layers if experts else 0, top_k=1 if experts else 0,
        expert_ffn=4 * hidden if experts else 0,
    )  # fmt: skip
    return Workload(shape, 1)
