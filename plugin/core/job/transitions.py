"""Transitions of a job between its phases: from a job to the next one and its actions. Their causes
are in ``resize``. Nothing here waits, sends or reads a clock."""

from collections.abc import Iterable
from dataclasses import replace

from scalai.core.dataset.ledger import MOST_LOST, Lost
from scalai.core.exit_codes import RESUMABLE
from scalai.core.job import proof_rules, respacing
from scalai.core.job.archiving import lose
from scalai.core.job.assigning import next_assignment
from scalai.core.job.deadlines import CHECKED_S, LONGEST_BACKOFF_S
from scalai.core.job.membership import (
    RESIZABLE,
    Assignment,
    Attempt,
    Job,
    Phase,
    StandbyRound,
    active,
    forget_sealed,
    leaving,
    present,
    staying,
)
from scalai.core.job.replicating import give_up, needs_older, release_older, without
from scalai.core.messages import commands
from scalai.core.messages.actions import (
    Action,
    BuildRound,
    EndJob,
    GoBack,
    JudgeRescue,
    JudgeSnapshot,
    JudgeStop,
    Release,
    Say,
    Send,
    StartRound,
)

Result = tuple[Job, tuple[Action, ...]]

UNHOOKED = (
    "nothing hooks the script's own training loop, so it would begin from zero. Call "
    "scalai.elastic() in it (README.md), or run it without --elastic"
)

_NOT_WHOLE = (
    "for the hosts whose stores hold the newest generation (if their memory is lost: stop the "
    "job, run scalai clean on every host, and start it again from the script's own checkpoint)"
)


NOT_BEGUN = (
    "the last host leaves before the job has begun; what the stores hold stays there: start the "
    "same job again"
)


def consider(job: Job) -> Result:
    """Begin a resize if the present hosts need another assignment."""
    if job.takeover.pending is not None:
        return replace(job, change=replace(job.change, at=job.now)), ()
    job = replace(job, change=replace(job.change, at=None, again_at=None))
    if job.phase is Phase.WAITING:
        return _start_round(job)
    if not job.attempt.is_hooked:
        return _stay(job, f"the change is not made: {UNHOOKED}")
    target = next_assignment(job)
    if target is None and staying(job) and not job.settings.has_durable_dir:
        reason = (
            "no allowed world fits the hosts that stay, and there is no --durable-dir to save to: "
            "going on"
        )
        return _stay(job, reason)
    if target is not None and runs_as_requested(job):
        return _stay(job, f"the change leaves the job as it is: {target.reason}")
    if job.phase is Phase.STARTING or not job.settings.is_elastic:
        return stop_workers(job, "the hosts changed")
    return _build(job, target)


def runs_as_requested(job: Job) -> bool:
    """Whether the present hosts keep their assignment."""
    target = next_assignment(job)
    return target is not None and job.current is not None and target.is_same_as(job.current)


def call_off(job: Job) -> Result:
    """Withdraw a proposed stop: its change is no longer requested."""
    hosts = active(job)
    job, given_up = without_standby(job)
    # Answers to this stop may still arrive: the next one is another.
    newest = max(job.newest, job.stop.step)
    stop, change = replace(job.stop, held={}, margin=1), replace(job.change, at=None)
    job = replace(
        job, phase=Phase.RUNNING, awaited=frozenset(), newest=newest, stop=stop, change=change
    )
    message = Say(f"the stop at step {job.stop.step} is called off: the job is to run as it does")
    job, released = release_leaving(job) if leaving(job) - hosts else (job, ())
    return job, (withdrawn(job, hosts), *given_up, message, *released)


def changed(job: Job, at: float) -> Result:
    """Make a change at once if no other host can come, else at the first tick after
    ``settle_s``."""
    job = replace(job, change=replace(job.change, at=at))
    if job.phase not in RESIZABLE or len(job.hosts) < job.settings.max_hosts:
        return job, ()
    return consider(job) if len(staying(job)) >= job.settings.max_hosts else (job, ())


