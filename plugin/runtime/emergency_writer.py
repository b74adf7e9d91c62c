"""A worker's part after others' failures: it makes no further update, and a thread writes the state
between two updates. Meanwhile the main thread may hang in a collective with a dead partner. Nothing
here needs a collective.

Values changed by updates stay in the slots' memory until the next update. Values changed by the
next forward and backward pass (buffers, RNG states, the position in the data, the script's
registered values) are copied at the end of each update.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scalai.core.errors import PeerError, ScalaiError, StoreError
from scalai.core.job.deadlines import FREEZE_S
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import (
    AwaitFreeze,
    RankFrozen,
    RankWritten,
    Samples,
    WriteOrder,
)
from scalai.core.tensors.region import Piece
from scalai.runtime.agent_folder import call_agent
from scalai.runtime.calls import Channel
from scalai.runtime.failpoints import reached
from scalai.runtime.live import Slot
from scalai.runtime.live_files import MappedFile, file_fingerprints, place_rows
from scalai.runtime.staging import StagingRing, use_device_of

Row = tuple[Slot, Piece]

COPIED_BYTES = 64 << 20
"""Most bytes copied after each update: with more there is no emergency snapshot."""

COPIED_S, COPIED_SHARE = 0.01, 0.02
"""Longest copy in seconds, or as a share of a step, on an average of ``WINDOW`` steps."""
WINDOW, WINDOWS = 32, 3
"""After this many too slow windows in a row there are no emergency snapshots any more."""

QUERY_S = 0.01
"""Interval of queries to devices about the end of an update."""

log = logging.getLogger(__name__)

POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Between:
    """The state of a step outside of the slots' memory. ``write`` writes down scalars and
    ``rank_state``, which takes longer than to keep them at each step."""

    step: int
    consumed_samples: Samples
    coordinate: str
    write: Callable[[], tuple[JsonText, JsonText]]

    def written(
        self, rank: int, round: int, fingerprints: tuple[int, ...], seconds: Mapping[str, float]
    ) -> RankWritten:
        """Return the report of a rank with its rows of this step written."""
        scalars, rank_state = self.write()
        return RankWritten(
            rank=rank,
            round=round,
            step=self.step,
            fingerprints=fingerprints,
            coordinate=self.coordinate,
            scalars=scalars,
            rank_state=rank_state,
            consumed_samples=self.consumed_samples,
            seconds=seconds,
        )


class Gate:
    """Guards the memory of this process as the state of a step.

    An update begins at the step of any optimizer of torch, and ends at the training's report of an
    ended step.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_updating = self._is_frozen = self._has_updated = False
        self._between: Between | None = None

    def begin(self, *_: Any) -> None:
        """Begin an update. Once frozen this does not return; the agent ends the process."""
        with self._changed:
            while self._is_frozen:
                self._changed.wait()
            self._is_updating = self._has_updated = True

    def ends(self) -> None:
        """Begin copying at the end of a step, also one without an update (as after a NaN gradient),
        until ``ended``.

        Once frozen this does not return, except for the step whose update is waited for.
        """
        with self._changed:
            while self._is_frozen and not self._is_updating:
                self._changed.wait()
            self._is_updating = True

    def ended(self, between: Between | None) -> None:
        """End the update, with the rest of the present state; None: unknown."""
        with self._changed:
            self._is_updating, self._between = False, between
            self._changed.notify_all()

    def freeze(self) -> Between | str:
        """Let no further update begin, and wait for a running one.

        Returns:
            The rest of the state, or the reason why the memory is the state of no step.
        """
        with self._changed:
            self._is_frozen = True
            self._changed.wait_for(lambda: not self._is_updating, FREEZE_S)
            if self._is_updating:
                return "it is in the middle of an update"
            if not self._has_updated:
                return "no update was seen here: see Session.begin_update"
            return self._between or "what belongs to its state could not be copied"


