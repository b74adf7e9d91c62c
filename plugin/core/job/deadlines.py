"""Deadlines of a job: how long each phase may take, and what comes of it where it takes longer.

The one place for it: ``overdue`` acts by this table and docs/architecture.md repeats it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from scalai.core.job.copies import Archiving, Replication
from scalai.core.job.membership import Job, Phase
from scalai.core.messages.actions import Action, Say

REPORT_S = 60.0
"""A wait is said after so long; then after twice as long each time, but in WAITING every time."""
ANSWER_S = 60.0
"""How long a host may take for what takes it a moment."""
GONE_S = 120.0
"""How long a host waits for killed workers until they are gone with the memory of their devices;
then others start in spite of them."""
TELL_S = ANSWER_S / 3
"""How long an agent waits for the coordinator to take an event before it tells it again: an event
that was lost on its way arrives well before its host counts as lost."""
STORE_READY_S = 120.0
"""How long the process of the workers' rendezvous store may take to import torch."""
JOIN_S = STORE_READY_S + ANSWER_S
"""How long an agent's first join may take: the coordinator answers once that process is ready."""
SNAPSHOT_PATIENCES = 3
"""Drain timeouts without a further host's snapshot. A host itself gives its workers one."""
FREEZE_S = 5.0
"""How long a worker that is to stand still may take to end an update that has begun."""
FREEZE_ALL_S = 2 * FREEZE_S
"""How long a host waits for its workers to say where they stand."""
FROZEN_S = 20.0
"""How long a host may take to say where its workers stand."""
RESCUE_PATIENCES = 2
"""Drain timeouts without a further host's part. A host itself gives its workers one."""
LONGEST_BACKOFF_S = 3600.0
"""A change whose stop was taken back is tried again after so long at most."""
STALL_S = 60.0
STALL_STEPS = 10
"""An agent reports workers that make no step for so long, and for so many times as a usual step
takes."""
LEAST_HANG_S = 300.0
HANG_STEPS = 30
"""Within a step, workers hang that make none for so long, and for so many times as long as a usual
step takes at most."""
CHECKED_S = 10.0
"""How long the others wait for the first answer to a health check before they go on without."""
CHECK_AGAIN_S = 30.0
LONGEST_CHECK_AGAIN_S = 3600.0
"""A host that has failed its health check is asked again after so long, then after twice as long
each time, so long at most."""
PAUSES = 3
"""So many times as the longest pause that ended by itself (an evaluation, a save) one may take."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The deadline of one phase.

    Attributes:
        clock: Since when the time counts.
        default: The limit in words, with the setting that changes it.
        consequence: What happens then.
        seconds: The limit of a job; None: there is none, and the wait is only reported.
    """

    phase: Phase
    clock: str
    default: str
    consequence: str
    seconds: Callable[[Job], float | None]


TABLE = (
    Deadline(
        Phase.WAITING, "the phase began", "none",
        "says every 60 s what is missing; deletes nothing", lambda job: None,
    ),
    Deadline(
        Phase.STARTING, "a host's workers published, restored or stepped last, or bytes came to it",
        "1800 s (`start_timeout_s`)",
        "reports after 60 s, and its hosts knock at each other; then back to the degrees that ran, "
        "or a failure that counts where there are none", lambda job: job.settings.start_timeout_s,
    ),
    Deadline(
        Phase.EXAMINING, "a host answered last", "1800 s (`start_timeout_s`)",
        "done without the hosts awaited", lambda job: job.settings.start_timeout_s,
    ),
    Deadline(
        Phase.RUNNING, "a worker of the host stepped last", "60 s, and 10 usual steps",
        "who is behind is reported, by `scalai status` and, with the stacks of all, in the log; "
        "within a step after 300 s and 30 usual steps, elsewhere and at most after 1800 s "
        "(`hang_s`), and never before 3 times the longest pause, the round is started again",
        lambda job: None,
    ),
    Deadline(
        Phase.BUILDING, "the phase began", "300 s",
        "the hosts knock at each other after 60 s; then what is built is given up, and the next "
        "workers start after the stop",
        lambda job: job.settings.build_timeout_s,
    ),
    Deadline(
        Phase.PREPARING, "a host answered last, or told for what its workers cannot stop yet",
        "60 s", "the hosts awaited count as lost", lambda job: ANSWER_S,
    ),
    Deadline(
        Phase.DRAINING, "the stop was agreed", "120 s (`drain_timeout_s`)",
        "the stop is taken back and the training goes on; the change is tried again later",
        lambda job: job.settings.drain_timeout_s,
    ),
    Deadline(
        Phase.SNAPSHOTTING, "a host wrote last", "120 s (`drain_timeout_s`), 3 times that",
        "an agent ends workers that do not write, and replicas write for them; after 3 times that "
        "the hosts awaited count as lost",
        lambda job: SNAPSHOT_PATIENCES * job.settings.drain_timeout_s,
    ),
    Deadline(
        Phase.FREEZING, "a host answered last", "20 s",
        "done without the hosts awaited", lambda job: FROZEN_S,
    ),
    Deadline(
        Phase.RESCUING, "a host wrote last", "120 s (`drain_timeout_s`)",
        "an agent ends workers that do not write; then done without the hosts awaited",
        lambda job: RESCUE_PATIENCES * job.settings.drain_timeout_s,
    ),
    Deadline(
        Phase.COMMITTING, "a host answered last", "60 s", "the hosts awaited count as lost",
        lambda job: ANSWER_S,
    ),
    Deadline(
        Phase.STOPPING, "a host answered last", "180 s: a host waits 120 s for killed workers",
        "the hosts awaited count as lost", lambda job: GONE_S + ANSWER_S,
    ),
    Deadline(
        Phase.SAVING, "a host answered last", "none: the leaving hosts' drain timeout",
        "reports after 60 s", lambda job: None,
    ),
)  # fmt: skip
"""Where no other host could go on without those that count as lost, they are reported instead."""

LIMITS = {deadline.phase: deadline for deadline in TABLE}


def clock_of(job: Job) -> object:
    """What restarts the clock of a phase when it changes."""
    if job.phase in (Phase.DRAINING, Phase.BUILDING, Phase.RUNNING):
        return job.phase, job.round, job.stop.step, job.change.standby
    if job.phase is Phase.WAITING:
        return job.phase, tuple(job.hosts)
    held = job.stop.held if job.awaited <= job.stop.held.keys() else None  # else somebody is silent
    return job.phase, job.round, job.stop.step, job.awaited, job.attempt.progress, held


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
