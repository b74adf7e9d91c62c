"""What a fingerprint finds, and that every way of summing it gives the same number."""

import re
from math import prod

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.collection import Collection, Tensor
from scalai.core.errors import ProofError
from scalai.core.fingerprint import (
    combine,
    compare,
    hash32,
    piece_fingerprint,
    row_keys,
    tensor_fingerprints,
)
from scalai.core.region import Box, whole

Array = npt.NDArray[np.unsignedinteger]

CASES = settings(max_examples=200, deadline=None)
items = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64])
shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


def random_bits(shape: tuple[int, ...], item: type, seed: int = 0) -> Array:
    count = prod(shape) * np.dtype(item).itemsize
    data = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    return data.view(item).reshape(shape)


def fingerprint(values: Array) -> int:
    return piece_fingerprint(values, whole(values.shape), values.shape)


def by_definition(values: Array, box: Box, shape: tuple[int, ...]) -> int:
    """The sum of bit pattern times key, one word after the other, in Python's integers."""
    words = 2 if values.itemsize == 8 else 1
    columns = shape[-1] if shape else 1
    total = 0
    for local in np.ndindex(values.shape):
        index = [start + i for start, i in zip(box.offset, local, strict=True)]
        flat = int(np.ravel_multi_index(index, shape)) if shape else 0
        row = int(hash32(np.array([flat // columns if len(shape) > 1 else 0]))[0])
        for word in range(words):
            bits = (int(values[local]) >> (32 * word)) & (2**32 - 1)
            total += bits * ((row << 32) + 2 * (flat * words + word) + 1)
    return total % 2**64


@CASES
@given(shapes, items, st.integers(0, 2**32), st.data())
def test_a_piece_has_the_defined_sum(
    shape: tuple[int, ...], item: type, seed: int, data: st.DataObject
) -> None:
    whole_shape = tuple(size + data.draw(st.integers(0, 5)) for size in shape)
    offset = tuple(
        data.draw(st.integers(0, n - m)) for n, m in zip(whole_shape, shape, strict=True)
    )
    values = random_bits(shape, item, seed)
    box = Box(offset, shape)
    assert piece_fingerprint(values, box, whole_shape) == by_definition(values, box, whole_shape)


@CASES
@given(shapes, items, st.integers(0, 2**32), st.data())
def test_any_flipped_bit_is_found(
    shape: tuple[int, ...], item: type, seed: int, data: st.DataObject
) -> None:
    values = random_bits(shape, item, seed)
    changed = values.copy().reshape(-1)
    place = data.draw(st.integers(0, changed.size - 1))
    bit = data.draw(st.integers(0, 8 * changed.itemsize - 1))
    changed[place] ^= np.array(1 << bit, dtype=item)
    assert fingerprint(changed.reshape(shape)) != fingerprint(values)


@CASES
@given(shapes, items, st.integers(0, 2**32), st.data())
def test_any_swap_of_unequal_elements_is_found(
    shape: tuple[int, ...], item: type, seed: int, data: st.DataObject
) -> None:
    # Few different values and high bits alone: differences that many factors of two divide.
    values = random_bits(shape, item, seed) << np.array(8 * np.dtype(item).itemsize - 2, item)
    swapped = values.copy().reshape(-1)
    places = st.integers(0, swapped.size - 1)
    one, two = data.draw(places), data.draw(places)
    is_same = swapped[one] == swapped[two]
    swapped[[one, two]] = swapped[[two, one]]
    assert (fingerprint(swapped.reshape(shape)) == fingerprint(values)) == is_same


@pytest.mark.parametrize("item", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize(
    "shape", [(70_001,), (3, 40_000), (300, 130), (5, 7, 1500), (140_000, 3), (2, 70_000, 2)]
)
def test_large_pieces_add_up_from_their_halves(shape: tuple[int, ...], item: type) -> None:
    values = random_bits(shape, item)
    expected = fingerprint(values)
    for axis in range(len(shape)):
        middle = shape[axis] // 2 + 1
        parts = []
        for low, high in ((0, middle), (middle, shape[axis])):
            offset, extent = [0] * len(shape), list(shape)
            offset[axis], extent[axis] = low, high - low
            part = np.take(values, range(low, high), axis)
            parts.append(piece_fingerprint(part, Box(tuple(offset), tuple(extent)), shape))
        assert combine(parts) == expected


@pytest.mark.parametrize("item", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_strides_do_not_matter(item: type) -> None:
    values = random_bits((400, 30, 130), item)
    for view in (
        values[::2, 3:20, 5:100],
        values.transpose(2, 0, 1),
        values[0].T,
        values[:, 1, 1],
        values[..., ::3],
    ):
        assert fingerprint(view) == fingerprint(np.ascontiguousarray(view))


def test_the_largest_bit_patterns_do_not_overflow() -> None:
    for item in (np.uint8, np.uint16, np.uint32):
        ones = np.full((40, 2000), np.iinfo(item).max, dtype=item)
        keys = row_keys(whole(ones.shape), ones.shape).astype(object)
        total = sum(int(key) * 2000 + 2000 * 1999 for key in keys) * int(np.iinfo(item).max)
        assert fingerprint(ones) == total % 2**64


def test_row_hashes_are_unequal() -> None:
    assert len(np.unique(hash32(np.arange(100_000)))) == 100_000


def test_0d_and_empty_pieces_count() -> None:
    assert fingerprint(np.array(7, dtype=np.uint32)) == 7
    assert piece_fingerprint(np.zeros((0, 4), np.uint8), Box((2, 0), (0, 4)), (5, 4)) == 0
    assert combine([]) == 0


WEIGHT = Tensor("param/weight", (4, 2), "F32")
BIAS = Tensor("param/bias", (2,), "F32")
HALVES = [(WEIGHT, Box((0, 0), (2, 2))), (WEIGHT, Box((2, 0), (2, 2)))]


def test_replicas_count_once() -> None:
    held = Collection.of([*HALVES, HALVES[0], (BIAS, Box((1,), (0,)))])
    assert tensor_fingerprints(held, [2**63, 2**63 + 5, 2**63, 9]) == {
        "param/weight": 5,
        "param/bias": 0,
    }


def test_replicas_that_differ_are_named() -> None:
    held = Collection.of([*HALVES, HALVES[1]])
    with pytest.raises(ProofError, match=r"\[2:4, 0:2\] of 'param/weight' differ.*0005.*0006"):
        tensor_fingerprints(held, [1, 5, 6])


def test_states_that_differ_are_named() -> None:
    compare({"a": 1, "b": 2}, {"b": 2, "a": 1})
    found = "1 are missing afterwards: c; 1 were not there before: d; 1 differ: a"
    with pytest.raises(ProofError, match=re.escape(found)):
        compare({"a": 1, "b": 2, "c": 3}, {"a": 4, "b": 2, "d": 3})
    with pytest.raises(ProofError, match="and 3 more"):
        compare({f"t{n}": 0 for n in range(8)}, {f"t{n}": 1 for n in range(8)})
