"""The workers of one host: those of the present round, and those that are built ahead for the
next."""

import logging
import time
from collections.abc import Callable

from scalai.core import commands, events
from scalai.core.errors import ScalaiError
from scalai.core.reports import Failed, Report
from scalai.launch.ahead import obstacle, offer
from scalai.launch.crew import Crew, Crews
from scalai.launch.round import Round
from scalai.launch.torch_elastic import Outcome
from scalai.runtime.control import OUT_OF_MEMORY_EXIT

log = logging.getLogger(__name__)


class Workforce:
    """Starts and ends workers, and tells how they ended. Only the agent's own thread calls it;
    others may read ``round`` and ``crew``.

    Args:
        host: Name of this host in the job.
        policy: ``[resize] build_ahead``: ``auto``, ``always`` or ``never``.
        crews: Starts the processes.
        tell: Reports to the coordinator.
    """

    def __init__(
        self, host: str, policy: str, crews: Crews, tell: Callable[[Report], None]
    ) -> None:
        self._host, self._policy, self._crews, self._tell = host, policy, crews, tell
        self.round: Round | None = None
        """The present round."""
        self.crew: Crew | None = None
        """Its workers; None where what was built ahead for it is gone."""
        self._ahead: tuple[Round, Crew] | None = None

    def rounds(self) -> list[Round]:
        """Return the present round and the one ahead, as far as they are there."""
        ahead = self._ahead[0] if self._ahead else None
        return [round for round in (self.round, ahead) if round is not None]

    # ------------------------------------------------------------------ starts

    def build(self, command: commands.Build) -> None:
        """Start the next round's workers beside the present ones, or tell why that cannot be."""
        self.give_up()
        pids = self.crew.pids().values() if self.crew else ()
        on_devices = self.round is not None and self.round.uses_devices
        reason = obstacle(
            self._policy, command.workers.placement.local_world_size, pids, on_devices=on_devices
        )
        if reason is None:
            try:
                crew = self._crews.start(command.workers)
            except (ScalaiError, OSError) as error:
                reason = str(error)
            else:
                offer(crew.pids().values(), is_ahead=True)
                self._ahead = Round(command), crew
        if reason is not None:
            self._tell(events.NotBuilt(self._host, command.workers.round, reason))

    def start(self, command: commands.Start) -> None:
        """Begin a round, with the workers that were built for it where there are any. Where they
        should be and are gone, the round has failed and has no crew."""
        if self._ahead is not None and self._ahead[0].number == command.workers.round:
            (self.round, self.crew), self._ahead = self._ahead, None
            self.round.command = command
            offer(self.crew.pids().values(), is_ahead=False)
            return
        self.give_up()
        self.round, self.crew = Round(command), None
        if command.is_built:
            self.fail("what was built ahead is gone")
            return
        try:
            self.crew = self._crews.start(command.workers)
        except (ScalaiError, OSError) as error:
            self.fail(f"its workers cannot be started: {error}")

    # ------------------------------------------------------------------ ends

    def give_up(self, round: int | None = None) -> None:
        """End what was built ahead: for any round, or for this one."""
        if self._ahead is not None and round in (None, self._ahead[0].number):
            ahead, crew = self._ahead
            self._ahead = None
            crew.end()
            ahead.dismiss()

    def end(self, grace_s: float, is_over: Callable[[], bool]) -> int:
        """End the workers of the present round. Blocks.

        Args:
            grace_s: How long they may take to leave by themselves.
            is_over: Whether the agent itself must end, and waits no longer.

        Returns:
            The highest step that any of them has ended.
        """
        ended, crew, newest = self.round, self.crew, 0
        assert ended is not None
        if crew is not None:
            deadline = time.monotonic() + grace_s
            while not is_over() and time.monotonic() < deadline and crew.poll() is None:
                time.sleep(0.01)
            crew.end()
            newest = crew.newest_step()
        self.round = self.crew = None
        ended.dismiss()
        return newest

    def close(self) -> None:
        """End all workers, present and ahead."""
        self.give_up()
        if self.crew is not None:
            self.crew.end()

    # ------------------------------------------------------------------ how they fare

    def watch(self) -> None:
        """Look for workers that have ended, and tell of them."""
        if self._ahead is not None:
            outcome = self._ahead[1].poll()
            if outcome is not None:
                number = self._ahead[0].number
                self.give_up()
                reason = "; ".join(outcome.failures) or "the script has ended"
                self._tell(events.NotBuilt(self._host, number, reason))
        if self.round is not None and self.crew is not None and not self.round.is_draining:
            self.have_ended()

    def have_ended(self) -> bool:
        """Whether the workers of the present round have ended; tells of it."""
        assert self.round is not None and self.crew is not None
        outcome = self.crew.poll()
        if outcome is not None:
            self._ended(self.round, outcome)
        return outcome is not None

    def _ended(self, current: Round, outcome: Outcome) -> None:
        if outcome.failures:
            memory = any(f"exited with {OUT_OF_MEMORY_EXIT}" in f for f in outcome.failures)
            # Whom a signal kills may take others with it that talk to it.
            is_chance = any("was killed by" in failure for failure in outcome.failures)
            self.fail("; ".join(outcome.failures), out_of_memory=memory, is_chance=is_chance)
        elif not current.has_failed:
            self._tell(events.Finished(self._host, current.number))

    def refuse(self, refused: Round, reason: str) -> None:
        """Workers of a round say that the job cannot run so: to try again would end alike."""
        if refused is self.round:
            self.fail(reason, is_refusal=True)
        else:
            self.give_up()
            self._tell(events.NotBuilt(self._host, refused.number, reason))

    def fail(
        self,
        reason: str,
        *,
        out_of_memory: bool = False,
        is_chance: bool = False,
        is_refusal: bool = False,
    ) -> None:
        """The present round cannot go on: tell of it, once. ``is_chance``: a signal was the cause,
        which says nothing of the degrees."""
        if self.round is not None and not self.round.has_failed:
            self.round.has_failed = True
            log.error("event=failed round=%d %s", self.round.number, reason)
            number = self.round.number
            self._tell(Failed(number, reason, out_of_memory, is_chance, is_refusal))
