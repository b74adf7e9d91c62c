"""Rates of a job by devices and batch, predicted from its own measured steps.

A step's time: compute grows linearly with the local batch, synchronization with the devices, on one
host and on several apart, and both overlap by one exponent. The statistical efficiency of a batch
follows from the gradient noise.

Source:
    Pollux (Qiao et al., OSDI 2021), sections 3.1 and 3.2, "goodput"; differs in: a closed fit in
    place of a search, and a prior for several hosts from the size that a person asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from scalai.core.cluster.application import Limits
from scalai.core.cluster.question import Floats

Ints = npt.NDArray[np.int64]
Rows = Mapping[tuple[int, int, float], tuple[float, float]]
"""Seconds of a step and of its synchronization, by (hosts, devices, local batch); a job of constant
batch may count it in global batches."""
_OVERLAPS = np.array([1.0, 1.5, 2.0, 3.0, 5.0, 10.0])
"""Exponents: 1 sums compute and synchronization, 10 hides the shorter one."""
_BATCHES = 40
"""Batches tried for each size."""
_ASKED_EFFICIENCY = 0.65
"""Usual part of ideal speed at the size that a person asks for."""
_FAR = 0.15
_FAR_BEYOND = 0.4
"""Priors: synchronization over compute on several hosts, at the size asked for; on two, where a
person asked for one."""
_GROWTH = 0.03
"""Prior: growth of synchronization with each further device, relative."""


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds of a step: ``fixed + each·local`` of compute; ``(base, growth)`` of synchronization
    on one host and on several; both as one sum of powers."""

    fixed: float
    each: float
    near: tuple[float, float]
    far: tuple[float, float]
    overlap: float

    def compute(self, local: Floats) -> Floats:
        return self.fixed + self.each * local

    def sync(self, hosts: Ints, devices: Ints) -> Floats:
        more = np.maximum(devices - 2, 0)
        far = self.far[0] + self.far[1] * more
        near = self.near[0] + self.near[1] * more
        found: Floats = np.where(hosts > 1, far, np.where(devices > 1, near, 0.0))
        return found

    def step(self, hosts: Ints, devices: Ints, local: Floats) -> Floats:
        """Seconds of a step with one pass."""
        both: Floats = (
            self.compute(local) ** self.overlap + self.sync(hosts, devices) ** self.overlap
        ) ** (1.0 / self.overlap)
        return both


def usual_size(asked: int, per_host: int) -> int:
    """Return the devices on several hosts at which a job's synchronization is guessed."""
    return max(asked, 2 * per_host)


def fit(rows: Rows, asked: int, per_host: int, usual: tuple[float, int]) -> StepModel:
    """Return the model of a job's measured steps, at least one.

    Without a local batch to compare, half of compute grows with it. Without a step on several
    hosts their synchronization is expected by the size that a person asked for: half of the compute
    there, or, where that is one host, all of the compute on the next one.

    Args:
        asked: Devices that a person asked for.
        usual: Local batch and passes of a step with ``usual_size`` devices.
    """
    keys = np.array(list(rows), dtype=np.float64)
    hosts, devices, local = keys[:, 0], keys[:, 1], keys[:, 2]
    step, exposed = np.array(list(rows.values()), dtype=np.float64).T
    fixed, each = _line(local, step - exposed)
    compute = np.maximum(fixed + each * local, 1e-9)
    # By overlap and row: synchronization whose sum with the compute is the measured step.
    power = _OVERLAPS[:, None]
    rest = np.maximum(step**power - compute**power, 0.0) ** (1.0 / power)
    more = np.maximum(devices - 2, 0.0)
    near = _growth(more, rest, (hosts == 1) & (devices > 1))
    far = _growth(more, rest, hosts > 1)
    if near is None:
        near = far / 2 if far is not None else np.zeros((2, len(_OVERLAPS)))
    if far is None:
        hoped = _expected(fixed, each, asked, per_host, usual)
        far = np.maximum(np.array(hoped)[:, None], near * 1.1)
    base, growth = (np.where(hosts > 1, far[part][:, None], near[part][:, None]) for part in (0, 1))
    sync = np.where(devices > 1, base + growth * more, 0.0)
    said = (compute**power + sync**power) ** (1.0 / power)
    wrong = (np.log(said / step) ** 2).mean(axis=1) + 1e-4 * (_OVERLAPS - 1) ** 2
    best = int(wrong.argmin())
    return StepModel(
        fixed,
        each,
        (float(near[0, best]), float(near[1, best])),
        (float(far[0, best]), float(far[1, best])),
        float(_OVERLAPS[best]),
    )


def _expected(
    fixed: float, each: float, asked: int, per_host: int, usual: tuple[float, int]
) -> tuple[float, float]:
    part = _FAR_BEYOND if asked <= per_host else _FAR
    local, passes = usual
    compute = passes * (fixed + each * local)
    base = compute * part / (1 + _GROWTH * (usual_size(asked, per_host) - 2))
    return base, base * _GROWTH


def _line(x: Floats, y: Floats) -> tuple[float, float]:
    """Fit ``y = a + b·x``, by relative errors, with both parts not negative."""
    weight = 1.0 / np.maximum(y, 1e-9) ** 2
    total, sx, sy = weight.sum(), (weight * x).sum(), (weight * y).sum()
    sxx, sxy = (weight * x * x).sum(), (weight * x * y).sum()
    spread = total * sxx - sx * sx
    if spread <= 1e-9 * total * sxx:
        mean = float(sy / total)
        return mean / 2, mean / 2 / float(x[0])
    b = (total * sxy - sx * sy) / spread
    a = (sy - b * sx) / total
    if b <= 0:
        return float(sy / total), 0.0
    return (0.0, float(sxy / sxx)) if a < 0 else (float(a), float(b))


