"""Boxes, flat ranges and the clipping of strided pieces, against brute force."""

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.tensors.region import Box, Piece, clip, flat_range, row_major, whole

CASES = settings(max_examples=300, deadline=None)
shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def elements(piece: Piece) -> dict[tuple[int, ...], int]:
    """Every element of a piece: its global index and its position in the buffer."""
    return {
        tuple(o + i for o, i in zip(piece.box.offset, index, strict=True)): piece.start
        + sum(i * stride for i, stride in zip(index, piece.stride, strict=True))
        for index in product(*(range(size) for size in piece.box.shape))
    }


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    """A slice of a transposed row-major buffer."""
    buffer_shape = draw(shapes)
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
        for index, position in elements(piece).items()
        if low <= position < high
    }
    parts = list(clip(piece, low, high))
    assert len(parts) <= max(1, 2 * len(piece.box.shape) - 1)
    found = [item for part in parts for item in elements(part).items()]
    assert dict(found) == expected
    assert len(found) == len(expected)


@CASES
@given(shapes, st.data())
def test_a_flat_range_is_few_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    low = data.draw(st.integers(0, prod(shape)))
    high = data.draw(st.integers(low, prod(shape)))
    boxes = list(flat_range(shape, low, high))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    strides = row_major(shape)
    positions = [
        position
        for box in boxes
        for position in elements(
            Piece(box, sum(o * s for o, s in zip(box.offset, strides, strict=True)), strides)
        ).values()
    ]
    assert positions == list(range(low, high))


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
    part = elements(piece.sub(Box(tuple(offset), tuple(shape))))
    assert part.items() <= elements(piece).items()


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
