"""Each rank's part of a DeepSpeed job: tensor-parallel cuts, flat buffers, stages, experts."""

import importlib.util
import re
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalai.converters.between.mapping import find_mapping
from scalai.converters.checkpoint import FilePiece
from scalai.converters.deepspeed import experts
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
from scalai.converters.deepspeed.experts import Name
from scalai.converters.deepspeed.flat import (
    Flat,
    gaps_of,
    round_robin,
    split_each,
    split_whole,
    sub_groups,
    undo_round_robin,
)
from scalai.converters.deepspeed.grid import units_by_stage
from scalai.converters.deepspeed.pipeline import (
    METHODS,
    Given,
    LayerFile,
    Pipeline,
    order,
    partition,
    read_pipeline,
    stages_at,
)
from scalai.converters.deepspeed.plain_layout import match_names
from scalai.converters.torch_archive import StoredTensor
from scalai.core.errors import RefusedError, UsageError
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import row_major, whole
from scalai.store.files import slices

WHOLE_SHAPE = (12, 5, 8)
VALUES = np.arange(np.prod(WHOLE_SHAPE), dtype=np.float32).reshape(WHOLE_SHAPE)
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
    counts = np.zeros(WHOLE_SHAPE, dtype=int)
    for rank in range(3):
        shards = Shards({"w": cut}, rank)
        local = shard_of(cut, rank)
        tensor = shards.shard(Tensor("exp_avg/w", WHOLE_SHAPE, "F32"))
        assert tensor.shape == local.shape
        data = local.tobytes()
        for own in shards.of_whole(FilePiece(tensor, whole(local.shape), "file", 0)):
            for piece in contiguous(own) if is_target else [own]:
                assert piece.tensor.shape == WHOLE_SHAPE
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


def test_a_cut_that_autotp_does_not_describe_is_told_by_a_person_or_refused() -> None:
    info = {"autotp_unsupported_parameter_patterns": {"odd": "a custom layer"}}
    shapes = {"odd.weight": [(4, 4)] * 2}
    with pytest.raises(RefusedError, match=r"a custom layer.*say its cut in a file for --cuts"):
        CutRules(info).cuts(shapes)
    assert CutRules(info).known_cuts(shapes) == {}
    told = CutRules(info, ((re.compile("odd.*"), CutRule(0)),))
    assert told.cuts(shapes) == told.known_cuts(shapes) == {"odd.weight": ShardCut(0, ((4, 4),))}


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


PARAMETERS: dict[str, tuple[int, ...]] = {
    "a": (5, 3),
    "none": (),
    "b": (7,),
    "empty": (0,),
    "c": (1, 2),
}
RANKS = [1, 2, 3, 7, 20]


def elements_of(flat: Flat) -> list[tuple[str, int]]:
    """Return (name, element) of all ranks; fail where two lie at one place of a buffer."""
    found = []
    for spans in flat.spans:
        places = [span.at + i for span in spans for i in range(span.high - span.low)]
        assert len(set(places)) == len(places)
        assert all(0 <= place < flat.rank_elements for place in places)
        found += [(span.name, i) for span in spans for i in range(span.low, span.high)]
    return found


EXPECTED = [(name, i) for name, shape in PARAMETERS.items() for i in range(prod(shape))]


@pytest.mark.parametrize("dp", RANKS)
@pytest.mark.parametrize("is_aligned", [False, True])
def test_the_cut_whole_holds_each_element_once(dp: int, is_aligned: bool) -> None:
    gaps = gaps_of(PARAMETERS, 4, is_aligned=is_aligned)
    flat = split_whole(PARAMETERS, dp, gaps)
    assert elements_of(flat) == EXPECTED
    assert flat.rank_elements % 2 == 0
    end = sum(map(prod, PARAMETERS.values())) + sum(gaps)
    assert sum(flat.padding) == flat.rank_elements * dp - end


