"""Global batches are the same samples for every layout, and a hash proves it."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalai.core.degrees.batches import (
    LEAST,
    Batches,
    BatchRamp,
    Shares,
    combine_hashes,
    fit_batches,
    pass_length,
    sample_hashes,
)
from scalai.core.errors import RefusedError

TOKENS = np.random.default_rng(7).integers(0, 50257, size=(24, 33))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_replicas_share_a_global_batch_without_overlap(
    dp: int, micro: int, rounds: int, consumed: int
) -> None:
    batches = Batches(dp * micro * rounds, micro, dp)
    parts = [batches.samples(consumed, dp_rank) for dp_rank in range(dp)]
    assert all(part.shape == (rounds, micro) for part in parts)
    together = np.sort(np.concatenate(parts, axis=None))
    assert together.tolist() == list(range(consumed, consumed + batches.global_batch_size))


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), st.integers(0, 1000))
def test_replicas_have_shares_in_one_piece_that_make_up_the_batch(
    micro: int, times: int, dp: int, consumed: int
) -> None:
    batches = Batches(micro * times * dp, micro, dp)
    shares = [batches.contiguous_samples(consumed, rank).reshape(-1) for rank in range(dp)]
    joined = [int(place) for share in shares for place in share]
    assert joined == list(range(consumed, consumed + batches.global_batch_size))
    assert all(len(share) == micro * times for share in shares)


def test_samples_are_dealt_in_blocks_as_megatron_does() -> None:
    batches = Batches(global_batch_size=12, micro_batch_size=2, dp=3)
    assert batches.num_micro_batches == 2
    assert batches.samples(12, 1).tolist() == [[14, 15], [20, 21]]


@pytest.mark.parametrize(
    ("sizes", "taken", "words"),
    [
        ((12, 1, 5), (0, 0), r"12 is not a multiple of micro_batch_size\*dp=1\*5"),
        ((12, 0, 1), (0, 0), "1 or more"),
        ((12, 1, 3), (0, 3), "dp_rank=3"),
        ((12, 1, 3), (-1, 0), "negative"),
        ((12, 5, 2, True), (0, 0), "12 is not a multiple of micro_batch_size=5"),
        ((12, 4, 4, True), (0, 0), "3 micro-batches are too few for dp=4"),
    ],
)
def test_what_does_not_divide_is_refused(
    sizes: tuple[Any, ...], taken: tuple[int, int], words: str
) -> None:
    with pytest.raises(RefusedError, match=words):
        Batches(*sizes).samples(*taken)


def test_a_ramp_has_the_sizes_that_megatron_goes_through() -> None:
    ramp = BatchRamp(start=4, increment=4, ramp_samples=40, global_batch_size=16)
    # What megatron.core.num_microbatches_calculator gave for [4, 4, 40] to 16 at DP 1, 2 and 4.
    given = [4, 4, 4, 4, 8, 8, 12, 16, 16, 16]
    assert ramp.sizes == tuple(sorted(set(given)))
    with pytest.raises(RefusedError, match="multiple of the increment"):
        BatchRamp(4, 5, 40, 16)


@given(st.permutations(range(24)), st.lists(st.integers(1, 23), max_size=4))
def test_the_hash_of_a_batch_does_not_depend_on_order_or_cut(
    order: list[int], cuts: list[int]
) -> None:
    parts = np.split(TOKENS[order], sorted(cuts))
    hashes = [combine_hashes(sample_hashes(part)) for part in parts if len(part)]
    assert combine_hashes(*hashes) == combine_hashes(sample_hashes(TOKENS))


@given(st.integers(0, 23), st.integers(0, 32), st.integers(1, 50256))
def test_the_hash_notices_any_other_token(sample: int, position: int, shift: int) -> None:
    other = TOKENS.copy()
    other[sample, position] = (other[sample, position] + shift) % 50257
    assert combine_hashes(sample_hashes(other)) != combine_hashes(sample_hashes(TOKENS))


def test_the_hash_notices_tokens_that_changed_places() -> None:
    within, between = TOKENS.copy(), TOKENS.copy()
    within[0, [0, 1]] = within[0, [1, 0]]
    between[[0, 1], 0] = between[[1, 0], 0]
    assert len(set(TOKENS[0, :2])) == len(set(TOKENS[:2, 0])) == 2
    expected = combine_hashes(sample_hashes(TOKENS))
    assert combine_hashes(sample_hashes(within)) != expected
    assert combine_hashes(sample_hashes(between)) != expected


def test_the_hash_is_the_same_whatever_integers_hold_the_tokens() -> None:
    expected = sample_hashes(TOKENS)
    for dtype in (np.int32, np.uint16, np.int64):
        assert np.array_equal(sample_hashes(TOKENS.astype(dtype)), expected)
    assert np.array_equal(sample_hashes(TOKENS[3]), expected[3:4])
    with pytest.raises(RefusedError, match="float64"):
        sample_hashes(TOKENS * 1.0)


def test_a_sample_that_is_missing_or_twice_changes_the_hash() -> None:
    hashes = sample_hashes(TOKENS)
    assert combine_hashes(hashes[1:]) != combine_hashes(hashes)
    assert combine_hashes(hashes, hashes[:1]) != combine_hashes(hashes)
    assert combine_hashes() == 0


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_dealt_samples_are_those_of_torchs_distributed_sampler(
    dp: int, micro: int, rounds: int, consumed: int
) -> None:
    batches = Batches(dp * micro * rounds, micro, dp)
    block = list(range(consumed, consumed + batches.global_batch_size))
    for dp_rank in range(dp):
        dealt = batches.dealt_samples(consumed, dp_rank)
        assert dealt.shape == (rounds, micro)
        assert dealt.ravel().tolist() == block[dp_rank::dp]


@given(st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_dealt_micro_batches_of_one_size_are_the_first_layouts_in_any_other(
    first_dp: int, dp: int
) -> None:
    """A mean over the valid places of a micro-batch is one of its own."""
    first, batches = Batches(24, 2, first_dp), Batches(24, 2, dp)
    made = [
        {tuple(row) for rank in range(of.dp) for row in of.dealt_samples(48, rank, first).tolist()}
        for of in (first, batches)
    ]
    assert made[1] == made[0] and len(made[0]) == 12


EVERY = ("samples", "dealt_samples", "contiguous_samples")


@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 9), st.integers(0, 99))
def test_uneven_shares_are_the_micro_batches_of_one_replica_and_fillers(
    dp: int, micro: int, more: int, consumed: int
) -> None:
    alone = Batches((dp + more) * micro, micro, 1)
    batches = Batches(alone.global_batch_size, micro, dp, True)
    for way in EVERY:
        first = (alone,) if way == "dealt_samples" else ()
        of_replicas = [getattr(batches, way)(consumed, rank, *first) for rank in range(dp)]
        real = []
        for rank, found in enumerate(of_replicas):
            assert found.shape == (batches.num_micro_batches, micro)
            is_filler = [batches.shares.is_filler(n, rank) for n in range(len(found))]
            assert not any(is_filler[:-1])
            if is_filler[-1]:
                assert found[-1].tolist() == found[0].tolist()
            real += [tuple(found[n]) for n in range(len(found)) if not is_filler[n]]
        expected = [tuple(each) for each in getattr(alone, way)(consumed, 0)]
        assert sorted(real) == expected
        assert way != "contiguous_samples" or real == expected


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 5])
def test_uneven_shares_dealt_sample_by_sample_keep_their_micro_batches(dp: int) -> None:
    first, batches = Batches(16, 2, 3, True), Batches(16, 2, dp, True)
    of_replicas = [batches.dealt_samples(0, rank, first).tolist() for rank in range(dp)]
    assert {tuple(row) for rows in of_replicas for row in rows} == {
        (0, 3), (1, 4), (2, 5), (6, 9), (7, 10), (8, 11), (12, 14), (13, 15),
    }  # fmt: skip
    assert of_replicas[0][0] == [0, 3]


@pytest.mark.parametrize(
    ("batch", "dp", "most", "micro", "passes"),
    [
        (8, 3, 4, 1, 3),  # two of 2 are as long as those of two replicas
        (16, 3, 8, 2, 3),
        (512, 7, 8, 8, 10),  # 80 samples, where 74 are the fewest
        (512, 63, 8, 2, 5),
        (24, 4, 4, 3, 2),  # even
    ],
)
def test_micro_batches_of_uneven_shares_are_large_as_far_as_no_replica_is_much_longer(
    batch: int, dp: int, most: int, micro: int, passes: int
) -> None:
    spread = fit_batches(batch, dp, most, has_fillers=True)
    assert (spread.micro_batch_size, spread.num_micro_batches) == (micro, passes)
    assert spread.has_fillers == bool(batch % dp)


def test_micro_batches_are_the_largest_that_fit() -> None:
    assert fit_batches(24, 2, 4).micro_batch_size == 4
    assert fit_batches(24, 4, 4).micro_batch_size == 3
    assert fit_batches(24, 24, 4).micro_batch_size == 1
    with pytest.raises(RefusedError, match="dp=7 does not divide global_batch_size=24"):
        fit_batches(24, 7, 4)
    with pytest.raises(RefusedError, match="dp=25 is larger than global_batch_size=24"):
        fit_batches(24, 25, 4, has_fillers=True)


def test_a_pass_is_whole_global_batches() -> None:
    assert pass_length(48, 12, drop_last=False) == pass_length(48, 12, drop_last=True) == 48
    assert (pass_length(50, 12, drop_last=False), pass_length(50, 12, drop_last=True)) == (60, 48)


@given(
    st.integers(1, 4).flatmap(lambda dp: st.tuples(*[st.integers(50, 400)] * dp)),
    st.integers(0, 8),
)
def test_shares_by_pace_make_the_longest_replica_as_short_as_can_be(
    paces: tuple[int, ...], more: int
) -> None:
    dp = len(paces)
    shares = Shares(LEAST * dp + more, dp, paces)
    most = LEAST + more
    best = min(
        max(quota * pace for quota, pace in zip(quotas, paces, strict=True))
        for quotas in product(range(LEAST, most + 1), repeat=dp)
        if sum(quotas) == shares.micro_batches
    )
    made = [shares.passes_of(replica) for replica in range(dp)]
    assert max(n * pace for n, pace in zip(made, paces, strict=True)) == best
    if shares.quotas:
        assert sum(made) == shares.micro_batches and best < shares.passes * max(paces)
    else:  # nothing is gained: they are those of replicas that are alike
        plain = Shares(shares.micro_batches, dp)
        assert made == [plain.passes] * dp
        assert shares.is_even == plain.is_even


@pytest.mark.parametrize(
    ("micro_batches", "paces", "quotas"),
    [
        (26, (100, 100, 167), (10, 10, 6)),
        (8, (100, 200), (5, 3)),  # as long as 6 and 2, and nearer to each other
        (8, (100, 900), (6, 2)),  # of one pass no pace would be known
        (8, (100, 100, 167), (3, 3, 2)),
        (5, (100, 900, 100), ()),  # too few
        (9, (100, 110, 100), ()),  # no other split is shorter
    ],
)
def test_slower_replicas_have_fewer_micro_batches(
    micro_batches: int, paces: tuple[int, ...], quotas: tuple[int, ...]
) -> None:
    assert Shares(micro_batches, len(paces), paces).quotas == quotas


@pytest.mark.parametrize("paces", [(100,), (100, 0)])
def test_paces_of_other_replicas_are_refused(paces: tuple[int, ...]) -> None:
    with pytest.raises(RefusedError, match="paces"):
        Shares(8, 2, paces)


@given(
    st.tuples(*[st.sampled_from([100, 130, 210])] * 3), st.integers(6, 20), st.integers(1, 3),
    st.integers(0, 99),
)  # fmt: skip
def test_shares_by_pace_are_the_micro_batches_of_one_replica_each_once(
    paces: tuple[int, ...], count: int, micro: int, consumed: int
) -> None:
    alone = Batches(count * micro, micro, 1)
    batches = Batches(count * micro, micro, 3, True, paces)
    for way in EVERY:
        first = (alone,) if way == "dealt_samples" else ()
        found = [getattr(batches, way)(consumed, rank, *first) for rank in range(3)]
        assert [len(each) for each in found] == [batches.shares.passes_of(r) for r in range(3)]
        real = [
            tuple(places)
            for rank, each in enumerate(found)
            for number, places in enumerate(each)
            if not batches.shares.is_filler(number, rank)
        ]
        assert sorted(real) == [tuple(each) for each in getattr(alone, way)(consumed, 0)]
