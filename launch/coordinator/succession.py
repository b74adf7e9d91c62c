"""An agent whose coordinator is gone looks for the one that takes its place, and starts it where
that is this machine's affair.

A machine has one coordinator of a job at most: whoever starts one holds the lock of the job's
folder, and finds nobody who answers at the address on the card there. A card without anybody behind
it is that of a coordinator that has died; where there is none the job has ended. On another host
one may be started only where a lease says that the one before is gone (``leases``).
"""

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from scalai.core.errors import (
    AbsentError,
    PeerError,
    ScalaiError,
    UnprovenError,
    UsageError,
)
from scalai.core.witness import Known
from scalai.launch.config.endpoint import join_endpoint, read_card, read_holder, split_endpoint
from scalai.launch.config.job import JobSpec
from scalai.launch.coordinator.discovery import (
    COORDINATOR,
    Place,
    is_here,
    job_directory,
    one_at_a_time,
    start_coordinator,
)
from scalai.launch.coordinator.elected import NOBODY
from scalai.launch.coordinator.leases import LEASE_S, RENEW_S, Watch, open_register
from scalai.launch.coordinator.vote_file import kept_electorate
from scalai.launch.coordinator.votes import VoteRegister
from scalai.runtime.calls import Channel

SEARCH_S = 60.0
"""For how long a successor is looked for, where no lease says who is the coordinator."""
LOOK_S = 0.25
TURN_S, LAST_TURN_S = 1.5, 6.0
"""How much later the next witness claims a term than the one before it, and the last one."""
LEAVING_TURN_S = LAST_TURN_S + 6.0
"""How much later one claims it whose host leaves: by then those that stay have, and listen."""
WITNESS_LOOK_S = 1.0
FOLLOW_S = 1.5, 3.0
"""How soon an agent that is no witness asks one of them again."""
SAY_S = 60.0
"""How often it is said that a majority is waited for."""
JITTER_S = 1.0
"""Agents of many hosts do not begin to take over at one moment."""

log = logging.getLogger(__name__)


class OverError(PeerError):
    """There will be no successor."""


