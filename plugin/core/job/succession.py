"""Rules of a new coordinator, which continues the round of a lost one.

It knows only the reports of joining agents (``remembered``). Once all hosts of the newest round are
there, or at the time limit, the round is adopted: it runs on if every host's workers train; a stop
with writing hosts is completed; anything else is a failure of the round, and survivors write their
state.
"""

from dataclasses import replace

from scalai.core.dataset.ledger import of_run
from scalai.core.degrees.degrees import Degrees
from scalai.core.job import respacing
from scalai.core.job.failures import fail, try_again
from scalai.core.job.membership import Assignment, Attempt, FailedChange, Job, Phase, active
from scalai.core.job.remembered import KeptAssignment, KeptFailure, Remembered, TakingOver, Underway
from scalai.core.job.transitions import (
    Result,
    changed,
    end,
    next_phase,
    release_leaving,
    stop_workers,
)
from scalai.core.messages import commands, events
from scalai.core.messages.actions import Action, Say, Send
from scalai.core.messages.shared import JsonText

MOST_FAILED = 8
"""Number of failed changes in a record, the newest."""


def is_as_before(job: Job, before: Job) -> bool:
    """Whether the record is unchanged. Called with every event."""
    return job is before or (
        job.settings.max_hosts == before.settings.max_hosts
        and job.budget.left == before.budget.left
        and job.budget.counted_round == before.budget.counted_round
        and job.budget.tries == before.budget.tries
        and (job.change.ran is before.change.ran or job.change.ran == before.change.ran)
        and job.copies.archived == before.copies.archived
        and job.states.lost == before.states.lost
        and job.function.known == before.function.known
        and _failures(job) == _failures(before)
    )


def remember(job: Job, run: str, term: int, number: int, request: JsonText) -> Remembered:
    """The job's record for its hosts."""
    return Remembered(
        term=term,
        number=number,
        request=request,
        max_hosts=job.settings.max_hosts,
        failures_left=job.budget.left,
        counted_round=job.budget.counted_round,
        tries=job.budget.tries,
        ran=None if job.change.ran is None else _run(job.change.ran),
        failed=_failures(job)[-MOST_FAILED:],
        archived=job.copies.archived,
        lost=tuple(of_run(run, each) for each in job.states.lost),
        proven=(job.function.known, job.function.framework),
    )


def _failures(job: Job) -> tuple[KeptFailure, ...]:
    """Changes not to be retried now, and earlier failures on hosts not yet all here."""
    if not job.change.failed and job.takeover.recalled is None:
        return ()
    there = {(host.name, host.order) for host in job.hosts.values()}
    awaited = []
    for each in job.takeover.recalled.failed if job.takeover.recalled is not None else ():
        members = {name for name, count in each.run.workers if count}
        if members - job.hosts.keys() and members & job.hosts.keys() <= job.takeover.keepers:
            awaited.append(each)
    known = (f for f in job.change.failed if f.members <= there)
    return (*awaited, *(KeptFailure(_run(each.assignment), each.reason) for each in known))


def keep(job: Job, host: str, kept: Remembered | None) -> Job:
    """The job after a host's join with its record from another coordinator; None: a new agent."""
    if kept is None:
        return replace(job, takeover=replace(job.takeover, keepers=job.takeover.keepers - {host}))
    is_later = job.takeover.recalled is None or kept.order > job.takeover.recalled.order
    return replace(
        job,
        takeover=replace(
            job.takeover,
            keepers=job.takeover.keepers | {host},
            recalled=kept if is_later else job.takeover.recalled,
        ),
    )


def recall(job: Job) -> Job:
    """A new coordinator's job by the hosts' newest record."""
    known = job.takeover.recalled
    if known is None:
        return job
    return replace(
        job,
        settings=replace(job.settings, max_hosts=known.max_hosts),
        budget=replace(
            job.budget,
            left=known.failures_left,
            counted_round=known.counted_round,
            tries=known.tries,
        ),
        change=replace(
            job.change,
            ran=None if known.ran is None else _assignment(known.ran),
            failed=failed_before(job),
        ),
        copies=replace(job.copies, archived=known.archived),
        states=replace(job.states, lost=known.lost),
        function=replace(job.function, known=known.proven[0], framework=known.proven[1]),
    )


