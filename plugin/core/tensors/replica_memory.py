"""How much memory replicas take on each host, known as soon as the workers have said what they
hold, and which hosts do not have it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scalai.core.tensors.boxes import expand
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.replicas import Ring
from scalai.core.tensors.sources import Holder, index_sources

GENERATIONS = 2
"""Generations that lie in a store at once, each with its replicas: an older one stays until there
are replicas of the newer one."""
NAMED = 5
"""Hosts named in an error."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What one generation takes on a host, in bytes: its own distinct pieces, and what it keeps for
    others. ``room``: what its store can hold at all; None: not known."""

    host: str
    own: int
    kept: int
    room: int | None = None

    @property
    def replicas(self) -> int:
        """Bytes of replicas that lie there at once."""
        return GENERATIONS * self.kept

    @property
    def needed(self) -> int:
        """Bytes of all that lies there at once."""
        return GENERATIONS * (self.own + self.kept)

    @property
    def lacks(self) -> int:
        """Bytes of it that its store has no room for, as far as that is known."""
        return 0 if self.room is None else max(0, self.needed - self.room)

    @property
    def is_short(self) -> bool:
        """Whether replicas are what does not fit: the generations themselves would."""
        if self.room is None or not self.kept:
            return False
        return GENERATIONS * self.own <= self.room < self.needed

    def __str__(self) -> str:
        return (
            f"host {self.host!r} needs {self.needed} bytes for {GENERATIONS} generations of "
            f"{self.own} bytes with {self.kept} of replicas each, and its store has room for "
            f"{self.room}"
        )


def memory_of(
    ring: Ring, held: Mapping[str, Collection], room: Mapping[str, int]
) -> tuple[Memory, ...]:
    """Return what a generation takes on each host of a ring, in the ring's order.

    Args:
        ring: Who keeps replicas for whom.
        held: What the workers of each host hold; of a host that has none, nothing.
        room: What the store of each host can hold at all, in bytes, as far as it is known.

    Raises:
        LayoutError: Hosts disagree about a tensor, or a box reaches outside of its tensor.
    """
    place = {host: number for number, host in enumerate(ring.hosts)}
    hosts = sorted(held.keys() & place.keys())
    sources = index_sources([Holder(host, held[host]) for host in hosts])
    # An atom stands for all tensors of its group.
    width = np.zeros(int(sources.group.max(initial=-1)) + 1, dtype=np.int64)
    item_bytes = [ITEM_BYTES[tensor.dtype] for tensor in sources.tensors]
    np.add.at(width, sources.group, np.array(item_bytes, dtype=np.int64))
    boxes = sources.atoms.boxes
    size = boxes.numel() * width[boxes.tensor] if len(boxes) else np.zeros(0, np.int64)
    place_of = np.array([place[host] for host in sources.hosts], dtype=np.int64)
    owner, _ = expand(np.diff(sources.member_begin))
    holder = place_of[sources.host_of[sources.member_holder]]
    # One entry for each atom and host that holds it, by atom.
    owner, holder = np.divmod(np.unique(owner * len(ring.hosts) + holder), len(ring.hosts))
    own = np.zeros(len(ring.hosts), dtype=np.int64)
    np.add.at(own, holder, size[owner])
    begin = np.searchsorted(owner, np.arange(len(boxes) + 1)).tolist()
    sizes: dict[bytes, int] = defaultdict(int)
    """By the places of those that hold it."""
    for atom, each in enumerate(size.tolist()):
        sizes[holder[begin[atom] : begin[atom + 1]].tobytes()] += each
    kept = [0] * len(ring.hosts)
    for holders, each in sizes.items():
        for number in ring.keepers_of(np.frombuffer(holders, np.int64).tolist()):
            kept[number] += each
    return tuple(
        Memory(host, int(own[number]), kept[number], room.get(host))
        for number, host in enumerate(ring.hosts)
    )


def shortage(found: Sequence[Memory]) -> str:
    """Say which hosts have no room for replicas, and what helps; empty where all have."""
    short = [memory for memory in found if memory.is_short]
    if not short:
        return ""
    more = f" and {len(short) - NAMED} more hosts" if len(short) > NAMED else ""
    return (
        f"there is no room for replicas: {'; '.join(map(str, short[:NAMED]))}{more}. Give the "
        "stores more (--store-budget-gb, --shm-size), keep fewer (--replicas) or none "
        "(--replicas 0)."
    )
