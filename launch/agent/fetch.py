"""Restore and replication: plans reads for this host's new workers, and fetches missing pieces from
other hosts."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from scalai.core.errors import (
    DamageError,
    LayoutError,
    MismatchError,
    PeerError,
    ScalaiError,
    StoreError,
)
from scalai.core.fields import mapped
from scalai.core.host import events
from scalai.core.host.actions import FetchWanted
from scalai.core.host.state import Want
from scalai.core.jsonable import Json
from scalai.core.messages.commands import Start
from scalai.core.messages.reports import Grown, Suspected
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import ReadOrder, Source
from scalai.core.tensors.collection import concatenate
from scalai.core.tensors.holders import Holder, Pieces, SourceList
from scalai.core.tensors.plan import BATCH_BYTES, Plan, plan
from scalai.core.tensors.region import box_text
from scalai.launch.agent.data_plane import DEFAULT_TIMEOUT_S, DataPeer
from scalai.launch.agent.sources import (
    GivenPart,
    KnownParts,
    ask_parts,
    ask_rank_states,
    first_part,
    own_part,
)
from scalai.runtime.at_once import at_once
from scalai.runtime.failpoints import reached
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest
from scalai.store.moves import (
    Fetched,
    FetchList,
    Missing,
    fetch_lists,
    fetched_orders,
    holders_of,
    in_batches,
    read_orders,
)
from scalai.store.parts import Extras, Staged, summary_bytes

log = logging.getLogger(__name__)

TELL_EVERY_S = 10.0
"""Seconds between reports of arriving bytes."""


class Moving:
    """Bytes from other hosts for one round. Fetching threads call ``arrived``, the agent's own the
    rest."""

    def __init__(self, round: int) -> None:
        self.round = round
        self._mutex = threading.Lock()
        self._bytes = self._reported = 0
        self._report_at = 0.0
        self._is_given_up = False

    def arrived(self, count: int) -> None:
        """Count arrived bytes. Raises ``StoreError`` if they were given up."""
        if self._is_given_up:
            raise StoreError("the pieces are not needed any more: their round has ended.")
        with self._mutex:
            self._bytes += count

    def give_up(self) -> None:
        """End the move: its round has ended."""
        self._is_given_up = True

    def news(self) -> int | None:
        """Return the bytes so far, if due for a report: at intervals, and only after a change."""
        now = time.monotonic()
        if self._bytes == self._reported or now < self._report_at:
            return None
        self._reported, self._report_at = self._bytes, now + TELL_EVERY_S
        return self._reported


FETCHED_AT_ONCE = 64
"""Largest number of hosts to fetch from in parallel."""
BATCHES_AT_ONCE = 3
"""One is made room for, one comes, one is compared."""
CHECKED_BYTES_PER_S = 1e8
"""Lowest rate of a host's comparison of pieces with the committed ones."""
NAMED = 5
"""Largest number of hosts, or pieces, in an error."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Result of fetching for one host's workers.

    ``grown``: this host's part of the generation with the fetched pieces; None: nothing was
    fetched. ``suspected``: hosts skipped for damaged pieces.
    """

    grown: HostManifest | None = None
    suspected: Suspected | None = None

    def to_events(self, action: FetchWanted) -> list[events.Event]:
        """List the results of ``action``."""
        found: list[events.Event] = []
        if self.grown is not None:
            found.append(Grown(summary_bytes(self.grown)))
        if self.suspected is not None:
            found.append(self.suspected)
        return [*found, events.Done(action)]


