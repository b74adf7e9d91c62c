"""Warnings about an optimizer's state that no training makes, though every byte is as it was saved.

Adam's moments are sums over the same gradients g, with b1 and b2 the betas:

    m = (1 - b1) * sum(b1^i * g_i)        v = (1 - b2) * sum(b2^i * g_i^2)

so v is never negative, and by Cauchy and Schwarz

    m^2 <= v * (1 - b1)^2 / ((1 - b2) * (1 - b1^2 / b2))

at every step, whatever the gradients were. Moments of two iterations or parameters break
this. A few numbers of each tensor are looked at.

Source: own; Adam as torch.optim and Megatron compute it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import MAIN, PARAM, STEP, USER, Checkpoint
from scalai.converters.source_files import SourceFiles
from scalai.core.tensors.collection import split_name
from scalai.core.tensors.region import Box

FIRST, SECOND = "exp_avg", "exp_avg_sq"
SAMPLED = 256
"""Numbers of each tensor."""
ROUNDING = 1.1
"""Of fp32 sums over a whole training."""
SMALLEST = 1e-30
"""Smaller second moments have lost digits."""
NAMED = 3

Numbers = npt.NDArray[np.float32]


def find_nonsense(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a line for each finding."""
    samples = _samples(checkpoint)
    steps = {name: float(of[0]) for (kind, name), of in samples.items() if kind == STEP and of.size}
    yield from _steps(checkpoint, steps)
    yield from _moments(checkpoint, samples, steps)


def _steps(checkpoint: Checkpoint, steps: Mapping[str, float]) -> Iterator[str]:
    counts = Counter(steps.values())
    if len(counts) > 1:
        usual, _ = counts.most_common(1)[0]
        others = sorted(name for name, step in steps.items() if step != usual)
        few = ", ".join(f"{name} {steps[name]:g}" for name in others[:NAMED])
        yield (
            f"{len(others)} of {len(steps)} parameters have made other optimizer steps than "
            f"{usual:g}: {few}. They are of another save, or had no gradient at some steps"
        )
    most, done = max(counts, default=0.0), checkpoint.values.step
    if most > done > 0:
        yield (
            f"the optimizer has made {most:g} steps, and the training {done}: its state is of a "
            "later save, or of another job"
        )


def _moments(
    checkpoint: Checkpoint, samples: Mapping[tuple[str, str], Numbers], steps: Mapping[str, float]
) -> Iterator[str]:
    seconds = {name: of for (kind, name), of in samples.items() if kind == SECOND and of.size}
    negative = sorted(name for name, of in seconds.items() if (of < 0).any())
    if negative:
        yield (
            f"{SECOND} of {_listed(negative)} holds negative numbers, and it is a mean of squares: "
            "it is another tensor, or damaged"
        )
    bound = _bound(checkpoint)
    apart = []
    for name, second in seconds.items():
        first = samples.get((FIRST, name), np.zeros(0, np.float32))[: len(second)]
        second = second[: len(first)]
        large = second > SMALLEST
        with np.errstate(over="ignore", invalid="ignore"):
            too_large = np.square(first.astype(np.float64)) > bound * second
        if bool((too_large & large).any()):
            apart.append(name)
    if apart and bound:
        yield (
            f"{FIRST} and {SECOND} of {_listed(sorted(apart))} cannot be of the same steps: the "
            "first is larger than any gradients with this second make it at these betas. Files of "
            "two saves are mixed, or one moment is another parameter's"
        )
    kinds = {kind for kind, _ in samples} - {PARAM, MAIN, STEP, USER}
    moving = [of for (kind, _), of in samples.items() if kind in kinds and of.size]
    if moving and max(steps.values(), default=0.0) > 0 and not any(of.any() for of in moving):
        yield (
            f"all moments begin with zeros after {max(steps.values()):g} steps: they were not saved"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def _bound(checkpoint: Checkpoint) -> float:
    """Return the largest m^2 / v by the betas of all groups; infinity: they are unknown."""
    found = [_group_bound(group.get("betas")) for group in checkpoint.values.param_groups]
    return max(found, default=float("inf")) * ROUNDING


def _group_bound(betas: Any) -> float:
    is_pair = isinstance(betas, list | tuple) and len(betas) == 2
    if not is_pair or not all(isinstance(beta, int | float) for beta in betas):
        return float("inf")
    one, two = betas
    if not 0 <= one < 1 or not 0 < two < 1 or one * one >= two:
        return float("inf")
    return float((1 - one) ** 2 / ((1 - two) * (1 - one * one / two)))


def _samples(checkpoint: Checkpoint) -> dict[tuple[str, str], Numbers]:
    """Return the first numbers of steps and moments in fp32, by kind and parameter."""
    placed = checkpoint.placed
    collection = placed.collection
    found: dict[tuple[str, str], Numbers] = {}
    at_origin = (collection.offset == 0).all(axis=1) & (collection.numel() > 0)
    with SourceFiles(checkpoint.directory, is_sampled=True) as files:
        for row in np.flatnonzero(at_origin).tolist():
            tensor, box = collection.box(row)
            kind, name = split_name(tensor.name)
            if kind in (PARAM, MAIN, USER) or tensor.dtype != "F32" or (kind, name) in found:
                continue
            shape = (*(1 for _ in box.shape[:-1]), *(min(n, SAMPLED) for n in box.shape[-1:]))
            bits = files.view(placed, row, Box(box.offset, shape))
            found[kind, name] = np.ascontiguousarray(bits).view(np.float32).ravel()
    return found
