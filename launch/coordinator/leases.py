"""The lease of a job's coordinator, in a register (``registers``).

The next coordinator claims its number, its *term*, and renews its entry. Others follow the highest
term. Clocks need not agree: a watcher measures the time without a renewal by its own. A hung, full
or torn register costs no coordinator its place: a claim needs ``CLAIM_S`` without a beat in an
answering register, and a failed call to the holder; a holder with a silent register stays while it
hears all of its hosts.

The folder of a job in ``--durable-dir`` is such a register. Its entry also names the run that owns
the folder: while it is renewed, another run is refused.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from scalai.core.errors import PeerError, RefusedError, UsageError
from scalai.launch.config.endpoint import join_endpoint
from scalai.launch.coordinator.api_servers import ASK_S
from scalai.launch.coordinator.registers import LeaseEntry, Register

CLAIM_S = 60.0
"""Time without a renewal before a lease may be claimed, in seconds."""
RENEW_S = 3.0
HELD_S = CLAIM_S / 2
"""Time without a renewal before a holder is in doubt, in seconds."""
FOLLOWED_S = 30.0
"""Longest wait of a holder that has left its place for a successor, in seconds."""
LOOK_S = 0.5
NOT_RENEWED = "it was not renewed in time."

Found = TypeVar("Found")

log = logging.getLogger(__name__)


class LeaseWatch:
    """Watches the renewals of a lease by the watcher's own clock."""

    def __init__(self, register: Register, clock: Callable[[], float] = time.monotonic) -> None:
        self._register, self._clock = register, clock
        self._seen: tuple[LeaseEntry | None, float] | None = None

    def look(self) -> tuple[LeaseEntry | None, float]:
        """The newest entry, and its seconds without a change. Raises ``PeerError`` for an
        unreachable register. Time without an answer does not count: the holder may have waited,
        too."""
        began = self._clock()
        try:
            entry = self._register.newest()
        except PeerError:
            self._seen = None
            raise
        now = self._clock()
        if self._seen is None or self._seen[0] != entry or now - began > ASK_S:
            self._seen = entry, now
        return entry, now - self._seen[1]


