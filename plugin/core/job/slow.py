"""Work of hosts beside the training that takes long is said, after a while and then after twice as
long each time."""

from dataclasses import replace
from typing import TypeVar

from scalai.core.job.copies import Archiving, Replication
from scalai.core.job.deadlines import REPORT_S
from scalai.core.messages.actions import Action, Say

Work = TypeVar("Work", Replication, Archiving)


def report_if_slow(work: Work, kind: str, now: float) -> tuple[Work, tuple[Action, ...]]:
    """Return the work, and who has yet to answer where it is time to say so; ``kind``: what is made
    of the generation."""
    waited = now - work.since
    if waited < REPORT_S * float(2**work.reports):
        return work, ()
    text = (
        f"event=slow {kind} of generation {work.generation} since_s={waited:.0f} awaited: "
        f"{', '.join(sorted(work.awaited))}"
    )
    return replace(work, reports=work.reports + 1), (Say(text),)
