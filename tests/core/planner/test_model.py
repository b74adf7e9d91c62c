"""Parameters are counted exactly, by part."""

import pytest

from scalai.core.errors import UsageError
from scalai.core.planner.model import ModelShape
from support.model_shapes import gpt


def llama(layers: int, hidden: int, heads: int, kv_groups: int, ffn: int, vocab: int) -> ModelShape:
    return gpt(layers, hidden, heads, vocab, 8192, ffn=ffn, kv_groups=kv_groups, is_gated=True)


def test_a_gpt_has_what_the_closed_formula_says() -> None:
    """12Lh²(1 + 13/12h) + (V + s)h, and the final norm (arXiv 2104.04473, equation 2)."""
    layers, hidden, vocab, seq = 96, 12_288, 51_200, 2_048
    formula = 12 * layers * hidden**2 + 13 * layers * hidden + (vocab + seq) * hidden
    assert gpt(layers, hidden, 96, vocab, seq).total_parameters == formula + 2 * hidden


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        # Numbers of parameters as the checkpoints on the Hugging Face hub state them.
        (llama(32, 4_096, 32, 8, 14_336, 128_256), 8_030_261_248),
        (llama(80, 8_192, 64, 8, 28_672, 128_256), 70_553_706_496),
        (llama(32, 4_096, 32, 32, 11_008, 32_000), 6_738_415_616),
    ],
    ids=["llama-3-8b", "llama-3-70b", "llama-2-7b"],
)
def test_published_models_have_their_published_numbers(shape: ModelShape, published: int) -> None:
    assert shape.total_parameters == published


def test_a_mixture_of_experts_counts_each_expert_and_the_router() -> None:
    mixtral = ModelShape(
        layers=32, hidden=4_096, heads=32, ffn=14_336, vocab=32_000, seq=4_096, kv_groups=8,
        head_dim=128, is_gated=True, is_tied=False, has_bias=False, has_norm_bias=False,
        experts=8, moe_layers=32, top_k=2, expert_ffn=14_336,
    )  # fmt: skip
    assert mixtral.total_parameters == 46_702_792_704


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"kv_groups": 3}, "kv_groups=3"),
        ({"layers": 0}, "layers=0"),
        ({"experts": 8}, "top_k=0"),
        ({"moe_layers": 1}, "state both"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused_by_name(
    wrong: dict[str, int], named: str
) -> None:
    sizes = dict(layers=2, hidden=64, heads=4, ffn=256, vocab=128, seq=32, kv_groups=4, head_dim=16)
    with pytest.raises(UsageError, match=named):
        ModelShape(**{**sizes, **wrong})  # type: ignore[arg-type]
