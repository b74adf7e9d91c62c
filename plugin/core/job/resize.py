"""The rules of membership: ``advance(job, event)`` returns the next state of the job and what must
be done.

Nothing here waits, sends or reads a clock. Every rule keeps one promise: a committed generation
stays until a newer one is committed and, after a resize, until every new rank has stepped.
"""

from dataclasses import replace
from functools import singledispatch

from scalai.core.job import (
    archiving,
    commits,
    evacuating,
    examining,
    failures,
    hangs,
    health,
    hearing,
    preemption,
    probing,
    replicating,
    respacing,
    starting,
    succession,
)
from scalai.core.job.deadlines import clock_of
from scalai.core.job.failures import excuse_loss, fail
from scalai.core.job.membership import (
    ENDED_BY_A_LOSS,
    FALLIBLE,
    RESIZABLE,
    TRAINING,
    Host,
    Job,
    Phase,
    Wait,
    active,
    leaving,
    staying,
)
from scalai.core.job.overdue import overdue
from scalai.core.job.quarantine import joined_anew, pardon, strike
from scalai.core.job.transitions import (
    NOT_BEGUN,
    UNHOOKED,
    Result,
    answered,
    call_off,
    changed,
    consider,
    end,
    next_phase,
    prepare,
    prove_no_more,
    release_leaving,
    runs_as_requested,
    save,
    stand,
    stop_unbuilt,
    withdraw,
    without_standby,
)
from scalai.core.messages import events
from scalai.core.messages.actions import (
    RESUMABLE,
    Action,
    Commit,
    Drop,
    Release,
    Report,
    Say,
    Withdraw,
)

REFILL_S = 3600.0
"""Training progress for which a failure is forgotten, in a job without a budget of its own."""


def advance(job: Job, event: events.Event) -> Result:
    """Return the job after ``event`` and the actions that the coordinator must carry out, in
    order."""
    if job.phase is Phase.ENDED:
        return job, ()
    after, due = _on(event, job)
    after = preemption.measured(job, after)
    return (after if clock_of(after) == clock_of(job) else replace(after, wait=Wait())), due


@singledispatch
def _on(event: events.Event, job: Job) -> Result:
    raise AssertionError(f"no rule for {event!r}")


@_on.register
def _host_joined(event: events.HostJoined, job: Job) -> Result:
    before, is_replaced = job, event.host in job.hosts
    host = Host(event.host, event.slots, job.joined, has_check=event.has_check)
    job = replace(
        hearing.forget(joined_anew(job, event.host), event.host),
        hosts={**job.hosts, event.host: host},
        joined=job.joined + 1,
        generations=event.covered,
        has_state=job.has_state or event.has_parts,
        looking=job.looking - {event.host},  # it has looked before it joined
    )
    asked: tuple[Action, ...] = ()
    if event.underway is None:  # else it has passed, and runs workers
        job, asked = health.joined(job, event.host)
    brought = (*asked, *_brought(event))
    if not is_replaced or job.taking_over is not None:
        job, actions = succession.joined(event, job)
        return job, (*brought, *actions)
    # What it brings counts before the loss of the one before it is judged.
    job = replace(job, changed_at=event.at)
    job, actions = _workers_gone(before, job, event.host, event.at)
    return job, (*brought, *actions)


def _brought(event: events.HostJoined) -> tuple[Action, ...]:
    """What becomes of what a host brings: before a round begins, which gives up what is sealed."""
    dropped = (Drop((event.host,), event.obsolete),) if event.obsolete else ()
    return (*dropped, *(Commit(hosts, number) for number, hosts in event.sealed))


@_on.register
def _host_leaving(event: events.HostLeaving, job: Job) -> Result:
    if event.host not in job.hosts or preemption.is_known(event, job):
        return job, ()
    job, first = preemption.noticed(event, job)
    job, actions = _leave(job, event)
    return job, (*first, *actions)


def _leave(job: Job, event: events.HostLeaving) -> Result:
    """Begin the drain of a host that is marked as leaving."""
    if job.taking_over is not None:
        return job, ()
    if job.phase is Phase.WAITING:
        return _leave_while_waiting(job, event.host)
    if event.host not in active(job) and job.phase in RESIZABLE:
        # In a start it serves its store until every rank has stepped; in a running job the hosts
        # with workers hold all that it holds.
        if job.standby is not None and event.host in job.standby.assignment.active:
            return consider(job)
        return release_leaving(job) if job.phase in TRAINING else (job, ())
    return _consider_soon(job, event.at)