class VolatileCopies:
    """Copies of the slots changed between two updates, made at the end of each."""

    def __init__(self, rows: Sequence[Row]) -> None:
        volatile = {id(slot): slot for slot, _ in rows if slot.is_volatile}
        self.size_bytes = sum(slot.buffer.nbytes for slot in volatile.values())
        self._slots = {
            number: (slot, replace(slot, buffer=torch.empty_like(slot.buffer)))
            for number, slot in volatile.items()
        }
        self.rows = [
            (self._slots[id(slot)][1] if id(slot) in self._slots else slot, piece)
            for slot, piece in rows
        ]
        """The rows, with copies in place of volatile slots."""
        self._devices = {
            slot.buffer.device for slot, _ in rows if slot.buffer.device.type == "cuda"
        }
        self.events: dict[torch.device, torch.cuda.Event] = {}

    @torch.no_grad()
    def take(self) -> None:
        """Copy the present values. On a device the copies are queued behind the update."""
        for slot, copy in self._slots.values():
            copy.buffer.copy_(slot.buffer, non_blocking=True)
        for device in self._devices:
            event = self.events.get(device)
            if event is None:
                event = self.events[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))

    def are_taken(self, within_s: float) -> bool:
        """Return True once devices have done the copies of ``take`` and the update before; False
        after ``within_s``.

        The training's thread may be ahead of its device, and the device may wait for ever for a
        dead partner.

        Raises:
            RuntimeError: A device has failed.
        """
        end = time.monotonic() + within_s
        while not all(map(_has_ended, self.events.values())):
            if time.monotonic() > end:
                return False
            time.sleep(QUERY_S)
        return True

    def beside(self, rings: Mapping[torch.device, StagingRing]) -> ExitStack:
        """Return a context for work on the rings' streams, behind the last update and beside other
        queued work, which may never end.
        """
        stack = ExitStack()
        for device in self._devices:
            rings[device].stream.wait_event(self.events[device])
            stack.enter_context(torch.cuda.stream(rings[device].stream))
        return stack


