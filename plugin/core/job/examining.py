"""What is examined of a generation, and what comes of it.

A start that fails before its proof may fail by what it has read: before that counts as a failure of
the script, all hosts read their parts of the generation again. What is damaged counts no more, and
the job begins again from what is whole then. While the job trains, a host is asked alone that gave
another one what it had not committed.
"""

from dataclasses import replace

from scalai.core.job.failures import fail, try_again
from scalai.core.job.membership import TRAINING, Examination, Job, Phase
from scalai.core.job.transitions import Result, answered, end
from scalai.core.messages import events
from scalai.core.messages.actions import Action, Doubt, Examine, GoBack, Say


def start_failed(event: events.WorkersFailed, job: Job, reason: str) -> Result | None:
    """Workers have failed: have it examined what they had begun to read. None: nothing was, or what
    was is proven. A signal is taken for chance once, but for the one by which a file tells that it
    has become too short."""
    start = job.start
    is_starting = job.phase is Phase.STARTING and event.host in start.published
    if not is_starting or start.source is None or start.is_proven:
        return None
    is_chance = event.is_chance and "SIGBUS" not in event.reason
    if is_chance and not job.was_start_killed:
        return fail(replace(job, was_start_killed=True), reason, is_chance=True)
    failure = Examination(
        start.source, reason, is_chance=event.is_chance, is_refusal=event.is_refusal
    )
    return _examine(job, failure)


def proof_failed(event: events.ProofFailed, job: Job) -> Result:
    """What is stored is damaged, or what was fetched: where nobody finds damage the latter goes and
    is fetched anew, and the second time the job ends. What a proof says of a generation counts also
    in a round that is being stopped."""
    source = job.start.source
    if event.round != job.round or source is None:
        return job, ()
    if job.phase is Phase.EXAMINING and job.examination is not None and not event.is_second:
        found = replace(job.examination, is_proof=True, can_reread=event.can_reread)
        return replace(job, examination=found), ()
    if job.phase is not Phase.STARTING:
        asked = () if event.is_second else (Examine(tuple(sorted(job.hosts)), source),)
        return job, asked
    if event.is_second:
        return end(job, 3, event.reason)
    failure = Examination(source, event.reason, is_proof=True, can_reread=event.can_reread)
    return _examine(job, failure)


def _examine(job: Job, examination: Examination) -> Result:
    hosts = frozenset(job.hosts)
    job = replace(job, phase=Phase.EXAMINING, awaited=hosts, examination=examination)
    number = examination.generation
    text = (
        f"event=examine generation={number}: {examination.reason}. It is not proven yet, so all "
        "hosts compare their parts of it with what was committed"
    )
    return job, (Say(text), Examine(tuple(sorted(hosts)), number))


def examined(event: events.Examined, job: Job) -> Result:
    under_way = job.examination
    if under_way is None or under_way.generation != event.generation:
        return _damaged(job, event.generation) if event.is_damaged else (job, ())
    is_damaged = under_way.is_damaged or event.is_damaged
    job = replace(job, examination=replace(under_way, is_damaged=is_damaged))
    return go_on(answered(job, event.host))


def lost(job: Job, host: str, *, was_active: bool) -> Result:
    """A host is gone that may have been asked; where it ran workers, that was the failure."""
    assert job.examination is not None
    examination = replace(job.examination, is_loss=job.examination.is_loss or was_active)
    return go_on(answered(replace(job, examination=examination), host))


def go_on(job: Job) -> Result:
    """Say what comes of the failure, once all hosts have answered."""
    if job.awaited:
        return job, ()
    found = job.examination
    assert found is not None
    job = replace(job, phase=Phase.STARTING, examination=None, was_start_killed=False)
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
        return (Doubt(tuple(sorted(job.hosts)), found.generation),)
    kept = (
        f"generation {found.generation} stays as it is: of some of it there is nothing but what "
        "was fetched"
    )
    return (Say(kept),)


def suspected(event: events.Suspected, job: Job) -> Result:
    """Ask who gave what is not right. A start that can do without it goes on: what is left of such
    damage then is found when replicas are made."""
    hosts = tuple(sorted(set(event.hosts) & set(job.hosts)))
    if not hosts or job.phase not in TRAINING:
        return job, ()
    return job, (Examine(hosts, event.generation),)


def _damaged(job: Job, number: int) -> Result:
    """A host has found damage that was asked alone, or answers late: replicas are made anew, and a
    start from it begins again. While the job trains, an older generation that is whole takes the
    place of one that is not any more: that gives its room back, or no later one would find any.
    """
    newest, start = job.newest_generation, job.start
    job = replace(job, replication=None, replicated=None)
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
    is_waiting = job.phase is Phase.WAITING and job.changed_at is None
    if not is_waiting or not job.loss or job.generations or job.looking & job.hosts.keys():
        return None
    return end(job, 3, job.loss)
