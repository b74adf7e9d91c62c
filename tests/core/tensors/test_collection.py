"""Collections: rows in and out; who of their holders is asked for what, and who writes what."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.errors import LayoutError
from scalai.core.tensors.collection import MAX_NDIM, Collection, Tensor, concatenate
from scalai.core.tensors.holders import Listed, Reference, SourceList, source_list
from scalai.core.tensors.region import Box, whole
from scalai.store.snapshot import assign_writers

WEIGHT = Tensor("param/weight", (8, 4), "BF16")
MAIN = Tensor("main/weight", (8, 4), "F32")
STEP = Tensor("step/weight", (), "F32")
ROWS = [(WEIGHT, Box((0, 0), (4, 4))), (MAIN, Box((4, 1), (2, 3))), (STEP, Box((), ()))]


def rows(collection: Collection) -> list[tuple[Tensor, Box]]:
    return [collection.box(row) for row in range(len(collection))]


def test_rows_come_back_with_their_own_dims_and_sizes_also_from_json() -> None:
    empty, collection = Collection.of([]), Collection.of(ROWS)
    for held, found in ((empty, []), (collection, ROWS)):
        again = Collection.from_json(json.loads(json.dumps(held.to_json())))
        assert rows(held) == rows(again) == found
    assert collection.numel().tolist() == [16, 6, 1]
    assert collection.size_bytes().tolist() == [32, 24, 4] and empty.size_bytes().tolist() == []
    assert (WEIGHT.numel, WEIGHT.size_bytes) == (32, 64)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("tensor", [0, 1], "unequal length"),
        ("tensor", [0, 1, 3], "names tensor 3"),
        ("offset", [[0] * MAX_NDIM] * 2, "unequal length"),
    ],
)
def test_columns_that_do_not_fit_are_refused(column: str, value: object, words: str) -> None:
    data = Collection.of(ROWS).to_json() | {column: value}
    with pytest.raises(LayoutError, match=words):
        Collection.from_json(data)


def test_concatenation_merges_the_tables_of_tensors() -> None:
    one, two = Collection.of(ROWS[:2]), Collection.of(ROWS[1:])
    joined = concatenate([one, Collection.of([]), two])
    assert rows(joined) == [*ROWS[:2], *ROWS[1:]]
    assert joined.tensors == (WEIGHT, MAIN, STEP)
    assert len(concatenate([])) == 0


def test_selection_keeps_the_table() -> None:
    collection = Collection.of(ROWS)
    assert rows(collection.select(np.array([2, 0]))) == [ROWS[2], ROWS[0]]
    assert rows(collection.select(collection.size_bytes() > 20)) == ROWS[:2]


def test_one_name_is_one_tensor() -> None:
    other = Tensor("param/weight", (8, 5), "BF16")
    with pytest.raises(LayoutError, match=r"param/weight.*\[8, 4\].*\[8, 5\]"):
        Collection.of([ROWS[0], (other, whole(other.shape))])
    with pytest.raises(LayoutError, match=r"param/weight.*\[8, 4\].*\[8, 5\]"):
        concatenate([Collection.of(ROWS[:1]), Collection.of([(other, whole(other.shape))])])


def test_too_many_dims_are_refused() -> None:
    deep = Tensor("param/deep", (1,) * (MAX_NDIM + 1), "F32")
    with pytest.raises(LayoutError, match="at most 6"):
        Collection.of([(deep, whole(deep.shape))])


def tensors(*names: str) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, (0,) if "empty" in name else (4,), "F32") for name in names)


def listed(ranks: int = 0, **held: tuple[str, ...]) -> SourceList:
    return source_list(
        [
            Listed(
                host,
                ("h", place),
                Reference(place, f"{place:064x}"),
                tensors(*names),
                (f"tp{place}",),
            )
            for place, (host, names) in enumerate(sorted(held.items()))
        ],
        generation=3, step=7, about={}, scalars={}, ranks=ranks,
    )  # fmt: skip


def test_those_are_asked_that_hold_anything_of_a_parameter() -> None:
    many = {f"h{n:03d}": (f"param/p{n}", f"exp_avg/p{n + 1}") for n in range(300)}
    found = listed(0, **many)
    assert found.holders(["param/p7"]) == [6, 7] == found.holders(["main/p7", "exp_avg/p7"])
    assert found.holders(["param/none"]) == [] == found.holders([])
    assert found.reference(258) == Reference(258, f"{258:064x}")


def test_a_list_can_be_cut_to_those_that_share_parameters_with_some() -> None:
    found = listed(4, a=("param/v",), b=("main/w", "param/v"), c=("exp_avg/w",), d=("param/x",))
    assert found.sharers(["c"]) == [1, 2] and found.sharers(["a"]) == [0, 1]
    assert found.sharers([]) == [] == found.sharers(["nobody"])
    short = found.only([1, 2])
    assert short.hosts == ("b", "c") and short.addresses == (("h", 1), ("h", 2))
    assert [short.reference(n) for n in range(2)] == [found.reference(n) for n in (1, 2)]
    assert short.holders(["param/v"]) == [0] and short.holders(["param/w"]) == [0, 1]
    assert short.rank_states == {"tp1": 0, "tp2": 1}
    assert len(found.only([])) == 0


def test_tensors_without_elements_are_listed_and_nobody_is_asked_for_them() -> None:
    found = listed(a=("param/w", "param/empty"), b=("param/empty",))
    assert [tensor.name for tensor in found.empty] == ["param/empty"]
    assert found.parameters == ("w",) and found.holders(["param/empty"]) == []


def test_states_of_ranks_count_only_where_all_are_there() -> None:
    held = {"a": ("param/w",), "b": ("param/w",)}
    assert listed(2, **held).rank_states == {"tp0": 0, "tp1": 1}
    assert not listed(3, **held).rank_states and not listed(0, **held).rank_states


@pytest.mark.parametrize(
    ("field", "value"),
    [("digests", b"x"), ("holds", b""), ("rows", (1,)), ("rank_states", {"tp0": 2})],
)
def test_columns_that_do_not_fit_together_are_refused(field: str, value: object) -> None:
    whole = listed(2, a=("param/w",), b=("param/w",))
    with pytest.raises(ValueError):
        replace(whole, **{field: value})  # type: ignore[arg-type]


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
