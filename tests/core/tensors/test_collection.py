"""Collections: rows in and out, their JSON, and what does not fit together."""

import json

import numpy as np
import pytest

from scalai.core.errors import LayoutError
from scalai.core.tensors.collection import MAX_NDIM, Collection, Tensor, concatenate
from scalai.core.tensors.region import Box, whole

WEIGHT = Tensor("param/weight", (8, 4), "BF16")
MAIN = Tensor("main/weight", (8, 4), "F32")
STEP = Tensor("step/weight", (), "F32")
ROWS = [(WEIGHT, Box((0, 0), (4, 4))), (MAIN, Box((4, 1), (2, 3))), (STEP, Box((), ()))]


def rows(collection: Collection) -> list[tuple[Tensor, Box]]:
    return [collection.box(row) for row in range(len(collection))]


def test_rows_come_back_with_their_own_dims() -> None:
    assert rows(Collection.of(ROWS)) == ROWS


def test_sizes_count_elements_and_bytes() -> None:
    collection = Collection.of(ROWS)
    assert collection.numel().tolist() == [16, 6, 1]
    assert collection.size_bytes().tolist() == [32, 24, 4]
    assert (WEIGHT.numel, WEIGHT.size_bytes) == (32, 64)
    assert Collection.of([]).size_bytes().tolist() == []


def test_json_round_trip() -> None:
    text = json.dumps(Collection.of(ROWS).to_json())
    assert rows(Collection.from_json(json.loads(text))) == ROWS
    assert rows(Collection.from_json(json.loads(json.dumps(Collection.of([]).to_json())))) == []


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
