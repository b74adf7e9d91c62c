"""Reached shares of a device's rated figures: nine coefficients, each with a prior and its source.

A prior is log-normal: its median, and the factor of one standard deviation. No median was fitted to
step times; ``fit.py`` moves them towards measurements.
"""

from dataclasses import astuple, dataclass, fields

import numpy as np

from scalai.core.planner.columns import Floats


@dataclass(frozen=True, slots=True)
class Prior:
    """Median, factor of one standard deviation, meaning and source."""

    median: float
    factor: float
    about: str
    source: str


PRIORS: dict[str, Prior] = {
    "matrix": Prior(
        0.90, 1.15, "share of the best matrix product's rate that a layer's products reach",
        "NVIDIA, Matrix Multiplication Background User's Guide: quantization of tiles and waves",
    ),
    "memory": Prior(
        0.80, 1.25, "share of the memory's bandwidth that element-wise operations reach",
        "Calculon (calculon-ai/calculon), systems/a100_80g.json: 0.75 at 10 MB, 0.90 at 100 MB",
    ),
    "attention": Prior(
        0.60, 1.3, "share of the best matrix product's rate that fused attention reaches",
        "FlashAttention-2 (arXiv 2307.08691), abstract: 50 to 73 % of the peak on an A100",
    ),
    "launch_s": Prior(
        3e-4, 3.0, "seconds a layer and pass in which the device waits for the host",
        "judgement: some 30 kernels of 10 us each; hosts, and how they launch, differ widely",
    ),
    "link": Prior(
        0.78, 1.25, "share of the bandwidth inside a host that collectives reach",
        "nccl-tests on an A100 host, stas00/ml-engineering, network: 235 of 300 GB/s",
    ),
    "network": Prior(
        0.80, 1.5, "share of the bandwidth between hosts that collectives reach",
        "Calculon, systems/a100_80g.json: 0.90; shared rails and slower networks are common",
    ),
    "overlap": Prior(
        0.30, 1.8, "share of what gradients and optimizer shards take that the backward pass hides",
        "between none (Megatron-LM without --overlap-grad-reduce) and most of it",
    ),
    "overlap_weights": Prior(
        0.75, 1.25, "share of what sharded weights take that the computation hides",
        "judgement; PyTorch FSDP (arXiv 2304.11277) gathers the next layer meanwhile",
    ),
    "step_s": Prior(
        0.02, 2.0, "seconds a step in which nothing of the above runs: clipping, loader, timers",
        "judgement; a step of a second or more hardly depends on it",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Coefficients:
    """One value for each of ``PRIORS``."""

    matrix: float
    memory: float
    attention: float
    launch_s: float
    link: float
    network: float
    overlap: float
    overlap_weights: float
    step_s: float

    def logs(self) -> Floats:
        """Return the natural logarithms, in the order of the fields."""
        values: Floats = np.array(astuple(self))
        return np.log(values)


NAMES = tuple(field.name for field in fields(Coefficients))
_SHARES = ("overlap", "overlap_weights")


def from_logs(logs: Floats) -> Coefficients:
    """Return the coefficients of these logarithms; hidden shares are at most 1."""
    values = dict(zip(NAMES, np.exp(logs).tolist(), strict=True))
    return Coefficients(**{n: min(v, 1.0) if n in _SHARES else v for n, v in values.items()})


def prior_logs() -> tuple[Floats, Floats]:
    """Return the means and standard deviations of the priors' logarithms."""
    priors = [PRIORS[name] for name in NAMES]
    medians = np.array([prior.median for prior in priors])
    return np.log(medians), np.log(np.array([prior.factor for prior in priors]))


DEFAULT = from_logs(prior_logs()[0])
"""Coefficients without measurements."""
