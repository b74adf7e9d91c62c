"""What a person asks of a job's size: granted, refused with the reason, or nothing to do."""

import time

from scalai.core import events
from scalai.core.errors import UsageError
from scalai.core.jsonable import Json
from scalai.core.membership import (
    Assignment,
    Job,
    Phase,
    failure_of,
    present_degrees,
    staying,
)
from scalai.core.transitions import UNHOOKED
from scalai.launch.live_job import LiveJob


def scale(
    live: LiveJob, nproc: int | None, nnodes: int | None, degrees: str | None, *, dry_run: bool
) -> Json:
    """Take a person's wish for a job; with ``dry_run`` only say what would come of it.

    Returns:
        The degrees and workers that the hosts now present would run, and why; a ``reason`` that
        begins with ``no change`` where they run so already.

    Raises:
        UsageError: It cannot be; says why, and what to do.
    """
    job, why = live.state, list[str]()
    hosts = staying(job)
    target = live.sizing.scaled(nproc, nnodes, degrees, why.append)(hosts, present_degrees(job))
    if target is None:
        reason = why[-1] if why else "no host is there"
        raise UsageError(f"{_asked(nproc, nnodes, degrees)} on the hosts {dict(hosts)}: {reason}")
    is_same = job.current is not None and target.is_same_as(job.current)
    if not is_same:
        _check(job, target)
    if not dry_run:
        live.sizing.rescale(nproc, nnodes, degrees)
        live.timeline.begin("scale")
        live.feed(events.Rescaled(live.sizing.assign(), time.monotonic(), nnodes))
    slots = sum(count for _, count in hosts)
    reason = target.reason
    if is_same:
        short = f"{slots} slots, {nproc} asked; " if nproc is not None and nproc > slots else ""
        reason = f"no change: {short}{target.degrees} runs already"
    return {"degrees": str(target.degrees), "workers": dict(target.workers), "reason": reason}


def _asked(nproc: int | None, nnodes: int | None, degrees: str | None) -> str:
    given = {"--nproc": nproc, "--nnodes": nnodes, "--degrees": degrees}
    return " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)


def _check(job: Job, target: Assignment) -> None:
    """Refuse a change that would lose what the job has, or that has failed before."""
    if not job.is_hooked:
        raise UsageError(f"the job cannot be changed while it runs: {UNHOOKED}.")
    if job.phase is Phase.STARTING and not job.has_state:
        raise UsageError(
            "the job is in its first start and has no state yet: a change would begin the script "
            "anew. Ask again once it has made a step (scalai status)."
        )
    failed = failure_of(job, target)
    if failed is not None:
        raise UsageError(
            f"{target.degrees} failed on these hosts before: {failed.reason}. They are tried again "
            "once the agent of one of the hosts has been started anew; or ask for others."
        )
