"""Calibration: the likeliest coefficients for a cluster's measured steps, and their uncertainty."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from scalai.core.planner.columns import Cases, Floats
from scalai.core.planner.step_time import Coefficients, from_logs, prior_logs, step_time

KINDS = ("recompute", "sharding", "is_sequence_parallel", "is_attention_fused", "offload")
SIZES = ("tp", "pp", "dp", "vpp", "cp", "ep", "micro_batch", "hidden", "layers", "seq")
"""Cases for the likeness of cases."""
NEAR, FAR = 0.7, 4.0
"""Length scales, in doublings of a size: of near cases, and of a whole class."""
NEAR_SHARE, FAR_SHARE = 0.6, 0.3
"""Shares of a residual's variance; the rest belongs to one measurement alone. Shares and distances
maximise the likelihood of other models' rows, left out (docs/degrees.md)."""
KIND_APART, SHARED_APART = 4.0, 2.0
"""Distances of another kind, in doublings, and of pipelines with shared hosts, in deviations."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Measured cases and their influence on like cases.

    Attributes:
        sizes: Sizes of the measured cases, [measured, columns].
        shared: 1 if several pipelines share a host, [measured].
        pull: Weight of each measured case, of logarithms, [measured].
    """

    sizes: Floats
    shared: Floats
    pull: Floats

    @classmethod
    def of(cls, x: Cases, residual: Floats, noise: float, trust: Floats) -> Self:
        """Fit the residuals of measurements.

        Args:
            x: Measured cases, [measured].
            residual: Measured over predicted seconds, of logarithms, [measured].
            noise: Standard deviation of ``residual``.
            trust: Weight of each in the fit, [measured]; small for contradicting ones.
        """
        sizes, shared = _places(x)
        own = (1 - NEAR_SHARE - FAR_SHARE) / np.minimum(trust, 1.0)
        alike = _alike(sizes, shared, sizes, shared) + np.diag(own)
        limited = np.clip(residual, -3 * noise, 3 * noise)
        return cls(sizes, shared, np.linalg.solve(alike, limited).astype(np.float64))

    def residual(self, x: Cases) -> Floats:
        """Return the correction to the logarithm of predicted seconds, [cases]."""
        found: Floats = _alike(*_places(x), self.sizes, self.shared) @ self.pull
        return found


def _places(x: Cases) -> tuple[Floats, Floats]:
    """Return sizes in doublings, [cases, columns], and 1 for pipelines with shared hosts,
    [cases]."""
    of_sizes = (np.log2(_column(x, name)) for name in SIZES)
    of_kinds = (KIND_APART * np.asarray(_column(x, name), float) for name in KINDS)
    columns = np.broadcast_arrays(*map(np.atleast_1d, (*of_sizes, *of_kinds)))
    shared = (x.layout.pp > 1) & (x.layout.tp * x.layout.cp < x.device.per_host)
    return np.stack(columns, -1), np.broadcast_to(shared, columns[0].shape).astype(float)


def _column(x: Cases, name: str) -> Floats:
    """Return the column of ``KINDS`` and ``SIZES`` of this name."""
    of = next(table for table in (x.layout, x.model, x.work) if hasattr(table, name))
    column: Floats = getattr(of, name)
    return column


def _alike(sizes: Floats, shared: Floats, others: Floats, others_shared: Floats) -> Floats:
    """Return the covariance of cases with others, over the variance, [cases, others]."""
    squares = (sizes**2).sum(-1)[:, None] + (others**2).sum(-1) - 2 * sizes @ others.T
    apart = (SHARED_APART * (shared[:, None] - others_shared)) ** 2
    near, far = (np.exp(-(squares / scale**2 + apart) / 2) for scale in (NEAR, FAR))
    covariance: Floats = NEAR_SHARE * near + FAR_SHARE * far
    return covariance


