import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalai.core.dataset.intervals import Intervals

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def places(pairs: list[tuple[int, int]]) -> set[int]:
    return {place for start, stop in pairs for place in range(start, stop)}


def held(intervals: Intervals) -> set[int]:
    return places(list(intervals.pairs))


@given(PAIRS, PAIRS, st.integers(0, 40))
def test_intervals_are_the_sets_of_their_places(
    one: list[tuple[int, int]], two: list[tuple[int, int]], begin: int
) -> None:
    a, b = Intervals.of(*one), Intervals.of(*two)
    assert held(a) == places(one) and len(a) == len(places(one))
    assert held(a | b) == places(one) | places(two)
    assert held(a & b) == places(one) & places(two)
    assert held(a - b) == places(one) - places(two)
    assert held(a.holes(begin)) == set(range(begin, a.end)) - places(one)


@given(PAIRS)
def test_equal_sets_are_equal_values_and_survive_json(pairs: list[tuple[int, int]]) -> None:
    intervals = Intervals.of(*pairs)
    assert Intervals.of(*reversed(pairs)) == intervals
    assert Intervals.from_json(intervals.to_json(), "taken") == intervals


@pytest.mark.parametrize("pairs", [((3, 3),), ((5, 4),), ((0, 2), (2, 4)), ((4, 6), (0, 2))])
def test_other_forms_of_a_set_are_refused(pairs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="not ascending intervals"):
        Intervals(pairs)


@pytest.mark.parametrize("value", [[0, 2, 4], [0, 2.0], "0:2", [-1, 2], [0, True]])
def test_damaged_json_is_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match="taken"):
        Intervals.from_json(value, "taken")


@given(PAIRS, st.integers(0, 3), st.integers(1, 3))
def test_what_follows_behind_a_set_is_added_as_by_its_union(
    pairs: list[tuple[int, int]], gap: int, length: int
) -> None:
    intervals = Intervals.of(*pairs)
    pair = intervals.end + gap, intervals.end + gap + length
    assert intervals.followed_by(*pair) == intervals | Intervals.of(pair)
