"""The rules by which a job changes how many steps lie between its snapshots. All ranks learn of it
from one place, and count by the same step."""

from collections.abc import Collection
from dataclasses import replace

from scalai.core.job.membership import TRAINING, Job, active
from scalai.core.job.spacing import SnapshotCost, is_noticeable
from scalai.core.messages import commands
from scalai.core.messages.actions import Action, Say, Send

Result = tuple[Job, tuple[Action, ...]]


def measured(job: Job, found: SnapshotCost | None) -> Result:
    """A snapshot on the way has been made, and this was measured of it."""
    if not job.spacing.is_auto or found is None:
        return job, ()
    return _choose(replace(job, spacing=job.spacing.with_measured(found)))


def replicated(job: Job, took_s: float) -> Job:
    """Replicas of the newest generation were made: the next snapshot has no room before."""
    return replace(job, spacing=replace(job.spacing, replicate_s=took_s))


def failed(job: Job) -> Result:
    """The workers of a round that trained have failed."""
    failures = job.spacing.failures + 1
    job = replace(job, spacing=replace(job.spacing, failures=failures))
    return _choose(job) if job.spacing.is_auto else (job, ())


def ticked(job: Job) -> Result:
    """Count the time that the job has trained, and tell the workers of a round what they do not
    know yet."""
    is_training = job.phase in TRAINING and job.attempt.is_hooked and job.current is not None
    if not job.spacing.is_auto:
        return job, ()
    spacing = job.spacing.counted(job.now, _workers(job) if is_training else None)
    job = replace(job, spacing=spacing)
    if not is_training:
        return job, ()
    lines: tuple[Action, ...] = ()
    if not spacing.said:
        spacing = replace(spacing, said="assumed")
        lines = (
            Say(
                f"event=snapshot_every k={spacing.every} is assumed: what a snapshot costs is not "
                "measured yet"
            ),
        )
    if spacing.told == spacing.every:
        return replace(job, spacing=spacing), lines
    begin = job.newest + spacing.lead(job.change.pace.step_s)
    job = replace(job, spacing=replace(spacing, told=spacing.every))
    told = commands.Space(job.round, begin, spacing.every)
    return job, (*lines, Send(tuple(sorted(active(job))), told))


def built(job: Job) -> Job:
    """Workers are built that begin with the present number of steps."""
    return replace(job, spacing=replace(job.spacing, built=job.spacing.every))


def started(job: Job, *, is_built: bool) -> Job:
    """A round begins; its workers may have been built before."""
    told = job.spacing.built if is_built else job.spacing.every
    return replace(job, spacing=replace(job.spacing, told=told))


def adopted(job: Job, told: Collection[int]) -> Job:
    """Another coordinator has told the workers of each host of this round a number of steps: the
    one that they know holds on. Where not all know the same, all are told."""
    if not job.spacing.is_auto:
        return job
    every = min(told)
    known = every if len(set(told)) == 1 else 0
    return replace(job, spacing=replace(job.spacing, every=every, told=known))


def _choose(job: Job) -> Result:
    """Choose anew; said, and told, where that is another number by enough."""
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
