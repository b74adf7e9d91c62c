"""The rules of membership: ``advance(job, event)`` returns the next state of the job and the
actions.

Nothing here waits, sends or reads a clock. Every rule keeps one promise: a committed generation
stays until a newer one is committed and, after a resize, until every new rank has stepped.
"""

from dataclasses import replace
from functools import singledispatch

from scalai.core.exit_codes import RESUMABLE
from scalai.core.job import (
    archiving,
    commits,
    failures,
    health,
    hearing,
    preemption,
    proof_rules,
    replicating,
    respacing,
    starting,
    succession,
)
from scalai.core.job.deadlines import clock_of
from scalai.core.job.endings import WRONG_RESULT
from scalai.core.job.failures import excuse, fail
from scalai.core.job.health import joined_anew, pardon, strike
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
from scalai.core.job.overdue import hung, overdue
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
    withdrawn,
    without_standby,
)
from scalai.core.messages import commands, events, reports
from scalai.core.messages.actions import Action, CommitParts, Release, Say, Send

REFILL_S = 3600.0
"""Training progress that earns one failure back, in seconds, in a job without its own budget."""


def advance(job: Job, event: events.Event) -> Result:
    """The job after ``event``, and the coordinator's actions in order."""
    if job.phase is Phase.ENDED:
        return job, ()
    after, due = _on(event, job)
    after = preemption.measured(job, after)
    return (after if clock_of(after) == clock_of(job) else replace(after, wait=Wait())), due


@singledispatch
def _on(event: events.Event, job: Job) -> Result:
    raise AssertionError(f"no rule for {event!r}")


@_on.register
def _reported(event: events.Reported, job: Job) -> Result:
    return _heard(event.report, event.host, job)


@singledispatch
def _heard(report: object, host: str, job: Job) -> Result:
    raise AssertionError(f"no rule for {report!r}")


@_on.register
def _host_joined(event: events.HostJoined, job: Job) -> Result:
    before, is_replaced = job, event.host in job.hosts
    host = Host(event.host, event.slots, job.health.joined, has_check=event.has_check)
    job = hearing.forget(joined_anew(job, event.host), event.host)
    states = replace(
        job.states,
        generations=event.covered,
        has_state=job.states.has_state or event.has_parts,
        looking=job.states.looking - {event.host},  # it has looked before it joined
    )
    joined = replace(job.health, joined=job.health.joined + 1)
    job = replace(job, hosts={**job.hosts, event.host: host}, health=joined, states=states)
    asked: tuple[Action, ...] = ()
    if event.underway is None:  # else it has passed, and runs workers
        job, asked = health.joined(job, event.host)
    brought = (*asked, *_brought(event))
    if not is_replaced or job.takeover.pending is not None:
        job, actions = succession.joined(event, job)
        return job, (*brought, *actions)
    # Its parts count before the loss of its predecessor is judged.
    job = replace(job, change=replace(job.change, at=event.at))
    job, actions = _workers_gone(before, job, event.host, event.at)
    return job, (*brought, *actions)


def _brought(event: events.HostJoined) -> tuple[Action, ...]:
    """Actions for a host's parts, before a round begins and drops sealed ones."""
    dropped = (Send((event.host,), commands.Drop(number)) for number in event.obsolete)
    return (*dropped, *(CommitParts(hosts, number) for number, hosts in event.sealed))


@_on.register
def _host_leaving(event: events.HostLeaving, job: Job) -> Result:
    if event.host not in job.hosts or preemption.is_known(event, job):
        return job, ()
    job, first = preemption.noticed(event, job)
    job, actions = _leave(job, event)
    return job, (*first, *actions)


def _leave(job: Job, event: events.HostLeaving) -> Result:
    """Begin the drain of a leaving host."""
    if job.takeover.pending is not None:
        return job, ()
    if job.phase is Phase.WAITING:
        return _leave_while_waiting(job, event.host)
    if event.host not in active(job) and job.phase in RESIZABLE:
        # In a start it serves its store until every rank has stepped; in a running job the hosts
        # with workers hold everything.
        if job.change.standby is not None and event.host in job.change.standby.assignment.active:
            return consider(job)
        return release_leaving(job) if job.phase in TRAINING else (job, ())
    return _consider_soon(job, event.at)


def _consider_soon(job: Job, at: float) -> Result:
    """Consider a change at once; during a stop, at the first tick after it or its withdrawal. A
    stop that waits for a save and is no longer needed is withdrawn now."""
    if job.phase in RESIZABLE:
        return consider(job)
    if job.phase is Phase.PREPARING and job.stop.held and runs_as_requested(job):
        return call_off(job)
    return replace(job, change=replace(job.change, at=at)), ()