@pytest.mark.parametrize("dp", RANKS)
def test_parameters_cut_each_hold_each_element_once(dp: int) -> None:
    flat = split_each(PARAMETERS, dp)
    assert sorted(elements_of(flat)) == sorted(EXPECTED)
    assert flat.rank_elements == sum(-(-prod(shape) // dp) for shape in PARAMETERS.values())


def test_aligned_parameters_begin_at_16_bytes() -> None:
    assert gaps_of({"a": (3,), "b": (4,), "c": (1,)}, 4, is_aligned=True) == [1, 0, 0]
    assert gaps_of({"a": (3,), "b": (4,), "c": (1,)}, 2, is_aligned=True) == [5, 4, 0]


def test_a_sub_group_ends_where_it_is_full() -> None:
    shapes = {"a": (4,), "b": (4,), "c": (4,)}
    assert list(sub_groups(shapes, 2, 3)) == [("a", "b"), ("c",)]
    assert list(sub_groups(shapes, 2, 100)) == [("a", "b", "c")]


@pytest.mark.parametrize("dp", RANKS)
def test_round_robin_is_undone(dp: int) -> None:
    names = tuple("abcdefg")
    assert undo_round_robin(round_robin(names, dp), dp) == names


def by_shape(
    module: dict[str, tuple[int, ...]], groups: list[tuple[tuple[int, ...], ...]]
) -> list[list[tuple[str, ...]]]:
    """Match names where every place of a group is a parameter of a shape."""

    def advance(group: int, at: int, name: str) -> int | None:
        fits = at < len(groups[group]) and groups[group][at] == module[name]
        return at + 1 if fits else None

    return match_names(list(module), [1] * len(module), [len(group) for group in groups], advance)


def test_names_follow_from_shapes_where_one_assignment_is_possible() -> None:
    module = {"w1": (2, 2), "b1": (2,), "frozen": (9,), "w2": (2, 2), "b2": (2,)}
    assert by_shape(module, [((2, 2), (2, 2)), ((2,), (2,))]) == [[("w1", "w2"), ("b1", "b2")]]
    assert len(by_shape(module, [((2, 2),), ((2,), (2,))])) == 2
    assert by_shape(module, [((3,),)]) == []


def test_names_of_a_flat_buffer_follow_from_its_elements() -> None:
    module = {"a": [1, 2], "frozen": [3], "b": [4, 5, 6], "c": [7]}
    buffers = [[1, 2, 7], [4, 5, 6]]

    def advance(group: int, at: int, name: str) -> int | None:
        end = at + len(module[name])
        return end if buffers[group][at:end] == module[name] else None

    sizes = [len(values) for values in module.values()]
    assert match_names(list(module), sizes, [3, 3], advance) == [[("a", "c"), ("b",)]]


def test_names_of_thousands_of_parameters_are_found() -> None:
    module: dict[str, tuple[int, ...]] = {f"p{number}": (number % 7 + 1,) for number in range(3000)}
    small = tuple(shape for shape in module.values() if shape[0] < 4)
    large = tuple(shape for shape in module.values() if shape[0] >= 4)
    ((of_small, of_large),) = by_shape(module, [small, large])
    assert sorted((*of_small, *of_large)) == sorted(module)


EMBED = "tied_modules.embed"
TRAINED = {
    f"{EMBED}.weight": (32, 8),
    **{f"{layer}.{name}": (16, 8) for layer in range(1, 7) for name in ("up", "down")},
    "7.weight": (8,),
}
PLACES = [EMBED, *map(str, range(1, 8)), EMBED]
FILES = tuple(LayerFile(place, unit, ()) for place, unit in enumerate(PLACES[:-1]))


def stages(*bounds: int) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(PLACES[low:high]) for low, high in pairwise(bounds))


WEIGHTS = [[1], [3, 1, 1, 1, 3], [0, 5, 0, 0, 7, 7, 7, 1], [1] * 12, [9, 1, 1, 1, 1, 1, 1, 9, 0]]


@pytest.mark.campaign
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 7])
def test_partitions_are_those_of_deepspeed(weights: list[int], pp: int) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    places = list(map(str, range(len(weights))))
    trained = {f"{place}.w": (weight,) for place, weight in zip(places, weights, strict=True)}
    found = {method: partition(method, places, trained, pp) for method in METHODS[:2]}
    assert found["uniform"] == partition_uniform(len(weights), pp)
    assert found["parameters"] == [int(bound) for bound in partition_balanced(weights, pp)]


@pytest.mark.parametrize(
    ("before", "pp", "expected"),
    [
        ((0, 9), 2, (0, 4, 9)),  # nothing can be seen: by parameters, as DeepSpeed does
        ((0, 3, 5, 7, 9), 2, (0, 5, 9)),  # uniform; of 9 layers the first stage has one more
        ((0, 3, 5, 9), 4, (0, 3, 5, 6, 9)),  # by type: blocks alone count
        ((0, 2, 9), 2, (0, 2, 9)),  # as they are
        ((0, 2, 9), 1, (0, 9)),
    ],
)
def test_stages_begin_by_the_method_that_fits_the_source(
    before: tuple[int, ...], pp: int, expected: tuple[int, ...]
) -> None:
    found, _ = stages_at(Pipeline(FILES, stages(*before)), pp, TRAINED, Given())
    assert found == stages(*expected)


def test_stages_that_no_method_makes_are_refused_unless_they_are_told() -> None:
    pipeline = Pipeline(FILES, stages(0, 2, 9))
    with pytest.raises(RefusedError, match="none of the methods"):
        stages_at(pipeline, 3, TRAINED, Given())
    found, _ = stages_at(pipeline, 3, TRAINED, Given(parts=(0, 1, 2, 9)))
    assert found == stages(0, 1, 2, 9)
    with pytest.raises(RefusedError, match="not the 4 bounds"):
        stages_at(pipeline, 3, TRAINED, Given(parts=(0, 9)))


