"""What a fingerprint finds, and that every way of summing it gives the same number."""

import hashlib
import re
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.errors import ProofError
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.fingerprint import (
    NOT_COMPARED,
    VERSION,
    combine,
    compare,
    differing_replicas,
    piece_fingerprint,
    tensor_fingerprints,
)
from scalai.core.tensors.region import Box, whole
from scalai.core.tensors.universal_hash import KEYS, SEGMENT, Keys, P, piece_hash

Array = npt.NDArray[np.unsignedinteger]

CASES = settings(max_examples=100, deadline=None)
items = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64])
shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


def random_bits(shape: tuple[int, ...], item: type, seed: int = 0) -> Array:
    count = prod(shape) * np.dtype(item).itemsize
    data = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    return data.view(item).reshape(shape)


def fingerprint(values: Array) -> int:
    return piece_fingerprint(values, whole(values.shape), values.shape)


SEED = hashlib.shake_256(b"scalai fingerprint, version 2").digest(8 * 129)


def signed_digits(bits: int) -> int:
    """64 bits as the number that their four signed digits of 16 bits make."""
    digits = [(bits >> (16 * n)) & 0xFFFF for n in range(4)]
    return sum((d - 2**16 if d >> 15 else d) << (16 * n) for n, d in enumerate(digits))


def word_key(place: int) -> int:
    return signed_digits(int.from_bytes(SEED[8 + 8 * place : 16 + 8 * place], "little"))


def segment_key(number: int) -> int:
    """SplitMix64's, from where the seed says."""
    value = int.from_bytes(SEED[:8], "little") + number * 0x9E3779B97F4A7C15
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value %= 2**64
        value = (value ^ (value >> shift)) * factor
    value %= 2**64
    return signed_digits(value ^ (value >> 31))


