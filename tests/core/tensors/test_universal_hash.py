"""What a universal hash must tell apart: data of few bits, moved and cancelling values, and that no
pair of tensors is bad for many seeds."""

from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.tensors.fingerprint import combine, piece_fingerprint
from scalai.core.tensors.region import Box, whole
from scalai.core.tensors.universal_hash import KEYS, SEGMENT, Keys, P, piece_hash

Array = npt.NDArray[np.unsignedinteger]

CASES = settings(max_examples=100, deadline=None)


def fingerprint(values: npt.NDArray[np.generic]) -> int:
    """The fingerprint of the bits of any values."""
    bits = values.view(np.dtype(f"u{values.itemsize}"))
    return piece_fingerprint(bits, whole(bits.shape), bits.shape)


def mask_2_of_4(random: np.random.Generator, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Two ones in every four neighbours of a row."""
    order = random.random((rows, columns // 4, 4)).argsort(axis=-1)
    return (order < 2).astype(np.uint8).reshape(rows, columns)


@pytest.mark.parametrize(("size", "count"), [(64, 3000), (256, 300)])
def test_random_masks_have_as_many_fingerprints(size: int, count: int) -> None:
    random = np.random.default_rng(7)
    masks = [mask_2_of_4(random, size, size) for _ in range(count)]
    assert len({mask.tobytes() for mask in masks}) == count
    assert len({fingerprint(mask) for mask in masks}) == count


@pytest.mark.parametrize("item", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("shape", [(20, 30), (600,), (2, 300), (200, 3), (600, 1)])
def test_a_one_has_another_fingerprint_at_every_place(shape: tuple[int, ...], item: type) -> None:
    found = set()
    for place in range(600):
        values: npt.NDArray[Any] = np.zeros(600, dtype=item)
        values[place] = 1
        found.add(fingerprint(values.reshape(shape)))
    assert len(found) == 600


def test_pairs_of_ones_whose_places_add_up_to_the_same_are_told_apart() -> None:
    found = {}
    for pair in combinations(range(90), 2):
        values = np.zeros(90, dtype=np.uint8)
        values[list(pair)] = 1
        found[pair] = fingerprint(values.reshape(9, 10))
    assert len(set(found.values())) == len(found)


NEIGHBOURS = {
    "in a row": ((0, 1), (1, -2, 1)),
    "in a column": ((1, 0), (1, -2, 1)),
    "on a diagonal": ((1, 1), (1, -2, 1)),
    "on the other diagonal": ((1, -1), (1, -2, 1)),
    "a segment apart": ((0, SEGMENT), (1, -2, 1)),
    "of third order, in a row": ((0, 1), (1, -3, 3, -1)),
    "of third order, in a column": ((1, 0), (1, -3, 3, -1)),
}


@pytest.mark.parametrize(("step", "weights"), NEIGHBOURS.values(), ids=list(NEIGHBOURS))
@pytest.mark.parametrize("item", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_changes_of_neighbours_that_cancel_are_found(
    step: tuple[int, int], weights: tuple[int, ...], item: type
) -> None:
    random = np.random.default_rng(3)
    for _ in range(50):
        values = random.integers(32, 64, (20, 600), dtype=item)
        changed, k = values.copy(), int(random.integers(1, 8))
        at = int(random.integers(0, 8)), int(random.integers(4, 100))
        for number, weight in enumerate(weights):
            changed[at[0] + number * step[0], at[1] + number * step[1]] += np.array(
                weight * k, dtype=np.int64
            ).astype(item)
        assert fingerprint(changed) != fingerprint(values)


def test_changes_in_the_corners_of_a_rectangle_that_cancel_are_found() -> None:
    """Sums of rows and of columns all stay."""
    values = np.random.default_rng(4).integers(10, 20, (40, 700), dtype=np.uint32)
    for low, high, left, right in ((0, 1, 0, 1), (3, 30, 5, 600), (7, 39, 127, 128)):
        changed = values.copy()
        changed[low, left] += 5
        changed[high, right] += 5
        changed[low, right] -= 5
        changed[high, left] -= 5
        assert fingerprint(changed) != fingerprint(values)


@CASES
@given(st.integers(0, 2**32), st.sampled_from([(17, 23), (4, 300), (300, 4), (1, 500), (500, 1)]))
def test_permutations_are_found(seed: int, shape: tuple[int, int]) -> None:
    random = np.random.default_rng(seed)
    values = random.integers(0, 3, shape, dtype=np.uint8)
    for moved in (
        values[random.permutation(shape[0])],
        values[:, random.permutation(shape[1])],
        random.permutation(values.reshape(-1)).reshape(shape),
        values[::-1],
        values[:, ::-1],
        np.roll(values, 4, axis=1),
    ):
        is_same = np.array_equal(moved, values)
        assert (fingerprint(np.ascontiguousarray(moved)) == fingerprint(values)) == is_same


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_sign_of_zero_counts(dtype: type) -> None:
    zeros: npt.NDArray[Any] = np.zeros((6, 7), dtype=dtype)
    found = {fingerprint(zeros)}
    for place in range(42):
        changed = zeros.copy()
        changed.reshape(-1)[place] = -0.0
        found.add(fingerprint(changed))
    assert len(found) == 43
    # All signs at once, and of two at a time.
    assert fingerprint(-zeros) not in found
    assert len({fingerprint(np.where(np.arange(9) == n, -0.0, 0.0)) for n in range(9)}) == 9


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