class Succession:
    """How one agent finds the coordinator that takes the place of one that is gone.

    Args:
        spec: The job.
        interface: Where a coordinator of this host listens if it takes the place of another host's.
        memory: By what this agent remembers as a witness of a vote.
        is_leaving: Whether this host is to be taken away: a coordinator here would go with it.
    """

    def __init__(
        self,
        spec: JobSpec,
        interface: str,
        memory: str = "",
        is_leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        self._spec, self._interface, self._memory = spec, interface, memory
        self._is_leaving = is_leaving
        register = open_register(spec.options.coordinator_lease, spec.job)
        self._watch = None if register is None else Watch(register)
        self._vote: VoteRegister | None = None
        self._mutex = threading.Lock()
        """Held where one of the two is not of the other for a moment."""
        self._said_at = 0.0

    @property
    def has_lease(self) -> bool:
        """Whether any host may have the next coordinator."""
        return self._watch is not None

    def learn(self, known: Known, token: bytes) -> None:
        """Look for a successor by the majority of an electorate; of none: no longer. Any thread
        may tell."""
        if not self._spec.may_vote:
            return
        vote = VoteRegister(known, token, is_kept=False) if known.electorate.everyone else None
        with self._mutex:
            self._watch, self._vote = None if vote is None else Watch(vote), vote

    def find(self, place: Place, term: int, is_over: threading.Event) -> Place:
        """Return where the job's coordinator is, once there is one again.

        Args:
            place: Where the one was that is gone.
            term: How many coordinators the job had, with that one.
            is_over: Set when nobody needs one any more.

        Raises:
            PeerError: There is none within the time, or there will be none.
        """
        if place.is_here:  # its coordinator may have had no time to tell
            with suppress(ScalaiError, OSError):
                kept = kept_electorate(job_directory(self._spec))
                if kept is not None and (self._watch is None or not kept.electorate.everyone):
                    self.learn(kept, place.token)
        search_s = self._search_s()
        self._said_at = time.monotonic() - SAY_S / 2  # an election takes a while
        deadline, problem = time.monotonic() + search_s, "it does not answer"
        found: Place | None
        while time.monotonic() < deadline:
            try:
                watch, vote = self._asked()
                if watch is not None and vote is not None and self._follows(vote):
                    found = _follow(watch, vote, place, term)
                elif watch is not None:
                    found = self._by_lease(watch, place, term, vote)
                else:
                    found = self._here(place, term) if place.is_here else _there(place)
                if found is not None:
                    return found
            except OverError:
                raise
            except (ScalaiError, OSError) as error:
                problem = str(error)
                if not isinstance(error, UsageError):  # else another one claims it
                    self._say_waiting(problem, deadline)
            if is_over.wait(self._pace_s()):
                break
        raise PeerError(f"nobody takes its place within {search_s:.0f} s: {problem}")

    def _asked(self) -> tuple[Watch | None, VoteRegister | None]:
        """Return whom to ask, and whether that is a vote."""
        with self._mutex:
            return self._watch, self._vote

    def _search_s(self) -> float:
        return self._spec.config.resize.coordinator_timeout_s if self.has_lease else SEARCH_S

    def _pace_s(self) -> float:
        """Return how soon to look again: thousands that look ask few witnesses."""
        if self._vote is None:
            return LOOK_S
        return WITNESS_LOOK_S if self._is_witness(self._vote) else random.uniform(*FOLLOW_S)

    def _follows(self, vote: VoteRegister) -> bool:
        """Whether others than this agent start the next coordinator."""
        return not vote.known.is_off and not self._is_witness(vote)

    def _turn_s(self, vote: VoteRegister | None) -> float:
        """Return for how long this agent leaves it to others to claim a term."""
        if self._is_leaving():
            return LEAVING_TURN_S
        names = [] if vote is None else [w.memory for w in vote.known.electorate.everyone]
        place = names.index(self._memory) if self._memory in names else 0
        return min(place * TURN_S, LAST_TURN_S)

    def _is_witness(self, vote: VoteRegister) -> bool:
        """Whether this agent may start the next coordinator: where one can be elected at all, there
        is a witness that can start it."""
        return any(w.memory == self._memory for w in vote.known.electorate.everyone)

    def _say_waiting(self, problem: str, deadline: float) -> None:
        now = time.monotonic()
        if self._vote is not None and now - self._said_at > SAY_S:
            self._said_at = now
            log.warning(
                "event=waiting_for_majority %s Nobody takes the coordinator's place before a "
                "majority can be asked; the state stays in the store. Bring the hosts back, or end "
                "the agents and start the job on those that are left. After %.0f s more "
                "([resize] coordinator_timeout_s) this agent ends.", problem, deadline - now,
            )  # fmt: skip

    def watch_while(self, is_silent: Callable[[], bool]) -> None:
        """Look, beside everything else, whether the lease changes while the coordinator is
        silent."""
        if self._watch is None and not self._spec.may_vote:
            return

        def look() -> None:
            while True:
                time.sleep(RENEW_S)
                watch, vote = self._asked()
                may_claim = vote is None or self._is_witness(vote)
                if watch is not None and may_claim and is_silent():
                    with suppress(PeerError):
                        watch.look()

        threading.Thread(target=look, name="lease-watch", daemon=True).start()

    def _by_lease(
        self, watch: Watch, place: Place, term: int, vote: VoteRegister | None
    ) -> Place | None:
        """Return who holds the lease, if that is another one and answers; claim it where nobody
        does any more, or its holder was a process of this machine that is gone."""
        entry, unchanged_s = watch.look()
        if entry is not None and entry.is_over:
            raise OverError("its lease says that the job is over.")
        if entry is not None and entry.term > term and _answers(entry.address, place.token):
            return Place(entry.address, place.token, is_here=is_here(entry.host))
        if vote is not None and entry is not None:
            holder = Place(entry.address, place.token, is_here=is_here(entry.host))
        else:
            is_holder = entry is None or entry.term == term
            holder = replace(place, is_here=is_holder and place.is_here)
        has_died = holder.is_here and _is_absent(holder)
        if vote is not None and vote.known.is_off and not has_died:
            return None if holder.is_here else _there(place)
        if unchanged_s <= LEASE_S and not has_died:
            return None
        turn_s = 0.0 if has_died else self._turn_s(vote)
        if vote is None and entry is not None and entry.host and not has_died:
            if _answers(entry.address, place.token):  # its register alone answers nobody
                return Place(entry.address, place.token, is_here=is_here(entry.host))
        claims_at = time.monotonic() + random.uniform(0.0, JITTER_S) + turn_s
        while (left_s := claims_at - time.monotonic()) > 0:
            time.sleep(min(left_s, TURN_S))
            if watch.look()[0] != entry:
                return None
        known = NOBODY if vote is None else replace(vote.known, term=max(vote.known.term, term))
        folder = job_directory(self._spec)
        with one_at_a_time(folder):
            log.warning("event=succession: nobody holds the lease of the coordinator any more")
            endpoint = self._spec.options.coordinator
            if endpoint is None or not is_here(split_endpoint(endpoint)[0]):
                endpoint = join_endpoint(self._interface, 0)
            token = place.token.decode()
            return start_coordinator(
                self._spec, folder, endpoint, token, succeeds=True, known=known
            )

    def _here(self, place: Place, term: int) -> Place:
        """Return who answers by this machine's card, or start another coordinator."""
        folder = job_directory(self._spec)
        with one_at_a_time(folder):
            holder = read_holder(folder)
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
            return start_coordinator(self._spec, folder, endpoint, token, succeeds=True)


def _follow(watch: Watch, vote: VoteRegister, place: Place, term: int) -> Place:
    """Return who was elected. Raises ``PeerError`` as long as that is no other one that answers."""
    with watch.mutex:
        entry = vote.glimpse()
    if entry is not None and entry.is_over:
        raise OverError("its witnesses say that the job is over.")
    if entry is not None and entry.term > term and _answers(entry.address, place.token):
        return Place(entry.address, place.token, is_here=is_here(entry.host))
    raise PeerError(f"no witness that is there knows a later coordinator than number {term}.")


def _there(place: Place) -> Place:
    """Return the same place, once somebody answers there: an agent of that host starts another one,
    or a person does."""
    Channel(place.address, place.token).close()
    return place


def _answers(address: tuple[str, int], token: bytes) -> bool:
    try:
        Channel(address, token).close()
    except PeerError:
        return False
    return True


def _is_taken(address: tuple[str, int], token: bytes) -> bool:
    """Whether a stranger listens there, whatever he says or does not say."""
    try:
        Channel(address, token).close()
    except AbsentError:
        return False
    except PeerError:
        return True
    return False


def _runs(pid: int) -> bool:
    """Whether there is such a process, which has not ended."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def _is_absent(place: Place) -> bool:
    """Whether nobody listens where the coordinator was."""
    try:
        Channel(place.address, place.token).close()
    except AbsentError:
        return True
    except PeerError:
        pass
    return False


def _end_silent(folder: Path, pid: int, place: Place) -> None:
    """End a coordinator that was silent for too long, and may be stopped: it must not go on beside
    another one. Who answers now is left alone."""
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
