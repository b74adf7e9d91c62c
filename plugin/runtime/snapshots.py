"""A worker's part in the snapshots of its job: between two steps it writes what is ordered."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from scalai.core.messages import JsonText
from scalai.core.region import Piece
from scalai.core.worker_messages import (
    AwaitSlot,
    BeginSnapshot,
    RankWritten,
    Samples,
    WriteOrder,
)
from scalai.runtime.agent_folder import AGENT_DIRECTORY
from scalai.runtime.calls import Channel
from scalai.runtime.emergency import Between, Emergency
from scalai.runtime.failpoints import reached
from scalai.runtime.live import LiveState, Slot
from scalai.runtime.registered import Registered
from scalai.runtime.staging import StagingRing
from scalai.runtime.writing import MappedFile, map_beside, ordered_fingerprints, place_rows

Row = tuple[Slot, Piece]


class Snapshots:
    """Writes the state of one rank when the training stands between two steps, and in an emergency.

    Args:
        agent: The connection of the main thread.
        rank, round: Of this worker.
        state: Its live state.
        rows: The rows that it holds.
        rings: Pinned buffers by device.
        registered: What the script keeps beside.
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
    ) -> None:
        self._agent, self._rank, self._round = agent, rank, round
        self._state, self._rows, self._rings = state, rows, rings
        self._registered = registered
        self._mapped: MappedFile | None = None
        self._emergency: Emergency | None = None
        self._is_leaving = False

    def renew(self, state: LiveState, rows: Sequence[Row]) -> None:
        """The same tensors may lie elsewhere now."""
        self._state, self._rows = state, rows
        if self._emergency is not None:
            self._emergency.renew(rows)

    @property
    def are_watched(self) -> bool:
        """Whether a failure of others has this worker write what it has."""
        is_on = self._emergency is not None and self._emergency.is_on
        return is_on and not self._is_leaving

    def watch_for_failures(self) -> None:
        """From now on this worker writes what it has where others fail."""
        directory = os.environ[AGENT_DIRECTORY]
        self._emergency = Emergency(self._rank, self._round, directory, self._rows, self._rings)
        self._emergency.begin()

    def begin_update(self) -> None:
        """What the slots hold is about to change."""
        if self._emergency is not None:
            self._emergency.begin_update()
        reached("update")

    def step_ended(self, step: int, samples: Samples) -> None:
        """A step has ended: what the next one changes before its update is copied."""
        if not self.are_watched:
            return
        assert self._emergency is not None
        self._emergency.step_ended(self._registered.refresh, lambda: self._between(step, samples))

    def take(self, reason: str, step: int, samples: Samples) -> bool:
        """Write what the agent orders. Returns False where the stop was taken back instead: at a
        stop the order comes once the workers of every host have come to it, if they do."""
        if reason == "stop":
            reached("drain")
        order = self._agent.call(BeginSnapshot(self._rank, self._round, reason, step))
        if order is None:
            return False
        self._is_leaving = reason == "stop"
        reached("write" if reason == "stop" else reason)
        self._registered.refresh()
        while order is not None:
            # More than once where this rank writes for a replica that died.
            order = self._write(order, step, samples)
        reached("leave" if reason == "stop" else "train")
        return True

    def _write(self, order: WriteOrder, step: int, samples: Samples) -> WriteOrder | None:
        """Write what the agent ordered and tell it. Returns the next order, or None."""
        began = time.monotonic()
        with nullcontext() if self._emergency is None else self._emergency.writing:
            place_rows(self._rows, order, self._rings, self._mapped)
            self._mapped = None
            placed = time.monotonic()
            fingerprints = ordered_fingerprints(self._rows, order)
        hashed, between = time.monotonic(), self._between(step, samples)
        reached("written")
        return self._agent.call(
            RankWritten(
                rank=self._rank,
                round=self._round,
                fingerprints=tuple(fingerprints),
                coordinate=between.coordinate,
                scalars=between.scalars,
                rank_state=between.rank_state,
                consumed_samples=between.consumed_samples,
                seconds={"snapshot": time.monotonic() - began, "snapshot_proof": hashed - placed},
            )
        )

    def _between(self, step: int, samples: Samples) -> Between:
        """Return what belongs to the state of a step beside its tensors."""
        user = dict(self._registered.values())
        return Between(
            step=step,
            consumed_samples=samples,
            coordinate=self._state.coordinate,
            scalars=JsonText.of({**self._state.scalars(), "user": user}),
            rank_state=JsonText.of(self._state.rank_state()),
        )

    def map_next(self) -> None:
        """Map the file of the next snapshot beside the training, as soon as the agent has made it.

        Then a copy into warm memory is all that a snapshot has to do.
        """
        asked = AwaitSlot(self._rank, self._round)
        map_beside(os.environ[AGENT_DIRECTORY], asked, partial(setattr, self, "_mapped"))
