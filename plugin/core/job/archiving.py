"""Rules for archives: generations go to the durable directory during training, more rarely than
they are made.

Every host writes its part hidden, and after all are written the parts appear: a directory shows
only whole states, whoever dies meanwhile. Older ones go.
"""

from collections.abc import Collection
from dataclasses import replace

from scalai.core.job.copies import Archiving
from scalai.core.job.deadlines import report_if_slow
from scalai.core.job.membership import TRAINING, Generation, Job
from scalai.core.messages import commands, reports
from scalai.core.messages.actions import Action, Say, Send

Result = tuple[Job, tuple[Action, ...]]

AGAIN_S = 300.0
"""Longest pause before a failed archive is retried, in seconds."""
FINISH_AGAIN_S = 30.0
"""Pause before hosts are asked again to show written parts, in seconds."""


def archive(job: Job) -> Result:
    """Archive the newest generation when due; log a slow archive. Called every tick."""
    under_way = job.copies.archiving
    if under_way is not None:
        return _watched(job, under_way)
    if (
        not job.settings.archive_every_s
        or not job.settings.has_durable_dir
        or job.phase not in TRAINING
    ):
        return job, ()
    if job.copies.archive_at is None:
        return replace(
            job, copies=replace(job.copies, archive_at=job.now + job.settings.archive_every_s)
        ), ()
    newest = job.newest_generation
    if newest is None or job.states.uncommitted or job.now < job.copies.archive_at:
        return job, ()
    if newest.number <= max(job.copies.archived, default=0):
        return _nothing_new(job, newest)
    hosts, order = newest.hosts & frozenset(job.hosts), job.copies.last_archive + 1
    begun = Archiving(order, newest.number, newest.step, hosts, job.now, awaited=hosts)
    return replace(job, copies=replace(job.copies, archiving=begun, last_archive=order)), (
        Send(tuple(sorted(hosts)), commands.Archive(order, newest.number)),
    )


def _nothing_new(job: Job, newest: Generation) -> Result:
    job = replace(
        job, copies=replace(job.copies, archive_at=job.now + job.settings.archive_every_s)
    )
    if job.newest <= newest.step:
        return job, ()
    text = (
        f"no generation is newer than {newest.number}, which lies in the durable directory: it is "
        "at --snapshot-every that they are made"
    )
    return job, (Say(text),)


def archived(report: reports.Archived, host: str, job: Job) -> Result:
    """Handle a host's answer: part written, part shown, or failure."""
    under_way = job.copies.archiving
    is_due = under_way is not None and report.order == under_way.order
    if under_way is None or not is_due or host not in under_way.awaited:
        return job, ()
    under_way = replace(
        under_way,
        awaited=under_way.awaited - {host},
        size_bytes=under_way.size_bytes + report.size_bytes,
        failed=under_way.failed | ({host} if report.reason else frozenset()),
    )
    job, lines = replace(job, copies=replace(job.copies, archiving=under_way)), tuple[Action, ...]()
    if report.reason:
        lines = (Say(f"event=not_archived host={host} {report.reason}"),)
    if under_way.awaited:
        return job, lines
    job, actions = _go_on(job, under_way)
    return job, (*lines, *actions)


def lose(job: Job, hosts: Collection[str]) -> Job:
    """Count out lost hosts, with the parts on their own disks. After all parts are written, other
    hosts show theirs. The next tick draws the conclusion."""
    under_way = job.copies.archiving
    gone = frozenset(hosts) & under_way.hosts if under_way is not None else frozenset[str]()
    if under_way is None or not gone:
        return job
    failed = under_way.failed if under_way.is_written else under_way.failed | gone
    under_way = replace(under_way, awaited=under_way.awaited - gone, failed=failed)
    return replace(job, copies=replace(job.copies, archiving=under_way))


def _watched(job: Job, under_way: Archiving) -> Result:
    if not under_way.awaited:
        return _go_on(job, under_way) if job.now >= under_way.again_at else (job, ())
    under_way, lines = report_if_slow(under_way, "archive", job.now)
    return replace(job, copies=replace(job.copies, archiving=under_way)), lines


def _go_on(job: Job, under_way: Archiving) -> Result:
    """Take the next action after all answers."""
    number, newest = under_way.generation, job.newest_generation
    hosts = under_way.hosts & frozenset(job.hosts)
    is_passed_over = newest is None or newest.number < number  # the job has gone back behind it
    if under_way.is_written:
        hosts &= under_way.failed
        if not hosts:
            return _done(job, under_way)
        if not under_way.again_at:  # they are asked again later
            later = replace(under_way, again_at=job.now + FINISH_AGAIN_S)
            return replace(job, copies=replace(job.copies, archiving=later)), ()
    elif under_way.failed or is_passed_over:
        wait_s = min(job.settings.archive_every_s, AGAIN_S)
        text = f"event=archive_given_up generation={number} again_s={wait_s:.0f}"
        return replace(
            job, copies=replace(job.copies, archiving=None, archive_at=job.now + wait_s)
        ), (Say(text),)
    order = job.copies.last_archive + 1
    finishing = replace(
        under_way, order=order, awaited=hosts, failed=frozenset(), is_written=True, again_at=0.0
    )
    return replace(job, copies=replace(job.copies, archiving=finishing, last_archive=order)), (
        Send(tuple(sorted(hosts)), commands.FinishArchive(order, number)),
    )


def _done(job: Job, under_way: Archiving) -> Result:
    """Release archives older than the kept ones: the generation is whole on the disk."""
    number = under_way.generation
    kept = (*job.copies.archived, number)[-job.settings.archive_keep :]
    job = replace(
        job,
        copies=replace(
            job.copies,
            archiving=None,
            archived=kept,
            archive_at=max(job.now, under_way.since + job.settings.archive_every_s),
        ),
    )
    took_s = job.now - under_way.since
    text = (
        f"event=archived generation={number} step={under_way.step} bytes={under_way.size_bytes} "
        f"took_s={took_s:.0f}"
    )
    if len(kept) < job.settings.archive_keep:
        return job, (Say(text),)
    # Hosts may still read a generation found on the disk.
    before = min([kept[0], *(generation.number for generation in job.states.generations)])
    return job, (Say(text), Send(tuple(sorted(job.hosts)), commands.Retire(before)))
