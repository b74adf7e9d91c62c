"""The rule for a training that hangs: no worker makes a step for longer than a step can take."""

from collections.abc import Mapping
from dataclasses import replace

from scalai.core.job.assigning import next_assignment
from scalai.core.job.behind import Ranks, behind
from scalai.core.job.deadlines import HANG_STEPS, LEAST_HANG_S, PAUSES
from scalai.core.job.failures import fail
from scalai.core.job.health import ask
from scalai.core.job.hearing import knock
from scalai.core.job.membership import TRAINING, Job, active
from scalai.core.job.quarantine import bar_who_hangs
from scalai.core.job.transitions import Result
from scalai.core.messages.events import Stalled

PLACE = 200
"""Most characters of where a rank stands that are said."""


def limit_s(job: Job, stalled: Mapping[str, Stalled]) -> float:
    """Return how long no step may be made, in seconds.

    Where all workers are within a step, and the usual one is known, it is many of those; elsewhere,
    and at most, what a person said. It is longer than any pause so far, and twice as long each time
    that the job has hung without a step in between, because that may be a pause longer than any
    before.
    """
    limit = job.hang_s
    if stalled and all(each.is_within and each.usual_s for each in stalled.values()):
        usual = max(each.usual_s for each in stalled.values())
        limit = min(limit, max(LEAST_HANG_S, HANG_STEPS * usual))
    longest = max((each.longest_s for each in stalled.values()), default=0.0)
    step, count = job.hung
    return max(limit, PAUSES * longest) * 2.0 ** (count if job.newest <= step else 0)


def hung(job: Job, stalled: Mapping[str, Stalled]) -> Result | None:
    """Start the round again where all of its hosts say that their workers make no steps, for too
    long; None where that is not so. Who has finished waits for the others, who may evaluate.

    A host that keeps the others waiting a second time is left out for a while, where they can go on
    without it; then it is as if it had been lost.
    """
    hosts = active(job)
    stalls = {host: stalled[host] for host in hosts & stalled.keys()}
    is_due = job.hang_s and job.phase in TRAINING and not job.finished and job.is_hooked
    if not is_due or not hosts or stalls.keys() != hosts:
        return None
    waited, limit = min(each.for_s for each in stalls.values()), limit_s(job, stalls)
    if waited <= limit:
        return None
    step = min(each.step for each in stalls.values())
    _, count = job.hung
    job = replace(job, hung=(job.newest, count + 1 if job.newest <= job.hung[0] else 1))
    where = (
        f"the training hangs: no worker has made a step for {waited:.0f} s (limit {limit:.0f}) at "
        f"step {step}"
    )
    job, knocked = knock(job, hosts)
    late = behind(stalls)
    if not late or late.keys() == hosts:
        named = f"; behind are {_names(late, stalls)}" if late else ""
        job, actions = fail(job, where + named, is_chance=True)
        return job, (*knocked, *actions)
    # Where most are behind, it may as well be the few that are not.
    job, lines = bar_who_hangs(job, late if 2 * len(late) <= len(hosts) else (), waited)
    target = next_assignment(job)
    is_without = target is not None and not late.keys() & target.members
    reason = f"{where}; behind are {_names(late, stalls)}"
    job, asked = ask(job, late, "the others have waited for its workers in vain")
    job, actions = fail(job, reason, is_chance=True, is_loss=is_without)
    return job, (*knocked, *lines, *asked, *actions)


def _names(late: Ranks, stalls: Mapping[str, Stalled]) -> str:
    """Say who is behind, and where one of each host stands."""
    named = []
    for host, ranks in late.items():
        places = dict(stalls[host].where)
        place = places.get(ranks[0], "")[:PLACE] if ranks else ""
        text = f"{host}: rank {','.join(map(str, ranks))}"
        named.append(f"{text} ({place})" if place else text)
    return ", ".join(named)
