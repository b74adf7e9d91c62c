"""What measured steps of alike layouts say of a prediction, beyond the coefficients of the model.

A formula that holds for all layouts leaves what some of them have in common: the tiles that a
micro-batch makes, a network that several pipelines share. It is a Gaussian process over the
logarithms of sizes (Rasmussen and Williams, Gaussian Processes for Machine Learning, section 2.2),
with a mean of 0: near what was measured it gives most of what was left there, far away nothing.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from scalai.core.planner.columns import Columns, Floats

KINDS = ("recompute", "sharding", "is_sequence_parallel", "is_attention_fused")
SIZES = ("tp", "pp", "dp", "vpp", "cp", "ep", "micro_batch", "hidden", "layers", "seq")
"""Columns by which a case is like another one, or is not."""
NEAR, FAR = 0.7, 4.0
"""Doublings of a size over which cases are alike in all, and in what a whole class has."""
NEAR_SHARE, FAR_SHARE = 0.6, 0.3
"""Shares of a residual's variance; what is left is of one measurement alone. Shares and distances
are those under which the rows of other models, left out, are likeliest (docs/degrees.md)."""
KIND_APART, SHARED_APART = 4.0, 2.0
"""How far apart, in doublings, another kind is; in deviations, whether pipelines share hosts."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Measured cases with what each says of cases that are like it.

    Attributes:
        sizes: Of the measured cases, [measured, columns]; ``shared``: whether several pipelines
            pass through one host, [measured].
        pull: By what a case that is wholly alike would be moved, of logarithms, [measured].
    """

    sizes: Floats
    shared: Floats
    pull: Floats

    @classmethod
    def of(cls, x: Columns, residual: Floats, noise: float, trust: Floats) -> Self:
        """Take in what measurements have left.

        Args:
            x: The measured cases, [measured].
            residual: Measured over predicted seconds, of logarithms, [measured].
            noise: Their standard deviation.
            trust: Weight of each in the fit, [measured]: one that contradicts others has little.
        """
        sizes, shared = _places(x)
        own = (1 - NEAR_SHARE - FAR_SHARE) / np.minimum(trust, 1.0)
        alike = _alike(sizes, shared, sizes, shared) + np.diag(own)
        limited = np.clip(residual, -3 * noise, 3 * noise)
        return cls(sizes, shared, np.linalg.solve(alike, limited).astype(np.float64))

    def residual(self, x: Columns) -> Floats:
        """Return what to add to the logarithm of predicted seconds, [cases]."""
        found: Floats = _alike(*_places(x), self.sizes, self.shared) @ self.pull
        return found


def _places(x: Columns) -> tuple[Floats, Floats]:
    """Return sizes in doublings, [cases, columns], and whether pipelines share hosts, [cases]."""
    of_sizes = (np.log2(getattr(x, name)) for name in SIZES)
    of_kinds = (KIND_APART * np.asarray(getattr(x, name), float) for name in KINDS)
    columns = np.broadcast_arrays(*map(np.atleast_1d, (*of_sizes, *of_kinds)))
    shared = (x.pp > 1) & (x.tp * x.cp < x.per_host)
    return np.stack(columns, -1), np.broadcast_to(shared, columns[0].shape).astype(float)


def _alike(sizes: Floats, shared: Floats, others: Floats, others_shared: Floats) -> Floats:
    """Return the covariance of cases with others, over the variance, [cases, others]."""
    squares = (sizes**2).sum(-1)[:, None] + (others**2).sum(-1) - 2 * sizes @ others.T
    apart = (SHARED_APART * (shared[:, None] - others_shared)) ** 2
    near, far = (np.exp(-(squares / scale**2 + apart) / 2) for scale in (NEAR, FAR))
    covariance: Floats = NEAR_SHARE * near + FAR_SHARE * far
    return covariance
