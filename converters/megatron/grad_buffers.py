"""Places of parameters in the distributed optimizer's flat buffers, in ``distrib_optim.pt``.

Each model chunk has one buffer for each dtype of its parameters, filled in reverse order, cut into
buckets. A save has the buckets one behind the other, each without the padding at its end, so a
bucket may begin at any element.

Source: ``_ParamAndGradBuffer`` of megatron/core/distributed/param_and_grad_buffer.py,
``get_parameter_state_dp_zero`` of megatron/core/optimizer/distrib_optimizer.py and ``get_model`` of
megatron/training/training.py (0.16.1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ALIGNMENT = 64
"""Elements: a parameter begins at a multiple of them, counted from its bucket's start."""
MIN_DEFAULT_BUCKET = 40_000_000
DEFAULT_BUCKET_PER_RANK = 1_000_000


@dataclass(frozen=True, slots=True)
class BufferMember:
    """A parameter of a buffer. ``is_shared``: tied to another stage's, so alone in a bucket."""

    numel: int
    is_shared: bool = False


def aligned(end: int) -> int:
    """Return the first element of a parameter behind one that ends at ``end``."""
    return -(-end // ALIGNMENT) * ALIGNMENT


def lay_buffer(members: Sequence[BufferMember], bucket_numel: int | None) -> tuple[list[int], int]:
    """Return each parameter's first element in the saved tensor, and the tensor's elements.

    Args:
        members: Parameters in the order of the model's modules.
        bucket_numel: Elements of a full bucket; None: there is one bucket.
    """
    starts = [0] * len(members)
    base = end = held = 0
    for at in reversed(range(len(members))):
        member = members[at]
        end = aligned(end)
        if member.is_shared and held:
            base, end, held = base + end, 0, 0
        starts[at] = base + end
        end, held = end + member.numel, held + 1
        if member.is_shared or (bucket_numel is not None and end >= bucket_numel):
            base, end, held = base + end, 0, 0
    return starts, base + end


def bucket_numel(
    arguments: Mapping[str, Any], *, dp: int, pp_rank: int, chunk: int, numel: int
) -> int | None:
    """Return the elements of a full bucket in a job with these arguments.

    Args:
        dp: Data-parallel ranks, context-parallel ones included.
        chunk: Virtual stage of the rank.
        numel: Elements of all parameters of the rank.
    """
    if not arguments.get("overlap_grad_reduce") or pp_rank or chunk:
        return None
    if arguments.get("ddp_num_buckets"):
        return numel // int(arguments["ddp_num_buckets"])
    if arguments.get("ddp_bucket_size"):
        return int(arguments["ddp_bucket_size"])
    return max(MIN_DEFAULT_BUCKET, DEFAULT_BUCKET_PER_RANK * dp)