def by_definition(values: Array, box: Box, shape: tuple[int, ...]) -> int:
    """The sum of signed words of 4 bytes times their keys, in Python's integers."""
    item, columns = values.itemsize, shape[-1] if shape else 1
    segments = -(-columns * item // 512)
    total = 0
    for local in np.ndindex(values.shape):
        index = [start + i for start, i in zip(box.offset, local, strict=True)]
        flat = int(np.ravel_multi_index(index, shape)) if shape else 0
        row, column = divmod(flat, columns)
        word, byte = divmod(column * item, 4)
        bits = int(values[local]) << (8 * byte)
        for number in range(max(item // 4, 1)):
            segment, place = divmod(word + number, 128)
            low = (bits >> (32 * number)) & (2**32 - 1)
            # The highest bit of a word is its sign.
            signed = low - 2**32 if low >> 31 else low
            total += signed * word_key(place) * segment_key(row * segments + segment)
    return total % (2**64 - 59)


@CASES
@given(shapes, items, st.integers(0, 2**32), st.data())
def test_a_piece_has_the_defined_sum(
    shape: tuple[int, ...], item: type, seed: int, data: st.DataObject
) -> None:
    more = data.draw(st.sampled_from([5, 300])) if len(shape) < 3 else 5
    whole_shape = tuple(size + data.draw(st.integers(0, more)) for size in shape)
    offset = tuple(
        data.draw(st.integers(0, n - m)) for n, m in zip(whole_shape, shape, strict=True)
    )
    values = random_bits(shape, item, seed)
    box = Box(offset, shape)
    found = piece_fingerprint(values, box, whole_shape)
    assert found == by_definition(values, box, whole_shape)


def test_a_version_stays_what_it_is() -> None:
    """What was stored is compared with what later releases compute."""
    values = np.arange(3000, dtype=np.uint32).reshape(10, 300)
    assert VERSION == 2 and f"{fingerprint(values):016x}" == "5a9f07929a46e54e"


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
    found = fingerprint(swapped.reshape(shape))
    assert (found == fingerprint(values)) == is_same


@pytest.mark.parametrize("item", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize(
    "shape",
    [(700_001,), (3, 40_000), (300, 130), (5, 7, 1500), (140_000, 3), (2, 70_000, 2), (70_000, 1)],
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
            box = Box(tuple(offset), tuple(extent))
            parts.append(piece_fingerprint(part, box, shape))
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
        values[0, 0, 1:2],
    ):
        expected = fingerprint(np.ascontiguousarray(view))
        assert fingerprint(view) == expected


@pytest.mark.parametrize("item", [np.uint16, np.uint32, np.uint64])
def test_memory_at_an_odd_byte_does_not_matter(item: type) -> None:
    """A file may hold a tensor anywhere."""
    values = random_bits((50, 30), item)
    file = np.frombuffer(b"x" + values.tobytes(), dtype=np.uint8)
    view: np.ndarray[Any, Any] = file[1:].view(item).reshape(50, 30)
    assert not view.flags.aligned and fingerprint(view) == fingerprint(values)


def test_the_largest_bit_patterns_do_not_overflow() -> None:
    for item in (np.uint8, np.uint16, np.uint32, np.uint64):
        for shape in ((3, 2000), (2200, 1)):
            ones = np.full(shape, np.iinfo(item).max, dtype=item)
            box = whole(shape)
            assert fingerprint(ones) == by_definition(ones, box, shape)


def test_0d_and_empty_pieces_count() -> None:
    assert fingerprint(np.array(7, dtype=np.uint32)) != 0
    empty = np.zeros((0, 4), np.uint8)
    assert piece_fingerprint(empty, Box((2, 0), (0, 4)), (5, 4)) == 0
    assert combine([]) == 0


WEIGHT = Tensor("param/weight", (4, 2), "F32")
BIAS = Tensor("param/bias", (2,), "F32")
HALVES = [(WEIGHT, Box((0, 0), (2, 2))), (WEIGHT, Box((2, 0), (2, 2)))]


def test_replicas_count_once() -> None:
    held = Collection.of([*HALVES, HALVES[0], (BIAS, Box((1,), (0,)))])
    values = [2**63, 2**63 + 5, 2**63, 9]
    found = tensor_fingerprints(held, values)
    assert found == {"param/weight": 5 + 59, "param/bias": 0}


def test_replicas_that_differ_are_named() -> None:
    held = Collection.of([*HALVES, HALVES[1]])
    with pytest.raises(ProofError, match=r"\[2:4,0:2\] of 'param/weight' differ.*0005.*0006"):
        tensor_fingerprints(held, [1, 5, 6])


def test_states_that_differ_are_named() -> None:
    compare({"a": 1, "b": 2}, {"b": 2, "a": 1})
    found = "1 are missing afterwards: c; 1 were not there before: d; 1 differ: a"
    with pytest.raises(ProofError, match=re.escape(found)):
        compare({"a": 1, "b": 2, "c": 3}, {"a": 4, "b": 2, "d": 3})
    with pytest.raises(ProofError, match="and 3 more"):
        compare({f"t{n}": 0 for n in range(8)}, {f"t{n}": 1 for n in range(8)})


CUT = Tensor("param/cut", (4, 2), "F32")


def held(rank: int) -> Collection:
    """Return a whole tensor that both ranks have, and a half of another one."""
    half = Box((2 * rank, 0), (2, 2))
    return Collection.of([(WEIGHT, whole((4, 2))), (CUT, half)])


@pytest.mark.fault
@pytest.mark.parametrize(
    ("prints", "found"),
    [
        ([(5, 7), (5, 8)], ""),  # halves are no replicas of each other
        ([(5, 7), (6, 8)], "'param/weight' on ranks [0, 1]"),
        ([(NOT_COMPARED, 7), (6, 8)], ""),  # one that passes may change
        ([(0, 7), (6, 8)], "'param/weight' on ranks [0, 1]"),  # zeros
        ([(5, 7), ()], ""),  # a rank that does not say
    ],
)
def test_replicas_on_one_host_are_compared(prints: Sequence[Sequence[int]], found: str) -> None:
    assert differing_replicas({0: held(0), 1: held(1)}, dict(enumerate(prints))) == found


@pytest.mark.fault
def test_parameters_are_named_before_what_an_optimizer_keeps_of_them() -> None:
    moment = Tensor("exp_avg/w", (4, 2), "F32")
    same = Collection.of([(moment, whole((4, 2))), (WEIGHT, whole((4, 2)))])
    text = differing_replicas({0: same, 1: same}, {0: (1, 2), 1: (3, 4)})
    assert text == "'param/weight' on ranks [0, 1], 'exp_avg/w' on ranks [0, 1]"


@pytest.mark.fault
def test_ranks_that_differ_are_named_and_no_others() -> None:
    same = {rank: Collection.of([(WEIGHT, whole((4, 2)))]) for rank in range(4)}
    text = differing_replicas(same, {0: (3,), 1: (3,), 2: (9,), 3: (3,)})
    assert text == "'param/weight' on ranks [0, 2]"


@CASES
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]),
    st.integers(0, 2**32),
    st.data(),
)
def test_any_cut_adds_up(
    shape: tuple[int, ...], item: type, seed: int, data: st.DataObject
) -> None:
    if data.draw(st.booleans()):
        shape = (*shape[:-1], shape[-1] * 60)
    random = np.random.default_rng(seed)
    values: npt.NDArray[Any] = random.integers(0, np.iinfo(item).max, shape, dtype=item)

    def cut(box: Box, depth: int) -> list[Box]:
        axes = [axis for axis, size in enumerate(box.shape) if size > 1]
        if not depth or not axes:
            return [box]
        axis = data.draw(st.sampled_from(axes))
        middle = data.draw(st.integers(1, box.shape[axis] - 1))
        halves = []
        for low, size in ((0, middle), (middle, box.shape[axis] - middle)):
            offset, extent = list(box.offset), list(box.shape)
            offset[axis], extent[axis] = offset[axis] + low, size
            halves += cut(Box(tuple(offset), tuple(extent)), depth - 1)
        return halves

    boxes = cut(whole(shape), 3)
    prints = [piece_fingerprint(values[box_index(box)], box, shape) for box in boxes]
    assert combine(prints) == piece_fingerprint(values, whole(shape), shape)


def box_index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, low + n) for low, n in zip(box.offset, box.shape, strict=True))


