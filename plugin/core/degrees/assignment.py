"""From hosts with free devices to workers with degrees."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from scalai.core.degrees.choice import candidates, choose
from scalai.core.degrees.degrees import DegreeRequest, Degrees, ModelLimits
from scalai.core.degrees.passes import AS_GIVEN, Passes
from scalai.core.degrees.policy import Choice, DegreePolicy
from scalai.core.errors import RefusedError
from scalai.core.job.membership import Assign, Assignment
from scalai.core.messages.commands import Placement
from scalai.core.messages.shared import Shared

KNOWN_CHOICES = 256
"""Changes with a cached choice."""
MOST_ASKED = 16_384
"""Largest unavailable world to search; the coordinator does not answer meanwhile."""


def make_assign(
    limits: ModelLimits,
    policy: DegreePolicy,
    *,
    min_hosts: int,
    max_hosts: int,
    max_workers: int | None = None,
    excluded: Sequence[Choice] = (),
    requested: DegreeRequest | None = None,
    explain: Callable[[str], object] = lambda reason: None,
) -> Assign:
    """Return a function from available hosts to their workers.

    The function returns None with too few hosts or without valid degrees. It caches its choices.

    Args:
        max_workers: Workers in total, from ``scalai scale --nproc``; None: every slot.
        excluded: Choices that ran out of memory.
        requested: The user's degrees.
        explain: Callback for the reason of None.
    """

    @lru_cache(maxsize=KNOWN_CHOICES)
    def chosen(world: int, most: int, present: Degrees | None, ran: Passes) -> Choice | str:
        """Return the choice for ``world`` ranks on hosts of at most ``most``, or a reason."""
        here = policy
        if policy.preference is not None:
            here = replace(policy, preference=policy.preference.on_hosts(most))
        try:
            return choose(
                world, limits, here, present, excluded=excluded, requested=requested, ran=ran
            )
        except RefusedError as error:
            return str(error)

    def assign(hosts: tuple[tuple[str, int], ...], ran: Assignment | None) -> Assignment | None:
        if len(hosts) < min_hosts:
            explain(f"at least {min_hosts} hosts are needed, {len(hosts)} are there")
            return None
        used = hosts[:max_hosts]
        world = sum(slots for _, slots in used)
        if max_workers is not None:
            world = min(world, max_workers)
        if world < 1:
            explain("no slot is there")
            return None
        present = (None, AS_GIVEN) if ran is None else (ran.degrees, ran.passes)
        choice = chosen(world, max(slots for _, slots in used), *present)
        if isinstance(choice, str):
            slots = sum(count for _, count in used)
            if max_workers is not None and slots < max_workers <= MOST_ASKED:
                found = candidates(
                    max_workers, limits, policy, present[0], excluded=excluded,
                    requested=requested, ran=present[1],
                )  # fmt: skip
                if next(found, None) is not None:
                    choice = (
                        f"{slots} slots are there for {max_workers} workers; start agents with "
                        f"{max_workers - slots} more"
                    )
            explain(choice)
            return None
        workers = _fill(used, choice.degrees.world_size) + tuple(
            (h, 0) for h, _ in hosts[max_hosts:]
        )
        return Assignment(
            workers, choice.degrees, choice.micro_batch_size, choice.reason, choice.recompute,
            choice.offload,
        )  # fmt: skip

    return assign


def place_ranks(assignment: Assignment) -> dict[str, Placement]:
    """Return the placement of each host with workers."""
    hosts, first = Shared(assignment.active), 0
    counts = Shared(tuple(count for _, count in assignment.workers if count))
    places: dict[str, Placement] = {}
    for host, count in assignment.workers:
        if not count:
            continue
        places[host] = Placement(
            hosts=hosts,
            counts=counts,
            group_rank=len(places),
            first_rank=first,
            local_world_size=count,
            world_size=assignment.degrees.world_size,
        )
        first += count
    return places


def _fill(hosts: tuple[tuple[str, int], ...], world: int) -> tuple[tuple[str, int], ...]:
    """Give ``world`` workers to the hosts in order, up to the slots of each."""
    filled = []
    for name, slots in hosts:
        count = min(slots, world)
        world -= count
        filled.append((name, count))
    assert world == 0, "more ranks than slots"
    return tuple(filled)
