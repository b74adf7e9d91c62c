"""Bytes moved by a change from one layout to another, and its pause of training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scalai.core.errors import UsageError
from scalai.core.planner.columns import Layout, Workload
from scalai.core.planner.devices import HOST_COPY, Device
from scalai.core.planner.overlaps import Overlap, by_place, joined, overlaps_of, summed
from scalai.core.planner.step_time import DEFAULT, Coefficients
from scalai.core.tensors.boxes import expand
from scalai.core.tensors.collection import Columns
from scalai.core.tensors.plan import BATCHES, batches_of

PHASES = ("quiesce", "snapshot", "relaunch", "move", "restore")
"""Parts of the pause, in order; a restore begins with the move (``beside_s``)."""
STILL = ("quiesce", "drain", "snapshot", "commit", "relaunch", "plan")
"""Phases, predicted or reported, of the standstill before the move."""
DATA_PLANE = 0.61e9
"""Bytes/s into or out of a host, sealed: a loopback connection on two cores (docs/security.md)."""
RELAUNCH_S = 79.0
"""Seconds from the end of the old workers to the first step, without the state's transfer: Tenplex
(arXiv 2312.05181), figure 12 less figure 14, GPT-3 XL from 8 to 16 GPUs: 87.2 - 8.5 s. After its
first change a job uses its own."""

Hosts = tuple[tuple[str, int], ...]
"""Host names with their numbers of ranks, in the order of the ranks."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates in bytes/s, and seconds of a relaunch, absent from the table of devices."""

    host_copy: float = HOST_COPY
    data_plane: float = DATA_PLANE
    relaunch_s: float = RELAUNCH_S


