"""The rules of membership: ``advance(job, event)`` returns the next state of the job and what must
be done.

Nothing here waits, sends or reads a clock. Every rule keeps one promise: a committed generation
stays until a newer one is committed and, after a resize, until every new rank has stepped.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import singledispatch

from scalai.core.membership import (
    Action,
    Agree,
    Ahead,
    Assignment,
    Build,
    Built,
    Commit,
    Committed,
    Deposited,
    Event,
    Exit,
    Finished,
    Generation,
    GiveUp,
    Host,
    HostJoined,
    HostLeaving,
    HostLost,
    Hurry,
    Job,
    Judge,
    Judged,
    NotBuilt,
    NotSaved,
    Phase,
    Prepare,
    Prepared,
    Release,
    Rescaled,
    Result,
    Saved,
    SaveDurable,
    Say,
    SlotsChanged,
    Snapshotted,
    StartRound,
    Stepped,
    Stopped,
    StopWorkers,
    Ticked,
    Withdraw,
    WorkersFailed,
)  # fmt: skip

RESIZABLE = (Phase.WAITING, Phase.STARTING, Phase.RUNNING, Phase.BUILDING)
"""Phases in which a change begins something new; in the others it is met when the next round is
assigned."""

TRAINING = (Phase.RUNNING, Phase.BUILDING)
"""Phases in which the workers train and no stop is under way."""

FALLIBLE = (Phase.STARTING, *TRAINING, Phase.PREPARING, Phase.DRAINING)
"""Phases that need the workers; in the others they have done their work or are being stopped."""

_NOT_WHOLE = (
    " for the hosts whose stores hold the newest generation (if their memory is lost: stop the "
    "job, run scalai clean on every host, and start it again from the script's own checkpoint)"
)


def advance(job: Job, event: Event) -> Result:
    """Return the job after ``event`` and the actions that the coordinator must carry out, in
    order."""
    if job.phase is Phase.ENDED:
        return job, ()
    return _on(event, job)


# -------------------------------------------------------------------------------------- what is
# true of a job


def staying(job: Job) -> tuple[tuple[str, int], ...]:
    """Hosts that take part in the next round, with their slots: those of the current round keep
    their order."""
    current = [name for name, _ in job.current.workers] if job.current else []
    hosts = [host for host in job.hosts.values() if not host.is_leaving]
    place = {name: number for number, name in enumerate(current)}
    hosts.sort(key=lambda host: (place.get(host.name, len(place)), host.order))
    return tuple((host.name, host.slots) for host in hosts)


def active(job: Job) -> frozenset[str]:
    """Hosts that are present and have workers in the current round."""
    return frozenset(job.current.active if job.current else ()) & frozenset(job.hosts)


def _sorted(hosts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(hosts))


def _assignment(job: Job) -> Assignment | None:
    hosts = staying(job)
    return job.assign(hosts, job.current.degrees if job.current else None) if hosts else None


def _leaving(job: Job) -> frozenset[str]:
    return frozenset(host.name for host in job.hosts.values() if host.is_leaving)


# -------------------------------------------------------------------------------------- the turns
# that a job takes


def _consider(job: Job) -> Result:
    """Begin a resize if the hosts now present would be assigned otherwise than they are."""
    job = replace(job, changed_at=None)
    if job.phase is Phase.WAITING:
        return _start_round(job)
    target = _assignment(job)
    if target is None and staying(job) and not job.has_durable_dir:
        reason = (
            "no allowed world fits the hosts that stay, and there is no --durable-dir to save to: "
            "going on"
        )
        return _stay(job, reason)
    if target is not None and job.current is not None and target.is_same_as(job.current):
        return _stay(job, f"the change leaves the job as it is: {target.reason}")
    if job.phase is Phase.STARTING or not job.is_elastic:
        return _stop_workers(job, "the hosts changed")
    return _build(job, target)


def _stay(job: Job, reason: str) -> Result:
    """The job goes on as it is."""
    job, given_up = _without_ahead(job)
    phase = Phase.RUNNING if job.phase is Phase.BUILDING else job.phase
    awaited = frozenset[str]() if job.phase is Phase.BUILDING else job.awaited
    return replace(job, phase=phase, awaited=awaited), (*given_up, Say(reason))


def _build(job: Job, target: Assignment | None) -> Result:
    """Start the next round's workers beside the present ones; stop those once they have built, or
    at once where a host wants to leave."""
    if _is_built_for(job, target):
        return _prepare(job) if _leaving(job) else (job, ())
    job, given_up = _without_ahead(job)
    if target is None or not job.build_timeout_s:
        job, actions = _prepare(job)
        return job, (*given_up, *actions)
    ahead = Ahead(job.last_round + 1, target)
    job = replace(
        job,
        phase=Phase.BUILDING,
        awaited=frozenset(target.active),
        ahead=ahead,
        last_round=ahead.round,
        building_since=None,
    )
    job, actions = _prepare(job) if _leaving(job) else (job, ())
    return job, (*given_up, Build(ahead), *actions)


def _is_built_for(job: Job, target: Assignment | None) -> bool:
    """Whether the workers that build ahead are those of this assignment."""
    if job.ahead is None or target is None:
        return False
    its = job.ahead.assignment
    return target.is_same_as(its) and target.micro_batch_size == its.micro_batch_size


def _without_ahead(job: Job) -> Result:
    """Give up what was built ahead, if anything was."""
    if job.ahead is None:
        return job, ()
    return replace(job, ahead=None), (GiveUp(job.ahead.round),)


def _prepare(job: Job) -> Result:
    hosts, stop = active(job), job.newest + job.margin
    job = replace(job, phase=Phase.PREPARING, awaited=hosts, stop=stop)
    return job, (Prepare(_sorted(hosts), stop),)


def _stop_workers(job: Job, reason: str, *, has_deposited: bool = False) -> Result:
    hosts = active(job)
    job = replace(job, phase=Phase.STOPPING, awaited=hosts, margin=1)
    if not hosts:
        return _start_round(job)
    return job, (StopWorkers(_sorted(hosts), reason, has_deposited),)


def _fail(job: Job, reason: str) -> Result:
    """A failure, not a change: it counts against the restart budget.

    What was built ahead expected the state of the stop that does not come now.
    """
    is_free = job.was_built_ahead and job.phase is Phase.STARTING
    if job.failures_left <= 0 and not is_free:
        return _end(job, 1, f"{reason}; the restart budget (--max-restarts) is used up")
    job, given_up = _without_ahead(job)
    job = replace(job, failures_left=job.failures_left - (not is_free), was_built_ahead=False)
    job, actions = _stop_workers(job, reason)
    return job, (*given_up, Say(f"{reason}; {job.failures_left} restarts left"), *actions)


def _start_round(job: Job) -> Result:
    """No worker is alive: assign the next round, or wait, or save and leave."""
    target = _assignment(job)
    source = job.newest_generation
    step = source.step if source else 0
    if target is None and job.current is not None:
        job, given_up = _without_ahead(job)
        job, actions = _save(job)
        return job, (*given_up, *actions)
    if target is None or (job.has_state and source is None):
        job, given_up = _without_ahead(job)
        missing = " for hosts" if target is None else _NOT_WHOLE
        job = replace(job, phase=Phase.WAITING, awaited=frozenset())
        return job, (*given_up, Say(f"waiting{missing}: {len(job.hosts)} present"))
    reached = job.newest
    is_built = source is not None and _is_built_for(job, target)
    job, given_up = (job, ()) if is_built else _without_ahead(job)
    number = job.ahead.round if job.ahead else job.last_round + 1
    job = replace(
        job,
        phase=Phase.STARTING,
        round=number,
        last_round=max(number, job.last_round),
        ahead=None,
        was_built_ahead=is_built,
        current=target,
        awaited=frozenset(target.active),
        finished=frozenset(),
        uncommitted=frozenset(),
        changed_at=None,
        newest=step,
    )
    generation = source.number if source else None
    start = StartRound(job.round, target, generation, max(0, reached - step), is_built)
    return job, (*given_up, start)


def _save(job: Job) -> Result:
    """Nobody can go on: the newest generation goes to the durable directory, and the job ends
    resumable."""
    source = job.newest_generation
    if source is None or not job.has_durable_dir:
        if staying(job):
            return replace(job, phase=Phase.WAITING, awaited=frozenset()), (
                Say("waiting for more hosts"),
            )
        missing = "the newest generation is not whole" if source is None else "no --durable-dir"
        return _end(
            job,
            1,
            f"the last host leaves and there is nothing to save, or no place for it ({missing}); "
            "what the stores hold stays there: start the same job again",
        )
    hosts = source.hosts & frozenset(job.hosts)
    job = replace(job, phase=Phase.SAVING, awaited=hosts)
    return job, (SaveDurable(_sorted(hosts), source.number),)


def _end(job: Job, code: int, reason: str) -> Result:
    return replace(job, phase=Phase.ENDED, awaited=frozenset()), (
        Exit(_sorted(job.hosts), code, reason),
    )


def _answered(job: Job, host: str) -> Job:
    return replace(job, awaited=job.awaited - {host})


def _changed(job: Job, at: float) -> Result:
    """Something changed that settles: at once where nobody else can come, else at the first tick
    after it."""
    job = replace(job, changed_at=at)
    if job.phase in RESIZABLE and len(staying(job)) >= job.max_hosts:
        return _consider(job)
    return job, ()


# -------------------------------------------------------------------------------------- one rule an
# event


@singledispatch
def _on(event: Event, job: Job) -> Result:
    raise AssertionError(f"no rule for {event!r}")


@_on.register
def _host_joined(event: HostJoined, job: Job) -> Result:
    host = Host(event.host, event.slots, job.joined)
    job = replace(
        job,
        hosts={**job.hosts, event.host: host},
        joined=job.joined + 1,
        generations=event.covered,
        has_state=job.has_state or event.has_parts,
    )
    return _changed(job, event.at)


@_on.register
def _host_leaving(event: HostLeaving, job: Job) -> Result:
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
            return _consider(job)
        return _release_leaving(job) if job.phase in TRAINING else (job, ())
    return _consider(job) if job.phase in RESIZABLE else (job, ())


def _leave_while_waiting(job: Job, host: str) -> Result:
    """Nothing runs: let a host go unless the state may need it. Then it stays until its drain
    timeout, and its part stays in its store."""
    if not staying(job) and job.has_state:
        return _save(job)
    if not job.has_state:
        hosts = {name: kept for name, kept in job.hosts.items() if name != host}
        if not hosts:
            return _end(job, 0, "the last host left before the job had begun")
        return replace(job, hosts=hosts), (Release(job.round, None, (host,)),)
    return _consider(job)


def _release_leaving(job: Job) -> Result:
    """Let the leaving hosts go that run no workers."""
    leaving = _leaving(job) - active(job)
    hosts = {name: host for name, host in job.hosts.items() if name not in leaving}
    # Older generations stay while some host has yet to rename its part of the newest.
    source = None if job.uncommitted else job.newest_generation
    job = replace(job, hosts=hosts, generations=(source,) if source else job.generations)
    return job, (Release(job.round, source.number if source else None, _sorted(leaving)),)


@_on.register
def _host_lost(event: HostLost, job: Job) -> Result:
    if event.host not in job.hosts:
        return job, ()
    was_active = event.host in active(job)
    hosts = {name: host for name, host in job.hosts.items() if name != event.host}
    uncommitted = job.uncommitted - {event.host}
    job = replace(job, hosts=hosts, generations=event.covered, uncommitted=uncommitted)
    given_up: tuple[Action, ...] = ()
    if job.ahead is not None and event.host in job.ahead.assignment.active:
        job, given_up = _without_ahead(job)
    job, actions = _lost(job, event, was_active)
    return job, (*given_up, *actions)


def _lost(job: Job, event: HostLost, was_active: bool) -> Result:
    """Go on without a host that is gone already."""
    if job.phase is Phase.SAVING and event.host in job.awaited:
        return _end(job, 1, f"host {event.host} is lost before its part was saved")
    if was_active and job.phase in (*TRAINING, Phase.PREPARING, Phase.STARTING):
        return _fail(job, f"host {event.host} is lost")
    if job.phase is Phase.BUILDING:
        return _consider(job)
    if event.host in job.awaited and job.phase is Phase.DRAINING:
        return _drained(job, event.host)
    if event.host in job.awaited:
        return _next_phase(_answered(job, event.host))
    return _changed(job, event.at) if job.phase in RESIZABLE else (job, ())


@_on.register
def _slots_changed(event: SlotsChanged, job: Job) -> Result:
    if event.host not in job.hosts or job.hosts[event.host].slots == event.slots:
        return job, ()
    host = replace(job.hosts[event.host], slots=event.slots)
    return _changed(replace(job, hosts={**job.hosts, event.host: host}), event.at)


@_on.register
def _rescaled(event: Rescaled, job: Job) -> Result:
    job = replace(job, assign=event.assign, max_hosts=event.max_hosts or job.max_hosts)
    return _consider(job) if job.phase in RESIZABLE else (job, ())


@_on.register
def _ticked(event: Ticked, job: Job) -> Result:
    job = replace(job, newest=max(job.newest, event.newest))
    is_settled = job.changed_at is not None and event.at - job.changed_at >= job.settle_s
    if is_settled and job.phase in RESIZABLE:
        return _consider(job)
    if job.phase is not Phase.BUILDING:
        return job, ()
    since = event.at if job.building_since is None else job.building_since
    job = replace(job, building_since=since)
    if event.at - since > job.build_timeout_s:
        return _stop_unbuilt(job, f"not built within {job.build_timeout_s:.0f} s")
    return job, ()


@_on.register
def _built(event: Built, job: Job) -> Result:
    if job.phase is not Phase.BUILDING or job.ahead is None or event.round != job.ahead.round:
        return job, ()
    return _next_phase(_answered(job, event.host))


@_on.register
def _not_built(event: NotBuilt, job: Job) -> Result:
    if job.ahead is None or event.round != job.ahead.round:
        return job, ()
    return _stop_unbuilt(job, f"host {event.host}: {event.reason}")


def _stop_unbuilt(job: Job, reason: str) -> Result:
    """The next round's workers will start when the present ones have stopped."""
    job, given_up = _without_ahead(job)
    said = Say(f"the next workers are not built beside the present ones: {reason}")
    job, actions = _prepare(job) if job.phase is Phase.BUILDING else (job, ())
    return job, (*given_up, said, *actions)


