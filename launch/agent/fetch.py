"""Restore and replication: plans reads for this host's new workers, and fetches missing pieces from
other hosts."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scalai.core.errors import (
    DamageError,
    LayoutError,
    MemoryShortError,
    MismatchError,
    PeerError,
    ScalaiError,
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
from scalai.core.tensors.plan import Plan, plan
from scalai.core.tensors.region import box_text
from scalai.launch.agent.data_plane import DEFAULT_TIMEOUT_S, DataPeer
from scalai.launch.agent.sources import KnownParts, ask_parts, ask_rank_states, first_part, own_part
from scalai.runtime.at_once import at_once
from scalai.runtime.failpoints import reached
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest
from scalai.store.moves import Fetched, FetchList, fetch_lists, holders_of, read_orders
from scalai.store.parts import Extras, summary_bytes

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

    def arrived(self, count: int) -> None:
        """Count arrived bytes."""
        with self._mutex:
            self._bytes += count

    def news(self) -> int | None:
        """Return the bytes so far, if due for a report: at intervals, and only after a change."""
        now = time.monotonic()
        if self._bytes == self._reported or now < self._report_at:
            return None
        self._reported, self._report_at = self._bytes, now + TELL_EVERY_S
        return self._reported


FETCHED_AT_ONCE = 64
"""Largest number of hosts to fetch from in parallel."""
CHECKED_BYTES_PER_S = 1e8
"""Lowest rate of a host's comparison of pieces with the committed ones."""
NAMED = 5
"""Largest number of hosts, or pieces, in an error."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Read orders for one host's workers, by global rank, and the cost of fetching.

    ``grown``: this host's part of the generation with the fetched pieces; None: nothing was
    fetched. ``suspected``: hosts skipped for damaged pieces.
    """

    sources: Mapping[int, Source]
    grown: HostManifest | None
    plan_s: float
    move_s: float
    bytes_local: int
    bytes_remote: int
    suspected: Suspected | None = None

    def to_events(self, action: FetchWanted) -> list[events.Event]:
        """List the results of ``action``."""
        fetched = events.Gathered(
            self.sources, self.plan_s, self.move_s, self.bytes_local, self.bytes_remote
        )
        found: list[events.Event] = []
        if self.grown is not None:
            found.append(Grown(summary_bytes(self.grown)))
        if self.suspected is not None:
            found.append(self.suspected)
        return [*found, events.Done(action, fetched)]


