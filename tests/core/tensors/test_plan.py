"""Plans, coverage and fingerprints over random layouts, and what plans refuse."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.errors import LayoutError
from scalai.core.tensors.collection import MAX_NDIM, Collection, Tensor, concatenate
from scalai.core.tensors.coverage import check_coverage, find_gaps, find_overlaps
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.fingerprint import (
    combine,
    piece_fingerprint,
    tensor_fingerprints,
)
from scalai.core.tensors.plan import Holder, Plan, plan
from scalai.core.tensors.region import Box, Piece, clip, flat_range, row_major, whole
from scalai.core.tensors.universal_hash import P

Array = npt.NDArray[np.unsignedinteger]
Row = tuple[Tensor, Box]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

CASES = settings(max_examples=120, deadline=None)


@dataclass(frozen=True)
class State:
    """Tensors with their contents, and two layouts of them."""

    contents: dict[str, Array]
    before: list[Holder]
    after: list[Holder]


@st.composite
def models(draw: st.DrawFn) -> list[Tensor]:
    """A few parameters of 0 to 3 dims, some with moments."""
    tensors = []
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
        dtype = draw(st.sampled_from(["U8", "BF16", "F32", "I64"]))
        tensors.append(Tensor(f"param/layer.{number}", shape, dtype))
        if draw(st.booleans()):
            for kind in ("main", "exp_avg", "exp_avg_sq"):
                tensors.append(Tensor(f"{kind}/layer.{number}", shape, "F32"))
    return tensors


@st.composite
def cuts(draw: st.DrawFn, low: int, high: int) -> list[tuple[int, int]]:
    """Neighbouring ranges that cover [low, high), not all of them filled."""
    inner = draw(st.lists(st.integers(low, high), max_size=4))
    return list(pairwise(sorted([low, *inner, high])))


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[list[Box]]:
    """Shards, each a list of boxes, that cover a tensor of this shape exactly once."""
    ways = ["whole", "flat"] + (["axis", "fused", "axis and flat"] if shape else [])
    way = draw(st.sampled_from(ways))
    if way == "whole":
        return [[whole(shape)]]
    if way == "flat":
        return [list(flat_range(shape, a, b)) for a, b in draw(cuts(0, prod(shape)))]
    axis = draw(st.integers(0, len(shape) - 1))
    if way == "fused":
        # Gate and up projections: a rank has its part of each half, in one buffer.
        middle = shape[axis] // 2
        halves = [draw(cuts(0, middle)), draw(cuts(middle, shape[axis]))]
        shards = [[part(shape, axis, *bounds)] for bounds in halves[0]]
        for number, bounds in enumerate(halves[1]):
            shards[number % len(shards)].append(part(shape, axis, *bounds))
        return shards
    slices = [part(shape, axis, *bounds) for bounds in draw(cuts(0, shape[axis]))]
    if way == "axis":
        return [[box] for box in slices]
    # The distributed optimizer: flat ranges of a rank's own slice.
    shards = []
    for box in slices:
        local = Piece(box, 0, row_major(box.shape))
        for a, b in draw(cuts(0, box.numel)):
            shards.append([piece.box for piece in clip(local, a, b)])
    return shards


def part(shape: tuple[int, ...], axis: int, low: int, high: int) -> Box:
    offset, extent = [0] * len(shape), list(shape)
    offset[axis], extent[axis] = low, high - low
    return Box(tuple(offset), tuple(extent))


@st.composite
def layouts(draw: st.DrawFn, tensors: Sequence[Tensor], shardings_each: int = 1) -> list[Holder]:
    """Ranks on hosts that together hold all tensors: uneven stages, replicas, several ranks a host.

    With ``shardings_each`` above 1 some tensors are cut in several ways that overlap.
    """
    ranks = draw(st.integers(1, 6))
    per_host = draw(st.integers(1, 3))
    rows: list[list[Row]] = [[] for _ in range(ranks)]
    shards: list[list[Box]] = []
    owners: list[list[int]] = []
    for tensor in tensors:
        if not shards or not tensor.name.startswith("exp_avg"):
            shards = [
                shard
                for _ in range(draw(st.integers(1, shardings_each)))
                for shard in draw(shardings(tensor.shape))
            ]
            everyone = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=3, unique=True)
            owners = [draw(everyone) for _ in shards]
        for boxes, holders in zip(shards, owners, strict=True):
            for rank in holders:
                rows[rank].extend((tensor, box) for box in boxes)
    return [
        Holder(f"host-{rank // per_host}", Collection.of(held), rank)
        for rank, held in enumerate(rows)
    ]


@st.composite
def states(draw: st.DrawFn, shardings_each: int = 1) -> State:
    tensors = draw(models())
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    contents = {}
    for tensor in tensors:
        item = ITEM_BYTES[tensor.dtype]
        data = random.integers(0, 256, tensor.numel * item, dtype=np.uint8)
        contents[tensor.name] = data.view(UNSIGNED[item]).reshape(tensor.shape)
    before = draw(layouts(tensors, shardings_each))
    return State(contents, before, draw(layouts(tensors, shardings_each)))


def inside(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))


def sliced(contents: dict[str, Array], holders: Sequence[Holder]) -> list[list[Array]]:
    """What every holder's rows contain, cut from the whole tensors."""
    return [
        [
            contents[tensor.name][inside(box)].copy()
            for tensor, box in map(holder.collection.box, range(len(holder.collection)))
        ]
        for holder in holders
    ]


