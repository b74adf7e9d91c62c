"""The agent's part in a stop: its workers come to one step, and who dies or hangs on the way there
holds up nobody."""

import logging
import time
from collections.abc import Callable

from scalai.launch.deposits import Deposits
from scalai.launch.workforce import Workforce

log = logging.getLogger(__name__)


class Stops:
    """Stops of one host's workers, of any round. Only the agent's own thread calls it.

    Args:
        workforce: Who is stopped.
        deposits: What they do there.
        tell: Tells the coordinator of an event.
        patience_s: How long workers may be on their way once other hosts are there.
    """

    def __init__(
        self,
        workforce: Workforce,
        deposits: Deposits,
        tell: Callable[..., None],
        patience_s: float,
    ) -> None:
        self._workforce, self._deposits = workforce, deposits
        self._tell, self._patience_s = tell, patience_s

    def prepare(self, stop: int) -> None:
        """Write the proposed stop, then read how far the workers are, and tell."""
        crew = self._workforce.crew
        if crew is not None:
            crew.page.prepare(stop)
            self._tell("prepared", stop=stop, newest=crew.newest_step())

    def withdraw(self) -> None:
        """Forget the proposed stop."""
        if self._workforce.crew is not None:
            self._workforce.crew.page.withdraw()

    def agree(self, stop: int) -> None:
        """All workers of the job see this stop: they may come to it."""
        current, crew = self._workforce.round, self._workforce.crew
        if current is None or crew is None:
            return
        # From here on only a connection that ends tells of a worker's death: look once more.
        if self._workforce.have_ended():
            return
        died = current.lost - current.finished
        if died:
            self._workforce.fail(f"ranks {sorted(died)} died before the stop")
        else:
            current.is_draining = True
            crew.page.agree(stop)

    def hurry(self) -> None:
        """Other hosts have come to the stop: workers that do not come there hang."""
        current = self._workforce.round
        if current is not None and current.give_up_at is None and not current.has_sealed:
            current.give_up_at = time.monotonic() + self._patience_s

    def watch(self) -> None:
        """Give up workers that hang."""
        current = self._workforce.round
        if current is None or self._workforce.crew is None or current.give_up_at is None:
            return
        if time.monotonic() > current.give_up_at:
            self._workforce.fail("workers hang on their way to the stop, or in their deposit")

    def worker_gone(self, rank: int) -> None:
        """The connection of a worker of the present round has ended."""
        current, crew = self._workforce.round, self._workforce.crew
        if current is None or crew is None or rank not in current.ranks:
            return
        current.lost.add(rank)
        if not current.is_draining:
            return
        is_done = current.deposit is not None and rank in current.deposit.parts
        if not is_done and rank not in current.finished:
            if not crew.page.has_reached_stop(rank - current.ranks.start):
                self._workforce.fail(f"rank {rank} died on its way to the stop")
                return
            log.error("event=worker_lost rank=%d while it deposits", rank)
            self.hurry()
        if current.is_complete(current.finished):
            self._tell("finished", round=current.number)
        else:
            self._deposits.give_orders(current)
            self._deposits.seal_if_complete(current)