@_heard.register
def _host_staying(report: reports.Staying, host: str, job: Job) -> Result:
    """Withdraw a stop without writers if the job already runs as it should; else the next round has
    the host again."""
    if host not in job.hosts or not job.hosts[host].is_leaving:
        return job, ()
    job = preemption.taken_back(job, host)
    has_all = job.current is not None and active(job) == job.current.members
    if job.phase in (Phase.PREPARING, Phase.DRAINING) and has_all and runs_as_requested(job):
        return call_off(job)
    return _consider_soon(job, job.now)


def _leave_while_waiting(job: Job, host: str) -> Result:
    """Release a host while nothing runs, unless the state may need it. Then it stays until its
    drain timeout, and its part stays in its store."""
    if not staying(job) and job.states.has_state:
        return save(job)
    if not job.states.has_state:
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
    after = replace(job, hosts=hosts, states=replace(job.states, generations=event.covered))
    return _workers_gone(job, after, event.host, event.at)


def _workers_gone(before: Job, job: Job, host: str, at: float) -> Result:
    """Handle the loss of a host's agent and workers."""
    job = replace(
        job,
        attempt=replace(job.attempt, gone=job.attempt.gone | {host}),
        states=replace(job.states, uncommitted=job.states.uncommitted - {host}),
        now=at,
    )
    job, lines = strike(hearing.forget(job, host), [host])
    job, excused = excuse(job, f"host {host} is lost")
    lines, job = (*lines, *excused), archiving.lose(replicating.give_up(job), [host])
    given_up: tuple[Action, ...] = ()
    if job.change.standby is not None and host in job.change.standby.assignment.active:
        job, given_up = without_standby(job)
    is_full = len(before.states.generations) > 1 and job.phase in (
        Phase.DRAINING,
        Phase.SNAPSHOTTING,
    )
    job, room = _make_room(job, host) if is_full else (job, ())
    if job.phase is not before.phase:
        return job, (*lines, *given_up, *room)
    job, actions = _without_workers(job, host, at, host in active(before))
    return job, (*lines, *given_up, *room, *actions)


def _make_room(job: Job, host: str) -> Result:
    """Handle a loss during a stop while others have two generations and no room for the snapshot.

    If the lost host was the last to rename its part, the newer generation is whole without it; else
    the stop fails, because no store may release either.
    """
    newest = job.newest_generation
    if newest is None or newest.number != job.states.committing:
        reason = (
            f"host {host} is lost, without which generation {job.states.committing} is not whole; "
            "the others have no room for another snapshot"
        )
        return fail(job, reason, is_loss=True)
    if job.states.uncommitted:
        return job, ()
    return replace(job, states=replace(job.states, generations=(newest,))), (
        Release(job.round, newest.number, ()),
    )


def _without_workers(job: Job, host: str, at: float, was_active: bool) -> Result:
    """Go on without lost workers."""
    if job.phase is Phase.SAVING and host in job.awaited:
        return end(job, 1, f"host {host} is lost before its part was saved")
    if job.phase is Phase.EXAMINING:
        return starting.lost(job, host, was_active=was_active)
    if was_active and job.phase in ENDED_BY_A_LOSS:
        return fail(job, f"host {host} is lost", is_loss=True)
    if job.phase is Phase.BUILDING:
        return consider(job)
    if host in job.awaited:
        return next_phase(answered(job, host))
    return changed(job, at) if job.phase in RESIZABLE else (job, ())


@_heard.register
def _slots_changed(report: reports.Slots, host: str, job: Job) -> Result:
    if host not in job.hosts or job.hosts[host].slots == report.slots:
        return job, ()
    present = replace(job.hosts[host], slots=report.slots)
    return changed(replace(job, hosts={**job.hosts, host: present}), job.now)


@_on.register
def _rescaled(event: events.Rescaled, job: Job) -> Result:
    job = replace(
        job,
        settings=replace(
            job.settings, assign=event.assign, max_hosts=event.max_hosts or job.settings.max_hosts
        ),
    )
    return _consider_soon(job, event.at)