def _growth(more: Floats, rest: Floats, is_of: npt.NDArray[np.bool_]) -> Floats | None:
    """Fit ``rest = base + growth·more`` of some rows, for each overlap; None: there are none."""
    if not is_of.any():
        return None
    x, y = more[is_of], rest[:, is_of]
    mean = y.mean(axis=1)
    spread = x - x.mean()
    if not spread.any():
        base = mean / (1 + _GROWTH * x[0])
        return np.stack([base, base * _GROWTH])
    b = (y * spread).sum(axis=1) / (spread * spread).sum()
    a = mean - b * x.mean()
    through = (y * x).sum(axis=1) / (x * x).sum()
    base = np.where(b < 0, mean, np.where(a < 0, 0.0, a))
    growth = np.where(b < 0, 0.0, np.where(a < 0, through, b))
    return np.stack([base, growth])


@dataclass(frozen=True, slots=True)
class Noise:
    """Square and variance of the gradient at the batch ``unit``, whose steps count progress."""

    sqr: float
    var: float
    unit: int

    def gain(self, batch: Floats) -> Floats:
        """Return a step's progress at a batch, in steps of ``unit``."""
        below = self.var * self.unit / batch + self.sqr
        found: Floats = np.where(below > 0, (self.var + self.sqr) / below, batch / self.unit)
        return found


@dataclass(frozen=True, slots=True)
class Pass:
    """A step's form: samples of a pass of a device, and passes of a step."""

    local: int
    passes: int


@dataclass(frozen=True, slots=True)
class Speeds:
    """Predicted rates of one job.

    Attributes:
        batch: A constant global batch; None: the best within the limits.
    """

    model: StepModel
    noise: Noise
    limits: Limits
    batch: int | None = None

    def rates(self, per_host: int) -> Floats:
        """Return progress a second by devices, 0 to the most, on the fewest hosts."""
        least, most = self.limits.devices
        devices = np.arange(1, most + 1)
        rate, _, _ = self._best(-(-devices // per_host), devices)
        rate[: least - 1] = 0.0
        return np.concatenate([[0.0], rate])

    def form(self, hosts: int, devices: int) -> Pass:
        """Return the fastest form of a step."""
        _, local, passes = self._best(np.array([hosts]), np.array([devices]))
        return Pass(int(local[0]), int(passes[0]))

    def _best(self, hosts: Ints, devices: Ints) -> tuple[Floats, Ints, Ints]:
        grid = _grid(self.limits, self.noise.unit, self.batch, tuple(devices.tolist()))
        samples, model = grid.samples, self.model
        compute = model.compute(samples)
        sync = model.sync(hosts, devices)[:, None]
        step = (compute**model.overlap + sync**model.overlap) ** (1.0 / model.overlap)
        seconds = step + (grid.passes - 1) * compute
        rate = np.where(grid.is_allowed, self.noise.gain(grid.batch) / seconds, 0.0)
        best = rate.argmax(axis=1)
        at = np.arange(len(devices))
        return rate[at, best], grid.local[at, best], grid.passes[at, best]


@dataclass(frozen=True, slots=True)
class _Grid:
    """Forms of steps by devices and batch."""

    local: Ints
    passes: Ints
    samples: Floats
    batch: Floats
    is_allowed: npt.NDArray[np.bool_]


@lru_cache(maxsize=4096)
def _grid(limits: Limits, unit: int, batch: int | None, devices: tuple[int, ...]) -> _Grid:
    (least, most), (low, high) = limits.batch, limits.local
    n = np.array(devices)
    if batch is None:
        first = np.minimum(np.maximum(least, low * n), most)
        part = np.linspace(0.0, 1.0, _BATCHES)
        wanted = first[:, None] * (most / first[:, None]) ** part
    else:
        wanted = np.full((len(n), 1), float(batch))
    local, passes = _forms(wanted, n[:, None], unit, most, high)
    total = (n[:, None] * local * passes).astype(np.float64)
    is_allowed = (local >= low) & (local <= high) & (total <= most)
    return _Grid(local, passes, local.astype(np.float64), total, is_allowed)


def _forms(wanted: Floats, devices: Ints, unit: int, most: int, high: int) -> tuple[Ints, Ints]:
    """Split batches into passes of equal samples; a lone device above ``unit`` makes two,
    because the gradient noise needs them."""
    each = np.ceil(wanted / devices - 1e-8)
    passes = np.ceil(each / high - 1e-8)
    passes = np.where((devices == 1) & (wanted > unit), np.maximum(passes, 2), passes)
    local = np.ceil(each / passes - 1e-8)
    local = np.minimum(local, most // (devices * passes))
    return local.astype(np.int64), passes.astype(np.int64)


def form_of(batch: int, devices: int, limits: Limits, unit: int) -> Pass:
    """Return the form of a step with a constant batch."""
    local, passes = _forms(
        np.array([[float(batch)]]), np.array([[devices]]), unit, limits.batch[1], limits.local[1]
    )
    return Pass(int(local[0, 0]), int(passes[0, 0]))


def first_rates(asked: int, allowed: tuple[int, int]) -> Floats:
    """Return rates of a job without a step, relative to one device, from the size asked for."""
    least, most = allowed
    devices = np.arange(0, most + 1, dtype=np.float64)
    if asked > 1:
        drag = (1 / _ASKED_EFFICIENCY - 1) / (asked - 1)
    else:
        drag = 1.0
    rates: Floats = devices / (1 + drag * np.maximum(devices - 1, 0))
    rates[:least] = 0.0
    return rates
