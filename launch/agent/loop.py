"""The agent, one per host: starts and stops workers, owns the host's Tensor Store, obeys the
coordinator.

One thread decides: the coordinator's commands, workers' calls and results of background work reach
it through one queue, as events of the host's law (``core.host.law``); ``Performer`` performs the
law's actions. An ``Agent`` gets its parts opened, by ``launch.agent.participant.open_agent``.
"""

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from scalai.core.errors import ScalaiError
from scalai.core.host import actions, events
from scalai.core.host.actions import Action
from scalai.core.host.events import Event
from scalai.core.host.law import advance
from scalai.core.host.state import HostState, Round
from scalai.core.messages.commands import Command
from scalai.core.messages.reports import Slots
from scalai.core.messages.worker_messages import WorkerRequest
from scalai.launch.agent.worker_group import WorkerGroup

TICK_S = 0.1
MEMORY, DISK, NETWORK, ENDS, ARCHIVE, HEALTH = (
    "memory", "disk", "network", "ends", "archive", "health",
)  # fmt: skip
"""Lanes of work beside the loop: snapshots and forks; others' disks; other hosts; ends of workers;
ordered copies to the durable directory; health checks, one at a time."""
THREADS = {MEMORY: 4, DISK: 4, NETWORK: 4, ENDS: 4, ARCHIVE: 1, HEALTH: 1}

log = logging.getLogger(__name__)


class Loop:
    """Does one thing at a time, with regular ticks under any load. Any thread may ``put``."""

    def __init__(self) -> None:
        self._due: queue.Queue[Callable[[], None]] = queue.Queue()

    def put(self, due: Callable[[], None]) -> None:
        """Queue work for the loop."""
        self._due.put(due)

    def run(self, tick: Callable[[], None], is_over: Callable[[], bool]) -> None:
        """Work until it is over."""
        tick_at = time.monotonic()
        while not is_over():
            try:
                self._due.get(timeout=max(0.0, tick_at - time.monotonic()))()
            except queue.Empty:
                pass
            if time.monotonic() >= tick_at and not is_over():
                tick()
                tick_at = time.monotonic() + TICK_S


class Doer(Protocol):
    """An agent's view of its ``Performer``."""

    @property
    def groups(self) -> Mapping[int, WorkerGroup]: ...
    def generations(self) -> frozenset[int]: ...
    def seen(self, current: Round | None) -> events.GroupSeen | None: ...
    def arrivals(self) -> Iterable[Event]: ...
    def take_call(self, answer: "Future[Any]") -> int: ...
    def perform(self, action: Action) -> Iterable[Event]: ...


class Agent:
    """One host's part in a job: the loop around the law.

    Args:
        state: Initial state of the host.
        performer: Performs the law's actions.
        watches: Looks at the workers at each tick; decides nothing.
    """

    def __init__(
        self,
        state: HostState,
        performer: Doer,
        loop: Loop,
        watches: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = state
        self._performer, self._loop, self._watches = performer, loop, watches
        self._forced: int | None = None

    @property
    def exit(self) -> int | None:
        """The agent's exit code; None: it works."""
        return self.state.exit if self._forced is None else self._forced

    def is_over(self) -> bool:
        return self.exit is not None

    # Read by other threads.

    @property
    def round(self) -> Round | None:
        """The present round."""
        return self.state.round

    @property
    def group(self) -> WorkerGroup | None:
        """Its workers."""
        current = self.state.round
        return None if current is None else self._performer.groups.get(current.number)

    # ------------------------------------------------------------------ events in, actions out

    def feed(self, event: Event) -> None:
        """Feed the law an event, and all events that follow from its actions. Only the loop calls
        it."""
        pending = deque([event])
        while pending:
            held = self._performer.generations()
            if held != self.state.generations:
                pending.appendleft(events.Holds(held))
            self.state, due = advance(self.state, pending.popleft())
            for action in due:
                try:
                    pending.extend(self._performer.perform(action))
                except (ScalaiError, OSError) as error:
                    # No room, file or process: the round fails, not the agent.
                    log.exception("event=error host=%s", self.state.host)
                    pending.append(events.Failed(action, str(error)))

    def put(self, event: Event) -> None:
        """Have the loop feed an event. Any thread may call it."""
        self._loop.put(lambda: self.feed(event))

    def obey(self, command: Command) -> None:
        """Perform the coordinator's command; in the loop."""
        self.feed(events.Commanded(command, self._performer.seen(self.state.round)))

    def call(self, answer: "Future[Any]", request: WorkerRequest) -> None:
        """Answer a worker's call; in the loop."""
        self.feed(events.Called(self._performer.take_call(answer), request))

    def worker_gone(self, round: int, rank: int) -> None:
        """A worker's connection has ended; in the loop."""
        self.feed(events.WorkerGone(round, rank, self._performer.seen(self.state.round)))

    def tick(self) -> None:
        """Time passes; in the loop."""
        for event in self._performer.arrivals():
            self.feed(event)
        self.feed(events.TimePassed(time.monotonic(), self._performer.seen(self.state.round)))
        if not self.is_over():
            self._watches()

    def run(self) -> int:
        """Work until the coordinator ends it. Returns the exit code."""
        self._loop.run(self.tick, self.is_over)
        assert self.exit is not None
        return self.exit

    # ------------------------------------------------------------------ any thread

    def leave(self) -> None:
        """A first SIGTERM or SIGINT: drain."""
        self.put(events.LeaveAsked())

    def noticed(self, source: str, left_s: float | None) -> None:
        """A source announces this host's removal."""
        self.put(events.Noticed(source, left_s))

    def notice_withdrawn(self, source: str) -> None:
        """The source withdraws its notice."""
        self.put(events.NoticeWithdrawn(source))

    def show_stacks(self) -> None:
        """Log where the workers are, within moments."""

        def show() -> None:
            for round in self._performer.groups:  # the present one, and it alone answers at a time
                tuple(self._performer.perform(actions.ShowStacks(round)))

        self._loop.put(show)

    def stop_now(self, code: int) -> None:
        """A second signal: end at once; the state stays in the store for a restarted agent."""
        self._forced = code  # now: the loop may be waiting for workers to leave
        self._loop.put(lambda: None)

    def set_slots(self, slots: int) -> None:
        """The device probe reports a new number."""
        self.put(Slots(slots))
