"""Devices of many jobs: the exact allotment."""

from itertools import product

import numpy as np
import pytest

from scalai.core.cluster.allotting import allot, settle, sizes_of

SIZES = [1, 2, 4]


def worths_of(seed: int, jobs: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    found = []
    for _ in range(jobs):
        worth = np.concatenate([[0.0], random.uniform(-1, 4, size=len(SIZES))])
        worth[random.integers(0, len(worth))] = random.choice([-np.inf, 0.0])
        worth[0] = max(worth[0], -5.0)
        found.append(worth)
    return found


def total(worths: list[np.ndarray], given: list[int]) -> float:
    places = [0 if not size else SIZES.index(size) + 1 for size in given]
    return float(sum(worth[place] for worth, place in zip(worths, places, strict=True)))


@pytest.mark.parametrize("seed", range(20))
def test_no_other_allotment_is_worth_more(seed: int) -> None:
    worths = worths_of(seed, jobs=4)
    given = allot(worths, SIZES, 7)
    assert sum(given) <= 7
    best = max(
        total(worths, list(tried)) for tried in product([0, *SIZES], repeat=4) if sum(tried) <= 7
    )
    assert total(worths, given) == pytest.approx(best)


def test_sizes_are_any_within_a_host_and_whole_hosts_above() -> None:
    assert sizes_of(14, per_host=4) == [1, 2, 3, 4, 8, 12]
    assert sizes_of(2, per_host=4) == [1, 2]


def growing(gain: float) -> np.ndarray:
    """Worth of 0, 1, 2 and 4 devices: the second is worth ``gain``."""
    return np.array([-10.0, 1.0, 1.0 + gain, -np.inf])


@pytest.mark.parametrize(
    ("gains", "present", "given", "settled"),
    [
        ((0.8, 1.0), (1, 1), (1, 2), [2, 1]),
        ((0.7, 1.0), (1, 1), (1, 2), [1, 2]),
        ((1.0, 0.8), (1, 1), (2, 1), [2, 1]),
        ((0.8, 1.0), (2, 2), (1, 2), [2, 1]),
        ((0.8, 1.0), (1, 2), (1, 2), [1, 2]),
        ((0.8, 0.9, 1.0), (1, 1, 1), (1, 1, 2), [2, 1, 1]),
    ],
    ids=["a near gain", "a greater one", "the first", "a shrinking", "no change", "three"],
)
def test_a_nearly_equal_change_goes_to_the_first(
    gains: tuple[float, ...], present: tuple[int, ...], given: tuple[int, ...], settled: list[int]
) -> None:
    worths = [growing(gain) for gain in gains]
    assert settle(worths, SIZES, given, present, 0.25) == settled
    assert settle(worths, SIZES, given, present, 0.0) == list(given)


def test_a_nearly_equal_growth_goes_to_the_job_with_fewer_devices() -> None:
    worths = [np.array([0.0, 1.0, 2.0, 3.0, 4.0])] * 2
    assert settle(worths, [1, 2, 3, 4], (3, 1), (2, 1), 0.25) == [2, 2]


@pytest.mark.parametrize("seed", range(20))
def test_a_settled_allotment_has_as_many_devices_and_no_more_changes(seed: int) -> None:
    worths, random = worths_of(seed, jobs=4), np.random.default_rng(seed)
    given, present = allot(worths, SIZES, 7), [int(n) for n in random.choice([0, *SIZES], 4)]
    found = settle(worths, SIZES, given, present, 0.25)

    def changes(sizes: list[int]) -> int:
        return sum(size != before for size, before in zip(sizes, present, strict=True))

    assert sum(found) == sum(given) and changes(found) == changes(given)
    assert total(worths, found) > -np.inf
