"""Which host takes which place in the new layout, so that the fewest bytes cross between hosts.

Ranks inside a host stay next to each other, so a layout has *slots*: a place in the order of the
hosts with so many ranks. A slot needs certain bytes, of which each host holds a part; what crosses
is the sum over slots of what is needed less what the host there holds. So the best order is an
assignment, linear in pairs of slot and host. From which of several replicas a byte comes changes
nothing of it.
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
from scalai.core.planner.model import ModelShape
from scalai.core.planner.overlaps import Overlap, needed_and_held, overlaps_of
from scalai.core.planner.reconfiguration import Hosts
from scalai.core.tensors.collection import Columns

EXACT_HOSTS = 128
"""So many hosts are assigned exactly; more greedily, with a bound."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An order of hosts.

    Attributes:
        hosts: In the order of the ranks, with how many each has.
        moves: Bytes that cross to another host.
        unplaced_moves: Bytes that cross with the order that was given.
        least_moves: No order has fewer; ``moves`` where the assignment is exact.
        needed: Bytes that the hosts want, each once a host.
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
    """The order of the new hosts in which the fewest bytes cross.

    A host takes any slot that its devices suffice for. Of equal orders the one that leaves most
    hosts where they are wins, up to ``exact_hosts``; the given order wins over any equal one.

    Args:
        overlaps: Boxes that ranks of the old and the new layout have in common.
        after_hosts: Order to begin with, such as that of joining. A host without ranks may take
            the place of one with ranks.
        devices: Number of devices of each host; None: its number of ranks.
        lost: Hosts of before whose memory is gone.
        exact_hosts: Most hosts that are assigned exactly; more of them greedily, and only among
            hosts of one size.

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
    """Return the host of each slot, and no less than the most that any assignment keeps."""
    count = len(held)
    given = np.arange(count)
    gain = np.where(is_allowed, held, 0)
    if count <= exact_hosts:
        # Of two orders that keep as much, the one that leaves more hosts where they are.
        worth = gain * (count + 1) + np.eye(count, dtype=np.int64)
        # What is not allowed costs more than all else can gain.
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
    # Column ``count`` stands for the row that is being placed.
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
    """Take the largest entries first, as long as row and column are free; the rest stay in order.
    At least half of what the best assignment keeps is kept."""
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
"""Changes of which it is kept what has been computed."""
WIDTH = 4096
"""Of a layer of a model whose shape is not known: wide enough to be cut by any degree of data
parallelism."""
FINENESS = 8
"""Such a model has at most so many layers by stage, so that few numbers say all."""
WORTH = 0.01
"""Hosts change places where more than this share of what they want need not cross: for less the
first rank, with what it logs and writes, stays where it is."""
MOST_PAIRS = 1 << 15
"""Of hosts and of replicas whose parts each of them wants: more of them keep the order of joining,
because the computation, which the whole job waits for, would take a good part of a second."""


def make_place(work: Workload | None, sharding: Callable[[int], int]) -> Place:
    """Return the function that puts the hosts of an assignment in order.

    Args:
        work: What a step of the job computes; None: it is not known, or not modelled.
        sharding: What data-parallel ranks keep a part of (``columns.py``) on so many ranks.

    The returned function gives the same assignment where no other order is worth it. Ranks of a
    host stay neighbours, and only hosts with as many slots change places.
    """

    @lru_cache(maxsize=KNOWN_CHANGES)
    def overlaps(before: Degrees, after: Degrees) -> tuple[tuple[Overlap, ...], bool]:
        """Return them, and whether they are of the job's own model."""
        layouts = [Layout(each, 1, sharding=sharding(each.world_size)) for each in (before, after)]
        if work is not None:
            try:
                return overlaps_of(work, *layouts), True
            except RefusedError:  # the job has a layout that the formulas do not know
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
    """Whether hosts change places with such of as many slots alone: who assigns ranks to them in
    this order then comes to the same, and no other change follows."""
    return [slots.get(name) for name, _ in hosts] == [slots.get(name) for name, _ in given]


def _saved(best: Placed, is_own: bool) -> str:
    if is_own:
        return f"{best.moves} bytes cross, {best.unplaced_moves} in the order of joining"
    share, before = best.moves / best.needed, best.unplaced_moves / best.needed
    return f"{share:.1%} of what is wanted crosses, {before:.1%} in the order of joining"


def _even_model(before: Degrees, after: Degrees) -> Workload:
    """Return a model of equal layers that both degrees cut into equal parts."""
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
