"""The rules of membership: ``advance(job, event)`` returns the next state of the job and what must
be done.

Nothing here waits, sends or reads a clock. Every rule keeps one promise: a committed generation
stays until a newer one is committed and, after a resize, until every new rank has stepped.
"""

from dataclasses import replace
from functools import singledispatch

from scalai.core import events
from scalai.core.actions import Action, Commit, Hurry, Release, Say
from scalai.core.membership import (
    FALLIBLE,
    RESIZABLE,
    TRAINING,
    Generation,
    Host,
    Job,
    Phase,
    active,
    staying,
)
from scalai.core.transitions import (
    Result,
    answered,
    changed,
    consider,
    end,
    fail,
    next_phase,
    prepare,
    release_leaving,
    save,
    without_ahead,
)


def advance(job: Job, event: events.Event) -> Result:
    """Return the job after ``event`` and the actions that the coordinator must carry out, in
    order."""
    if job.phase is Phase.ENDED:
        return job, ()
    return _on(event, job)


@singledispatch
def _on(event: events.Event, job: Job) -> Result:
    raise AssertionError(f"no rule for {event!r}")


@_on.register
def _host_joined(event: events.HostJoined, job: Job) -> Result:
    host = Host(event.host, event.slots, job.joined)
    job = replace(
        job,
        hosts={**job.hosts, event.host: host},
        joined=job.joined + 1,
        generations=event.covered,
        has_state=job.has_state or event.has_parts,
    )
    return changed(job, event.at)


@_on.register
def _host_leaving(event: events.HostLeaving, job: Job) -> Result:
    if event.host not in job.hosts:
        return job, ()
    host = replace(job.hosts[event.host], is_leaving=True)
    job = replace(job, hosts={**job.hosts, event.host: host})
    if job.phase is Phase.WAITING:
        return _leave_while_waiting(job, event.host)
    if event.host not in active(job) and job.phase in RESIZABLE:
        # In a start it serves its store until every rank has stepped; in a running job the hosts
        # with workers hold all that it holds.
        if job.ahead is not None and event.host in job.ahead.assignment.active:
            return consider(job)
        return release_leaving(job) if job.phase in TRAINING else (job, ())
    return consider(job) if job.phase in RESIZABLE else (job, ())


def _leave_while_waiting(job: Job, host: str) -> Result:
    """Nothing runs: let a host go unless the state may need it. Then it stays until its drain
    timeout, and its part stays in its store."""
    if not staying(job) and job.has_state:
        return save(job)
    if not job.has_state:
        hosts = {name: kept for name, kept in job.hosts.items() if name != host}
        if not hosts:
            return end(job, 0, "the last host left before the job had begun")
        return replace(job, hosts=hosts), (Release(job.round, None, (host,)),)
    return consider(job)


@_on.register
def _host_lost(event: events.HostLost, job: Job) -> Result:
    if event.host not in job.hosts:
        return job, ()
    was_active = event.host in active(job)
    hosts = {name: host for name, host in job.hosts.items() if name != event.host}
    uncommitted = job.uncommitted - {event.host}
    job = replace(job, hosts=hosts, generations=event.covered, uncommitted=uncommitted)
    given_up: tuple[Action, ...] = ()
    if job.ahead is not None and event.host in job.ahead.assignment.active:
        job, given_up = without_ahead(job)
    job, actions = _lost(job, event, was_active)
    return job, (*given_up, *actions)


def _lost(job: Job, event: events.HostLost, was_active: bool) -> Result:
    """Go on without a host that is gone already."""
    if job.phase is Phase.SAVING and event.host in job.awaited:
        return end(job, 1, f"host {event.host} is lost before its part was saved")
    if was_active and job.phase in (*TRAINING, Phase.PREPARING, Phase.STARTING):
        return fail(job, f"host {event.host} is lost")
    if job.phase is Phase.BUILDING:
        return consider(job)
    if event.host in job.awaited and job.phase is Phase.DRAINING:
        return _drained(job, event.host)
    if event.host in job.awaited:
        return next_phase(answered(job, event.host))
    return changed(job, event.at) if job.phase in RESIZABLE else (job, ())


@_on.register
def _slots_changed(event: events.SlotsChanged, job: Job) -> Result:
    if event.host not in job.hosts or job.hosts[event.host].slots == event.slots:
        return job, ()
    host = replace(job.hosts[event.host], slots=event.slots)
    return changed(replace(job, hosts={**job.hosts, event.host: host}), event.at)


@_on.register
def _rescaled(event: events.Rescaled, job: Job) -> Result:
    job = replace(job, assign=event.assign, max_hosts=event.max_hosts or job.max_hosts)
    return consider(job) if job.phase in RESIZABLE else (job, ())


