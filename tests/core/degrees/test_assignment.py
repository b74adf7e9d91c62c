"""Hosts with free devices become workers with degrees."""

from typing import Any

from scalai.core.degrees.assignment import make_assign, place_ranks
from scalai.core.degrees.degrees import DegreeRequest, Degrees, ModelLimits
from scalai.core.degrees.policy import DegreePolicy, Rule
from scalai.core.job.membership import Assign
from support.membership_choice import ran

LIMITS = ModelLimits(num_attention_heads=4, num_layers=4, global_batch_size=12, micro_batch_size=1)
TABLE = DegreePolicy(
    (
        Rule(4, (DegreeRequest(2, 1),)),
        Rule(2, (DegreeRequest(1, 2),)),
        Rule(3, (DegreeRequest(1, 1),)),
    )
)


def assign(**settings: int) -> Assign:
    hosts: dict[str, Any] = {"min_hosts": 1, "max_hosts": 2, **settings}
    return make_assign(LIMITS, TABLE, **hosts)


def test_every_slot_gets_a_worker_where_the_degrees_fill_the_world() -> None:
    assignment = assign()((("a", 2), ("b", 2)), None)
    assert assignment is not None
    assert assignment.workers == (("a", 2), ("b", 2))
    assert assignment.degrees == Degrees(2, 1, 2)


def test_a_limit_of_workers_leaves_the_last_slots_idle() -> None:
    assignment = assign(max_workers=3)((("a", 2), ("b", 2)), ran(Degrees(2, 1, 2)))
    assert assignment is not None
    assert assignment.workers == (("a", 2), ("b", 1))
    assert assignment.degrees == Degrees(1, 1, 3)


def test_a_host_too_many_stays_idle_but_is_part_of_the_job() -> None:
    assignment = assign(max_hosts=1)((("a", 2), ("b", 2)), None)
    assert assignment is not None
    assert assignment.workers == (("a", 2), ("b", 0))
    assert assignment.active == ("a",)


def test_too_few_hosts_or_no_device_is_no_assignment() -> None:
    assert assign(min_hosts=2)((("a", 2),), None) is None
    assert assign()((("a", 0),), None) is None


def test_a_world_without_valid_degrees_is_no_assignment() -> None:
    odd = make_assign(LIMITS, DegreePolicy(allowed_sizes=(8,)), min_hosts=1, max_hosts=1)
    assert odd((("a", 2),), None) is None


def test_a_world_beyond_the_hosts_of_the_job_is_refused_without_counting_its_layouts() -> None:
    why: list[str] = []
    huge = make_assign(
        LIMITS, DegreePolicy(), min_hosts=1, max_hosts=2, max_workers=10**9,
        requested=DegreeRequest(8, 1), explain=why.append,
    )  # fmt: skip
    assert huge((("a", 2),), None) is None
    assert len(why) == 1 and "TP8·PP1" in why[0]


def test_ranks_stand_in_the_order_of_the_hosts() -> None:
    assignment = assign(max_workers=3)((("b", 2), ("a", 2)), None)
    assert assignment is not None
    places = place_ranks(assignment)
    assert list(places) == ["b", "a"]
    assert [places[host].first_rank for host in places] == [0, 2]
    assert [places[host].local_world_size for host in places] == [2, 1]
    assert {place.world_size for place in places.values()} == {3}
    assert {place.group for place in places.values()} == {("b", "a")}
