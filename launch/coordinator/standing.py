"""Where a job stands that has a state and cannot go on from it: what is missing, and the ways out.

A job that has a state never begins without it by itself.
"""

import time
from collections.abc import Collection, Mapping, Sequence

from scalai.core.job.membership import Generation
from scalai.launch.coordinator.doubts import WAYS_OUT
from scalai.launch.coordinator.generations import Generations, Incomplete, Refused, Unfinished
from scalai.launch.coordinator.recoveries import what_lacks
from scalai.store.manifest import HostManifest


def obstacle(newer: Sequence[Incomplete], whole: Sequence[Generation], job: str) -> str:
    """Say which state is newer than what is whole here, what it lacks, and what a person may do;
    empty where the newest one is whole."""
    if not newer:
        return ""
    ways = [_bring(newer[0]), *_others(newer[0].step, whole, job)]
    return f"because {'; '.join(map(_lacks, newer))}. {', '.join(ways)}"


def is_lost(newer: Sequence[Incomplete]) -> bool:
    """Whether damage was found in what is ``newer`` than all that is whole, and nobody who is away
    may hold the rest of it."""
    return any(each.is_found for each in newer) and not any(each.missing for each in newer)


def loss(newer: Sequence[Incomplete]) -> str:
    """Say what is damaged where nothing is whole and nobody who is away may hold the rest, and what
    a person may do; empty where there is another way.

    Args:
        newer: All that is known and not whole, newest first.
    """
    if not is_lost(newer):
        return ""
    return f"{'; '.join(map(_lacks, newer))}, and nothing else is whole. {WAYS_OUT}"


def first_obstacle(
    generations: Generations, whole: tuple[Generation, ...], hosts: Collection[str], job: str
) -> str:
    """Say why what was sealed last may not be passed over by a job that has had no round yet, and
    what a person may do; empty where nothing stands in the way.

    Args:
        whole: The generations that are whole, oldest first.
        hosts: Those that are there.
    """
    text = _forked(generations.forks(whole), job)
    text = text or _refused(generations.refused(), whole, job)
    text = text or _unread(generations.unread(whole), whole, job)
    if not text and not whole:
        text = _sealed(generations.unfinished(hosts))
    return text


def _forked(forks: Sequence[Generation], job: str) -> str:
    """Say which runs of the job went on apart, and how a person decides; empty for none."""
    if len(forks) < 2:
        return ""
    named = " and ".join(f"generation {one.number} of step {one.step}" for one in forks)
    ways = ", or ".join(f"scalai resume --job {job} --generation {one.number}" for one in forks)
    return (
        f"because two runs of the job went on apart, and left {named}: neither contains the "
        f"other's steps. Choose one, which gives the other up: {ways}"
    )


def _refused(refused: Refused | None, whole: Sequence[Generation], job: str) -> str:
    """Say what was sealed last and may not be gone on from, and what a person may do; empty where
    nothing was, or what is whole here is as new."""
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
    """Say what hosts had sealed last and cannot read, and what a person may do; empty for nothing.

    Args:
        found: Why, by host.
    """
    if not found:
        return ""
    reasons = "; ".join(f"host {host!r}: {why}" for host, why in found.items())
    ways = [
        "Repair it, or move that directory away, and start the job again",
        *_others(None, whole, job),
    ]
    return f"because what was sealed last cannot be read ({reasons}). {', '.join(ways)}"


def _others(step: int | None, whole: Sequence[Generation], job: str) -> list[str]:
    """Return the ways out that are open to every job that cannot go on from its newest state."""
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
    """Say what was sealed and is not whole here where nothing was ever committed; empty for
    nothing."""
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


def _lacks(newer: Incomplete) -> str:
    step = "" if newer.step is None else f" of step {newer.step}"
    return f"generation {newer.number}{step} is not whole ({what_lacks(newer)})"


def _bring(newer: Incomplete) -> str:
    if newer.missing:
        return (
            f"Start the agents of {list(newer.missing)} where their memory or their --durable-dir "
            "holds it"
        )
    return "Start the hosts whose memory or --durable-dir holds the rest"


def describe_given_up(part: HostManifest) -> str:
    """Say what a host's part of a generation is, for whoever gives it up: step and age."""
    text = f"generation {part.generation} of step {part.step}"
    made = part.about.get("time")
    return text if made is None else f"{text}, {age_text(time.time() - float(made))} old"


def age_text(seconds: float) -> str:
    """Return a length of time in the unit that fits it."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
