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

import numpy as np
import numpy.typing as npt

from scalai.core.cluster.application import Limits
from scalai.core.cluster.question import Asked, Floats

Ints = npt.NDArray[np.int64]
Rows = Mapping[tuple[int, int, int], tuple[float, float]]
"""Seconds of a step and of its synchronization, by (hosts, devices, local batch)."""
OVERLAPS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Exponents: 1 sums compute and synchronization, 10 hides the shorter one."""
_BATCHES = 40
"""Batches tried for each size."""
_ASKED_EFFICIENCY = 0.65
"""Usual part of ideal speed at the size that a person asks for."""
_FAR = 0.5
"""Prior: synchronization over compute at the size asked for, on several hosts."""
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


def fit(rows: Rows, asked: Asked, limits: Limits, per_host: int) -> StepModel:
    """Return the model of a job's measured steps, at least one.

    Without a local batch to compare, half of compute grows with it. Without a step on several
    hosts their synchronization is expected by the size that a person asked for: half of the compute
    there, or, where that is one host, all of the compute on the next one.
    """
    keys = np.array(list(rows), dtype=np.float64)
    hosts, devices, local = keys[:, 0], keys[:, 1], keys[:, 2]
    step, exposed = np.array(list(rows.values()), dtype=np.float64).T
    fixed, each = _line(local, step - exposed, prior=0.5)
    compute = np.maximum(fixed + each * local, 1e-9)
    best: tuple[float, StepModel] | None = None
    for overlap in OVERLAPS:
        # Synchronization whose sum with the compute is the measured step.
        rest = np.maximum(step**overlap - compute**overlap, 0.0) ** (1.0 / overlap)
        near = _growth(devices, rest, (hosts == 1) & (devices > 1))
        far = _growth(devices, rest, hosts > 1)
        if near is None:
            near = (far[0] / 2, far[1] / 2) if far is not None else (0.0, 0.0)
        if far is None:
            far = _expected(fixed, each, asked, limits, per_host)
            far = max(far[0], near[0] * 1.1), max(far[1], near[1] * 1.1)
        model = StepModel(fixed, each, near, far, overlap)
        said = model.step(hosts.astype(np.int64), devices.astype(np.int64), local)
        wrong = float(np.mean(np.log(said / step) ** 2)) + 1e-4 * (overlap - 1) ** 2
        if best is None or wrong < best[0]:
            best = wrong, model
    assert best is not None
    return best[1]


def _expected(
    fixed: float, each: float, asked: Asked, limits: Limits, per_host: int
) -> tuple[float, float]:
    devices = max(asked.devices, 2 * per_host)
    is_near = asked.devices <= per_host
    form = form_of(asked.batch, devices, limits, 0)
    compute = form.passes * (fixed + each * form.local)
    base = compute * (1.0 if is_near else _FAR) / (1 + _GROWTH * (devices - 2))
    return base, base * _GROWTH


def _line(x: Floats, y: Floats, prior: float) -> tuple[float, float]:
    """Fit ``y = a + b·x`` with both parts not negative."""
    if len(set(x.tolist())) == 1:
        mean = float(y.mean())
        return mean * prior, mean * (1 - prior) / float(x[0])
    # Relative errors count.
    weight = 1.0 / np.maximum(y, 1e-9)
    matrix = np.stack([weight, weight * x], axis=1)
    (a, b), *_ = np.linalg.lstsq(matrix, np.ones(len(x)), rcond=None)
    if b <= 0:
        return float(y.mean()), 0.0
    if a < 0:
        return 0.0, float((y * x * weight**2).sum() / (x * x * weight**2).sum())
    return float(a), float(b)


def _growth(
    devices: Floats, rest: Floats, is_of: npt.NDArray[np.bool_]
) -> tuple[float, float] | None:
    """Fit ``rest = base + growth·(devices - 2)`` of some rows; None: there are none."""
    if not is_of.any():
        return None
    more, y = devices[is_of] - 2, rest[is_of]
    if len(set(more.tolist())) == 1:
        base = float(y.mean()) / (1 + _GROWTH * float(more[0]))
        return base, base * _GROWTH
    matrix = np.stack([np.ones(len(y)), more], axis=1)
    (a, b), *_ = np.linalg.lstsq(matrix, y, rcond=None)
    if b < 0:
        return float(y.mean()), 0.0
    if a < 0:
        return 0.0, float((y * more).sum() / max((more * more).sum(), 1e-9))
    return float(a), float(b)


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
        least, most = self.limits.batch
        low, high = self.limits.local
        n = devices[:, None]
        if self.batch is None:
            first = np.minimum(np.maximum(least, low * devices), most)
            part = np.linspace(0.0, 1.0, _BATCHES)
            wanted = first[:, None] * (most / first[:, None]) ** part
        else:
            wanted = np.full((len(devices), 1), float(self.batch))
        local, passes = _forms(wanted, n, self.noise.unit, most, high)
        batch = (n * local * passes).astype(np.float64)
        samples = local.astype(np.float64)
        step = self.model.step(hosts[:, None], n, samples)
        seconds = step + (passes - 1) * self.model.compute(samples)
        is_allowed = (local >= low) & (local <= high) & (batch <= most)
        rate = np.where(is_allowed, self.noise.gain(batch) / seconds, 0.0)
        best = rate.argmax(axis=1)
        at = np.arange(len(devices))
        return rate[at, best], local[at, best], passes[at, best]


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


def first_rates(asked: Asked, limits: Limits, most: int | None = None) -> Floats:
    """Return rates of a job without a step, relative to one device, from the size asked for."""
    least, top = limits.devices
    devices = np.arange(0, min(top, most or top) + 1, dtype=np.float64)
    if asked.devices > 1:
        drag = (1 / _ASKED_EFFICIENCY - 1) / (asked.devices - 1)
    else:
        drag = 1.0
    rates: Floats = devices / (1 + drag * np.maximum(devices - 1, 0))
    rates[:least] = 0.0
    return rates
