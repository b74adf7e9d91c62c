"""The rules by which what only a host holds leaves it before it is taken away, where its drain is
likely to end too late: others fetch it at once, ahead of all other replicas."""

from dataclasses import replace

from scalai.core.job.copies import Replication
from scalai.core.job.membership import TRAINING, Job, Phase
from scalai.core.job.replicating import keepers
from scalai.core.messages.actions import Action, Replicate, Say

Result = tuple[Job, tuple[Action, ...]]

_FETCHING = (*TRAINING, Phase.WAITING, Phase.PREPARING, Phase.DRAINING)
"""Phases in which hosts have nothing else to fetch, and no newer generation is written."""


def givers(job: Job) -> frozenset[str]:
    """Return the hosts that are taken away before their drain is likely to have ended."""
    short = frozenset(host.name for host in job.hosts.values() if host.is_short)
    return short & job.newest_generation.hosts if job.newest_generation else frozenset()


def evacuate(job: Job) -> Result:
    """Have others fetch what only hosts hold that will be taken away, of the newest generation.
    Asked at a notice and with every tick."""
    under_way, giving, newest = job.replication, givers(job), job.newest_generation
    if under_way is not None and under_way.giving - giving:  # some have left, or stay after all
        job = replace(job, replication=None)
        under_way = None
    if newest is None or not giving or job.uncommitted or job.phase not in _FETCHING:
        return job, ()
    hosts = keepers(job)
    if job.evacuated == (newest.number, giving) or not hosts:
        return job, ()
    if under_way is not None and under_way.giving == giving:
        is_again_due = not under_way.awaited and job.now >= under_way.again_at
        if under_way.generation == newest.number and not is_again_due:
            return job, ()
    order = job.last_replication + 1
    ordered = Replication(order, newest.number, hosts, hosts, job.now, giving=giving)
    names = ", ".join(sorted(giving))
    return replace(job, replication=ordered, last_replication=order), (
        Say(f"what only {names} holds of generation {newest.number} goes to other hosts first"),
        Replicate(tuple(sorted(hosts)), order, newest.number, 1, tuple(sorted(giving))),
    )
