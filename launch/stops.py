"""The agent's part in a stop: its workers come to one step, and who dies or hangs on the way there
holds up nobody."""

import logging
import os
import signal
import time
from collections.abc import Callable

from scalai.launch.crew import Crew
from scalai.launch.deposits import Deposits
from scalai.launch.round import Round
from scalai.launch.workforce import Workforce

log = logging.getLogger(__name__)


class Stops:
    """Stops of one host's workers, of any round. Only the agent's own thread calls it.

    Args:
        workforce: Who is stopped.
        deposits: What they do there.
        tell: Tells the coordinator of an event.
        patience_s: How long workers may take to write once they may.
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
        """Forget the stop, proposed or agreed, and send on whoever waits at it."""
        current, crew = self._workforce.round, self._workforce.crew
        if current is None or crew is None:
            return
        crew.page.withdraw()  # first, so that nobody whom the answer sends on comes to it again
        current.stop, current.has_arrived = None, False
        self._deposits.withdraw(current)

    def agree(self, stop: int) -> None:
        """All workers of the job see this stop: they may come to it."""
        current, crew = self._workforce.round, self._workforce.crew
        if current is None or crew is None or self._workforce.have_ended():
            return
        current.stop = stop
        crew.page.agree(stop)

    def deposit(self) -> None:
        """The workers of every host stand at the stop: those of this one write and leave."""
        current = self._workforce.round
        if current is None or current.stop is None:
            return
        current.may_deposit = True
        self._deposits.give_orders(current)
        self._deposits.seal_if_complete(current)

    def watch(self) -> None:
        """Look after workers that are on their way to the stop, and give up those that may write
        and do not."""
        current, crew = self._workforce.round, self._workforce.crew
        if current is None or crew is None or not current.is_draining:
            return
        if not current.may_deposit:
            self._look_for_ends(current, crew)
        elif not current.has_sealed:
            self._give_up_who_hangs(current, crew)

    def worker_gone(self, rank: int) -> None:
        """The connection of a worker of the present round has ended."""
        current, crew = self._workforce.round, self._workforce.crew
        if current is None or crew is None or rank not in current.ranks:
            return
        is_done = current.deposit is not None and rank in current.deposit.parts
        if current.is_draining and not current.may_deposit:
            if not crew.page.has_reached_stop(rank - current.ranks.start):
                return  # how it ends tells whether it is a failure: see watch
            log.error("event=worker_lost rank=%d at the stop", rank)
        elif current.is_draining and not is_done and rank not in current.finished:
            log.error("event=worker_lost rank=%d while it deposits", rank)
        current.lost.add(rank)
        if current.is_draining:
            self._go_on(current)

    def _go_on(self, current: Round) -> None:
        """Do without workers that are lost."""
        self._deposits.tell_arrived(current)
        self._deposits.give_orders(current)
        self._deposits.seal_if_complete(current)

    def _look_for_ends(self, current: Round, crew: Crew) -> None:
        """Workers that have ended before their stop have finished, or have failed. One that has
        ended at it is lost, and replicas of it may write for it: torch's own look would end those
        with it."""
        ended = crew.ended()
        died = {rank for rank, code in ended.items() if code != 0}
        local = current.ranks.start
        early = sorted(r for r in died if not crew.page.has_reached_stop(r - local))
        if early:
            self._workforce.fail(f"ranks {early} died on their way to the stop", is_chance=True)
        elif set(current.ranks) <= set(ended) - died:
            self._workforce.have_ended()
        elif died - current.lost:
            current.lost |= died
            self._go_on(current)

    def _give_up_who_hangs(self, current: Round, crew: Crew) -> None:
        """End workers that have an order and do not write; the clock begins anew whenever one
        does."""
        under_way = current.deposit
        hung = (under_way.unwritten() if under_way else set()) - current.lost
        if not hung or hung != current.unwritten:
            current.unwritten = set(hung)
            current.give_up_at = time.monotonic() + self._patience_s if hung else None
            return
        if current.give_up_at is None or time.monotonic() < current.give_up_at:
            return
        log.error("event=gave_up ranks=%s hang in their deposit: they are ended", sorted(hung))
        # What a worker has forked may hold its connection when it is dead.
        dead, pids = hung & crew.ended().keys(), crew.pids()
        for rank in hung - dead:
            if str(rank) in pids:
                os.kill(pids[str(rank)], signal.SIGKILL)
        current.give_up_at = time.monotonic() + self._patience_s
        if dead:
            current.lost |= dead
            self._go_on(current)
