"""The order of parameters in Megatron's buffers, and what of ``dp_reshardable`` is refused."""

import random
from pathlib import Path

import pytest

from scalai.converters.megatron.dp_reshardable import read_buckets
from scalai.converters.megatron.modules import Naming
from scalai.converters.megatron.rank_parameters import OrderedModel, OrderRule
from scalai.converters.megatron.torch_dist_metadata import Chunk, Extent, StoredKey
from scalai.core.errors import RefusedError
from scalai.core.tensors.region import Box

BUCKET = "optimizer.distributed.dp_group_idx_{}.gbuf_idx_0.dtype_(torch.float32, torch.float32)"
LOCAL = OrderRule(Naming(is_local=True))


def stored(name: str, *shape: int, axes: int = 0) -> StoredKey:
    """Return a key whose first ``axes`` axes are layers or experts, each a chunk of its own."""
    extent = Extent("__0_0.distcp", 0, 0)
    boxes = [Box((), ())]
    for size in shape[:axes]:
        boxes = [Box((*b.offset, at), (*b.shape, 1)) for b in boxes for at in range(size)]
    rest = shape[axes:]
    chunks = [Chunk(Box((*b.offset, *[0] * len(rest)), (*b.shape, *rest)), extent) for b in boxes]
    return StoredKey(name, shape, "F32", tuple(chunks))


def model(keys: list[StoredKey], rule: OrderRule = LOCAL) -> OrderedModel:
    """Return a model whose keys some ranks have written in an order of their own."""
    return OrderedModel.of(random.Random(4).sample(keys, len(keys)), rule, lambda *_: (0, (), 4))


def names(
    model: OrderedModel, layers: range, *, is_first: bool = True, is_last: bool = True
) -> list[str]:
    found = model.stage(layers, 0, is_first=is_first, is_last=is_last)
    return [f"{parameter.name}{' (copy)' * parameter.is_copy}" for parameter in found]


DENSE = [
    stored("embedding.word_embeddings.weight", 8, 4),
    stored("embedding.position_embeddings.weight", 8, 4),
    stored("decoder.layers.self_attention.linear_qkv.layer_norm_weight", 2, 4, axes=1),
    stored("decoder.layers.self_attention.linear_qkv.weight", 2, 12, 4, axes=1),
    stored("decoder.layers.self_attention.linear_proj.weight", 2, 4, 4, axes=1),
    stored("decoder.layers.mlp.linear_fc1.layer_norm_weight", 2, 4, axes=1),
    stored("decoder.layers.mlp.linear_fc1.weight", 2, 16, 4, axes=1),
    stored("decoder.layers.mlp.linear_fc2.weight", 2, 4, 16, axes=1),
    stored("decoder.final_layernorm.weight", 4),
]
LAYER = [
    "self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_proj.weight",
    "self_attention.linear_qkv.weight", "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight", "mlp.linear_fc2.weight",
]  # fmt: skip
LAYER_0, LAYER_1 = ([f"decoder.layers.{n}.{name}" for name in LAYER] for n in range(2))
WORDS, POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
MTP = [
    stored("mtp.layers.0.eh_proj.weight", 4, 8),
    stored("mtp.layers.0.hnorm.weight", 4),
    stored("mtp.layers.0.enorm.weight", 4),
    stored("mtp.layers.0.transformer_layer.self_attention.linear_qkv.layer_norm_weight", 4),
    stored("mtp.layers.0.transformer_layer.self_attention.linear_proj.weight", 4, 4),
    stored("mtp.layers.0.final_layernorm.weight", 4),
]
MTP_ORDER = [
    "mtp.layers.0.enorm.weight", "mtp.layers.0.hnorm.weight", "mtp.layers.0.eh_proj.weight",
    "mtp.layers.0.transformer_layer.self_attention.linear_qkv.layer_norm_weight",
    "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight",
    "mtp.layers.0.final_layernorm.weight",
]  # fmt: skip


def test_keys_in_the_order_of_the_writing_ranks_stand_as_the_modules_do() -> None:
    whole = model(DENSE)
    last = "decoder.final_layernorm.weight"
    assert names(whole, range(2)) == [WORDS, POSITIONS, *LAYER_0, *LAYER_1, last]
    assert names(whole, range(1), is_last=False) == [WORDS, POSITIONS, *LAYER_0]
    tied = [*LAYER_1, last, f"{WORDS} (copy)"]
    assert names(whole, range(1, 2), is_first=False) == tied


def test_norms_of_transformer_engine_stand_inside_of_the_linear_layer_behind_them() -> None:
    found = names(model(DENSE, OrderRule(Naming(is_local=False))), range(1), is_last=False)
    assert [name.partition("layers.0.")[2] for name in found[2:]] == [
        "self_attention.linear_proj.weight", "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight", "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight", "mlp.linear_fc2.weight",
    ]  # fmt: skip


def test_layers_that_predict_stand_on_the_last_stage_with_an_embedding_of_their_own() -> None:
    whole = model([*DENSE, *MTP, stored("output_layer.weight", 8, 4)])
    last = ["decoder.final_layernorm.weight", *MTP_ORDER, "output_layer.weight"]
    assert names(whole, range(2)) == [WORDS, POSITIONS, *LAYER_0, *LAYER_1, *last]
    copies = [f"{WORDS} (copy)", f"{POSITIONS} (copy)"]
    assert names(whole, range(1, 2), is_first=False) == [*copies, *LAYER_1, *last]


