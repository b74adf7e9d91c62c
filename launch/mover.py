"""Plan and move: what this host's new workers want, from its own store and from other hosts', as
orders to read."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from scalai.core.collection import Collection, concatenate
from scalai.core.commands import Start
from scalai.core.errors import MemoryShortError, ProofError, ScalaiError
from scalai.core.messages import JsonText
from scalai.core.plan import plan
from scalai.core.region import box_text
from scalai.core.sources import Holder
from scalai.core.worker_messages import Source
from scalai.launch.data_plane import Peer
from scalai.runtime.at_once import at_once
from scalai.runtime.failpoints import reached
from scalai.store.extension import fingerprints_of
from scalai.store.host import HostStore
from scalai.store.manifest import Generation, HostManifest, manifest_of_bytes, unite_hosts
from scalai.store.moves import Fetched, FetchList, fetch_lists, holders_of, read_orders


@dataclass(frozen=True, slots=True)
class Restore:
    """What the workers of one host read, by global rank, and what it took to get it here. ``grown``
    is this host's part of the generation with what was fetched, None where nothing was.
    """

    sources: Mapping[int, Source]
    grown: HostManifest | None
    plan_s: float
    move_s: float
    bytes_local: int
    bytes_remote: int


def prepare_restore(
    store: HostStore,
    start: Start,
    wants: Mapping[int, Collection],
    token: bytes,
    arrived: Callable[[int], None] = lambda count: None,
) -> Restore:
    """Plan for the workers of this host and fetch what it lacks. Blocks.

    Args:
        store: This host's.
        start: The coordinator's command.
        wants: What each new worker of this host wants, by global rank.
        token: The job's secret.
        arrived: Is told of what comes from other hosts, in bytes, by several threads at once.

    Raises:
        LayoutError: Nobody holds what is wanted. StoreError, PeerError: A host does not give what
        it holds. ProofError: What it gives is not what its manifest says.
    """
    began = time.monotonic()
    sources = start.sources
    parts = [manifest_of_bytes(source.manifest, host) for host, source in sorted(sources.items())]
    generation = unite_hosts(parts)
    ranks = sorted(wants)
    targets = [Holder(store.host, wants[rank], rank) for rank in ranks]
    planned = plan(holders_of(parts), targets, start.workers.placement.group)
    lists = fetch_lists(planned, parts, store.host)
    moving = time.monotonic()
    reached("move")
    fetched, grown = _fetch_all(store, generation, start, lists, token, arrived)
    directories = {}
    if store.host in sources:
        directories[store.host] = store.generation_directory(generation.generation)
    orders = read_orders(planned, parts, directories, fetched)
    done = time.monotonic()
    scalars = JsonText.of(generation.scalars)
    rank_state = JsonText.of(_complete_rank_state(generation))
    return Restore(
        sources={
            rank: Source(
                order=orders[number],
                step=generation.step,
                consumed_samples=generation.about["consumed_samples"],
                scalars=scalars,
                rank_state=rank_state,
                fingerprint_version=generation.fingerprint_version,
            )
            for number, rank in enumerate(ranks)
        },
        grown=grown,
        plan_s=moving - began,
        move_s=done - moving,
        bytes_local=planned.bytes_local,
        bytes_remote=planned.bytes_remote,
    )


def _complete_rank_state(generation: Generation) -> Mapping[str, object]:
    """Return the states of all ranks, or none at all.

    Some random streams must be equal on several ranks: where one rank's is lost, all begin anew.
    """
    states = generation.rank_state
    return states if len(states) == generation.about["world_size"] else {}


def _fetch_all(
    store: HostStore,
    generation: Generation,
    start: Start,
    lists: list[FetchList],
    token: bytes,
    arrived: Callable[[int], None],
) -> tuple[list[Fetched], HostManifest | None]:
    """Fetch every list into one new file of the store, peers side by side; the store then holds it
    for good."""
    if not lists:
        return [], None
    number = generation.generation
    pieces = concatenate([asked.pieces for asked in lists])
    path, begins = store.stage(pieces)
    fetched, first = [], 0
    for asked in lists:
        fetched.append(Fetched(asked, path, begins[first : first + len(asked.pieces)]))
        first += len(asked.pieces)
    try:
        fetch = partial(_fetch_one, generation, start, token, arrived)
        at_once(fetch, fetched, threads=len(fetched))
        found = fingerprints_of(path, pieces, begins, generation.fingerprint_version)
        check_arrived(lists, {part.host: part for part in generation.hosts}, found)
        reached("moved")
        store.adopt_empty(generation.hosts[0])
        grown = store.extend(number, path, pieces, begins, of=generation, fingerprints=found)
    except (ScalaiError, OSError):
        store.unstage(path)
        raise
    except MemoryError as error:
        store.unstage(path)
        raise MemoryShortError(
            f"the agent's memory ran out while it fetched {len(pieces)} pieces of generation "
            f"{number} from {len(lists)} hosts. Let it have more (`ulimit -d -v`, the limit of "
            "its container)."
        ) from error
    kept = store.generation_directory(number) / grown.files[-1].name
    return [Fetched(entry.asked, kept, entry.begin) for entry in fetched], grown


def check_arrived(
    lists: Sequence[FetchList],
    parts: Mapping[str, HostManifest],
    found: npt.NDArray[np.uint64],
) -> None:
    """Compare the whole pieces among those fetched with what their hosts' manifests say of them. A
    part of a piece has no fingerprint of its own: the proof of the whole state tells.

    Args:
        parts: The manifests of the hosts that gave them.
        found: Fingerprints of all fetched boxes, in the order of ``lists``, [boxes].

    Raises:
        ProofError: Some differ; names them and the hosts.
    """
    wrong, first = [], 0
    for asked in lists:
        part, pieces = parts[asked.host], asked.pieces
        held = part.collection
        is_whole = (held.offset[asked.row] == pieces.offset).all(axis=1)
        is_whole &= (held.shape[asked.row] == pieces.shape).all(axis=1)
        differs = found[first : first + len(pieces)] != part.fingerprint[asked.row]
        for row in np.flatnonzero(is_whole & differs).tolist():
            tensor, box = pieces.box(row)
            wrong.append(f"{tensor.name!r} {box_text(box)} of host {asked.host!r}")
        first += len(pieces)
    if wrong:
        raise ProofError(
            f"{len(wrong)} fetched pieces are not what the manifests of their hosts say: "
            f"{', '.join(wrong[:5])}"
        )


def _fetch_one(
    generation: Generation,
    start: Start,
    token: bytes,
    arrived: Callable[[int], None],
    entry: Fetched,
) -> None:
    asked = entry.asked
    peer = Peer(start.sources[asked.host].address, token, asked.host)
    peer.fetch(generation.generation, asked.row, asked.pieces, entry.path, entry.begin, arrived)