def _consider_soon(job: Job, at: float) -> Result:
    """Meet a change at once; during a stop, at the first tick after it where it is taken back. A
    stop that waits for a save, and that nothing needs any more, is taken back now."""
    if job.phase in RESIZABLE:
        return consider(job)
    if job.phase is Phase.PREPARING and job.held and runs_as_requested(job):
        return call_off(job)
    return replace(job, changed_at=at), ()


@_on.register
def _host_staying(event: events.HostStaying, job: Job) -> Result:
    """The notice is withdrawn: a stop at which nobody has written is taken back, where the job runs
    as it is to; else the next round has the host again."""
    if event.host not in job.hosts or not job.hosts[event.host].is_leaving:
        return job, ()
    job = preemption.taken_back(job, event.host)
    has_all = job.current is not None and active(job) == job.current.members
    if job.phase in (Phase.PREPARING, Phase.DRAINING) and has_all and runs_as_requested(job):
        return call_off(job)
    return _consider_soon(job, event.at)


def _leave_while_waiting(job: Job, host: str) -> Result:
    """Nothing runs: let a host go unless the state may need it. Then it stays until its drain
    timeout, and its part stays in its store."""
    if not staying(job) and job.has_state:
        return save(job)
    if not job.has_state:
        hosts = {name: kept for name, kept in job.hosts.items() if name != host}
        if not hosts:
            return end(job, RESUMABLE, NOT_BEGUN)
        return replace(job, hosts=hosts), (Release(job.round, None, (host,)),)
    return consider(job)


@_on.register
def _host_lost(event: events.HostLost, job: Job) -> Result:
    if event.host not in job.hosts:
        return job, ()
    hosts = {name: host for name, host in job.hosts.items() if name != event.host}
    after = replace(job, hosts=hosts, generations=event.covered)
    return _workers_gone(job, after, event.host, event.at)


def _workers_gone(before: Job, job: Job, host: str, at: float) -> Result:
    """A host's agent is gone, and its workers with it."""
    job = replace(job, gone=job.gone | {host}, uncommitted=job.uncommitted - {host}, now=at)
    job, lines = strike(hearing.forget(job, host), [host])
    job, excused = excuse_loss(job, host)
    lines, job = (*lines, *excused), archiving.lose(replicating.give_up(job), [host])
    given_up: tuple[Action, ...] = ()
    if job.standby is not None and host in job.standby.assignment.active:
        job, given_up = without_standby(job)
    is_full = len(before.generations) > 1 and job.phase in (Phase.DRAINING, Phase.SNAPSHOTTING)
    job, room = _make_room(job, host) if is_full else (job, ())
    if job.phase is not before.phase:
        return job, (*lines, *given_up, *room)
    job, actions = _without_workers(job, host, at, host in active(before))
    return job, (*lines, *given_up, *room, *actions)


def _make_room(job: Job, host: str) -> Result:
    """A host is lost in a stop while others have two generations, which leaves them no room for the
    snapshot: the snapshot that the lost one had yet to rename is whole without it, or this stop
    comes to nothing, because no store may let go of either."""
    newest = job.newest_generation
    if newest is None or newest.number != job.committing:
        reason = (
            f"host {host} is lost, without which generation {job.committing} is not whole; the "
            "others have no room for another snapshot"
        )
        return fail(job, reason, is_loss=True)
    if job.uncommitted:
        return job, ()
    return replace(job, generations=(newest,)), (Release(job.round, newest.number, ()),)


def _without_workers(job: Job, host: str, at: float, was_active: bool) -> Result:
    """Go on without workers that are gone already."""
    if job.phase is Phase.SAVING and host in job.awaited:
        return end(job, 1, f"host {host} is lost before its part was saved")
    if job.phase is Phase.EXAMINING:
        return examining.lost(job, host, was_active=was_active)
    if was_active and job.phase in ENDED_BY_A_LOSS:
        return fail(job, f"host {host} is lost", is_loss=True)
    if job.phase is Phase.BUILDING:
        return consider(job)
    if host in job.awaited:
        return next_phase(answered(job, host))
    return changed(job, at) if job.phase in RESIZABLE else (job, ())


@_on.register
def _slots_changed(event: events.SlotsChanged, job: Job) -> Result:
    if event.host not in job.hosts or job.hosts[event.host].slots == event.slots:
        return job, ()
    host = replace(job.hosts[event.host], slots=event.slots)
    return changed(replace(job, hosts={**job.hosts, event.host: host}), event.at)


@_on.register
def _rescaled(event: events.Rescaled, job: Job) -> Result:
    job = replace(job, assign=event.assign, max_hosts=event.max_hosts or job.max_hosts)
    return _consider_soon(job, event.at)


