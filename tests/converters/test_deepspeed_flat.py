"""ZeRO's flat buffers hold every element once, whatever the number of ranks."""

from math import prod

import pytest

from scalai.converters.deepspeed.flat import (
    Flat,
    gaps_of,
    round_robin,
    split_each,
    split_whole,
    sub_groups,
    undo_round_robin,
)
from scalai.converters.deepspeed.plain_reader import match_names

SHAPES: dict[str, tuple[int, ...]] = {
    "a": (5, 3),
    "none": (),
    "b": (7,),
    "empty": (0,),
    "c": (1, 2),
}
RANKS = [1, 2, 3, 7, 20]


def elements(flat: Flat) -> list[tuple[str, int]]:
    """Return (name, element) of all ranks; fail where two lie at one place of a buffer."""
    found = []
    for spans in flat.spans:
        places = [span.at + i for span in spans for i in range(span.high - span.low)]
        assert len(set(places)) == len(places)
        assert all(0 <= place < flat.rank_elements for place in places)
        found += [(span.name, i) for span in spans for i in range(span.low, span.high)]
    return found


EXPECTED = [(name, i) for name, shape in SHAPES.items() for i in range(prod(shape))]


@pytest.mark.parametrize("dp", RANKS)
@pytest.mark.parametrize("is_aligned", [False, True])
def test_the_cut_whole_holds_each_element_once(dp: int, is_aligned: bool) -> None:
    gaps = gaps_of(SHAPES, 4, is_aligned=is_aligned)
    flat = split_whole(SHAPES, dp, gaps)
    assert elements(flat) == EXPECTED
    assert flat.rank_elements % 2 == 0
    end = sum(map(prod, SHAPES.values())) + sum(gaps)
    assert sum(flat.padding) == flat.rank_elements * dp - end


@pytest.mark.parametrize("dp", RANKS)
def test_parameters_cut_each_hold_each_element_once(dp: int) -> None:
    flat = split_each(SHAPES, dp)
    assert sorted(elements(flat)) == sorted(EXPECTED)
    assert flat.rank_elements == sum(-(-prod(shape) // dp) for shape in SHAPES.values())


def test_aligned_parameters_begin_at_16_bytes() -> None:
    assert gaps_of({"a": (3,), "b": (4,), "c": (1,)}, 4, is_aligned=True) == [1, 0, 0]
    assert gaps_of({"a": (3,), "b": (4,), "c": (1,)}, 2, is_aligned=True) == [5, 4, 0]


def test_a_sub_group_ends_where_it_is_full() -> None:
    shapes = {"a": (4,), "b": (4,), "c": (4,)}
    assert list(sub_groups(shapes, 2, 3)) == [("a", "b"), ("c",)]
    assert list(sub_groups(shapes, 2, 100)) == [("a", "b", "c")]


@pytest.mark.parametrize("dp", RANKS)
def test_round_robin_is_undone(dp: int) -> None:
    names = tuple("abcdefg")
    assert undo_round_robin(round_robin(names, dp), dp) == names


def by_shape(
    module: dict[str, tuple[int, ...]], groups: list[tuple[tuple[int, ...], ...]]
) -> list[list[tuple[str, ...]]]:
    """Match names where every place of a group is a parameter of a shape."""

    def advance(group: int, at: int, name: str) -> int | None:
        fits = at < len(groups[group]) and groups[group][at] == module[name]
        return at + 1 if fits else None

    return match_names(list(module), [1] * len(module), [len(group) for group in groups], advance)


def test_names_follow_from_shapes_where_one_assignment_is_possible() -> None:
    module = {"w1": (2, 2), "b1": (2,), "frozen": (9,), "w2": (2, 2), "b2": (2,)}
    assert by_shape(module, [((2, 2), (2, 2)), ((2,), (2,))]) == [[("w1", "w2"), ("b1", "b2")]]
    assert len(by_shape(module, [((2, 2),), ((2,), (2,))])) == 2
    assert by_shape(module, [((3,),)]) == []


def test_names_of_a_flat_buffer_follow_from_its_elements() -> None:
    module = {"a": [1, 2], "frozen": [3], "b": [4, 5, 6], "c": [7]}
    buffers = [[1, 2, 7], [4, 5, 6]]

    def advance(group: int, at: int, name: str) -> int | None:
        end = at + len(module[name])
        return end if buffers[group][at:end] == module[name] else None

    sizes = [len(values) for values in module.values()]
    assert match_names(list(module), sizes, [3, 3], advance) == [[("a", "c"), ("b",)]]


def test_names_of_thousands_of_parameters_are_found() -> None:
    module: dict[str, tuple[int, ...]] = {f"p{number}": (number % 7 + 1,) for number in range(3000)}
    small = tuple(shape for shape in module.values() if shape[0] < 4)
    large = tuple(shape for shape in module.values() if shape[0] >= 4)
    ((of_small, of_large),) = by_shape(module, [small, large])
    assert sorted((*of_small, *of_large)) == sorted(module)