def _stay(job: Job, reason: str) -> Result:
    """The job goes on as it is."""
    job, given_up = without_standby(job)
    phase = Phase.RUNNING if job.phase is Phase.BUILDING else job.phase
    awaited = frozenset[str]() if job.phase is Phase.BUILDING else job.awaited
    return replace(job, phase=phase, awaited=awaited), (*given_up, Say(reason))


def _build(job: Job, target: Assignment | None) -> Result:
    """Start the next round's workers beside the present ones; these stop once the new ones have
    built, or at once for a leaving host."""
    if _is_built_for(job, target):
        return prepare(job) if leaving(job) else (job, ())
    job, given_up = without_standby(job)
    if target is None or not job.settings.build_timeout_s:
        job, actions = prepare(job)
        return job, (*given_up, *actions)
    standby = StandbyRound(job.change.last_round + 1, target)
    change = replace(job.change, standby=standby, last_round=standby.round)
    awaited = frozenset(target.active)
    job = replace(respacing.built(job), phase=Phase.BUILDING, awaited=awaited, change=change)
    job, actions = prepare(job) if leaving(job) else (job, ())
    return job, (*given_up, BuildRound(standby, job.spacing.every), *actions)


def _is_built_for(job: Job, target: Assignment | None) -> bool:
    if job.change.standby is None or target is None:
        return False
    return target.is_same_as(job.change.standby.assignment)


def stop_unbuilt(job: Job, reason: str) -> Result:
    """Stop first: the next round's workers start after the present ones."""
    job, given_up = without_standby(job)
    message = Say(f"the next workers are not built beside the present ones: {reason}")
    job, actions = prepare(job) if job.phase is Phase.BUILDING else (job, ())
    return job, (*given_up, message, *actions)


def without_standby(job: Job) -> Result:
    """Give up the standby round, if there is one."""
    if job.change.standby is None:
        return job, ()
    given_up = commands.GiveUp(job.change.standby.round)
    return replace(job, change=replace(job.change, standby=None)), (
        Send(tuple(sorted(job.hosts)), given_up),
    )


def prepare(job: Job) -> Result:
    """Propose a stop, a margin beyond the furthest known step."""
    hosts, stop = active(job), job.newest + job.stop.margin
    job = replace(
        job, phase=Phase.PREPARING, awaited=hosts, stop=replace(job.stop, step=stop, held={})
    )
    return job, (Send(tuple(sorted(hosts)), commands.Prepare(job.round, stop)),)


def stop_workers(job: Job, reason: str, *, has_written: bool = False) -> Result:
    """End the workers of the round. ``has_written``: they leave by themselves."""
    hosts = active(job)
    job = replace(
        job,
        phase=Phase.STOPPING,
        awaited=hosts,
        stop=replace(job.stop, margin=1, held={}),
        failure=None,
    )
    if not hosts:
        return _start_round(job)
    return job, (
        Say(f"event=stop_workers reason={reason!r}"),
        Send(tuple(sorted(hosts)), commands.Stop(job.round, has_written)),
    )


def rescue(job: Job) -> Result:
    """Command the furthest step of standing workers to be written, if it is beyond the newest
    generation."""
    assert job.emergency is not None
    hosts, newest = active(job), job.newest_generation
    steps = {step for step in job.emergency.steps if newest is None or step > newest.step}
    if not steps or not hosts:
        return go_on(job)
    step = max(steps)
    left = replace(job.emergency, steps=frozenset(steps - {step}), step=step)
    job = replace(job, phase=Phase.RESCUING, awaited=hosts, failure=left)
    return job, (Send(tuple(sorted(hosts)), commands.Rescue(job.round, step)),)


def go_on(job: Job) -> Result:
    """Stop the workers after a failure, without further writes; the job begins its next round, or
    ends."""
    assert job.emergency is not None
    if job.emergency.ending:
        return end(replace(job, failure=None), 1, job.emergency.ending)
    return stop_workers(job, job.emergency.reason)


def withdrawn(job: Job, hosts: Iterable[str]) -> Send:
    """Have hosts forget the stop, proposed or agreed."""
    return Send(tuple(sorted(hosts)), commands.Withdraw(job.round))


