"""Buckets of ``dp_reshardable``: the order of parameters, their places, and refusals."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from scalai.converters.dcp_metadata import Chunk, Extent, StoredKey
from scalai.converters.megatron.dp_reshardable import (
    HEAD,
    BucketPlace,
    SeveralFitsError,
    lay,
    lay_trained,
    read_buckets,
)
from scalai.converters.megatron.modules import Naming
from scalai.converters.megatron.rank_parameters import (
    OrderedModel,
    OrderRule,
    RankParameter,
    ShardBox,
)
from scalai.core.errors import RefusedError
from scalai.core.tensors.region import Box, Piece, row_major, whole

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


def parameters(*sizes: int) -> list[RankParameter]:
    """Return parameters of these sizes, in the order in which they fill buckets."""
    return [
        RankParameter(
            f"p{at}", (size,), "F32", (ShardBox(Piece(whole((size,)), 0, (1,)), "file", 0),)
        )
        for at, size in enumerate(sizes)
    ]


class Memory:
    """Buckets and weights in memory: parameters of equal ``values`` have equal content."""

    def __init__(self, sizes: list[int], placed: list[tuple[int, int, int, float]]) -> None:
        """``placed``: (bucket, start, size, value)."""
        self.buckets = [np.zeros(size, np.float32) for size in sizes]
        for bucket, start, size, value in placed:
            self.buckets[bucket][start : start + size] = value
        self.values: dict[str, float] = {}

    def weights(self, parameter: RankParameter) -> bytes:
        count = min(parameter.numel, HEAD)
        return np.full(count, self.values[parameter.name], np.float32).tobytes()

    def masters(self, bucket: int, start: int, count: int) -> bytes | None:
        data = self.buckets[bucket][start : start + count]
        return data.tobytes() if len(data) == count else None

    def is_equal(self, found: BucketPlace) -> bool:
        data = self.buckets[found.bucket][found.start : found.start + found.parameter.numel]
        return bool((data == self.values[found.parameter.name]).all())


def test_all_parameters_fill_the_buckets_from_multiples_of_64() -> None:
    found = lay([164, 70], parameters(100, 36, 70))
    assert found is not None
    assert [(f.bucket, f.start) for f in found] == [(0, 0), (0, 128), (1, 0)]


def test_a_bucket_that_ends_before_a_tied_embedding_is_a_multiple_of_64() -> None:
    found = lay([192, 256], parameters(64, 70, 256))
    assert found is not None
    assert [(f.bucket, f.start) for f in found] == [(0, 0), (0, 64), (1, 0)]


@pytest.mark.parametrize("sizes", [[165, 70], [164], [164, 70, 64], [164, 71], [100, 36]])
def test_other_sizes_do_not_fit(sizes: list[int]) -> None:
    assert lay(sizes, parameters(100, 36, 70)) is None


def test_what_is_not_trained_is_found_by_content() -> None:
    # p1 and p3 are not trained; p4 is as large and as equal in content as p3.
    content = Memory([128], [(0, 0, 50, 1.0), (0, 64, 20, 3.0), (0, 84, 44, 0.0)])
    content.values = {"p0": 1.0, "p1": 2.0, "p2": 3.0, "p3": 5.0}
    found = lay_trained([84], parameters(50, 30, 20, 20), content)
    assert found is not None
    assert [(f.parameter.name, f.bucket, f.start) for f in found] == [("p0", 0, 0), ("p2", 0, 64)]


def test_two_that_could_both_be_trained_are_not_guessed() -> None:
    content = Memory([84], [(0, 0, 50, 1.0), (0, 64, 20, 3.0)])
    content.values = {"p0": 1.0, "p1": 3.0, "p2": 3.0}
    with pytest.raises(SeveralFitsError):
        lay_trained([84], parameters(50, 20, 20), content)


def test_content_that_is_nobodys_fits_nothing() -> None:
    content = Memory([50], [(0, 0, 50, 4.0)])
    content.values = {"p0": 1.0}
    assert lay_trained([50], parameters(50), content) is None


def test_many_parameters_of_which_every_second_is_trained() -> None:
    sizes = [32] * 5000
    content = Memory([64 * 2499 + 32], [(0, 64 * n, 32, 2.0 * n) for n in range(2500)])
    content.values = {f"p{at}": float(at) for at in range(5000)}
    found = lay_trained([64 * 2499 + 32], parameters(*sizes), content)
    assert found is not None
    assert [f.parameter.name for f in found] == [f"p{at}" for at in range(0, 5000, 2)]


LAYERS, EXPERTS, FILE = 4, 4, "all"


@dataclass
class Writer:
    """A file of fp32 numbers, and the keys that lie in it."""

    numbers: list[np.ndarray] = field(default_factory=list)
    begin: dict[Extent, int] = field(default_factory=dict)
    keys: list[StoredKey] = field(default_factory=list)
    size: int = 0

    def put(self, values: np.ndarray) -> Extent:
        extent = Extent(FILE, self.size, values.nbytes)
        self.begin[extent] = self.size
        self.numbers.append(values.ravel())
        self.size += values.nbytes
        return extent

    def weight(self, name: str, shape: tuple[int, ...], axes: int = 0) -> dict[int, np.ndarray]:
        """Write a parameter, or one an expert; return the values of each."""
        count = shape[0] if axes else 1
        found = {at: np.random.default_rng(self.size + at).random(shape[axes:], np.float32)
                 for at in range(count)}  # fmt: skip
        chunks = [
            Chunk(Box((*[at] * axes, *[0] * len(v.shape)), (*[1] * axes, *v.shape)), self.put(v))
            for at, v in found.items()
        ]
        self.keys.append(StoredKey(name, shape, "F32", tuple(chunks)))
        return found

    def bucket(self, prefix: str, values: list[np.ndarray]) -> list[StoredKey]:
        """Return the keys of a bucket that holds these, the last module's first."""
        whole, moments = np.zeros(0, np.float32), np.zeros(0, np.float32)
        for at in reversed(values):
            room = np.zeros(-len(whole) % 64, np.float32)
            whole = np.concatenate([whole, room, at.ravel()])
            moments = np.concatenate([moments, room, 2 * at.ravel()])
        return [
            StoredKey(
                f"{prefix}.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.{kind}",
                data.shape, "F32", (Chunk(Box((0,), data.shape), self.put(data)),),
            )
            for kind, data in (("param", whole), ("exp_avg", moments))
        ]  # fmt: skip


