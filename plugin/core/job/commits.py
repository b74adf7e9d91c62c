"""Rules for commits: when sealed parts are judged, their renaming, and the release of older
generations."""

from dataclasses import replace

from scalai.core.job import respacing
from scalai.core.job.failures import fail
from scalai.core.job.membership import Generation, Job, Phase, active
from scalai.core.job.replicating import is_to_be_replicated, release_older
from scalai.core.job.transitions import Result, answered, judge_sealed, next_phase, rescue, step_of
from scalai.core.messages import events, reports
from scalai.core.messages.actions import CommitParts


def judged(event: events.Judged, job: Job) -> Result:
    """Commit the united parts of a stop, or of survivors of a failure."""
    emergency, is_rescue = job.emergency, job.phase is Phase.RESCUING
    if is_rescue and (emergency is None or event.step != emergency.step):
        return job, ()
    if not is_rescue and job.phase is not Phase.SNAPSHOTTING:
        return job, ()
    if not event.is_covered and is_rescue:
        return rescue(job)  # of an earlier step, if workers stand at one
    if not event.is_covered:
        is_loss = job.current is not None and set(job.current.active) > active(job)
        return fail(job, event.reason, is_loss=is_loss)
    generation = Generation(event.number, event.step, event.hosts)
    # A host without writers, or one just back, has no part.
    hosts = event.hosts & frozenset(job.hosts)
    job = replace(
        job,
        phase=Phase.COMMITTING,
        awaited=hosts,
        states=replace(job.states, uncommitted=frozenset(), sealed={}),
    )
    job = _with_generation(job, generation)
    return job, (CommitParts(tuple(sorted(hosts)), generation.number),)


def sealed(report: reports.Sealed, host: str, job: Job) -> Result:
    """Judge a snapshot on the way once every host with workers has sealed its part. At a stop, dead
    workers are not awaited."""
    if report.reason == "stop":
        is_due = job.phase is Phase.SNAPSHOTTING and report.round == job.round
        return next_phase(answered(job, host)) if is_due else (job, ())
    if report.manifest is None or report.reason == "emergency":  # that one reports ``Rescued``
        return job, ()
    return _answered(report, host, report.reason, job)


def skipped(report: reports.Skipped, host: str, job: Job) -> Result:
    """Record a host without a part of a snapshot on the way: the others may have all of it."""
    return _answered(report, host, "snapshot", job)


def _answered(report: reports.Sealed | reports.Skipped, host: str, reason: str, job: Job) -> Result:
    if report.round != job.round or job.phase is Phase.COMMITTING:
        return job, ()  # a later one is committed
    # A host comes to snapshots in order: an earlier one without its answer has no part of it,
    # because it learned of the interval too late.
    known = {report.snapshot: frozenset[str](), **job.states.sealed}
    at = step_of(report.snapshot)
    passed = {name: known[name] | {host} for name in known if step_of(name) <= at}
    job = replace(job, states=replace(job.states, sealed={**known, **passed}))
    # A round with another function, perhaps or for certain, commits nothing.
    is_other = job.function.is_waiting or job.function.is_refuted
    return (job, ()) if is_other else judge_sealed(job, reason)


def snapshot_judged(event: events.SnapshotJudged, job: Job) -> Result:
    generation = Generation(event.number, event.step, frozenset(event.hosts))
    job = _with_generation(
        replace(job, states=replace(job.states, uncommitted=generation.hosts)), generation
    )
    job, respaced = respacing.measured(respacing.made(job, event.step), event.measured)
    return job, (CommitParts(event.hosts, generation.number), *respaced)


def _with_generation(job: Job, generation: Generation) -> Job:
    return replace(
        job,
        states=replace(
            job.states,
            generations=(*job.states.generations, generation),
            committing=generation.number,
            has_state=True,
        ),
    )


def committed(report: reports.Committed, host: str, job: Job) -> Result:
    if report.generation != job.states.committing:
        return job, ()
    if job.phase is Phase.COMMITTING:
        return next_phase(answered(job, host))
    if host not in job.states.uncommitted:
        return job, ()
    # A snapshot on the way. Once every host has it, with replicas, older generations may go, also
    # during a drain: the snapshot at its end needs their room. A start keeps its source.
    job = replace(job, states=replace(job.states, uncommitted=job.states.uncommitted - {host}))
    newest = job.newest_generation
    is_ready = (
        not job.states.uncommitted and newest is not None and newest.number == report.generation
    )
    if not is_ready or is_to_be_replicated(job):
        return job, ()
    return release_older(job)
