"""What others read of a host's present workers, in threads of their own."""

from typing import Protocol

from scalai.core.host.state import Round
from scalai.launch.crew import Crew


class Present(Protocol):
    """The present round and its workers, as the agent has them (``launch.agent.Agent``)."""

    @property
    def round(self) -> Round | None:
        """The present round, None where there is none."""

    @property
    def crew(self) -> Crew | None:
        """Its workers, None where there are none."""