def failed_before(job: Job) -> tuple[FailedChange, ...]:
    """Failures under another coordinator, on hosts now here with the same agents; on others they
    may be retried."""
    orders = {
        host.name: host.order for host in job.hosts.values() if host.name in job.takeover.keepers
    }
    found = []
    for each in job.takeover.recalled.failed if job.takeover.recalled is not None else ():
        its = _assignment(each.run)
        if its.members <= orders.keys():
            members = frozenset((name, orders[name]) for name in its.members)
            found.append(FailedChange(its, members, each.reason))
    return tuple(found)


def _run(assignment: Assignment) -> KeptAssignment:
    degrees = assignment.degrees.to_json()
    return KeptAssignment(
        assignment.workers, degrees, assignment.micro_batch_size, assignment.recompute,
        assignment.offload,
    )  # fmt: skip


def _assignment(run: KeptAssignment) -> Assignment:
    degrees, why = Degrees.from_json(run.degrees), "it ran under the coordinator before"
    return Assignment(run.workers, degrees, run.micro_batch_size, why, run.recompute, run.offload)


HEARD_S = 6.0
"""Wait for a first host with a round, in seconds: an agent soon looks for its next coordinator."""
ADOPT_S = 15.0
"""Wait for the round's other hosts, in seconds: the default silence of a lost host."""


def begin(job: Job, at: float) -> Job:
    """The job of a coordinator that succeeds another one at this time."""
    return replace(job, takeover=replace(job.takeover, pending=TakingOver(at + HEARD_S)))


def joined(event: events.HostJoined, job: Job) -> Result:
    """Handle a join to a job with a possible round in progress."""
    over, its, before = job.takeover.pending, event.underway, job.takeover.recalled
    job = keep(job, event.host, event.remembered)
    job = replace(
        job, change=replace(job.change, last_round=max(job.change.last_round, event.last_round))
    )
    brings = its is not None or job.takeover.recalled is not before
    if over is None and brings and job.round == 0 and job.phase is Phase.WAITING:
        over = TakingOver(event.at)  # nothing was begun yet, however late it comes
    if over is None:
        failed = failed_before(job)
        job = replace(
            job,
            change=replace(
                job.change,
                failed=(*job.change.failed, *(f for f in failed if f not in job.change.failed)),
            ),
        )
        return _late(event, job) if its is not None else changed(job, event.at)
    of = {host: each for host, each in over.of.items() if host != event.host}
    if its is not None:
        of[event.host] = its
        over = replace(over, until=max(over.until, event.at + ADOPT_S))
    job = replace(
        job,
        takeover=replace(job.takeover, pending=replace(over, of=of)),
        change=replace(job.change, at=event.at),
        now=event.at,
    )
    return adopt(job) if _is_known(job) else (job, ())


def ticked(job: Job) -> Result:
    """Adopt the round once its hosts are there, or at the time limit."""
    over = job.takeover.pending
    if over is None or (job.now < over.until and not _is_known(job)):
        return job, ()
    return adopt(job)


def _is_known(job: Job) -> bool:
    """Whether every host of the newest round is there."""
    over = job.takeover.pending
    one = next(iter(over.of_newest(job.hosts).values()), None) if over else None
    return one is not None and one.members <= job.hosts.keys()  # all of a round name the same


def _late(event: events.HostJoined, job: Job) -> Result:
    """End a late host's workers of an old round. If the present round needs it, its absence was a
    failure already."""
    assert event.underway is not None
    job, actions = changed(job, event.at)
    return job, (_ends(event.host, event.underway), *actions)


def _ends(host: str, underway: Underway) -> Send:
    """End a host's workers of an old round."""
    return Send((host,), commands.Stop(underway.round, has_written=False))


