"""The rules by which a coordinator takes the place of one that is gone, and goes on with the round
under way.

It knows nothing but what agents bring when they join it (``underway``). Once all hosts of the
newest round are there, or the time is over, that round is adopted: it runs on where every host's
workers train; a stop at which some write already is gone on with, so that all do; anything else
counts as a failure of the round, and those that live write what they have.
"""

from dataclasses import replace

from scalai.core.job import respacing
from scalai.core.job.failures import fail, try_again
from scalai.core.job.membership import Assignment, Job, Phase, Start, active
from scalai.core.job.remembering import failed_before, keep, recall
from scalai.core.job.transitions import (
    Result,
    changed,
    end,
    next_phase,
    release_leaving,
    stop_workers,
)
from scalai.core.job.underway import TakingOver, Underway
from scalai.core.messages import events
from scalai.core.messages.actions import Action, EndWorkers, Say, TakeSnapshot, Withdraw

HEARD_S = 6.0
"""How long a new coordinator waits for a first host that has a round under way: an agent whose
coordinator has died looks for the next one within a moment."""
ADOPT_S = 15.0
"""How long it waits for the other hosts of that round: as long as a host may be silent by default
before it is lost."""


def begin(job: Job, at: float) -> Job:
    """Return the job of a coordinator that takes another one's place at this time."""
    return replace(job, taking_over=TakingOver(at + HEARD_S))


def joined(event: events.HostJoined, job: Job) -> Result:
    """A host has joined while the job, whose member it is by now, may have a round under way."""
    over, its, before = job.taking_over, event.underway, job.recalled
    job = keep(job, event.host, event.remembered)
    job = replace(job, last_round=max(job.last_round, event.last_round))
    brings = its is not None or job.recalled is not before
    if over is None and brings and job.round == 0 and job.phase is Phase.WAITING:
        over = TakingOver(event.at)  # nothing was begun yet, however late it comes
    if over is None:
        failed = failed_before(job)
        job = replace(job, failed=(*job.failed, *(f for f in failed if f not in job.failed)))
        return _late(event, job) if its is not None else changed(job, event.at)
    of = {host: each for host, each in over.of.items() if host != event.host}
    if its is not None:
        of[event.host] = its
        over = replace(over, until=max(over.until, event.at + ADOPT_S))
    job = replace(job, taking_over=replace(over, of=of), changed_at=event.at, now=event.at)
    return adopt(job) if _is_known(job) else (job, ())


def ticked(job: Job) -> Result:
    """Time passes while the hosts of the round under way are awaited."""
    over = job.taking_over
    if over is None or (job.now < over.until and not _is_known(job)):
        return job, ()
    return adopt(job)


def _is_known(job: Job) -> bool:
    """Whether every host of the newest round is there, with workers of it or without."""
    over = job.taking_over
    one = next(iter(over.of_newest(job.hosts).values()), None) if over else None
    return one is not None and one.members <= job.hosts.keys()  # all of a round name the same


def _late(event: events.HostJoined, job: Job) -> Result:
    """A host comes with workers of a round that the job goes on without: they end. If it has its
    part in the present one, the round has failed for its absence already."""
    assert event.underway is not None
    job, actions = changed(job, event.at)
    return job, (EndWorkers((event.host,), event.underway.round), *actions)


def adopt(job: Job) -> Result:
    """Go on with the newest round that hosts have told of; with none, begin one."""
    over = job.taking_over
    assert over is not None
    job, found = replace(job, taking_over=None), over.of_newest(job.hosts)
    job = recall(job)
    ends: tuple[Action, ...] = tuple(
        EndWorkers((host,), each.round)
        for host, each in sorted(over.of.items())
        if host in job.hosts and host not in found
    )
    if not found:
        return replace(job, changed_at=job.now), ends
    one = next(iter(found.values()))
    gone = one.members - found.keys()
    job = replace(
        job,
        round=one.round,
        last_round=max(job.last_round, one.round),
        current=Assignment(
            one.workers, one.layout, one.micro_batch_size, "it ran so", one.recompute
        ),
        newest=max(each.newest for each in found.values()),
        is_hooked=all(each.is_hooked for each in found.values()),
        gone=gone,
        finished=frozenset(host for host, each in found.items() if each.is_finished),
        has_state=job.has_state or any(each.is_stepping for each in found.values()),
        start=Start(one.generation, one.members, one.members, is_proven=True),
        stepped_at=None,
        changed_at=job.now,
    )
    job = respacing.adopted(job, {each.every for each in found.values()})
    said = Say(f"event=adopted round={one.round} hosts={','.join(sorted(found))}")
    job, actions = _go_on(job, found, gone)
    return job, (*ends, said, *actions)


def _go_on(job: Job, found: dict[str, Underway], gone: frozenset[str]) -> Result:
    """Enter the phase that the hosts of a round are in."""
    if any(each.is_writing for each in found.values()):
        return _go_on_writing(job, found)
    if all(each.is_finished for each in found.values()):
        return end(job, 0, "finished")  # others that are gone had their exit before
    if not any(each.is_stepping for each in found.values()):
        return _go_on_starting(job, found, gone)
    hosts, ran = active(job), job.ran
    job = replace(job, phase=Phase.RUNNING, awaited=frozenset(), ran=job.current)
    failed = _failed(found)
    if (gone or failed) and job.counted_round == job.round:  # it counts once
        job = replace(job, failures_left=job.failures_left + 1, counted_round=0)
    if gone:
        return fail(job, f"hosts {sorted(gone)} have no workers of the round", is_loss=True)
    if failed:
        return fail(job, f"the round had failed on hosts {failed}", is_chance=True)
    at_stop = any(each.has_arrived for each in found.values())
    sent_on: tuple[Action, ...] = (Withdraw(tuple(sorted(hosts))),) if at_stop else ()
    starting = frozenset(host for host, each in found.items() if not each.is_stepping)
    if starting:
        return replace(job, phase=Phase.STARTING, awaited=starting, ran=ran), sent_on
    job, released = release_leaving(job)
    return job, (*sent_on, *released)


def _go_on_starting(job: Job, found: dict[str, Underway], gone: frozenset[str]) -> Result:
    """No host's workers have all stepped: those that may train are waited for; else the start is
    made anew, from the same generation."""
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
    """All stand at one agreed stop, or nobody had been told to write: the others write, too."""
    left = frozenset(host for host, each in found.items() if not each.is_sealed)
    job = replace(job, stop=next(each.stop or 0 for each in found.values() if each.is_writing))
    if not left:
        return stop_workers(job, "the state was written before the coordinator was lost",
                            has_written=True)  # fmt: skip
    job = replace(job, phase=Phase.SNAPSHOTTING, awaited=left & active(job), ran=job.current)
    job, actions = next_phase(job)
    return job, (TakeSnapshot(tuple(sorted(left))), *actions)