@_on.register
def _ticked(event: events.Ticked, job: Job) -> Result:
    job = _refill(replace(job, now=event.at), event.newest)
    was_barred = len(job.health.barred)
    job, asked = health.ask_again(pardon(job))
    if job.takeover.pending is not None:
        job, adopted = succession.ticked(job)
        if job.takeover.pending is None and job.phase is Phase.WAITING:
            for host in sorted(leaving(job)):
                job, released = _leave_while_waiting(job, host)
                adopted = (*adopted, *released)
        return job, (*asked, *adopted)
    if (ended := starting.ticked(job)) is not None:
        return ended
    is_settled = job.change.at is not None and event.at - job.change.at >= job.settings.settle_s
    is_again = job.change.again_at is not None and event.at >= job.change.again_at
    if job.phase in RESIZABLE and (is_settled or is_again or len(job.health.barred) < was_barred):
        job, actions = consider(job)
        return job, (*asked, *actions)
    job, judged = _judged_late(job)
    job, heard = hearing.ticked(job)
    asked = (*asked, *judged, *heard)
    if stuck := hung(job, event.stalled):
        return stuck[0], (*asked, *stuck[1])
    job, spaced = respacing.ticked(job)
    job, given = preemption.evacuate(job)
    job, copied = replicating.replicate(job)
    job, archived = archiving.archive(job)
    job, late = preemption.overdue(job)
    if not late:  # else a host late in both would be lost twice
        job, late = overdue(job)
    return job, (*asked, *spaced, *given, *copied, *archived, *late)


def _refill(job: Job, newest: int) -> Job:
    """Count training progress; ``REFILL_S`` of it earns one failure back."""
    if newest <= job.newest or job.phase not in TRAINING:
        return replace(job, newest=max(job.newest, newest))
    made_s = 0.0 if job.budget.stepped_at is None else job.now - job.budget.stepped_at
    job = replace(
        job,
        newest=newest,
        budget=replace(job.budget, stepped_at=job.now, trained_s=job.budget.trained_s + made_s),
    )
    if job.budget.trained_s < REFILL_S or not job.settings.is_loss_free:
        return job
    left = min(job.settings.most_failures, job.budget.left + 1)
    return replace(job, budget=replace(job.budget, left=left, trained_s=0.0))


@_heard.register
def _built(report: reports.Built, host: str, job: Job) -> Result:
    if job.change.standby is None or report.round != job.change.standby.round:
        return job, ()
    if report.reason:
        return stop_unbuilt(job, f"host {host}: {report.reason}")
    if job.phase is not Phase.BUILDING:
        return job, ()
    return next_phase(answered(job, host))


@_heard.register
def _prepared(report: reports.Prepared, host: str, job: Job) -> Result:
    if job.phase is not Phase.PREPARING or (report.round, report.stop) != (
        job.round,
        job.stop.step,
    ):
        return job, ()
    held = {name: what for name, what in job.stop.held.items() if name != host}
    job = replace(answered(job, host), stop=replace(job.stop, held=held))
    return next_phase(replace(job, newest=max(job.newest, report.newest)))


@_heard.register
def _held(report: reports.Held, host: str, job: Job) -> Result:
    """Handle a save in flight, begun before the stop or on the way to it; in the latter case all
    ranks stand there alike, and train on to a later stop."""
    if (report.round, report.stop) != (job.round, job.stop.step):
        return job, ()
    if job.phase is Phase.PREPARING:
        return replace(job, stop=replace(job.stop, held={**job.stop.held, host: report.what})), ()
    if job.phase is not Phase.DRAINING:
        return job, ()
    hosts = active(job)
    job, actions = prepare(replace(job, newest=max(job.newest, report.stop)))
    lines = Say(f"the stop at step {report.stop} is put off: {report.what}")
    return job, (withdrawn(job, hosts), lines, *actions)


@_heard.register
def _arrived(report: reports.Arrived, host: str, job: Job) -> Result:
    if job.phase is not Phase.DRAINING or (report.round, report.stop) != (job.round, job.stop.step):
        return job, ()
    if not report.differing:
        return next_phase(answered(job, host))
    text = f"host {host} holds replicas that differ: {report.differing}"
    if not leaving(job):
        why = f"{text}. A change would keep one rank's values for all"
        return withdraw(replace(job, awaited=frozenset()), why)
    job, actions = next_phase(answered(job, host))
    return job, (Say(f"event=replicas_differ {text}. One rank's are kept for all"), *actions)


@_heard.register
def _stopped(report: reports.Stopped, host: str, job: Job) -> Result:
    if job.phase is not Phase.STOPPING or report.round != job.round:
        return job, ()
    return next_phase(replace(answered(job, host), newest=max(job.newest, report.newest)))


@_heard.register
def _workers_failed(report: reports.WorkersFailed, host: str, job: Job) -> Result:
    reason = f"workers of host {host} failed: {report.reason}"
    if report.round == job.round and not report.is_refusal:
        job, asked = health.ask(job, [host], reason)
        if is_wrong := WRONG_RESULT in report.reason:
            job, barred = health.bar_for_wrong_results(job, host)
            asked, is_wrong = (*asked, *barred), bool(barred)
        job, actions = _failed(report, host, job, reason, is_wrong=is_wrong)
        return job, (*asked, *actions)
    return _failed(report, host, job, reason)


