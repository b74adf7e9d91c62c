"""What is said about a state that is not whole, and of damage until it is held whole again."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.errors import LayoutError
from scalai.core.tensors.collection import Collection, Tensor, concatenate
from scalai.core.tensors.coverage import (
    Cover,
    DamagedPiece,
    check_coverage,
    find_gaps,
    still_damaged,
)
from scalai.core.tensors.holders import merged
from scalai.core.tensors.region import Box, whole
from scalai.store.files import slices

WEIGHT = Tensor("param/weight", (4, 6), "F32")
STEP = Tensor("step/weight", (), "F32")


LEFT, REST = (WEIGHT, Box((0, 0), (4, 3))), (WEIGHT, Box((0, 3), (4, 3)))
SCALAR, EMPTY = (STEP, Box((), ())), (Tensor("param/empty", (0, 3), "F32"), whole((0, 3)))
INSIDE = (WEIGHT, Box((1, 0), (1, 6)))


@pytest.mark.parametrize(
    ("rows", "is_exact", "words"),
    [
        ([LEFT, REST, SCALAR] * 3, True, ""),
        ([], True, ""),
        ([EMPTY], True, ""),
        ([(WEIGHT, whole((4, 6))), INSIDE], False, ""),
        ([(WEIGHT, whole((4, 6))), INSIDE], True, r"\[0:4,0:6\] overlaps \[1:2,0:6\]"),
        ([LEFT, (WEIGHT, Box((1, 3), (3, 3)))], True,
         r"'param/weight' \[4, 6\]: nobody holds \[0:1,3:6\]"),
        ([SCALAR, (WEIGHT, Box((0, 0), (0, 6)))], True, r"nobody holds \[0:4,0:6\]"),
        ([(WEIGHT, Box((0, 0), (3, 6))), INSIDE], False, r"\[3:4,0:6\]"),
        ([(WEIGHT, Box((3, 0), (2, 6)))], True,
         r"box \[3:5,0:6\] reaches outside of 'param/weight'"),
        ([(Tensor(f"param/{n}", (2,), "F32"), Box((0,), (1,))) for n in range(9)], True,
         "and 4 more tensors"),
    ],
)  # fmt: skip
def test_a_state_is_whole_or_its_holes_and_overlaps_are_named(
    rows: list[tuple[Tensor, Box]], is_exact: bool, words: str
) -> None:
    held = Collection.of(rows)
    with pytest.raises(LayoutError, match=words) if words else nullcontext():
        check_coverage(held, exact_partition=is_exact)


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
    cover.put("a", boxes_of([("w", 0, 0, 6, 5)]), 1)
    assert not cover.is_whole(), "until one of them has gone"
    cover.remove("b")
    assert cover.is_whole()


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


TALL = Tensor("w", (6, 8), "F32")
HALF = DamagedPiece("w", Box((0, 4), (6, 4)), "w differs")
NUMBER = DamagedPiece("step/weight", whole(()), "step differs")


@pytest.mark.parametrize(
    ("held", "left"),
    [
        ([], (HALF, NUMBER)),
        ([(TALL, Box((0, 0), (6, 4))), (STEP, whole(()))], (HALF,)),
        ([(TALL, Box((0, 4), (5, 4))), (STEP, whole(()))], (HALF,)),
        ([(TALL, Box((0, 4), (6, 4)))], (NUMBER,)),
        ([(TALL, whole((6, 8))), (STEP, whole(()))], ()),
        ([(TALL, Box((3, 0), (3, 8))), (TALL, Box((0, 2), (3, 6)))], (NUMBER,)),
    ],
)
def test_a_piece_is_damaged_until_all_of_it_is_held_however_it_is_cut(
    held: list[tuple[Tensor, Box]], left: tuple[DamagedPiece, ...]
) -> None:
    assert still_damaged([HALF, NUMBER], Collection.of(held)) == left


def test_of_what_has_no_elements_nothing_is_missing() -> None:
    assert still_damaged([DamagedPiece("e", whole((0,)), "e")], Collection.of([])) == ()