def prepare_restore(
    store: HostStore,
    start: Start,
    wants: Mapping[int, Want],
    token: bytes,
    hand: Callable[[events.Event], object],
    arrived: Callable[[int], None] = lambda count: None,
) -> Restore:
    """Plan for this host's workers, hand them what is here, fetch missing pieces in batches, and
    hand them each batch once it is compared and kept. Blocks.

    Args:
        start: The coordinator's command, with sources.
        wants: Pieces for each new worker of this host, by global rank.
        hand: Takes ``RestorePlanned``, then ``PiecesHere``, and ``Grown`` before an error; several
            threads call it.
        arrived: Callback for bytes from other hosts; several threads call it.

    Raises:
        LayoutError: Nobody holds a wanted piece. StoreError, PeerError: A host does not give its
            pieces. ProofError: They differ from its statement.
    """
    assert start.sources is not None
    began, listed = time.monotonic(), start.sources.value
    placement, ranks = start.workers.placement, sorted(wants)
    targets = [Holder(store.host, wants[rank].pieces, rank) for rank in ranks]
    own = own_part(store, listed)
    parts = ask_parts(own, store.host, listed, targets, token, placement.group_rank)
    coordinates = {rank: wants[rank].coordinate for rank in ranks}
    states = ask_rank_states(parts.own, listed, coordinates, token)
    scalars = mapped(listed.scalars.value(), "scalars")
    extras = Extras(
        scalars=scalars,
        rank_state={name: state for rank in ranks for name, state in states[rank].items()},
        ranks=tuple(rank for rank in ranks if states[rank]),
        committed=parts.committed,
    )
    planned = plan_from(parts, targets, placement.group)
    directories = {}
    if parts.own is not None:
        directories[store.host] = store.generation_directory(listed.generation)
    orders, round = read_orders(planned, parts.all, directories), start.workers.round
    sources = _sources(start, ranks, orders, states)
    plan_s = time.monotonic() - began
    hand(events.RestorePlanned(round, sources, plan_s, planned.bytes_local, planned.bytes_remote))

    def came(orders: Mapping[int, ReadOrder]) -> None:
        by_rank = {ranks[number]: order for number, order in orders.items()}
        hand(events.PiecesHere(round, by_rank))

    reached("move")
    moved = Brought()
    try:
        bring(
            store, listed, parts, targets, placement.group, planned, extras, token, arrived, moved,
            came=came,
        )  # fmt: skip
    except (ScalaiError, OSError, MemoryError):
        if moved.grown is not None and listed.generation in store.generations():
            # It stays, and the coordinator can use it, and drop it.
            hand(Grown(summary_bytes(store.manifest(listed.generation))))
        raise
    if moved.grown is not None:
        log.info(
            "event=moved round=%d bytes=%d unchanged_bytes=%d files=%d took_s=%.3f",
            round, planned.bytes_remote - moved.unchanged_bytes, moved.unchanged_bytes,
            moved.files, time.monotonic() - began - plan_s,
        )  # fmt: skip
    return Restore(moved.grown, suspected(listed.generation, moved.damaged))


def suspected(generation: int, damaged: Mapping[str, str]) -> Suspected | None:
    """Return a report of hosts with damaged pieces, by reason; None: there are none."""
    reasons = "; ".join(damaged.values())
    return Suspected(generation, tuple(sorted(damaged)), reasons) if damaged else None


def _sources(
    start: Start,
    ranks: Sequence[int],
    orders: Mapping[int, ReadOrder],
    states: Mapping[int, Mapping[str, Json]],
) -> dict[int, Source]:
    assert start.sources is not None
    listed = start.sources.value
    about = mapped(listed.about.value(), "about")
    return {
        rank: Source(
            order=orders.get(number, ReadOrder.empty()),
            step=listed.step,
            consumed_samples=about["consumed_samples"],
            scalars=listed.scalars,
            rank_state=JsonText.of(states[rank]),
            lost=start.lost,
            proves=start.proves,
        )
        for number, rank in enumerate(ranks)
    }


@dataclass(slots=True)
class Brought:
    """What has come to this host: its part with it (None: nothing was missing), in how many files,
    bytes of it copied from another generation of this host, and hosts with damaged pieces, with
    the reason."""

    grown: HostManifest | None = None
    files: int = 0
    unchanged_bytes: int = 0
    damaged: dict[str, str] = field(default_factory=dict)


def plan_from(parts: KnownParts, targets: Sequence[Holder], hosts: Sequence[str]) -> Plan:
    """Plan from the known parts.

    Raises:
        LayoutError: Nobody holds a wanted piece. PeerError: A silent host may hold it.
    """
    try:
        return plan(holders_of(parts.all), targets, hosts)
    except LayoutError as error:
        if not parts.silent:
            raise
        reasons = "; ".join(f"{host}: {why}" for host, why in sorted(parts.silent.items())[:NAMED])
        raise PeerError(
            f"{len(parts.silent)} hosts did not say what they hold ({reasons}), and without them "
            f"{error}"
        ) from error


