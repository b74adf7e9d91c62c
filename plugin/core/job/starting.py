"""The rules of a start: when the workers of all hosts have built, when what they have restored is
proven, and when they train. What comes of a proof that fails is in ``examining``.

A round that begins from the script's own initial state restores nothing and proves nothing.
"""

from dataclasses import replace

from scalai.core.job.membership import Job, Phase, active
from scalai.core.job.transitions import Result
from scalai.core.messages import events
from scalai.core.messages.actions import Expect, Proceed, Prove


def progressed(event: events.Progressed, job: Job) -> Result:
    if job.phase is not Phase.STARTING or event.round != job.round:
        return job, ()
    return replace(job, progress={**job.progress, event.host: event.what}), ()


def published(event: events.Published, job: Job) -> Result:
    """A script that nothing hooked at first publishes late, while the job runs."""
    start, hosts = job.start, active(job)
    if event.round != job.round or event.host not in hosts or event.host in start.published:
        return job, ()
    start = replace(start, published=start.published | {event.host})
    job, _ = progressed(
        events.Progressed(event.host, event.round, "published"), replace(job, start=start)
    )
    return job, (Expect(tuple(sorted(hosts))),) if start.published >= hosts else ()


def restored(event: events.Restored, job: Job) -> Result:
    start, source, hosts = job.start, job.start.source, active(job)
    if event.round != job.round or source is None or event.host not in hosts:
        return job, ()
    if event.host in start.restored:
        return job, ()
    start = replace(start, restored=start.restored | {event.host})
    job, _ = progressed(
        events.Progressed(event.host, event.round, "restored"), replace(job, start=start)
    )
    return job, (Prove(source),) if start.restored >= hosts else ()


def proven(event: events.Proven, job: Job) -> Result:
    if event.round != job.round or job.start.is_proven:
        return job, ()
    job = replace(job, start=replace(job.start, is_proven=True))
    if job.phase is Phase.EXAMINING:  # its workers have failed already
        return job, ()
    return job, (Proceed(tuple(sorted(active(job)))),)
