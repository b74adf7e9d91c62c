"""Shapes of models: by Megatron-LM's flags, and by checkpoints of any layout."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.checkpoint import PARAM, Checkpoint
from scalai.converters.layouts import open_checkpoint
from scalai.converters.megatron.arguments import TOLD_FACT, read_arguments, told_of
from scalai.converters.megatron.model_shape import choices_of, workload_of
from scalai.converters.megatron.stored_model import read_model
from scalai.core.errors import RefusedError
from scalai.core.planner.shape import ModelShape
from scalai.store.generation import load_generation
from scalai.store.manifest import write_manifest
from scalai.store.places import find_generations
from support.checkpoints import GPT_SHAPES as SHAPES
from support.checkpoints import convert
from support.checkpoints import gpt as checkpoint_of
from support.model_shapes import gpt

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


STATED: dict[str, Any] = {
    "num_attention_heads": 2, "group_query_attention": True, "num_query_groups": 1,
    "seq_length": 4, "global_batch_size": 16, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "num_layers": 4, "swiglu": True,
}  # fmt: skip
SHAPE = ModelShape(
    layers=4, hidden=8, heads=2, ffn=12, vocab=16, seq=4, kv_groups=1, head_dim=4, positions=4,
    is_gated=True, has_bias=False, has_qkv_bias=True, has_norm_bias=False,
)  # fmt: skip
EXPERTS: Mapping[str, tuple[int, ...]] = {
    **{
        f"decoder.layers.{layer}.mlp.{name}": shape
        for layer in (1, 3)
        for name, shape in {
            "router.weight": (2, 8),
            **{f"experts.experts.{e}.linear_fc1.weight": (20, 8) for e in (0, 1)},
            **{f"experts.experts.{e}.linear_fc2.weight": (8, 10) for e in (0, 1)},
            "shared_experts.linear_fc1.weight": (12, 8),
            "shared_experts.linear_fc2.weight": (8, 6),
        }.items()
    },
    "output_layer.weight": (16, 8),
}


def parameters(checkpoint: Checkpoint) -> int:
    tensors = checkpoint.placed.collection.tensors
    return sum(each.numel for each in tensors if each.name.startswith(f"{PARAM}/"))


@pytest.mark.parametrize("degrees", [{}, {"tp": 2, "pp": 2}])
@pytest.mark.parametrize("layout", ["torch_dist", "torch", "scalai"])
def test_each_layout_says_it(tmp_path: Path, layout: str, degrees: dict[str, Any]) -> None:
    checkpoint = convert(checkpoint_of(**STATED), tmp_path, layout, **degrees)
    found = read_model(checkpoint, None, None)
    assert found.shape == SHAPE and found.shape.total_parameters == parameters(checkpoint)
    assert (found.precision, found.has_dropout, found.global_batch) == ("fp32", False, 16)
    other = read_model(checkpoint, 2, 32).shape
    assert (other.seq, other.vocab, other.positions) == (2, 32, 4)


def generation_of_a_job(folder: Path, arguments: Mapping[str, Any]) -> Checkpoint:
    """Return a generation as workers make one: it has no arguments, and facts that they told."""
    source = checkpoint_of()
    source = replace(source, values=replace(source.values, arguments=None))
    convert(source, folder, "scalai")
    ((number, directories),) = find_generations(folder).items()
    (part,) = load_generation(directories, number).hosts
    facts = {"padded_vocab_size": 16, TOLD_FACT: told_of(arguments)}
    write_manifest(directories[0], replace(part, about={**part.about, "facts": facts}))
    return open_checkpoint(folder)


def test_a_generation_says_it_where_its_workers_have_told_the_arguments(tmp_path: Path) -> None:
    found = read_model(generation_of_a_job(tmp_path, STATED), None, None)
    assert found.shape == SHAPE and found.global_batch == 16 and not found.has_dropout


def test_what_no_tensor_says_is_named_with_what_is_known(tmp_path: Path) -> None:
    found = generation_of_a_job(tmp_path, {"global_batch_size": 16})
    text = (
        "does not say num_attention_heads: it holds no arguments of Megatron's that do. By its "
        "tensors it has layers = 4, hidden = 8, vocab = 16. Give the job's own flags behind --"
    )
    with pytest.raises(RefusedError, match=re.escape(text)):
        read_model(found, None, None)


def without(*parts: str, **more: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the GPT without the parameters that have any of these in their names."""
    kept = {n: shape for n, shape in SHAPES.items() if not any(part in n for part in parts)}
    return {**kept, **more}


