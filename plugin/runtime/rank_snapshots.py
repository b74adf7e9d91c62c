"""A worker's part in its job's snapshots: it writes ordered rows between two steps, or beside the
training.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from scalai.core.job.spacing import StepTimes
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import (
    AwaitSlot,
    BeginSnapshot,
    Samples,
    WriteOrder,
)
from scalai.core.tensors.fingerprint import NOT_COMPARED
from scalai.core.tensors.region import Piece
from scalai.runtime.agent_folder import AGENT_DIRECTORY
from scalai.runtime.async_snapshots import AsyncSnapshots
from scalai.runtime.calls import Channel
from scalai.runtime.consumption import Consumption
from scalai.runtime.emergency_writer import Between, EmergencyWriter
from scalai.runtime.failpoints import reached
from scalai.runtime.live import LiveState, Registered, Slot
from scalai.runtime.live_fingerprints import live_fingerprints
from scalai.runtime.staging import StagingRing
from scalai.runtime.writing import MappedFile, map_beside, ordered_fingerprints, place_rows

Row = tuple[Slot, Piece]

log = logging.getLogger(__name__)


class Snapshots:
    """Writes the state of one rank between two steps, and in an emergency.

    Args:
        agent: Connection of the main thread.
        rows: Held rows of this rank.
        pause: Returns a context for waits within a step, not part of it.
    """

    def __init__(
        self,
        agent: Channel,
        rank: int,
        round: int,
        state: LiveState,
        rows: Sequence[Row],
        rings: Mapping[torch.device, StagingRing],
        registered: Registered,
        consumption: Consumption,
        pause: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._agent, self._rank, self._round = agent, rank, round
        self._state, self._rows, self._rings = state, rows, rings
        self._registered, self._consumption, self._pause = registered, consumption, pause
        self._mapped: MappedFile | None = None
        self._turn = threading.Lock()
        self._emergency: EmergencyWriter | None = None
        self._beside: AsyncSnapshots | None = None
        self._between_now: Between | None = None
        self._obstacle = ""
        self._is_leaving = False
        self._times, self._is_beside = StepTimes(), False

    def renew(self, state: LiveState, rows: Sequence[Row]) -> None:
        """Take the same tensors at other places."""
        self.settle()
        self._state, self._rows = state, rows
        if self._beside is not None:
            self._beside.renew(rows)
        if self._emergency is not None:
            self._emergency.renew(rows)

    @property
    def are_watched(self) -> bool:
        """True if this worker writes its state after others' failures."""
        is_on = self._emergency is not None and self._emergency.is_on
        return is_on and not self._is_leaving

    def watch_for_failures(self) -> None:
        """Write this worker's state after others' failures, from now on."""
        directory, beside = os.environ[AGENT_DIRECTORY], self._beside
        self._emergency = EmergencyWriter(
            self._rank, self._round, directory, self._rows, self._rings, self._turn,
            beside.give_up if beside is not None else lambda: None,
        )  # fmt: skip
        self._emergency.begin()

    def write_beside_training(self) -> None:
        """Write snapshots on the way beside the training, from now on.

        Call it before ``watch_for_failures``.
        """
        directory = os.environ[AGENT_DIRECTORY]
        self._beside = AsyncSnapshots(
            self._agent, self._rank, self._round, directory, self._rows, self._rings, self._turn,
            self._pause,
        )  # fmt: skip
        self._beside.watch()

    def begin_update(self) -> None:
        """Announce a change of the slots' values."""
        if self._beside is not None:
            self._beside.begin_update()
        if self._emergency is not None:
            self._emergency.begin_update()
        reached("update")

    def step_ended(self, step: int, samples: Samples) -> None:
        """Copy, at the end of a step, the values changed by the next one before its update."""
        self._times = self._times.ended(time.monotonic(), is_beside=self._is_beside)
        self._is_beside = self._beside is not None and self._beside.is_writing
        self._between_now = None
        if not self.are_watched:
            return
        assert self._emergency is not None

        def capture() -> Between:
            self._between_now = self._between(step, samples)
            return self._between_now

        self._emergency.step_ended(self._registered.refresh, capture)

    def settle(self) -> None:
        """Wait for the end of a snapshot beside the training."""
        if self._beside is not None:
            self._beside.settle()

    def take_on_the_way(self, step: int, samples: Samples) -> None:
        """Write a snapshot of this step beside the training if possible, else stall it and log the
        reason.
        """
        began, self._is_beside = time.monotonic(), True
        self.settle()
        if self._begin(step, samples, began):
            return
        self.take("snapshot", step, samples)
        self.map_next()

    def _begin(self, step: int, samples: Samples, began: float) -> bool:
        if self._beside is None:
            return False
        obstacle = self._beside.obstacle()
        if obstacle != self._obstacle and obstacle and self._rank == 0:
            log.warning("event=no_async_snapshot %s: the training stands still for it", obstacle)
        self._obstacle = obstacle
        if obstacle:
            return False
        self._registered.refresh()
        between = self._between_now or self._between(step, samples)
        mapped, self._mapped = self._mapped, None
        writing = self._beside.begin(between, mapped, began, self.map_next, self._measured())
        return writing is not None

    def take(self, reason: str, step: int, samples: Samples) -> bool:
        """Write the agent's order. Returns False if the stop was withdrawn.

        At a stop the order comes once the workers of every host have reached it.
        """
        began = time.monotonic()
        self.settle()
        if reason == "stop":
            reached("drain")
        prints = self._prints() if reason in ("start", "stop") else ()
        order = self._agent.call(BeginSnapshot(self._rank, self._round, reason, step, prints))
        if order is None:
            return False
        self._is_leaving = reason == "stop"
        reached("write" if reason == "stop" else reason)
        self._registered.refresh()
        while order is not None:
            # More than once if this rank writes for a dead replica.
            order = self._write(order, step, samples, began)
        reached("leave" if reason == "stop" else "train")
        return True

    def _prints(self) -> tuple[int, ...]:
        """Return fingerprints of this rank's rows, except volatile ones, to compare replicas on one
        host: only one of them is written.

        Takes as long as a proof of all held rows. Empty: no other rank is here, or the device has
        no room for the arithmetic.
        """
        if os.environ.get("LOCAL_WORLD_SIZE", "1") == "1":
            return ()
        kept = [row for row, (slot, _) in enumerate(self._rows) if not slot.is_volatile]
        try:
            with self._turn:
                found = live_fingerprints([self._rows[row] for row in kept])
        except torch.OutOfMemoryError:
            return ()
        prints = [NOT_COMPARED] * len(self._rows)
        for row, value in zip(kept, found.tolist(), strict=True):
            prints[row] = value
        return tuple(prints)

    def _write(
        self, order: WriteOrder, step: int, samples: Samples, stands_since: float
    ) -> WriteOrder | None:
        began = time.monotonic()
        with self._turn:
            place_rows(self._rows, order, self._rings, self._mapped)
            self._mapped = None
            placed = time.monotonic()
            fingerprints = ordered_fingerprints(self._rows, order)
        hashed, between = time.monotonic(), self._between(step, samples)
        reached("written")
        seconds = {
            "snapshot": time.monotonic() - began,
            "snapshot_proof": hashed - placed,
            "stall": time.monotonic() - stands_since,
            **self._measured(),
        }
        return self._agent.call(between.written(self._rank, self._round, fingerprints, seconds))

    def _measured(self) -> dict[str, float]:
        found = {"step": self._times.step_s, "cost": self._times.cost_s}
        return {name: seconds for name, seconds in found.items() if seconds is not None}

    def _between(self, step: int, samples: Samples) -> Between:
        own = {"user": dict(self._registered.values()), **self._consumption.scalars()}
        return Between(
            step=step,
            consumed_samples=samples,
            coordinate=self._state.coordinate,
            scalars=JsonText.of({**self._state.scalars(), **own}),
            rank_state=JsonText.of(self._state.rank_state()),
        )

    def map_next(self) -> None:
        """Map the file of the next snapshot beside the training, as soon as the agent has made it.

        Then a snapshot is only a copy into warm memory.
        """
        asked = AwaitSlot(self._rank, self._round)
        map_beside(os.environ[AGENT_DIRECTORY], asked, partial(setattr, self, "_mapped"))
