"""Hosts stand where the fewest bytes cross, and where they stood unless there is a reason."""

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.degrees.degrees import Degrees
from scalai.core.errors import UsageError
from scalai.core.planner.columns import Layout, Workload
from scalai.core.planner.devices import device_named
from scalai.core.planner.overlaps import overlaps_of
from scalai.core.planner.placement import Placed, assignment, place_by
from scalai.core.planner.reconfiguration import Hosts, reconfiguration
from support.model_shapes import gpt

WORK = Workload(gpt(8, 24, 4, 50, 16), 48)
H100 = device_named("h100")
WAYS = [(1, 4, 2), (2, 2, 2), (2, 4, 1), (4, 2, 1), (1, 8, 1), (2, 2, 1), (1, 4, 1), (1, 2, 3)]


def layout(tp: int, pp: int, dp: int, sharding: int = 1) -> Layout:
    return Layout(Degrees(tp, pp, dp), 1, sharding=sharding)


def hosts_of(names: list[str], ranks: int, each: int = 2) -> Hosts:
    return tuple((names[number], each) for number in range(ranks // each))


def place_hosts(
    work: Workload, before: Layout, after: Layout, old: Hosts, new: Hosts, **given: Any
) -> Placed:
    return place_by(overlaps_of(work, before, after), old, new, **given)


def moved(before: Layout, after: Layout, old: Hosts, new: Hosts) -> int:
    return reconfiguration(WORK, H100, before, after, old, new).moves


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(WAYS), st.sampled_from(WAYS), st.sampled_from([0, 1]),
    st.permutations("abcd"), st.permutations("abcdefgh"),
)  # fmt: skip
def test_no_order_crosses_less(
    first: tuple[int, int, int], second: tuple[int, int, int], sharding: int,
    old_names: list[str], new_names: list[str],
) -> None:  # fmt: skip
    before, after = layout(*first, sharding), layout(*second, sharding)
    old = hosts_of(old_names, before.degrees.world_size)
    new = hosts_of(new_names, after.degrees.world_size)
    placed = place_hosts(WORK, before, after, old, new)
    assert placed.unplaced_moves == moved(before, after, old, new)
    assert placed.moves == placed.least_moves == moved(before, after, old, placed.hosts)
    every = (tuple((name, 2) for name, _ in order) for order in permutations(new))
    assert placed.moves == min(moved(before, after, old, order) for order in every)
    greedy = place_hosts(WORK, before, after, old, new, exact_hosts=0)
    assert greedy.least_moves <= placed.moves <= greedy.moves <= greedy.unplaced_moves
    total = reconfiguration(WORK, H100, before, after, old, new).needed
    # At least half of what the best order keeps is kept.
    assert 2 * (total - greedy.moves) >= total - placed.moves


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 6), st.data())
def test_an_assignment_has_the_largest_sum(count: int, data: st.DataObject) -> None:
    row = st.lists(st.integers(0, 20), min_size=count, max_size=count)
    table = np.array(data.draw(st.lists(row, min_size=count, max_size=count)), dtype=np.int64)
    table = table.reshape(count, count)
    chosen = assignment(table)
    assert sorted(chosen.tolist()) == list(range(count))
    best = max(
        sum(table[r, c] for r, c in enumerate(order)) for order in permutations(range(count))
    )
    assert table[np.arange(count), chosen].sum() == best


def test_hosts_stay_where_no_other_order_is_better() -> None:
    same = layout(2, 2, 2)
    old = hosts_of(list("abcd"), 8)
    assert place_hosts(WORK, same, same, old, old).hosts == old
    # Nobody of before is there: all orders are alike.
    new = hosts_of(list("wxyz"), 8)
    assert place_hosts(WORK, same, same, old, new).hosts == new


def test_hosts_that_joined_in_another_order_take_their_old_places() -> None:
    same, old = layout(1, 8, 1), hosts_of(list("abcd"), 8)
    placed = place_hosts(WORK, same, same, old, hosts_of(list("dbca"), 8))
    assert placed.hosts == old and placed.moves == 0 < placed.unplaced_moves


def test_a_host_takes_no_place_that_it_has_no_devices_for() -> None:
    before, after = layout(1, 8, 1), layout(1, 4, 1)
    old = (("a", 4), ("b", 4))
    placed = place_hosts(WORK, before, after, old, (("b", 1), ("a", 3)), devices={"a": 4, "b": 1})
    assert placed.hosts == (("b", 1), ("a", 3)) and placed.moves == placed.unplaced_moves


def test_who_holds_what_is_needed_works_and_another_host_is_idle() -> None:
    same = layout(1, 2, 1)
    there = (("new", 2), ("old", 0))
    placed = place_hosts(WORK, same, same, (("old", 2),), there, devices={"new": 2, "old": 2})
    assert placed.hosts == (("old", 2), ("new", 0)) and placed.moves == 0


def test_one_host_has_one_order() -> None:
    before, after = layout(1, 8, 1), layout(1, 4, 1)
    placed = place_hosts(WORK, before, after, (("a", 8),), (("a", 4),), devices={"a": 8})
    assert placed.hosts == (("a", 4),) and placed.moves == 0


def test_a_lost_host_holds_nothing() -> None:
    same, old = layout(1, 8, 1, 0), hosts_of(list("abcd"), 8)
    new = hosts_of(list("bacd"), 8)
    placed = place_hosts(WORK, same, same, old, new, lost=frozenset("ab"))
    assert placed.hosts == new


def test_ranks_that_a_host_has_no_devices_for_are_refused() -> None:
    same = layout(1, 2, 1)
    with pytest.raises(UsageError, match="b has 1 devices for 2 ranks"):
        place_hosts(WORK, same, same, (("a", 2),), (("b", 2),), devices={"b": 1})


@pytest.mark.turns
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(WAYS), st.permutations("abcdefgh"))
def test_of_orders_that_are_as_good_the_one_is_taken_that_leaves_most_hosts(
    first: tuple[int, int, int], new_names: list[str]
) -> None:
    before, after = layout(*first), layout(1, 8, 1)
    old, new = hosts_of(list("abcd"), before.degrees.world_size), hosts_of(new_names, 8)
    placed = place_hosts(WORK, before, after, old, new)
    orders = [tuple((name, 2) for name, _ in order) for order in permutations(new)]
    best = [order for order in orders if moved(before, after, old, order) == placed.moves]
    stayed = [sum(map(lambda a, b: a == b, order, new)) for order in best]
    assert stayed[best.index(placed.hosts)] == max(stayed)