def bring(
    store: HostStore,
    listed: SourceList,
    parts: KnownParts,
    targets: Sequence[Holder],
    hosts: Sequence[str],
    planned: Plan,
    extras: Extras,
    token: bytes,
    arrived: Callable[[int], None],
    brought: Brought,
    *,
    came: Callable[[Mapping[int, ReadOrder]], None] | None = None,
    expect: Callable[[int], None] = lambda count: None,
) -> None:
    """Bring this host's missing target pieces of a generation into its store. Blocks.

    After a failure of hosts the rest is planned anew without them, since replicas may help.

    Args:
        parts: Pieces of each host.
        targets: Pieces this host should have.
        hosts: All hosts doing so now, this one included; each asks another replica.
        planned: Plan from ``parts`` for ``targets`` (``plan_from``).
        extras: Values to store with the pieces.
        arrived: Callback for arriving bytes; several threads call it. Raises ``StoreError`` once
            they are not needed any more.
        brought: Takes what has come, also before an error.
        came: Callback for orders to read each batch, by index of the target; several threads call
            it. None: for other hosts' sake; leaves room for this host's own next snapshot.
        expect: Callback for the expected bytes, before they arrive.

    Raises: As ``prepare_restore``.
    """
    missing = Missing.all_of(targets)
    while True:  # ends: each turn leaves out a host
        lists = fetch_lists(planned, parts.all, store.host)
        if came is None:
            store.check_spare(sum(int(asked.pieces.size_bytes().sum()) for asked in lists))
        others = {part.host: part for part in parts.others}
        hand = None if came is None else partial(_hand, came, planned, missing)
        fetching = _Fetching(store, listed, others, extras, token, arrived, expect, hand, brought)
        batches = [lists] * bool(lists) if came is None else in_batches(lists, BATCH_BYTES)
        try:
            at_once(fetching.take, batches, threads=min(len(batches), BATCHES_AT_ONCE))
            return
        except (PeerError, DamageError):
            if not fetching.gone:
                raise
        reasons = {host: str(error) for host, error in fetching.gone.items()}
        for host, error in fetching.gone.items():
            if isinstance(error, DamageError):
                brought.damaged[host] = str(error)
        log.warning("event=source_gone hosts=%s: planned anew without them", sorted(reasons))
        parts, missing = parts.without(reasons), missing.without(planned, fetching.here)
        try:
            planned = plan_from(parts, missing.targets, hosts)
        except PeerError as error:
            if not brought.damaged:
                raise
            raise MismatchError(str(error), tuple(brought.damaged)) from error


def _hand(
    came: Callable[[Mapping[int, ReadOrder]], None],
    planned: Plan,
    missing: Missing,
    fetched: Sequence[Fetched],
) -> None:
    came(missing.as_wanted(fetched_orders(planned, fetched)))


@dataclass(eq=False, slots=True)
class _Fetching:
    """Fetches by one plan. Threads take a batch each, and one at a time receives.

    Attributes:
        others: Known parts, by host.
        hand: Takes each arrived batch; None: replicas.
        here: Arrived lists.
        gone: Failed hosts, with the reason.
        is_adopted: This host has a part of the generation, or had one.
    """

    store: HostStore
    listed: SourceList
    others: Mapping[str, GivenPart]
    extras: Extras
    token: bytes
    arrived: Callable[[int], None]
    expect: Callable[[int], None]
    hand: Callable[[Sequence[Fetched]], None] | None
    brought: Brought
    here: list[Fetched] = field(default_factory=list)
    gone: dict[str, PeerError | DamageError] = field(default_factory=dict)
    is_adopted: bool = False
    receiving: threading.Lock = field(default_factory=threading.Lock)
    mutex: threading.Lock = field(default_factory=threading.Lock)

    def take(self, lists: list[FetchList]) -> None:
        """Fetch a batch into one new file of the store, hosts in parallel, compare it, keep it, and
        hand it on."""
        store, number = self.store, self.listed.generation
        pieces = concatenate([asked.pieces for asked in lists])
        staged = store.stage(pieces)
        try:
            fetched, first = [], 0
            for asked in lists:
                begins = staged.begins[first : first + len(asked.pieces)]
                fetched.append(Fetched(asked, staged.path, begins))
                first += len(asked.pieces)
            given = {host: part.pieces for host, part in self.others.items()}
            stated = stated_fingerprints(lists, given)
            copied = store.copy_unchanged(number, staged, stated, lambda: self.arrived(0))
            left, due = _without(fetched, copied)
            self.expect(sum(int(entry.asked.pieces.size_bytes().sum()) for entry in due))
            with self.receiving:
                if self.gone:  # in another batch: all that is left is planned anew
                    raise next(iter(self.gone.values()))
                if due:
                    at_once(self._receive, due, threads=min(len(due), FETCHED_AT_ONCE))
            found = np.zeros(len(pieces), np.uint64)
            found[list(copied)] = np.array(list(copied.values()), np.uint64)
            found[left] = staged.fingerprints(left)
            check_arrived(lists, given, found)
            reached("moved")
            grown = self._keep(staged, found)
        except (ScalaiError, OSError, MemoryError):
            store.unstage(staged)
            raise
        kept = store.generation_directory(number) / grown.files[-1].name
        fetched = [Fetched(each.asked, kept, each.begin) for each in fetched]
        sizes, brought = pieces.size_bytes(), self.brought
        with self.mutex:
            self.here += fetched
            if brought.grown is None or len(brought.grown.files) < len(grown.files):
                brought.grown = grown
            brought.files += 1
            brought.unchanged_bytes += int(sizes.sum() - sizes[left].sum())
        if self.hand is not None:
            self.hand(fetched)

    def _keep(self, staged: Staged, fingerprints: npt.NDArray[np.uint64]) -> HostManifest:
        """Make a compared file a part of the generation. A generation that was dropped meanwhile is
        not made anew: nobody would drop it again."""
        with self.mutex:
            self.arrived(0)
            if not self.is_adopted:
                self.store.adopt_empty(first_part(self.store.host, self.listed))
                self.is_adopted = True
        return self.store.extend(self.listed.generation, staged, self.extras, fingerprints)

    def _receive(self, entry: Fetched) -> None:
        asked, most_s = entry.asked, DEFAULT_TIMEOUT_S
        part = self.others[asked.host]
        if self.hand is None:
            most_s = _patience_s(asked, part.pieces)
        peer = DataPeer(part.address, self.token, asked.host, most_s)
        try:
            stated = part.pieces.fingerprint[asked.row]
            peer.fetch(
                self.listed.generation, asked.row, stated, asked.pieces, entry.path, entry.begin,
                self.arrived, is_checked=self.hand is None,
            )  # fmt: skip
        except (PeerError, DamageError) as error:
            self.gone[asked.host] = error
            raise


