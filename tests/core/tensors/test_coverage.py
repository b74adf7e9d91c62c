"""What is said about a state that is not whole."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.errors import LayoutError
from scalai.core.tensors.collection import Collection, Tensor, concatenate
from scalai.core.tensors.coverage import Cover, check_coverage, find_gaps
from scalai.core.tensors.holders import merged
from scalai.core.tensors.region import Box, whole
from scalai.store.files import slices

WEIGHT = Tensor("param/weight", (4, 6), "F32")
STEP = Tensor("step/weight", (), "F32")


def test_a_whole_state_passes_with_replicas_and_0d_tensors() -> None:
    rows = [(WEIGHT, Box((0, 0), (4, 3))), (WEIGHT, Box((0, 3), (4, 3))), (STEP, Box((), ()))]
    check_coverage(Collection.of(rows * 3))
    check_coverage(Collection.of([]))


def test_a_hole_is_named_with_its_box() -> None:
    rows = [(WEIGHT, Box((0, 0), (4, 3))), (WEIGHT, Box((1, 3), (3, 3)))]
    with pytest.raises(LayoutError, match=r"'param/weight' \[4, 6\]: nobody holds \[0:1,3:6\]"):
        check_coverage(Collection.of(rows))


def test_a_tensor_of_the_table_without_rows_is_missing() -> None:
    held = Collection.of([(STEP, Box((), ())), (WEIGHT, Box((0, 0), (0, 6)))])
    assert find_gaps(held) == [(WEIGHT, whole(WEIGHT.shape))]


def test_a_tensor_without_elements_is_whole() -> None:
    empty = Tensor("param/empty", (0, 3), "F32")
    assert not find_gaps(Collection.of([(empty, whole(empty.shape))]))


def test_partial_overlaps_are_refused_unless_asked_for() -> None:
    rows = [(WEIGHT, whole((4, 6))), (WEIGHT, Box((1, 0), (1, 6)))]
    with pytest.raises(LayoutError, match=r"\[0:4,0:6\] overlaps \[1:2,0:6\]"):
        check_coverage(Collection.of(rows))
    check_coverage(Collection.of(rows), exact_partition=False)


def test_overlaps_do_not_hide_holes() -> None:
    rows = [(WEIGHT, Box((0, 0), (3, 6))), (WEIGHT, Box((1, 0), (1, 6)))]
    with pytest.raises(LayoutError, match=r"\[3:4,0:6\]"):
        check_coverage(Collection.of(rows), exact_partition=False)


def test_a_box_outside_of_its_tensor_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"box \[3:5,0:6\] reaches outside of 'param/weight'"):
        check_coverage(Collection.of([(WEIGHT, Box((3, 0), (2, 6)))]))


def test_long_lists_are_cut_short() -> None:
    tensors = [Tensor(f"param/{number}", (2,), "F32") for number in range(9)]
    with pytest.raises(LayoutError, match="and 4 more tensors"):
        check_coverage(Collection.of([(tensor, Box((0,), (1,))) for tensor in tensors]))


# ------------------------------------------------------------------ hosts that come and go

AXES = (6, 5)
MOVES = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.sampled_from(["put", "grow", "remove"]),
        st.lists(
            st.tuples(
                st.sampled_from(["w", "v", "e"]), *(st.integers(0, size - 1) for size in AXES),
                *(st.integers(1, size) for size in AXES),
            ),
            max_size=5,
        ),
    ),
    max_size=14,
)  # fmt: skip


def boxes_of(drawn: list[tuple[str, int, int, int, int]]) -> Collection:
    """Return the drawn boxes, cut off where their tensor ends; tensor e has no elements."""
    rows = []
    for name, row, column, height, width in drawn:
        if name == "e":
            rows.append((Tensor("param/e", (0, 5), "F32"), Box((0, 0), (0, 5))))
            continue
        shape = (min(height, AXES[0] - row), min(width, AXES[1] - column))
        rows.append((Tensor(f"param/{name}", AXES, "F32"), Box((row, column), shape)))
    return Collection.of(rows)


def is_whole(parts: Iterable[Collection], expected: int) -> bool:
    held = concatenate(list(parts))
    return len(held.tensors) == expected and not find_gaps(held)


@settings(deadline=None, max_examples=150)
@given(MOVES, st.integers(1, 3))
def test_a_cover_knows_at_any_time_what_a_look_at_everything_tells(
    moves: list[Any], expected: int
) -> None:
    cover, held = Cover(), dict[str, Collection]()
    for host, what, drawn in moves:
        pieces = boxes_of(drawn)
        if what == "remove":
            held.pop(host, None)
            cover.remove(host)
        else:
            held[host] = concatenate([held[host], pieces]) if what == "grow" and host in held else (
                pieces
            )  # fmt: skip
            cover.put(host, held[host], expected)
        assert cover.is_whole() == (bool(held) and is_whole(held.values(), expected))
        for away in "abcd":
            others = [each for name, each in held.items() if name != away]
            assert cover.is_whole_without(away) == (bool(others) and is_whole(others, expected))


def test_hosts_that_disagree_about_a_tensor_hold_no_state_until_one_has_gone() -> None:
    cover, other = Cover(), Tensor("param/w", (6, 4), "F32")
    one = boxes_of([("w", 0, 0, 6, 5)])
    cover.put("a", one, 1)
    cover.put("b", Collection.of([(other, Box((0, 0), (6, 4)))]), 1)
    assert not cover.is_whole()
    cover.remove("b")
    assert cover.is_whole()


@settings(deadline=None)
@given(MOVES)
def test_merged_boxes_hold_the_same_elements(moves: list[Any]) -> None:
    for _, _, drawn in moves:
        pieces = boxes_of(drawn)
        found = [merged(pieces), pieces]
        filled = []
        for each in found:
            tables = {t.name: np.zeros(t.shape, bool) for t in each.tensors}
            for row in range(len(each)):
                tensor, box = each.box(row)
                tables[tensor.name][slices(box)] = True
            filled.append(tables)
        assert len(found[0]) <= len(pieces)
        assert all((filled[0][name] == table).all() for name, table in filled[1].items())


def test_boxes_that_make_up_a_tensor_become_one() -> None:
    cut = [("w", row, column, 1, 1) for row in range(6) for column in range(5)]
    assert len(merged(boxes_of(cut))) == 1


def test_a_host_that_has_a_box_twice_is_one_holder_of_it() -> None:
    twice = boxes_of([("w", 0, 0, 6, 5), ("w", 0, 0, 3, 5), ("w", 3, 0, 3, 5)])
    cover = Cover()
    cover.put("a", merged(twice), 1)
    cover.put("b", boxes_of([("w", 0, 0, 1, 1)]), 1)
    assert cover.is_whole() and not cover.is_whole_without("a")


def test_a_tensor_with_other_dims_is_a_conflict_also_while_something_is_missing() -> None:
    cover, flat = Cover(), Tensor("param/w", (30,), "F32")
    cover.put("a", boxes_of([("w", 0, 0, 6, 5), ("w", 0, 0, 1, 1)]), 1)
    assert cover.is_whole()
    cover.put("a", boxes_of([("w", 0, 0, 3, 5), ("w", 2, 0, 3, 5), ("w", 1, 0, 3, 5)]), 1)
    assert not cover.is_whole()
    cover.put("b", Collection.of([(flat, Box((0,), (30,)))]), 1)
    assert not cover.is_whole()


def test_a_box_that_gives_way_to_one_around_it_leaves_no_gap() -> None:
    cover, line = Cover(), Tensor("param/w", (8,), "F32")

    def of(*ranges: tuple[int, int]) -> Collection:
        return Collection.of((line, Box((begin,), (end - begin,))) for begin, end in ranges)

    cover.put("a", of((0, 3)), 1)
    cover.put("b", of((3, 8)), 1)
    assert cover.is_whole()
    cover.put("a", of((0, 6)), 1)
    assert cover.is_whole() and not cover.is_whole_without("b")
    cover.put("a", of((0, 8)), 1)
    cover.remove("b")
    assert cover.is_whole()
    cover.put("a", of((0, 5), (4, 7)), 1)
    assert not cover.is_whole(), "7 to 8 is gone, and no box lies around what went"
    cover.put("a", of((0, 5), (4, 7), (7, 8)), 1)
    assert cover.is_whole()
