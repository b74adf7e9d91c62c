"""What tensor-parallel ranks have makes up the whole, whatever the cut."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalai.converters.between.mapping import find_mapping
from scalai.converters.checkpoint import FilePiece
from scalai.converters.deepspeed.cuts import (
    WHOLE,
    CutRule,
    CutRules,
    ShardCut,
    Shards,
    contiguous,
    even,
    read_cuts,
)
from scalai.core.errors import RefusedError, UsageError
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import row_major, whole
from scalai.store.files import slices

SHAPE = (12, 5, 8)
VALUES = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
CUTS = [
    ShardCut(0, (even(12, 3),)),
    ShardCut(0, (even(8, 3, 4), even(4, 3))),
    ShardCut(1, ((1, 0, 4),)),
    ShardCut(2, ((3, 3, 2),)),
    ShardCut(2, ((1, 1, 1), (2, 1, 0), (1, 0, 1))),
    WHOLE,
]


def shard_of(cut: ShardCut, rank: int) -> Any:
    """Return what a rank has, by numpy alone."""
    if cut.dim is None:
        return VALUES
    parts = np.split(VALUES, np.cumsum(cut.parts)[:-1], cut.dim)
    own = [
        np.split(part, np.cumsum(widths)[:-1], cut.dim)[rank]
        for part, widths in zip(parts, cut.widths, strict=True)
    ]
    return np.ascontiguousarray(np.concatenate(own, cut.dim))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("is_target", [False, True])
def test_shards_make_up_the_whole(cut: ShardCut, is_target: bool) -> None:
    counts = np.zeros(SHAPE, dtype=int)
    for rank in range(3):
        shards = Shards({"w": cut}, rank)
        local = shard_of(cut, rank)
        tensor = shards.shard(Tensor("exp_avg/w", SHAPE, "F32"))
        assert tensor.shape == local.shape
        data = local.tobytes()
        for own in shards.of_whole(FilePiece(tensor, whole(local.shape), "file", 0)):
            for piece in contiguous(own) if is_target else [own]:
                assert piece.tensor.shape == SHAPE
                assert piece.stride is None or not is_target
                steps = [4 * s for s in piece.stride or row_major(piece.box.shape)]
                found = np.ndarray(piece.box.shape, np.float32, data, piece.begin, steps)
                assert (found == VALUES[slices(piece.box)]).all()
                counts[slices(piece.box)] += 1
    assert (counts == (3 if cut.dim is None else 1)).all()


def test_a_part_of_a_shard_lies_where_it_does_in_the_whole() -> None:
    cut = CUTS[4]
    for rank in range(3):
        local = shard_of(cut, rank)
        tensor = Tensor("param/w", local.shape, "F32")
        for row in range(12):
            box = replace(whole(local.shape), offset=(row, 0, 0), shape=(1, 5, local.shape[2]))
            own = FilePiece(tensor, box, "file", 4 * row * 5 * local.shape[2])
            for piece in Shards({"w": cut}, rank).of_whole(own):
                steps = [4 * s for s in piece.stride or ()]
                data = local.tobytes()
                found = np.ndarray(piece.box.shape, np.float32, data, piece.begin, steps)
                assert (found == VALUES[slices(piece.box)]).all()


@pytest.mark.parametrize(("size", "tp", "unit"), [(12, 4, 1), (10, 4, 1), (12, 5, 4), (3, 4, 1)])
def test_shares_are_even_in_units_and_the_first_are_larger(size: int, tp: int, unit: int) -> None:
    shares = even(size, tp, unit)
    assert sum(shares) == size and list(shares) == sorted(shares, reverse=True)
    assert max(shares) - min(shares) <= unit


def test_another_number_of_ranks_keeps_the_parts() -> None:
    cut = ShardCut(0, ((4, 4), (2, 2)), unit=2)
    assert cut.recut("w", 3).widths == ((4, 2, 2), (2, 2, 0))
    with pytest.raises(RefusedError, match="tp=3 does not divide"):
        replace(cut, is_vocabulary=True).recut("w", 3)


INFO = {
    "tp_replicated_parameter_patterns": ["norm"],
    "parameter_to_average_patterns": ["averaged"],
    "parameter_with_row_parallelism_patterns": [r".*\.down$"],
    "parameter_with_2_sub_params_cat_dim_0": ["gate_up"],
    "parameter_with_sub_params": [
        {"patterns": ["qkv"], "shape": ((8, 2, 2), 4), "partition_dim": 0}
    ],
    "sub_param_shard_widths": {"qkv": [[4, 4], [2, 0], [2, 0]]},
    "vocabulary_parameter_patterns": ["words"],
}


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("norm.weight", [(4,)] * 2, WHOLE),
        ("averaged", [(4,)] * 2, WHOLE),
        ("a.down", [(4, 3), (4, 2)], ShardCut(1, ((3, 2),))),
        ("gate_up", [(6, 4)] * 2, ShardCut(0, ((3, 3), (3, 3)))),
        ("qkv", [(8, 4), (4, 4)], ShardCut(0, ((4, 4), (2, 0), (2, 0)))),
        ("words", [(6, 4)] * 2, ShardCut(0, ((6, 6),), is_vocabulary=True)),
        ("other", [(6, 4)] * 2, ShardCut(0, ((6, 6),))),
    ],
)
def test_cuts_follow_from_what_megatron_deepspeed_says(
    name: str, shapes: list[tuple[int, ...]], expected: ShardCut
) -> None:
    assert CutRules(INFO).cuts({name: shapes}) == {name: expected}


BLOCK = "language_model.encoder.layers.0."
SHIPPED = {
    "gpt": {
        0: ["language_model.embedding.word_embeddings.weight", "29.lm_head.weight",
            "tied_modules.embed.word_embeddings.weight", "3.mlp.dense_h_to_4h.bias",
            f"{BLOCK}self_attention.query_key_value.weight"],
        1: [f"{BLOCK}self_attention.dense.weight", "3.mlp.dense_4h_to_h.weight"],
        None: ["language_model.embedding.position_embeddings.weight", "28.weight", "28.bias",
               "tied_modules.embed.position_embeddings.weight", f"{BLOCK}input_layernorm.weight",
               f"{BLOCK}self_attention.dense.bias", "3.mlp.dense_4h_to_h.bias",
               "language_model.encoder.final_layernorm.bias"],
    },
    "llama": {
        0: ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"],
        1: ["model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight"],
        None: ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight",
               "model.layers.0.post_attention_layernorm.weight"],
    },
}  # fmt: skip
"""By the names of Megatron-DeepSpeed's GPT, plain and as a pipeline, and of transformers."""


