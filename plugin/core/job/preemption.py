"""Rules for a host's announced removal: a drain likely to end late, an early copy of its pieces,
and a passed deadline."""

from dataclasses import replace

from scalai.core.job.copies import Replication
from scalai.core.job.membership import TRAINING, Host, Job, Phase, active
from scalai.core.job.replicating import keepers
from scalai.core.job.spacing import WEIGHT, Pace, estimate
from scalai.core.job.transitions import Result
from scalai.core.messages import events
from scalai.core.messages.actions import Lose, MakeReplicas, Say

_FETCHING = (*TRAINING, Phase.WAITING, Phase.PREPARING, Phase.DRAINING)
"""Phases without other fetches or a new generation in progress."""


def givers(job: Job) -> frozenset[str]:
    """Hosts with a deadline likely to come before the end of their drain."""
    short = frozenset(host.name for host in job.hosts.values() if host.is_short)
    return short & job.newest_generation.hosts if job.newest_generation else frozenset()


def evacuate(job: Job) -> Result:
    """Copy pieces of the newest generation on leaving hosts alone. Called at a notice and every
    tick."""
    under_way, giving, newest = job.copies.replication, givers(job), job.newest_generation
    if under_way is not None and under_way.giving - giving:  # some have left, or stay after all
        job = replace(job, copies=replace(job.copies, replication=None))
        under_way = None
    if newest is None or not giving or job.states.uncommitted or job.phase not in _FETCHING:
        return job, ()
    hosts = keepers(job)
    if job.copies.evacuated == (newest.number, giving) or not hosts:
        return job, ()
    if under_way is not None and under_way.giving == giving:
        is_again_due = not under_way.awaited and job.now >= under_way.again_at
        if under_way.generation == newest.number and not is_again_due:
            return job, ()
    order = job.copies.last_replication + 1
    ordered = Replication(order, newest.number, hosts, hosts, job.now, giving=giving)
    names = ", ".join(sorted(giving))
    return replace(job, copies=replace(job.copies, replication=ordered, last_replication=order)), (
        Say(f"what only {names} holds of generation {newest.number} goes to other hosts first"),
        MakeReplicas(tuple(sorted(hosts)), order, newest.number, 1, tuple(sorted(giving))),
    )


LATE_S = 5.0
"""Delay after a host's deadline, in seconds: its agent ends by itself, and a later one may hang."""
SAME_S = 3.0
"""Smallest difference between two deadlines of notices, in seconds."""


def noticed(event: events.HostLeaving, job: Job) -> Result:
    """Mark a host as leaving; with too little time for its drain, its unique pieces leave first.
    The drain follows from the mark."""
    host = job.hosts[event.host]
    by = None if event.left_s is None else event.at + event.left_s
    marked = replace(host, is_leaving=True, leave_by=by if event.is_final else None)
    if event.left_s is None:
        return _with(job, replace(marked, is_short=False)), ()
    needs = estimate(job.change.pace, event.at, event.size_bytes)
    text = f"event=notice host={host.name} source={event.source!r} left_s={event.left_s:.0f} "
    if job.phase is Phase.WAITING:
        job = _with(job, replace(marked, is_short=job.states.has_state))
        text += "nothing runs that could be drained"
    elif host.name not in active(job) and job.phase in TRAINING:
        job = _with(job, replace(marked, is_short=False))
        text += "it runs no workers"
    else:
        is_short = needs.total_s > event.left_s
        job = _with(job, replace(marked, is_short=is_short))
        text += f"drain is expected to take {needs}"
        if is_short:
            text += "; that is too long: what only it holds leaves first"
    job, first = evacuate(job)
    return job, (Say(text), *first)


def is_known(event: events.HostLeaving, job: Job) -> bool:
    """Whether this notice says nothing new."""
    host = job.hosts[event.host]
    if not host.is_leaving or event.is_final != (host.leave_by is not None):
        return False
    if event.left_s is None or host.leave_by is None:
        return event.left_s is None
    return abs(event.at + event.left_s - host.leave_by) < SAME_S


def taken_back(job: Job, host: str) -> Job:
    """The job after a host's notice was withdrawn."""
    stays = replace(job.hosts[host], is_leaving=False, leave_by=None, is_short=False)
    return _with(job, stays)


def overdue(job: Job) -> Result:
    """Lose hosts beyond their deadline with living agents, once."""
    late = [
        host
        for _, host in sorted(job.hosts.items())
        if host.leave_by is not None and job.now > host.leave_by + LATE_S
    ]
    if not late:
        return job, ()
    for host in late:
        job = _with(job, replace(host, leave_by=None))
    names = tuple(host.name for host in late)
    return job, (Lose(names, "the time is over after which it is taken away"),)


def _with(job: Job, host: Host) -> Job:
    return replace(job, hosts={**job.hosts, host.name: host})


def measured(before: Job, after: Job) -> Job:
    """``after`` with the durations measured since ``before``."""
    if after is before:
        return after
    pace = after.change.pace
    if after.phase is not before.phase:
        pace = _entered(pace, before.phase, after.phase, after.now)
        pace = pace if after.phase in TRAINING else replace(pace, seen=None)
    pace = _stepped(pace, after) if after.phase in TRAINING else pace
    return (
        after
        if pace == after.change.pace
        else replace(after, change=replace(after.change, pace=pace))
    )


def _entered(pace: Pace, was: Phase, phase: Phase, now: float) -> Pace:
    since = pace.since
    if phase is Phase.SNAPSHOTTING:
        return replace(pace, since=now)
    if phase in (Phase.COMMITTING, Phase.STOPPING) and was in (
        Phase.SNAPSHOTTING, Phase.COMMITTING,
    ):  # fmt: skip
        return pace
    if phase is Phase.STARTING:
        has_written = since is not None and was is Phase.STOPPING
        write_s = now - since if has_written and since is not None else pace.write_s
        return replace(pace, write_s=write_s, since=now)
    if phase is Phase.RUNNING and was is Phase.STARTING and since is not None:
        return replace(pace, start_s=now - since, since=None)
    return replace(pace, since=None)


def _stepped(pace: Pace, job: Job) -> Pace:
    """Record the furthest step, and the duration of the steps since the one before."""
    if pace.seen is None:
        return replace(pace, seen=(job.newest, job.now))
    made = job.newest - pace.seen[0]
    if made <= 0:
        return pace
    took_s = (job.now - pace.seen[1]) / made
    usual_s = took_s if not pace.step_s else (1 - WEIGHT) * pace.step_s + WEIGHT * took_s
    return replace(pace, step_s=usual_s, seen=(job.newest, job.now))