def test_dense_layers_stand_beside_layers_of_experts_and_their_bias_is_no_parameter() -> None:
    keys = [
        stored("decoder.layers.0.mlp.linear_fc1.weight", 16, 4),
        stored("decoder.layers.1.mlp.router.expert_bias", 2),
        stored("decoder.layers.1.mlp.router.weight", 2, 4),
        stored("decoder.layers.1.mlp.experts.experts.linear_fc1.weight", 2, 8, 4, axes=1),
        stored("decoder.layers.1.mlp.experts.experts.linear_fc2.weight", 2, 4, 8, axes=1),
        stored("decoder.layers.1.mlp.shared_experts.linear_fc1.weight", 8, 4),
    ]
    found = model(keys)
    assert found.experts == 2
    expert = "decoder.layers.1.mlp.experts.experts.{}.linear_fc{}.weight"
    assert names(found, range(2)) == [
        "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.mlp.router.weight",
        *(expert.format(n, fc) for n in range(2) for fc in (1, 2)),
        "decoder.layers.1.mlp.shared_experts.linear_fc1.weight",
    ]  # fmt: skip
    grouped = model(keys, OrderRule(Naming(is_local=False, is_grouped=True)))
    of_rank = grouped.expert_stage(range(2), 0, range(1, 2), is_last=True)
    assert [p.name for p in of_rank] == [expert.format(1, fc) for fc in (1, 2)]
    both = [p.name for p in grouped.expert_stage(range(2), 0, range(2), is_last=True)]
    assert both == [expert.format(n, fc) for fc in (1, 2) for n in range(2)]


def test_an_encoder_stands_before_the_decoder() -> None:
    keys = [
        stored("decoder.layers.cross_attention.linear_kv.weight", 1, 8, 4, axes=1),
        stored("decoder.layers.cross_attention.linear_q.weight", 1, 4, 4, axes=1),
        stored("decoder.layers.pre_cross_attn_layernorm.weight", 1, 4, axes=1),
        stored("decoder.layers.self_attention.linear_proj.weight", 1, 4, 4, axes=1),
        stored("encoder.layers.self_attention.linear_proj.weight", 2, 4, 4, axes=1),
        stored("encoder.final_layernorm.weight", 4),
        stored("lm_head.output_layer.bias", 8),
        stored("output_layer.bias", 8),
        stored("embedding.word_embeddings.weight", 8, 4),
        stored("embedding.position_embeddings.weight", 8, 4),
        stored("position_embeddings.weight", 8, 4),
    ]
    assert names(model(keys), range(1)) == [
        WORDS, "position_embeddings.weight", "encoder.layers.0.self_attention.linear_proj.weight",
        "encoder.layers.1.self_attention.linear_proj.weight", "encoder.final_layernorm.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.pre_cross_attn_layernorm.weight",
        "decoder.layers.0.cross_attention.linear_q.weight",
        "decoder.layers.0.cross_attention.linear_kv.weight", "output_layer.bias",
    ]  # fmt: skip


def test_modules_that_are_not_known_stand_as_one_rank_wrote_them() -> None:
    keys = [
        stored("embedding.word_embeddings.weight", 8, 4),
        stored("decoder.layers.mixer.out.weight", 2, 4, 4, axes=1),
        stored("decoder.layers.mixer.in.weight", 2, 4, 4, axes=1),
        stored("decoder.final_norm.weight", 4),
    ]
    with pytest.raises(RefusedError, match=r"mixer.*order in Megatron is not known"):
        model(keys)
    rule = OrderRule(Naming(is_local=True), is_stored=True)
    found = OrderedModel.of(keys, rule, lambda *_: (0, (), 4))
    mixers = [f"decoder.layers.{n}.mixer.{way}.weight" for n in range(2) for way in ("out", "in")]
    assert names(found, range(2)) == [WORDS, *mixers, "decoder.final_norm.weight"]
    assert names(found, range(1, 2), is_first=False)[-1] == f"{WORDS} (copy)"


def test_what_fits_nothing_is_refused_with_a_way_out_that_is_one(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(bytes(64))
    keys = [stored("embedding.word_embeddings.weight", 8, 4)]
    one = [stored(f"{BUCKET.format(0)}.bucket_idx_{n}.param", 3) for n in range(1)]
    two = [stored(f"{BUCKET.format(0)}.bucket_idx_{n}.param", 3) for n in range(2)]
    with pytest.raises(RefusedError, match=r"save it with --dist-ckpt-optim-fully-reshardable\.$"):
        read_buckets(tmp_path, one, keys, lambda *_: (0, (), 4), {})
    with pytest.raises(RefusedError, match=r"fully-reshardable, by a release after 0\.19"):
        read_buckets(tmp_path, two, keys, lambda *_: (0, (), 4), {})
    other = [*keys, stored("decoder.layers.mixer.weight", 2, 4, axes=1)]
    with pytest.raises(RefusedError, match=r"mixer.* with --no-ckpt-fully-parallel-save"):
        read_buckets(tmp_path, one, other, lambda *_: (0, (), 4), {})