def box_of(tensor: Tensor, offset: npt.NDArray[np.int64], shape: npt.NDArray[np.int64]) -> Box:
    skip = MAX_NDIM - len(tensor.shape)
    return Box(tuple(offset[skip:].tolist()), tuple(shape[skip:].tolist()))


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The place of ``box`` in an array that holds ``outer``."""
    assert outer.intersect(box) == box
    offset = tuple(a - b for a, b in zip(box.offset, outer.offset, strict=True))
    return inside(Box(offset, box.shape))


def applied(
    made: Plan, source: list[Holder], stored: list[list[Array]], target: list[Holder]
) -> tuple[list[list[Array]], list[list[Array]]]:
    """Carry a plan out; return the targets' rows and how often each element was written."""
    fetched = []
    for row in range(len(made.fetches)):
        holder, number = made.fetches.source[row], made.fetches.source_row[row]
        assert source[holder].host != made.hosts[made.fetches.host[row]]
        tensor, outer = source[holder].collection.box(number)
        box = box_of(tensor, made.fetches.offset[row], made.fetches.shape[row])
        fetched.append((box, stored[holder][number][within(box, outer)], made.fetches.host[row]))
    filled: list[list[Array]] = []
    times: list[list[Array]] = []
    for holder in target:
        rows = [holder.collection.box(row) for row in range(len(holder.collection))]
        items = [UNSIGNED[ITEM_BYTES[tensor.dtype]] for tensor, _ in rows]
        filled.append(
            [np.zeros(box.shape, item) for (_, box), item in zip(rows, items, strict=True)]
        )
        times.append([np.zeros(box.shape, np.uint8) for _, box in rows])
    copies = made.copies
    for row in range(len(copies)):
        holder, number = copies.source[row], copies.source_row[row]
        tensor, outer = source[holder].collection.box(number)
        box = box_of(tensor, copies.offset[row], copies.shape[row])
        values = stored[holder][number][within(box, outer)]
        host = target[copies.target[row]].host
        if copies.fetch[row] >= 0:
            outer, values, fetched_to = fetched[copies.fetch[row]]
            assert made.hosts[fetched_to] == host
            values = values[within(box, outer)]
        else:
            assert source[holder].host == host
        wanted, outer = target[copies.target[row]].collection.box(copies.target_row[row])
        assert wanted == tensor
        place = within(box, outer)
        filled[copies.target[row]][copies.target_row[row]][place] = values
        times[copies.target[row]][copies.target_row[row]][place] += 1
    return filled, times


