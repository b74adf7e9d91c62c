"""A worker's part in its job's snapshots: it writes ordered rows between two steps, or beside the
training.

Beside the training, values changed by forward and backward passes are copied between two steps, as
for an emergency (``VolatileCopies``). Values changed only by an update (parameters, masters,
moments) are copied by a thread during the passes, into the agent's files; the next update waits for
the end of the copy. Fingerprints are computed from the files, not from memory in training.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scalai.core.errors import PeerError, ScalaiError
from scalai.core.job.spacing import StepTimes
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import (
    AwaitSlot,
    BeginSnapshot,
    RankUnwritten,
    Samples,
    WriteOrder,
)
from scalai.core.tensors.fingerprint import NOT_COMPARED
from scalai.core.tensors.region import Piece
from scalai.runtime.agent_folder import AGENT_DIRECTORY, call_agent
from scalai.runtime.calls import Channel
from scalai.runtime.consumption import Consumption
from scalai.runtime.emergency_writer import COPIED_BYTES, Between, EmergencyWriter, VolatileCopies
from scalai.runtime.failpoints import reached
from scalai.runtime.live import LiveState, Registered, Slot, host_bits, keep
from scalai.runtime.live_files import (
    MappedFile,
    copy_from_device,
    file_fingerprints,
    map_beside,
    ordered_fingerprints,
    ordered_views,
    place_rows,
)
from scalai.runtime.live_fingerprints import live_fingerprints
from scalai.runtime.staging import StagingRing, use_device_of
from scalai.store.files import blocks, slices

Row = tuple[Slot, Piece]

SAID_S = 60.0
"""Interval of log lines about a wait."""
NICE = 10
"""Niceness of the copying thread beside the training's threads."""
BLOCK_BYTES = 16 << 20
"""Bytes copied at a time on the host; giving up is checked in between."""

FAILURES = (ScalaiError, OSError, RuntimeError, MemoryError)
"""Errors of a snapshot that do not end the training."""

log = logging.getLogger(__name__)


class GivenUpError(RuntimeError):
    """The snapshot being written is no longer wanted."""


@dataclass(eq=False, slots=True)
class Writing:
    """One snapshot being written beside the training.

    Attributes:
        between: State of its step beside the rows.
        copies: Rows, with copies of volatile ones.
        mapped: Its file, if mapped beforehand.
        stall_s: Seconds of training stalled for it so far.
        waits_since: Begin of an update's wait for it.
        copied: Set at the end of the copy, also of a failed one.
        ended: Set at the end of the thread's work.
        is_told: The agent knows the result.
        is_given_up: Workers have failed meanwhile: nothing more is written.
        seconds: Measurements to report with it.
    """

    between: Between
    copies: VolatileCopies
    mapped: MappedFile | None
    stall_s: float
    waits_since: float | None = None
    order: WriteOrder | None = None
    copied: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    is_copied: bool = False
    is_told: bool = False
    is_given_up: bool = False
    copy_s: float = 0.0
    failure: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.between.step