@_on.register
def _prepared(event: Prepared, job: Job) -> Result:
    if job.phase is not Phase.PREPARING or event.stop != job.stop:
        return job, ()
    return _next_phase(replace(_answered(job, event.host), newest=max(job.newest, event.newest)))


@_on.register
def _deposited(event: Deposited, job: Job) -> Result:
    if job.phase is not Phase.DRAINING or event.round != job.round:
        return job, ()
    return _drained(job, event.host)


def _drained(job: Job, host: str) -> Result:
    """A host has deposited or is lost in a drain."""
    job = _answered(job, host)
    return (job, (Hurry(_sorted(job.awaited)),)) if job.awaited else _next_phase(job)


@_on.register
def _judged(event: Judged, job: Job) -> Result:
    if job.phase is not Phase.DRAINING:
        return job, ()
    if not event.is_covered:
        return _fail(job, "the deposits that survive do not cover the state")
    hosts = active(job)
    generation = Generation(event.number, event.step, event.hosts)
    job = replace(job, phase=Phase.COMMITTING, awaited=hosts, uncommitted=frozenset())
    job = _with_generation(job, generation)
    return job, (Commit(_sorted(hosts), generation.number),)


@_on.register
def _snapshotted(event: Snapshotted, job: Job) -> Result:
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
def _committed(event: Committed, job: Job) -> Result:
    if event.generation != job.committing:
        return job, ()
    if job.phase is Phase.COMMITTING:
        return _next_phase(_answered(job, event.host))
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
def _stopped(event: Stopped, job: Job) -> Result:
    if job.phase is not Phase.STOPPING or event.round != job.round:
        return job, ()
    return _next_phase(replace(_answered(job, event.host), newest=max(job.newest, event.newest)))


