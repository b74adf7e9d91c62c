"""Consequences of time: a phase beyond its deadline (the table in ``deadlines``), and training that
hangs, without a worker's step for too long.

Ranks wait for each other and so have all made the same step: the number of steps rarely shows the
hung rank. A rank is behind if it does not answer, or stands elsewhere than most.

Source: MegaScale and ByteRobust (ByteDance), "stack aggregation": ranks with rare stacks are
suspected. Differs in: a rank in a collective is never suspected, and without evidence no rank is
named.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from scalai.core.job.assigning import next_assignment
from scalai.core.job.deadlines import HANG_STEPS, LEAST_HANG_S, LIMITS, PAUSES, REPORT_S
from scalai.core.job.failures import fail
from scalai.core.job.health import ask, bar_who_hangs
from scalai.core.job.hearing import broken, knock
from scalai.core.job.membership import TRAINING, Job, Phase, Wait, active
from scalai.core.job.starting import go_on
from scalai.core.job.transitions import (
    Result,
    missing,
    next_phase,
    show_stacks,
    stop_unbuilt,
    withdraw,
)
from scalai.core.messages.actions import Action, Lose, Say
from scalai.core.messages.reports import FRAMES_APART, SILENT, Stalled

COLLECTIVES = "torch/distributed/"
"""Frames of a rank in a collective, as far as Python knows."""
Ranks = Mapping[str, tuple[int, ...]]
"""Ranks by host."""


def behind(stalls: Mapping[str, Stalled]) -> Ranks:
    """Ranks awaited by the others, by host; none without evidence.

    Args:
        stalls: Stalls of all hosts of the round.
    """
    lowest = min(each.step for each in stalls.values())
    late = {host: each.ranks for host, each in stalls.items() if each.step == lowest}
    if len(late) < len(stalls):
        return late
    places = {rank: place for each in stalls.values() for rank, place in each.where}
    found = _apart(places)
    named = {
        host: tuple(rank for rank, _ in each.where if rank in found)
        for host, each in sorted(stalls.items())
    }
    return {host: ranks for host, ranks in named.items() if ranks}


def _apart(places: Mapping[int, str]) -> frozenset[int]:
    """Ranks apart: a minority without an answer, outside of a collective while others are in one,
    or with another innermost frame than most."""
    silent = {rank for rank, place in places.items() if place.startswith(SILENT)}
    if silent and 2 * len(silent) <= len(places):
        return frozenset(silent)
    waiting = {rank for rank, place in places.items() if COLLECTIVES in place}
    busy = places.keys() - waiting
    if busy and 2 * len(busy) <= len(places):
        return frozenset(busy)
    inner = Counter(place.partition(FRAMES_APART)[0] for place in places.values())
    if not inner or len(inner) == 1:
        return frozenset()
    ((most, count),) = inner.most_common(1)
    if 2 * count <= len(places):
        return frozenset()
    others = {rank for rank, place in places.items() if not place.startswith(most)}
    return frozenset(others - waiting)


PLACE = 200
"""Most characters of a rank's place in a log line."""


def limit_s(job: Job, stalled: Mapping[str, Stalled]) -> float:
    """Limit for a time without a step, in seconds.

    Many usual steps, if all workers are within a step of known usual duration; otherwise, and at
    most, the person's setting. It exceeds any pause so far, and doubles for each hang without a
    step in between: the pause may be longer than any before.
    """
    limit = job.settings.hang_s
    if stalled and all(each.is_within and each.usual_s for each in stalled.values()):
        usual = max(each.usual_s for each in stalled.values())
        limit = min(limit, max(LEAST_HANG_S, HANG_STEPS * usual))
    longest = max((each.longest_s for each in stalled.values()), default=0.0)
    step, count = job.budget.hung
    return max(limit, PAUSES * longest) * 2.0 ** (count if job.newest <= step else 0)


def hung(job: Job, stalled: Mapping[str, Stalled]) -> Result | None:
    """Restart the round if all its hosts report no steps for too long; else None. Finished workers
    wait for the others, in an evaluation perhaps.

    A host behind at a second hang is left out for a while, if the others can go on without it; it
    then counts as lost.
    """
    hosts = active(job)
    stalls = {host: stalled[host] for host in hosts & stalled.keys()}
    is_due = (
        job.settings.hang_s
        and job.phase in TRAINING
        and not job.attempt.finished
        and job.attempt.is_hooked
    )
    if not is_due or not hosts or stalls.keys() != hosts:
        return None
    waited, limit = min(each.for_s for each in stalls.values()), limit_s(job, stalls)
    if waited <= limit:
        return None
    step = min(each.step for each in stalls.values())
    _, count = job.budget.hung
    job = replace(
        job,
        budget=replace(
            job.budget, hung=(job.newest, count + 1 if job.newest <= job.budget.hung[0] else 1)
        ),
    )
    where = (
        f"the training hangs: no worker has made a step for {waited:.0f} s (limit {limit:.0f}) at "
        f"step {step}"
    )
    job, knocked = knock(job, hosts)
    said = Say(f"event=hung step={step} for_s={waited:.0f} limit_s={limit:.0f}")
    late = behind(stalls)
    if not late or late.keys() == hosts:
        named = f"; behind are {_names(late, stalls)}" if late else ""
        job, actions = fail(job, where + named, is_chance=True)
        return job, (said, *knocked, *actions)
    # If most are behind, the fault may lie with the few others.
    job, lines = bar_who_hangs(job, late if 2 * len(late) <= len(hosts) else (), waited)
    target = next_assignment(job)
    is_without = target is not None and not late.keys() & target.members
    reason = f"{where}; behind are {_names(late, stalls)}"
    job, asked = ask(job, late, "the others have waited for its workers in vain")
    job, actions = fail(job, reason, is_chance=True, is_loss=is_without)
    return job, (said, *knocked, *lines, *asked, *actions)


