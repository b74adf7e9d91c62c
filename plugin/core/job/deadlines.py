"""Deadlines of a job's phases, and their consequences.

The one place for them: ``overdue`` acts by this table, and docs/architecture.md repeats it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from scalai.core.job.copies import Archiving, Replication
from scalai.core.job.membership import Job, Phase
from scalai.core.messages.actions import Action, Say

REPORT_S = 30.0
"""Time before a wait is logged, in seconds; then doubled each time, except in WAITING."""
ANSWER_S = 60.0
"""A host's time for an act of a moment, in seconds."""
GONE_S = 120.0
"""A host's wait for killed workers and their device memory, in seconds; then others start
anyway."""
TELL_S = ANSWER_S / 3
"""An agent's wait before it repeats an event, in seconds: a lost event arrives well before its host
counts as lost."""
STORE_READY_S = 120.0
"""Time for the workers' rendezvous process to import torch, in seconds."""
JOIN_S = STORE_READY_S + ANSWER_S
"""Time for an agent's first join, in seconds: the coordinator answers once that process is
ready."""
SNAPSHOT_PATIENCES = 3
"""Drain timeouts without a further host's snapshot. A host itself gives its workers one."""
FREEZE_S = 5.0
"""A worker's time to end an update in progress before it stands still, in seconds."""
FREEZE_ALL_S = 2 * FREEZE_S
"""A host's wait for its workers' steps, in seconds."""
FROZEN_S = 20.0
"""A host's time to report its workers' steps, in seconds."""
RESCUE_PATIENCES = 2
"""Drain timeouts without a further host's part. A host itself gives its workers one."""
LONGEST_BACKOFF_S = 3600.0
"""Longest wait before a change with a withdrawn stop is retried, in seconds."""
STALL_S = 60.0
STALL_STEPS = 10
"""Time without a step before an agent reports it: seconds, and usual steps."""
LEAST_HANG_S = 300.0
HANG_STEPS = 30
"""Time within a step that counts as a hang: at least these seconds and this many usual steps."""
CHECKED_S = 10.0
"""Wait for a host's first health check, in seconds; then the others go on without it."""
CHECK_AGAIN_S = 30.0
LONGEST_CHECK_AGAIN_S = 3600.0
"""First and longest pause between failed health checks, in seconds; it doubles each time."""
PAUSES = 3
"""Longest allowed pause, as a multiple of the longest completed one (an evaluation, a save)."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The deadline of one phase.

    Attributes:
        clock: Event that starts the clock, in words.
        default: The limit in words, with its setting.
        consequence: The consequence in words.
        seconds: The limit of a job; None: the wait is only logged.
    """

    phase: Phase
    clock: str
    default: str
    consequence: str
    seconds: Callable[[Job], float | None]


TABLE = (
    Deadline(
        Phase.WAITING, "the phase began", "none",
        "says every 30 s what is missing; deletes nothing", lambda job: None,
    ),
    Deadline(
        Phase.STARTING, "a host's workers published, restored or stepped last, or bytes came to it",
        "1800 s (`start_timeout_s`)",
        "reports after 30 s, and its hosts knock at each other; then back to the degrees that ran, "
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
        "the hosts knock at each other after 30 s; then what is built is given up, and the next "
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
        "reports after 30 s", lambda job: None,
    ),
)  # fmt: skip
"""If the others cannot go on without these hosts, they are only reported."""

LIMITS = {deadline.phase: deadline for deadline in TABLE}


def clock_of(job: Job) -> object:
    """Value whose change restarts a phase's clock."""
    if job.phase in (Phase.DRAINING, Phase.BUILDING, Phase.RUNNING):
        return job.phase, job.round, job.stop.step, job.change.standby
    if job.phase is Phase.WAITING:
        return job.phase, tuple(job.hosts)
    held = job.stop.held if job.awaited <= job.stop.held.keys() else None  # else somebody is silent
    return job.phase, job.round, job.stop.step, job.awaited, job.attempt.progress, held


Work = TypeVar("Work", Replication, Archiving)


def report_if_slow(work: Work, kind: str, now: float) -> tuple[Work, tuple[Action, ...]]:
    """The work, and a log line of its awaited hosts if one is due; ``kind``: kind of copy."""
    waited = now - work.since
    if waited < REPORT_S * float(2**work.reports):
        return work, ()
    text = (
        f"event=slow {kind} of generation {work.generation} since_s={waited:.0f} awaited: "
        f"{', '.join(sorted(work.awaited))}"
    )
    return replace(work, reports=work.reports + 1), (Say(text),)