def show_stacks(hosts: Iterable[str]) -> tuple[Action, ...]:
    """Have the workers of awaited hosts log their stacks."""
    awaited = tuple(sorted(hosts))
    return (Send(awaited, commands.LogStacks()),) if awaited else ()


def withdraw(job: Job, reason: str) -> Result:
    """Withdraw an agreed stop: nobody has written, and waiting workers go on. The change is
    retried, later each time."""
    hosts, slow = active(job), job.awaited & active(job)
    job, given_up = without_standby(job)
    later_s = min(
        job.settings.drain_timeout_s * 2.0 ** min(job.change.withdrawn, 20), LONGEST_BACKOFF_S
    )
    change = replace(job.change, withdrawn=job.change.withdrawn + 1, again_at=job.now + later_s)
    job = replace(
        proof_rules.without_proof(job), phase=Phase.RUNNING, awaited=frozenset(), change=change
    )
    text = (
        f"event=withdrawn {reason}: training goes on, and the change is tried again after "
        f"{later_s:.0f} s or when the hosts or the request change"
    )
    return job, (withdrawn(job, hosts), *given_up, Say(text), *show_stacks(slow))


def _start_round(job: Job) -> Result:
    """Assign the next round, or wait, or save and leave: no worker is alive."""
    if job.change.standby is None and is_being_checked(job):
        return _wait(replace(job, change=replace(job.change, again_at=job.now + CHECKED_S)))
    target = next_assignment(job)
    source = job.newest_generation
    step = source.step if source else 0
    if target is None and _unfit(job):
        return _wait(job)
    if target is None and job.current is not None:
        job, given_up = without_standby(job)
        job, actions = save(job)
        return job, (*given_up, *actions)
    is_held_back = job.phase is Phase.WAITING and job.states.is_held_back
    if target is None or is_held_back or (job.states.has_state and source is None):
        return _wait(job)
    reached = job.newest
    job = proof_rules.started(job, is_from_stop=step == job.stop.step)
    is_built = source is not None and _is_built_for(job, target)
    job, given_up = (job, ()) if is_built else without_standby(job)
    number = job.change.standby.round if job.change.standby else job.change.last_round + 1
    lost = (Lost(str(job.round), step, reached),) if reached > step else ()
    is_same = job.current is not None and target.is_same_as(job.current)
    last_round = max(number, job.change.last_round)
    job = give_up(respacing.started(job, is_built=is_built))
    job = replace(
        job,
        phase=Phase.STARTING,
        awaited=frozenset(target.active),
        round=number,
        current=target,
        newest=step,
        attempt=Attempt(source.number if source else None, was_standby=is_built),
        change=replace(job.change, at=None, standby=None, last_round=last_round),
        budget=job.budget if is_same else replace(job.budget, tries=0),
        states=replace(
            job.states,
            uncommitted=frozenset(),
            sealed={},
            has_lost_all=False,
            lost=(*job.states.lost, *lost)[-MOST_LOST:],
        ),
    )
    return job, (*given_up, *_starts(job, target, max(0, reached - step), is_built=is_built))


def _starts(job: Job, target: Assignment, steps_lost: int, *, is_built: bool) -> tuple[Action, ...]:
    """Actions at the start of a round: all hosts drop the remains of the earlier round, and
    generations newer than the source."""
    everyone, source = tuple(sorted(job.hosts)), job.attempt.source
    message = Say(f"event=round {target.reason!r} generation={source}")
    lost = [Say(f"event=went_back steps_lost={steps_lost}")] if steps_lost else []
    every = job.spacing.told
    proves = job.function.asked is not None
    start = StartRound(
        job.round, target, source, steps_lost, is_built, every, job.states.lost, proves
    )
    return (message, Send(everyone, commands.Discard()), GoBack(everyone, source), *lost, start)


def _unfit(job: Job) -> list[str]:
    """Staying hosts that have yet to pass their health check."""
    return sorted(job.health.checks.keys() & job.hosts.keys() - leaving(job))