def test_tied_layers_are_where_they_are_told_to_be() -> None:
    pipeline = Pipeline(FILES, stages(0, 9))
    reported = Given(method="uniform", tied={EMBED: [0]}, layers=8)
    found, _ = stages_at(pipeline, 2, TRAINED, reported)
    assert [EMBED in stage for stage in found] == [True, False]


def stored(*shape: int) -> StoredTensor:
    return StoredTensor("F32", shape, row_major(shape), 0)


@pytest.mark.parametrize(
    ("sizes", "totals", "tied", "expected"),
    [
        ((8, 4, 4, 2), (12, 6), {}, ["01", "23"]),
        ((8, 4, 4, 2), (12, 14), {0: "0", 4: "0"}, ["01", "230"]),  # the first one comes again
        ((8, 4, 4, 2), (12, 14), {}, "none of the ways"),
        ((4, 4, 4, 4), (8, 4), {}, "none of the ways"),
    ],
)
def test_without_zero_stages_have_what_their_optimizers_have(
    sizes: tuple[int, ...], totals: tuple[int, ...], tied: dict[int, str], expected: list[str] | str
) -> None:
    files = [LayerFile(place, str(place), ("w",)) for place in range(len(sizes))]
    tensors = {f"{place}.w": stored(size) for place, size in enumerate(sizes)}
    states = [
        {"optimizer": {"state": {0: {"step": stored(), "exp_avg": stored(total)}}}}
        for total in totals
    ]

    def found() -> list[frozenset[str]]:
        return list(units_by_stage(Path("tag"), files, tied, tensors, states))

    if isinstance(expected, str):
        with pytest.raises(RefusedError, match=expected):
            found()
    else:
        assert found() == [frozenset(stage) for stage in expected]


def test_names_are_ordered_as_modules_are() -> None:
    names = ["10.b", f"{EMBED}.w", "2.z", "2.a", "10.a", f"{EMBED}.w"]
    assert order(names) == [f"{EMBED}.w", "2.z", "2.a", "10.b", "10.a"]


def test_a_section_of_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cuts.toml"
    path.write_text("[pipeline]\nparts = [0, 2, 4]\ntied = {embed = [0, 3]}\nlayers = 4\n")
    assert read_pipeline(path) == Given((0, 2, 4), "", {EMBED: [0, 3]}, 4)
    path.write_text('[pipeline]\npartition_method = "profile"\n')
    with pytest.raises(UsageError, match="profile"):
        read_pipeline(path)


def test_large_groups_are_split_where_deepspeed_splits_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [str(Name("moe", number, ".up.weight")) for number in range(5)]
    sizes = dict.fromkeys([*names, "norm"], 10)
    monkeypatch.setattr(experts, "MAX_GROUP_ELEMENTS", 20)
    split, origins = experts.split_groups([["norm"] * 3, names], sizes)
    assert split == [("norm",) * 3, tuple(names[:2]), tuple(names[2:4]), tuple(names[4:])]
    assert origins == [0, 1, 1, 1]
    values = [{"lr": 1, "params": [0]}, *({"lr": 1, "moe": True, "params": [n]} for n in (1, 2, 3))]
    united, kept = experts.unite_groups(split, values, sizes)
    assert united == [("norm",) * 3, tuple(names)]
    assert kept == values[:2]
    # What a smaller limit has made stays as it is.
    assert experts.unite_groups([names[:1], names[1:2]], values[1:3], sizes)[0] == [
        tuple(names[:1]), tuple(names[1:2]),
    ]  # fmt: skip


@pytest.mark.parametrize("order", ["experts", "kinds"])
def test_the_order_of_a_ranks_experts_is_that_of_all(order: str) -> None:
    rests = [".up", ".down"]
    layers = experts.Experts((experts.Layer("a.moe", (".up", ".down"), 4),))

    def names(numbers: range) -> list[str]:
        if order == "experts":
            return [str(Name("a.moe", n, rest)) for n in numbers for rest in rests]
        return [str(Name("a.moe", n, rest)) for rest in rests for n in numbers]

    wide = layers.widen(["x", *names(range(2)), "y"], 2)
    assert list(wide) == ["x", *names(range(4)), "y"]
    mine = [layers.local(name, 2) for name in wide if layers.is_on(name, 2, 1)]
    assert mine == ["x", *names(range(2)), "y"]
    with pytest.raises(RefusedError, match="neither expert by expert nor kind by kind"):
        layers.widen([*names(range(2))[:2], *reversed(names(range(2))[2:])], 2)
