"""Global orders: each sample once a pass, shares by weight, batches that grow; and their table."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import accumulate, islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.dataset.ledger import Ledger, judge
from scalai.core.dataset.order import (
    LONGEST,
    LONGEST_PERIOD,
    Blend,
    GlobalBatches,
    GlobalOrder,
    Permutation,
    Shuffled,
    Weights,
)
from scalai.core.dataset.table import DatasetTable
from scalai.core.degrees.batches import BatchRamp
from scalai.core.errors import RefusedError, UsageError
from scalai.runtime.codec import convert

CASES = settings(max_examples=50, deadline=None)


def drawn(order: GlobalOrder, start: int, stop: int) -> list[int]:
    return [int(each) for each in order.samples_at(np.arange(start, stop))]


def named(*names: str) -> tuple[Shuffled, ...]:
    return tuple(Shuffled(3, name=name) for name in names)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        *((partial(Shuffled, *facts), "Give more samples, or drop no rest")
          for facts in ((0,), (7, 0, "", 8), (-3,))),
        *((partial(Blend, named("a", "b"), weights), "must be positive")
          for weights in ((0, 1), (-1, 2), (float("nan"), 1), (float("inf"), 1))),
        *((partial(Blend, named(*names), weights), "name of its own")
          for names, weights in (("aa", (1, 1)), ("ab", (1,)), ("", ()))),
        *((partial(Permutation, length, 0, 0), "has no order") for length in (0, -1, LONGEST + 1)),
        *((partial(Permutation(10, 0, 0), np.array([3, index])),
           "not in a data set of 10 samples") for index in (-1, 10, 1 << 40)),
        *((partial(GlobalBatches.of, size), "each has 1 or more") for size in (0, -4)),
    ],
)  # fmt: skip
def test_data_sets_weights_and_batches_that_have_no_order_are_refused(
    made: Callable[[], object], words: str
) -> None:
    with pytest.raises(RefusedError, match=words):
        made()


@CASES
@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 5), st.booleans())
def test_each_pass_has_each_sample_once_and_an_order_of_its_own(
    samples: int, whole: int, seed: int, is_shuffled: bool
) -> None:
    if whole > samples:
        return
    order = Shuffled(samples, seed, whole=whole, is_shuffled=is_shuffled)
    found = drawn(order, 0, 3 * order.length)
    passes = [found[n * order.length : (n + 1) * order.length] for n in range(3)]
    for each in passes:
        assert len({*each}) == order.length and {*each} <= {*range(samples)}
    if is_shuffled and samples > 20:
        assert passes[0] != passes[1] != passes[2]
    if not is_shuffled:
        assert passes[1] == [*range(order.length)]


@CASES
@given(st.integers(1, 40), st.lists(st.integers(0, 200), max_size=30))
def test_a_place_has_the_same_sample_however_it_is_asked_for(
    samples: int, places: list[int]
) -> None:
    order = Shuffled(samples, 3)
    together = order.samples_at(np.array(places, dtype=np.int64)).tolist()
    assert together == [drawn(order, place, place + 1)[0] for place in places]


WEIGHTS = st.lists(st.integers(1, 400), min_size=1, max_size=9)


@CASES
@given(WEIGHTS)
def test_no_data_set_of_a_blend_is_ever_a_whole_sample_off_its_share(numbers: list[int]) -> None:
    shares = Weights.of([float(number) for number in numbers])
    places = np.arange(2 * shares.period + 3)
    which, of_part = shares.at(places)
    total = sum(numbers)
    for part, number in enumerate(numbers):
        given_so_far = np.cumsum(which == part)
        exact = (places + 1) * number / total
        most = 1 - 1 / max(2, 2 * len(numbers) - 2)
        assert np.abs(given_so_far - exact).max() <= most + 1e-6
        mine = of_part[which == part]
        assert mine.tolist() == list(range(len(mine))), "its own places come one after the other"


@CASES
@given(WEIGHTS, st.integers(0, 3_000))
def test_what_was_given_before_a_place_is_known_without_the_way_there(
    numbers: list[int], place: int
) -> None:
    shares = Weights.of([float(number) for number in numbers])
    which, _ = shares.at(np.arange(place))
    assert shares.before(place) == np.bincount(which, minlength=len(numbers)).tolist()


def test_weights_are_taken_as_they_are_written() -> None:
    assert Weights.of((0.1, 0.2, 0.7)).numbers == (1, 2, 7)
    assert Weights.of((30, 70)).numbers == Weights.of((0.3, 0.7)).numbers == (3, 7)


def test_weights_that_are_too_fine_are_off_by_less_than_a_sample_a_period() -> None:
    fine = (312_345_678, 98_765_432, 76_543)
    shares = Weights.of(fine)
    assert shares.period == LONGEST_PERIOD
    for number, weight in zip(shares.numbers, fine, strict=True):
        share = Fraction(number, shares.period) - Fraction(weight, sum(fine))
        assert abs(share) < Fraction(1, LONGEST_PERIOD)
    light = Weights.of((312_345_678, 98_765_432, 7, 55))
    assert light.period == LONGEST_PERIOD and light.numbers[2:] == (1, 1), "drawn from too"


PARTS = (Shuffled(30, 1, "wiki"), Shuffled(7, 2, "code"), Shuffled(100, 3, "web", whole=8))


def test_a_blend_numbers_samples_as_the_concatenation_of_its_data_sets() -> None:
    blend = Blend(PARTS, (0.5, 0.2, 0.3))
    assert blend.offsets == (0, 30, 37)
    which, of_part = Weights.of(blend.weights).at(np.arange(500))
    for place, sample in enumerate(drawn(blend, 0, 500)):
        part = PARTS[which[place]]
        assert sample - blend.offsets[which[place]] == drawn(part, *span(int(of_part[place])))[0]


def span(place: int) -> tuple[int, int]:
    return place, place + 1


def test_the_ledger_of_a_blend_proves_each_data_set_by_itself() -> None:
    blend = Blend(PARTS, (0.5, 0.2, 0.3))
    ledger, at = Ledger.begun(0, 0), 0
    for step, size in enumerate([4, 9, 16, 1, 30] * 10):
        draws = blend.draws(at, at + size)
        assert not list(ledger.objections(draws, at + size))
        at += size
        ledger = ledger.stepped(step + 1, at, draws)
    assert judge(ledger, 50, at).is_kept
    taken = {name: 0 for name in ("wiki", "code", "web")}
    for each in ledger.passes:
        taken[each.data_set] += each.samples
    assert [*taken.values()] == [300, 120, 180] and at == 600


@CASES
@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.data())
def test_any_cut_of_a_training_into_rounds_draws_the_same(
    steps: list[int], data: st.DataObject
) -> None:
    blend = Blend(PARTS, (1, 1, 3))
    ends = [0, *accumulate(steps)]
    whole = drawn(blend, 0, ends[-1])
    cut = data.draw(st.sampled_from(ends))
    assert drawn(blend, 0, cut) + drawn(blend, cut, ends[-1]) == whole


def test_what_makes_an_order_another_one_is_among_its_facts() -> None:
    before = Blend(PARTS, (1, 1, 2)).facts()
    assert before == Blend(PARTS, (0.25, 0.25, 0.5)).facts()
    assert before != Blend(PARTS, (1, 1, 3)).facts()
    assert before["wiki"] != Blend((PARTS[1], PARTS[0], PARTS[2]), (1, 1, 2)).facts()["wiki"]
    for other in (Shuffled(31, 1, "wiki"), Shuffled(30, 2, "wiki"), Shuffled(30, 1, "wiki", 5)):
        assert other.facts() != PARTS[0].facts()
    assert Shuffled(30, 1, "wiki", content="2 GB").facts() != PARTS[0].facts()


def whole(length: int, seed: int = 0, number: int = 0) -> np.ndarray:
    return Permutation(length, seed, number)(np.arange(length, dtype=np.int64))


@pytest.mark.parametrize("length", [*range(1, 130), 255, 256, 257, 9_999, 65_536, 100_003])
def test_each_sample_comes_once(length: int) -> None:
    assert np.array_equal(np.sort(whole(length, 5, 3)), np.arange(length))


@CASES
@given(st.integers(1, 3_000), st.integers(-(2**80), 2**80), st.integers(0, 2**40))
def test_so_it_does_for_any_size_seed_and_pass(length: int, seed: int, number: int) -> None:
    assert len(set(whole(length, seed, number).tolist())) == length


@pytest.mark.parametrize("length", [2**40, 2**33 + 1, LONGEST])
def test_billions_of_samples_are_evaluated_at_any_place(length: int) -> None:
    """Of so many only some can be looked at: none meets another one, all are in the data set, and
    they spread over all of it."""
    generator = np.random.default_rng(length)
    places = np.unique(generator.integers(0, length, 30_000))
    found = Permutation(length, 1, 0)(places)
    assert len(np.unique(found)) == len(places) and 0 <= found.min() and found.max() < length
    counts = np.bincount((found // (length // 64 + 1)).astype(int), minlength=64)
    assert chi_squared(counts, len(places) / 64) < 64 + 6 * np.sqrt(2 * 64)
    one_by_one = [int(Permutation(length, 1, 0)(places[each : each + 1])[0]) for each in range(9)]
    assert one_by_one == found[:9].tolist()


def chi_squared(counts: np.ndarray, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_all_orders_of_a_few_samples_come_as_often() -> None:
    passes, counts = 6_000, dict[tuple[int, ...], int]()
    for number in range(passes):
        order = tuple(whole(4, 11, number).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    found = chi_squared(np.array([*counts.values()]), passes / 24)
    assert found < 23 + 6 * np.sqrt(2 * 23)


def test_neighbours_are_not_neighbours_afterwards() -> None:
    """Distances between samples that follow each other are spread as those of random ones."""
    length = 100_000
    order = whole(length, 3)
    distances = np.diff(order) % length
    counts = np.bincount(distances // (length // 100), minlength=100)
    assert chi_squared(counts, (length - 1) / 100) < 100 + 6 * np.sqrt(2 * 100)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(length))[0, 1]) < 0.02


def test_orders_of_other_seeds_and_passes_have_little_in_common() -> None:
    length = 50_000
    orders = [whole(length, *key) for key in ((0, 0), (0, 1), (1, 0), (2**70, 0), (-1, 0))]
    for first in range(len(orders)):
        for second in range(first):
            assert (orders[first] == orders[second]).sum() < 20


@pytest.mark.parametrize(
    ("length", "seed", "number", "expected"),
    [
        (10, 0, 0, [1, 3, 4, 7, 6, 9, 0, 2, 5, 8]),
        (1000, 1, 2, [662, 647, 96, 543, 443]),
        (10**9, 1234, 5, [437218136, 775041793, 10584878, 965201085, 871393421]),
        (2**40, -7, 0, [836005513068, 74928159799, 609166464982, 74230243385, 240174277392]),
    ],
)
def test_the_order_is_the_same_on_every_machine(
    length: int, seed: int, number: int, expected: list[int]
) -> None:
    """A job that a release began goes on under the next one: these values never change."""
    places = np.array([(length - 1) * each // (len(expected) - 1) for each in range(len(expected))])
    assert Permutation(length, seed, number)(places).tolist() == expected


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


# ------------------------------------------------------------------ the table of data sets

TABLE = DatasetTable({"a": "/a", "b": "s3://b"}, {"a": 4}, {"b": 7}, 12, (4, 4, 60))


@pytest.mark.parametrize(
    ("values", "why"),
    [
        *(({"sources": {name: "/a"}}, f"'{name}' cannot name a data set")
          for name in ("", "..", "a/b", ".hidden", "a" * 101)),
        ({"sources": {"a": ""}}, "sources.a = ''; expected an absolute path, or a URL"),
        ({"sources": {"a": "data/a"}}, "sources.a = 'data/a'; expected an absolute path"),
        ({"record_tokens": {"a": 0}}, "record_tokens.a = 0; expected 1 to"),
        ({"record_tokens": {"a": 1 << 70}}, "record_tokens.a = .*; expected 1 to"),
        ({"shuffle": {"a": -1}}, "shuffle.a = -1; expected a seed of 0 or more"),
        ({"global_batch_size": 0}, "global_batch_size = 0; expected 1 to"),
        ({"global_batch_size": 1 << 40}, "expected 1 to"),
        ({"rampup_batch_size": (4, 4, 60)}, "needs global_batch_size beside it"),
        ({"global_batch_size": 12, "rampup_batch_size": (4, 4)}, "expected START, INCREMENT and"),
        ({"global_batch_size": 12, "rampup_batch_size": (4, 5, 60)}, "a multiple of the increment"),
        ({"global_batch_size": 12, "rampup_batch_size": (24, 4, 60)}, "cannot grow from 24 to 12"),
        ({"global_batch_size": 12, "rampup_batch_size": (0, 4, 60)}, "cannot grow from 0 to 12"),
        ({"global_batch_size": 12, "rampup_batch_size": (4, 0, 60)}, "cannot grow from 4 to 12"),
        ({"global_batch_size": 12, "rampup_batch_size": (4, 4, -1)}, "expected 0 to .* SAMPLES"),
        ({"global_batch_size": 1 << 30, "rampup_batch_size": (1, 1, 9)}, "at most 4096 sizes"),
    ],
)  # fmt: skip
def test_every_slip_of_a_table_is_named(values: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        DatasetTable(**values)  # type: ignore[arg-type]


def test_what_is_said_of_a_data_set_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match=r"shuffle names 'c', and sources \['a'\]"):
        DatasetTable({"a": "/a"}, shuffle={"c": 1}).checked()
    assert TABLE.checked() is TABLE


def test_a_table_overrules_another_by_data_set_and_the_batch_as_a_whole() -> None:
    found = DatasetTable({"a": "/other"}, {"b": 8}, global_batch_size=64).over(TABLE)
    assert found == DatasetTable({"a": "/other", "b": "s3://b"}, {"a": 4, "b": 8}, {"b": 7}, 64)
    assert DatasetTable().over(TABLE) == TABLE == TABLE.over(DatasetTable())


def test_a_table_is_read_back() -> None:
    assert convert(TABLE.to_json(), DatasetTable) == TABLE
    assert DatasetTable().to_json() == {}


@pytest.mark.parametrize("batch", [None, 12, BatchRamp(4, 4, 60, 12)])
def test_its_batches_are_those_that_it_states(batch: int | BatchRamp | None) -> None:
    found = DatasetTable.of_batch(batch)
    assert found.batches == (None if batch is None else GlobalBatches.of(batch))
    assert convert(found.to_json(), DatasetTable) == found