PAIRS = {
    "one bit": ((0, 0, 1),),
    "the sign": ((3, 200, 2**31),),
    "neighbours": ((0, 0, 1), (0, 1, 2**32 - 2), (0, 2, 1)),
    "corners": ((0, 0, 1), (1, 1, 1), (0, 1, 2**32 - 1), (1, 0, 2**32 - 1)),
    "a segment apart": ((2, 0, 5), (2, SEGMENT, 2**32 - 5)),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
def test_no_pair_is_bad_for_many_seeds(pair: tuple[tuple[int, int, int], ...]) -> None:
    """The difference of two hashes is spread evenly over the residues, as if it were drawn."""
    shape = (4, 300)
    one = np.random.default_rng(5).integers(0, 2**32, shape, dtype=np.uint32)
    two = one.copy()
    for row, column, change in pair:
        two[row, column] = (int(two[row, column]) + change) % 2**32
    count, found = 1024, []
    for seed in range(count):
        keys = Keys.of(b"seed %d" % seed)
        a, b = (piece_hash(values, whole(shape), shape, keys) for values in (one, two))
        found.append((a - b) % P)
    assert len(set(found)) == count
    for shift in (0, 20, 58):
        # Sixteen classes: chi-squared with 15 degrees of freedom is below 50 but once in 100,000.
        classes = np.bincount([value >> shift & 15 for value in found], minlength=16)
        expected = count / 16
        assert ((classes - expected) ** 2 / expected).sum() < 50


def test_the_largest_digits_and_words_are_exact() -> None:
    """A segment's sum is then 2**53, the most that a float64 counts to."""
    words = np.full((SEGMENT, 4), -(2.0**15))
    keys = Keys(words, KEYS.start)
    lowest = np.full((40, 3 * SEGMENT), 2**31, dtype=np.uint32)  # each word is -2**31
    key = sum(-(2**15) << (16 * n) for n in range(4))
    digits = KEYS.segments(KEYS.states(np.arange(120, dtype=np.uint64))).astype(int).tolist()
    total = sum(
        sum(digit << (16 * n) for n, digit in enumerate(row)) * key * -(2**31) * SEGMENT
        for row in digits
    )
    assert piece_hash(lowest, whole(lowest.shape), lowest.shape, keys) == total % P


def test_the_modulus_is_a_prime() -> None:
    """By Miller and Rabin with bases that decide below 2**64."""
    odd, twos = P - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        powers = [pow(base, odd << n, P) for n in range(twos)]
        assert powers[0] == 1 or P - 1 in powers


def test_keys_of_segments_differ() -> None:
    digits = KEYS.segments(KEYS.states(np.arange(100_000, dtype=np.uint64)))
    assert len(np.unique(digits, axis=0)) == 100_000
    assert np.abs(digits.mean(axis=0)).max() < 300 and abs(digits.std() - 2**16 / 12**0.5) < 100
