"""A host's present workers, for readers in other threads."""

from typing import Protocol

from scalai.core.host.state import Round
from scalai.launch.agent.worker_group import WorkerGroup


class CurrentRound(Protocol):
    """The present round and its workers (``launch.agent.loop.Agent``)."""

    @property
    def round(self) -> Round | None:
        """The present round; None: there is none."""

    @property
    def group(self) -> WorkerGroup | None:
        """Its workers; None: there are none."""
