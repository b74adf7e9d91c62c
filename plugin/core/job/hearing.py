"""Rules for unconnected pairs of hosts, each in contact with the coordinator.

Hosts of a stalled start probe each other; the job goes on with the largest connected set. The
others stay in the job, and return once they are connected.
"""

from collections.abc import Iterable
from dataclasses import replace

from scalai.core.job.assigning import next_assignment
from scalai.core.job.deadlines import ANSWER_S, CHECK_AGAIN_S, LONGEST_CHECK_AGAIN_S
from scalai.core.job.failures import fail
from scalai.core.job.fitness import Knocking, Links, Pair, all_hear
from scalai.core.job.health import strike
from scalai.core.job.membership import RESIZABLE, TRAINING, Job, Phase, active
from scalai.core.job.transitions import Result, changed, consider
from scalai.core.messages import reports
from scalai.core.messages.actions import Action, Say, TryLinks

MOST_NAMED = 10
"""Pairs that a message names."""


def knock(job: Job, hosts: Iterable[str]) -> Result:
    """Probe connections between hosts, unless a probe is in progress."""
    asked = frozenset(hosts) & job.hosts.keys()
    if len(asked) < 2 or job.health.links.knocking is not None:
        return job, ()
    order = job.health.links.last_order + 1
    under_way = Knocking(order, job.now, asked, asked)
    job = replace(
        job,
        health=replace(
            job.health, links=replace(job.health.links, knocking=under_way, last_order=order)
        ),
    )
    return job, (TryLinks(tuple(sorted(asked)), order),)


def knocked(report: reports.Knocked, host: str, job: Job) -> Result:
    """Record a host's unconnected peers."""
    under_way = job.health.links.knocking
    if under_way is None or under_way.order != report.order or host not in under_way.awaited:
        return job, ()
    named = {frozenset((host, name)) for name in report.unheard if name in under_way.hosts}
    under_way = replace(
        under_way, awaited=under_way.awaited - {host}, unheard=under_way.unheard | named
    )
    return _conclude(
        replace(
            job, health=replace(job.health, links=replace(job.health.links, knocking=under_way))
        )
    )


def ticked(job: Job) -> Result:
    """Go on without late answers; probe unconnected hosts again."""
    links = job.health.links
    if links.knocking is not None:
        return _conclude(job)
    is_due = links.unheard and job.now >= links.again_at
    if not is_due or job.phase not in (*TRAINING, Phase.WAITING):
        return job, ()
    return knock(job, {name for pair in links.unheard for name in pair})


def forget(job: Job, host: str) -> Job:
    """The job without this host's pairs: it is lost, or has a new agent."""
    unheard = frozenset(pair for pair in job.health.links.unheard if host not in pair)
    under_way = job.health.links.knocking
    if under_way is not None:
        under_way = replace(
            under_way, hosts=under_way.hosts - {host}, awaited=under_way.awaited - {host}
        )
    return replace(
        job,
        health=replace(
            job.health, links=replace(job.health.links, unheard=unheard, knocking=under_way)
        ),
    )


def broken(job: Job) -> str:
    """Text on unconnected hosts of the present round; "" if none."""
    pairs = frozenset(pair for pair in job.health.links.unheard if pair <= active(job))
    return f"; {_names(pairs)}" if pairs else ""


def _conclude(job: Job) -> Result:
    """Use the result, after all answers or the time limit."""
    under_way = job.health.links.knocking
    assert under_way is not None
    if under_way.awaited and job.now - under_way.at <= ANSWER_S:
        return job, ()
    before = job.health.links.unheard
    kept = {pair for pair in before if not pair <= under_way.hosts}
    unheard = frozenset(kept | {p for p in under_way.unheard if p <= under_way.hosts})
    if job.phase in TRAINING:  # who trains together hears each other
        unheard = frozenset(pair for pair in unheard if not pair <= active(job))
    tries = job.health.links.tries + 1 if unheard & before else 0
    again_at = job.now + min(CHECK_AGAIN_S * 2.0**tries, LONGEST_CHECK_AGAIN_S)
    job = replace(
        job,
        health=replace(job.health, links=Links(unheard, None, under_way.order, again_at, tries)),
    )
    new = f"event=unheard {_names(unheard - before)}, though the coordinator hears them"
    said = [Say(new)] if unheard - before else []
    if before - unheard:
        said.append(Say(f"event=heard_again {_listed(before - unheard)} hear each other again"))
    job, actions = _act(job, has_healed=bool(before - unheard))
    return job, (*said, *actions)


def _act(job: Job, *, has_healed: bool) -> Result:
    unheard = job.health.links.unheard
    none: tuple[Action, ...] = ()
    if job.phase is Phase.STARTING and not all_hear(active(job), unheard):
        target = next_assignment(job)
        if target is None or not all_hear(target.members, unheard):
            return job, none  # nothing fits without one of them
        reason = f"the start stands still{broken(job)}"
        job, lines = strike(job, active(job) - target.members)
        job, actions = fail(job, reason, is_loss=True, is_free=True)
        return job, (*lines, *actions)
    standby = job.change.standby
    if job.phase is Phase.BUILDING and standby and not all_hear(standby.assignment.active, unheard):
        members = standby.assignment.members
        struck = {name for pair in unheard if pair <= members for name in pair}
        job, lines = strike(job, struck - active(job))
        job, actions = consider(job)
        return job, (*lines, *actions)
    return changed(job, job.now) if has_healed and job.phase in RESIZABLE else (job, none)


def _names(pairs: frozenset[Pair]) -> str:
    return f"{_listed(pairs)} do not hear each other"


def _listed(pairs: frozenset[Pair]) -> str:
    listed = sorted(" and ".join(sorted(pair)) for pair in pairs)
    more = f", {len(listed) - MOST_NAMED} pairs more," if len(listed) > MOST_NAMED else ""
    return ", ".join(listed[:MOST_NAMED]) + more