def _failed(
    report: reports.WorkersFailed, host: str, job: Job, reason: str, *, is_wrong: bool = False
) -> Result:
    if report.round == job.round and job.emergency is not None:
        job, excused = excuse(job, f"host {host} computed wrongly") if is_wrong else (job, ())
        return job, (Say(reason), *excused)
    if report.round != job.round or job.phase not in FALLIBLE:
        return job, ()
    if job.phase is Phase.SNAPSHOTTING:  # the others' snapshot may be the whole state
        job, actions = next_phase(answered(job, host))
        return job, (Say(reason), *actions)
    reason = report.reason if report.is_refusal else reason
    if (asked := starting.start_failed(report, host, job, reason)) is not None:
        return asked
    is_free = is_wrong and job.settings.is_loss_free
    return fail(
        job, reason, is_chance=report.is_chance, is_refusal=report.is_refusal, is_free=is_free
    )


@_heard.register
def _hooked(report: reports.Hooked, host: str, job: Job) -> Result:
    """Run an unhooked job as it is: no steps are reported, and no change begins."""
    if report.round != job.round or report.is_hooked is job.attempt.is_hooked:
        return job, ()
    if report.is_hooked:  # changes in between were refused
        attempt = replace(job.attempt, is_hooked=True)
        return replace(job, attempt=attempt, change=replace(job.change, at=job.now)), ()
    if job.phase is not Phase.STARTING:
        return job, ()
    job = replace(
        job,
        attempt=replace(job.attempt, is_hooked=False),
        phase=Phase.RUNNING,
        awaited=frozenset(),
        change=replace(job.change, ran=job.current),
    )
    text = f"event=unhooked host={host} a change of the job is refused: {UNHOOKED}"
    return job, (Say(text),)


for _rule in (commits.judged, commits.snapshot_judged, starting.proven, starting.proof_failed,
              respacing.asked):  # fmt: skip
    _on.register(_rule)
for _told in (commits.sealed, commits.skipped, commits.committed, replicating.replicated,
              archiving.archived, failures.frozen, failures.rescued, health.checked,
              hearing.knocked, starting.moved, starting.published, starting.restored,
              starting.examined, starting.suspected):  # fmt: skip
    _heard.register(_told)


@_heard.register
def _looked(report: reports.Attached, host: str, job: Job) -> Result:
    """Consider states on disks without a person's order, after a delay: other hosts may report
    more."""
    job = replace(job, states=replace(job.states, looking=job.states.looking - {host}))
    is_found = job.states.generations and not job.states.is_held_back
    if job.phase is not Phase.WAITING or not is_found or job.change.at is not None:
        return job, ()
    return replace(job, change=replace(job.change, at=job.now)), ()


@_on.register
def _resumed(event: events.Resumed, job: Job) -> Result:
    return consider(job) if job.phase is Phase.WAITING else (job, ())


@_heard.register
def _stepped(report: reports.Stepped, host: str, job: Job) -> Result:
    if proof_rules.is_of_proof(report, job):
        return _judged_late(proof_rules.recorded(report, host, job))
    if job.phase is not Phase.STARTING or report.round != job.round:
        return job, ()
    job = proof_rules.stepped(report, answered(job, host))
    if job.awaited:
        return job, ()
    return _judged(job)


def _judged(job: Job) -> Result:
    job, verdict, lines = proof_rules.judge(job)
    if verdict is not None and not verdict.is_same:
        job, actions = failures.computes_otherwise(job, verdict.text)
    else:
        job, actions = next_phase(job) if job.phase is Phase.STARTING else stand(job)
    return job, (*lines, *actions)


def _judged_late(job: Job) -> Result:
    """Compare once the old workers have answered, are gone, or take too long."""
    is_due = job.function.is_waiting and not proof_rules.must_wait(job)
    return _judged(job) if is_due else (job, ())


@_heard.register
def _finished(report: reports.Finished, host: str, job: Job) -> Result:
    if report.round != job.round:
        return job, ()
    job = replace(job, attempt=replace(job.attempt, finished=job.attempt.finished | {host}))
    if not job.attempt.finished >= active(job):
        return job, ()
    job, unproven = prove_no_more(job, "the script has finished")
    job, actions = end(job, 0, "finished")
    return job, (*unproven, *actions)


@_heard.register
def _saved(report: reports.Saved, host: str, job: Job) -> Result:
    if job.phase is not Phase.SAVING:
        return job, ()
    if report.reason:
        return end(job, 1, f"host {host} could not save its part: {report.reason}")
    return next_phase(answered(job, host))
