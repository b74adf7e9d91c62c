"""Any of so many hosts, or failure domains, may be lost with all that they hold: at what cost."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.tensors.collection import Collection, Tensor, concatenate
from scalai.core.tensors.holders import held_together
from scalai.core.tensors.region import Box, whole
from scalai.core.tensors.replicas import (
    ReplicaMemory,
    Ring,
    leaving_ring,
    memory_of,
    ring_of,
    shortage,
    to_keep,
)

SHAPE = (5, 4)
BOXES = st.tuples(
    st.sampled_from(["main/w", "exp_avg/w", "param/v"]), *(st.integers(0, n - 1) for n in SHAPE),
    *(st.integers(1, n) for n in SHAPE),
)  # fmt: skip
DTYPES = {"main/w": "F32", "exp_avg/w": "F64", "param/v": "BF16"}


def collection(drawn: list[tuple[str, int, int, int, int]]) -> Collection:
    """Return the drawn boxes, cut off where their tensor ends."""
    rows = []
    for name, row, column, height, width in drawn:
        size = (min(height, SHAPE[0] - row), min(width, SHAPE[1] - column))
        rows.append((Tensor(name, SHAPE, DTYPES[name]), Box((row, column), size)))
    return Collection.of(rows)


def holders_of(held: Mapping[str, Collection]) -> dict[tuple[str, int, int], set[str]]:
    """Return who holds each element, by tensor and place."""
    found: dict[tuple[str, int, int], set[str]] = {}
    for host, pieces in held.items():
        for row in range(len(pieces)):
            tensor, box = pieces.box(row)
            for place in np.ndindex(*box.shape):
                at = (tensor.name, *(int(p + o) for p, o in zip(place, box.offset, strict=True)))
                found.setdefault(at, set()).add(host)  # type: ignore[arg-type]
    return found


@pytest.mark.fault
@settings(deadline=None, max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.tuples(st.sampled_from(["", "r1", "r2", "r3"]), st.lists(BOXES, max_size=4)),
        min_size=2,
    ),
    st.integers(1, 3),
)
def test_so_many_may_be_lost_and_nothing_is_copied_without_need(
    drawn: dict[str, Any], replicas: int
) -> None:
    ring = ring_of({host: domain for host, (domain, _) in drawn.items()}, replicas)
    held = {host: collection(boxes) for host, (_, boxes) in drawn.items()}
    kept = {host: to_keep(ring, host, held) for host in held}
    after = {host: concatenate([held[host], kept[host]]) for host in held}
    domain = dict(zip(ring.hosts, ring.domains, strict=True))
    assert ring.all_wards() == {host: ring.wards(host) for host in ring.hosts}
    assert ring.replicas == min(replicas, len(drawn) - 1)
    before, now = holders_of(held), holders_of(after)
    assert before.keys() == now.keys()
    for lost in combinations(sorted(set(domain.values())), ring.replicas):
        assert all({domain[host] for host in hosts} - set(lost) for hosts in now.values()), lost
    for at, hosts in now.items():
        had = {domain[host] for host in before[at]}
        wanted = max(0, ring.replicas + 1 - len(had))
        assert len(hosts - before[at]) == wanted, (at, before[at], hosts)


def test_what_data_parallelism_holds_twice_is_not_copied_and_shards_are() -> None:
    weight = Tensor("param/w", (8,), "F32")
    master = Tensor("main/w", (8,), "F32")
    held = {
        host: Collection.of([(weight, whole((8,))), (master, Box((low,), (2,)))])
        for host, low in (("a", 0), ("b", 2), ("c", 4), ("d", 6))
    }
    ring = ring_of(dict.fromkeys(held, ""), 1)
    kept = to_keep(ring, "c", held)
    assert [kept.box(row) for row in range(len(kept))] == [(master, Box((2,), (2,)))]
    assert ring.wards("c") == ("b",) and ring.wards("a") == ("d",)


def test_neighbours_are_of_different_domains() -> None:
    ring = ring_of({"a1": "x", "a2": "x", "b1": "y", "b2": "y", "c": ""}, 1)
    pairs = zip(ring.domains, (*ring.domains[1:], ring.domains[0]), strict=True)
    assert all(one != other for one, other in pairs)


def test_with_too_few_domains_each_host_is_one() -> None:
    ring = ring_of({"a": "x", "b": "x", "c": "x"}, 1)
    assert ring.wards("b") == ("a",)
    assert ring_of({"a": "x"}, 2).replicas == 0


def test_a_ring_whose_domains_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="1 domains of 2 hosts"):
        Ring(("a", "b"), ("x",), 1)


@settings(deadline=None, max_examples=200)
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.lists(BOXES, max_size=4), min_size=2),
    st.integers(1, 5),
)
def test_what_only_hosts_hold_that_go_is_kept_once_by_those_that_stay_and_nothing_else(
    drawn: dict[str, Any], going: int
) -> None:
    staying = set(sorted(drawn)[min(going, len(drawn) - 1) :])
    ring = leaving_ring(staying, set(drawn) - staying)
    held = {host: collection(boxes) for host, boxes in drawn.items()}
    kept = {host: to_keep(ring, host, held) for host in held}
    assert ring.all_wards() == {host: ring.wards(host) for host in ring.hosts}
    before = holders_of(held)
    after = holders_of({host: concatenate([held[host], kept[host]]) for host in held})
    for at, hosts in before.items():
        wanted = 0 if hosts & staying else 1
        assert len(after[at] - hosts) == wanted and after[at] & staying, (at, hosts, after[at])


SIZES = {"F32": 4, "F64": 8, "BF16": 2}


def distinct_bytes(pieces: Collection) -> int:
    found = {}
    for row in range(len(pieces)):
        tensor, box = pieces.box(row)
        for place in np.ndindex(*box.shape):
            at = tuple(int(p + o) for p, o in zip(place, box.offset, strict=True))
            found[(tensor.name, at)] = SIZES[tensor.dtype]
    return sum(found.values())


@pytest.mark.fault
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


@pytest.mark.fault
def test_a_host_without_workers_keeps_and_has_nothing_of_its_own() -> None:
    tensor = Tensor("main/w", (8,), "F32")
    held = {"a": Collection.of([(tensor, whole((8,)))])}
    found = {m.host: m for m in memory_of(ring_of({"a": "", "b": ""}, 1), held, {"a": 100})}
    assert (found["a"].own, found["a"].kept) == (32, 0)
    assert (found["b"].own, found["b"].kept, found["b"].room) == (0, 32, None)


@pytest.mark.fault
def test_what_data_parallelism_holds_everywhere_takes_no_room() -> None:
    tensor = Tensor("param/w", (8,), "F32")
    held = {host: Collection.of([(tensor, whole((8,)))]) for host in "abc"}
    found = memory_of(ring_of(dict.fromkeys("abc", ""), 2), held, dict.fromkeys("abc", 64))
    assert [memory.kept for memory in found] == [0, 0, 0] and not shortage(found)


@pytest.mark.fault
def test_two_generations_with_their_replicas_must_fit() -> None:
    assert not shortage([ReplicaMemory("a", 100, 50, 300), ReplicaMemory("b", 100, 50, None)])
    text = shortage([ReplicaMemory("a", 100, 50, 300), ReplicaMemory("b", 100, 50, 299)])
    for part in ("'b' needs 300", "of 100 bytes with 50", "room for 299", "--replicas 0",
                 "--store-budget-gb"):  # fmt: skip
        assert part in text, text
    assert "'a'" not in text


@pytest.mark.fault
def test_where_not_even_the_generations_fit_replicas_are_not_to_blame() -> None:
    """What a store says that has no room for a snapshot is clearer."""
    assert not shortage([ReplicaMemory("a", 100, 50, 199)])


@pytest.mark.fault
def test_of_many_hosts_a_few_are_named() -> None:
    text = shortage([ReplicaMemory(f"h{n}", 10, 10, 25) for n in range(9)])
    assert text.count("host 'h") == 5 and "and 4 more hosts" in text