def is_being_checked(job: Job) -> bool:
    """Whether a host of the coming round has just been asked for its health: its answer is worth a
    moment. A training job does not wait for a joining host."""
    expected = job.current.members if job.current else job.hosts.keys()
    asked = [job.health.checks[host] for host in _unfit(job) if host in expected]
    return any(c.is_asked and not c.failures and job.now - c.since < CHECKED_S for c in asked)


def _wait(job: Job) -> Result:
    """Wait for more hosts, or for the missing parts of the newest state."""
    job, looked = _look(job)
    job, given_up = without_standby(job)
    job = replace(job, phase=Phase.WAITING, awaited=frozenset())
    return job, (*given_up, Say(missing(job)), *looked)


def _look(job: Job) -> Result:
    """Ask hosts for the contents of their disks: no state in memory is whole any more, and the job
    begins to wait. At a start the agents have just reported them."""
    is_lost = job.settings.has_durable_dir and job.states.has_state and not job.states.generations
    if job.phase is Phase.WAITING or not is_lost or not job.hosts:
        return job, ()
    hosts = tuple(sorted(job.hosts))
    return replace(job, states=replace(job.states, looking=frozenset(hosts))), (
        Send(hosts, commands.Look()),
    )


def missing(job: Job) -> str:
    """Text of the reason without a next round."""
    hosts = staying(job)
    fits = bool(hosts) and job.settings.assign(hosts, present(job)) is not None
    found = job.states.obstacle or _NOT_WHOLE
    if not fits:
        why = job.settings.why_not(hosts, present(job))
        found = f"for hosts: {why}" if why else "for hosts"
    checked = [
        f"; host {host} "
        + (f"fails its health check: {check.reason}" if check.reason else "runs its health check")
        for host, check in ((host, job.health.checks[host]) for host in _unfit(job))
    ]
    return f"waiting, {len(job.hosts)} hosts present, {found}{''.join(checked)}"


def save(job: Job) -> Result:
    """Save the newest generation in the durable directory and end resumable: no host can go on.
    Without a host that asked to leave, the last one was lost: the job waits for others."""
    source = None if job.states.is_held_back else job.newest_generation
    if not job.hosts or source is None or not job.settings.has_durable_dir:
        if staying(job) or _unfit(job) or not leaving(job):
            job, looked = _look(job)
            job = replace(job, phase=Phase.WAITING, awaited=frozenset())
            return job, (Say("waiting for more hosts"), *looked)
        if not job.round or _has_made_nothing(job):
            return end(job, RESUMABLE, NOT_BEGUN)
        missing = (
            "no whole generation is there"
            if source is None
            else "set --durable-dir to have it saved"
        )
        return end(
            job,
            1,
            f"the last host leaves and the state is not saved: {missing}. What the stores hold "
            "stays there: start the same job again",
        )
    hosts = source.hosts & frozenset(job.hosts)
    job = replace(job, phase=Phase.SAVING, awaited=hosts)
    return job, (Send(tuple(sorted(hosts)), commands.Save(source.number)),)


def _has_made_nothing(job: Job) -> bool:
    """Whether no host keeps any step: a new beginning loses nothing."""
    return (
        job.settings.is_elastic
        and job.attempt.is_hooked
        and not (job.states.has_state or job.newest)
    )


def end(job: Job, code: int, reason: str) -> Result:
    """End every agent with this exit code."""
    return replace(job, phase=Phase.ENDED, awaited=frozenset()), (
        EndJob(tuple(sorted(job.hosts)), code, reason),
    )


def release_leaving(job: Job) -> Result:
    """Release leaving hosts without workers."""
    released = leaving(job) - active(job)
    hosts = {name: host for name, host in job.hosts.items() if name not in released}
    job = lose(without(replace(job, hosts=hosts), released), released)
    # Older generations stay until every host has renamed its part of the newest, and made its
    # replicas.
    source = None if job.states.uncommitted or needs_older(job) else job.newest_generation
    job = replace(
        job, states=replace(job.states, generations=(source,) if source else job.states.generations)
    )
    return job, (Release(job.round, source.number if source else None, tuple(sorted(released))),)


