"""What a job remembers beyond its coordinator: every host keeps it, and brings it to the one that
takes its place.

What hangs on the coordinator's clock is not in it, because the next one has another: since when the
training has earned back a restart, when hosts were lost, until when they wait. That begins anew,
and gives no job more restarts than it had.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from scalai.core.dataset.ledger import Lost
from scalai.core.degrees.passes import Recompute
from scalai.core.messages.shared import JsonText

ASKED = "asked"
"""Under this name of ``about.facts`` a host writes the ``request`` beside a state, for a start of
the same job once all of its processes are gone."""


@dataclass(frozen=True, slots=True)
class Run:
    """An assignment as it travels: hosts in rank order with their workers, degrees as of
    ``Degrees.to_json``."""

    workers: tuple[tuple[str, int], ...]
    degrees: Mapping[str, int]
    micro_batch_size: int | None
    recompute: Recompute | None = None


@dataclass(frozen=True, slots=True)
class FailedRun:
    """An assignment that has failed, and why."""

    run: Run
    reason: str


@dataclass(frozen=True, slots=True)
class Remembered:
    """What hosts keep of a job.

    Attributes:
        term: Number of the coordinator that said so.
        number: How often it had said something by then.
        request: What persons have asked of the job, and what has run out of memory.
        max_hosts: Hosts that it may have.
        failures_left: Failures that it survives.
        counted_round: The round whose failure has cost the last one; 0: none.
        tries: Failures of the present assignment that may have been chance.
        ran: What all ranks have stepped in last; None: nothing yet.
        failed: Changes that are not tried again on the hosts as they are.
        archived: Generations that it has brought to the durable directory and keeps there.
        lost: What rounds have done and the job went back behind; the ledger of samples keeps it.
        proven: Keys of layouts whose function is proven, and the framework that tells of steps.
    """

    term: int
    number: int
    request: JsonText
    max_hosts: int
    failures_left: int
    counted_round: int
    tries: int
    ran: Run | None
    failed: tuple[FailedRun, ...]
    archived: tuple[int, ...]
    lost: tuple[Lost, ...] = ()
    proven: tuple[tuple[str, ...], str] = ((), "")

    @property
    def order(self) -> tuple[int, int]:
        """Of two, the later one has the higher one."""
        return self.term, self.number
