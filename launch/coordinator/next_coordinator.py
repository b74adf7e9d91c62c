"""An agent without its coordinator finds or starts the next one.

A machine has at most one coordinator of a job: an agent starts one under the lock of the job's
folder, after silence at the address on its card. A card without an answer proves the coordinator
dead; an agent of its machine starts the next one, whatever a register says. An agent of another
host starts one after ``CLAIM_S`` without a renewal in the register, or once its holder has left the
place, and without an answer of its holder (``leases``).
"""

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scalai.core.errors import AbsentError, PeerError, ScalaiError, UnprovenError
from scalai.launch.config.endpoint import join_endpoint, read_card, read_holder, split_endpoint
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.discovery import (
    COORDINATOR,
    Place,
    is_here,
    job_directory,
    one_at_a_time,
    start_coordinator,
)
from scalai.launch.coordinator.leases import CLAIM_S, RENEW_S, LeaseWatch
from scalai.launch.coordinator.registers import LeaseEntry, Register, registers_of
from scalai.runtime.calls import Channel

SEARCH_S = 60.0
"""Time for the search for a successor without a register, in seconds."""
LOOK_S = 0.25
SEEN_S = 60.0
"""Time without the coordinator's entry before it is logged, in seconds."""
LEAVING_S = 12.0
"""Delay of a leaving host's claim, in seconds: a staying host comes first."""
JITTER_S = 3.0
"""Largest random delay of a claim, in seconds: spreads the claims of many hosts."""

log = logging.getLogger(__name__)


