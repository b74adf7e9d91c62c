"""The rule for a training that hangs: no worker makes a step for longer than anything has taken."""

from collections.abc import Mapping
from dataclasses import replace

from scalai.core.events import Stalled
from scalai.core.failures import fail
from scalai.core.membership import TRAINING, Job, active
from scalai.core.quarantine import strike
from scalai.core.transitions import Result

PAUSES = 3
"""So many times as the longest pause that ended by itself (an evaluation, a save) one may take."""


def limit_s(job: Job, stalled: Mapping[str, Stalled]) -> float:
    """Return how long no step may be made, in seconds: longer than any pause so far, and twice as
    long each time that the job has hung without a step in between, because that may be a pause
    longer than any before."""
    longest = max((each.longest_s for each in stalled.values()), default=0.0)
    step, count = job.hung
    return max(job.hang_s, PAUSES * longest) * 2.0 ** (count if job.newest <= step else 0)


def hung(job: Job, stalled: Mapping[str, Stalled]) -> Result | None:
    """Start the round again where all of its hosts say that their workers make no steps, for too
    long; None where that is not so. Who has finished waits for the others, who may evaluate."""
    hosts = active(job)
    stalls = {host: stalled[host] for host in hosts & stalled.keys()}
    is_due = job.hang_s and job.phase in TRAINING and not job.finished and job.is_hooked
    if not is_due or not hosts or stalls.keys() != hosts:
        return None
    waited, limit = min(each.for_s for each in stalls.values()), limit_s(job, stalls)
    if waited <= limit:
        return None
    lowest = min(each.step for each in stalls.values())
    behind = sorted(host for host, each in stalls.items() if each.step == lowest)
    _, count = job.hung
    job = replace(job, hung=(job.newest, count + 1 if job.newest <= job.hung[0] else 1))
    where = (
        f"the training hangs: no worker has made a step for {waited:.0f} s (limit {limit:.0f}) at "
        f"step {lowest}"
    )
    if len(behind) == len(stalls):
        return fail(job, where, is_chance=True)
    ranks = ", ".join(f"{host}: {_ranks(stalls[host])}" for host in behind)
    job, lines = strike(job, behind)
    job, actions = fail(job, f"{where}; behind are {ranks}", is_chance=True)
    return job, (*lines, *actions)


def _ranks(stall: Stalled) -> str:
    return "rank " + ",".join(map(str, stall.ranks))
