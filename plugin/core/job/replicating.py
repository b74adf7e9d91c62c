"""Rules for replicas: during training, hosts fetch from each other the pieces of a committed
generation that one loss would take away (``core.tensors.replicas``). An older generation with
replicas stays until a newer one has them."""

from dataclasses import replace

from scalai.core.job import respacing
from scalai.core.job.copies import Replication
from scalai.core.job.deadlines import report_if_slow
from scalai.core.job.fitness import hearing_with
from scalai.core.job.membership import TRAINING, Job, Phase, active
from scalai.core.messages import reports
from scalai.core.messages.actions import Action, MakeReplicas, Release, Say

Result = tuple[Job, tuple[Action, ...]]

AGAIN_S = 30.0
"""Pause before failed replicas are retried, in seconds: a lost host is known by then."""
GIVEN_AGAIN_S = 2.0
"""The same for pieces on leaving hosts alone: there is little time."""
_NEEDING = (
    Phase.WAITING, Phase.STARTING, Phase.EXAMINING, Phase.STOPPING, Phase.FREEZING, Phase.RESCUING,
)  # fmt: skip
"""Phases with a possible return to an older generation."""


def keepers(job: Job) -> frozenset[str]:
    """Hosts for replicas: all staying and connected ones."""
    there = [(host.name, host.slots) for host in job.hosts.values() if not host.is_leaving]
    if job.health.links.unheard:
        training = active(job)
        there.sort(key=lambda entry: entry[0] not in training)
        there = list(hearing_with(training, tuple(there), job.health.links.unheard))
    return frozenset(name for name, _ in there)


def is_to_be_replicated(job: Job) -> bool:
    """Whether replicas of the newest generation are, or will be, made during training."""
    return bool(job.settings.replicas) and job.phase in TRAINING and len(keepers(job)) > 1


def needs_older(job: Job) -> bool:
    """Whether an older generation stays: replicas of the newest are due and not yet made."""
    newest = job.newest_generation
    is_made = newest is not None and job.copies.replicated == (newest.number, keepers(job))
    return is_to_be_replicated(job) and not is_made


def replicate(job: Job) -> Result:
    """Command replicas of the newest generation if the present hosts lack them; log a slow
    replication. Called every tick."""
    before = job.copies.replication
    if before is not None and _is_behind(job, before):
        return _skip(job, before)
    if before is not None and before.awaited:
        under_way, lines = report_if_slow(before, "replicas", job.now)
        return replace(job, copies=replace(job.copies, replication=under_way)), lines
    if before is not None and before.giving:
        return job, ()  # this one is retried first
    newest, hosts = job.newest_generation, keepers(job)
    if newest is None or job.states.uncommitted:
        return job, ()
    if not is_to_be_replicated(job):  # an older one may have stayed for lost hosts
        is_left = job.phase in TRAINING and job.states.generations[0].number < newest.number
        return release_older(job) if is_left else (job, ())
    if job.copies.replicated == (newest.number, hosts) or (before and job.now < before.again_at):
        return job, ()
    return _order(job, Replication(0, newest.number, hosts, hosts, job.now, is_again=bool(before)))


def _order(job: Job, replication: Replication) -> Result:
    order, hosts = job.copies.last_replication + 1, tuple(sorted(replication.hosts))
    job = replace(
        job,
        copies=replace(
            job.copies, replication=replace(replication, order=order), last_replication=order
        ),
    )
    return job, (MakeReplicas(hosts, order, replication.generation, job.settings.replicas),)


def _is_behind(job: Job, under_way: Replication) -> bool:
    """Whether a newer generation came before all hosts made their replicas of this one."""
    newest = job.newest_generation
    is_late = (
        newest is not None and under_way.generation < newest.number and not job.states.uncommitted
    )
    is_free = not under_way.giving and not under_way.has_skipped and is_to_be_replicated(job)
    return bool(under_way.awaited) and is_late and is_free


def _skip(job: Job, under_way: Replication) -> Result:
    """Replicate the newest generation instead: else each would be later than the one before. Never
    twice in a row, or there might never be any replicas."""
    newest, hosts = job.newest_generation, keepers(job)
    assert newest is not None
    text = (
        f"event=replicas_skipped generation={under_way.generation} newest={newest.number} awaited="
        f"{','.join(sorted(under_way.awaited))}: its replicas were not made before the next "
        "generation was there. Make generations less often (--snapshot-every)"
    )
    instead = Replication(0, newest.number, hosts, hosts, job.now, has_skipped=True)
    job, actions = _order(job, instead)
    return job, (Say(text), *actions)


