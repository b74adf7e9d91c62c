"""What is copied beside the training, as the law of the job knows it: replicas that hosts keep for
each other, and generations that come to a disk."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replication:
    """Replicas that are made of a ``generation`` by ``hosts``, of which ``awaited`` have not done
    so yet: since when, how often that was reported, how many bytes have crossed or did not have to,
    which hosts could not. ``order`` tells it from earlier ones. ``is_hopeful``: another host gave
    some nothing; then all are asked ``again_at`` that time. ``giving``: of what only these hosts
    hold, which will be taken away. ``has_skipped``: in place of those of an older generation."""

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
    """A ``generation`` of this ``step`` that ``hosts`` bring to the durable directory: since when,
    and which of them have yet to answer. ``is_written``: all parts lie there, and have yet to
    appear. ``order`` tells it from what was asked before; ``failed`` are hosts that could not, and
    are asked ``again_at`` that time (0: not yet)."""

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
class Copies:
    """Copies of generations, under way and made.

    Attributes:
        replicated: The generation of which replicas were made last, and on which hosts.
        evacuated: The generation of which others hold the pieces held by these hosts alone, which
            will be taken away.
        archived: Generations that this job has brought to the durable directory and keeps there.
        archive_at: When the next one comes there, at the soonest.
        last_replication, last_archive: Highest numbers of orders.
    """

    replication: Replication | None = None
    replicated: tuple[int, frozenset[str]] | None = None
    evacuated: tuple[int, frozenset[str]] | None = None
    last_replication: int = 0
    archiving: Archiving | None = None
    archived: tuple[int, ...] = ()
    archive_at: float | None = None
    last_archive: int = 0
