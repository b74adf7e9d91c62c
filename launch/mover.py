"""Plan and move: what this host's new workers want, from its own store and from other hosts', as
orders to read."""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from scalai.core.collection import Collection, concatenate
from scalai.core.errors import ScalaiError
from scalai.core.plan import plan
from scalai.core.sources import Holder
from scalai.launch.data_plane import Peer
from scalai.runtime.failpoints import reached
from scalai.store.host import HostStore
from scalai.store.manifest import Generation, HostManifest, manifest_from_message, unite_hosts
from scalai.store.moves import Fetched, FetchList, fetch_lists, holders_of, read_orders
from scalai.store.orders import ReadOrder

Json = Any


@dataclass(frozen=True, slots=True)
class Restore:
    """What the workers of one host read, by global rank, and what it took to get it here.

    ``common`` goes to every worker: step, consumed samples, scalars, rank states. ``grown`` is this
    host's part of the generation with what was fetched, None where nothing was.
    """

    orders: Mapping[int, ReadOrder]
    common: Mapping[str, Json]
    grown: HostManifest | None
    plan_s: float
    move_s: float
    bytes_local: int
    bytes_remote: int


def prepare_restore(
    store: HostStore, command: Mapping[str, Json], wants: Mapping[int, Collection], token: bytes
) -> Restore:
    """Plan for the workers of this host and fetch what it lacks. Blocks.

    Args:
        store: This host's.
        command: The coordinator's ``start``: ``generation``, and ``sources`` with address and
        manifest of each host.
        wants: What each new worker of this host wants, by global rank.
        token: The job's secret.

    Raises:
        LayoutError: Nobody holds what is wanted. StoreError, PeerError: A host does not give what
        it holds.
    """
    began = time.monotonic()
    sources = command["sources"]
    parts = [
        manifest_from_message(source["part"], host) for host, source in sorted(sources.items())
    ]
    generation = unite_hosts(parts)
    ranks = sorted(wants)
    targets = [Holder(store.host, wants[rank], rank) for rank in ranks]
    planned = plan(holders_of(parts), targets, command["group"])
    lists = fetch_lists(planned, parts, store.host)
    moving = time.monotonic()
    reached("move")
    fetched, grown = _fetch_all(store, generation, command, lists, token)
    directories = {}
    if store.host in sources:
        directories[store.host] = store.generation_directory(generation.generation)
    orders = read_orders(planned, parts, directories, fetched)
    done = time.monotonic()
    return Restore(
        orders={rank: orders[number] for number, rank in enumerate(ranks)},
        common={
            "step": generation.step,
            "consumed_samples": generation.about["consumed_samples"],
            "scalars": generation.scalars,
            "rank_state": _complete_rank_state(generation),
        },
        grown=grown,
        plan_s=moving - began,
        move_s=done - moving,
        bytes_local=planned.bytes_local,
        bytes_remote=planned.bytes_remote,
    )


def _complete_rank_state(generation: Generation) -> Mapping[str, Json]:
    """Return the states of all ranks, or none at all.

    Some random streams must be equal on several ranks: where one rank's is lost, all begin anew.
    """
    states = generation.rank_state
    return states if len(states) == generation.about["world_size"] else {}


def _fetch_all(
    store: HostStore,
    generation: Generation,
    command: Mapping[str, Json],
    lists: list[FetchList],
    token: bytes,
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
        with ThreadPoolExecutor(len(lists), thread_name_prefix="fetch") as pool:
            for one in [pool.submit(_fetch_one, command, entry, token) for entry in fetched]:
                one.result()
    except (ScalaiError, OSError):
        store.unstage(path)
        raise
    reached("moved")
    store.adopt_empty(generation.hosts[0])
    grown = store.extend(number, path, pieces, begins, of=generation)
    kept = store.generation_directory(number) / grown.files[-1].name
    return [Fetched(entry.asked, kept, entry.begin) for entry in fetched], grown


def _fetch_one(command: Mapping[str, Json], entry: Fetched, token: bytes) -> None:
    host, port = command["sources"][entry.asked.host]["address"]
    asked = entry.asked
    Peer((host, port), token).fetch(
        int(command["generation"]), asked.row, asked.pieces, entry.path, entry.begin
    )
