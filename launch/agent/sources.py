"""Pieces of the hosts in a source list: asks each host with wanted pieces, and only one of equal
replicas."""

import logging
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from scalai.core.errors import LayoutError, PeerError, StoreError
from scalai.core.fields import mapped
from scalai.core.jsonable import Json
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.fingerprint import CommitStatement, unite_committed
from scalai.core.tensors.holders import Holder, Pieces, SourceList
from scalai.core.tensors.plan import plan
from scalai.launch.agent.data_plane import DataPeer, PiecesHeld
from scalai.runtime.at_once import at_once
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest
from scalai.store.parts import pieces_of

ASKED_AT_ONCE = 16
"""Hosts to ask in parallel; they wait more than they work."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class GivenPart:
    """Another host's pieces, by its own statement."""

    host: str
    address: tuple[str, int]
    pieces: Pieces

    @property
    def collection(self) -> Collection:
        """Its pieces' boxes."""
        return self.pieces.collection


@dataclass(frozen=True, eq=False, slots=True)
class KnownParts:
    """Known parts: this host's own, and others'.

    ``committed``: statements on the others' tensors. ``silent``: hosts with wanted pieces but
    without an answer, with the reason.
    """

    own: HostManifest | None
    others: tuple[GivenPart, ...]
    committed: CommitStatement | None
    silent: Mapping[str, str]

    def without(self, gone: Mapping[str, str]) -> "KnownParts":
        """Return the parts without these hosts, given with reasons."""
        others = tuple(part for part in self.others if part.host not in gone)
        return replace(self, others=others, silent={**self.silent, **gone})

    @property
    def all(self) -> list[HostManifest | GivenPart]:
        """All parts, sorted by host."""
        found: list[HostManifest | GivenPart] = [*self.others]
        if self.own is not None:
            found.append(self.own)
        return sorted(found, key=lambda part: part.host)


def own_part(store: HostStore, listed: SourceList) -> HostManifest | None:
    """Return this host's part of a generation; None: there is none.

    Includes a part from an ended round, unknown to the coordinator.

    Raises:
        StoreError: It differs from the coordinator's record.
    """
    if store.host not in listed.hosts:
        with suppress(StoreError):
            part = store.manifest(listed.generation)
            about = mapped(listed.about.value(), "about")
            if (part.step, part.about.get("snapshot")) == (listed.step, about.get("snapshot")):
                return part
        return None
    known = listed.reference(listed.hosts.index(store.host))
    part = store.manifest(listed.generation)
    if pieces_of(part, known.rows).digest().hex() != known.digest:
        raise StoreError(
            f"host {store.host!r} holds other pieces of generation {listed.generation} than the "
            f"coordinator knows ({len(part.collection)}, not {known.rows}). The next round begins "
            "from what it holds then."
        )
    return part


def ask_parts(
    own: HostManifest | None,
    host: str,
    listed: SourceList,
    targets: Sequence[Holder],
    token: bytes,
    position: int,
) -> KnownParts:
    """Return this host's part and, if it does not suffice, others'. Blocks.

    Args:
        own: This host's part; None: there is none.
        listed: Holders of the generation.
        targets: Pieces for each worker of this host.
        position: Place of this host in the round; spreads hosts over replicas.
    """
    names = {tensor.name for target in targets for tensor in target.collection.tensors}
    if own is not None and _has_all(own, targets, names):
        return KnownParts(own, (), None, {})
    is_listed = own is not None and host in listed.hosts
    mine = listed.reference(listed.hosts.index(host)).digest if is_listed else ""
    asked: dict[str, list[int]] = {}
    for number in listed.holders(names):
        digest = listed.reference(number).digest
        if digest != mine:  # a replica of the own part adds nothing
            asked.setdefault(digest, []).append(number)
    given: dict[str, PiecesHeld] = {}
    silent: dict[str, str] = {}

    def ask(digest: str) -> None:
        numbers = asked[digest]
        turn = position % len(numbers)
        for number in [*numbers[turn:], *numbers[:turn]]:
            name = listed.hosts[number]
            peer = DataPeer(listed.addresses[number], token, name)
            try:
                given[digest] = peer.pieces(listed.generation, listed.reference(number))
                return
            except (PeerError, StoreError) as error:
                log.warning("event=silent_source host=%s %s", name, error)
                silent[name] = str(error)

    at_once(ask, asked, threads=ASKED_AT_ONCE)
    others = [
        GivenPart(listed.hosts[number], listed.addresses[number], given[digest].pieces)
        for digest, numbers in asked.items()
        if digest in given
        for number in numbers
        if listed.hosts[number] not in silent
    ]
    stated = unite_committed(held.committed for held in given.values())
    return KnownParts(own, tuple(others), stated, silent)


def _has_all(own: HostManifest, targets: Sequence[Holder], names: Set[str]) -> bool:
    """Whether a host holds all pieces its workers want."""
    empty = {t.name for h in targets for t in h.collection.tensors if not t.numel}
    held = {tensor.name for tensor in own.collection.tensors}
    if not names - empty <= held:  # the usual case of a missing piece, and cheap
        return False
    try:
        return not plan([Holder(own.host, own.collection)], targets).bytes_remote
    except LayoutError:
        return False


def ask_rank_states(
    own: HostManifest | None,
    listed: SourceList,
    coordinates: Mapping[int, str],
    token: bytes,
) -> dict[int, dict[str, Json]]:
    """Return the state of each rank of this host under its coordinate, by rank. Blocks.

    Either all ranks of the job have states, or none.

    Raises:
        PeerError, StoreError: A holder does not give them; other ranks would go on with theirs.
    """
    found: dict[int, dict[str, Json]] = {rank: {} for rank in coordinates}
    asked: dict[int, list[int]] = {}
    for rank, coordinate in coordinates.items():
        if coordinate not in listed.rank_states:
            continue
        if own is not None and coordinate in own.rank_state:
            found[rank] = {coordinate: own.rank_state[coordinate]}
        else:
            asked.setdefault(listed.rank_states[coordinate], []).append(rank)

    def ask(number: int) -> None:
        peer = DataPeer(listed.addresses[number], token, listed.hosts[number])
        states = peer.rank_states(listed.generation, [coordinates[r] for r in asked[number]])
        for rank in asked[number]:
            name = coordinates[rank]
            if name not in states:
                raise StoreError(
                    f"host {listed.hosts[number]!r} does not have the state of rank {name}, as the "
                    "coordinator knows of it. The next round asks anew."
                )
            found[rank] = {name: states[name]}

    at_once(ask, asked, threads=ASKED_AT_ONCE)
    return found


def first_part(host: str, listed: SourceList) -> HostManifest:
    """Return an empty part of a generation, for a host without one."""
    none = np.zeros(0, dtype=np.int64)
    rows = Collection.of(())
    return HostManifest(
        generation=listed.generation,
        step=listed.step,
        host=host,
        about=mapped(listed.about.value(), "about"),
        ranks=(),
        collection=Collection(listed.empty, rows.tensor, rows.offset, rows.shape),
        file=none,
        begin=none,
        fingerprint=np.zeros(0, dtype=np.uint64),
        files=(),
        scalars={},
        rank_state={},
    )
