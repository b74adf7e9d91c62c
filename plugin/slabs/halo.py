"""The exchange of halos between ranks that share a sample, differentiable.

A layer with a view beyond its slab (a convolution of width 3: one element) gets its neighbours'
borders; backward, their gradients go to the owners.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from scalai.core.errors import UsageError
from scalai.core.tensors.region import Box, Index
from scalai.core.tensors.slabs import Slabs
from scalai.runtime.failpoints import reached

Shared = Sequence[tuple[int, Box]]


def exchange_halo(
    local: torch.Tensor,
    slabs: Slabs,
    halo: Index,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Add its halo to this rank's slab, clipped at the sample's borders.

    Call on every rank of the group alike. Blocks until the neighbours have called too, at most for
    the group's timeout; after the death of one torch raises ``RuntimeError``.

    Args:
        local: This rank's slab, [..., slab]: axes before those of ``slabs`` are whole.
        slabs: Cut of the sample over the ranks of the group, in order.
        halo: Elements on both sides of the slab, by axis of ``slabs``.
        group: Ranks of this sample; None: all.

    Returns:
        [..., slab with halo]; its gradient flows back to the owners of the halo.

    Raises:
        UsageError: The group has another number of ranks, or ``local`` is not this rank's slab.
        LayoutError: The halo is wider than a neighbour's slab; on all ranks alike.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size != slabs.count:
        raise UsageError(
            f"{slabs.count} slabs need as many ranks, and the group has {size}. Cut the sample by "
            "the degree that these ranks are of."
        )
    own = slabs.slab(rank)
    axes = len(own.shape)
    if local.dim() < axes or tuple(local.shape[local.dim() - axes :]) != own.shape:
        raise UsageError(
            f"rank {rank} has {list(own.shape)} of the sample {list(slabs.shape)}, and was given a "
            f"tensor {list(local.shape)}. Its last {axes} axes must be the slab."
        )
    swap = _Swap(
        own,
        slabs.with_halo(rank, halo),
        slabs.halo_sources(rank, halo),
        slabs.halo_targets(rank, halo),
        group,
    )
    widened: torch.Tensor = _Exchange.apply(local, swap)  # type: ignore[no-untyped-call]
    return widened


@dataclass(frozen=True, slots=True)
class _Swap:
    """Boxes of the sample given and taken by one rank, in order of ranks."""

    own: Box
    widened: Box
    sources: Shared
    targets: Shared
    group: dist.ProcessGroup | None

    def widen(self, local: torch.Tensor) -> torch.Tensor:
        """The slab with its halo from the sources."""
        lead = local.shape[: local.dim() - len(self.own.shape)]
        result = local.new_empty((*lead, *self.widened.shape))
        result[_within(self.own, self.widened)] = local
        given = [(rank, local[_within(box, self.own)].contiguous()) for rank, box in self.targets]
        taken = [(rank, local.new_empty((*lead, *box.shape))) for rank, box in self.sources]
        self._pass(given, taken)
        for (_, box), (_, part) in zip(self.sources, taken, strict=True):
            result[_within(box, self.widened)] = part
        return result

    def fold(self, gradient: torch.Tensor) -> torch.Tensor:
        """Gradient of the slab: this rank's own, and those of all halos with a part of it."""
        result = gradient[_within(self.own, self.widened)].clone()
        lead = gradient.shape[: gradient.dim() - len(self.own.shape)]
        given = [
            (rank, gradient[_within(box, self.widened)].contiguous()) for rank, box in self.sources
        ]
        taken = [(rank, gradient.new_empty((*lead, *box.shape))) for rank, box in self.targets]
        self._pass(given, taken)
        for (_, box), (_, part) in zip(self.targets, taken, strict=True):
            result[_within(box, self.own)] += part
        return result

    def _pass(
        self,
        given: Sequence[tuple[int, torch.Tensor]],
        taken: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """Send and receive at once; the group's timeout bounds the wait."""
        calls = [
            dist.P2POp(call, tensor, self._global(rank), self.group)
            for call, parts in ((dist.isend, given), (dist.irecv, taken))
            for rank, tensor in parts
        ]
        reached("halo")
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, swap: _Swap) -> torch.Tensor:
        ctx.swap = swap
        return swap.widen(local)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.swap.fold(gradient), None


def _within(box: Box, outer: Box) -> tuple[Any, ...]:
    """Index of a box in the last axes of a tensor of ``outer``."""
    ranges = (
        slice(low - begin, low - begin + size)
        for low, begin, size in zip(box.offset, outer.offset, box.shape, strict=True)
    )
    return (..., *ranges)
