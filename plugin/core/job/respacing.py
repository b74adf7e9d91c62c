"""The rules by which a job changes how many steps lie between its snapshots. All ranks learn of it
from one place, and count by the same step."""

from collections.abc import Collection
from dataclasses import replace

from scalai.core.job.membership import TRAINING, Job, active
from scalai.core.job.spacing import SnapshotCost, is_noticeable
from scalai.core.messages import commands, events
from scalai.core.messages.actions import Action, Say, Send

Result = tuple[Job, tuple[Action, ...]]


def measured(job: Job, found: SnapshotCost | None) -> Result:
    """Adopt the measured cost of a snapshot on the way."""
    if not job.spacing.is_auto or found is None:
        return job, ()
    return _choose(replace(job, spacing=job.spacing.with_measured(found)))


def replicated(job: Job, took_s: float) -> Job:
    """Record the duration of replication: the next snapshot has no room before."""
    return replace(job, spacing=replace(job.spacing, replicate_s=took_s))


def failed(job: Job) -> Result:
    """Count a failure of a training round."""
    failures = job.spacing.failures + 1
    job = replace(job, spacing=replace(job.spacing, failures=failures))
    return _choose(job) if job.spacing.is_auto else (job, ())


def ticked(job: Job) -> Result:
    """Count training time, and command the workers' interval if it changed."""
    is_training = job.phase in TRAINING and job.attempt.is_hooked and job.current is not None
    spacing = job.spacing
    if spacing.is_auto:
        spacing = spacing.counted(job.now, _workers(job) if is_training else None)
    job = replace(job, spacing=spacing)
    if not is_training:
        return job, ()
    lines: tuple[Action, ...] = ()
    if spacing.is_auto and not spacing.said:
        spacing = replace(spacing, said="assumed")
        lines = (
            Say(
                f"event=snapshot_every k={spacing.every} is assumed: what a snapshot costs is not "
                "measured yet"
            ),
        )
    job = replace(job, spacing=spacing)
    if spacing.told == spacing.every or spacing.asked is not None:
        return job, lines
    job, _, order = _order(job, spacing.every)
    return job, (*lines, order)


def _order(job: Job, every: int) -> tuple[Job, int, Action]:
    """Command an interval. Returns the job, the step from which it counts, and the command."""
    begin = job.newest + job.spacing.lead(job.change.pace.step_s)
    job = replace(job, spacing=replace(job.spacing, told=every))
    return job, begin, Send(tuple(sorted(active(job))), commands.Space(job.round, begin, every))


def asked(event: events.SnapshotAsked, job: Job) -> Result:
    """Command shorter intervals until there is a snapshot: hosts can only be told of a step that
    none has reached when all have heard of it."""
    if job.phase not in TRAINING or not job.attempt.is_hooked or job.spacing.asked is not None:
        return job, ()
    lead = job.spacing.lead(job.change.pace.step_s)
    job, begin, order = _order(job, lead)
    job = replace(job, spacing=replace(job.spacing, asked=begin))
    return job, (Say(f"event=snapshot_asked step={begin + lead}"), order)


def made(job: Job, step: int) -> Job:
    """Fulfil a request by a snapshot of this step: the next tick commands the usual interval, and
    the generation goes to the durable directory."""
    if job.spacing.asked is None or step <= job.spacing.asked:
        return job
    job = replace(job, spacing=replace(job.spacing, asked=None))
    return replace(job, copies=replace(job.copies, archive_at=job.now))


def built(job: Job) -> Job:
    """Record the interval of workers built now."""
    return replace(job, spacing=replace(job.spacing, built=job.spacing.every))


def started(job: Job, *, is_built: bool) -> Job:
    """Record the interval of a new round's workers, perhaps built before."""
    told = job.spacing.built if is_built else job.spacing.every
    if job.spacing.asked is not None:  # a stop has made a generation
        job = replace(job, copies=replace(job.copies, archive_at=job.now))
    return replace(job, spacing=replace(job.spacing, told=told, asked=None))


def adopted(job: Job, told: Collection[int]) -> Job:
    """Adopt the interval of another coordinator's workers. If the workers of hosts differ, all get
    it again."""
    every = min(told)
    known = every if len(set(told)) == 1 else -1
    if not job.spacing.is_auto:
        return replace(job, spacing=replace(job.spacing, told=known))
    return replace(job, spacing=replace(job.spacing, every=every, told=known))


def _choose(job: Job) -> Result:
    """Choose the interval anew; log and command a noticeable change."""
    spacing = job.spacing
    choice = spacing.chosen(_workers(job))
    if choice is None:
        return job, ()
    is_other = is_noticeable(choice.every, spacing.every)
    if not is_other and spacing.said == "measured":
        return job, ()
    choice = choice if is_other else replace(choice, every=spacing.every)
    job = replace(job, spacing=replace(spacing, every=choice.every, said="measured"))
    return job, (Say(str(choice)),)


def _workers(job: Job) -> int:
    return sum(count for _, count in job.current.workers) if job.current else 0