@_on.register
def _ticked(event: events.Ticked, job: Job) -> Result:
    job = _refill(replace(job, now=event.at), event.newest)
    was_barred = len(job.barred)
    job, asked = health.ask_again(pardon(job))
    if job.taking_over is not None:
        job, adopted = succession.ticked(job)
        if job.taking_over is None and job.phase is Phase.WAITING:
            for host in sorted(leaving(job)):
                job, released = _leave_while_waiting(job, host)
                adopted = (*adopted, *released)
        return job, (*asked, *adopted)
    if (ended := examining.ticked(job)) is not None:
        return ended
    is_settled = job.changed_at is not None and event.at - job.changed_at >= job.settle_s
    is_again = job.again_at is not None and event.at >= job.again_at
    if job.phase in RESIZABLE and (is_settled or is_again or len(job.barred) < was_barred):
        job, actions = consider(job)
        return job, (*asked, *actions)
    job, judged = _judged_late(job)
    job, heard = hearing.ticked(job)
    asked = (*asked, *judged, *heard)
    if stuck := hangs.hung(job, event.stalled):
        return stuck[0], (*asked, *stuck[1])
    job, spaced = respacing.ticked(job)
    job, given = evacuating.evacuate(job)
    job, copied = replicating.replicate(job)
    job, archived = archiving.archive(job)
    job, late = preemption.overdue(job)
    if not late:  # else who is late in the phase too would be lost twice
        job, late = overdue(job)
    return job, (*asked, *spaced, *given, *copied, *archived, *late)


def _refill(job: Job, newest: int) -> Job:
    """Take note of the steps that were made; an hour of them earns a failure that they cost."""
    if newest <= job.newest or job.phase not in TRAINING:
        return replace(job, newest=max(job.newest, newest))
    made_s = 0.0 if job.stepped_at is None else job.now - job.stepped_at
    job = replace(job, newest=newest, stepped_at=job.now, trained_s=job.trained_s + made_s)
    if job.trained_s < REFILL_S or not job.does_refill:
        return job
    left = min(job.most_failures, job.failures_left + 1)
    return replace(job, failures_left=left, trained_s=0.0)


@_on.register
def _built(event: events.Built, job: Job) -> Result:
    if job.phase is not Phase.BUILDING or job.standby is None or event.round != job.standby.round:
        return job, ()
    return next_phase(answered(job, event.host))


@_on.register
def _not_built(event: events.NotBuilt, job: Job) -> Result:
    if job.standby is None or event.round != job.standby.round:
        return job, ()
    return stop_unbuilt(job, f"host {event.host}: {event.reason}")


@_on.register
def _prepared(event: events.Prepared, job: Job) -> Result:
    if job.phase is not Phase.PREPARING or (event.round, event.stop) != (job.round, job.stop):
        return job, ()
    held = {host: what for host, what in job.held.items() if host != event.host}
    job = replace(answered(job, event.host), held=held)
    return next_phase(replace(job, newest=max(job.newest, event.newest)))


@_on.register
def _held(event: events.Held, job: Job) -> Result:
    """What is in flight began before the stop was proposed, or on the way to it; then all ranks
    stand there with it, and train on to a later one."""
    if (event.round, event.stop) != (job.round, job.stop):
        return job, ()
    if job.phase is Phase.PREPARING:
        return replace(job, held={**job.held, event.host: event.what}), ()
    if job.phase is not Phase.DRAINING:
        return job, ()
    hosts = tuple(sorted(active(job)))
    job, actions = prepare(replace(job, newest=max(job.newest, event.stop)))
    lines = Say(f"the stop at step {event.stop} is put off: {event.what}")
    return job, (Withdraw(hosts), lines, *actions)


@_on.register
def _arrived(event: events.Arrived, job: Job) -> Result:
    if job.phase is not Phase.DRAINING or (event.round, event.stop) != (job.round, job.stop):
        return job, ()
    if not event.differing:
        return next_phase(answered(job, event.host))
    text = f"host {event.host} holds replicas that differ: {event.differing}"
    if not leaving(job):
        why = f"{text}. A change would keep one rank's values for all"
        return withdraw(replace(job, awaited=frozenset()), why)
    job, actions = next_phase(answered(job, event.host))
    return job, (Say(f"event=replicas_differ {text}. One rank's are kept for all"), *actions)


@_on.register
def _written(event: events.SnapshotWritten, job: Job) -> Result:
    if job.phase is not Phase.SNAPSHOTTING or event.round != job.round:
        return job, ()
    return next_phase(answered(job, event.host))


