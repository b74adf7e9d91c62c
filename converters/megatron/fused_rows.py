"""Which rows of a fused tensor of Megatron's are those of its parts.

Source: ``linear_qkv`` of megatron/core/transformer/attention.py and the gated ``linear_fc1`` of
mlp.py (0.16.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scalai.core.errors import UsageError

PARTS = {"qkv": 3, "gate_up": 2, "": 1}
"""Parts of a fused tensor."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads and query groups of a model; None: unknown."""

    heads: int | None = None
    groups: int | None = None

    def or_else(self, other: "Heads") -> "Heads":
        """Return these; ``other`` where they are not known."""
        return self if self.heads is not None else other


def rows_of_parts(fused: str, count: int, heads: Heads, what: str) -> Sequence[Sequence[range]]:
    """Return, for each part of a fused tensor, its rows in order.

    Args:
        fused: A key of ``PARTS``.
        count: All rows.
        heads: Of the attention.
        what: How an error calls the tensor.

    Raises:
        UsageError: Heads are needed and not known, or do not fit the rows.
    """
    if fused == "gate_up":
        return [range(count // 2)], [range(count // 2, count)]
    if fused != "qkv":
        return [[range(count)]]
    if heads.heads is None:
        raise UsageError(
            f"to cut {what} the number of attention heads is needed, and neither checkpoint says "
            "it. Add [attention] num_attention_heads and num_query_groups to the mapping file."
        )
    groups = heads.groups or heads.heads
    width, rest = divmod(count, heads.heads + 2 * groups)
    if rest or heads.heads % groups:
        raise UsageError(
            f"{what} has {count} rows, which {heads.heads} heads in {groups} query groups do not "
            "divide. Correct [attention] in the mapping file, or num_attention_heads."
        )
    queries = heads.heads // groups
    rows: tuple[list[range], list[range], list[range]] = ([], [], [])
    for group in range(groups):
        low = group * (queries + 2) * width
        for part, begin, many in zip(rows, (0, queries, queries + 1), (queries, 1, 1), strict=True):
            part.append(range(low + begin * width, low + (begin + many) * width))
    return rows
