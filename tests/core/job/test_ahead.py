"""What a job would run if hosts came or went."""

import pytest

from scalai.core.degrees.assignment import make_assign
from scalai.core.degrees.degrees import DegreeRequest, Degrees, ModelLimits
from scalai.core.degrees.policy import DegreePolicy
from scalai.core.job.assigning import NEWCOMER, changes_ahead, plans_ahead
from support.membership_choice import ran

FOUR = tuple((name, 2) for name in "abcd")


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (0, []),
        (1, ["one more"]),
        (2, ["one less", "one more"]),
        (3, ["one less", "two less", "one more"]),
        (4, ["one less", "two less", "one more"]),
        (8, ["one less", "two less", "half", "one more"]),
    ],
)
def test_each_number_of_hosts_is_looked_at_once(count: int, names: list[str]) -> None:
    hosts = tuple((str(number), 2) for number in range(count))
    found = list(changes_ahead(hosts))
    assert [name for name, _ in found] == names
    assert len({len(there) for _, there in found}) == len(found)


def test_where_nothing_is_valid_it_says_so() -> None:
    assign = make_assign(
        ModelLimits(num_attention_heads=8, global_batch_size=8, micro_batch_size=1),
        DegreePolicy(initial=DegreeRequest(4, 1)), min_hosts=1, max_hosts=8,
    )  # fmt: skip
    plans = dict(plans_ahead(assign, FOUR[:2], ran(Degrees(4, 1, 1))))
    assert plans["one less"] is None
    more = plans["one more"]
    assert more is not None
    assert more.workers[-1] == (NEWCOMER, 0), "six ranks hold one replica of four"
    assert more.degrees == Degrees(4, 1, 1)


def test_what_was_chosen_is_known_when_another_host_of_its_kind_goes() -> None:
    asked = []

    class Counting(DegreePolicy):
        def rule(self, world_size: int, from_world_size: int | None) -> None:
            asked.append(world_size)

    assign = make_assign(
        ModelLimits(), Counting(initial=DegreeRequest(1, 1)), min_hosts=1, max_hosts=8
    )
    present = ran(Degrees(1, 1, 8))
    list(plans_ahead(assign, FOUR, present))
    before = len(asked)
    assert assign(tuple(host for host in FOUR if host[0] != "b"), present) is not None
    assert len(asked) == before
