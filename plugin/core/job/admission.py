"""Fate of a joining host's parts: they count, are obsolete, or need a person's choice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from scalai.core.job.catalogue import Catalogue, Numbered, PartFacts, Survey
from scalai.core.job.membership import Generation


@dataclass(frozen=True, slots=True)
class Situation:
    """The job at a join.

    Attributes:
        job: Its name.
        run: Name of its present run, as in its snapshots.
        round: Its present round; 0: not begun.
        newest: Its newest whole generation.
        is_fresh: It begins anew (``--fresh``).
    """

    job: str
    run: str
    round: int
    catalogue: Catalogue
    survey: Survey
    newest: Generation | None = None
    is_fresh: bool = False


class Admittance(Enum):
    """Fate of a part."""

    TAKEN = "taken"  # it counts
    OBSOLETE = "obsolete"  # the job has passed it: it goes
    REFUSED = "refused"  # a person has to choose a state


TAKEN = Admittance.TAKEN, ""
OBSOLETE = Admittance.OBSOLETE, ""
_WAYS_OUT = (
    "Which one to go on from is yours to say: run scalai clean on the hosts of the other, stop the "
    "job and start all hosts together."
)


def admit(part: PartFacts, now: Situation) -> tuple[Admittance, str]:
    """Fate of a part of a generation, and the reason of a refusal. After the first round only the
    job's own states count."""
    holders = now.survey.of(part.number).hosts
    if not now.round and now.catalogue.is_foreign(part, holders):
        return Admittance.REFUSED, (
            f"host {part.host!r} holds generation {part.number} of step {part.step} of "
            f"another run of job {now.job!r} than hosts {sorted(holders)}, whose generation "
            f"{part.number} is of step {now.catalogue.numbered[part.number].step}. Which one to "
            "go on from is yours to say: run scalai clean on the hosts of the other, and start "
            "all hosts together."
        )
    if not now.round or now.catalogue.is_known(part):
        return TAKEN
    if now.newest is not None and part.step <= now.newest.step:
        return OBSOLETE
    return Admittance.REFUSED, (
        f"host {part.host!r} holds generation {part.number} of step {part.step} of another "
        f"run of job {now.job!r}; this run has begun without it"
        f"{f' and is at step {now.newest.step}' if now.newest else ''}. To go on from that state, "
        "stop this run and start all hosts together; to give it up, run scalai clean on that host."
    )


def admit_sealed(
    part: PartFacts, held: Sequence[PartFacts], now: Situation, is_whole: Callable[[], bool]
) -> tuple[Admittance, str]:
    """Fate of a sealed, uncommitted part, and the reason of a refusal. A snapshot follows the
    newest generation of its host.

    Args:
        part: The sealed part.
        held: The host's parts of generations.
        now: The job.
        is_whole: Whether the part and those of other hosts cover the state.
    """
    if _counts(part, _newest(held), now, is_whole):
        return TAKEN
    known, newest = now.catalogue, now.catalogue.newest(now.survey)
    is_left = part.id is not None and part.id.run == now.run
    is_left |= known.number_of(part.snapshot) is not None or part.snapshot in known.refused
    if newest is not None:
        is_left |= newest.step is not None and part.step <= newest.step
        is_left |= _is_earlier(part, newest)
    if now.is_fresh or is_left or not is_whole():
        return OBSOLETE
    other = "this run has begun without it" if newest is None else _described(newest, now)
    return Admittance.REFUSED, (
        f"host {part.host!r} has sealed a whole state of step {part.step} in another run of "
        f"job {now.job!r}, which was not committed; {other}. {_WAYS_OUT}"
    )


def _counts(
    part: PartFacts, own: PartFacts | None, now: Situation, is_whole: Callable[[], bool]
) -> bool:
    catalogue = now.catalogue
    number = catalogue.number_of(part.snapshot)
    if number is not None:
        return catalogue.has(number)
    if part.snapshot in catalogue.refused:
        return False
    known, place = catalogue.newest(now.survey), part.id
    if now.round:
        is_passed = known is not None and known.step is not None and part.step < known.step
        return place is not None and place[:2] == (now.run, now.round) and not is_passed
    is_own = own is not None and (known is None or own.number >= known.number)
    newest = own if is_own else known
    if newest is None:
        return True
    before = newest.id
    if place and before and place.run == before.run:
        return place >= before
    holders = now.survey.of(newest.number).hosts
    is_with_holders = bool(now.survey.snapshots.get(part.snapshot, frozenset()) & holders)
    return is_own or is_with_holders or not is_whole()


def rival(held: Sequence[PartFacts], now: Situation) -> str:
    """Reason against a host with a newest generation of another run, if the job would silently go
    back from a sealed to a committed state; "": it may join."""
    known, newest = now.catalogue.newest(now.survey), _newest(held)
    if now.round or known is None or newest is None:
        return ""
    if not now.catalogue.is_made(known.number) or now.catalogue.is_known(newest):
        return ""
    mine, its = newest.id, known.id
    is_same_run = mine is not None and its is not None and mine.run == its.run
    is_further = known.step is None or newest.step >= known.step
    if is_same_run or newest.number <= known.number or is_further:
        return ""
    return (
        f"host {newest.host!r} holds generation {newest.number} of step {newest.step} of "
        f"another run of job {now.job!r}; {_described(known, now)}, as it was sealed. {_WAYS_OUT}"
    )


def _newest(held: Sequence[PartFacts]) -> PartFacts | None:
    return max(held, key=lambda part: part.number, default=None)


def _is_earlier(part: PartFacts, newest: Numbered) -> bool:
    place, before = part.id, newest.id
    return bool(place and before and place.run == before.run and place < before)


def _described(newest: Numbered, now: Situation) -> str:
    hosts = sorted(now.survey.of(newest.number).hosts)
    return f"hosts {hosts} hold generation {newest.number} of step {newest.step}"