@_on.register
def _stopped(event: events.Stopped, job: Job) -> Result:
    if job.phase is not Phase.STOPPING or event.round != job.round:
        return job, ()
    return next_phase(replace(answered(job, event.host), newest=max(job.newest, event.newest)))


@_on.register
def _workers_failed(event: events.WorkersFailed, job: Job) -> Result:
    reason = f"workers of host {event.host} failed: {event.reason}"
    if event.round == job.round and not event.is_refusal:
        job, asked = health.ask(job, [event.host], reason)
        job, actions = _failed(event, job, reason)
        return job, (*asked, *actions)
    return _failed(event, job, reason)


def _failed(event: events.WorkersFailed, job: Job, reason: str) -> Result:
    if event.round == job.round and job.emergency is not None:
        return job, (Say(reason),)
    if event.round != job.round or job.phase not in FALLIBLE:
        return job, ()
    if job.phase is Phase.SNAPSHOTTING:  # what the others snapshot may be the whole state
        job, actions = next_phase(answered(job, event.host))
        return job, (Say(reason), *actions)
    reason = event.reason if event.is_refusal else reason
    if (asked := examining.start_failed(event, job, reason)) is not None:
        return asked
    return fail(job, reason, is_chance=event.is_chance, is_refusal=event.is_refusal)


@_on.register
def _unhooked(event: events.Unhooked, job: Job) -> Result:
    """It runs as it is: no step will be told of, and no change begun."""
    if event.round != job.round or not job.is_hooked or job.phase is not Phase.STARTING:
        return job, ()
    job = replace(job, is_hooked=False, phase=Phase.RUNNING, awaited=frozenset(), ran=job.current)
    text = f"event=unhooked host={event.host} a change of the job is refused: {UNHOOKED}"
    return job, (Report(text, ()),)


@_on.register
def _hooked(event: events.Hooked, job: Job) -> Result:
    if job.is_hooked or event.round != job.round:
        return job, ()
    # What changed meanwhile was refused.
    return replace(job, is_hooked=True, changed_at=job.now), ()


for _rule in (commits.judged, commits.sealed, commits.skipped, commits.snapshot_judged,
              commits.committed,
              commits.rescue_judged, replicating.replicated, archiving.archived,
              failures.frozen, failures.rescued, health.checked, hearing.knocked,
              starting.progressed, starting.published, starting.restored, starting.proven,
              examining.proof_failed, examining.examined, examining.suspected):  # fmt: skip
    _on.register(_rule)


@_on.register
def _looked(event: events.Looked, job: Job) -> Result:
    """What lies on disks may be gone on from unasked; other hosts may still tell of more."""
    job = replace(job, looking=job.looking - {event.host})
    is_found = job.generations and not job.is_held_back
    if job.phase is not Phase.WAITING or not is_found or job.changed_at is not None:
        return job, ()
    return replace(job, changed_at=event.at), ()


@_on.register
def _resumed(event: events.Resumed, job: Job) -> Result:
    return consider(job) if job.phase is Phase.WAITING else (job, ())


@_on.register
def _stepped(event: events.Stepped, job: Job) -> Result:
    if probing.is_of_probe(event, job):
        return _judged_late(probing.probed(event, job))
    if job.phase is not Phase.STARTING or event.round != job.round:
        return job, ()
    job = probing.stepped(event, answered(job, event.host))
    if job.awaited:
        return job, ()
    return _judged(job)


def _judged(job: Job) -> Result:
    job, verdict, lines = probing.judge(job)
    if verdict is not None and not verdict.is_same:
        job, actions = failures.computes_otherwise(job, verdict.text)
    else:
        job, actions = next_phase(job) if job.phase is Phase.STARTING else stand(job)
    return job, (*lines, *actions)


def _judged_late(job: Job) -> Result:
    """Compare what waited for the old workers, once they have told, are gone, or take too long."""
    is_due = job.function.is_waiting and not probing.must_wait(job)
    return _judged(job) if is_due else (job, ())


@_on.register
def _finished(event: events.Finished, job: Job) -> Result:
    if event.round != job.round:
        return job, ()
    job = replace(job, finished=job.finished | {event.host})
    if not job.finished >= active(job):
        return job, ()
    job, unproven = prove_no_more(job, "the script has finished")
    job, actions = end(job, 0, "finished")
    return job, (*unproven, *actions)


@_on.register
def _saved(event: events.Saved, job: Job) -> Result:
    if job.phase is not Phase.SAVING:
        return job, ()
    return next_phase(answered(job, event.host))


@_on.register
def _not_saved(event: events.NotSaved, job: Job) -> Result:
    if job.phase is not Phase.SAVING:
        return job, ()
    return end(job, 1, f"host {event.host} could not save its part: {event.reason}")
