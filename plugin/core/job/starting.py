"""Rules of a start: builds, restores, the proof, and the examination after a failure.

Damaged bytes may be the cause of a failure before the proof. Before it counts against the script,
all hosts read their parts of the generation again: damaged pieces no longer count, and the job
restarts from a whole state. During training, a host is examined alone after it gave bytes that
differ from its committed fingerprints. A round from the script's own initial state restores and
proves nothing.
"""

from collections.abc import Iterable
from dataclasses import replace

from scalai.core.job.failures import fail, try_again
from scalai.core.job.membership import TRAINING, Examination, Job, Phase, active
from scalai.core.job.transitions import Result, answered, end
from scalai.core.messages import commands, events, reports
from scalai.core.messages.actions import Action, CountTensors, GoBack, Prove, Say, Send


def moved(report: reports.Moved, host: str, job: Job) -> Result:
    return _progressed(job, report.round, host, f"moved {report.bytes / 1e9:.6f} GB"), ()


def _progressed(job: Job, round: int, host: str, what: str) -> Job:
    """The job after a host's act ``what`` in its start."""
    if job.phase is not Phase.STARTING or round != job.round:
        return job
    return replace(job, attempt=replace(job.attempt, progress={**job.attempt.progress, host: what}))


def published(report: reports.Published, host: str, job: Job) -> Result:
    """An unhooked script publishes late, while the job runs."""
    start, hosts = job.attempt, active(job)
    if report.round != job.round or host not in hosts or host in start.published:
        return job, ()
    start = replace(start, published=start.published | {host})
    job = _progressed(replace(job, attempt=start), report.round, host, "published")
    return job, (CountTensors(tuple(sorted(hosts))),) if start.published >= hosts else ()


def restored(report: reports.Restored, host: str, job: Job) -> Result:
    start, source, hosts = job.attempt, job.attempt.source, active(job)
    if report.round != job.round or source is None or host not in hosts:
        return job, ()
    if host in start.restored:
        return job, ()
    start = replace(start, restored=start.restored | {host})
    job = _progressed(replace(job, attempt=start), report.round, host, "restored")
    return job, (Prove(source),) if start.restored >= hosts else ()


def proven(event: events.Proven, job: Job) -> Result:
    if event.round != job.round or job.attempt.is_proven:
        return job, ()
    job = replace(job, attempt=replace(job.attempt, is_proven=True))
    if job.phase is Phase.EXAMINING:  # its workers have failed already
        return job, ()
    return job, (Send(tuple(sorted(active(job))), commands.Proceed(job.round)),)


def start_failed(report: reports.WorkersFailed, host: str, job: Job, reason: str) -> Result | None:
    """Examine the source of failed workers; None without a source, or after its proof. A signal
    counts as chance once, except SIGBUS, the sign of a truncated file."""
    start = job.attempt
    is_starting = job.phase is Phase.STARTING and host in start.published
    if not is_starting or start.source is None or start.is_proven:
        return None
    is_chance = report.is_chance and "SIGBUS" not in report.reason
    if is_chance and not job.budget.was_start_killed:
        return fail(
            replace(job, budget=replace(job.budget, was_start_killed=True)), reason, is_chance=True
        )
    failure = Examination(
        start.source, reason, is_chance=report.is_chance, is_refusal=report.is_refusal
    )
    return _examine_all(job, failure)


def proof_failed(event: events.ProofFailed, job: Job) -> Result:
    """Handle damage of stored or fetched pieces. If no host finds damage, the fetched pieces are
    fetched anew, and a second failure ends the job. A verdict counts also for a round being
    stopped."""
    source = job.attempt.source
    if event.round != job.round or source is None:
        return job, ()
    if job.phase is Phase.EXAMINING and job.examination is not None and not event.is_second:
        found = replace(job.examination, is_proof=True, can_reread=event.can_reread)
        return replace(job, failure=found), ()
    if job.phase is not Phase.STARTING:
        asked = () if event.is_second else (_examine(job.hosts, source),)
        return job, asked
    if event.is_second:
        return end(job, 3, event.reason)
    failure = Examination(source, event.reason, is_proof=True, can_reread=event.can_reread)
    return _examine_all(job, failure)


