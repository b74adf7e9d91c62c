"""The rules of a start: when the workers of all hosts have built, when what they have restored is
proven, when they train, and what comes of a proof that fails.

A round that begins from the script's own initial state restores nothing and proves nothing.
"""

from dataclasses import replace

from scalai.core import events
from scalai.core.actions import Action, Doubt, Expect, Proceed, Prove, Say
from scalai.core.failures import try_again
from scalai.core.membership import Job, Phase, active
from scalai.core.transitions import Result, end


def progressed(event: events.Progressed, job: Job) -> Result:
    if job.phase is not Phase.STARTING or event.round != job.round:
        return job, ()
    return replace(job, progress={**job.progress, event.host: event.what}), ()


def published(event: events.Published, job: Job) -> Result:
    """A script that nothing hooked at first publishes late, while the job runs."""
    start, hosts = job.start, active(job)
    if event.round != job.round or event.host not in hosts - start.published:
        return job, ()
    start = replace(start, published=start.published | {event.host})
    job, _ = progressed(
        events.Progressed(event.host, event.round, "published"), replace(job, start=start)
    )
    return job, (Expect(tuple(sorted(hosts))),) if start.published >= hosts else ()


def restored(event: events.Restored, job: Job) -> Result:
    start, source, hosts = job.start, job.start.source, active(job)
    if event.round != job.round or source is None or event.host not in hosts - start.restored:
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
    return job, (Proceed(tuple(sorted(active(job)))),)


def proof_failed(event: events.ProofFailed, job: Job) -> Result:
    """Everything that was fetched goes, and is fetched anew; the second time, what is stored is
    damaged, and the job ends. What a proof says of a generation counts also in a round that is
    being stopped."""
    source = job.start.source
    if event.round != job.round or source is None:
        return job, ()
    is_starting = job.phase is Phase.STARTING
    if event.is_second:
        return end(job, 3, event.reason) if is_starting else (job, ())
    doubt = _doubt(job, source, can_reread=event.can_reread)
    job, actions = try_again(job, event.reason) if is_starting else (job, ())
    return job, (*doubt, *actions)


def _doubt(job: Job, source: int, *, can_reread: bool) -> tuple[Action, ...]:
    """Before the workers are stopped: the next round's sources are known by then."""
    if can_reread:
        return (Doubt(tuple(sorted(job.hosts)), source),)
    kept = (
        f"generation {source} stays as it is: of some of it there is nothing but what was fetched"
    )
    return Doubt((), source), Say(kept)
