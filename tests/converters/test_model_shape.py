"""Megatron-LM's flags give the shape that Megatron-LM builds."""

import pytest

from scalai.converters.megatron.arguments import read_arguments
from scalai.converters.megatron.model_shape import choices_of, workload_of
from scalai.core.errors import RefusedError
from scalai.core.planner.model import ModelShape, gpt

GPT = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --global-batch-size 8 --micro-batch-size 1 --vocab-size 1000"
)
LLAMA = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 176"
)


def shape_of(flags: str, vocab: int | None = None) -> ModelShape:
    return workload_of(read_arguments(flags.split(), allow_untested=True), vocab).shape


def test_a_gpt_has_the_defaults_of_the_parser() -> None:
    assert shape_of(GPT) == gpt(4, 64, 4, 1_024, 32)  # padded to a multiple of 128


def test_flags_of_a_llama_change_each_part() -> None:
    shape = shape_of(f"{GPT} {LLAMA}")
    assert shape == gpt(4, 64, 4, 1_024, 32, ffn=176, kv_groups=2, is_gated=True)
    assert shape_of(f"{GPT} --swiglu").ffn == 128  # two thirds of 4 * 64, a multiple of 64


@pytest.mark.parametrize(
    ("frequency", "layers"),
    [("", 4), ("2", 2), ("[0]*1+[1]*3", 3), ("([0,1]*2)", 2)],
)
def test_layers_with_experts_are_counted(frequency: str, layers: int) -> None:
    experts = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 96 --sequence-parallel"
    stated = f"--moe-layer-freq {frequency}" if frequency else ""
    shape = shape_of(f"{GPT} {experts} {stated}")
    assert (shape.experts, shape.moe_layers, shape.top_k, shape.expert_ffn) == (8, layers, 2, 96)


def test_a_pattern_of_another_length_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"no pattern of 0 and 1 for 4 layers"):
        shape_of(f"{GPT} --num-experts 8 --moe-layer-freq [1]*3")


@pytest.mark.parametrize(
    ("flags", "precision", "fused", "gradient"),
    [
        ("", "fp32", True, None),
        ("--bf16", "bf16", True, None),
        ("--bf16 --fp8-format hybrid", "fp8", True, None),
        ("--fp16 --transformer-impl local", "fp16", False, None),
        ("--bf16 --transformer-impl local --use-flash-attn", "bf16", True, None),
        ("--bf16 --attention-backend unfused --grad-reduce-in-bf16", "bf16", False, 2),
    ],
)
def test_precision_and_attention_follow_the_flags(
    flags: str, precision: str, fused: bool, gradient: int | None
) -> None:
    work = workload_of(read_arguments(f"{GPT} {flags}".split(), allow_untested=True))
    assert (work.precision, work.is_attention_fused) == (precision, fused)
    assert (work.gradient_bytes, work.global_batch) == (gradient, 8)


def test_what_a_search_may_choose_follows_the_flags() -> None:
    plain = choices_of(read_arguments(GPT.split()))
    assert plain.sharding == (0, 1) and not plain.is_sequence_parallel
    more = "--use-distributed-optimizer --sequence-parallel --context-parallel-size 2"
    given = choices_of(read_arguments(f"{GPT} {more}".split()))
    assert given.sharding == (1,) and given.is_sequence_parallel
    assert given.context_parallel == (2,)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (GPT.replace("--vocab-size 1000", ""), r"state it by --vocab"),
        (GPT.replace("--seq-length 32", ""), r"lacks --seq-length"),
        (GPT.replace("heads 4", "heads 5"), r"heads 5 does not divide --hidden-size 64"),
        (f"{GPT} --multi-latent-attention", r"is not modelled"),
    ],
)
def test_what_is_missing_or_not_modelled_is_refused_by_name(flags: str, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        shape_of(flags)


def test_a_vocabulary_may_be_stated_beside_the_flags() -> None:
    bare = GPT.replace("--vocab-size 1000", "")
    assert shape_of(bare, 1000).vocab == 1_024
    assert shape_of(f"{bare} --padded-vocab-size 1001").vocab == 1_001


def test_flags_of_experts_say_how_they_are_cut_and_how_much_they_compute() -> None:
    def work(more: str) -> tuple[int | None, float]:
        flags = f"{GPT} --num-experts 8 --sequence-parallel {more}".split()
        found = workload_of(read_arguments(flags, allow_untested=True))
        return found.expert_tp, found.expert_capacity

    capacity = "--moe-expert-capacity-factor 1.5"
    assert work("") == (None, 1.0)
    assert work("--expert-tensor-parallel-size 1") == (1, 1.0)
    assert work(capacity) == (None, 1.0)  # what is above is dropped, nothing is added
    assert work(f"{capacity} --moe-pad-expert-input-to-capacity") == (None, 1.5)
    assert work("--moe-expert-capacity-factor 0.5") == (None, 0.5)
