"""A planner whose own slips do not end the job: its law goes on with the degrees that run."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scalai.core.degrees.degrees import Degrees
from scalai.core.degrees.passes import Passes
from scalai.core.degrees.policy import Choice, Preferring
from scalai.core.errors import ScalaiError


@dataclass(frozen=True, slots=True)
class GuardedPlanner:
    """Asks a planner, and tells of what it should never raise.

    Attributes:
        planner: Who is asked.
        say: Takes log lines.
    """

    planner: Preferring
    say: Callable[[str], object]

    def order(
        self,
        choices: Sequence[Choice],
        present: Degrees | None,
        ran: Passes,
        failed: Sequence[Choice],
    ) -> Sequence[Choice]:
        """Return what the planner does.

        Raises:
            ScalaiError: It cannot say, or it has failed; then the log has where.
        """
        try:
            return self.planner.order(choices, present, ran, failed)
        except ScalaiError:
            raise
        except Exception as error:  # our own slip: the job has degrees that run
            self.say(f"event=planner failed: {error!r}\n{traceback.format_exc()}")
            raise ScalaiError(f"{error!r}, and the coordinator's log says where") from error

    def on_hosts(self, slots: int) -> "GuardedPlanner":
        """Return the planner for hosts with so many ranks each."""
        return GuardedPlanner(self.planner.on_hosts(slots), self.say)