def adopt(job: Job) -> Result:
    """Go on with the hosts' newest round; without any, begin one."""
    over = job.takeover.pending
    assert over is not None
    job, found = (
        replace(job, takeover=replace(job.takeover, pending=None)),
        over.of_newest(job.hosts),
    )
    job = recall(job)
    ends: tuple[Action, ...] = tuple(
        _ends(host, each)
        for host, each in sorted(over.of.items())
        if host in job.hosts and host not in found
    )
    if not found:
        return replace(job, change=replace(job.change, at=job.now)), ends
    one = next(iter(found.values()))
    gone = one.members - found.keys()
    job = replace(
        job,
        round=one.round,
        change=replace(job.change, last_round=max(job.change.last_round, one.round), at=job.now),
        current=Assignment(
            one.workers, one.layout, one.micro_batch_size, "it ran so", one.recompute, one.offload
        ),
        newest=max(each.newest for each in found.values()),
        attempt=Attempt(
            one.generation,
            one.members,
            one.members,
            is_proven=True,
            is_hooked=all(each.is_hooked for each in found.values()),
            gone=gone,
            finished=frozenset(host for host, each in found.items() if each.is_finished),
        ),
        states=replace(
            job.states,
            has_state=job.states.has_state or any(each.is_stepping for each in found.values()),
        ),
        budget=replace(job.budget, stepped_at=None),
    )
    job = respacing.adopted(job, {each.every for each in found.values()})
    said = Say(f"event=adopted round={one.round} hosts={','.join(sorted(found))}")
    job, actions = _go_on(job, found, gone)
    return job, (*ends, said, *actions)


def _go_on(job: Job, found: dict[str, Underway], gone: frozenset[str]) -> Result:
    """Enter the phase of the round's hosts."""
    if any(each.is_writing for each in found.values()):
        return _go_on_writing(job, found)
    if all(each.is_finished for each in found.values()):
        return end(job, 0, "finished")  # others that are gone had their exit before
    if not any(each.is_stepping for each in found.values()):
        return _go_on_starting(job, found, gone)
    hosts, ran = active(job), job.change.ran
    job = replace(
        job, phase=Phase.RUNNING, awaited=frozenset(), change=replace(job.change, ran=job.current)
    )
    failed = _failed(found)
    if (gone or failed) and job.budget.counted_round == job.round:  # it counts once
        job = replace(job, budget=replace(job.budget, left=job.budget.left + 1, counted_round=0))
    if gone:
        return fail(job, f"hosts {sorted(gone)} have no workers of the round", is_loss=True)
    if failed:
        return fail(job, f"the round had failed on hosts {failed}", is_chance=True)
    at_stop = any(each.has_arrived for each in found.values())
    sent_on: tuple[Action, ...] = (
        (Send(tuple(sorted(hosts)), commands.Withdraw(job.round)),) if at_stop else ()
    )
    starting = frozenset(host for host, each in found.items() if not each.is_stepping)
    if starting:
        # A host that has made a step shows that the state was proven, and the others may not know.
        waiting = tuple(sorted(host for host in starting if not found[host].is_proven))
        if waiting and job.attempt.source is not None:
            sent_on = (*sent_on, Send(waiting, commands.Proceed(job.round)))
        return replace(
            job, phase=Phase.STARTING, awaited=starting, change=replace(job.change, ran=ran)
        ), sent_on
    job, released = release_leaving(job)
    return job, (*sent_on, *released)


def _go_on_starting(job: Job, found: dict[str, Underway], gone: frozenset[str]) -> Result:
    """Wait for proven workers without a complete step; else repeat the start from the same
    generation."""
    job = replace(job, phase=Phase.STARTING, awaited=active(job))
    if absent := sorted(gone - job.hosts.keys()):
        return fail(job, f"hosts {absent} have not come to the new coordinator", is_loss=True)
    if failed := _failed(found):
        return try_again(job, f"the start had failed on hosts {failed}")
    early = sorted({host for host, each in found.items() if not each.is_proven} | gone)
    if early:
        return try_again(job, f"the coordinator was lost before hosts {early} had their state")
    return job, ()


def _failed(found: dict[str, Underway]) -> list[str]:
    return sorted(host for host, each in found.items() if each.is_failed)


def _go_on_writing(job: Job, found: dict[str, Underway]) -> Result:
    """Let the other hosts write, too: all stand at one agreed stop, or nobody had an order to
    write."""
    left = frozenset(host for host, each in found.items() if not each.is_sealed)
    step = next(each.stop or 0 for each in found.values() if each.is_writing)
    job = replace(job, stop=replace(job.stop, step=step))
    if not left:
        return stop_workers(job, "the state was written before the coordinator was lost",
                            has_written=True)  # fmt: skip
    job = replace(
        job,
        phase=Phase.SNAPSHOTTING,
        awaited=left & active(job),
        change=replace(job.change, ran=job.current),
    )
    job, actions = next_phase(job)
    return job, (Send(tuple(sorted(left)), commands.TakeSnapshot(job.round)), *actions)
