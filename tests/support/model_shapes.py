"""Shapes of GPTs and Llamas for the tests of the planner."""

from scalai.core.planner.shape import ModelShape


def gpt(
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    seq: int,
    *,
    ffn: int | None = None,
    kv_groups: int | None = None,
    is_gated: bool = False,
) -> ModelShape:
    """A GPT: learned positions, biases, a tied head; gated: a Llama, without these."""
    return ModelShape(
        layers=layers, hidden=hidden, heads=heads, vocab=vocab, seq=seq, ffn=ffn or 4 * hidden,
        kv_groups=kv_groups or heads, head_dim=hidden // heads, is_gated=is_gated,
        positions=0 if is_gated else seq, is_tied=not is_gated, has_bias=not is_gated,
        has_norm_bias=not is_gated,
    )  # fmt: skip
