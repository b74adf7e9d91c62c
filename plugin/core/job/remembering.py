"""How a coordinator says what its job remembers, and how the one that takes its place goes by it
(``remembered``)."""

from dataclasses import replace

from scalai.core.dataset.ledger import of_run
from scalai.core.degrees.degrees import Degrees
from scalai.core.job.membership import Assignment, FailedChange, Job
from scalai.core.job.remembered import FailedRun, Remembered, Run
from scalai.core.messages.shared import JsonText

MOST_FAILED = 8
"""Of failed changes the newest are remembered."""


def is_as_before(job: Job, before: Job) -> bool:
    """Whether there is nothing new to remember. Asked with every event."""
    return job is before or (
        job.max_hosts == before.max_hosts
        and job.failures_left == before.failures_left
        and job.counted_round == before.counted_round
        and job.tries == before.tries
        and (job.ran is before.ran or job.ran == before.ran)
        and job.archived == before.archived
        and job.lost == before.lost
        and job.function.known == before.function.known
        and _failed(job) == _failed(before)
    )


def remember(job: Job, run: str, term: int, number: int, request: JsonText) -> Remembered:
    """Return what hosts are to keep of a job whose run has this name."""
    return Remembered(
        term=term,
        number=number,
        request=request,
        max_hosts=job.max_hosts,
        failures_left=job.failures_left,
        counted_round=job.counted_round,
        tries=job.tries,
        ran=None if job.ran is None else _run(job.ran),
        failed=_failed(job)[-MOST_FAILED:],
        archived=job.archived,
        lost=tuple(of_run(run, each) for each in job.lost),
        proven=(job.function.known, job.function.framework),
    )


def _failed(job: Job) -> tuple[FailedRun, ...]:
    """Return the changes that are not tried again as things are, and those that had failed before
    on hosts of which some have yet to come."""
    if not job.failed and job.recalled is None:
        return ()
    there = {(host.name, host.order) for host in job.hosts.values()}
    awaited = []
    for each in job.recalled.failed if job.recalled is not None else ():
        members = {name for name, count in each.run.workers if count}
        if members - job.hosts.keys() and members & job.hosts.keys() <= job.keepers:
            awaited.append(each)
    known = (f for f in job.failed if f.members <= there)
    return (*awaited, *(FailedRun(_run(each.assignment), each.reason) for each in known))


def keep(job: Job, host: str, kept: Remembered | None) -> Job:
    """Return the job after a host has joined with what it has kept under another coordinator; None:
    nothing, because its agent is a new one."""
    if kept is None:
        return replace(job, keepers=job.keepers - {host})
    is_later = job.recalled is None or kept.order > job.recalled.order
    return replace(job, keepers=job.keepers | {host}, recalled=kept if is_later else job.recalled)


def recall(job: Job) -> Job:
    """Return the job of a new coordinator that goes by what hosts have kept."""
    known = job.recalled
    if known is None:
        return job
    return replace(
        job,
        max_hosts=known.max_hosts,
        failures_left=known.failures_left,
        counted_round=known.counted_round,
        tries=known.tries,
        ran=None if known.ran is None else _assignment(known.ran),
        failed=failed_before(job),
        archived=known.archived,
        lost=known.lost,
        function=replace(job.function, known=known.proven[0], framework=known.proven[1]),
    )


def failed_before(job: Job) -> tuple[FailedChange, ...]:
    """Return the changes that had failed under another coordinator on hosts that are all there with
    the same agents: on others they may be tried again."""
    orders = {host.name: host.order for host in job.hosts.values() if host.name in job.keepers}
    found = []
    for each in job.recalled.failed if job.recalled is not None else ():
        its = _assignment(each.run)
        if its.members <= orders.keys():
            members = frozenset((name, orders[name]) for name in its.members)
            found.append(FailedChange(its, members, each.reason))
    return tuple(found)


def _run(assignment: Assignment) -> Run:
    degrees = assignment.degrees.to_json()
    return Run(assignment.workers, degrees, assignment.micro_batch_size, assignment.recompute)


def _assignment(run: Run) -> Assignment:
    degrees, why = Degrees.from_json(run.degrees), "it ran under the coordinator before"
    return Assignment(run.workers, degrees, run.micro_batch_size, why, run.recompute)