def needed_bytes(contents: dict[str, Array], source: list[Holder], target: list[Holder]) -> int:
    """Bytes that hosts want and do not hold, counted element by element."""
    total = 0
    for host in {holder.host for holder in target}:
        for name, whole_tensor in contents.items():
            wanted = np.zeros(whole_tensor.shape, dtype=bool)
            for holders, value in ((target, True), (source, False)):
                for holder in holders:
                    if holder.host != host:
                        continue
                    for row in range(len(holder.collection)):
                        tensor, box = holder.collection.box(row)
                        if tensor.name == name:
                            wanted[inside(box)] = value
            total += int(wanted.sum()) * whole_tensor.itemsize
    return total


def equal(left: list[list[Array]], right: list[list[Array]]) -> bool:
    return all(
        np.array_equal(one, two)
        for ours, theirs in zip(left, right, strict=True)
        for one, two in zip(ours, theirs, strict=True)
    )


@CASES
@given(states(shardings_each=2))
def test_applying_a_plan_is_gathering_and_slicing_with_the_fewest_bytes(state: State) -> None:
    made = plan(state.before, state.after)
    stored = sliced(state.contents, state.before)
    filled, times = applied(made, state.before, stored, state.after)
    assert all((count == 1).all() for rows in times for count in rows)
    assert equal(filled, sliced(state.contents, state.after))
    assert made.bytes_remote == needed_bytes(state.contents, state.before, state.after)
    order = list(zip(made.copies.target.tolist(), made.copies.target_row.tolist(), strict=True))
    assert order == sorted(order)


@CASES
@given(states(shardings_each=2))
def test_a_host_that_plans_alone_makes_its_part_of_the_common_plan(state: State) -> None:
    together = plan(state.before, state.after)
    hosts = sorted({holder.host for holder in state.after})
    local, remote = 0, 0
    for host in hosts:
        numbers = [n for n, holder in enumerate(state.after) if holder.host == host]
        alone = plan(state.before, [state.after[n] for n in numbers], hosts)
        mine = np.isin(together.copies.target, numbers)
        for column in ("target_row", "source", "source_row", "offset", "shape"):
            ours = getattr(together.copies, column)[mine]
            assert np.array_equal(getattr(alone.copies, column), ours)
        local, remote = local + alone.bytes_local, remote + alone.bytes_remote
    assert (local, remote) == (together.bytes_local, together.bytes_remote)


@CASES
@given(states())
def test_fingerprints_do_not_depend_on_the_layout(state: State) -> None:
    expected = {
        name: piece_fingerprint(values, whole(values.shape), values.shape)
        for name, values in state.contents.items()
    }
    for holders in (state.before, state.after):
        held = concatenate([holder.collection for holder in holders])
        pieces = [piece for rows in sliced(state.contents, holders) for piece in rows]
        boxes = [held.box(row) for row in range(len(held))]
        fingerprints = [
            piece_fingerprint(piece, box, tensor.shape)
            for piece, (tensor, box) in zip(pieces, boxes, strict=True)
        ]
        assert tensor_fingerprints(held, fingerprints) == expected
    assert combine(expected.values()) == sum(expected.values()) % P


@CASES
@given(states(), st.data())
def test_a_state_is_whole_until_the_only_holder_of_a_piece_is_gone(
    state: State, data: st.DataObject
) -> None:
    held = concatenate([holder.collection for holder in state.before])
    check_coverage(held)
    row = data.draw(st.sampled_from(np.flatnonzero(held.numel()).tolist()))
    tensor, box = held.box(row)
    others = [n for n in range(len(held)) if held.box(n) != (tensor, box)]
    gaps = find_gaps(held.select(np.array(others, dtype=np.int64)))
    assert {gap for gap, _ in gaps} == {tensor}
    missing = np.zeros(tensor.shape, dtype=int)
    for _, gap in gaps:
        missing[inside(gap)] += 1
    expected = np.zeros(tensor.shape, dtype=int)
    expected[inside(box)] = 1
    assert np.array_equal(missing, expected)