def replicated(report: reports.Replicated, host: str, job: Job) -> Result:
    replication = job.copies.replication
    if replication is None or report.order != replication.order:
        return job, ()
    replication = replace(
        replication,
        awaited=replication.awaited - {host},
        size_bytes=replication.size_bytes + report.size_bytes,
        unchanged_bytes=replication.unchanged_bytes + report.unchanged_bytes,
        failed=replication.failed | ({host} if report.reason else frozenset()),
        is_hopeful=replication.is_hopeful or bool(report.reason and not report.is_lasting),
    )
    lines: tuple[Action, ...] = ()
    if report.reason:
        lines = (Say(f"event=no_replica host={host} {report.reason}"),)
    if replication.awaited:
        return replace(job, copies=replace(job.copies, replication=replication)), lines
    job, actions = _done(job, replication)
    return job, (*lines, *actions)


def _done(job: Job, replication: Replication) -> Result:
    """Release older generations after all possible replicas. After a failure for want of another
    host's bytes, retry first: the other host may be lost."""
    number, took_s = replication.generation, job.now - replication.since
    if replication.giving:
        return _given(job, replication)
    if replication.is_hopeful and not replication.is_again:
        return replace(
            job,
            copies=replace(
                job.copies, replication=replace(replication, again_at=job.now + AGAIN_S)
            ),
        ), ()
    job = replace(
        job, copies=replace(job.copies, replication=None, replicated=(number, replication.hosts))
    )
    lines: tuple[Action, ...] = ()
    if replication.size_bytes or replication.unchanged_bytes:
        text = (
            f"event=replicated generation={number} bytes={replication.size_bytes} "
            f"unchanged_bytes={replication.unchanged_bytes} "
            f"took_s={took_s:.0f} failed={','.join(sorted(replication.failed)) or 'none'}"
        )
        lines = (Say(text),)
        job = respacing.replicated(job, took_s)
    # Later generations have no replicas yet; older ones are not needed.
    job, released = _keep_from(job, number) if job.phase in TRAINING else (job, ())
    return job, (*lines, *released)


def _given(job: Job, replication: Replication) -> Result:
    """Record the copies of leaving hosts' pieces; retry failed ones soon."""
    if replication.is_hopeful:
        again = replace(replication, again_at=job.now + GIVEN_AGAIN_S)
        return replace(job, copies=replace(job.copies, replication=again)), ()
    number, names = replication.generation, ",".join(sorted(replication.giving))
    job = replace(
        job, copies=replace(job.copies, replication=None, evacuated=(number, replication.giving))
    )
    text = (
        f"event=evacuated generation={number} from={names} bytes={replication.size_bytes} "
        f"unchanged_bytes={replication.unchanged_bytes} "
        f"took_s={job.now - replication.since:.0f} "
        f"failed={','.join(sorted(replication.failed)) or 'none'}"
    )
    return job, (Say(text),)


def without(job: Job, released: frozenset[str]) -> Job:
    """The job after these hosts leave: the others make replicas anew, and await none of them."""
    under_way = job.copies.replication
    if under_way is None or not released & (under_way.hosts | under_way.giving):
        return job
    return replace(job, copies=replace(job.copies, replication=None))


def give_up(job: Job) -> Job:
    """The job after a loss of a host with its replicas for others: they are made anew."""
    return replace(
        job, copies=replace(job.copies, replication=None, replicated=None, evacuated=None)
    )


def release_older(job: Job) -> Result:
    """Release older generations, if the newest is committed everywhere, no start needs another, and
    nothing has failed: a yet unknown loss may need them."""
    newest = job.newest_generation
    if newest is None or job.states.uncommitted or job.phase in _NEEDING:
        return job, ()
    return _keep_from(job, newest.number)


def _keep_from(job: Job, number: int) -> Result:
    kept = tuple(generation for generation in job.states.generations if generation.number >= number)
    if not kept or kept[0].number != number:
        return job, ()
    return replace(job, states=replace(job.states, generations=kept)), (
        Release(job.round, number, ()),
    )
