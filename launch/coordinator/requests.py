"""What a person asks of a job: other degrees or hosts (``scalai scale``), and to go on from an
older state where it waits for its newest one (``scalai resume``)."""

import time

from scalai.core.errors import UsageError
from scalai.core.job.assigning import failure_of, placed
from scalai.core.job.membership import (
    Assignment,
    Job,
    Phase,
    present,
    staying,
)
from scalai.core.job.transitions import UNHOOKED
from scalai.core.jsonable import Json
from scalai.core.messages import events
from scalai.launch.coordinator.live_job import LiveJob


def resume(live: LiveJob, generation: int, *, dry_run: bool) -> Json:
    """Go on from an older generation that is whole, because a person says so.

    Returns:
        What is gone on from and what is given up, as text.

    Raises:
        UsageError: The job does not wait, or that generation is not whole.
    """
    _refuse_while_taking_over(live.state)
    if live.state.phase is not Phase.WAITING:
        raise UsageError(
            f"the job is {live.state.phase.value}, not waiting: it has a state that it goes on "
            "from."
        )
    catalogue, survey = live.generations.catalogue, live.generations.survey()
    held = catalogue.whole(survey)
    whole = {found.number: found for found in held}
    if generation not in whole:
        known = ", ".join(f"{n} (step {found.step})" for n, found in whole.items())
        raise UsageError(
            f"generation {generation} is not whole on the hosts that are here. Whole: "
            f"{known or 'none'}."
        )
    found = whole[generation]
    steps = {one.number: one.step for one in catalogue.lacking(held, survey)}
    steps |= {one.number: one.step for one in held[held.index(found) + 1 :]}
    steps |= {one.number: one.step for one in catalogue.forks(held) if one != found}
    answer = f"going on from generation {generation} of step {found.step}"
    if steps:
        lost = max(live.state.newest, *(step or 0 for step in steps.values())) - found.step
        numbers = ", ".join(map(str, sorted(steps)))
        answer += f"; given up: generation {numbers}, {max(0, lost)} steps"
    if not dry_run:
        live.log(f"event=resume a person says: {answer}")
        live.generations.give_up_after(generation)
        live.recount()
        live.feed(events.Resumed(time.monotonic()))
    return {"reason": answer}


def scale(
    live: LiveJob, nproc: int | None, nnodes: int | None, degrees: str | None, *, dry_run: bool
) -> dict[str, Json]:
    """Take a person's request for a job; with ``dry_run`` only say what would come of it.

    Returns:
        The degrees and workers that the hosts now present would run, and why; a ``reason`` that
        begins with ``no change`` where they run so already.

    Raises:
        UsageError: It cannot be; says why, and what to do.
    """
    job, why = live.state, list[str]()
    _refuse_while_taking_over(job)
    hosts = staying(job)
    target = live.sizing.scaled(nproc, nnodes, degrees, why.append)(hosts, present(job))
    if target is None:
        reason = why[-1] if why else "no host is there"
        raise UsageError(f"{_asked(nproc, nnodes, degrees)} on the hosts {dict(hosts)}: {reason}")
    target = placed(job, target, hosts)
    is_same = job.current is not None and target.is_same_as(job.current)
    if not is_same:
        _check(job, target)
    if not dry_run:
        live.sizing.rescale(nproc, nnodes, degrees)
        live.timeline.begin("scale")
        live.feed(events.Rescaled(live.sizing.assign(), time.monotonic(), nnodes))
    slots = sum(count for _, count in hosts)
    short = f"{slots} slots, {nproc} asked; " if nproc is not None and nproc > slots else ""
    reason = f"{short}{target.reason}"
    if is_same:
        reason = f"no change: {short}{target.layout} runs already"
    return {
        "degrees": str(target.degrees), **target.passes.to_json(),
        "workers": dict(target.workers), "reason": reason,
    }  # fmt: skip


def _refuse_while_taking_over(job: Job) -> None:
    if job.takeover.pending is not None:
        raise UsageError(
            "the coordinator has just taken another one's place, and waits for the hosts of the "
            "round under way. Ask again in a moment."
        )


def _asked(nproc: int | None, nnodes: int | None, degrees: str | None) -> str:
    given = {"--nproc": nproc, "--nnodes": nnodes, "--degrees": degrees}
    return " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)


def _check(job: Job, target: Assignment) -> None:
    """Refuse a change that would lose what the job has, or that has failed before."""
    if not job.attempt.is_hooked:
        raise UsageError(f"the job cannot be changed while it runs: {UNHOOKED}.")
    if job.phase is Phase.STARTING and not job.states.has_state:
        raise UsageError(
            "the job is in its first start and has no state yet: a change would begin the script "
            "anew. Ask again once it has made a step (scalai status)."
        )
    failed = failure_of(job, target)
    if failed is not None:
        raise UsageError(
            f"{target.layout} failed on these hosts before: {failed.reason}. They are tried again "
            "once the agent of one of the hosts has been started anew; or ask for others."
        )