@pytest.mark.parametrize("family", SHIPPED)
def test_the_shipped_files_know_their_families(family: str) -> None:
    rules = CutRules({}, read_cuts(find_mapping(family, "cuts")))
    for dim, names in SHIPPED[family].items():
        for name in names:
            found = rules.rule(name)
            assert found is not None and found.dim == dim, name


def test_what_nothing_says_is_refused_by_name() -> None:
    rules = CutRules({}, read_cuts(find_mapping("llama", "cuts")))
    known = {"layers.0.up_proj.weight": [(4, 4)] * 2}
    assert rules.cuts(known) == {"layers.0.up_proj.weight": ShardCut(0, ((4, 4),))}
    with pytest.raises(RefusedError, match=r"cut first\.weight, second\.weight\. Name a file"):
        rules.cuts({"first.weight": [(1,)], **known, "second.weight": [(1,)]})


@pytest.mark.parametrize(
    ("rule", "shapes", "words"),
    [
        (CutRule(), [(4,), (2,)], "are not equal"),
        (CutRule(0), [(4, 2), (4, 3)], "no cut of dimension 0"),
        (CutRule(1), [(4,), (4,)], "no cut of dimension 1"),
        (CutRule(0, parts=2), [(5,), (5,)], "parts of it are said"),
        (CutRule(0, parts=(4, 2)), [(4,), (4,)], "parts of it are said"),
    ],
)
def test_shapes_that_a_rule_does_not_make_are_refused(
    rule: CutRule, shapes: list[tuple[int, ...]], words: str
) -> None:
    with pytest.raises(RefusedError, match=words):
        rule.cut("w", shapes)


@pytest.mark.parametrize("text", ["[[cut]]\ndimension = 0", '[[cut]]\nparameters = "("', "cut = 3"])
def test_sections_that_cannot_be_read_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "cuts.toml").write_text(text)
    with pytest.raises(UsageError, match=r"no \[\[cut\]\] sections as expected"):
        read_cuts(tmp_path / "cuts.toml")
