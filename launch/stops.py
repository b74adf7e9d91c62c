"""The agent's part in a stop: its workers come to one step, and who dies or hangs on the way there
holds up nobody."""

import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from scalai.core import events
from scalai.core.reports import Report
from scalai.core.worker_messages import Stand
from scalai.launch.crew import Crew
from scalai.launch.deposits import Deposits
from scalai.launch.round import Round, answers
from scalai.launch.workforce import Workforce

HELD_TELL_S = 15.0
"""How often the coordinator hears that a save holds up a stop: well before it takes the agent for
silent."""
HELD_LOG_S = 60.0
UNLOOKED_S = 60.0
"""Workers look after each step whether a save has ended: who has not for so long may hang."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Held:
    """A proposed stop that waits for a save. Times by ``time.monotonic``."""

    round: int
    stop: int
    since: float
    looks: int
    """How often the workers had looked for the save."""
    looked_at: float
    tell_at: float = 0.0
    log_at: float = 0.0


class Stops:
    """Stops of one host's workers, of any round. Only the agent's own thread calls it.

    Args:
        host: Name of this host in the job.
        workforce: Who is stopped.
        deposits: What they do there.
        tell: Reports to the coordinator.
        patience_s: How long workers may take to write once they may.
    """

    def __init__(
        self,
        host: str,
        workforce: Workforce,
        deposits: Deposits,
        tell: Callable[[Report], None],
        patience_s: float,
    ) -> None:
        self._host = host
        self._workforce, self._deposits = workforce, deposits
        self._tell, self._patience_s = tell, patience_s
        self._held: _Held | None = None
        self._looks = 0
        self._standing: list[Future[None]] = []
        """Workers that stand at an agreed stop with a save in flight."""

    @property
    def saves(self) -> bool:
        """Whether a save of the training's own is in flight, which the workers' end would take
        along, and they have looked for it since this was asked last."""
        crew = self._workforce.crew
        if crew is None or crew.page.save_in_flight() is None:
            return False
        before, self._looks = self._looks, crew.page.save_looks()
        return self._looks != before

    def prepare(self, stop: int) -> None:
        """Write the proposed stop, then read how far the workers are, and tell. While a save is in
        flight, that waits: the training goes on, and the coordinator hears what for."""
        current, crew = self._workforce.round, self._workforce.crew
        if current is None or crew is None:
            return
        if crew.page.save_in_flight() is not None:
            now = time.monotonic()
            self._held = _Held(current.number, stop, now, crew.page.save_looks(), now)
            crew.page.want_stop(2 if current.was_put_off else 1)
            self._hold(crew)
            return
        self._held = None
        crew.page.want_stop(2 if current.was_put_off else 0)
        crew.page.prepare(stop)
        self._tell(events.Prepared(self._host, current.number, stop, crew.newest_step()))

    def _hold(self, crew: Crew) -> None:
        """Tell what a proposed stop waits for, or propose it where that has ended."""
        held, iteration, now = self._held, crew.page.save_in_flight(), time.monotonic()
        if held is None:
            return
        if iteration is None:
            self.prepare(held.stop)
            return
        looks = crew.page.save_looks()
        if looks != held.looks:
            held.looks, held.looked_at = looks, now
        what = f"the save of iteration {iteration} is in flight, {now - held.since:.0f} s so far"
        if now - held.looked_at > UNLOOKED_S:
            what += f"; no worker has looked for its end for {now - held.looked_at:.0f} s"
        if now >= held.tell_at:
            held.tell_at = now + HELD_TELL_S
            self._tell(events.Held(self._host, held.round, held.stop, what))
        if now >= held.log_at:
            held.log_at = now + HELD_LOG_S
            log.info("event=held a change waits: %s. The training goes on.", what)

    def stand(self, current: Round, answer: "Future[None]", stand: Stand) -> None:
        """A worker has come to an agreed stop with a save in flight that began on the way. It is
        answered once the stop is taken back, as it is for all ranks: they stand there alike."""
        if current is not self._workforce.round or current.stop != stand.step:
            answer.set_result(None)
            return
        current.was_put_off = True
        if not answers(self._standing):  # those of a round that has ended stand no more
            what = f"the save of iteration {stand.iteration} has begun on the way to it"
            self._tell(events.Held(self._host, current.number, stand.step, what))
        self._standing = [*answers(self._standing), answer]

    def withdraw(self) -> None:
        """Forget the stop, proposed or agreed, and send on whoever waits at it."""
        current, crew = self._workforce.round, self._workforce.crew
        self._held = None
        if current is None or crew is None:
            return
        crew.page.want_stop(0)
        crew.page.withdraw()  # first, so that nobody whom the answer sends on comes to it again
        current.stop, current.has_arrived = None, False
        self._deposits.withdraw(current)
        standing, self._standing = self._standing, []
        for answer in answers(standing):
            answer.set_result(None)

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
        if self._held is not None and (current is None or current.number != self._held.round):
            self._held = None
        if current is None or crew is None:
            return
        if self._held is not None:
            self._hold(crew)
        if not current.is_draining:
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