def answered(job: Job, host: str) -> Job:
    """The job without this awaited host."""
    return replace(job, awaited=job.awaited - {host})


def next_phase(job: Job) -> Result:
    """Go on once no answer is awaited."""
    if job.awaited:
        return job, ()
    if job.phase is Phase.BUILDING:
        return prepare(job)
    if job.phase is Phase.PREPARING:
        hosts = tuple(sorted(active(job)))
        if job.newest < job.stop.step:
            job, waited = prove_no_more(job, "a further change has begun")
            job, judged = judge_sealed(job)
            job = replace(
                job,
                phase=Phase.DRAINING,
                awaited=frozenset(hosts),
                stop=replace(job.stop, margin=1, held={}),
            )
            # Two generations leave no room for the snapshot at the stop.
            job, room = release_older(job) if len(job.states.generations) > 1 else (job, ())
            job = proof_rules.agreed(job)
            agreed = commands.Agree(job.round, job.stop.step, job.function.asked is not None)
            return job, (*waited, *judged, *room, Send(hosts, agreed))
        job, actions = prepare(replace(job, stop=replace(job.stop, margin=2 * job.stop.margin)))
        return job, (withdrawn(job, hosts), *actions)
    if job.phase is Phase.DRAINING and active(job):
        hosts = tuple(sorted(active(job)))
        return replace(job, phase=Phase.SNAPSHOTTING, awaited=frozenset(hosts)), (
            Send(hosts, commands.TakeSnapshot(job.round)),
        )
    if job.phase in (Phase.DRAINING, Phase.SNAPSHOTTING):
        # A returned host may have brought sealed parts.
        hosts = tuple(sorted(set(job.current.active if job.current else ()) & set(job.hosts)))
        return replace(job, phase=Phase.SNAPSHOTTING), (JudgeStop(hosts),)
    if job.phase is Phase.FREEZING:
        return rescue(job)
    if job.phase is Phase.RESCUING:
        assert job.emergency is not None and job.emergency.step is not None
        return job, (JudgeRescue(job.emergency.step),)
    if job.phase is Phase.COMMITTING:
        if job.emergency is not None:
            return go_on(job)
        return stop_workers(job, "the state is committed", has_written=True)
    if job.phase is Phase.STOPPING:
        return _start_round(job)
    if job.phase is Phase.SAVING:
        at = "" if job.newest_generation is None else f" at step {job.newest_generation.step}"
        saved = f"saved to the durable directory{at}; the same command resumes from there"
        return end(job, RESUMABLE, saved)
    assert job.phase is Phase.STARTING, job.phase
    # Until the function is judged, the job may still go back.
    ran = job.change.ran if job.function.is_waiting else job.current
    change = replace(job.change, withdrawn=0, ran=ran)
    budget = replace(job.budget, tries=0, stepped_at=None, was_start_killed=False)
    return release_leaving(replace(job, phase=Phase.RUNNING, budget=budget, change=change))


def prove_no_more(job: Job, why: str) -> Result:
    """End a wait for the old workers' numbers."""
    if not job.function.is_waiting:
        return job, ()
    job, lines = proof_rules.unproven(job, f"{why} before the old workers had told of their step")
    return replace(job, change=replace(job.change, ran=job.current)), lines


def stand(job: Job) -> Result:
    """Confirm the change of the present round, with its sealed snapshots."""
    return judge_sealed(replace(job, change=replace(job.change, ran=job.current)))


def judge_sealed(job: Job, reason: str = "snapshot") -> Result:
    """Judge snapshots on the way with answers of every host with workers."""
    due = [
        name
        for name in sorted(job.states.sealed, key=step_of)
        if job.states.sealed[name] >= active(job)
    ]
    for name in due:
        job = forget_sealed(job, name)
    return job, tuple(JudgeSnapshot(reason, name) for name in due)


def step_of(snapshot: str) -> int:
    """Step in the name of a snapshot."""
    return int(snapshot.rpartition("-")[2])
