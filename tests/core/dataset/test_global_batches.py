"""Which places a global batch has: exact at each stage of a size that grows."""

from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.dataset.global_batches import GlobalBatches
from scalai.core.degrees.batches import Batches, BatchRamp
from scalai.core.errors import RefusedError

CASES = settings(max_examples=80, deadline=None)


@pytest.mark.parametrize("size", [0, -4])
def test_an_empty_batch_is_refused(size: int) -> None:
    with pytest.raises(RefusedError, match="each has 1 or more"):
        GlobalBatches.of(size)


def megatrons_size(ramp: BatchRamp, consumed: int) -> int:
    """RampupBatchsizeNumMicroBatchesCalculator.update, num_microbatches_calculator.py (0.16)."""
    growth = ramp.global_batch_size - ramp.start
    if consumed > ramp.ramp_samples or not growth or not ramp.ramp_samples:
        return ramp.global_batch_size
    steps = int(consumed / (ramp.ramp_samples / (growth // ramp.increment)))
    return ramp.start + steps * ramp.increment


RAMPS = st.builds(
    lambda start, increment, times, samples: BatchRamp(
        start, increment, samples, start + times * increment
    ),
    st.integers(1, 20), st.integers(1, 12), st.integers(0, 9), st.integers(0, 500),
)  # fmt: skip


@CASES
@given(RAMPS)
def test_a_batch_grows_as_megatrons_does(ramp: BatchRamp) -> None:
    batches = GlobalBatches.of(ramp)
    for number, (begin, size) in enumerate(islice(batches.after(0), 80)):
        assert size == megatrons_size(ramp, begin)
        assert batches.places(number) == (begin, begin + size)


@CASES
@given(RAMPS, st.integers(0, 60))
def test_batches_follow_each_other_without_a_gap_from_any_number_on(
    ramp: BatchRamp, number: int
) -> None:
    batches = GlobalBatches.of(ramp)
    places = [batches.places(each) for each in range(number, number + 20)]
    assert all(before[1] == after[0] for before, after in pairwise(places))
    from_there = islice(batches.after(places[0][0]), 20)
    assert [(begin, begin + size) for begin, size in from_there] == places


@CASES
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), st.integers(0, 1000))
def test_replicas_have_shares_in_one_piece_that_make_up_the_batch(
    micro: int, times: int, dp: int, consumed: int
) -> None:
    batches = Batches(micro * times * dp, micro, dp)
    shares = [batches.contiguous_samples(consumed, rank).reshape(-1) for rank in range(dp)]
    joined = [int(place) for share in shares for place in share]
    assert joined == list(range(consumed, consumed + batches.global_batch_size))
    assert all(len(share) == micro * times for share in shares)