class AsyncSnapshots:
    """A worker's snapshots on the way, one at a time. Called by the training's thread.

    Args:
        turn: Lock for writing a snapshot: one thread at a time uses the rings.
        pause: Returns a context for an update's wait: not part of the step, possibly longer than
            it.
    """

    def __init__(
        self,
        agent: Channel,
        rank: int,
        round: int,
        directory: str,
        rows: Sequence[Row],
        rings: Mapping[torch.device, StagingRing],
        turn: threading.Lock,
        pause: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._agent, self._rank, self._round, self._directory = agent, rank, round, directory
        self._rings, self._turn, self._pause, self._rows = rings, turn, pause, rows
        self._copies: VolatileCopies | None = None
        self._process = os.getpid()
        self._present: Writing | None = None
        self._has_updated = False

    def watch(self) -> None:
        """Watch updates from now on. Call before an emergency's watch: an update waiting here has
        not begun.
        """
        register_optimizer_step_pre_hook(self.begin_update)

    def renew(self, rows: Sequence[Row]) -> None:
        """Take the same rows at other places."""
        self._rows, self._copies = rows, None

    def obstacle(self) -> str:
        """Return the reason against writing beside the training; empty: none."""
        if not self._has_updated:
            return "no update was seen here: see Session.begin_update"
        volatile = {id(slot): slot.buffer.nbytes for slot, _ in self._rows if slot.is_volatile}
        size_bytes = sum(volatile.values())
        if size_bytes > COPIED_BYTES:
            return (
                f"buffers and registered tensors of {size_bytes / 1e6:.0f} MB are too large to be "
                f"copied at once (at most {COPIED_BYTES / 1e6:.0f})"
            )
        return ""

    def begin(
        self,
        between: Between,
        mapped: MappedFile | None,
        began: float,
        then: Callable[[], None] = lambda: None,
        seconds: Mapping[str, float] = MappingProxyType({}),
    ) -> Writing | None:
        """Begin a snapshot of the present state; call it between two steps, with none under way.

        Args:
            between: State of the step beside the rows.
            mapped: File of the snapshot, if mapped already.
            began: Begin of the training's stall for it, on the monotonic clock.
            then: Called at its end.
            seconds: Measurements to report with it.

        Returns:
            None: no room for it, or for a thread.
        """
        try:
            copies = self._copies = self._copies or VolatileCopies(self._rows)
            copies.take()
        except (RuntimeError, MemoryError):  # of a device too
            self._copies = None
            return None
        writing = Writing(between, copies, mapped, time.monotonic() - began, seconds=seconds)
        self._present = writing
        thread = threading.Thread(
            target=self._run, args=(writing, then), name="async-snapshot", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            self._present = None
        return self._present

    def begin_update(self, *_: Any) -> None:
        """Wait for the copy before the rows' memory changes."""
        self._has_updated = True
        writing = self._present
        if writing is None or writing.is_copied or os.getpid() != self._process:
            return
        writing.waits_since = time.monotonic()
        with self._pause():
            _await(writing.copied, "an update waits for the copy of a snapshot")
            if not writing.is_copied and not writing.is_given_up:
                _await(writing.ended, "an update waits for a snapshot that has failed")
                self._copy_here(writing)

    @property
    def is_writing(self) -> bool:
        """True while a snapshot is being written beside the training."""
        writing = self._present
        return writing is not None and not writing.ended.is_set()

    def settle(self) -> None:
        """Wait until the agent knows the result of the snapshot under way, if any.

        Raises:
            PeerError: The agent is gone.
        """
        writing = self._present
        if writing is None or os.getpid() != self._process:
            return
        _await(writing.ended, "the training waits for the end of a snapshot")
        if not writing.is_told and not writing.is_given_up:
            if not writing.is_copied:
                self._copy_here(writing)
            if not writing.is_told:
                self._tell_here(writing)
        self._present = None

    def give_up(self) -> None:
        """Give the snapshot up: this worker's state may be needed at once. Callable from any
        thread.
        """
        writing = self._present
        if writing is not None:
            writing.is_given_up = True

    # ------------------------------------------------------------------ the thread

    def _run(self, writing: Writing, then: Callable[[], None]) -> None:
        try:
            _give_way()
            use_device_of(self._rings)
            with closing(call_agent(self._directory)) as channel:
                self._copy(writing, channel)
                self._copied(writing)
                if writing.order is not None and not writing.is_given_up:
                    self._tell(writing, channel)
            reached("train")
        except FAILURES as error:
            writing.failure = str(error) or type(error).__name__
        finally:
            writing.copied.set()
            writing.ended.set()
        then()

    def _copy(self, writing: Writing, channel: Channel) -> None:
        asked = BeginSnapshot(self._rank, self._round, "snapshot", writing.step)
        order = writing.order = writing.order or channel.call(asked)
        if order is None:  # the host has no files for it
            writing.is_told = True
            return
        reached("snapshot")
        began = time.monotonic()
        if order.rows and (writing.mapped is None or not writing.mapped.is_current(order.path)):
            writing.mapped = MappedFile(order)
        views = ordered_views(writing.copies.rows, order)
        with self._turn, writing.copies.beside(self._rings):
            for number, (view, begin) in enumerate(zip(views, order.begins, strict=True)):
                assert writing.mapped is not None
                _copy_row(writing, writing.mapped, view, begin, self._rings)
                if not number:
                    reached("copying")
        writing.copy_s = time.monotonic() - began

    def _copied(self, writing: Writing) -> None:
        writing.is_copied = True
        if writing.waits_since is not None:
            writing.stall_s += time.monotonic() - writing.waits_since
        writing.copied.set()

    def _tell(self, writing: Writing, channel: Channel) -> None:
        order, between, began = writing.order, writing.between, time.monotonic()
        assert order is not None
        fingerprints = file_fingerprints(self._rows, order, writing.mapped)
        reached("written")
        if writing.is_given_up:
            return
        seconds = {
            **writing.seconds,
            "snapshot": writing.copy_s,
            "snapshot_proof": time.monotonic() - began,
            "stall": writing.stall_s,
        }
        channel.call(between.written(self._rank, self._round, fingerprints, seconds))
        writing.is_told = True

    # ------------------------------------------------------------------ where the thread failed

    def _copy_here(self, writing: Writing) -> None:
        """Copy the rest after the thread's failure, before the memory changes."""
        try:
            self._copy(writing, self._agent)
            self._copied(writing)
        except PeerError:
            raise
        except FAILURES as error:
            self._tell_failure(writing, error)

    def _tell_here(self, writing: Writing) -> None:
        try:
            if writing.order is not None:
                self._tell(writing, self._agent)
        except PeerError:
            raise
        except FAILURES as error:
            self._tell_failure(writing, error)

    def _tell_failure(self, writing: Writing, error: BaseException) -> None:
        reason = f"{str(error) or type(error).__name__} (before: {writing.failure or 'nothing'})"
        self._agent.call(RankUnwritten(self._rank, self._round, writing.step, reason))
        writing.is_copied = writing.is_told = True


def _await(event: threading.Event, what: str) -> None:
    """Wait for the thread, with a log line every minute.

    Memory being copied may not change, so this wait cannot be given up; the thread's calls have
    deadlines of their own, and a hanging copy ends with its round (``hang_s``).
    """
    began = time.monotonic()
    while not event.wait(SAID_S):
        log.warning("event=slow_snapshot since_s=%.0f: %s", time.monotonic() - began, what)


def _give_way() -> None:
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _copy_row(
    writing: Writing,
    mapped: MappedFile,
    view: torch.Tensor,
    begin: int,
    rings: Mapping[torch.device, StagingRing],
) -> None:
    """Copy a piece to byte ``begin`` of the file, by one thread.

    Raises:
        GivenUpError: It is no longer wanted.
    """
    if view.device.type != "cpu":
        _check(writing)
        copy_from_device(mapped, view, begin, rings)
        return
    # Not by torch: it would start more threads beside the training's.
    bits, place = host_bits(view), host_bits(mapped.place(begin, view))
    for block in blocks(view.shape, max(1, BLOCK_BYTES // view.element_size())):
        _check(writing)
        np.copyto(place[slices(block)], bits[slices(block)])


def _check(writing: Writing) -> None:
    if writing.is_given_up:
        raise GivenUpError("workers of the job have failed meanwhile")


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
        known = {row: value for row, value in enumerate(prints) if value != NOT_COMPARED}
        order = self._agent.call(BeginSnapshot(self._rank, self._round, reason, step, prints))
        if order is None:
            return False
        self._is_leaving = reason == "stop"
        reached("write" if reason == "stop" else reason)
        self._registered.refresh()
        while order is not None:
            # More than once if this rank writes for a dead replica.
            order = self._write(order, step, samples, began, known)
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
        self,
        order: WriteOrder,
        step: int,
        samples: Samples,
        stands_since: float,
        known: Mapping[int, int],
    ) -> WriteOrder | None:
        began = time.monotonic()
        with self._turn:
            place_rows(self._rows, order, self._rings, self._mapped)
            self._mapped = None
            placed = time.monotonic()
            fingerprints = ordered_fingerprints(self._rows, order, known)
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
        user, ledger = JsonText.of(dict(self._registered.values())), self._consumption.keep()
        kept = keep(self._state)

        def write() -> tuple[JsonText, JsonText]:
            scalars, rank_state = kept()
            own = {"user": user.value(), **ledger()}
            return JsonText.of({**scalars, **own}), JsonText.of(rank_state)

        return Between(step, samples, self._state.coordinate, write)

    def map_next(self) -> None:
        """Map the file of the next snapshot beside the training, as soon as the agent has made it.

        Then a snapshot is only a copy into warm memory.
        """
        asked = AwaitSlot(self._rank, self._round)
        map_beside(os.environ[AGENT_DIRECTORY], asked, partial(setattr, self, "_mapped"))
