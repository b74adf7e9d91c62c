"""Large samples in slabs: each element is somebody's, halos end at borders, the rest is refused."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.errors import LayoutError, UsageError
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.coverage import check_coverage
from scalai.core.tensors.plan import Holder, plan
from scalai.core.tensors.region import Box, box_text
from scalai.core.tensors.slabs import Slabs, cut, runs, zig_zag

# ------------------------------------------------------------------ what is refused


REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: Slabs((2, 8), (3, 1)), LayoutError,
     r"2 elements along axis 0 are too few for 3 slabs"),
    (lambda: Slabs((8, 0), (1, 1)), LayoutError,
     r"0 elements along axis 1 are too few for 1 slabs"),
    (lambda: Slabs((8, 8), (2,)), UsageError,
     r"sample \[8, 8\] has 2 axes, and parts \[2\] are of 1"),
    (lambda: Slabs((8, 8), (1, 0)), UsageError, "0 parts along axis 1"),
    (lambda: Slabs((8,), (2,)).slab(2), UsageError, "rank 2 is none of the 2"),
    (lambda: zig_zag(5, 3), LayoutError, r"5 elements .* too few for 6 zig-zag chunks"),
    (lambda: zig_zag(5, 0), UsageError, "cp=0"),
    (lambda: Slabs((4, 11), (1, 4)).with_halo(0, (1,)), UsageError, "does not fit"),
    (lambda: Slabs((4, 11), (1, 4)).with_halo(0, (0, -1)), UsageError, "does not fit"),
]  # fmt: skip


@pytest.mark.fault
@pytest.mark.parametrize(("made", "error", "words"), REFUSED)
def test_a_sample_smaller_than_its_ranks_and_parts_that_do_not_go_with_it_are_refused(
    made: Callable[[], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        made()


@pytest.mark.fault
def test_a_halo_wider_than_a_neighbours_slab_is_refused_on_all_ranks_alike() -> None:
    slabs = Slabs((4, 11), (1, 4))
    for rank in range(4):
        assert slabs.with_halo(rank, (0, 2)).shape[1] <= 7
        with pytest.raises(
            LayoutError, match=r"halo of 3 along axis 1 is wider .* 2 .*most 3 part"
        ):
            slabs.with_halo(rank, (0, 3))
        with pytest.raises(LayoutError, match="halo of 3"):
            slabs.halo_targets(rank, (0, 3))
    assert slabs.with_halo(0, (9, 0)) == Box((0, 0), (4, 3)), "an axis that is whole has no slabs"


# ------------------------------------------------------------------ what is promised

UNHURRIED = settings(deadline=None, max_examples=50)
SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@st.composite
def cuts_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Slabs:
    return Slabs(shape, tuple(draw(st.integers(1, min(size, 4))) for size in shape))


@st.composite
def two_ways(draw: st.DrawFn) -> tuple[Slabs, Slabs]:
    shape = draw(SHAPES)
    return draw(cuts_of(shape)), draw(cuts_of(shape))


def boxes_of(slabs: Slabs) -> list[list[Box]]:
    return [[slabs.slab(rank)] for rank in range(slabs.count)]


def chunks_of(size: int, cp: int) -> list[list[Box]]:
    return [[Box((low,), (high - low,)) for low, high in chunks] for chunks in zig_zag(size, cp)]


def arrivals(shape: tuple[int, ...], old: list[list[Box]], new: list[list[Box]]) -> list[int]:
    """Return how often each element arrives where boxes by rank become others."""
    sample = Tensor("sample/volume", shape, "F32")

    def holders(cut_so: list[list[Box]]) -> list[Holder]:
        collections = [Collection.of((sample, box) for box in boxes) for boxes in cut_so]
        return [Holder(f"host-{rank}", held, rank) for rank, held in enumerate(collections)]

    made = plan(holders(old), holders(new)).copies
    arrived = np.zeros(shape, dtype=np.int64)
    skip = made.offset.shape[1] - len(shape)
    for offset, sizes in zip(made.offset[:, skip:], made.shape[:, skip:], strict=True):
        arrived[tuple(slice(low, low + size) for low, size in zip(offset, sizes, strict=True))] += 1
    return arrived.reshape(-1).tolist()


@UNHURRIED
@given(two_ways())
def test_from_any_slabs_to_any_others_each_element_arrives_once(ways: tuple[Slabs, Slabs]) -> None:
    old, new = ways
    assert set(arrivals(old.shape, boxes_of(old), boxes_of(new))) == {1}


@UNHURRIED
@given(st.integers(1, 5), st.integers(1, 5), st.integers(10, 40))
def test_from_any_zig_zag_to_any_other_or_to_slabs_too(old: int, new: int, size: int) -> None:
    chunks = chunks_of(size, old)
    assert arrivals((size,), chunks, chunks_of(size, new)) == [1] * size
    assert arrivals((size,), chunks, boxes_of(Slabs((size,), (new,)))) == [1] * size


@UNHURRIED
@given(SHAPES.flatmap(cuts_of))
def test_slabs_make_up_the_sample_and_differ_by_one_element_an_axis(slabs: Slabs) -> None:
    sample = Tensor("sample/volume", slabs.shape, "F32")
    boxes = [slabs.slab(rank) for rank in range(slabs.count)]
    check_coverage(Collection.of((sample, box) for box in boxes))
    for axis in range(len(slabs.shape)):
        sizes = {box.shape[axis] for box in boxes}
        assert max(sizes) - min(sizes) <= 1


@UNHURRIED
@given(st.data(), SHAPES.flatmap(cuts_of))
def test_a_halo_is_clipped_at_the_borders_and_comes_from_neighbours(
    data: st.DataObject, slabs: Slabs
) -> None:
    widest = [
        4 if parts == 1 else size // parts
        for size, parts in zip(slabs.shape, slabs.parts, strict=True)
    ]
    halo = tuple(data.draw(st.integers(0, most)) for most in widest)
    given_to: Counter[tuple[int, int, str]] = Counter()
    for rank in range(slabs.count):
        seen = np.zeros(slabs.shape, dtype=np.int64)
        seen[slabs.index(rank)] += 1
        for other, box in slabs.halo_sources(rank, halo):
            given_to[other, rank, box_text(box)] += 1
            seen[tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))] += 1
        for other, box in slabs.halo_targets(rank, halo):
            given_to[rank, other, box_text(box)] += 1
        wanted = np.zeros(slabs.shape, dtype=np.int64)
        own = slabs.slab(rank)
        wanted[
            tuple(
                slice(max(low - more, 0), low + size + more)
                for low, size, more in zip(own.offset, own.shape, halo, strict=True)
            )
        ] = 1
        assert (seen == wanted).all(), "the slab and what its neighbours give are what is wanted"
        assert (
            seen[slabs.index(rank, halo)].all() and seen.sum() == seen[slabs.index(rank, halo)].size
        )
    assert set(given_to.values()) <= {2}, "what one rank takes another one gives"


@UNHURRIED
@given(st.integers(1, 6), st.integers(0, 40))
def test_a_zig_zag_has_each_element_once(cp: int, more: int) -> None:
    size = 2 * cp + more
    chunks = zig_zag(size, cp)
    assert len(chunks) == cp
    flat = [place for pair in chunks for low, high in pair for place in range(low, high)]
    assert sorted(flat) == list(range(size))


def test_a_zig_zag_is_that_of_context_parallelism() -> None:
    """Rank r has chunks r and 2 * cp - 1 - r; Megatron-LM demands that sizes divide."""
    assert zig_zag(12, 3) == (((0, 2), (10, 12)), ((2, 4), (8, 10)), ((4, 6), (6, 8)))
    assert zig_zag(7, 2) == (((0, 2), (6, 7)), ((2, 4), (4, 6)))


def test_the_first_parts_take_the_rest() -> None:
    assert [cut(11, 4, part) for part in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 11)]
    assert Slabs((2, 11, 4), (1, 4, 2)).index(3) == (slice(0, 2), slice(3, 6), slice(2, 4))
    assert Slabs((), ()).slab(0) == Box((), ())


@UNHURRIED
@given(st.data(), SHAPES)
def test_runs_are_the_elements_of_a_box_in_order(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    extent = tuple(
        data.draw(st.integers(1, size - low)) for size, low in zip(shape, offset, strict=True)
    )
    starts, length = runs(shape, Box(offset, extent))
    index = tuple(slice(low, low + size) for low, size in zip(offset, extent, strict=True))
    expected = np.arange(np.prod(shape)).reshape(shape)[index].reshape(-1)
    assert (starts[:, None] + np.arange(length)).reshape(-1).tolist() == expected.tolist()
    assert length == expected.size or extent != shape
