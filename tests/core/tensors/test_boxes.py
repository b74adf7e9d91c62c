"""Boxes, flat ranges and strided pieces: overlaps, splitting and clipping, against brute force."""

from collections import Counter
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.tensors.boxes import (
    Boxes,
    Index,
    NumberLine,
    distinct,
    refine,
    self_overlapping,
    uncovered,
    without,
)
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.region import Box, Piece, clip, flat_range, row_major, whole

CASES = settings(max_examples=300, deadline=None)
TENSORS = [Tensor("a", (), "F32"), Tensor("b", (5,), "F32"), Tensor("c", (3, 4), "F32")]
LINE = NumberLine.of(TENSORS)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Box(
        offset,
        tuple(draw(st.integers(1, n - low)) for n, low in zip(shape, offset, strict=True)),
    )


@st.composite
def columns(draw: st.DrawFn) -> Boxes:
    """A few boxes of a few tensors."""
    tensors = draw(st.lists(st.sampled_from(TENSORS), max_size=8))
    held = Collection.of((tensor, draw(boxes_in(tensor.shape))) for tensor in tensors)
    numbers = [TENSORS.index(tensor) for tensor in held.tensors]
    tensor_of = np.array(numbers, dtype=np.int64)[held.tensor] if numbers else held.tensor
    return LINE.place(tensor_of, held.offset, held.shape)


def elements(boxes: Boxes, row: int) -> set[tuple[int, ...]]:
    """The tensor and the index of every element of a box."""
    box = boxes.box(row)
    ranges = (range(low, low + size) for low, size in zip(box.offset, box.shape, strict=True))
    return {(int(boxes.tensor[row]), *index) for index in product(*ranges)}


@CASES
@given(columns(), columns())
def test_all_overlaps_are_found_and_no_others(left: Boxes, right: Boxes) -> None:
    one, two = Index.of(right).overlapping(left)
    assert one.tolist() == sorted(one.tolist())
    assert Counter(zip(one.tolist(), two.tolist(), strict=True)) == Counter(
        (i, j)
        for i in range(len(left))
        for j in range(len(right))
        if elements(left, i) & elements(right, j)
    )


@CASES
@given(columns())
def test_equal_boxes_have_one_number(boxes: Boxes) -> None:
    first, number = distinct(boxes)
    assert [boxes.box(row) for row in first[number]] == [boxes.box(r) for r in range(len(boxes))]
    assert boxes.tensor[first[number]].tolist() == boxes.tensor.tolist()
    assert len({(int(boxes.tensor[row]), boxes.box(row)) for row in first}) == len(first)


@CASES
@given(columns())
def test_atoms_are_disjoint_and_make_up_their_boxes(boxes: Boxes) -> None:
    boxes = boxes.select(distinct(boxes)[0])
    atoms, atom_of, box_of = refine(LINE, boxes)
    assert not len(self_overlapping(atoms)[0])
    assert atom_of.tolist() == sorted(atom_of.tolist())
    for row in range(len(boxes)):
        parts = [elements(atoms, atom) for atom in atom_of[box_of == row]]
        assert sum(map(len, parts)) == len(elements(boxes, row))
        assert set().union(*parts) == elements(boxes, row)


@CASES
@given(boxes_in((4, 3, 5)), st.lists(boxes_in((4, 3, 5)), max_size=4))
def test_what_is_not_covered_is_cut_into_disjoint_boxes(box: Box, holes: list[Box]) -> None:
    def inside(one: Box) -> set[tuple[int, ...]]:
        starts = zip(one.offset, one.shape, strict=True)
        return set(product(*(range(low, low + size) for low, size in starts)))

    rest = [index for part in uncovered(box, holes) for index in inside(part)]
    assert len(rest) == len(set(rest))
    assert set(rest) == inside(box).difference(*(inside(hole) for hole in holes))
    assert all(len(list(without(box, hole))) <= 6 for hole in holes)


def test_a_column_meets_every_row_that_it_crosses() -> None:
    # The column alone is index 0 of size 1 on the last axis; only its neighbours show that the axis
    # is used.
    column = LINE.place(
        np.array([2]), np.array([[0, 0, 0, 0, 0, 0]]), np.array([[1, 1, 1, 1, 3, 1]])
    )
    right = LINE.place(
        np.array([2, 2]),
        np.array([[0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 0]]),
        np.array([[1, 1, 1, 1, 2, 1], [1, 1, 1, 1, 1, 4]]),
    )
    assert Index.of(right).overlapping(column)[1].tolist() == [1]


