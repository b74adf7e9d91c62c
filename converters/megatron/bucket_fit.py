"""Which parameters lie where in buckets of known sizes.

A parameter begins at a multiple of 64 elements, and a new bucket where the stored size of one is
used up. Where some parameters are not trained, buckets lack them: then these are found by content.

Source: ``_compute_per_buffer_param_layout`` of megatron/core/optimizer/distrib_optimizer.py (main,
August 2026) and ``_ParamAndGradBuffer`` of megatron/core/distributed/param_and_grad_buffer.py
(0.16.1). A bucket that ends before a tied embedding has the size up to the embedding's multiple.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from scalai.converters.megatron.grad_buffers import aligned
from scalai.converters.megatron.rank_parameters import Parameter

HEAD = 16
"""Elements by which parameters are looked up before they are compared."""


@dataclass(frozen=True, slots=True)
class Found:
    """Where a parameter begins: in which bucket, at which element."""

    parameter: Parameter
    bucket: int
    start: int


class SeveralFitsError(Exception):
    """The content allows more than one choice of trained parameters."""


def lay(sizes: Sequence[int], parameters: Sequence[Parameter]) -> list[Found] | None:
    """Lay parameters into buckets; None where they do not fill them exactly.

    Args:
        sizes: Elements of each bucket, without the padding at its end.
        parameters: In the order in which they fill the buckets.
    """
    found: list[Found] = []
    bucket = end = 0
    for parameter in parameters:
        bucket, end = _after(sizes, bucket, end)
        start = aligned(end)
        end = start + parameter.numel
        if bucket >= len(sizes) or end > sizes[bucket]:
            return None
        found.append(Found(parameter, bucket, start))
    return found if _after(sizes, bucket, end) == (len(sizes), 0) else None


class Content(Protocol):
    """What tells where a parameter lies: its weights, and what lies in the buckets."""

    def weights(self, parameter: Parameter) -> bytes:
        """Return the bits of its first elements: ``HEAD`` of them, or all where it has fewer."""
        ...

    def masters(self, bucket: int, start: int, count: int) -> bytes | None:
        """Return the bits to which ``count`` elements round; None: the bucket has no such place."""
        ...

    def is_equal(self, found: Found) -> bool:
        """Tell whether a parameter's weights are what lies at a place."""
        ...


def lay_trained(
    sizes: Sequence[int], parameters: Sequence[Parameter], content: Content
) -> list[Found] | None:
    """Lay those parameters into buckets whose content lies there, in their order.

    Raises:
        SeveralFitsError: More than one choice fills the buckets.
    """
    heads: dict[int, dict[bytes, list[int]]] = {}
    for at, parameter in enumerate(parameters):
        count = min(parameter.numel, HEAD)
        heads.setdefault(count, {}).setdefault(content.weights(parameter), []).append(at)
    # Ways to reach a state (how many parameters are behind it, bucket, element), and the last step.
    reached: list[dict[tuple[int, int], _Way]] = [{} for _ in range(len(parameters) + 1)]
    reached[0][_after(sizes, 0, 0)] = _Way(1, None, None)
    ends: list[_Way] = []
    for at, states in enumerate(reached):
        for (bucket, end), way in states.items():
            if bucket == len(sizes):
                ends.append(way)
                continue
            start = aligned(end)
            for count, by_head in heads.items():
                head = content.masters(bucket, start, count)
                for next_ in by_head.get(head, ()) if head is not None else ():
                    found = Found(parameters[next_], bucket, start)
                    stop = start + found.parameter.numel
                    if next_ < at or stop > sizes[bucket] or not content.is_equal(found):
                        continue
                    here = _after(sizes, bucket, stop)
                    known = reached[next_ + 1].get(here)
                    total = way.count + (known.count if known else 0)
                    reached[next_ + 1][here] = _Way(min(2, total), way, found)
    if sum(way.count for way in ends) > 1:
        raise SeveralFitsError
    return [*reversed(list(_steps(ends[0])))] if ends else None


@dataclass(frozen=True, slots=True)
class _Way:
    """How many ways lead here, 2 at most, and the last step of one."""

    count: int
    before: "_Way | None"
    found: Found | None


def _steps(way: _Way) -> Iterator[Found]:
    """Yield the steps of a way, the last one first."""
    at: _Way | None = way
    while at is not None and at.found is not None:
        yield at.found
        at = at.before


def _after(sizes: Sequence[int], bucket: int, end: int) -> tuple[int, int]:
    """Return where the next parameter may begin: in the next bucket where this one is full."""
    if bucket < len(sizes) and end and sizes[bucket] in (end, aligned(end)):
        return bucket + 1, 0
    return bucket, end
