"""The next assignment of a job: staying hosts, degrees without a failure, and each host near its
pieces; also the assignments after possible changes of hosts."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from scalai.core.job.fitness import all_hear
from scalai.core.job.membership import (
    LOST,
    Assign,
    Assignment,
    FailedChange,
    Job,
    active,
    present,
    staying,
)

FEW = 4
"""Most hosts with every subset tried; of more, only the later hosts are left out."""


def next_assignment(job: Job) -> Assignment | None:
    """Assignment of the staying hosts; None if no world fits them, or none stays.

    A failed one gives way to the last that ran, else to fewer hosts; it is retried only without an
    alternative.
    """
    hosts = staying(job)
    target = job.settings.assign(hosts, present(job)) if hosts else None
    if target is None:
        return None
    if failure_of(job, target) is not None:
        if (
            job.change.ran is not None
            and _is_possible(job, job.change.ran)
            and not failure_of(job, job.change.ran)
        ):
            return job.change.ran
        target, hosts = _fewer(job, hosts) or (target, hosts)
    return placed(job, target, hosts)


def placed(job: Job, target: Assignment, hosts: tuple[tuple[str, int], ...]) -> Assignment:
    """The assignment with each host near its pieces, and shares by its replicas' paces.

    Running and standby workers keep their places: known states may have changed meanwhile.
    """
    if job.current is not None and target.is_same_as(job.current):
        return job.settings.share(target)
    standby = job.change.standby.assignment if job.change.standby is not None else None
    if standby is not None and _has_same_hosts(standby, target):
        idle = tuple((name, 0) for name, _ in target.workers if name not in standby.members)
        active_ones = tuple(entry for entry in standby.workers if entry[1])
        workers = (*active_ones, *idle)
        return replace(target, workers=workers, reason=standby.reason, paces=standby.paces)
    if (ran := _held(job)) is not None:
        target = job.settings.place(target, ran, hosts)
    return job.settings.share(target)


def _has_same_hosts(one: Assignment, other: Assignment) -> bool:
    """Whether both have equal worker counts by host, degrees and passes."""
    mine, its = (sorted(entry for entry in a.workers if entry[1]) for a in (one, other))
    return mine == its and one.has_layout_of(other)


def _held(job: Job) -> Assignment | None:
    """The last assignment that ran, with ``LOST`` for hosts without its state; None: no state
    yet."""
    newest = job.newest_generation
    ran = job.change.ran or (job.current if newest is not None else None)
    if ran is None:
        return None
    holders = active(job) | (newest.hosts & job.hosts.keys() if newest is not None else frozenset())
    workers = tuple((name if name in holders else LOST, count) for name, count in ran.workers)
    return replace(ran, workers=workers)


def _fewer(
    job: Job, hosts: tuple[tuple[str, int], ...]
) -> tuple[Assignment, tuple[tuple[str, int], ...]] | None:
    """The largest assignment without a failure, and its hosts."""
    for count in range(len(hosts) - 1, 0, -1):
        every = combinations(hosts, count) if len(hosts) <= FEW else (hosts[:count],)
        for chosen in every:  # the earlier hosts first: any of them may be to blame
            fewer = job.settings.assign(chosen, present(job))
            if fewer is not None and failure_of(job, fewer) is None:
                return fewer, chosen
    return None


def _is_possible(job: Job, assignment: Assignment) -> bool:
    """Whether all its hosts are there, with their devices, and hear each other."""
    return all_hear(assignment.active, job.health.links.unheard) and all(
        name in job.hosts and job.hosts[name].slots >= count and name not in job.health.checks
        for name, count in assignment.workers
        if count
    )


def failure_of(job: Job, assignment: Assignment) -> FailedChange | None:
    """Failure of this assignment on the hosts in their present joins, in any order; None: none."""
    members = members_of(job, assignment)
    for failed in job.change.failed:
        its = failed.assignment
        if _has_same_hosts(its, assignment) and members == failed.members:
            return failed
    return None


def members_of(job: Job, assignment: Assignment) -> frozenset[tuple[str, int]]:
    """Present hosts of an assignment, with their join numbers."""
    hosts = (job.hosts[name] for name in assignment.active if name in job.hosts)
    return frozenset((host.name, host.order) for host in hosts)


Hosts = tuple[tuple[str, int], ...]
NEWCOMER = "another"
"""A possible new host, with as many slots as the last present one."""


def changes_ahead(hosts: Hosts) -> Iterator[tuple[str, Hosts]]:
    """Yield host sets with one less, two less, half, and one more, without duplicates."""
    seen = {len(hosts)}
    for name, count in (
        ("one less", len(hosts) - 1), ("two less", len(hosts) - 2), ("half", len(hosts) // 2),
    ):  # fmt: skip
        if count > 0 and count not in seen:
            seen.add(count)
            yield name, hosts[:count]
    if hosts:
        yield "one more", (*hosts, (NEWCOMER, hosts[-1][1]))


def plans_ahead(
    assign: Assign, hosts: Hosts, present: Assignment | None
) -> Iterator[tuple[str, Assignment | None]]:
    """Yield the assignment after each such change; None: none fits."""
    for name, there in changes_ahead(hosts):
        yield name, assign(there, present)
