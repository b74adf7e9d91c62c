"""Which degrees are taken on which world, and that nobody is surprised by them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalai.core.degrees.choice import candidates, check_initial, check_rules, choose
from scalai.core.degrees.degrees import Degrees, ModelLimits, parse_request, refusal
from scalai.core.degrees.passes import AS_GIVEN, Passes
from scalai.core.degrees.policy import Choice, DegreePolicy, Rule
from scalai.core.errors import RefusedError, UsageError

TINY = ModelLimits(
    num_attention_heads=4, num_layers=4, padded_vocab_size=256, global_batch_size=12,
    micro_batch_size=1,
)  # fmt: skip
PLAIN = DegreePolicy()


def rule(key: str, *degrees: str) -> Rule:
    came, arrow, world = key.rpartition("->")
    return Rule(int(world), tuple(map(parse_request, degrees)), int(came) if arrow else None)


DEMO = DegreePolicy(
    rules=(
        rule("4", "tp2 pp1"), rule("2->4", "tp2 pp2"), rule("2", "tp1 pp2"), rule("3", "tp1 pp1"),
        rule("1", "tp1 pp1"),
    )
)  # fmt: skip
ALLOWED = DegreePolicy(allowed_sizes=(2, 4, 8))


def test_the_table_can_give_the_same_world_different_degrees() -> None:
    present, seen = None, []
    for world in (4, 2, 4, 3, 1):
        present = choose(world, TINY, DEMO, present).degrees
        seen.append(str(present))
    assert seen == ["TP2·PP1·DP2", "TP1·PP2·DP1", "TP2·PP2·DP1", "TP1·PP1·DP3", "TP1·PP1·DP1"]


@pytest.mark.parametrize(
    ("world", "policy", "present", "degrees", "idle", "words"),
    [
        (7, PLAIN, Degrees(2, 1, 4), Degrees(2, 1, 3), (6,),
         "TP2·PP1·DP4 -> TP2·PP1·DP3, TP and PP kept; rank 6 idle (7 is not a multiple of 2"),
        (5, PLAIN, Degrees(1, 1, 4), Degrees(1, 1, 4), (4,),
         "micro_batch_size*dp=1*5 does not divide global_batch_size=12"),
        (3, DegreePolicy(min_model_parallel=1), Degrees(2, 2, 1), Degrees(1, 1, 3), (), ""),
        (3, DegreePolicy(min_model_parallel=2), Degrees(2, 2, 1), Degrees(2, 1, 1), (2,), ""),
        (1, DegreePolicy(rules=(rule("1", "tp1"),)), Degrees(2, 2, 1), Degrees(1, 1, 1), (), ""),
        (7, ALLOWED, Degrees(2, 1, 1), Degrees(2, 1, 2), (4, 5, 6),
         "ranks 4 to 6 idle (allowed sizes are 2, 4, 8)"),
        (4, DegreePolicy(rules=(rule("4", "dp3"),)), None, Degrees(1, 1, 3), (3,),
         "DP3 was asked for"),
        (3, DegreePolicy(rules=(rule("3", "tp3"),)), Degrees(1, 1, 4), Degrees(1, 1, 3), (),
         "not TP3·PP1·DP1: tp=3 does not divide num_attention_heads=4"),
    ],
    ids=["tp and pp are kept", "the batch does not divide", "lowered uses most ranks",
         "lowered by a person", "the table lowers", "allowed sizes", "fixed replicas",
         "an entry is passed over aloud"],
)  # fmt: skip
def test_ranks_that_do_not_fit_are_idle_and_the_reason_is_said(
    world: int, policy: DegreePolicy, present: Degrees | None, degrees: Degrees,
    idle: tuple[int, ...], words: str,
) -> None:  # fmt: skip
    choice = choose(world, TINY, policy, present)
    assert (choice.degrees, choice.idle_ranks) == (degrees, idle)
    assert words in choice.reason


@pytest.mark.parametrize(
    ("world", "batch", "micro", "degrees", "words"),
    [
        (3, 8, 1, Degrees(1, 1, 3), ""),
        (7, 8, 1, Degrees(1, 1, 4), "ranks 4 to 6 idle (DP7 would need as many passes as DP4"),
        (7, 12, 1, Degrees(1, 1, 6), "rank 6 idle (DP7 would need as many passes as DP6"),
        (7, 16, 2, Degrees(1, 1, 4), "DP7 would need as many passes as DP4"),
        (5, 14, 2, Degrees(1, 1, 4), ""),
        (7, 21, 2, Degrees(1, 1, 7), ""),
        (3, 8, None, Degrees(1, 1, 3), ""),
        (7, 8, None, Degrees(1, 1, 4), "DP7 would need as many passes as DP4"),
        (9, 8, None, Degrees(1, 1, 8), "dp=9 does not divide global_batch_size=8"),
    ],
)
def test_replicas_that_do_not_divide_the_batch_are_as_many_as_shorten_a_step(
    world: int, batch: int, micro: int | None, degrees: Degrees, words: str
) -> None:
    uneven = replace(TINY, global_batch_size=batch, micro_batch_size=micro, has_uneven_shares=True)
    if batch % (micro or 1):
        with pytest.raises(RefusedError, match=f"does not divide global_batch_size={batch}"):
            choose(world, uneven, PLAIN, Degrees(1, 1, 1))
        return
    choice = choose(world, uneven, PLAIN, Degrees(1, 1, 1))
    assert choice.degrees == degrees and words in choice.reason
    as_asked = choose(world, uneven, PLAIN, None, requested=parse_request(f"dp{degrees.dp}"))
    assert as_asked.degrees == degrees


@pytest.mark.parametrize(
    ("world", "policy", "present", "requested", "words"),
    [
        (3, PLAIN, Degrees(2, 2, 1), None, r"TP·PP below 4 .*nearest: 4\b"),
        (1, ALLOWED, Degrees(1, 1, 2), None, "smallest allowed size is 2"),
        (4, DEMO, Degrees(2, 1, 2), "tp3", "tp=3 does not divide num_attention_heads=4"),
        (4, DegreePolicy(initial=parse_request("tp2 pp2 cp2")), None, None,
         "TP2·PP2·CP2 does not fit on 4 ranks"),
    ],
    ids=["what memory holds", "allowed sizes", "a request is not replaced", "context parallelism"],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_by_name(
    world: int, policy: DegreePolicy, present: Degrees | None, requested: str | None, words: str
) -> None:
    with pytest.raises(RefusedError, match=words):
        asks = parse_request(requested) if requested else None
        choose(world, TINY, policy, present, requested=asks)


def test_where_heads_and_layers_are_unknown_only_divisors_of_what_ran_are_tried() -> None:
    policy = DegreePolicy(min_model_parallel=1)
    found = list(candidates(6, ModelLimits(), policy, Degrees(4, 2, 1)))
    assert found
    assert all(4 % c.degrees.tp == 0 and 2 % c.degrees.pp == 0 for c in found)


def test_an_out_of_memory_leads_to_more_model_parallelism() -> None:
    first = choose(4, TINY, DegreePolicy(), Degrees(2, 1, 2))
    second = choose(4, TINY, DegreePolicy(), Degrees(2, 1, 2), excluded=[first])
    assert first.degrees.model_parallel == 2
    assert second.degrees == Degrees(2, 2, 1)
    assert "after an out-of-memory" in second.reason


def test_an_out_of_memory_leads_to_the_tables_next_candidate() -> None:
    policy = DegreePolicy(rules=(rule("4", "tp2 mbs2", "tp2 mbs1", "tp4"),))
    tried: list[Choice] = []
    for expected in ("TP2·PP1·DP2", "TP2·PP1·DP2", "TP4·PP1·DP1"):
        tried.append(choose(4, TINY, policy, None, excluded=tried))
        assert str(tried[-1].degrees) == expected
    assert [choice.micro_batch_size for choice in tried] == [2, 1, 1]


def test_when_everything_ran_out_of_memory_the_error_says_what_would_do() -> None:
    everything = list(candidates(2, TINY, DegreePolicy(), Degrees(2, 1, 1)))
    with pytest.raises(RefusedError, match=r"2 ranks: no valid degrees.*nearest: 4"):
        choose(2, TINY, DegreePolicy(), Degrees(2, 1, 1), excluded=everything)


def test_a_request_wins_over_the_table() -> None:
    choice = choose(4, TINY, DEMO, Degrees(2, 1, 2), requested=parse_request("tp1 pp4"))
    assert choice.degrees == Degrees(1, 4, 1)


def test_a_table_is_checked_before_the_start() -> None:
    check_rules(TINY, DEMO)
    with pytest.raises(RefusedError, match=r'\[degrees\] "3" cannot be used'):
        check_rules(TINY, DegreePolicy(rules=(rule("3", "tp3"),)))
    with pytest.raises(UsageError, match="two entries for '4'"):
        DegreePolicy(rules=(rule("4", "tp2"), rule("4", "tp4")))


def test_virtual_stages_are_dropped_where_they_do_not_divide() -> None:
    limits = ModelLimits(num_layers=6, num_attention_heads=4)
    policy = DegreePolicy(min_model_parallel=2)
    choice = choose(3, limits, policy, Degrees(1, 2, 1, vpp=3))
    assert choice.degrees == Degrees(1, 2, 1, vpp=3)
    other = choose(3, limits, DegreePolicy(min_model_parallel=3), Degrees(1, 2, 1, vpp=3))
    assert other.degrees == Degrees(1, 3, 1)


@given(
    st.integers(1, 24), st.sampled_from([1, 4, 6, 12]), st.integers(1, 12), st.integers(1, 24),
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.sampled_from([None, 1, 2]),
)  # fmt: skip
def test_whatever_is_chosen_is_valid_fits_and_is_the_same_again(
    world: int, heads: int, layers: int, batch: int, tp: int, pp: int, floor: int | None
) -> None:
    limits = ModelLimits(num_attention_heads=heads, num_layers=layers, global_batch_size=batch)
    policy = DegreePolicy(min_model_parallel=floor)
    found = list(candidates(world, limits, policy, Degrees(tp, pp, 1)))
    assert found == list(candidates(world, limits, policy, Degrees(tp, pp, 1)))
    assert len(set(found)) == len(found)
    for choice in found:
        assert refusal(choice.degrees, limits) is None
        assert choice.degrees.world_size + len(choice.idle_ranks) == world
        assert choice.degrees.model_parallel >= (floor or tp * pp)
        assert "\n" not in choice.reason
    kept = [c for c in found if (c.degrees.tp, c.degrees.pp) == (tp, pp)]
    assert not kept or found[0] == kept[0]


def test_a_job_goes_back_to_what_it_has_once_stepped_in_on_fewer_ranks() -> None:
    one = (Degrees(1, 1, 2), AS_GIVEN)
    policy = DegreePolicy(stepped=(one, (Degrees(2, 1, 1), AS_GIVEN)))
    assert choose(1, TINY, policy, Degrees(2, 1, 1)).degrees == Degrees(1, 1, 1)
    failed = (Choice(Degrees(1, 1, 1), (), "out of memory", 1),)
    with pytest.raises(RefusedError, match="no valid degrees"):
        choose(1, TINY, policy, Degrees(2, 1, 1), excluded=failed)


@pytest.mark.fault
def test_a_smaller_cut_is_known_to_fit_where_it_needs_no_more_bytes_than_one_that_ran() -> None:
    def cut_alone(layouts: Sequence[tuple[Degrees, Passes]]) -> list[float]:
        return [1 / degrees.model_parallel for degrees, _ in layouts]

    def as_sharded(layouts: Sequence[tuple[Degrees, Passes]]) -> list[float]:
        return [1.0 for _ in layouts]

    present = Degrees(2, 2, 1)
    policy = DegreePolicy(stepped=((present, AS_GIVEN),), needs=cut_alone)
    with pytest.raises(RefusedError, match="TP·PP below 4 is not known to fit"):
        choose(3, TINY, policy, present)
    assert choose(3, TINY, replace(policy, needs=as_sharded), present).degrees == Degrees(1, 1, 3)
    stated = replace(policy, needs=as_sharded, min_model_parallel=4)
    with pytest.raises(RefusedError, match="TP·PP below 4"):
        choose(3, TINY, stated, present)


@pytest.mark.fault
def test_degrees_that_a_script_asks_for_are_had_or_refused_and_never_replaced() -> None:
    policy = DegreePolicy(initial=parse_request("tp1 pp3"))
    with pytest.raises(RefusedError, match=r"ask for TP1·PP3, .*pp=3 does not divide num_layers=4"):
        check_initial(TINY, policy)
    with pytest.raises(RefusedError, match="pp=3 does not divide"):
        choose(4, TINY, policy, None)
    good = DegreePolicy(initial=parse_request("tp1 pp2"))
    check_initial(TINY, good)
    assert choose(4, TINY, good, None).degrees == Degrees(1, 2, 2)
    with pytest.raises(RefusedError, match="does not fit on 1 rank"):
        choose(1, TINY, good, None)
    check_initial(TINY, DegreePolicy(rules=(rule("4", "pp2"),), initial=parse_request("pp3")))
    again = replace(good, stepped=((Degrees(1, 1, 1), AS_GIVEN),))  # a restart on fewer ranks
    assert choose(1, TINY, again, None).degrees == Degrees(1, 1, 1)