def _without(
    fetched: Sequence[Fetched], rows: Mapping[int, int]
) -> tuple[npt.NDArray[np.int64], list[Fetched]]:
    """Return the remaining rows of all lists, concatenated, and their lists."""
    if not rows:
        return np.arange(sum(len(entry.begin) for entry in fetched)), list(fetched)
    left, lists, first = list[int](), list[Fetched](), 0
    for entry in fetched:
        asked, count = entry.asked, len(entry.asked.pieces)
        mine = np.array([n for n in range(count) if first + n not in rows], dtype=np.int64)
        if len(mine):
            lists.append(Fetched(asked.select(mine), entry.path, entry.begin[mine]))
        left += (first + mine).tolist()
        first += count
    return np.array(left, dtype=np.int64), lists


def _is_whole(asked: FetchList, part: Pieces) -> npt.NDArray[np.bool_]:
    held, pieces = part.collection, asked.pieces
    is_whole: npt.NDArray[np.bool_] = (held.offset[asked.row] == pieces.offset).all(axis=1)
    is_whole &= (held.shape[asked.row] == pieces.shape).all(axis=1)
    return is_whole


def _patience_s(asked: FetchList, part: Pieces) -> float:
    cut = np.unique(asked.row[~_is_whole(asked, part)])
    size_bytes = int(part.collection.select(cut).size_bytes().sum())
    return DEFAULT_TIMEOUT_S + size_bytes / CHECKED_BYTES_PER_S


def stated_fingerprints(lists: Sequence[FetchList], parts: Mapping[str, Pieces]) -> dict[int, int]:
    """Return hosts' fingerprints of requested whole pieces, by row of the joined ``lists``."""
    found: dict[int, int] = {}
    first = 0
    for asked in lists:
        part, pieces = parts[asked.host], asked.pieces
        rows = np.flatnonzero(_is_whole(asked, part))
        values = part.fingerprint[asked.row[rows]].tolist()
        found |= dict(zip((first + rows).tolist(), values, strict=True))
        first += len(pieces)
    return found


def check_arrived(
    lists: Sequence[FetchList],
    parts: Mapping[str, Pieces],
    found: npt.NDArray[np.uint64],
) -> None:
    """Compare fetched whole pieces with their hosts' fingerprints.

    Parts of pieces have none of their own; the proof of the whole state covers them.

    Args:
        parts: Statements of the giving hosts.
        found: Fingerprints of all fetched boxes, in the order of ``lists``, [boxes].

    Raises:
        MismatchError: Some differ; names them and the hosts.
    """
    stated, values = stated_fingerprints(lists, parts), found.tolist()
    wrong = [row for row, value in stated.items() if values[row] != value]
    if wrong:
        boxes = [(asked, row) for asked in lists for row in range(len(asked.pieces))]
        named = []
        for asked, row in (boxes[row] for row in wrong[:NAMED]):
            tensor, box = asked.pieces.box(row)
            named.append(f"{tensor.name!r} {box_text(box)} of host {asked.host!r}")
        hosts = sorted({boxes[row][0].host for row in wrong})
        raise MismatchError(
            f"{len(wrong)} fetched pieces are not what their hosts say of them: {', '.join(named)}",
            tuple(hosts),
        )