@CASES
@given(states(shardings_each=2))
def test_overlaps_are_the_unequal_boxes_with_common_elements(state: State) -> None:
    held = concatenate([holder.collection for holder in state.before])
    boxes = sorted(
        {held.box(row) for row in range(len(held)) if held.box(row)[1].numel},
        key=lambda item: (item[0].name, item[1].offset, item[1].shape),
    )
    expected = {
        (tensor.name, frozenset((one, two)))
        for number, (tensor, one) in enumerate(boxes)
        for other, two in boxes[number + 1 :]
        if other == tensor and one.intersect(two)
    }
    found = find_overlaps(held)
    assert {(tensor.name, frozenset((one, two))) for tensor, one, two in found} == expected
    assert len(found) == len(expected)
    check_coverage(held, exact_partition=False)


WEIGHT = Tensor("param/weight", (8, 4), "F32")


def holder(host: str, *boxes: Box, tensor: Tensor = WEIGHT, rank: int = 0) -> Holder:
    return Holder(host, Collection.of((tensor, box) for box in boxes), rank)


def rows(low: int, high: int) -> Box:
    return Box((low, 0), (high - low, 4))


def test_replicas_are_asked_for_equal_shares() -> None:
    tensors = [Tensor(f"param/{number}", (16,), "F32") for number in range(12)]
    everything = Collection.of((tensor, whole(tensor.shape)) for tensor in tensors)
    source = [Holder(f"old-{number}", everything) for number in range(4)]
    target = [Holder(f"new-{number}", everything, number) for number in range(4)]
    made = plan(source, target)
    for host in range(4):
        served = np.bincount(made.fetches.source[made.fetches.host == host], minlength=4)
        assert served.tolist() == [3, 3, 3, 3]


def test_hosts_do_not_all_begin_at_the_same_replica() -> None:
    source = [holder(f"old-{number}", rows(0, 8)) for number in range(4)]
    target = [holder(f"new-{number}", rows(0, 8), rank=number) for number in range(8)]
    assert np.bincount(plan(source, target).fetches.source).tolist() == [2, 2, 2, 2]
    # Of hosts in two stages by turns, those of one stage have even positions only.
    even = target[::2]
    hosts = [one.host for one in target]
    assert np.bincount(plan(source, even, hosts).fetches.source).tolist() == [1, 1, 1, 1]


def test_nothing_wanted_is_an_empty_plan() -> None:
    for target in ([], [Holder("a", Collection.of([]))], [holder("a", rows(3, 3))]):
        made = plan([holder("a", rows(0, 8))], target)
        assert (len(made.copies), len(made.fetches), made.bytes_remote) == (0, 0, 0)
    assert len(plan([], []).copies) == 0


REFUSED = [
    (
        [holder("a", rows(0, 2)), holder("b", rows(5, 8))],
        [holder("a", rows(0, 1), rank=3), holder("b", rows(1, 8), rank=7)],
        r"nobody holds \[2:5,0:4\] of 'param/weight'.*rank 7",
    ),
    (
        [holder("a", rows(0, 8))],
        [holder("b", rows(0, 8), tensor=Tensor("param/other", (8, 4), "F32"), rank=5)],
        r"nobody holds any part of 'param/other'.*rank 5",
    ),
    ([holder("a", rows(0, 8))], [holder("b", rows(4, 9))], r"box \[4:9,0:4\] reaches outside"),
    ([holder("a", rows(4, 9))], [holder("b", rows(4, 8))], r"box \[4:9,0:4\] reaches outside"),
    *(
        (source, [holder("b", rows(0, 8), tensor=wanted)], words)
        for other in (Tensor("param/weight", (8, 5), "F32"), Tensor("param/weight", (8, 4), "BF16"))
        for source, wanted, words in (
            ([holder("a", rows(0, 8))], other, "'param/weight' is held as F32"),
            ([holder("a", rows(0, 4)), holder("b", rows(4, 8), tensor=other)], WEIGHT,
             "on one holder"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "words"), REFUSED)
def test_what_cannot_be_planned_is_named(
    source: list[Holder], target: list[Holder], words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        plan(source, target)