@dataclass(frozen=True, eq=False, slots=True)
class Reconfiguration:
    """The cost of one change.

    Attributes:
        before: None: a first start.
        hosts: Names of all hosts, the old ones first.
        host_bytes: Bytes from host to host, [hosts, hosts]; the diagonal stays on its host. Hosts
            with the same bytes give equal parts.
        stays: Bytes that stay on their hosts, each once a host.
        stays_on_device: Of these, bytes already on the device, summed over devices.
        moves: Bytes to another host.
        missing: Bytes on no remaining host; they come from an older state.
        seconds: Seconds by ``PHASES``.
        beside_s: Of the restore, seconds beside the move.
    """

    before: Layout | None
    after: Layout
    hosts: tuple[str, ...]
    host_bytes: npt.NDArray[np.int64]
    stays: int
    stays_on_device: int
    moves: int
    missing: int
    seconds: Mapping[str, float]
    beside_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds without a step."""
        return sum(self.seconds.values()) - self.beside_s

    @property
    def needed(self) -> int:
        """Bytes wanted by the new hosts, each once a host."""
        return self.stays + self.moves + self.missing


def spread(ranks: int, per_host: int, names: Sequence[str] = ()) -> Hosts:
    """Fill hosts with ranks in order; hosts without a name are called ``host-<number>``.

    Raises:
        UsageError: No rank, or hosts without devices.
    """
    if ranks < 1 or per_host < 1:
        raise UsageError(f"{ranks} ranks on hosts of {per_host} devices: both must be 1 or more.")
    counts = [min(per_host, ranks - first) for first in range(0, ranks, per_host)]
    made = (f"host-{number}" for number in range(len(counts) + len(names)))
    others = [name for name in made if name not in names]
    return tuple(zip([*names, *others], counts, strict=False))


def reconfiguration(
    work: Workload,
    device: Device,
    before: Layout | None,
    after: Layout,
    before_hosts: Hosts | None = None,
    after_hosts: Hosts | None = None,
    *,
    lost: frozenset[str] = frozenset(),
    relaunch_s: float | None = None,
    step_s: float = 0.0,
    rates: Rates | None = None,
    coefficients: Coefficients = DEFAULT,
) -> Reconfiguration:
    """Return the cost of a change.

    Args:
        before: Running layout; None: a first start.
        before_hosts, after_hosts: Hosts of the ranks; None: hosts of ``device.per_host`` filled in
            order, old hosts first.
        lost: Old hosts without their memory.
        relaunch_s: Measured seconds of a relaunch; None: from ``rates``.
        step_s: Seconds of an old step; at most one ends first.
        rates: Measured rates of hosts; None: the defaults.
        coefficients: Shares of the network's bandwidth reached by collectives.

    Raises:
        RefusedError: A layout does not cut the model.
        UsageError: The hosts' ranks differ from the layout's.
    """
    rates = rates or Rates()
    relaunch_s = rates.relaunch_s if relaunch_s is None else relaunch_s
    if before is None:
        hosts = _checked(after, after_hosts or spread(after.degrees.world_size, device.per_host))
        names = tuple(name for name, _ in hosts)
        nothing = np.zeros((len(names), len(names)), dtype=np.int64)
        seconds = {**dict.fromkeys(PHASES, 0.0), "relaunch": relaunch_s}
        return Reconfiguration(None, after, names, nothing, 0, 0, 0, 0, seconds)
    old = _checked(before, before_hosts or spread(before.degrees.world_size, device.per_host))
    kept = [name for name, _ in old if name not in lost]
    new = _checked(after, after_hosts or spread(after.degrees.world_size, device.per_host, kept))
    overlaps = overlaps_of(work, before, after)
    return cost_of(
        before, after, old, new, overlaps, device=device, lost=lost, rates=rates,
        relaunch_s=relaunch_s, step_s=step_s, coefficients=coefficients,
    )  # fmt: skip


def cost_of(
    before: Layout,
    after: Layout,
    old: Hosts,
    new: Hosts,
    overlaps: Sequence[Overlap],
    *,
    device: Device,
    lost: frozenset[str],
    rates: Rates,
    relaunch_s: float,
    step_s: float,
    coefficients: Coefficients,
) -> Reconfiguration:
    """Return the cost from known overlaps; see ``reconfiguration``."""
    names = tuple(dict.fromkeys([name for name, _ in (*old, *new)]))
    number = {name: place for place, name in enumerate(names)}
    gone = {number[name] for name in lost if name in number}
    before_place, after_place = _places(old, number), _places(new, number)
    before_place[np.isin(before_place, list(gone))] = -1
    count = len(names)
    matrix = np.zeros((count, count), dtype=np.int64)
    missing = 0
    for overlap in overlaps:
        flows, lacking = _flows(overlap, before_place, after_place, count)
        matrix += flows
        missing += lacking
    stays = int(np.trace(matrix))
    moves = int(matrix.sum()) - stays
    crossing = matrix - np.diag(np.diag(matrix))
    rate = min(rates.data_plane, device.network * device.per_host * coefficients.network)
    busiest = max(int(crossing.sum(axis=0).max()), int(crossing.sum(axis=1).max()))
    held = _stored(overlaps, before_place, old, number)
    wanted = _wanted_by_device(overlaps, after.degrees.world_size)
    seconds = {
        "quiesce": step_s,
        "snapshot": held / rates.host_copy,
        "relaunch": relaunch_s,
        "move": busiest / rate,
        "restore": wanted / rates.host_copy,
    }
    on_device = _on_device(overlaps, _devices(old, number, gone), _devices(new, number, set()))
    # All but the last batch of a host is restored while later ones come.
    early = 1 - 1 / batches_of(int(crossing.sum(axis=0).max()))
    beside_s = early * min(seconds["move"], seconds["restore"])
    return Reconfiguration(
        before, after, names, matrix, stays, on_device, moves, missing, seconds, beside_s
    )


def schedule(
    cost: Reconfiguration | None, measured: Mapping[str, float] | None = None, *, is_ahead: bool
) -> tuple[str, ...]:
    """Return the order of a change, a line each.

    Args:
        cost: Its bytes and predicted seconds; None: unknown.
        measured: Seconds by phase of a change of this job, as reported; instead of predictions.
        is_ahead: The next workers may be built beside the training.
    """
    known = measured or (cost.seconds if cost else {})

    def phases(*names: str) -> str:
        return ", ".join(f"{name} {known[name]:.3g} s" for name in names if known.get(name))

    ahead = "beside the training: the next workers start and build, or come up to the brink"
    late = "with the next workers' start and build" if not is_ahead else ""
    still = " ".join(filter(None, ("standing still:", phases(*STILL), late)))
    moved = "then the move, and each batch restored beside the next"
    if cost is not None and cost.moves:
        moved = (
            f"then {cost.moves / 1e9:.3g} GB cross in at most {BATCHES} batches a host, each "
            "restored beside the next"
        )
    elif cost is not None:
        moved = "then the restore; nothing crosses"
    took = phases("move", "restore")
    first = phases("proof", "first_step")
    return (
        *([ahead] if is_ahead else []),
        still,
        f"{moved}: {took}" if took else moved,
        "then the first forward and backward passes, the proof beside them; the first update waits "
        "for it" + f": {first}" * bool(first),
    )


def _checked(layout: Layout, hosts: Hosts) -> Hosts:
    ranks, world = sum(count for _, count in hosts), layout.degrees.world_size
    if len({name for name, _ in hosts}) < len(hosts):
        raise UsageError("a host stands there twice; name each once, in the order of the ranks.")
    if ranks != world:
        raise UsageError(
            f"{layout.degrees} has {world} ranks, the {len(hosts)} hosts have {ranks}; give as "
            "many as the layout has."
        )
    return tuple((name, count) for name, count in hosts if count)


def _places(hosts: Hosts, number: Mapping[str, int]) -> Columns:
    """Return the host's number of each rank, [ranks]."""
    return np.repeat([number[name] for name, _ in hosts], [count for _, count in hosts])


