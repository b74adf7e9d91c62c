"""The rules of a start: builds, restores, the proof, and what is examined where it fails.

A start that fails before its proof may fail by the bytes that it has read. Before that counts as a
failure of the script, all hosts read their parts of the generation again: damaged pieces count no
more, and the job begins again from a whole state. While the job trains, a host is asked alone that
gave another one bytes which it had not committed. A round that begins from the script's own initial
state restores nothing and proves nothing.
"""

from collections.abc import Iterable
from dataclasses import replace

from scalai.core.job.failures import fail, try_again
from scalai.core.job.membership import TRAINING, Examination, Job, Phase, active
from scalai.core.job.transitions import Result, answered, end
from scalai.core.messages import commands, events, reports
from scalai.core.messages.actions import Action, CountTensors, GoBack, Order, Prove, Say


def moved(report: reports.Moved, host: str, job: Job) -> Result:
    return _progressed(job, report.round, host, f"moved {report.bytes / 1e9:.6f} GB"), ()


def _progressed(job: Job, round: int, host: str, what: str) -> Job:
    """The job whose host has come further in its start: ``what`` it has done."""
    if job.phase is not Phase.STARTING or round != job.round:
        return job
    return replace(job, attempt=replace(job.attempt, progress={**job.attempt.progress, host: what}))


def published(report: reports.Published, host: str, job: Job) -> Result:
    """A script that nothing hooked at first publishes late, while the job runs."""
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
    return job, (Order(tuple(sorted(active(job))), commands.Proceed(job.round)),)


def start_failed(report: reports.WorkersFailed, host: str, job: Job, reason: str) -> Result | None:
    """Workers have failed: have it examined what they had begun to read. None: nothing was, or what
    was is proven. A signal is taken for chance once, but for the one by which a file tells that it
    has become too short."""
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
    """What is stored is damaged, or what was fetched: where nobody finds damage the latter goes and
    is fetched anew, and the second time the job ends. What a proof says of a generation counts also
    in a round that is being stopped."""
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


def _examine(hosts: Iterable[str], number: int) -> Order:
    return Order(tuple(sorted(hosts)), commands.Examine(number))


def examined(report: reports.Examined, host: str, job: Job) -> Result:
    under_way = job.examination
    if under_way is None or under_way.generation != report.generation:
        return _damaged(job, report.generation) if report.damage else (job, ())
    is_damaged = under_way.is_damaged or bool(report.damage)
    job = replace(job, failure=replace(under_way, is_damaged=is_damaged))
    return go_on(answered(job, host))


def lost(job: Job, host: str, *, was_active: bool) -> Result:
    """A host is gone that may have been asked; where it ran workers, that was the failure."""
    assert job.examination is not None
    examination = replace(job.examination, is_loss=job.examination.is_loss or was_active)
    return go_on(answered(replace(job, failure=examination), host))


def go_on(job: Job) -> Result:
    """Say what comes of the failure, once all hosts have answered."""
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
    """Before the workers are stopped: the next round's sources are known by then."""
    if found.can_reread:
        return (Order(tuple(sorted(job.hosts)), commands.Doubt(found.generation)),)
    kept = (
        f"generation {found.generation} stays as it is: of some of it there is nothing but what "
        "was fetched"
    )
    return (Say(kept),)


def suspected(report: reports.Suspected, host: str, job: Job) -> Result:
    """Ask who gave what is not right. A start that can do without it goes on: what is left of such
    damage then is found when replicas are made."""
    hosts = set(report.hosts) & set(job.hosts)
    if not hosts or job.phase not in TRAINING:
        return job, ()
    return job, (_examine(hosts, report.generation),)


def _damaged(job: Job, number: int) -> Result:
    """A host has found damage that was asked alone, or answers late: replicas are made anew, and a
    start from it begins again. While the job trains, an older generation that is whole takes the
    place of one that is not any more: that gives its room back, or no later one would find any.
    """
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
    """End a job that waits for what nobody can bring: what it had is damaged, and everybody has
    looked for something older. None: it goes on."""
    is_waiting = job.phase is Phase.WAITING and job.change.at is None
    if (
        not is_waiting
        or not job.states.loss
        or job.states.generations
        or job.states.looking & job.hosts.keys()
    ):
        return None
    return end(job, 3, job.states.loss)
