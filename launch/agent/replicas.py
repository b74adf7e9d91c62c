"""This host's replicas for others, fetched beside the training, so the job's state survives the
loss of hosts."""

import logging
import threading
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
from scalai.core.tensors.replicas import to_keep
from scalai.launch.agent.data_plane import Peer
from scalai.launch.agent.fetch import bring, suspected
from scalai.launch.agent.replica_rate import ReplicaRate
from scalai.launch.agent.sources import Parts, ask_parts, first_part, own_part
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest
from scalai.store.parts import Extras, summary_bytes

log = logging.getLogger(__name__)


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
        store: This host's store.
        token: The job's secret.
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
                peer = Peer(listed.addresses[number], token, ward)
                held = peer.pieces(listed.generation, listed.reference(number))
                wards[ward] = held.pieces.collection
            except (PeerError, StoreError) as error:
                failed.append(f"{ward}: {error}")
    targets = [Holder(host, held) for held in wards.values()]
    position = ring.hosts.index(host)
    parts = ask_parts(own, host, listed, targets, token, position)
    wanted = to_keep(ring, host, {**_alike(parts, listed.hosts, command), **wards})
    states = _states(command, host, frozenset(wards), token)
    moved = bring(
        store, listed, parts, [Holder(host, wanted)], ring.hosts,
        Extras(mapped(listed.scalars.value(), "scalars"), states, (), parts.committed),
        token, arrived, expect, is_replica=True,
    )  # fmt: skip
    grown, unchanged = moved.fetch.grown, moved.fetch.unchanged_bytes
    if grown is None and states:
        grown = _with_states(store, command, states)
    wrong = suspected(listed.generation, moved.damaged)
    size = moved.plan.bytes_remote - unchanged
    return Kept(grown, size, "; ".join(failed), unchanged, wrong)


def _alike(parts: Parts, hosts: tuple[str, ...], command: Replicate) -> dict[str, Collection]:
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
            peer = Peer(listed.addresses[number], token, ward)
            found |= peer.rank_states(listed.generation, coordinates)
    return found


def _with_states(
    store: HostStore, command: Replicate, states: dict[str, Json]
) -> HostManifest | None:
    listed = command.sources.value
    store.adopt_empty(first_part(store.host, listed))
    return store.add_states(listed.generation, states)