# ------------------------------------------------------------------ one box

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def positions(piece: Piece) -> dict[tuple[int, ...], int]:
    """Every element of a piece: its global index and its position in the buffer."""
    return {
        tuple(o + i for o, i in zip(piece.box.offset, index, strict=True)): piece.start
        + sum(i * stride for i, stride in zip(index, piece.stride, strict=True))
        for index in product(*(range(size) for size in piece.box.shape))
    }


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    """A slice of a transposed row-major buffer."""
    buffer_shape = draw(SHAPES)
    axes = draw(st.permutations(range(len(buffer_shape))))
    strides = row_major(buffer_shape)
    start, shape, stride, offset = draw(st.integers(0, 9)), [], [], []
    for axis in axes:
        low = draw(st.integers(0, buffer_shape[axis] - 1))
        shape.append(draw(st.integers(1, buffer_shape[axis] - low)))
        stride.append(strides[axis])
        offset.append(draw(st.integers(0, 9)))
        start += low * strides[axis]
    return Piece(Box(tuple(offset), tuple(shape)), start, tuple(stride))


@CASES
@given(pieces(), st.integers(0, 300), st.integers(0, 300))
def test_clip_keeps_exactly_the_elements_in_the_range(piece: Piece, low: int, length: int) -> None:
    high = low + length
    expected = {
        index: position - low
        for index, position in positions(piece).items()
        if low <= position < high
    }
    parts = list(clip(piece, low, high))
    assert len(parts) <= max(1, 2 * len(piece.box.shape) - 1)
    found = [item for part in parts for item in positions(part).items()]
    assert dict(found) == expected
    assert len(found) == len(expected)


@CASES
@given(SHAPES, st.data())
def test_a_flat_range_is_few_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    low = data.draw(st.integers(0, prod(shape)))
    high = data.draw(st.integers(low, prod(shape)))
    boxes = list(flat_range(shape, low, high))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    strides = row_major(shape)
    found = [
        position
        for box in boxes
        for position in positions(
            Piece(box, sum(o * s for o, s in zip(box.offset, strides, strict=True)), strides)
        ).values()
    ]
    assert found == list(range(low, high))


@CASES
@given(pieces(), st.data())
def test_a_part_of_a_piece_has_its_elements_at_the_same_places(
    piece: Piece, data: st.DataObject
) -> None:
    offset, shape = [], []
    for low, size in zip(piece.box.offset, piece.box.shape, strict=True):
        skip = data.draw(st.integers(0, size - 1))
        offset.append(low + skip)
        shape.append(data.draw(st.integers(1, size - skip)))
    part = positions(piece.sub(Box(tuple(offset), tuple(shape))))
    assert part.items() <= positions(piece).items()


@pytest.mark.parametrize(
    ("one", "two", "common"),
    [
        (Box((0, 0), (2, 3)), Box((1, 2), (4, 4)), Box((1, 2), (1, 1))),
        (Box((0,), (2,)), Box((2,), (2,)), None),
        (Box((0, 0), (2, 2)), Box((0, 2), (2, 1)), None),
        (Box((), ()), Box((), ()), Box((), ())),
        (Box((1,), (0,)), Box((0,), (3,)), None),
    ],
)
def test_intersection(one: Box, two: Box, common: Box | None) -> None:
    assert one.intersect(two) == common
    assert two.intersect(one) == common


def test_the_box_of_a_0d_tensor_has_one_element() -> None:
    assert whole(()) == Box((), ())
    assert whole(()).numel == 1
    assert list(flat_range((), 0, 1)) == [Box((), ())]
    assert list(clip(Piece(Box((), ()), 5, ()), 4, 6)) == [Piece(Box((), ()), 1, ())]
    assert not list(clip(Piece(Box((), ()), 5, ()), 6, 9))


def test_row_major_strides_are_numpys() -> None:
    assert row_major((4, 3, 2)) == tuple(s // 8 for s in np.zeros((4, 3, 2)).strides)