def _names(late: Ranks, stalls: Mapping[str, Stalled]) -> str:
    """Ranks behind, with the place of one per host."""
    named = []
    for host, ranks in late.items():
        places = dict(stalls[host].where)
        place = places.get(ranks[0], "")[:PLACE] if ranks else ""
        text = f"{host}: rank {','.join(map(str, ranks))}"
        named.append(f"{text} ({place})" if place else text)
    return ", ".join(named)


_REPORTED = (
    Phase.WAITING, Phase.STARTING, Phase.DRAINING, Phase.SNAPSHOTTING, Phase.PREPARING,
    Phase.FREEZING, Phase.RESCUING, Phase.EXAMINING,
    Phase.COMMITTING, Phase.STOPPING, Phase.SAVING,
)  # fmt: skip
_MEETING = (Phase.STARTING, Phase.BUILDING)
"""Phases with a rendezvous of all hosts' workers."""


def overdue(job: Job) -> Result:
    """The job at its present time, and consequences of a phase beyond its limits."""
    if job.wait.since is None:
        return replace(job, wait=replace(job.wait, since=job.now)), ()
    waited = job.now - job.wait.since
    limit = LIMITS[job.phase].seconds(job)
    if limit is not None and waited > limit:
        return _CONSEQUENCES[job.phase](job, waited)
    if waited < _report_at(job):
        return job, ()
    said: tuple[Action, ...] = ()
    if job.phase is Phase.BUILDING:  # the present workers train, and have no place to report
        job = replace(job, wait=replace(job.wait, reports=job.wait.reports + 1))
    elif job.phase in _REPORTED:
        job, said = report(job, waited)
    if job.phase not in _MEETING:
        return job, said
    meeting = (
        job.change.standby.assignment.active if job.change.standby is not None else active(job)
    )
    job, asked = knock(job, meeting)
    return job, (*said, *asked)


def _report_at(job: Job) -> float:
    reports = job.wait.reports
    if job.phase is Phase.WAITING:
        return REPORT_S * (reports + 1)
    first_s = REPORT_S
    if job.phase is Phase.STARTING:  # before its time is over
        first_s = min(first_s, job.settings.start_timeout_s / 2)
    return first_s * float(2**reports)


def report(job: Job, waited: float) -> Result:
    """Log the reason of a wait."""
    job = replace(job, wait=replace(job.wait, reports=job.wait.reports + 1))
    text = f"event=slow phase={job.phase.value} since_s={waited:.0f} {_awaited(job)}"
    return job, (Say(text), *show_stacks(job.awaited & active(job)))


def _awaited(job: Job) -> str:
    """Missing acts and their hosts."""
    if job.phase is Phase.WAITING:
        return missing(job)
    return f"awaited: {', '.join(_with_progress(job, host) for host in sorted(job.awaited))}"


def _with_progress(job: Job, host: str) -> str:
    if job.phase is Phase.STARTING:
        return f"{host} ({job.attempt.progress.get(host, 'nothing')} so far)"
    return f"{host} ({job.stop.held[host]})" if host in job.stop.held else host


def _not_started(job: Job, waited: float) -> Result:
    job, reported = report(job, waited)
    reason = f"no progress of the start within {waited:.0f} s, {_awaited(job)}{broken(job)}"
    job, actions = fail(job, reason, is_standstill=True)
    return job, (*reported, *actions)


def _not_built(job: Job, waited: float) -> Result:
    return stop_unbuilt(job, f"not built within {job.settings.build_timeout_s:.0f} s")


def _not_drained(job: Job, waited: float) -> Result:
    present = job.current.active if job.current else ()
    lost = sorted(set(present) - active(job))
    if lost:  # the others wait for its workers within a step
        return fail(job, f"host {lost[0]} is lost on the way to the stop", is_loss=True)
    reason = f"not every worker came to step {job.stop.step} within {waited:.0f} s, {_awaited(job)}"
    return withdraw(job, reason)


def _without_the_silent(job: Job, waited: float) -> Result:
    """Go on without the reports of silent hosts."""
    text = f"event=slow phase={job.phase.value} since_s={waited:.0f} {_awaited(job)}: done without"
    job = replace(job, awaited=frozenset())
    job, actions = go_on(job) if job.phase is Phase.EXAMINING else next_phase(job)
    return job, (Say(text), *actions)


def _silent(job: Job, waited: float) -> Result:
    silent = job.awaited - job.stop.held.keys() or job.awaited
    others = set(job.hosts) - silent
    if not others:
        is_due = waited >= _report_at(job)
        return report(job, waited) if is_due else (job, ())
    reason = f"no answer within {waited:.0f} s in phase {job.phase.value}"
    job = replace(job, wait=Wait(job.now))  # logged again for indispensable hosts
    return job, (Lose(tuple(sorted(silent)), reason),)


_CONSEQUENCES: Mapping[Phase, Callable[[Job, float], Result]] = {
    Phase.STARTING: _not_started,
    Phase.EXAMINING: _without_the_silent,
    Phase.BUILDING: _not_built,
    Phase.PREPARING: _silent,
    Phase.DRAINING: _not_drained,
    Phase.SNAPSHOTTING: _silent,
    Phase.FREEZING: _without_the_silent,
    Phase.RESCUING: _without_the_silent,
    Phase.COMMITTING: _silent,
    Phase.STOPPING: _silent,
}
