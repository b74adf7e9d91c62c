"""What replicas take is known before they are made, and who has no room for them is named."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.holders import held_together
from scalai.core.tensors.region import Box, whole
from scalai.core.tensors.replicas import ReplicaMemory, memory_of, ring_of, shortage, to_keep

pytestmark = pytest.mark.fault

SHAPE = (5, 4)
BOXES = st.tuples(
    st.sampled_from(["main/w", "exp_avg/w", "param/v"]), *(st.integers(0, n - 1) for n in SHAPE),
    *(st.integers(1, n) for n in SHAPE),
)  # fmt: skip
DTYPES = {"main/w": "F32", "exp_avg/w": "F64", "param/v": "BF16"}
SIZES = {"F32": 4, "F64": 8, "BF16": 2}


def collection(drawn: list[tuple[str, int, int, int, int]]) -> Collection:
    """Return the drawn boxes, cut off where their tensor ends."""
    rows = []
    for name, row, column, height, width in drawn:
        size = (min(height, SHAPE[0] - row), min(width, SHAPE[1] - column))
        rows.append((Tensor(name, SHAPE, DTYPES[name]), Box((row, column), size)))
    return Collection.of(rows)


def distinct_bytes(pieces: Collection) -> int:
    found = {}
    for row in range(len(pieces)):
        tensor, box = pieces.box(row)
        for place in np.ndindex(*box.shape):
            at = tuple(int(p + o) for p, o in zip(place, box.offset, strict=True))
            found[(tensor.name, at)] = SIZES[tensor.dtype]
    return sum(found.values())


@settings(deadline=None, max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.tuples(st.sampled_from(["", "r1", "r2", "r3"]), st.lists(BOXES, max_size=4)),
        min_size=1,
    ),
    st.integers(1, 3),
)
def test_it_is_what_each_host_will_keep(drawn: dict[str, Any], replicas: int) -> None:
    ring = ring_of({host: domain for host, (domain, _) in drawn.items()}, replicas)
    held = {host: collection(boxes) for host, (_, boxes) in drawn.items()}
    told = {host: held_together([pieces, pieces]) for host, pieces in held.items()}
    for memory in memory_of(ring, told, {}):
        assert memory.kept == distinct_bytes(to_keep(ring, memory.host, held)), memory
        assert memory.own == distinct_bytes(held[memory.host]), memory


def test_a_host_without_workers_keeps_and_has_nothing_of_its_own() -> None:
    tensor = Tensor("main/w", (8,), "F32")
    held = {"a": Collection.of([(tensor, whole((8,)))])}
    found = {m.host: m for m in memory_of(ring_of({"a": "", "b": ""}, 1), held, {"a": 100})}
    assert (found["a"].own, found["a"].kept) == (32, 0)
    assert (found["b"].own, found["b"].kept, found["b"].room) == (0, 32, None)


def test_what_data_parallelism_holds_everywhere_takes_no_room() -> None:
    tensor = Tensor("param/w", (8,), "F32")
    held = {host: Collection.of([(tensor, whole((8,)))]) for host in "abc"}
    found = memory_of(ring_of(dict.fromkeys("abc", ""), 2), held, dict.fromkeys("abc", 64))
    assert [memory.kept for memory in found] == [0, 0, 0] and not shortage(found)


def test_two_generations_with_their_replicas_must_fit() -> None:
    assert not shortage([ReplicaMemory("a", 100, 50, 300), ReplicaMemory("b", 100, 50, None)])
    text = shortage([ReplicaMemory("a", 100, 50, 300), ReplicaMemory("b", 100, 50, 299)])
    for part in ("'b' needs 300", "of 100 bytes with 50", "room for 299", "--replicas 0",
                 "--store-budget-gb"):  # fmt: skip
        assert part in text, text
    assert "'a'" not in text


def test_where_not_even_the_generations_fit_replicas_are_not_to_blame() -> None:
    """What a store says that has no room for a snapshot is clearer."""
    assert not shortage([ReplicaMemory("a", 100, 50, 199)])


def test_of_many_hosts_a_few_are_named() -> None:
    text = shortage([ReplicaMemory(f"h{n}", 10, 10, 25) for n in range(9)])
    assert text.count("host 'h") == 5 and "and 4 more hosts" in text