PRIOR_NOISE = 0.08
"""Standard deviation of a measured step about the model, of logarithms, typical of such models
(vTrain, arXiv 2312.12391: 8.4 %)."""
PRIOR_ROWS = 4.0
"""Weight of the noise's prior, in rows."""
TAIL = 4.0
"""Degrees of freedom of Student's t; outliers count less."""
UNCALIBRATED_NOISE = 0.12
"""Noise on an unmeasured cluster, the coefficients' common error included."""
NINETY_PERCENT, NINETY_PERCENT_TAILED = 1.645, 2.132
"""Half-widths of the 90 % interval: of a normal distribution, in standard deviations, and of
Student's t with ``TAIL`` degrees of freedom, in scales."""
ITERATIONS = 40
_STEP = 1e-4


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of a step, and the interval with 90 % of measurements, [cases]."""

    seconds: Floats
    low: Floats
    high: Floats

    @property
    def half_width(self) -> Floats:
        """Half of the interval, over the prediction."""
        return (self.high - self.low) / (2 * self.seconds)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Coefficients with their uncertainty.

    Attributes:
        logs: Logarithms of the coefficients, [coefficients].
        covariance: Covariance of ``logs``, [coefficients, coefficients].
        noise: Standard deviation of a measurement about the model, of logarithms.
        rows: Number of measurements.
        seen: Measured sizes, by column.
        neighbours: Corrections for cases like the measured ones; None: none.
    """

    logs: Floats
    covariance: Floats
    noise: float
    rows: int
    seen: Mapping[str, frozenset[float]]
    neighbours: Neighbours | None = None

    @property
    def coefficients(self) -> Coefficients:
        return from_logs(self.logs)

    def seconds(self, x: Cases) -> Floats:
        """Return the seconds of a step, [cases]."""
        total = step_time(x, self.coefficients).total
        if self.neighbours is None:
            return total
        alike: Floats = total * np.exp(self.neighbours.residual(x))
        return alike

    def never_seen(self, x: Cases, number: int) -> tuple[str, ...]:
        """Name a case's unmeasured kinds, and sizes beyond the measured range."""
        found = []
        for name, sizes in self.seen.items():
            column = np.ravel(_column(x, name))
            size = float(column[number if len(column) > 1 else 0])
            is_kind = name in KINDS
            if not sizes or (
                size not in sizes if is_kind else not min(sizes) <= size <= max(sizes)
            ):
                found.append(f"{name}={size:g}")
        return tuple(found)

    def predict(self, x: Cases) -> Prediction:
        """Return the seconds of a step with their interval.

        Neighbours do not narrow the interval: their likeness to a case is itself a guess.
        """
        seconds = self.seconds(x)
        slopes = _slopes(lambda logs: np.log(step_time(x, from_logs(logs)).total), self.logs)
        variance = np.einsum("...i,ij,...j->...", slopes, self.covariance, slopes)
        known = NINETY_PERCENT**2 * variance + (NINETY_PERCENT_TAILED * self.noise) ** 2
        spread = np.exp(np.sqrt(known))
        return Prediction(seconds, seconds / spread, seconds * spread)

    def spread_of_ratio(
        self, x: Cases, measured_spread: float, is_measured: tuple[bool, bool]
    ) -> float:
        """Return half of the 90 % interval of the ratio of two steps, relative.

        Common errors cancel.

        Args:
            x: The two cases, [2].
            measured_spread: Half of the interval of a measured step.
            is_measured: True for each case with a measurement of its own.
        """
        slopes = _slopes(lambda logs: np.log(step_time(x, from_logs(logs)).total), self.logs)
        own = [
            measured_spread if each else NINETY_PERCENT_TAILED * self.noise for each in is_measured
        ]
        # A measured case does not move with the coefficients.
        apart = slopes[0] * (not is_measured[0]) - slopes[1] * (not is_measured[1])
        variance = NINETY_PERCENT**2 * float(apart @ self.covariance @ apart)
        return float(np.exp(np.sqrt(variance + own[0] ** 2 + own[1] ** 2)) - 1)


def uncalibrated() -> Calibration:
    """Return the calibration without measurements: the priors."""
    means, deviations = prior_logs()
    nothing = {name: frozenset[float]() for name in (*KINDS, *SIZES)}
    return Calibration(means, np.diag(deviations**2), UNCALIBRATED_NOISE, 0, nothing)


def calibrate(x: Cases, seconds: Floats, *, has_neighbours: bool = False) -> Calibration:
    """Return the likeliest coefficients for one cluster's measured steps.

    They maximise the posterior of the priors and of errors of logarithms under Student's t: a few
    rows move few coefficients, and a row in contradiction to its neighbours hardly counts.

    Args:
        x: Measured cases, [cases].
        seconds: Seconds of a step of each, [cases].
        has_neighbours: Residuals correct like layouts only; for measurements of many layouts or
            models.
    """
    means, deviations = prior_logs()
    measured = np.log(seconds)

    def predicted(logs: Floats) -> Floats:
        return np.log(step_time(x, from_logs(logs)).total)

    logs, noise = means.copy(), PRIOR_NOISE
    weights = np.ones(len(measured))
    precision = np.diag(deviations**-2.0)
    loss = np.inf
    damping = 1e-3
    for _ in range(ITERATIONS):
        residual = measured - predicted(logs)
        weights = (TAIL + 1) / (TAIL + (residual / noise) ** 2)
        slopes = _slopes(predicted, logs)
        normal = (slopes.T * weights) @ slopes / noise**2 + precision
        gradient = slopes.T @ (weights * residual) / noise**2 + (means - logs) / deviations**2
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
        tried = logs + np.clip(step, -0.5, 0.5)
        new_loss = _loss(measured - predicted(tried), noise, tried, means, deviations)
        loss = _loss(residual, noise, logs, means, deviations)
        if new_loss <= loss:
            logs, damping = tried, max(damping / 3, 1e-6)
        else:
            damping *= 10
        residual = measured - predicted(logs)
        squares = float((weights * residual**2).sum())
        noise = float(
            np.sqrt((PRIOR_ROWS * PRIOR_NOISE**2 + squares) / (PRIOR_ROWS + len(measured)))
        )
        if np.abs(step).max() < 1e-6:
            break
    slopes = _slopes(predicted, logs)
    normal = (slopes.T * weights) @ slopes / noise**2 + precision
    seen = {name: frozenset(np.ravel(_column(x, name)).tolist()) for name in (*KINDS, *SIZES)}
    covariance: Floats = np.linalg.inv(normal).astype(np.float64)
    left = measured - predicted(logs)
    around = Neighbours.of(x, left, noise, weights) if has_neighbours else None
    return Calibration(logs, covariance, noise, len(measured), seen, around)


def _loss(residual: Floats, noise: float, logs: Floats, means: Floats, deviations: Floats) -> float:
    tails = (TAIL + 1) / 2 * np.log1p((residual / noise) ** 2 / TAIL)
    return float(tails.sum() + (((logs - means) / deviations) ** 2).sum() / 2)


def _slopes(function: Callable[[Floats], Floats], at: Floats) -> Floats:
    """Return the derivatives of ``function``, [cases, coefficients]."""
    columns = []
    for number in range(len(at)):
        moved = np.zeros(len(at))
        moved[number] = _STEP
        columns.append((function(at + moved) - function(at - moved)) / (2 * _STEP))
    return np.stack(columns, axis=-1)
