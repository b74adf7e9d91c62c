"""Hosts that come and go, or that break every round they join, are kept out of the rounds of the
others for a while, longer each time.

They stay in the job: their stores serve, and they are taken at once where nothing fits without
them.
"""

from collections.abc import Iterable
from dataclasses import replace

from scalai.core.job.membership import Job
from scalai.core.messages.actions import Action, Say

STRIKES = 3
"""Losses of a host, or rounds that failed as it joined, before it waits."""
WINDOW_S = 3600.0
"""What is longer ago does not count."""
LONGEST_S = 3600.0
HANGS = 2
"""Hangs at which a host was behind before it waits."""
HANG_WAITS = 4
"""It waits so many times as long as the others have waited for it, at first."""


def strike(job: Job, hosts: Iterable[str]) -> tuple[Job, tuple[Action, ...]]:
    """Return the job after these hosts were lost or made a round fail, and what is said of it."""
    strikes = {name: _recent(job, times) for name, times in job.strikes.items()}
    strikes = {name: times for name, times in strikes.items() if times}
    barred, lines = dict(job.barred), []
    for host in sorted(hosts):
        strikes[host] = (*strikes.get(host, ()), job.now)
        beyond = len(strikes[host]) - STRIKES
        if beyond >= 0 and job.quarantine_s:
            waits_s = min(job.quarantine_s * 2.0**beyond, LONGEST_S)
            barred[host] = job.now + waits_s
            lines.append(
                Say(
                    f"host {host} was lost or failed to join {len(strikes[host])} times within "
                    f"{WINDOW_S / 60:.0f} minutes: the others go on without it for {waits_s:.0f} s"
                )
            )
    return replace(job, strikes=strikes, barred=barred), tuple(lines)


def bar_who_hangs(
    job: Job, hosts: Iterable[str], waited_s: float
) -> tuple[Job, tuple[Action, ...]]:
    """Return the job after these hosts have kept the others waiting for so long, and what is said
    of it. How often they did is forgotten when they join anew."""
    hangs, barred, lines = dict(job.hangs), dict(job.barred), []
    for host in sorted(hosts):
        hangs[host] = hangs.get(host, 0) + 1
        if hangs[host] < HANGS or not job.quarantine_s:
            continue
        least_s = max(job.quarantine_s, HANG_WAITS * waited_s)
        waits_s = max(least_s, min(least_s * 2.0 ** (hangs[host] - HANGS), LONGEST_S))
        barred[host] = max(barred.get(host, 0.0), job.now + waits_s)
        lines.append(
            Say(
                f"host {host} has kept the others waiting at {hangs[host]} hangs: they go on "
                f"without it for {waits_s:.0f} s, or until its agent is started anew"
            )
        )
    return replace(job, hangs=hangs, barred=barred), tuple(lines)


def joined_anew(job: Job, host: str) -> Job:
    """Return the job after the agent of a host has come: what hung on it is over. What has flapped
    waits all the same."""
    if host not in job.hangs:
        return job
    is_flapping = len(_recent(job, job.strikes.get(host, ()))) >= STRIKES
    hangs = {name: count for name, count in job.hangs.items() if name != host}
    barred = {n: until for n, until in job.barred.items() if n != host or is_flapping}
    return replace(job, hangs=hangs, barred=barred)


def _recent(job: Job, times: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(at for at in times if job.now - at < WINDOW_S)


def pardon(job: Job) -> Job:
    """Return the job without the bars whose time is over."""
    barred = {host: until for host, until in job.barred.items() if until > job.now}
    return job if len(barred) == len(job.barred) else replace(job, barred=barred)