def _devices(hosts: Hosts, number: Mapping[str, int], gone: set[int]) -> Columns:
    """Return a number for each rank's device, the same in any layout, -1 if lost, [ranks]."""
    most = 1 << 20
    return np.concatenate(
        [
            np.arange(count) + number[name] * most
            if number[name] not in gone
            else -np.ones(count, np.int64)
            for name, count in hosts
        ]
    )


def _flows(
    overlap: Overlap, before: Columns, after: Columns, count: int
) -> tuple[npt.NDArray[np.int64], int]:
    """Return bytes from host to host, [count, count], and bytes without a giver."""
    pair, place, begin, source = by_place(overlap, before, after)
    size, cell = overlap.size_bytes[pair], overlap.first[pair]
    choices = (begin[1:] - begin[:-1])[cell]
    entry, turn = expand(choices)
    giver = source[begin[:-1][cell[entry]] + turn]
    is_here = np.zeros(len(pair), dtype=bool)
    is_here[entry[giver == place[entry]]] = True
    flat = summed(place[is_here] * (count + 1), size[is_here], count * count)
    away = ~is_here[entry]
    entry, turn, giver = entry[away], turn[away], giver[away]
    # Equal parts; the first ones give the remainder.
    part, rest = np.divmod(size[entry], choices[entry])
    flat += summed(giver * count + place[entry], part + (turn < rest), count * count)
    return flat.reshape(count, count), int(size[choices == 0].sum())


def _stored(
    overlaps: Sequence[Overlap], before: Columns, old: Hosts, number: Mapping[str, int]
) -> float:
    """Return the most bytes written by a device to its host's memory; the devices of a host share
    its bytes equally."""
    total = np.zeros(len(number), dtype=np.int64)
    for overlap in overlaps:
        held = overlap.held
        here = before[held.holder_rank] >= 0
        begin, place = joined(held.holder_cell[here], before[held.holder_rank][here], held.count)
        of_cell = summed(overlap.first, overlap.size_bytes, held.count)
        total += summed(place, np.repeat(of_cell, begin[1:] - begin[:-1]), len(number))
    return max((int(total[number[name]]) / count for name, count in old), default=0.0)


def _wanted_by_device(overlaps: Sequence[Overlap], world: int) -> int:
    """Return the most bytes wanted by one rank."""
    total = np.zeros(world, dtype=np.int64)
    for overlap in overlaps:
        of_cell = summed(overlap.second, overlap.size_bytes, overlap.wanted.count)
        total += summed(overlap.wanted.holder_rank, of_cell[overlap.wanted.holder_cell], world)
    return int(total.max())


def _on_device(overlaps: Sequence[Overlap], before: Columns, after: Columns) -> int:
    """Return the wanted bytes already on their device, summed over devices."""
    _, both = np.unique(np.concatenate([before, after]), return_inverse=True)
    places = np.ravel(both) - int((before < 0).any())
    total = 0
    for overlap in overlaps:
        pair, place, begin, source = by_place(overlap, places[: len(before)], places[len(before) :])
        cell = overlap.first[pair]
        entry, turn = expand((begin[1:] - begin[:-1])[cell])
        is_same = source[begin[:-1][cell[entry]] + turn] == place[entry]
        total += int(overlap.size_bytes[pair[entry[is_same]]].sum())
    return total
