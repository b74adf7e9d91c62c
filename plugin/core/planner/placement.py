"""Which host takes which place in the new layout, so that the fewest bytes cross between hosts.

Ranks inside a host stay next to each other, so a layout has *slots*: a place in the order of the
hosts with so many ranks. A slot needs certain bytes, of which each host holds a part; what crosses
is the sum over slots of what is needed less what the host there holds. So the best order is an
assignment, linear in pairs of slot and host. From which of several replicas a byte comes changes
nothing of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scalai.core.errors import UsageError
from scalai.core.planner.columns import Layout, Workload
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


def place_hosts(
    work: Workload,
    before: Layout,
    after: Layout,
    before_hosts: Hosts,
    after_hosts: Hosts,
    *,
    devices: Mapping[str, int] | None = None,
    lost: frozenset[str] = frozenset(),
    exact_hosts: int = EXACT_HOSTS,
) -> Placed:
    """Return the order of the new hosts in which the fewest bytes cross.

    A host takes any slot that it has the devices for. Of orders that are as good the one is taken
    that leaves most hosts where they are, where they are assigned exactly; the given one is kept
    where no other one is better, so that a job that has no reason to turn its hosts round does not.

    Args:
        after_hosts: The order to begin with, such as that of joining. A host without ranks may take
            the place of one that has some.
        devices: How many devices each host has; None: as many as it has ranks.
        lost: Hosts of before whose memory is gone.
        exact_hosts: Up to so many hosts are assigned exactly; more of them greedily, and only among
            hosts of one size.

    Raises:
        RefusedError: A layout does not cut the model.
        UsageError: Hosts that do not have the ranks, or too few devices.
    """
    overlaps = overlaps_of(work, before, after)
    return place_by(
        overlaps, before_hosts, after_hosts, devices=devices, lost=lost, exact_hosts=exact_hosts
    )


def place_by(
    overlaps: Sequence[Overlap],
    before_hosts: Hosts,
    after_hosts: Hosts,
    *,
    devices: Mapping[str, int] | None = None,
    lost: frozenset[str] = frozenset(),
    exact_hosts: int = EXACT_HOSTS,
) -> Placed:
    """Return the same where the overlaps are known."""
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
