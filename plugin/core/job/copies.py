"""Copies made beside the training: replicas between hosts, and generations on a disk."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replication:
    """Replication of one generation.

    Attributes:
        order: Number of the command.
        hosts: Hosts that make replicas.
        awaited: Hosts without an answer.
        since: Start, in seconds of the job's clock.
        reports: Number of log lines so far.
        size_bytes, unchanged_bytes: Bytes transferred, and bytes already there.
        failed: Hosts that could not.
        is_hopeful: Some host got nothing from another; all are asked again.
        has_skipped: It replaces the replication of an older generation.
        again_at: Time of the next request.
        giving: Hosts to be taken away: only pieces on these alone are copied.
    """

    order: int
    generation: int
    hosts: frozenset[str]
    awaited: frozenset[str]
    since: float
    reports: int = 0
    size_bytes: int = 0
    unchanged_bytes: int = 0
    failed: frozenset[str] = frozenset()
    is_hopeful: bool = False
    is_again: bool = False
    has_skipped: bool = False
    again_at: float = 0.0
    giving: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Archiving:
    """A generation on its way to the durable directory.

    Attributes:
        order: Number of the command.
        generation, step: Its number and step.
        hosts: Hosts that write.
        since: Start, in seconds of the job's clock.
        awaited: Hosts without an answer.
        failed: Hosts that could not.
        is_written: All parts are written, and not yet visible.
        again_at: Time of the next request; 0: none.
    """

    order: int
    generation: int
    step: int
    hosts: frozenset[str]
    since: float
    awaited: frozenset[str] = frozenset()
    reports: int = 0
    size_bytes: int = 0
    failed: frozenset[str] = frozenset()
    is_written: bool = False
    again_at: float = 0.0


@dataclass(frozen=True, slots=True)
class GenerationCopies:
    """Copies of generations, in progress and made.

    Attributes:
        replicated: Newest generation with replicas, and their hosts.
        evacuated: Generation with safe copies of pieces on these leaving hosts alone.
        archived: Generations of this job in the durable directory.
        archive_at: Earliest time of the next archive.
        last_replication, last_archive: Highest command numbers.
    """

    replication: Replication | None = None
    replicated: tuple[int, frozenset[str]] | None = None
    evacuated: tuple[int, frozenset[str]] | None = None
    last_replication: int = 0
    archiving: Archiving | None = None
    archived: tuple[int, ...] = ()
    archive_at: float | None = None
    last_archive: int = 0
