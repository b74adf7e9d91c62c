"""The order of a pass: one to one for any number of samples, mixed, and equal on every machine."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.dataset.permutation import LONGEST, Permutation
from scalai.core.errors import RefusedError

CASES = settings(max_examples=50, deadline=None)


def whole(length: int, seed: int = 0, number: int = 0) -> np.ndarray:
    return Permutation(length, seed, number)(np.arange(length, dtype=np.int64))


@pytest.mark.parametrize("length", [0, -1, LONGEST + 1])
def test_a_data_set_without_samples_or_with_too_many_is_refused(length: int) -> None:
    with pytest.raises(RefusedError, match="has no order"):
        Permutation(length, 0, 0)


@pytest.mark.parametrize("index", [-1, 10, 1 << 40])
def test_an_index_beyond_the_data_set_is_refused(index: int) -> None:
    with pytest.raises(RefusedError, match="not in a data set of 10 samples"):
        Permutation(10, 0, 0)(np.array([3, index]))


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


@pytest.mark.parametrize("length", [3, 10])
def test_over_the_passes_each_sample_comes_at_each_place_as_often(length: int) -> None:
    passes = 2_000
    counts = np.zeros((length, length), dtype=np.int64)
    for number in range(passes):
        counts[np.arange(length), whole(length, 7, number)] += 1
    freedom = (length - 1) ** 2
    found = chi_squared(counts, passes / length)
    assert abs(found - freedom) < 6 * np.sqrt(2 * freedom)


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