def prepare_restore(
    store: HostStore,
    start: Start,
    wants: Mapping[int, Want],
    token: bytes,
    arrived: Callable[[int], None] = lambda count: None,
) -> Restore:
    """Plan for this host's workers and fetch missing pieces. Blocks.

    Args:
        start: The coordinator's command, with sources.
        wants: Pieces for each new worker of this host, by global rank.
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

    moved = bring(store, listed, parts, targets, placement.group, extras, token, arrived)
    directories = {}
    if parts.own is not None:
        directories[store.host] = store.generation_directory(listed.generation)
    planned, moving = moved.plan, moved.fetch
    orders = read_orders(planned, moved.parts.all, directories, moving.fetched)
    done = time.monotonic()
    return Restore(
        sources=_sources(start, ranks, orders, states),
        grown=moving.grown,
        plan_s=moved.began - began,
        move_s=done - moved.began,
        bytes_local=planned.bytes_local,
        bytes_remote=planned.bytes_remote,
        suspected=suspected(listed.generation, moved.damaged),
    )


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
            order=orders[number],
            step=listed.step,
            consumed_samples=about["consumed_samples"],
            scalars=listed.scalars,
            rank_state=JsonText.of(states[rank]),
            lost=start.lost,
            proves=start.proves,
        )
        for number, rank in enumerate(ranks)
    }


class _Fetch(NamedTuple):
    """Fetched lists; this host's part with them, None: nothing was missing; and bytes copied from
    another generation of this host."""

    fetched: list[Fetched]
    grown: HostManifest | None
    unchanged_bytes: int = 0


class Brought(NamedTuple):
    """A plan after its execution: its parts, the fetched pieces, the start time of the transfer,
    and hosts with damaged pieces, with the reason."""

    plan: Plan
    parts: KnownParts
    fetch: _Fetch
    began: float
    damaged: Mapping[str, str]


def bring(
    store: HostStore,
    listed: SourceList,
    parts: KnownParts,
    targets: Sequence[Holder],
    hosts: Sequence[str],
    extras: Extras,
    token: bytes,
    arrived: Callable[[int], None],
    expect: Callable[[int], None] = lambda count: None,
    *,
    is_replica: bool = False,
) -> Brought:
    """Bring this host's missing target pieces of a generation into its store. Blocks.

    Args:
        parts: Pieces of each host.
        targets: Pieces this host should have.
        hosts: All hosts doing so now, this one included; each asks another replica.
        extras: Values to store with the pieces.
        arrived: Callback for arriving bytes; several threads call it.
        expect: Callback for the expected bytes, before they arrive.
        is_replica: For other hosts' sake: leaves room for this host's own next snapshot, and copies
            pieces unchanged since another generation of this host.

    Raises: As ``prepare_restore``.
    """

    def fetch(parts: KnownParts, lists: list[FetchList], gone: dict[str, ScalaiError]) -> _Fetch:
        if is_replica:
            store.check_spare(sum(int(asked.pieces.size_bytes().sum()) for asked in lists))
        else:
            reached("move")
        return _fetch_all(
            store,
            listed,
            parts,
            lists,
            extras,
            token,
            arrived,
            expect,
            gone,
            is_replica=is_replica,
        )

    return _plan_and_fetch(store.host, parts, targets, hosts, fetch)


def _plan_and_fetch(
    host: str,
    parts: KnownParts,
    targets: Sequence[Holder],
    hosts: Sequence[str],
    fetch: Callable[[KnownParts, list[FetchList], dict[str, ScalaiError]], _Fetch],
) -> Brought:
    """Plan and fetch; after a failure again without the failing hosts, since replicas may help."""
    damaged = dict[str, str]()
    while True:  # ends: each turn leaves out a host
        try:
            planned, gone = _plan(parts, targets, hosts), dict[str, ScalaiError]()
        except PeerError as error:
            if not damaged:
                raise
            raise MismatchError(str(error), tuple(damaged)) from error
        lists = fetch_lists(planned, parts.all, host)
        began = time.monotonic()
        try:
            return Brought(planned, parts, fetch(parts, lists, gone), began, damaged)
        except (PeerError, DamageError):
            if not gone:
                raise
        reasons = {host: str(error) for host, error in gone.items()}
        damaged |= {h: why for h, why in reasons.items() if isinstance(gone[h], DamageError)}
        log.warning("event=source_gone hosts=%s: planned anew without them", sorted(gone))
        parts = parts.without(reasons)


def _plan(parts: KnownParts, targets: Sequence[Holder], hosts: Sequence[str]) -> Plan:
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


def _fetch_all(
    store: HostStore,
    listed: SourceList,
    parts: KnownParts,
    lists: list[FetchList],
    extras: Extras,
    token: bytes,
    arrived: Callable[[int], None],
    expect: Callable[[int], None],
    gone: dict[str, ScalaiError],
    *,
    is_replica: bool,
) -> _Fetch:
    """Fetch every list into one new file of the store, peers in parallel, and keep it.

    Notes failing hosts in ``gone``, with the reason.
    """
    if not lists:
        return _Fetch([], None)
    number, others = listed.generation, {part.host: part for part in parts.others}
    pieces = concatenate([asked.pieces for asked in lists])
    staged = store.stage(pieces)
    fetched, first = [], 0
    for asked in lists:
        begins = staged.begins[first : first + len(asked.pieces)]
        fetched.append(Fetched(asked, staged.path, begins))
        first += len(asked.pieces)

    def fetch(entry: Fetched) -> None:
        asked = entry.asked
        most_s = _patience_s(asked, given[asked.host]) if is_replica else DEFAULT_TIMEOUT_S
        peer = DataPeer(others[asked.host].address, token, asked.host, most_s)
        try:
            peer.fetch(
                number, asked.row, asked.pieces, entry.path, entry.begin, arrived,
                is_checked=is_replica,
            )  # fmt: skip
        except (PeerError, DamageError) as error:
            gone[asked.host] = error
            raise

    given = {host: part.pieces for host, part in others.items()}
    try:
        stated = stated_fingerprints(lists, given) if is_replica else {}
        copied = store.copy_unchanged(number, staged, stated, lambda: arrived(0))
        left, due = _without(fetched, copied)
        expect(sum(int(entry.asked.pieces.size_bytes().sum()) for entry in due))
        if due:
            at_once(fetch, due, threads=min(len(due), FETCHED_AT_ONCE))
        found = np.zeros(len(pieces), np.uint64)
        found[list(copied)] = np.array(list(copied.values()), np.uint64)
        found[left] = staged.fingerprints(left)
        check_arrived(lists, given, found)
        reached("moved")
        store.adopt_empty(first_part(store.host, listed))
        grown = store.extend(number, staged, extras, found)
    except (ScalaiError, OSError):
        store.unstage(staged)
        raise
    except MemoryError as error:
        store.unstage(staged)
        raise MemoryShortError(
            f"the agent's memory ran out while it fetched {len(pieces)} pieces of generation "
            f"{number} from {len(lists)} hosts. Let it have more (`ulimit -d -v`, the limit of "
            "its container)."
        ) from error
    kept = store.generation_directory(number) / grown.files[-1].name
    unchanged = int(pieces.size_bytes().sum() - pieces.size_bytes()[left].sum())
    return _Fetch([Fetched(each.asked, kept, each.begin) for each in fetched], grown, unchanged)


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
            chosen = FetchList(
                asked.host, asked.row[mine], asked.pieces.select(mine), asked.fetch[mine]
            )
            lists.append(Fetched(chosen, entry.path, entry.begin[mine]))
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