def _examine_all(job: Job, examination: Examination) -> Result:
    hosts = frozenset(job.hosts)
    job = replace(job, phase=Phase.EXAMINING, awaited=hosts, failure=examination)
    number = examination.generation
    text = (
        f"event=examine generation={number}: {examination.reason}. It is not proven yet, so all "
        "hosts compare their parts of it with what was committed"
    )
    return job, (Say(text), _examine(hosts, number))


def _examine(hosts: Iterable[str], number: int) -> Send:
    return Send(tuple(sorted(hosts)), commands.Examine(number))


def examined(report: reports.Examined, host: str, job: Job) -> Result:
    under_way = job.examination
    if under_way is None or under_way.generation != report.generation:
        return _damaged(job, report.generation) if report.damage else (job, ())
    is_damaged = under_way.is_damaged or bool(report.damage)
    job = replace(job, failure=replace(under_way, is_damaged=is_damaged))
    return go_on(answered(job, host))


def lost(job: Job, host: str, *, was_active: bool) -> Result:
    """Count out a lost host; its loss was the failure, if it ran workers."""
    assert job.examination is not None
    examination = replace(job.examination, is_loss=job.examination.is_loss or was_active)
    return go_on(answered(replace(job, failure=examination), host))


def go_on(job: Job) -> Result:
    """Go on after the failure, once all hosts have answered."""
    if job.awaited:
        return job, ()
    found = job.examination
    assert found is not None
    job = replace(
        job, phase=Phase.STARTING, failure=None, budget=replace(job.budget, was_start_killed=False)
    )
    if found.is_damaged:
        return try_again(job, f"{found.reason}; damage was found in generation {found.generation}")
    if found.is_proof:
        doubt = _doubt(job, found)
        job, actions = try_again(job, found.reason)
        return job, (*doubt, *actions)
    whole = Say(f"event=examined generation={found.generation}: nothing of it is damaged")
    job, actions = fail(
        job, found.reason, is_loss=found.is_loss, is_chance=found.is_chance,
        is_refusal=found.is_refusal,
    )  # fmt: skip
    return job, (whole, *actions)


def _doubt(job: Job, found: Examination) -> tuple[Action, ...]:
    """Action before the workers stop: the next round's sources are known by then."""
    if found.can_reread:
        return (Send(tuple(sorted(job.hosts)), commands.Doubt(found.generation)),)
    kept = (
        f"generation {found.generation} stays as it is: of some of it there is nothing but what "
        "was fetched"
    )
    return (Say(kept),)


def suspected(report: reports.Suspected, host: str, job: Job) -> Result:
    """Examine the givers of wrong bytes. A start that can do without them goes on: replication
    finds remaining damage."""
    hosts = set(report.hosts) & set(job.hosts)
    if not hosts or job.phase not in TRAINING:
        return job, ()
    return job, (_examine(hosts, report.generation),)


def _damaged(job: Job, number: int) -> Result:
    """Handle damage found alone or late: replicas are made anew, and a start from the generation is
    repeated. During training an older whole generation replaces the damaged one and frees its room,
    which no later one could find otherwise."""
    newest, start = job.newest_generation, job.attempt
    job = replace(job, copies=replace(job.copies, replication=None, replicated=None))
    if job.phase is Phase.STARTING and start.source == number and not start.is_proven:
        return try_again(job, f"damage was found in generation {number}, from which it begins")
    if newest is None or newest.number >= number or job.phase not in TRAINING:
        return job, ()
    text = (
        f"event=given_up generation={number}: parts of it are damaged, and nobody else has them; "
        f"until the next one, the newest is generation {newest.number} of step {newest.step}"
    )
    return job, (Say(text), GoBack(tuple(sorted(job.hosts)), newest.number))


def ticked(job: Job) -> Result | None:
    """End a job that waits in vain: its state is damaged, and no host has an older one. None: it
    goes on."""
    is_waiting = job.phase is Phase.WAITING and job.change.at is None
    if (
        not is_waiting
        or not job.states.loss
        or job.states.generations
        or job.states.looking & job.hosts.keys()
    ):
        return None
    return end(job, 3, job.states.loss)
