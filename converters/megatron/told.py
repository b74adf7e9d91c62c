"""What workers tell of Megatron's arguments, for whoever reads a generation of their job: no tensor
says it."""

from collections.abc import Mapping
from typing import Any

TOLD = (
    "num_attention_heads", "seq_length", "moe_router_topk", "global_batch_size", "hidden_dropout",
    "attention_dropout", "fp8",
)  # fmt: skip
FACT = "arguments"
"""Under this name they tell it (``about.facts`` of a generation, docs/format.md)."""


def told_of(arguments: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return those of Megatron's arguments, as far as they are set."""
    plain = (bool, int, float, str)
    return {name: arguments[name] for name in TOLD if isinstance(arguments.get(name), plain)}