class OverError(PeerError):
    """There will be no successor."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """Newest look at a register: its entry, the seconds without a change, and a read problem."""

    entry: LeaseEntry | None = None
    unchanged_s: float = 0.0
    at: float = 0.0
    problem: str = ""


class _Lookout:
    """Looks at a register in a thread of its own: a hung disk delays nobody. It looks during a
    search for a coordinator, and until the register is known to be the coordinator's.

    Args:
        is_told: A person named the register, so it is the coordinator's. A durable directory counts
            only after a renewal seen by this host: it may be a disk of its own.
    """

    def __init__(self, register: Register, *, is_told: bool) -> None:
        self._register, self._watch = register, LeaseWatch(register)
        self._is_silent: Callable[[], bool] = lambda: False
        self._searches, self._due = False, threading.Event()
        self._last, self.is_known = _Seen(), is_told
        self._is_running = self._is_over = False

    def begin(self, is_silent: Callable[[], bool] | None = None) -> None:
        """Look from now on, also while the coordinator is silent (``is_silent``)."""
        self._is_silent = is_silent or self._is_silent
        if not self._is_running:
            self._is_running = True
            threading.Thread(target=self._look, name="lease-watch", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._is_over = True
        self._due.set()

    def search(self, *, is_on: bool) -> None:
        """Look more often, and at once; or as before."""
        self._searches = is_on
        self._due.set()

    def seen(self) -> _Seen:
        """The newest look; an empty one with the problem if the register hangs."""
        last = self._last
        if time.monotonic() - last.at <= 3 * RENEW_S:
            return last
        return _Seen(problem=last.problem or f"{self._register} does not answer.")

    def _look(self) -> None:
        began, has_said, before = time.monotonic(), False, None
        while not self._is_over:
            if self._searches or not self.is_known or self._is_silent():
                try:
                    entry, unchanged_s = self._watch.look()
                    self._last = _Seen(entry, unchanged_s, time.monotonic())
                except (ScalaiError, OSError) as error:  # this thread outlives any register
                    self._last = _Seen(at=time.monotonic(), problem=str(error))
                else:
                    self.is_known |= _is_renewed(before, entry)
                    before = entry
            if not self.is_known and not has_said and time.monotonic() - began > SEEN_S:
                has_said = True
                log.warning(
                    "event=lease register='%s': the coordinator's entry is not seen there, so this "
                    "host cannot take its place. Is --durable-dir a disk of this host's own?",
                    self._register,
                )
            self._due.wait(LOOK_S * 4 if self._searches else RENEW_S)
            self._due.clear()


def _is_renewed(before: LeaseEntry | None, entry: LeaseEntry | None) -> bool:
    if before is None or entry is None:
        return False
    return before != entry and (before.term, before.address) == (entry.term, entry.address)


class Succession:
    """One agent's way to the next coordinator.

    Args:
        interface: Address for a coordinator here after one of another host.
        is_leaving: Whether this host will be taken away, with a coordinator on it.
    """

    def __init__(
        self, spec: JobSpec, interface: str, is_leaving: Callable[[], bool] = lambda: False
    ) -> None:
        self._spec, self._interface, self._is_leaving = spec, interface, is_leaving
        register, is_told = registers_of(spec)[0], spec.options.coordinator_lease is not None
        self._lookout = None if register is None else _Lookout(register, is_told=is_told)

    @property
    def has_lease(self) -> bool:
        """Whether this host may have the next coordinator after one of another machine."""
        return self._lookout is not None and self._lookout.is_known

    def watch_while(self, is_silent: Callable[[], bool]) -> None:
        """Watch the lease while the coordinator is silent."""
        if self._lookout is not None:
            self._lookout.begin(is_silent)

    def close(self) -> None:
        """Watch no more."""
        if self._lookout is not None:
            self._lookout.close()

    def find(self, place: Place, term: int, is_over: threading.Event) -> Place:
        """Find the job's next coordinator, once it answers.

        Args:
            place: The lost coordinator.
            is_over: Set when nobody needs a coordinator any more.

        Raises:
            PeerError: There is none in time, or there will be none.
        """
        search_s = self._spec.config.resize.coordinator_timeout_s if self.has_lease else SEARCH_S
        deadline, problem = time.monotonic() + search_s, "it does not answer"
        if self._lookout is not None:
            self._lookout.begin()
            self._lookout.search(is_on=True)
        try:
            while time.monotonic() < deadline:
                try:
                    return self._look(place, term)
                except OverError:
                    raise
                except (ScalaiError, OSError) as error:
                    problem = str(error)
                if is_over.wait(LOOK_S):
                    break
        finally:
            if self._lookout is not None:
                self._lookout.search(is_on=False)
        raise PeerError(f"nobody takes its place within {search_s:.0f} s: {problem}")

    def _look(self, place: Place, term: int) -> Place:
        """Find the coordinator, or start the next one if this host may. Raises ``PeerError`` while
        there is none."""
        seen = _Seen() if self._lookout is None else self._lookout.seen()
        entry = seen.entry
        if entry is not None and entry.is_over and self.has_lease:
            raise OverError("its lease says that the job is over.")
        is_later = entry is not None and entry.term >= term and entry.address != place.address
        if entry is not None and is_later and _answers(entry.address, place.token):
            return Place(entry.address, place.token, is_here=is_here(entry.host))
        if place.is_here and (entry is None or entry.term <= term):
            found = self._here(place, term)
            if found is not None:
                return found
        if entry is not None and self.has_lease and (entry.is_free or seen.unchanged_s > CLAIM_S):
            return self._claim(entry, place, term)
        if place.is_here:
            raise PeerError(seen.problem or "its lease says of nobody who answers.")
        return _there(place)

    def _claim(self, entry: LeaseEntry, place: Place, term: int) -> Place:
        """Start the next coordinator here; another host may claim the term first."""
        assert self._lookout is not None
        for host, port in {entry.address, place.address}:  # perhaps only its register is silent
            if host and _answers((host, port), place.token):
                return Place((host, port), place.token, is_here=is_here(host))
        wait_s = random.uniform(0.0, JITTER_S) + (LEAVING_S if self._is_leaving() else 0.0)
        claims_at = time.monotonic() + wait_s
        while (left_s := claims_at - time.monotonic()) > 0:
            time.sleep(min(left_s, LOOK_S))
            if self._lookout.seen().entry != entry:
                raise PeerError("another host claims its place.")
        folder = job_directory(self._spec)
        with one_at_a_time(folder):
            log.warning("event=succession: nobody holds the lease of the coordinator any more")
            endpoint = self._spec.options.coordinator
            if endpoint is None or not is_here(split_endpoint(endpoint)[0]):
                endpoint = join_endpoint(self._interface, 0)
            return start_coordinator(
                self._spec, folder, endpoint, place.token.decode(), max(entry.term, term) + 1,
                is_successor=True, succeeds="elsewhere",
            )  # fmt: skip

    def _here(self, place: Place, term: int) -> Place | None:
        """Find the coordinator on this machine's card, or start another one; None: this machine's
        coordinator has lost its place by a register."""
        folder = job_directory(self._spec)
        with one_at_a_time(folder):
            holder = read_holder(folder)
            if holder is None and self._lookout is not None:
                return None
            if holder is None:
                raise OverError("it has ended, and has left no card: the job is over.")
            if holder.term <= term:
                _end_silent(folder, holder.pid, place)
            try:
                card = read_card(folder)
            except PeerError as error:
                if not isinstance(error, UnprovenError) and _runs(holder.pid):
                    raise
                card = None  # a stranger has its port
            if card is not None:
                return Place(*card, is_here=is_here(card[0][0]))
            log.warning("event=succession term=%d: the coordinator has died", holder.term + 1)
            endpoint, token = self._spec.options.coordinator, place.token.decode()
            if endpoint is not None and _is_taken(split_endpoint(endpoint), place.token):
                log.warning(
                    "event=address_taken %s: a process that does not have this job's token listens "
                    "there, so the next coordinator takes another port. Agents of this machine "
                    "find it; free the address for those of others", endpoint,
                )  # fmt: skip
                endpoint = join_endpoint(split_endpoint(endpoint)[0], 0)
            return start_coordinator(
                self._spec, folder, endpoint, token, max(holder.term, term) + 1,
                is_successor=True, succeeds="here",
            )  # fmt: skip


def _there(place: Place) -> Place:
    """The same place, once a coordinator answers: an agent of that host, or a person, starts it."""
    Channel(place.address, place.token).close()
    return place


def _answers(address: tuple[str, int], token: bytes) -> bool:
    try:
        Channel(address, token).close()
    except PeerError:
        return False
    return True


def _is_taken(address: tuple[str, int], token: bytes) -> bool:
    """Whether a stranger listens there, whatever its answer."""
    try:
        Channel(address, token).close()
    except AbsentError:
        return False
    except PeerError:
        return True
    return False


def _runs(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def _end_silent(folder: Path, pid: int, place: Place) -> None:
    """End a coordinator after too long a silence: a stopped one must not continue beside its
    successor. One that answers now is left alone."""
    with suppress(PeerError):
        Channel(place.address, place.token).close()
        return
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return
    if COORDINATOR[-1].encode() in words and str(folder).encode() in words:
        log.warning("event=silent_coordinator process %d answers nobody: it is ended", pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
