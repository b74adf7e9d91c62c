"""What is known of a host that runs no workers until it has passed its health check."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """A health check of one host.

    Attributes:
        order: Tells its answer from those to earlier ones.
        since: When the host was asked, in seconds of the job's clock.
        is_asked: Whether the answer is awaited.
        failures: How often it has failed on end.
        again_at: When the host is asked again.
        reason: Why it failed last; empty before the first answer.
    """

    order: int
    since: float
    is_asked: bool = True
    failures: int = 0
    again_at: float = 0.0
    reason: str = ""
