"""What comes of a phase that takes too long: the consequences of the table in ``deadlines``."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from scalai.core.job.deadlines import LIMITS, REPORT_S
from scalai.core.job.examining import go_on
from scalai.core.job.failures import fail
from scalai.core.job.hearing import broken, knock
from scalai.core.job.membership import Job, Phase, Wait, active
from scalai.core.job.transitions import Result, missing, next_phase, stop_unbuilt, withdraw
from scalai.core.messages.actions import Action, Lose, Report

_REPORTED = (
    Phase.WAITING, Phase.STARTING, Phase.DRAINING, Phase.SNAPSHOTTING, Phase.PREPARING,
    Phase.FREEZING, Phase.RESCUING, Phase.EXAMINING,
    Phase.COMMITTING, Phase.STOPPING, Phase.SAVING,
)  # fmt: skip
_MEETING = (Phase.STARTING, Phase.BUILDING)
"""Phases in which workers of all hosts meet, and wait for each other."""


def overdue(job: Job) -> Result:
    """Return the job at its present time, and what must be done where its phase takes long."""
    if job.wait.since is None:
        return replace(job, wait=replace(job.wait, since=job.now)), ()
    waited = job.now - job.wait.since
    limit = LIMITS[job.phase].seconds(job)
    if limit is not None and waited > limit:
        return _CONSEQUENCES[job.phase](job, waited)
    if waited < _report_at(job):
        return job, ()
    said: tuple[Action, ...] = ()
    if job.phase is Phase.BUILDING:  # the present workers, which would say where they are, train
        job = replace(job, wait=replace(job.wait, reports=job.wait.reports + 1))
    elif job.phase in _REPORTED:
        job, said = report(job, waited)
    if job.phase not in _MEETING:
        return job, said
    meeting = job.standby.assignment.active if job.standby is not None else active(job)
    job, asked = knock(job, meeting)
    return job, (*said, *asked)


def _report_at(job: Job) -> float:
    reports = job.wait.reports
    if job.phase is Phase.WAITING:
        return REPORT_S * (reports + 1)
    first_s = REPORT_S
    if job.phase is Phase.STARTING:  # before its time is over
        first_s = min(first_s, job.start_timeout_s / 2)
    return first_s * float(2**reports)


def report(job: Job, waited: float) -> Result:
    """Say for what the job waits."""
    job = replace(job, wait=replace(job.wait, reports=job.wait.reports + 1))
    text = f"event=slow phase={job.phase.value} since_s={waited:.0f} {_awaited(job)}"
    return job, (Report(text, tuple(sorted(job.awaited & active(job)))),)


def _awaited(job: Job) -> str:
    """Say who has not done what."""
    if job.phase is Phase.WAITING:
        return missing(job)
    return f"awaited: {', '.join(_with_progress(job, host) for host in sorted(job.awaited))}"


def _with_progress(job: Job, host: str) -> str:
    if job.phase is Phase.STARTING:
        return f"{host} ({job.progress.get(host, 'nothing')} so far)"
    return f"{host} ({job.held[host]})" if host in job.held else host


def _not_started(job: Job, waited: float) -> Result:
    job, reported = report(job, waited)
    reason = f"no progress of the start within {waited:.0f} s, {_awaited(job)}{broken(job)}"
    job, actions = fail(job, reason, is_standstill=True)
    return job, (*reported, *actions)


def _not_built(job: Job, waited: float) -> Result:
    return stop_unbuilt(job, f"not built within {job.build_timeout_s:.0f} s")


def _not_drained(job: Job, waited: float) -> Result:
    present = job.current.active if job.current else ()
    lost = sorted(set(present) - active(job))
    if lost:  # the others wait for its workers in the middle of a step
        return fail(job, f"host {lost[0]} is lost on the way to the stop", is_loss=True)
    reason = f"not every worker came to step {job.stop} within {waited:.0f} s, {_awaited(job)}"
    return withdraw(job, reason)


def _without_the_silent(job: Job, waited: float) -> Result:
    """Do without hosts that do not say where their workers stand, do not write, or do not say
    whether their part is damaged."""
    text = f"event=slow phase={job.phase.value} since_s={waited:.0f} {_awaited(job)}: done without"
    job = replace(job, awaited=frozenset())
    job, actions = go_on(job) if job.phase is Phase.EXAMINING else next_phase(job)
    return job, (Report(text, ()), *actions)


def _silent(job: Job, waited: float) -> Result:
    silent = job.awaited - job.held.keys() or job.awaited
    others = set(job.hosts) - silent
    if not others:
        is_due = waited >= _report_at(job)
        return report(job, waited) if is_due else (job, ())
    reason = f"no answer within {waited:.0f} s in phase {job.phase.value}"
    job = replace(job, wait=Wait(job.now))  # said again for those that cannot be done without
    return job, (Lose(tuple(sorted(silent)), reason),)


_CONSEQUENCES: Mapping[Phase, Callable[[Job, float], Result]] = {
    Phase.STARTING: _not_started,
    Phase.EXAMINING: _without_the_silent,
    Phase.BUILDING: _not_built,
    Phase.PREPARING: _silent,
    Phase.DRAINING: _not_drained,
    Phase.SNAPSHOTTING: _silent,
    Phase.FREEZING: _without_the_silent,
    Phase.RESCUING: _without_the_silent,
    Phase.COMMITTING: _silent,
    Phase.STOPPING: _silent,
}
