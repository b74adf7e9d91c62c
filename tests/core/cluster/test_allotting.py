"""Devices of many jobs: the exact allotment."""

from itertools import product

import numpy as np
import pytest

from scalai.core.cluster.allotting import allot, sizes_of

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