@_on.register
def _ticked(event: events.Ticked, job: Job) -> Result:
    job = replace(job, newest=max(job.newest, event.newest))
    is_settled = job.changed_at is not None and event.at - job.changed_at >= job.settle_s
    if is_settled and job.phase in RESIZABLE:
        return consider(job)
    if job.phase is not Phase.BUILDING:
        return job, ()
    since = event.at if job.building_since is None else job.building_since
    job = replace(job, building_since=since)
    if event.at - since > job.build_timeout_s:
        return _stop_unbuilt(job, f"not built within {job.build_timeout_s:.0f} s")
    return job, ()


@_on.register
def _built(event: events.Built, job: Job) -> Result:
    if job.phase is not Phase.BUILDING or job.ahead is None or event.round != job.ahead.round:
        return job, ()
    return next_phase(answered(job, event.host))


@_on.register
def _not_built(event: events.NotBuilt, job: Job) -> Result:
    if job.ahead is None or event.round != job.ahead.round:
        return job, ()
    return _stop_unbuilt(job, f"host {event.host}: {event.reason}")


def _stop_unbuilt(job: Job, reason: str) -> Result:
    """The next round's workers will start when the present ones have stopped."""
    job, given_up = without_ahead(job)
    said = Say(f"the next workers are not built beside the present ones: {reason}")
    job, actions = prepare(job) if job.phase is Phase.BUILDING else (job, ())
    return job, (*given_up, said, *actions)


@_on.register
def _prepared(event: events.Prepared, job: Job) -> Result:
    if job.phase is not Phase.PREPARING or event.stop != job.stop:
        return job, ()
    return next_phase(replace(answered(job, event.host), newest=max(job.newest, event.newest)))


@_on.register
def _deposited(event: events.Deposited, job: Job) -> Result:
    if job.phase is not Phase.DRAINING or event.round != job.round:
        return job, ()
    return _drained(job, event.host)


def _drained(job: Job, host: str) -> Result:
    """A host has deposited or is lost in a drain."""
    job = answered(job, host)
    return (job, (Hurry(tuple(sorted(job.awaited))),)) if job.awaited else next_phase(job)


@_on.register
def _judged(event: events.Judged, job: Job) -> Result:
    if job.phase is not Phase.DRAINING:
        return job, ()
    if not event.is_covered:
        return fail(job, "the deposits that survive do not cover the state")
    hosts = active(job)
    generation = Generation(event.number, event.step, event.hosts)
    job = replace(job, phase=Phase.COMMITTING, awaited=hosts, uncommitted=frozenset())
    job = _with_generation(job, generation)
    return job, (Commit(tuple(sorted(hosts)), generation.number),)


@_on.register
def _snapshotted(event: events.Snapshotted, job: Job) -> Result:
    generation = Generation(event.number, event.step, frozenset(event.hosts))
    job = _with_generation(replace(job, uncommitted=generation.hosts), generation)
    return job, (Commit(event.hosts, generation.number),)


def _with_generation(job: Job, generation: Generation) -> Job:
    return replace(
        job,
        generations=(*job.generations, generation),
        committing=generation.number,
        has_state=True,
    )


@_on.register
def _committed(event: events.Committed, job: Job) -> Result:
    if event.generation != job.committing:
        return job, ()
    if job.phase is Phase.COMMITTING:
        return next_phase(answered(job, event.host))
    if event.host not in job.uncommitted:
        return job, ()
    # A snapshot. Once every host has it, older generations may go, also during a drain: its deposit
    # needs their room. A start keeps its source.
    job = replace(job, uncommitted=job.uncommitted - {event.host})
    newest = job.newest_generation
    is_ready = not job.uncommitted and newest is not None and newest.number == event.generation
    if not is_ready or newest is None or job.phase in (Phase.STARTING, Phase.STOPPING):
        return job, ()
    return replace(job, generations=(newest,)), (Release(job.round, newest.number, ()),)


@_on.register
def _stopped(event: events.Stopped, job: Job) -> Result:
    if job.phase is not Phase.STOPPING or event.round != job.round:
        return job, ()
    return next_phase(replace(answered(job, event.host), newest=max(job.newest, event.newest)))


@_on.register
def _workers_failed(event: events.WorkersFailed, job: Job) -> Result:
    if event.round != job.round or job.phase not in FALLIBLE:
        return job, ()
    return fail(job, f"workers of host {event.host} failed: {event.reason}")


@_on.register
def _stepped(event: events.Stepped, job: Job) -> Result:
    if job.phase is not Phase.STARTING or event.round != job.round:
        return job, ()
    return next_phase(answered(job, event.host))


@_on.register
def _finished(event: events.Finished, job: Job) -> Result:
    if event.round != job.round:
        return job, ()
    job = replace(job, finished=job.finished | {event.host})
    return end(job, 0, "finished") if job.finished >= active(job) else (job, ())


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
