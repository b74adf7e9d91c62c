"""Judgement of a job's states: the one to go on from with its present hosts, or to wait for, and
the ways out; and the fate of a joining host's parts: they count, are obsolete, or need a person's
choice.

A job with a state never begins without it by itself.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from scalai.core.job.catalogue import (
    Catalogue,
    Lacking,
    Numbered,
    PartFacts,
    RefusedSnapshot,
    Survey,
    Unfinished,
    what_lacks,
)
from scalai.core.job.membership import Generation

WAYS_OUT = (
    "The state is kept. Move the damaged directory away (of memory: run scalai clean on that host) "
    "and start the job again to go on from what is left, or begin anew with --fresh"
)


@dataclass(frozen=True, slots=True)
class Prospect:
    """The whole generations, oldest first, and the obstacle to a newer state.

    Attributes:
        obstacle: Reason against the newest state, and the ways out; "": none.
        is_held_back: The job must not go back behind that state by itself: a person decides.
        loss: Reason to end the job: damage left no state, and no absent host can mend it; "": none.
    """

    generations: tuple[Generation, ...]
    obstacle: str = ""
    is_held_back: bool = False
    loss: str = ""


@dataclass(frozen=True, slots=True)
class Course:
    """The course of a job so far.

    Attributes:
        job: Its name, for a person's commands.
        has_begun: It has had a round.
        has_lost_all: No host of the last round is left.
        is_successor: Its coordinator replaced a lost one.
        archived: Its own generations in the durable directory.
    """

    job: str
    has_begun: bool
    has_lost_all: bool = False
    is_successor: bool = False
    archived: Collection[int] = ()


def outlook(catalogue: Catalogue, survey: Survey, hosts: Iterable[str], course: Course) -> Prospect:
    """Judge the states of a job.

    Args:
        hosts: Present hosts.
    """
    whole = catalogue.whole(survey)
    newer = catalogue.lacking(whole, survey)
    text = _obstacle(newer, whole, course.job)
    if not text and not course.has_begun:
        text = _first_obstacle(catalogue, survey, whole, hosts, course.job)
    # A running job goes back by itself to a state in memory or in its own archive, and to nothing
    # older.
    is_old = bool(whole) and catalogue.is_offered(whole[-1].number)
    is_old = is_old and whole[-1].number not in course.archived
    is_there = course.has_begun and not course.has_lost_all
    # A successor goes back as the coordinator before it would have.
    has_begun = is_there or (course.is_successor and _is_lost(newer))
    is_held_back = bool(text) and (not has_begun or is_old)
    return Prospect(whole, text, is_held_back, "" if whole else _loss(newer))


def _obstacle(newer: Sequence[Lacking], whole: Sequence[Generation], job: str) -> str:
    """Text on states newer than all whole ones, their missing parts, and the ways out."""
    if not newer:
        return ""
    ways = [_bring(newer[0]), *_others(newer[0].step, whole, job)]
    return f"because {'; '.join(map(_lacks, newer))}. {', '.join(ways)}"


def _is_lost(newer: Sequence[Lacking]) -> bool:
    """Whether hosts found damage in newer states, and no absent host may hold the rest."""
    return any(each.is_found for each in newer) and not any(each.missing for each in newer)


def _loss(newer: Sequence[Lacking]) -> str:
    if not _is_lost(newer):
        return ""
    return f"{'; '.join(map(_lacks, newer))}, and nothing else is whole. {WAYS_OUT}"


def _first_obstacle(
    catalogue: Catalogue, survey: Survey, whole: Sequence[Generation], hosts: Iterable[str],
    job: str,
) -> str:  # fmt: skip
    """Reason against skipping the last sealed state in a job without a round; "": none."""
    text = _forked(catalogue.forks(whole), job)
    text = text or _refused(catalogue.furthest_refused(), whole, job)
    text = text or _unread(catalogue.still_unread(whole, survey), whole, job)
    if not text and not whole:
        text = _sealed(catalogue.unfinished(hosts, survey))
    return text


def _forked(forks: Sequence[Generation], job: str) -> str:
    if len(forks) < 2:
        return ""
    named = " and ".join(f"generation {one.number} of step {one.step}" for one in forks)
    ways = ", or ".join(f"scalai resume --job {job} --generation {one.number}" for one in forks)
    return (
        f"because two runs of the job went on apart, and left {named}: neither contains the "
        f"other's steps. Choose one, which gives the other up: {ways}"
    )


def _refused(refused: RefusedSnapshot | None, whole: Sequence[Generation], job: str) -> str:
    if refused is None or (whole and whole[-1].step >= refused.step):
        return ""
    ways = [
        f"Stop the job, run scalai clean on that one of {list(refused.hosts)} whose memory is "
        "damaged, and start it again",
        *_others(refused.step, whole, job),
    ]
    return (
        f"because what hosts {list(refused.hosts)} sealed at step {refused.step} is refused: "
        f"{refused.reason} {', '.join(ways)}"
    )


def _unread(found: Mapping[str, str], whole: Sequence[Generation], job: str) -> str:
    if not found:
        return ""
    reasons = "; ".join(f"host {host!r}: {why}" for host, why in found.items())
    ways = [
        "Repair it, or move that directory away, and start the job again",
        *_others(None, whole, job),
    ]
    return f"because what was sealed last cannot be read ({reasons}). {', '.join(ways)}"


def _others(step: int | None, whole: Sequence[Generation], job: str) -> list[str]:
    """Ways out for any job without its newest state."""
    ways = []
    if whole:
        older = whole[-1]
        back = "" if step is None else f", {step - older.step} steps back"
        ways.append(
            f"or go on from generation {older.number} of step {older.step}{back}: scalai resume "
            f"--job {job} --generation {older.number}"
        )
    return [*ways, "or begin anew: stop the job and start it with --fresh"]


def _sealed(found: Sequence[Unfinished]) -> str:
    """Text on absent hosts of the furthest sealed snapshot, without any generation."""
    if not found:
        return ""
    newest = found[0]
    held = f"hosts {list(newest.present)} hold parts, those" if newest.present else "the parts"
    return (
        f"because what was sealed at step {newest.step} is not whole ({held} of "
        f"{list(newest.missing)} are missing), and nothing else is there. "
        f"Start the agents of {list(newest.missing)} where their memory "
        "holds it, or begin anew: stop the job and start it with --fresh"
    )


def _lacks(newer: Lacking) -> str:
    step = "" if newer.step is None else f" of step {newer.step}"
    return f"generation {newer.number}{step} is not whole ({what_lacks(newer)})"


def _bring(newer: Lacking) -> str:
    if newer.missing:
        return (
            f"Start the agents of {list(newer.missing)} where their memory or their --durable-dir "
            "holds it"
        )
    return "Start the hosts whose memory or --durable-dir holds the rest"


def doubtful(catalogue: Catalogue, survey: Survey, number: int, reason: str) -> str:
    """Text on a generation after two failed proofs: reason, places of its parts, ways out."""
    found = catalogue.numbered[number]
    places = ", ".join(f"{h!r} ({at})" for h, at in sorted((found.unproven or {}).items()))
    return (
        f"generation {number} of step {found.step} cannot be gone on from, twice: {reason} parts "
        f"lie at {places or sorted(survey.of(number).hosts)}. {WAYS_OUT}"
    )


def given_up_text(number: int, step: int, age_s: float | None) -> str:
    """Step and age of a generation to be given up; ``age_s`` None: unknown."""
    text = f"generation {number} of step {step}"
    return text if age_s is None else f"{text}, {age_text(age_s)} old"


def age_text(seconds: float) -> str:
    """A duration in a fitting unit."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


# ---------------------------------------------------------------------- parts of a joining host


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
_CHOICE = (
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
        f"job {now.job!r}, which was not committed; {other}. {_CHOICE}"
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
        f"another run of job {now.job!r}; {_described(known, now)}, as it was sealed. {_CHOICE}"
    )


def _newest(held: Sequence[PartFacts]) -> PartFacts | None:
    return max(held, key=lambda part: part.number, default=None)


def _is_earlier(part: PartFacts, newest: Numbered) -> bool:
    place, before = part.id, newest.id
    return bool(place and before and place.run == before.run and place < before)


def _described(newest: Numbered, now: Situation) -> str:
    hosts = sorted(now.survey.of(newest.number).hosts)
    return f"hosts {hosts} hold generation {newest.number} of step {newest.step}"
