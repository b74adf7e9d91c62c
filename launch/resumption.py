"""``scalai resume``: a person has a job that waits for its newest state go on from an older one."""

import time

from scalai.core import events
from scalai.core.errors import UsageError
from scalai.core.jsonable import Json
from scalai.core.membership import Phase
from scalai.launch.live_job import LiveJob


def resume(live: LiveJob, generation: int, *, dry_run: bool) -> Json:
    """Go on from an older generation that is whole, because a person says so.

    Returns:
        What is gone on from and what is given up, as text.

    Raises:
        UsageError: The job does not wait, or that generation is not whole.
    """
    if live.state.phase is not Phase.WAITING:
        raise UsageError(
            f"the job is {live.state.phase.value}, not waiting: it has a state that it goes on "
            "from."
        )
    held = live.generations.covered()
    whole = {found.number: found for found in held}
    if generation not in whole:
        known = ", ".join(f"{n} (step {found.step})" for n, found in whole.items())
        raise UsageError(
            f"generation {generation} is not whole on the hosts that are here. Whole: "
            f"{known or 'none'}."
        )
    found = whole[generation]
    steps = {one.number: one.step for one in live.generations.incomplete(held)}
    steps |= {one.number: one.step for one in held[held.index(found) + 1 :]}
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