def await_holder(
    register: Register,
    call: Callable[[LeaseEntry], Found | None],
    refuse: Callable[[LeaseEntry, float], None],
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> tuple[Found | None, LeaseEntry | None]:
    """Wait until nobody holds a register, or its holder has answered.

    Args:
        call: Calls the holder; None: no answer.
        refuse: Ends the wait for a living, silent holder by raising; gets its entry and the seconds
            since its renewal.
        pause: Waits for so many seconds.

    Returns:
        The holder's answer, and the newest entry; None: none.

    Raises:
        PeerError: The register is unreachable.
    """
    watch, first = LeaseWatch(register, clock), None
    while True:
        entry, unchanged_s = watch.look()
        is_left = entry is None or entry.is_over or entry.is_free or entry.has_died()
        is_left |= unchanged_s > CLAIM_S
        if entry is None or is_left:
            return None, entry
        if (found := call(entry)) is not None:
            return found, entry
        if first is None:
            first = entry
            log.info("event=waiting up to %.0f s, to see whether %s lives", CLAIM_S, named(entry))
        elif entry != first:
            refuse(entry, unchanged_s)
        pause(LOOK_S)


def await_ownership(
    register: Register,
    root: Path,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
    found: Callable[[LeaseEntry], Found | None] = lambda owner: None,
) -> tuple[Found | None, LeaseEntry | None]:
    """Wait for the death of the run with the job's folder in the durable directory ``root``.

    Args:
        register: The directory's register.
        root: The durable directory.
        pause: As in ``await_holder``.
        found: Looks whether this is the run of a coordinator found elsewhere meanwhile.

    Returns:
        That coordinator, and the newest entry in the directory; None: none.

    Raises:
        RefusedError: The run lives.
        PeerError: The directory is unreachable.
    """

    def refuse(entry: LeaseEntry, unchanged_s: float) -> None:
        raise second_run(root, entry, unchanged_s)

    return await_holder(register, found, refuse, clock, pause)


def second_run(root: Path, entry: LeaseEntry, unchanged_s: float) -> RefusedError:
    """Refusal of another run of a job."""
    return RefusedError(
        f"--durable-dir {root} is in use by {named(entry)}, which has shown that it lives "
        f"{unchanged_s:.0f} s ago. Two runs of one job would go on from each other's states. Stop "
        "that one, or give this one another --job. To take part in that one, name its "
        "--coordinator."
    )


def named(entry: LeaseEntry) -> str:
    where = join_endpoint(*entry.address) if entry.host else "an unknown address (its file is torn)"
    return (
        f"run {entry.run or 'unknown'} of this job (coordinator {entry.term}, on machine "
        f"{entry.machine or 'unknown'} at {where})"
    )


class Lease:
    """A coordinator's own lease, renewed by a thread once started. Any thread may call
    ``is_fresh``.

    Args:
        register: Place of the entry.
        entry: Content; its term is claimed here.
        run: Returns the run of the job; "" until agents have brought it.
        waits_over: Term of a lost coordinator of this run. ``keep`` claims once the register
            answers, at once over an entry of at most this term; nobody waits for it. None: claim
            now.

    Raises:
        UsageError: Another coordinator has claimed the term.
        PeerError: The register is unreachable.
    """

    def __init__(
        self,
        register: Register,
        entry: LeaseEntry,
        run: Callable[[], str] = lambda: "",
        *,
        waits_over: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.register, self._entry, self._run = register, entry.of_this_process(), run
        self._entry = replace(self._entry, run=run())
        self._over, self._watch = waits_over, LeaseWatch(register, clock)
        self._rival: LeaseEntry | None = None
        """Holder of the term to claim, perhaps alive; or the one that has superseded this."""
        self.renewed_at, self.is_superseded = clock(), False
        """Time of the last renewal; whether a later coordinator has the lease."""
        self._ended, self._writing = threading.Event(), threading.Lock()
        self.problem = NOT_RENEWED
        """Reason of the last failed renewal."""
        if waits_over is None and not register.claim(self._entry):
            raise UsageError(f"another coordinator has claimed term {entry.term} of the job.")

    def start(self) -> None:
        """Renew it from now on."""
        threading.Thread(target=self._keep_on, name="lease", daemon=True).start()

    def is_fresh(self) -> bool:
        """Whether the last renewal is too recent for another claim."""
        is_renewed = self._over is None and self._clock() - self.renewed_at < HELD_S
        return is_renewed and not self.is_superseded

    @property
    def has_another_run(self) -> bool:
        """Whether another run of the job has superseded this one."""
        theirs, own = self._rival.run if self._rival else "", self._run()
        return self.is_superseded and "" not in (theirs, own) and theirs != own

    def end(self, *, is_over: bool, is_free: bool = False) -> None:
        """Renew no more; ``is_over``: the job has ended, without a successor; ``is_free``: one may
        take the place at once, and is waited for."""
        self._ended.set()
        if (is_over or is_free) and self._over is None and not self.is_superseded:
            entry = replace(self._entry, beat=-1, is_over=is_over, is_free=is_free)
            last = threading.Thread(target=self._leave, args=(entry,), name="lease-end")
            last.daemon = True
            last.start()
            last.join(FOLLOWED_S if is_free else 3 * ASK_S)  # a hung disk delays nobody

    def _leave(self, entry: LeaseEntry) -> None:
        end = time.monotonic() + FOLLOWED_S
        with self._writing:
            try:
                self.register.renew(entry)
                # Meanwhile this machine refuses calls: where it is gone, they would go unanswered.
                while entry.is_free and (newest := self.register.newest()) is not None:
                    if newest.term > entry.term or time.monotonic() > end:
                        break
                    time.sleep(LOOK_S)
            except PeerError as error:
                log.warning("event=lease_left %s", error)

    def _keep_on(self) -> None:
        is_over = self._over is None and self._ended.wait(RENEW_S)
        while not is_over and not self.is_superseded:
            self.keep()
            is_over = self._ended.wait(RENEW_S)

    def keep(self) -> None:
        """Renew it, or claim the term that it waits for."""
        began = self._clock()
        try:
            if self._over is None:
                self._renew(began)
            else:
                self._take(self._over)
        except PeerError as error:
            if self.problem != str(error):  # logged once
                log.warning("event=lease_not_renewed %s", error)
            self.problem = str(error)

    def _take(self, over: int) -> None:
        """Claim a term without a living holder."""
        newest, unchanged_s = self._watch.look()
        run = self._run()
        is_left = newest is None or newest.is_over or newest.is_free or newest.has_died()
        if newest is not None and newest.term <= over:
            # A run may have no name yet; a torn entry has no address either.
            is_left |= not newest.host or "" != newest.run == run
        if newest is not None and not is_left and unchanged_s <= CLAIM_S:
            was_renewed = self._rival not in (None, newest)
            self._rival = newest
            if was_renewed and run:  # else it may be of this run
                self._lose_to(newest)
            return
        term = max(self._entry.term, 0 if newest is None else newest.term + 1)
        self._entry = replace(self._entry, term=term, run=run)
        if self.register.claim(self._entry):
            self._over, self.renewed_at = None, self._clock()

    def _renew(self, began: float) -> None:
        newest = self.register.newest()
        if newest is not None and newest.term > self._entry.term:
            self._lose_to(newest)
            return
        self._entry = replace(self._entry, beat=self._entry.beat + 1, run=self._run())
        with self._writing:
            if not self._ended.is_set():
                if newest is None or newest.term < self._entry.term:
                    self.register.claim(self._entry)  # the entry or its folder was removed
                else:
                    self.register.renew(self._entry)
        self.renewed_at, self.problem = began, NOT_RENEWED

    def _lose_to(self, newest: LeaseEntry) -> None:
        self.problem = f"coordinator {newest.term} has it: {named(newest)}."
        self._rival, self.is_superseded = newest, True
