"""Who writes what: everything once, by a holder, in balance."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.region import Box, whole
from scalai.store.snapshot import assign_writers


def written(held: dict[int, Collection]) -> dict[int, list[tuple[Tensor, Box]]]:
    return {
        rank: [held[rank].box(row) for row in rows.tolist()]
        for rank, rows in assign_writers(held).items()
    }


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 9),
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 4)), max_size=8),
        max_size=5,
    )
)
def test_every_distinct_box_is_written_once(rows: dict[int, list[tuple[int, int, int]]]) -> None:
    tensors = [Tensor(f"param/{number}", (8,), "F32") for number in range(4)]
    held = {
        rank: Collection.of((tensors[t], Box((low,), (size,))) for t, low, size in boxes)
        for rank, boxes in rows.items()
    }
    everything = {
        (tensors[t], Box((low,), (size,)))
        for boxes in rows.values()
        for t, low, size in boxes
        if size
    }
    found = [row for writes in written(held).values() for row in writes]
    assert set(found) == everything
    assert len(found) == len(everything)
    again = assign_writers(dict(reversed(held.items())))
    assert {r: w.tolist() for r, w in again.items()} == {
        r: w.tolist() for r, w in assign_writers(held).items()
    }


def test_replicas_share_the_work() -> None:
    tensors = [Tensor(f"param/{number}", (100 + number,), "F32") for number in range(64)]
    replica = Collection.of((tensor, whole(tensor.shape)) for tensor in tensors)
    held = {rank: replica for rank in range(4)}
    loads = [sum(box.numel for _, box in writes) for rank, writes in sorted(written(held).items())]
    assert max(loads) - min(loads) <= max(tensor.numel for tensor in tensors)


def test_what_only_one_rank_holds_is_made_up_for_by_the_others() -> None:
    own = Tensor("main/own", (100,), "F32")
    shared = [Tensor(f"param/{number}", (25,), "F32") for number in range(4)]
    replica = [(tensor, whole(tensor.shape)) for tensor in shared]
    held = {0: Collection.of([*replica, (own, whole(own.shape))]), 1: Collection.of(replica)}
    assert written(held) == {0: [(own, whole(own.shape))], 1: replica}


def test_a_rank_that_holds_a_box_twice_writes_it_once() -> None:
    step = Tensor("step/x", (), "F32")
    assert written({3: Collection.of([(step, Box((), ()))] * 2)}) == {3: [(step, Box((), ()))]}