def _has_ended(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


class CopyCost:
    """Duration of the copies after each step, compared with the steps. Reads no clock."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._copied_s, self._steps, self._windows = 0.0, 0, 0

    def is_too_high(self, copied_s: float, now: float) -> str:
        """Add a copy that has ended now. Returns the excess as text; empty: none."""
        if self._since is None:
            self._since = now
            return ""
        self._copied_s, self._steps = self._copied_s + copied_s, self._steps + 1
        if self._steps < WINDOW:
            return ""
        mean_s, share = self._copied_s / WINDOW, self._copied_s / max(now - self._since, 1e-9)
        is_high = mean_s > COPIED_S and share > COPIED_SHARE
        self._windows = self._windows + 1 if is_high else 0
        self._since, self._copied_s, self._steps = now, 0.0, 0
        if self._windows < WINDOWS:
            return ""
        return (
            f"to copy what belongs to a step takes {mean_s * 1e3:.0f} ms, {share:.0%} of its time"
        )


class EmergencyWriter:
    """A worker's part in emergency snapshots.

    Args:
        directory: Directory of this host's agent.
        rows: Held rows of this rank.
        turn: Lock for writing a snapshot: one thread at a time uses the rings.
        on_freeze: Gives up a snapshot being written beside the training, if any.
    """

    def __init__(
        self,
        rank: int,
        round: int,
        directory: str,
        rows: Sequence[Row],
        rings: Mapping[torch.device, StagingRing],
        turn: "threading.Lock | None" = None,
        on_freeze: Callable[[], None] = lambda: None,
    ) -> None:
        self._turn, self._on_freeze = turn or threading.Lock(), on_freeze
        self._rank, self._round, self._directory = rank, round, directory
        self._rings, self._gate, self._cost = rings, Gate(), CopyCost()
        self.copies = VolatileCopies(rows)
        self.is_on = self.copies.size_bytes <= COPIED_BYTES
        """True if this worker writes after others' failures."""
        if not self.is_on:
            self._give_up(
                f"buffers and registered tensors of {self.copies.size_bytes / 1e6:.0f} MB are too "
                f"large to be copied after each step (at most {COPIED_BYTES / 1e6:.0f})"
            )

    def _give_up(self, reason: str) -> None:
        self.is_on = False
        self._gate.ended(None)
        if self._rank == 0:
            log.warning(
                "event=no_emergency %s: after a failure the job goes on from its newest generation",
                reason,
            )

    def begin(self) -> None:
        """Watch updates from now on, and wait for a failure of others in a thread."""
        if not self.is_on:
            return
        register_optimizer_step_pre_hook(self._gate.begin)
        try:
            threading.Thread(target=self._watch, name="emergency", daemon=True).start()
        except RuntimeError as error:  # no room for a thread
            self._give_up(str(error))

    def begin_update(self) -> None:
        """Announce a change of the rows' memory. Once frozen this does not return."""
        self._gate.begin()

    def renew(self, rows: Sequence[Row]) -> None:
        """Take the same rows at other places."""
        self._gate.ended(None)
        self.copies = VolatileCopies(rows)

    def step_ended(self, refresh: Callable[[], None], capture: Callable[[], Between]) -> None:
        """Copy the state at the end of an update.

        ``refresh`` updates the script's registered rows; ``capture`` returns the state beside the
        rows.
        """
        self._gate.ends()
        began, between = time.monotonic(), None
        try:
            refresh()
            self.copies.take()
            between = capture()
        except ScalaiError as error:  # the next snapshot reports it, if it persists
            log.debug("event=not_captured %s", error)
        except Exception as error:  # the script's own: no reason to end its training
            self._give_up(f"what the script has registered cannot be copied: {error!r}")
            return
        finally:
            self._gate.ended(between)
        now = time.monotonic()
        if reason := self._cost.is_too_high(now - began, now):
            self._give_up(reason)

    def _watch(self) -> None:
        with suppress(PeerError, StoreError):  # the round has ended
            use_device_of(self._rings)
            with closing(call_agent(self._directory)) as channel:
                channel.call(AwaitFreeze(self._rank, self._round))
                reached("freeze")
                self._on_freeze()
                self._write_after_failure(channel, self.freeze())

    def _write_after_failure(self, channel: Channel, found: "Between | str") -> None:
        if isinstance(found, str):
            channel.call(RankFrozen(self._rank, self._round, None, found))
            return
        order = channel.call(RankFrozen(self._rank, self._round, found.step, ""))
        while order is not None:
            try:
                with self._turn:  # the main thread may be in the middle of a snapshot
                    written = self._write(order, found)
            except (ScalaiError, OSError, RuntimeError) as error:
                channel.call(RankFrozen(self._rank, self._round, None, f"cannot write: {error}"))
                return
            order = channel.call(written)

    def freeze(self) -> Between | str:
        """Let no further update begin; return the state between two, of host and devices, or why
        there is none.
        """
        end = time.monotonic() + FREEZE_S
        found = self._gate.freeze()
        try:
            if isinstance(found, str) or self.copies.are_taken(end - time.monotonic()):
                return found
        except RuntimeError as error:
            return f"its device fails: {error}"
        return "its device is in the middle of an update"

    def _write(self, order: WriteOrder, between: Between) -> RankWritten:
        began = time.monotonic()
        reached("emergency")
        mapped = MappedFile(order) if order.rows else None
        with self.copies.beside(self._rings):
            place_rows(self.copies.rows, order, self._rings, mapped)
        placed = time.monotonic()
        # From the file: arithmetic on a hanging device may wait for room, or for its turn.
        fingerprints = file_fingerprints(self.copies.rows, order, mapped)
        now = time.monotonic()
        seconds = {"snapshot": now - began, "snapshot_proof": now - placed}
        return between.written(self._rank, self._round, fingerprints, seconds)


def collective_failure() -> str:
    """Return torch's report of a failed NCCL collective; empty: none."""
    for backend in _backends():
        with suppress(RuntimeError):  # it is being taken down
            error = backend.get_error()
            if error.name != "SUCCESS":
                return f"a collective of NCCL's has failed ({error.name})"
    return ""


def _backends() -> Iterator[Any]:
    """Yield the device backend of each process group that can report errors."""
    if not dist.is_initialized():
        return
    # torch has no public list of its groups.
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # it has none for devices
            backend = group._get_backend(torch.device("cuda"))
            if hasattr(backend, "get_error"):
                yield backend


def watch_collectives(is_wanted: Callable[[], bool], tell: Callable[[str], None]) -> None:
    """Look for a failed collective from now on, in a thread, and report it once.

    Args:
        is_wanted: Returns False once this process leaves its round: failures no longer matter.
        tell: Called in the thread with the failure.
    """

    def work() -> None:
        while is_wanted():
            if reason := collective_failure():
                log.error("event=collective_failed %s", reason)
                tell(reason)
                return
            time.sleep(POLL_S)

    with suppress(RuntimeError):  # no room for a thread: the hang is seen later
        threading.Thread(target=work, name="collectives", daemon=True).start()
