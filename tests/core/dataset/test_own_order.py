"""The order of a job's own loops: passes, rests, blends, and what the ledger is told of it."""

from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.dataset.blending import LONGEST_PERIOD, Weights
from scalai.core.dataset.ledger import Ledger
from scalai.core.dataset.own_order import Blend, Order, Shuffled
from scalai.core.dataset.verdict import judge
from scalai.core.errors import RefusedError

CASES = settings(max_examples=50, deadline=None)


def drawn(order: Order, start: int, stop: int) -> list[int]:
    return [int(each) for each in order.samples_at(np.arange(start, stop))]


@pytest.mark.parametrize("facts", [{"samples": 0}, {"samples": 7, "whole": 8}, {"samples": -3}])
def test_a_data_set_without_a_whole_block_is_refused(facts: Any) -> None:
    with pytest.raises(RefusedError, match=r"Give more samples, or drop no rest"):
        Shuffled(**facts)


@pytest.mark.parametrize("weights", [(0, 1), (-1, 2), (float("nan"), 1), (float("inf"), 1)])
def test_a_weight_that_is_not_positive_is_refused(weights: tuple[float, float]) -> None:
    with pytest.raises(RefusedError, match="must be positive"):
        Blend((Shuffled(3, name="a"), Shuffled(3, name="b")), weights)


@pytest.mark.parametrize(("names", "weights"), [(("a", "a"), (1, 1)), (("a", "b"), (1,)), ((), ())])
def test_a_blend_whose_parts_cannot_be_told_apart_is_refused(
    names: tuple[str, ...], weights: tuple[float, ...]
) -> None:
    with pytest.raises(RefusedError, match="name of its own"):
        Blend(tuple(Shuffled(3, name=name) for name in names), weights)


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


def test_the_lightest_data_sets_are_drawn_from_too() -> None:
    shares = Weights.of((312_345_678, 98_765_432, 7, 55))
    assert shares.period == LONGEST_PERIOD and shares.numbers[2:] == (1, 1)


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
