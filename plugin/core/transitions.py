"""The transitions that a job makes between its phases: each takes a job and returns the next one
and what must be done.

What leads to them is in ``resize``. Nothing here waits, sends or reads a clock.
"""

from dataclasses import replace

from scalai.core.actions import (
    Action,
    Agree,
    Build,
    Exit,
    GiveUp,
    Judge,
    Prepare,
    Release,
    SaveDurable,
    Say,
    StartRound,
    StopWorkers,
    Withdraw,
)
from scalai.core.membership import (
    RESIZABLE,
    Ahead,
    Assignment,
    Job,
    Phase,
    active,
    leaving,
    next_assignment,
    staying,
)

Result = tuple[Job, tuple[Action, ...]]

_NOT_WHOLE = (
    " for the hosts whose stores hold the newest generation (if their memory is lost: stop the "
    "job, run scalai clean on every host, and start it again from the script's own checkpoint)"
)


def consider(job: Job) -> Result:
    """Begin a resize if the hosts now present would be assigned otherwise than they are."""
    job = replace(job, changed_at=None)
    if job.phase is Phase.WAITING:
        return _start_round(job)
    target = next_assignment(job)
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


def changed(job: Job, at: float) -> Result:
    """Something changed that settles: at once where nobody else can come, else at the first tick
    after it."""
    job = replace(job, changed_at=at)
    if job.phase in RESIZABLE and len(staying(job)) >= job.max_hosts:
        return consider(job)
    return job, ()


def _stay(job: Job, reason: str) -> Result:
    """The job goes on as it is."""
    job, given_up = without_ahead(job)
    phase = Phase.RUNNING if job.phase is Phase.BUILDING else job.phase
    awaited = frozenset[str]() if job.phase is Phase.BUILDING else job.awaited
    return replace(job, phase=phase, awaited=awaited), (*given_up, Say(reason))


def _build(job: Job, target: Assignment | None) -> Result:
    """Start the next round's workers beside the present ones; stop those once they have built, or
    at once where a host wants to leave."""
    if _is_built_for(job, target):
        return prepare(job) if leaving(job) else (job, ())
    job, given_up = without_ahead(job)
    if target is None or not job.build_timeout_s:
        job, actions = prepare(job)
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
    job, actions = prepare(job) if leaving(job) else (job, ())
    return job, (*given_up, Build(ahead), *actions)


def _is_built_for(job: Job, target: Assignment | None) -> bool:
    """Whether the workers that build ahead are those of this assignment."""
    if job.ahead is None or target is None:
        return False
    its = job.ahead.assignment
    return target.is_same_as(its) and target.micro_batch_size == its.micro_batch_size


def without_ahead(job: Job) -> Result:
    """Give up what was built ahead, if anything was."""
    if job.ahead is None:
        return job, ()
    return replace(job, ahead=None), (GiveUp(job.ahead.round),)


def prepare(job: Job) -> Result:
    """Propose a stop, a margin beyond the furthest step that is known."""
    hosts, stop = active(job), job.newest + job.margin
    job = replace(job, phase=Phase.PREPARING, awaited=hosts, stop=stop)
    return job, (Prepare(tuple(sorted(hosts)), stop),)


def _stop_workers(job: Job, reason: str, *, has_deposited: bool = False) -> Result:
    hosts = active(job)
    job = replace(job, phase=Phase.STOPPING, awaited=hosts, margin=1)
    if not hosts:
        return _start_round(job)
    return job, (StopWorkers(tuple(sorted(hosts)), reason, has_deposited),)


def fail(job: Job, reason: str) -> Result:
    """A failure, not a change: it counts against the restart budget.

    What was built ahead expected the state of the stop that does not come now.
    """
    is_free = job.was_built_ahead and job.phase is Phase.STARTING
    if job.failures_left <= 0 and not is_free:
        return end(job, 1, f"{reason}; the restart budget (--max-restarts) is used up")
    job, given_up = without_ahead(job)
    job = replace(job, failures_left=job.failures_left - (not is_free), was_built_ahead=False)
    job, actions = _stop_workers(job, reason)
    return job, (*given_up, Say(f"{reason}; {job.failures_left} restarts left"), *actions)