def test_experts_are_counted_by_layers(tmp_path: Path) -> None:
    dense = {
        name: shape for name, shape in without("position").items()
        if not re.search(r"[13]\.mlp\.linear_fc[12]\.weight", name)
    }  # fmt: skip
    checkpoint = checkpoint_of({**dense, **EXPERTS}, **STATED, moe_router_topk=2, num_experts=2)
    shape = read_model(checkpoint, None, None).shape
    assert (shape.experts, shape.moe_layers, shape.top_k) == (2, 2, 2)
    assert (shape.expert_ffn, shape.shared_ffn, shape.ffn) == (10, 6, 12)
    assert not shape.is_tied and shape.positions == 0
    assert shape.total_parameters == parameters(checkpoint)
    with pytest.raises(RefusedError, match=r"does not say seq_length .*, moe_router_topk:"):
        read_model(checkpoint_of({**dense, **EXPERTS}, num_attention_heads=2), None, None)


def test_where_heads_have_norms_nobody_has_to_say_how_many_there_are() -> None:
    norms = {
        f"decoder.layers.{layer}.self_attention.{of}_layernorm.weight": (4,)
        for layer in range(4) for of in "qk"
    }  # fmt: skip
    shape = read_model(checkpoint_of({**SHAPES, **norms}), 32, None).shape
    assert (shape.heads, shape.kv_groups, shape.head_dim, shape.seq) == (2, 1, 4, 32)


@pytest.mark.parametrize(
    ("shapes", "arguments", "why"),
    [
        (SHAPES, {"num_attention_heads": 3}, "3 heads do not divide the 8 columns"),
        (SHAPES, {"num_attention_heads": 1}, "1 heads of 8 do not divide the rows"),
        (SHAPES, {"num_layers": 6}, "has 4 layers by its tensors, and 6 by its arguments"),
        (
            {n: ((8, 0) if "proj" in n else shape) for n, shape in SHAPES.items()}, {},
            "2 heads do not divide the 0 columns",
        ),
        (without("linear_proj"), {}, "no matrix 'self_attention.linear_proj.weight'"),
        (without("word_embeddings"), {}, "no matrix 'embedding.word_embeddings.weight'"),
        (
            {**SHAPES, "decoder.layers.1.mlp.experts.experts.0.linear_fc1.weight": (8, 8)}, {},
            "no matrix 'mlp.experts.linear_fc2.weight'",
        ),
        (
            {**SHAPES, "mtp.layers.0.eh_proj.weight": (8, 16)}, {},
            "has 'mtp.layers.0.eh_proj.weight', which is of no part of a model that is modelled",
        ),
        (
            {**SHAPES, "decoder.layers.2.mlp.linear_fc2.weight": (8, 16)}, {},
            "layers of several sizes are not modelled",
        ),
    ],
)  # fmt: skip
def test_what_is_no_gpt_or_contradicts_itself_is_refused(
    shapes: Mapping[str, tuple[int, ...]], arguments: dict[str, Any], why: str
) -> None:
    with pytest.raises(RefusedError, match=re.escape(why)):
        read_model(checkpoint_of(shapes, **{**STATED, **arguments}), None, None)


@pytest.mark.parametrize(
    ("arguments", "has_dropout"),
    [({}, True), ({"hidden_dropout": 0.1}, True), ({"hidden_dropout": object()}, True)],
)
def test_dropouts_are_those_of_the_arguments(arguments: dict[str, Any], has_dropout: bool) -> None:
    found = read_model(checkpoint_of(num_attention_heads=2, **arguments), None, None)
    assert found.has_dropout == has_dropout
