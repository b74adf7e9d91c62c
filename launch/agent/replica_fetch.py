"""This host's replicas for others, fetched beside the training, as fast as its steps allow and in
time, so the job's state survives the loss of hosts."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from scalai.core.errors import (
    MismatchError,
    PeerError,
    RoomError,
    ScalaiError,
    StoreError,
    is_memory_short,
)
from scalai.core.fields import mapped
from scalai.core.jsonable import Json
from scalai.core.messages.commands import Replicate
from scalai.core.messages.reports import Grown, Replicated, Report, Suspected
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.holders import Holder
from scalai.core.tensors.replica_pace import (
    Bucket,
    Limit,
    ReplicaLook,
    ReplicaPace,
    Traffic,
    is_noticeable,
    limit,
    looked,
    take,
)
from scalai.core.tensors.replicas import to_keep
from scalai.launch.agent.data_plane import DataPeer
from scalai.launch.agent.fetch import Brought, bring, plan_from, suspected
from scalai.launch.agent.sources import KnownParts, ask_parts, first_part, own_part
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest
from scalai.store.parts import Extras, summary_bytes

log = logging.getLogger(__name__)

NAP_S = 0.1
"""Seconds between checks during a wait."""


class ReplicaRate:
    """Learns from the steps of this host's workers, and delays fetching. Any thread may call it.

    Args:
        slowdown: Largest slowdown of a step (0.01 = 1 %).
    """

    def __init__(
        self,
        host: str,
        slowdown: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._host, self._every = host, 0
        self._clock, self._sleep = clock, sleep
        self._mutex = threading.Lock()
        self.pace = ReplicaPace(slowdown)
        self._said = self.pace.rate
        self._bucket = Bucket()
        self._traffic = Traffic.NONE
        self._step: int | None = None
        """The workers' step; None before the first."""
        self._of_step = 0
        self._left_bytes = self._came_bytes = 0
        self._is_hurried = self._was_hurried = False
        """Whether the present replicas, and the previous ones, are hurried; a change is logged."""

    def space(self, every: int) -> None:
        """Set the steps between generations; 0: unknown."""
        with self._mutex:
            self._every = every

    def look(self, seen: tuple[int, int] | None, *, is_giving: bool = False) -> None:
        """Record the workers' round and the step all have ended; None: none train. Called often.

        ``is_giving``: this host gives pieces to others.
        """
        with self._mutex:
            if seen is None:
                self._step = None
                return
            round, self._step = seen
            # Hurried replicas exceed the rate, so steps tell nothing about it; a host that only
            # gives sees steps beside another host's rate.
            is_free = self._traffic is Traffic.NONE
            traffic = (
                Traffic.OTHER if (is_giving if is_free else self._is_hurried) else self._traffic
            )
            look = ReplicaLook(self._clock(), round, self._step, traffic, self._came_bytes)
            self.pace = looked(self.pace, look)
            if not is_noticeable(self._said, self.pace.rate):
                return
            before, self._said = self._said, self.pace.rate
        log.info(
            "event=replica_rate host=%s bytes_per_s=%.0f before=%.0f step_s=%.3f slowdown=%g",
            self._host, self._said, before, self.pace.step_s or 0.0, self.pace.slowdown,
        )  # fmt: skip

    def begin(self, step: int, *, is_urgent: bool) -> None:
        """Begin replicas of the generation of this step; urgent ones without a limit."""
        with self._mutex:
            self._of_step, self._left_bytes = step, 0
            self._was_hurried, self._is_hurried = self._is_hurried, False
            self._traffic = Traffic.OTHER if is_urgent else Traffic.REPLICAS

    def end(self) -> None:
        """The replicas are done, or given up."""
        with self._mutex:
            self._traffic = Traffic.NONE

    def expect(self, size_bytes: int) -> None:
        """Set the bytes to come."""
        with self._mutex:
            self._left_bytes = size_bytes

    def came(self, size_bytes: int, check: Callable[[], None]) -> None:
        """Count arrived bytes; blocks until the next ones may come. ``check`` raises once they are
        not needed."""
        with self._mutex:
            now = self._clock()
            self._came_bytes += size_bytes
            self._left_bytes = max(0, self._left_bytes - size_bytes)
            self._bucket, wait_s = take(self._bucket, size_bytes, self._limit().rate, now)
        until = now + wait_s
        while (left_s := until - self._clock()) > 0:
            check()
            with self._mutex:
                if self._limit().rate is None:
                    return
            self._sleep(min(left_s, NAP_S))

    def _limit(self) -> Limit:
        if self._traffic is not Traffic.REPLICAS:
            return Limit(None)
        due = self._of_step + self._every if self._every else None
        left = None if due is None or self._step is None else due - self._step
        found = limit(self.pace, self._left_bytes, left)
        is_new, self._is_hurried = not self._is_hurried, self._is_hurried or found.is_hurried
        if found.is_hurried and is_new and not self._was_hurried:
            log.warning(
                "event=replica_hurried host=%s step=%d left_bytes=%d steps_left=%s: at %.0f bytes "
                "a second, which the steps bear, replicas would not be there before the next ones "
                "are due; they come faster. Make generations less often "
                "(--snapshot-every).",
                self._host, self._of_step, self._left_bytes, left, self.pace.rate,
            )  # fmt: skip
        return found


@dataclass(frozen=True, slots=True)
class Kept:
    """Result of making replicas.

    ``grown``: this host's part with them; None: nothing was missing. ``size_bytes``: bytes
    received. ``reason``: a partial failure; empty: none. ``unchanged_bytes``: bytes copied from
    another generation of this host. ``suspected``: hosts skipped for damaged pieces.
    """

    grown: HostManifest | None
    size_bytes: int
    reason: str
    unchanged_bytes: int = 0
    suspected: Suspected | None = None


