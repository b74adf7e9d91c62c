"""Measured tables of a kind of job: seconds of a step by placement and batch, gradient noise by
progress. The simulator alone reads them; a policy sees what a job has run of them."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from csv import DictReader
from dataclasses import dataclass, field
from math import inf

import numpy as np

from scalai.core.errors import RefusedError

Placement = tuple[int, ...]
"""Devices on each host, of the hosts with any."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Devices and global batch that a person asked for."""

    devices: int
    batch: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Allowed sizes of a job, stated by a person.

    Attributes:
        devices: Least and most devices.
        batch: Least and most global batch; both alike: the batch is constant.
        local: Least and most samples of one pass of a device.
    """

    devices: tuple[int, int]
    batch: tuple[int, int]
    local: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of a training at one batch: the steps made at its end, and its gradient noise."""

    steps: float
    sqr: float
    var: float


Curve = tuple[tuple[int, float, float], ...]
"""Local batch, seconds of a step, seconds of it in synchronization; ascending."""


@dataclass(frozen=True, slots=True)
class Application:
    """A kind of job by its measured tables.

    Progress counts steps of the smallest batch. Between measured local batches, hosts and devices
    all is linear, along equal devices a host; the published runs triangulated these points.

    Attributes:
        ends: Progress at the end of each epoch, ascending; the last ends the job.
        epochs: By global batch, the epochs of a training at it.
        placed: Curve by placement, of its smallest rotation.
        sized: Curve by (hosts, devices), the mean of its placements.
    """

    name: str
    limits: Limits
    ends: tuple[float, ...]
    epochs: Mapping[int, tuple[Epoch, ...]]
    placed: Mapping[Placement, Curve]
    sized: Mapping[tuple[int, int], Curve]
    _steps: dict[tuple[Placement, int], tuple[float, float]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _noise: dict[tuple[int, int], tuple[float, float]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def unit(self) -> int:
        """Global batch whose steps count progress."""
        return min(self.epochs)

    @property
    def length(self) -> float:
        return self.ends[-1]

    def step_s(self, placement: Placement, local: int) -> tuple[float, float]:
        """Return the seconds of a step with one pass, and those of its synchronization."""
        key = (placement, local)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._measured(placement, local)
        return found

    def has(self, placement: Placement, local: int) -> bool:
        """Return whether the tables reach to such a step."""
        try:
            self.step_s(placement, local)
        except RefusedError:
            return False
        return True

    def noise(self, batch: int, epoch: int) -> tuple[float, float]:
        """Return square and variance of the gradient at a batch in an epoch."""
        key = (batch, epoch)
        found = self._noise.get(key)
        if found is None:
            low, high, part = self._around(batch)
            a, b = self.epochs[low][epoch], self.epochs[high][epoch]
            found = (a.sqr + part * (b.sqr - a.sqr), a.var + part * (b.var - a.var))
            self._noise[key] = found
        return found

    def steps_until(self, batch: int, epoch: int) -> float:
        """Return the steps at a batch that end with an epoch, counted from 0."""
        low, high, part = self._around(batch)
        a, b = self.epochs[low][epoch].steps, self.epochs[high][epoch].steps
        return a + part * (b - a)

    def _around(self, batch: int) -> tuple[int, int, float]:
        sizes = sorted(self.epochs)
        if not sizes[0] <= batch <= sizes[-1]:
            raise RefusedError(
                f"{self.name}: a batch of {batch} lies outside of the measured {sizes[0]} to "
                f"{sizes[-1]}."
            )
        low = sizes[bisect_right(sizes, batch) - 1]
        high = next(size for size in sizes if size >= batch)
        return low, high, 0.0 if low == high else (batch - low) / (high - low)

    def _measured(self, placement: Placement, local: int) -> tuple[float, float]:
        turns = [placement[at:] + placement[:at] for at in range(len(placement))]
        curve = self.placed.get(min(turns))
        if curve is not None:
            if not curve[0][0] <= local <= curve[-1][0]:
                raise RefusedError(
                    f"{self.name} on {placement}: {local} samples a device lie outside of the "
                    f"measured {curve[0][0]} to {curve[-1][0]}."
                )
            return _on(curve, local)
        hosts = min(len(placement), max(hosts for hosts, _ in self.sized))
        return self._between_hosts(hosts, max(sum(placement), hosts), local)

    def _between_hosts(self, hosts: int, devices: int, local: int) -> tuple[float, float]:
        """Interpolate along equal devices a host, then along devices."""
        known = sorted({h for h, _ in self.sized})
        low = known[bisect_right(known, hosts) - 1]
        high = next((h for h in known if h >= hosts), low)
        if low == high:
            return self._between_devices(low, devices, local)
        part = (hosts - low) / (high - low)
        a = self._between_devices(low, devices * low / hosts, local)
        b = self._between_devices(high, devices * high / hosts, local)
        return a[0] + part * (b[0] - a[0]), a[1] + part * (b[1] - a[1])

    def _between_devices(self, hosts: int, devices: float, local: int) -> tuple[float, float]:
        known = sorted(n for h, n in self.sized if h == hosts)
        at = min(max(devices, known[0]), known[-1])
        low = known[bisect_right(known, at) - 1]
        high = next(n for n in known if n >= at)
        a = _on(self.sized[hosts, low], local)
        if low == high:
            return a
        b = _on(self.sized[hosts, high], local)
        part = (at - low) / (high - low)
        return a[0] + part * (b[0] - a[0]), a[1] + part * (b[1] - a[1])


def _on(curve: Curve, local: int) -> tuple[float, float]:
    """Interpolate along local batches; beyond the measured ones the outer part goes on."""
    at = bisect_right(curve, local, key=lambda row: row[0]) - 1
    at = min(max(at, 0), len(curve) - 2)
    (n, step, sync), (n2, step2, sync2) = curve[at], curve[at + 1]
    part = (local - n) / (n2 - n)
    return step + part * (step2 - step), sync + part * (sync2 - sync)


def read_application(
    name: str,
    placements: Sequence[str],
    scalability: Sequence[str],
    validation: Mapping[int, Sequence[str]],
    *,
    epochs: int,
    most_devices: int = 64,
    local: tuple[int, int] | None = None,
) -> Application:
    """Return a kind of job, of tables of comma-separated values with headers.

    Args:
        placements: ``placement,local_bsz,step_time,sync_time``; digits are devices on each host.
        scalability: ``num_nodes,num_replicas,local_bsz,step_time,sync_time``.
        validation: By global batch, ``progress,iteration,grad_sqr,grad_var`` of each epoch.
        epochs: Epochs that a job trains.
        local: Least and most samples of a pass; None: the measured range.
    """
    placed: dict[Placement, list[tuple[int, float, float]]] = {}
    groups: dict[tuple[int, int], dict[int, list[tuple[float, float]]]] = {}
    for row in DictReader(placements):
        where = tuple(int(digit) for digit in row["placement"])
        n, step, sync = int(row["local_bsz"]), float(row["step_time"]), float(row["sync_time"])
        placed.setdefault(where, []).append((n, step, sync))
        groups.setdefault((len(where), sum(where)), {}).setdefault(n, []).append((step, sync))
    for row in DictReader(scalability):
        size = int(row["num_nodes"]), int(row["num_replicas"])
        n, step, sync = int(row["local_bsz"]), float(row["step_time"]), float(row["sync_time"])
        groups.setdefault(size, {}).setdefault(n, []).append((step, sync))
    sized = {
        size: tuple(
            (n, float(np.mean([s for s, _ in rows])), float(np.mean([s for _, s in rows])))
            for n, rows in sorted(by_local.items())
        )
        for size, by_local in groups.items()
    }
    tables = {batch: list(DictReader(lines)) for batch, lines in sorted(validation.items())}
    if not placed or not tables or any(len(rows) < epochs for rows in tables.values()):
        raise RefusedError(
            f"{name}: give measured placements, and {epochs} epochs for each validated batch."
        )
    ends = [inf] * epochs
    for rows in tables.values():
        ends = [min(end, float(row["progress"])) for end, row in zip(ends, rows, strict=False)]
    every = [n for curve in placed.values() for n, _, _ in curve]
    passes = local or (min(every), max(every))
    sizes = sorted(tables)
    return Application(
        name,
        Limits((1, min(most_devices, sizes[-1] // passes[0])), (sizes[0], sizes[-1]), passes),
        tuple(ends),
        {
            batch: tuple(
                Epoch(float(row["iteration"]), float(row["grad_sqr"]), float(row["grad_var"]))
                for row in rows
            )
            for batch, rows in tables.items()
        },
        {where: tuple(sorted(rows)) for where, rows in placed.items()},
        sized,
    )
