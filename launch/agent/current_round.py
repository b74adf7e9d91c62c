"""What others read of a host's present workers, in threads of their own."""

from typing import Protocol

from scalai.core.host.state import Round
from scalai.launch.agent.worker_group import WorkerGroup


class CurrentRound(Protocol):
    """The present round and its workers, as the agent has them (``launch.agent.loop.Agent``)."""

    @property
    def round(self) -> Round | None:
        """The present round, None where there is none."""

    @property
    def group(self) -> WorkerGroup | None:
        """Its workers, None where there are none."""
