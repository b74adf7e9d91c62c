"""The hosts of a running job take the places of which they hold most, and stay where nothing is
gained."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.degrees.degrees import Degrees
from scalai.core.job.membership import LOST, Assignment
from scalai.core.planner.columns import NO_SHARDING, OPTIMIZER, WEIGHTS, Layout, Workload
from scalai.core.planner.overlaps import overlaps_of
from scalai.core.planner.placement import MOST_PAIRS, make_place, place_by
from scalai.core.planner.reconfiguration import Hosts
from support.model_shapes import gpt

WORK = Workload(gpt(8, 48, 12, 60, 16), 48)


def run(degrees: Degrees, hosts: Hosts) -> Assignment:
    """Return an assignment of these degrees to hosts, which are filled in order."""
    left, workers = degrees.world_size, []
    for name, slots in hosts:
        workers.append((name, min(slots, left)))
        left -= workers[-1][1]
    assert not left
    return Assignment(tuple(workers), degrees, 1, "why")


def crossing(work: Workload, ran: Assignment, target: Assignment, sharding: int) -> int:
    """Return the bytes that cross with the hosts in this order."""
    layouts = [Layout(each.degrees, 1, sharding=sharding) for each in (ran, target)]
    overlaps, lost = overlaps_of(work, *layouts), frozenset({LOST})
    held = tuple(entry for entry in ran.workers if entry[1])
    return place_by(overlaps, held, target.workers, lost=lost).unplaced_moves


def degrees(most: int) -> st.SearchStrategy[Degrees]:
    sizes = st.sampled_from([1, 2, 3, 4])
    found = st.builds(Degrees, st.sampled_from([1, 2, 4]), sizes, sizes)
    return found.filter(lambda each: each.world_size <= most)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from([NO_SHARDING, OPTIMIZER, WEIGHTS]), st.booleans())
def test_never_more_crosses_than_in_the_order_of_joining(
    data: st.DataObject, sharding: int, is_known: bool
) -> None:
    slots = dict(
        data.draw(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 4)), min_size=1))
    )
    old = tuple(slots.items())
    ran = run(data.draw(degrees(sum(slots.values()))), old)
    gone = data.draw(st.sets(st.sampled_from(sorted(slots))))
    joined = {name: 2 for name in data.draw(st.sets(st.sampled_from("xyz"), min_size=1))}
    hosts = tuple(entry for entry in old if entry[0] not in gone) + tuple(sorted(joined.items()))
    lost = {name for name in gone if data.draw(st.booleans())}
    ran = replace(ran, workers=tuple((LOST if n in lost else n, c) for n, c in ran.workers))
    target = run(data.draw(degrees(sum(count for _, count in hosts))), hosts)
    place = make_place(WORK if is_known else None, lambda world_size: sharding)
    found = place(target, ran, hosts)
    assert sorted(name for name, _ in found.workers) == sorted(dict(hosts))
    assert all(count <= dict(hosts)[name] for name, count in found.workers)
    # Places are as they were, so that no group of neighbours is cut that was not.
    assert [count for _, count in found.workers] == [count for _, count in target.workers]
    assert found.degrees == target.degrees
    if is_known:
        before, after = (crossing(WORK, ran, each, sharding) for each in (target, found))
        assert after <= before and (after < before) == (found.workers != target.workers)
        text = f"{after} bytes cross, {before} in the order of joining"
        assert found.reason == (
            "why" if found.workers == target.workers else f"why; hosts placed: {text}"
        )
    assert make_place(WORK if is_known else None, lambda _: sharding)(target, ran, hosts) == found
    assert place(found, ran, hosts) == found, "it stays where it stands"


def test_the_host_that_is_left_keeps_its_stages() -> None:
    both, two = Degrees(1, 2, 1), Degrees(2, 2, 1)
    place = make_place(None, lambda world_size: OPTIMIZER)
    ran = run(both, (("a", 1), ("b", 1)))
    hosts = (("b", 1), ("c", 1))
    found = place(run(both, hosts), ran, hosts)
    assert found.workers == (("c", 1), ("b", 1))
    assert found.reason == (
        "why; hosts placed: 50.0% of what is wanted crosses, 100.0% in the order of joining"
    )
    ran = run(two, (("a", 2), ("b", 2)))
    hosts = (("b", 2), ("c", 2))
    assert place(run(two, hosts), ran, hosts).workers == (("c", 2), ("b", 2))


def test_an_idle_host_takes_the_place_of_one_that_holds_nothing() -> None:
    degrees, hosts = Degrees(1, 2, 1), (("x", 1), ("b", 1), ("a", 1))
    place = make_place(None, lambda world_size: NO_SHARDING)
    found = place(run(degrees, hosts), run(degrees, (("a", 1), ("b", 1))), hosts)
    assert found.workers == (("a", 1), ("b", 1), ("x", 0))


@pytest.mark.parametrize("axes", [(1, 1, 4), (4, 1, 1), (1, 4, 1)])
def test_replicas_that_hold_all_of_it_stay(axes: tuple[int, int, int]) -> None:
    place = make_place(WORK, lambda world_size: NO_SHARDING)
    ran = run(Degrees(1, 1, 4), (("a", 2), ("b", 2)))
    hosts = (("b", 2), ("a", 2))
    target = run(Degrees(*axes), hosts)
    assert place(target, ran, hosts) is target


def test_nobody_moves_who_nothing_is_known_of() -> None:
    place, four = make_place(WORK, lambda world_size: OPTIMIZER), Degrees(1, 4, 1)
    ran = run(four, ((LOST, 2), (LOST, 2)))
    hosts = (("b", 2), ("a", 2))
    assert place(run(four, hosts), ran, hosts).workers == hosts
    new = (("x", 2), ("y", 2))
    assert place(run(four, new), run(four, hosts), new).workers == new


def test_a_layout_that_the_formulas_do_not_know_is_counted_in_shares() -> None:
    """12 heads are not cut by a TP of 5; the job runs so all the same."""
    place, odd = make_place(WORK, lambda world_size: OPTIMIZER), Degrees(5, 2, 1)
    hosts = (("b", 5), ("c", 5))
    found = place(run(odd, hosts), run(odd, (("a", 5), ("b", 5))), hosts)
    assert found.workers == (("c", 5), ("b", 5)) and "of what is wanted" in found.reason


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        Degrees, tp=st.integers(1, 7), pp=st.integers(1, 9), dp=st.sampled_from([4, 8]),
        vpp=st.integers(1, 3), cp=st.integers(1, 3), ep=st.sampled_from([1, 2, 4]),
    ),
    st.builds(
        Degrees, tp=st.integers(1, 7), pp=st.integers(1, 9), dp=st.sampled_from([4, 12]),
        vpp=st.integers(1, 3), cp=st.integers(1, 2), ep=st.sampled_from([1, 4]),
    ),
)  # fmt: skip
def test_any_degrees_are_told_from_each_other(before: Degrees, after: Degrees) -> None:
    place = make_place(None, lambda world_size: OPTIMIZER)
    hosts = (("a", 4000), ("b", 4000))
    found = place(run(after, hosts), run(before, hosts), hosts)
    assert found.workers == run(after, hosts).workers


def test_nobody_moves_for_next_to_nothing() -> None:
    """The last stage of two has a norm more: no reason for the first host to take it."""
    place, hosts = make_place(None, lambda world_size: OPTIMIZER), (("a", 1), ("b", 1))
    target = run(Degrees(1, 2, 1), hosts)
    assert place(target, run(Degrees(1, 1, 1), (("a", 1),)), hosts) is target


def test_so_many_replicas_stay_that_nothing_is_gained() -> None:
    place, wide = make_place(None, lambda world_size: OPTIMIZER), Degrees(1, 1, 1024)
    assert 512 * 1024 > MOST_PAIRS
    old = tuple((f"host-{number}", 2) for number in range(512))
    hosts = (*old[1:], ("new", 2))
    assert place(run(wide, hosts), run(wide, old), hosts).workers == run(wide, hosts).workers