class Replicas:
    """Makes the replicas of one host, one order at a time; a later order ends an earlier one.

    Args:
        rate: Limits their rate; None: no limit.
    """

    def __init__(self, store: HostStore, token: bytes, rate: ReplicaRate | None = None) -> None:
        self._store, self._token = store, token
        self._rate = rate or ReplicaRate(store.host, 1.0)
        self._is_working = threading.Lock()
        self._order = 0

    def give_up(self) -> None:
        """Stop the present order: a new round fetches for itself."""
        self._order = 0

    def begin(self, order: int) -> None:
        """Make this order the only valid one."""
        self._order = order

    def keep(self, command: Replicate) -> Kept:
        """Fetch this host's replicas. Blocks.

        Raises:
            StoreError: The order was given up, this host's part differs from the coordinator's
                record, or there is no room. LayoutError, PeerError, ProofError: as for a restore.
        """

        def check() -> None:
            if self._order != command.order:
                raise StoreError("the replicas are not needed any more: something newer is made.")

        def arrived(count: int) -> None:
            check()
            self._rate.came(count, check)

        with self._is_working:
            check()
            is_urgent = bool(command.ring.value.giving)
            self._rate.begin(command.sources.value.step, is_urgent=is_urgent)
            try:
                return _keep(self._store, command, self._token, arrived, self._rate.expect)
            finally:
                self._rate.end()

    def replicated(self, command: Replicate) -> tuple[Report, ...]:
        """Do ``keep``, and return its results as reports, ``Replicated`` last."""
        order = command.order
        try:
            kept = self.keep(command)
        except (ScalaiError, OSError, MemoryError) as error:
            is_lasting = isinstance(error, RoomError) or is_memory_short(error)
            reason = str(error) or "the agent's memory ran out"
            hosts = error.hosts if isinstance(error, MismatchError) else ()
            wrong = suspected(command.sources.value.generation, dict.fromkeys(hosts, reason))
            failed = Replicated(order, 0, reason, is_lasting)
            return (failed,) if wrong is None else (wrong, failed)
        found: list[Report] = []
        if kept.grown is not None:
            found.append(Grown(summary_bytes(kept.grown)))
        if kept.suspected is not None:
            found.append(kept.suspected)
        unchanged = kept.unchanged_bytes
        done = Replicated(order, kept.size_bytes, kept.reason, unchanged_bytes=unchanged)
        return (*found, done)


def _keep(
    store: HostStore,
    command: Replicate,
    token: bytes,
    arrived: Callable[[int], None],
    expect: Callable[[int], None],
) -> Kept:
    listed, ring, host = command.sources.value, command.ring.value, store.host
    if not ring.wards(host):
        return Kept(None, 0, "")
    own, failed = own_part(store, listed), list[str]()
    wards: dict[str, Collection] = {}
    for ward in ring.wards(host):
        if ward in listed.hosts:
            number = listed.hosts.index(ward)
            try:
                peer = DataPeer(listed.addresses[number], token, ward)
                held = peer.pieces(listed.generation, listed.reference(number))
                wards[ward] = held.pieces.collection
            except (PeerError, StoreError) as error:
                failed.append(f"{ward}: {error}")
    targets = [Holder(host, held) for held in wards.values()]
    position = ring.hosts.index(host)
    parts = ask_parts(own, host, listed, targets, token, position)
    wanted = to_keep(ring, host, {**_alike(parts, listed.hosts, command), **wards})
    states = _states(command, host, frozenset(wards), token)
    targets = [Holder(host, wanted)]
    planned = plan_from(parts, targets, ring.hosts)
    moved = Brought()
    bring(
        store, listed, parts, targets, ring.hosts, planned,
        Extras(mapped(listed.scalars.value(), "scalars"), states, (), parts.committed),
        token, arrived, moved, expect=expect,
    )  # fmt: skip
    grown, unchanged = moved.grown, moved.unchanged_bytes
    if grown is None and states:
        grown = _with_states(store, command, states)
    wrong = suspected(listed.generation, moved.damaged)
    size = planned.bytes_remote - unchanged
    return Kept(grown, size, "; ".join(failed), unchanged, wrong)


def _alike(parts: KnownParts, hosts: tuple[str, ...], command: Replicate) -> dict[str, Collection]:
    """Return each host's known pieces; hosts equal to this one were not asked."""
    found = {part.host: part.collection for part in parts.all}
    listed, own = command.sources.value, parts.own
    if own is not None and own.host in hosts:
        mine = listed.reference(hosts.index(own.host)).digest
        for number, host in enumerate(hosts):
            if listed.reference(number).digest == mine:
                found[host] = own.collection
    return found


def _states(command: Replicate, host: str, wards: frozenset[str], token: bytes) -> dict[str, Json]:
    """Fetch, by coordinate, the rank states of hosts with replicas here."""
    listed, ring = command.sources.value, command.ring.value
    found: dict[str, Json] = {}
    for ward in sorted(wards):
        number = listed.hosts.index(ward)
        coordinates = [name for name, at in listed.rank_states.items() if at == number]
        if coordinates and ring.keeps(host, {ward}):
            peer = DataPeer(listed.addresses[number], token, ward)
            found |= peer.rank_states(listed.generation, coordinates)
    return found


def _with_states(
    store: HostStore, command: Replicate, states: dict[str, Json]
) -> HostManifest | None:
    listed = command.sources.value
    store.adopt_empty(first_part(store.host, listed))
    return store.add_states(listed.generation, states)