@pytest.mark.parametrize("sparse", [(2, 3), (0, 1), (1, 2, 3)])
def test_experts_of_some_stages_get_their_own_moments(
    tmp_path: Path, sparse: tuple[int, ...]
) -> None:
    writer = Writer()
    dense: list[list[np.ndarray]] = [[], []]
    experts: dict[tuple[int, int], list[np.ndarray]] = {}
    for layer in range(LAYERS):
        stage, name = layer // 2, f"decoder.layers.{layer}.mlp"
        if layer not in sparse:
            dense[stage].append(writer.weight(f"{name}.linear_fc2.weight", (3, 5))[0])
            continue
        dense[stage].append(writer.weight(f"{name}.router.weight", (EXPERTS, 3))[0])
        up, down = (
            writer.weight(f"{name}.experts.experts.{part}.weight", (EXPERTS, *shape), 1)
            for part, shape in (("linear_fc1", (5, 3)), ("linear_fc2", (3, 5)))
        )
        for expert in range(EXPERTS):
            # Groups are numbered stage by stage, in each EP rank by EP rank.
            of = experts.setdefault((stage, expert // 2), [])
            of += [up[expert], down[expert]]
    buckets = [
        key
        for stage in range(2)
        for key in writer.bucket(
            f"chained_0.optimizer.distributed.dp_group_idx_{stage}", dense[stage]
        )
    ]
    for (stage, ep_rank), values in experts.items():
        group = f"chained_1.optimizer.distributed.dp_group_idx_{2 * stage + ep_rank}"
        buckets += writer.bucket(group, values)
    numbers = np.concatenate(writer.numbers)
    (tmp_path / FILE).write_bytes(numbers.tobytes())
    rescued = read_buckets(
        tmp_path,
        buckets,
        writer.keys,
        lambda _, chunk: (writer.begin[chunk.extent], row_major(chunk.box.shape), 4),
        {"expert_model_parallel_size": 2, "num_experts": EXPERTS},
    )
    found = {piece.tensor.name: piece for piece in rescued.pieces}
    assert len(found) == len(rescued.pieces) == (LAYERS + 2 * EXPERTS * len(sparse))
    for stored in writer.keys:
        for chunk in stored.chunks:
            at = chunk.box.offset[0]
            name = stored.key.replace("experts.experts.", f"experts.experts.{at}.")
            size, moment = chunk.box.numel, found[f"exp_avg/{name}"]
            weight = writer.begin[chunk.extent] // 4
            low = moment.begin // 4
            assert (numbers[low : low + size] == 2 * numbers[weight : weight + size]).all(), name