def _start_round(job: Job) -> Result:
    """No worker is alive: assign the next round, or wait, or save and leave."""
    target = next_assignment(job)
    source = job.newest_generation
    step = source.step if source else 0
    if target is None and job.current is not None:
        job, given_up = without_ahead(job)
        job, actions = save(job)
        return job, (*given_up, *actions)
    if target is None or (job.has_state and source is None):
        job, given_up = without_ahead(job)
        missing = " for hosts" if target is None else _NOT_WHOLE
        job = replace(job, phase=Phase.WAITING, awaited=frozenset())
        return job, (*given_up, Say(f"waiting{missing}: {len(job.hosts)} present"))
    reached = job.newest
    is_built = source is not None and _is_built_for(job, target)
    job, given_up = (job, ()) if is_built else without_ahead(job)
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


def save(job: Job) -> Result:
    """Nobody can go on: the newest generation goes to the durable directory, and the job ends
    resumable."""
    source = job.newest_generation
    if source is None or not job.has_durable_dir:
        if staying(job):
            return replace(job, phase=Phase.WAITING, awaited=frozenset()), (
                Say("waiting for more hosts"),
            )
        missing = "the newest generation is not whole" if source is None else "no --durable-dir"
        return end(
            job,
            1,
            f"the last host leaves and there is nothing to save, or no place for it ({missing}); "
            "what the stores hold stays there: start the same job again",
        )
    hosts = source.hosts & frozenset(job.hosts)
    job = replace(job, phase=Phase.SAVING, awaited=hosts)
    return job, (SaveDurable(tuple(sorted(hosts)), source.number),)


def end(job: Job, code: int, reason: str) -> Result:
    """Every agent ends with this exit code."""
    return replace(job, phase=Phase.ENDED, awaited=frozenset()), (
        Exit(tuple(sorted(job.hosts)), code, reason),
    )


def release_leaving(job: Job) -> Result:
    """Let the leaving hosts go that run no workers."""
    released = leaving(job) - active(job)
    hosts = {name: host for name, host in job.hosts.items() if name not in released}
    # Older generations stay while some host has yet to rename its part of the newest.
    source = None if job.uncommitted else job.newest_generation
    job = replace(job, hosts=hosts, generations=(source,) if source else job.generations)
    return job, (Release(job.round, source.number if source else None, tuple(sorted(released))),)


def answered(job: Job, host: str) -> Job:
    """This host's answer, or its loss, is awaited no more."""
    return replace(job, awaited=job.awaited - {host})


def next_phase(job: Job) -> Result:
    """Go on once no host's answer is awaited any more."""
    if job.awaited:
        return job, ()
    if job.phase is Phase.BUILDING:
        return prepare(job)
    if job.phase is Phase.PREPARING:
        hosts = tuple(sorted(active(job)))
        if job.newest < job.stop:
            job = replace(job, phase=Phase.DRAINING, awaited=frozenset(hosts), margin=1)
            return job, (Agree(hosts, job.stop),)
        job, actions = prepare(replace(job, margin=2 * job.margin))
        return job, (Withdraw(hosts), *actions)
    if job.phase is Phase.DRAINING:
        return job, (Judge(tuple(sorted(active(job)))),)
    if job.phase is Phase.COMMITTING:
        return _stop_workers(job, "the state is committed", has_deposited=True)
    if job.phase is Phase.STOPPING:
        return _start_round(job)
    if job.phase is Phase.SAVING:
        return end(job, 75, "saved to the durable directory; the same command resumes from there")
    assert job.phase is Phase.STARTING, job.phase
    return release_leaving(replace(job, phase=Phase.RUNNING))