@_on.register
def _workers_failed(event: WorkersFailed, job: Job) -> Result:
    if event.round != job.round or job.phase not in FALLIBLE:
        return job, ()
    return _fail(job, f"workers of host {event.host} failed: {event.reason}")


@_on.register
def _stepped(event: Stepped, job: Job) -> Result:
    if job.phase is not Phase.STARTING or event.round != job.round:
        return job, ()
    return _next_phase(_answered(job, event.host))


@_on.register
def _finished(event: Finished, job: Job) -> Result:
    if event.round != job.round:
        return job, ()
    job = replace(job, finished=job.finished | {event.host})
    return _end(job, 0, "finished") if job.finished >= active(job) else (job, ())


@_on.register
def _saved(event: Saved, job: Job) -> Result:
    if job.phase is not Phase.SAVING:
        return job, ()
    return _next_phase(_answered(job, event.host))


@_on.register
def _not_saved(event: NotSaved, job: Job) -> Result:
    if job.phase is not Phase.SAVING:
        return job, ()
    return _end(job, 1, f"host {event.host} could not save its part: {event.reason}")


def _next_phase(job: Job) -> Result:
    """Go on once no host's answer is awaited any more."""
    if job.awaited:
        return job, ()
    if job.phase is Phase.BUILDING:
        return _prepare(job)
    if job.phase is Phase.PREPARING:
        hosts = _sorted(active(job))
        if job.newest < job.stop:
            job = replace(job, phase=Phase.DRAINING, awaited=frozenset(hosts), margin=1)
            return job, (Agree(hosts, job.stop),)
        job, actions = _prepare(replace(job, margin=2 * job.margin))
        return job, (Withdraw(hosts), *actions)
    if job.phase is Phase.DRAINING:
        return job, (Judge(_sorted(active(job))),)
    if job.phase is Phase.COMMITTING:
        return _stop_workers(job, "the state is committed", has_deposited=True)
    if job.phase is Phase.STOPPING:
        return _start_round(job)
    if job.phase is Phase.SAVING:
        return _end(job, 75, "saved to the durable directory; the same command resumes from there")
    assert job.phase is Phase.STARTING, job.phase
    return _release_leaving(replace(job, phase=Phase.RUNNING))
