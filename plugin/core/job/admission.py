"""Whether a part of a generation that a joining host brings is of the job's history."""

from dataclasses import dataclass
from enum import Enum

from scalai.core.job.membership import Generation


@dataclass(frozen=True, slots=True)
class Brought:
    """A host's part of a generation.

    Attributes:
        is_known: This run of the job has made the generation, or begun with it.
        others: Hosts that hold another state under the same number, of another run.
        their_step: The step of that state.
    """

    host: str
    number: int
    step: int
    is_known: bool
    others: tuple[str, ...] = ()
    their_step: int = 0


class Verdict(Enum):
    """What becomes of what a host brings."""

    TAKEN = "taken"  # it counts
    OBSOLETE = "obsolete"  # the job has passed it: it goes
    REFUSED = "refused"  # which state to go on from is a person's to say


def admit(
    part: Brought, job: str, newest: Generation | None, *, has_begun: bool
) -> tuple[Verdict, str]:
    """Return what becomes of a part, and why where it is refused.

    Args:
        job: The job's name.
        newest: Its newest generation that is whole.
        has_begun: It has begun a round: from then on only what it has made itself counts.
    """
    if not has_begun and part.others:
        return Verdict.REFUSED, _rival(part, job)
    if part.is_known or not has_begun:
        return Verdict.TAKEN, ""
    if newest is not None and part.step <= newest.step:
        return Verdict.OBSOLETE, ""
    return Verdict.REFUSED, _further(part, job, newest)


def _rival(part: Brought, job: str) -> str:
    return (
        f"host {part.host!r} holds generation {part.number} of step {part.step} of "
        f"another run of job {job!r} than hosts {sorted(part.others)}, whose generation "
        f"{part.number} is of step {part.their_step}. Which one to "
        "go on from is yours to say: run scalai clean on the hosts of the other, and start "
        "all hosts together."
    )


def _further(part: Brought, job: str, newest: Generation | None) -> str:
    return (
        f"host {part.host!r} holds generation {part.number} of step {part.step} of another "
        f"run of job {job!r}; this run has begun without it"
        f"{f' and is at step {newest.step}' if newest else ''}. To go on from that state, stop "
        "this run and start all hosts together; to give it up, run scalai clean on that host."
    )
