"""Which rank stands where, which degrees and passes are refused and why, and who gets a rank."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scalai.core.degrees.assignment import make_assign, place_ranks
from scalai.core.degrees.degrees import (
    Coordinate,
    DegreeRequest,
    Degrees,
    ModelLimits,
    parse_request,
    refusal,
    stage_counts,
    stage_sizes,
)
from scalai.core.degrees.passes import (
    AS_GIVEN,
    NO_FREEDOM,
    OFFLOADS,
    RECOMPUTES,
    Freedom,
    Passes,
    difference,
    offload_of_json,
    recompute_of_json,
)
from scalai.core.degrees.policy import DegreePolicy, Rule
from scalai.core.errors import RefusedError, UsageError
from scalai.core.job.membership import Assignment
from support.laws import ran

GPT = ModelLimits(
    num_attention_heads=8, num_query_groups=4, num_layers=12, padded_vocab_size=50304,
    global_batch_size=24, micro_batch_size=2, seq_length=1024,
)  # fmt: skip

sizes = st.integers(1, 4)


@given(st.integers(1, 60), st.integers(1, 8), sizes, st.integers(0, 2))
def test_stages_and_ranks_have_layers_as_even_as_can_be(
    layers: int, pp: int, vpp: int, predicted: int
) -> None:
    assume(layers >= pp * vpp and (pp > 1 or vpp == 1))
    found = stage_sizes(layers, pp, vpp, predicted)
    assert sum(found) == layers and len(found) == pp * vpp and min(found) >= 1
    for rank in range(pp):
        assert max(found[rank::pp]) - min(found[rank::pp]) <= 1
    ranks = [sum(found[rank::pp]) for rank in range(pp)]
    assert max(ranks) <= -(-(layers + predicted) // pp)
    assert ranks[1:-1] == sorted(ranks[1:-1])
    assert predicted or max(ranks) == -(-layers // pp)


@pytest.mark.parametrize(
    ("layers", "pp", "predicted", "sizes"),
    [
        (80, 5, 0, (16,) * 5),
        (79, 5, 0, (15, 16, 16, 16, 16)),
        (78, 5, 0, (15, 16, 16, 16, 15)),
        (80, 6, 0, (12, 14, 14, 14, 14, 12)),
        (61, 8, 1, (7, 8, 8, 8, 8, 8, 8, 6)),
        (5, 4, 2, (1, 1, 2, 1)),
    ],
)
def test_embedding_head_and_layers_for_further_tokens_count_as_layers(
    layers: int, pp: int, predicted: int, sizes: tuple[int, ...]
) -> None:
    assert stage_sizes(layers, pp, 1, predicted) == sizes


def test_stages_are_as_few_as_their_largest_one_allows() -> None:
    assert stage_counts(12, GPT) == [1, 2, 3, 4, 6, 12]
    uneven = replace(GPT, has_uneven_stages=True, extra_layers=2, own_stages=(5, 0))
    assert stage_counts(7, uneven) == [1, 2, 3, 4, 5, 7, 9]


@given(sizes, sizes, sizes, sizes)
def test_every_coordinate_belongs_to_one_rank(tp: int, pp: int, dp: int, cp: int) -> None:
    degrees = Degrees(tp, pp, dp, cp=cp)
    seen = [degrees.coordinate(rank) for rank in range(degrees.world_size)]
    assert [degrees.rank(coordinate) for coordinate in seen] == list(range(degrees.world_size))
    assert len(set(seen)) == tp * pp * dp * cp


def test_ranks_are_counted_in_the_order_tp_cp_dp_pp() -> None:
    degrees = Degrees(tp=2, pp=2, dp=2, cp=2)
    assert degrees.coordinate(1) == Coordinate(1, 0, 0, 0)
    assert degrees.coordinate(2) == Coordinate(0, 0, 0, 1)
    assert degrees.coordinate(4) == Coordinate(0, 0, 1, 0)
    assert degrees.coordinate(8) == Coordinate(0, 1, 0, 0)


def test_experts_are_spread_over_neighbouring_replicas() -> None:
    degrees = Degrees(tp=2, pp=1, dp=4, ep=2)
    assert [degrees.coordinate(rank).ep_rank for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_degrees_print_and_read_back() -> None:
    assert str(Degrees(2, 1, 2)) == "TP2·PP1·DP2"
    assert str(Degrees(2, 4, 1, vpp=3, ep=2)) == "TP2·PP4·DP1·VPP3·EP2"
    assert Degrees.from_json(Degrees(2, 4, 1, vpp=3).to_json()) == Degrees(2, 4, 1, vpp=3)
    with pytest.raises(RefusedError, match="'xp' is not an axis"):
        Degrees.from_json({"xp": 2})
    with pytest.raises(UsageError, match="dp=0"):
        Degrees(1, 1, 0)
    with pytest.raises(UsageError, match="rank 2 is not in TP2·PP1·DP1"):
        Degrees(2, 1, 1).coordinate(2)
    with pytest.raises(UsageError, match="outside"):
        Degrees(2, 1, 1).rank(Coordinate(0, 1, 0))


@pytest.mark.parametrize(
    ("degrees", "limits", "why"),
    [
        *((found, GPT, None) for found in (Degrees(8, 1, 2), Degrees(1, 12, 1), Degrees(2, 3, 4))),
        (Degrees(7, 5, 3), ModelLimits(), None),
        (Degrees(3, 1, 1), GPT, "tp=3 does not divide num_attention_heads=8"),
        (Degrees(1, 5, 1), GPT, "pp=5 does not divide num_layers=12"),
        (Degrees(1, 6, 1, vpp=4), GPT, "pp*vpp=6*4 does not divide num_layers=12"),
        (Degrees(1, 4, 1, vpp=2), replace(GPT, has_uneven_stages=True), None),
        (Degrees(1, 6, 1, vpp=4), replace(GPT, has_uneven_stages=True),
         "pp*vpp=6*4 is more than num_layers=12"),
        (Degrees(1, 1, 5), replace(GPT, has_uneven_shares=True), None),
        (Degrees(1, 1, 13), replace(GPT, has_uneven_shares=True),
         "micro_batch_size*dp=2*13 is more than global_batch_size=24"),
        (Degrees(1, 1, 2, vpp=2), GPT, "vpp=2 needs pp of 2 or more"),
        (Degrees(1, 1, 5), GPT, "micro_batch_size*dp=2*5 does not divide global_batch_size=24"),
        (Degrees(1, 3, 3, vpp=2), GPT,
         "4 micro-batches a replica are not a multiple of pp=3, which vpp=2 needs"),
        (Degrees(6, 1, 1), ModelLimits(num_attention_heads=12, num_query_groups=4),
         "tp=6 does not divide or be a multiple of num_query_groups=4"),
        (Degrees(8, 1, 1), ModelLimits(num_query_groups=4, is_query_group_shared=False),
         "tp=8 does not divide num_query_groups=4"),
        (Degrees(4, 1, 1), ModelLimits(padded_vocab_size=50258),
         "tp=4 does not divide the padded vocabulary of 50258 rows, "
         "which may not change in a running job"),
        (Degrees(4, 1, 1), ModelLimits(seq_length=1026, is_sequence_parallel=True),
         "tp=4 does not divide seq_length=1026 (sequence parallelism)"),
        (Degrees(1, 1, 8), ModelLimits(global_batch_size=16, ramp_batch_sizes=(4,)),
         "dp=8 does not divide ramp-up batch size=4"),
        (Degrees(1, 1, 1, cp=2), ModelLimits(seq_length=1026),
         "2*cp=4 does not divide seq_length=1026"),
        (Degrees(1, 1, 4, ep=4), ModelLimits(num_experts=6), "ep=4 does not divide num_experts=6"),
        (Degrees(2, 1, 3, ep=2), ModelLimits(num_experts=4),
         "experts take TP*EP*PP = 2*2*1 ranks, which does not divide 6"),
        (Degrees(1, 4, 1), ModelLimits(num_layers=8, extra_layers=2),
         "pp=4 does not divide num_layers=8 plus 2 (embedding and loss count)"),
        (Degrees(1, 1, 1), ModelLimits(fixed=(("cp", 2, "the script says so"),)),
         "cp=1 must stay 2: the script says so"),
        (Degrees(1, 1, 1), ModelLimits(min_tp=2, min_tp_reason="--tp-comm-overlap"),
         "tp=1 is below 2: --tp-comm-overlap"),
    ],
)  # fmt: skip
def test_a_refusal_says_exactly_why(degrees: Degrees, limits: ModelLimits, why: str | None) -> None:
    assert refusal(degrees, limits) == why


def test_another_micro_batch_size_is_checked_instead_of_the_models() -> None:
    assert refusal(Degrees(1, 1, 24), GPT) is not None
    assert refusal(Degrees(1, 1, 24), GPT, micro_batch_size=1) is None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("tp2 pp1", DegreeRequest(2, 1)),
        ("tp=2,pp=4", DegreeRequest(2, 4)),
        ("TP2·PP1·DP3", DegreeRequest(2, 1, 3)),
        ("pp2", DegreeRequest(1, 2)),
        ("pp2 vpp2 mbs4", DegreeRequest(1, 2, vpp=2, micro_batch_size=4)),
        ({"tp": 2, "ep": 2, "micro_batch_size": 1}, DegreeRequest(2, 1, ep=2, micro_batch_size=1)),
        ("tp2 recompute=full", DegreeRequest(2, 1, recompute="full")),
        ("tp2 offload=optimizer-half", DegreeRequest(2, 1, offload="optimizer-half")),
        (str(DegreeRequest(2, offload="parameters")), DegreeRequest(2, offload="parameters")),
        (str(DegreeRequest(2, 1, recompute="selective")), DegreeRequest(2, recompute="selective")),
        (DegreeRequest(4, 1), DegreeRequest(4, 1)),
    ],
)
def test_degrees_are_read_as_people_write_them(text: object, wanted: DegreeRequest) -> None:
    assert parse_request(text) == wanted
    assert parse_request(str(wanted)) == wanted


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tq2", "'tq2' in 'tq2' is not a degree"),
        ("tp2 tp4", "'tp4' in 'tp2 tp4' stands there twice"),
        ("", "are not degrees"),
        (4, "4 are not degrees"),
        ({"zp": 2}, "'zp' in .* is not an axis"),
        ({"tp": 0}, "tp=0 is not a whole number"),
        ({"tp": "2"}, "tp='2' is not a whole number"),
    ],
)
def test_what_is_not_a_degree_is_named(text: object, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse_request(text)


# ------------------------------------------------------------------ passes

MORE = Freedom(own="none", more=("selective", "full"), for_memory=("recompute",))


FAST = Freedom(more=("full",), for_speed=("recompute",))
FIXED = Freedom(
    more=("full",), fixed=(("recompute", "of graphs"),),
    for_speed=("recompute",), for_memory=("recompute",),
)  # fmt: skip


@pytest.mark.parametrize(
    ("freedom", "for_speed", "for_memory"),
    [
        (MORE, (None,), (None, "selective", "full")),
        (FAST, (None, "full"), (None, "full")),
        (FIXED, (None,), (None,)),
    ],
    ids=["free for memory alone", "free for speed is free for memory too", "fixed stays"],
)
def test_what_is_free_for_memory_is_not_free_for_speed(
    freedom: Freedom, for_speed: tuple[object, ...], for_memory: tuple[object, ...]
) -> None:
    assert freedom.recomputes(for_memory=False) == for_speed
    assert freedom.recomputes(for_memory=True) == for_memory
    assert not freedom.is_free("micro-batch", for_memory=True)


def test_a_request_is_refused_for_what_cannot_be_had_and_says_why() -> None:
    assert all(MORE.refusal(kind) is None for kind in (None, *RECOMPUTES))
    full = Freedom(own="full")
    assert full.refusal("none") == "recompute=none cannot be had: the script has full"
    assert FIXED.refusal("full") == "recompute=full cannot be had: of graphs"
    assert NO_FREEDOM.refusal("full") is not None
    spills = Freedom(offloads=("optimizer-half", "optimizer"), for_memory=("offload",))
    assert spills.refusal(None, "optimizer") is None and spills.spills == spills.offloads
    why = "offload=parameters cannot be had: the script has none; optimizer-half or optimizer can"
    assert spills.refusal(None, "parameters") == why
    assert replace(spills, fixed=(("offload", "of fp32"),)).spills == ()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (AS_GIVEN, AS_GIVEN, ""),
        (Passes(2), Passes(2, "selective"), ""),
        (Passes(4), Passes(2, "full"), "micro-batch 4 -> 2, recompute selective -> full"),
        (Passes(None, "full"), Passes(2), "recompute full -> selective"),
        (Passes(2), Passes(2, None, "optimizer"), "offload none -> optimizer"),
        (Passes(2, "full", "optimizer"), Passes(2, "full"), "offload optimizer -> none"),
    ],
)
def test_a_change_is_said_in_words(before: Passes, after: Passes, words: str) -> None:
    assert difference(before, after, Freedom("selective")) == words


def test_layouts_are_told_apart_behind_their_degrees() -> None:
    assert Passes(2).beside(Passes(2)) == ""
    assert Passes(1, "full").beside(Passes(2)) == "·MBS1·recompute=full"
    assert Passes(2, None, "optimizer").beside(Passes(2)) == "·offload=optimizer"


@pytest.mark.parametrize("wrong", ["some", 1, [], {}])
def test_what_nobody_can_recompute_is_none(wrong: object) -> None:
    assert [recompute_of_json(kind) for kind in RECOMPUTES] == list(RECOMPUTES)
    assert recompute_of_json(None) is None
    with pytest.raises(ValueError, match="is none of none, selective, full"):
        recompute_of_json(wrong)
    assert [offload_of_json(kind) for kind in (None, *OFFLOADS)] == [None, *OFFLOADS]
    with pytest.raises(ValueError, match="is none of none, optimizer-half"):
        offload_of_json(wrong)


# ------------------------------------------------------------------ assignments

LIMITS = ModelLimits(num_attention_heads=4, num_layers=4, global_batch_size=12, micro_batch_size=1)
TABLE = DegreePolicy(
    tuple(
        Rule(world, (DegreeRequest(tp, pp),)) for world, tp, pp in ((4, 2, 1), (2, 1, 2), (3, 1, 1))
    )
)
TWO_HOSTS = (("a", 2), ("b", 2))


def assigned(
    hosts: tuple[tuple[str, int], ...] = TWO_HOSTS, present: Degrees | None = None, **settings: Any
) -> Assignment | None:
    limits = {"min_hosts": 1, "max_hosts": 2, **settings}
    policy = limits.pop("policy", TABLE)
    return make_assign(LIMITS, policy, **limits)(hosts, ran(present) if present else None)


@pytest.mark.parametrize(
    ("settings", "present", "workers", "degrees"),
    [
        ({}, None, TWO_HOSTS, Degrees(2, 1, 2)),
        ({"max_workers": 3}, Degrees(2, 1, 2), (("a", 2), ("b", 1)), Degrees(1, 1, 3)),
        ({"max_hosts": 1}, None, (("a", 2), ("b", 0)), Degrees(1, 2, 1)),
    ],
    ids=["every slot", "a limit of workers leaves the last idle", "a host too many is idle"],
)
def test_hosts_with_free_devices_become_workers_with_degrees(
    settings: dict[str, Any], present: Degrees | None, workers: object, degrees: Degrees
) -> None:
    found = assigned(present=present, **settings)
    assert found is not None and (found.workers, found.degrees) == (workers, degrees)
    assert found.active == tuple(name for name, count in found.workers if count)


@pytest.mark.parametrize(
    ("hosts", "settings"),
    [
        ((("a", 2),), {"min_hosts": 2}),
        ((("a", 0),), {}),
        ((("a", 2),), {"policy": DegreePolicy(allowed_sizes=(8,))}),
    ],
    ids=["too few hosts", "no device", "no valid degrees"],
)
def test_too_few_hosts_devices_or_degrees_are_no_assignment(
    hosts: tuple[tuple[str, int], ...], settings: dict[str, Any]
) -> None:
    assert assigned(hosts, **settings) is None


def test_a_world_beyond_the_hosts_of_the_job_is_refused_without_counting_its_layouts() -> None:
    why: list[str] = []
    assert assigned(
        (("a", 2),), policy=DegreePolicy(), max_workers=10**9, requested=DegreeRequest(8, 1),
        explain=why.append,
    ) is None  # fmt: skip
    assert len(why) == 1 and "TP8·PP1" in why[0]


def test_ranks_stand_in_the_order_of_the_hosts() -> None:
    found = assigned((("b", 2), ("a", 2)), max_workers=3)
    assert found is not None
    places = place_ranks(found)
    assert list(places) == ["b", "a"]
    assert [(place.first_rank, place.local_world_size) for place in places.values()] == [
        (0, 2), (2, 1)
    ]  # fmt: skip
    assert {(place.world_size, place.group) for place in places.values()} == {(3, ("b", "a"))}
