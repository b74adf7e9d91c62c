"""Replicas: pieces held by too few hosts, their keepers, the memory they take.

Data parallelism holds much of a state on several hosts already. The rest (shards of optimizers,
stages of pipelines, experts) is copied to other hosts, so that the job survives the loss of any
``replicas`` hosts. Hosts stand in a ring; a piece goes to the hosts behind its first holder, each
in another failure domain. Every host computes its own share from the others' collections.

Source: placement on a ring from consistent hashing (Karger and others, 1997); checkpoints in the
memory of peers from Gemini (SOSP 2023). Differs in: pieces replicated by data parallelism are not
copied.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice, zip_longest

import numpy as np

from scalai.core.tensors.boxes import expand
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.holders import Holder, index_sources

GENERATIONS = 2
"""Generations in a store at once, each with its replicas: the older one stays until the newer one
has replicas."""
NAMED = 5
"""Hosts named in an error."""


@dataclass(frozen=True, slots=True)
class Ring:
    """Hosts keeping replicas for each other, in order, with the failure domain of each.

    Each piece gets ``replicas`` beside the first copy.

    ``giving`` hosts will be taken away and keep nothing. The others then keep this many replicas of
    pieces held by ``giving`` hosts alone, and no others.
    """

    hosts: tuple[str, ...]
    domains: tuple[str, ...]
    replicas: int
    giving: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.domains) != len(self.hosts):
            raise ValueError(f"{len(self.domains)} domains of {len(self.hosts)} hosts")

    def keepers(self, first: str) -> Iterator[str]:
        """Yield the keepers for ``first``, best first: hosts behind it, one of each further
        domain.
        """
        return (self.hosts[number] for number in self._behind(self.hosts.index(first)))

    def _behind(self, place: int) -> Iterator[int]:
        count, taken = len(self.hosts), {self.domains[place]}
        for number in range(place + 1, place + count):
            domain = self.domains[number % count]
            if domain not in taken and self.hosts[number % count] not in self.giving:
                taken.add(domain)
                yield number % count

    def wards(self, keeper: str) -> tuple[str, ...]:
        """Return the hosts with pieces possibly for ``keeper`` to keep."""
        warded = self.giving or self.hosts
        return tuple(h for h in warded if keeper in islice(self.keepers(h), self.replicas))

    def all_wards(self) -> dict[str, tuple[str, ...]]:
        """Return the ``wards`` of every host."""
        found: dict[str, list[str]] = {host: [] for host in self.hosts}
        for host in self.giving or self.hosts:
            for keeper in islice(self.keepers(host), self.replicas):
                found[keeper].append(host)
        return {keeper: tuple(wards) for keeper, wards in found.items()}

    def keeps(self, host: str, holders: Set[str]) -> bool:
        """Return True if a host keeps a replica of the pieces of exactly these holders."""
        if host in holders or host in self.giving:
            return False
        held = [number for number, name in enumerate(self.hosts) if name in holders]
        return any(self.hosts[number] == host for number in self.keepers_of(held))

    def keepers_of(self, held: Sequence[int]) -> Iterator[int]:
        """Yield the places of the keepers for pieces held at the ascending places ``held``."""
        taken = {self.domains[number] for number in held}
        missing = self.replicas + 1 - len(taken)
        if self.giving:
            is_elsewhere = any(self.hosts[number] not in self.giving for number in held)
            missing = 0 if is_elsewhere else self.replicas
        if held and missing > 0:
            others = (n for n in self._behind(held[0]) if self.domains[n] not in taken)
            yield from islice(others, missing)


def leaving_ring(staying: Iterable[str], giving: Iterable[str]) -> Ring:
    """Return the ring for pieces held only by the hosts ``giving``, soon to be taken away.

    Ignores failure domains: time is short, and replicas are made anew later.
    """
    giving = tuple(sorted(giving))
    hosts = tuple(sorted({*staying, *giving}))
    return Ring(hosts, hosts, 1, giving)


def ring_of(domains: Mapping[str, str], replicas: int) -> Ring:
    """Return the ring of hosts by failure domain ("": a domain of its own).

    Neighbours are of different domains as far as possible. With too few domains for ``replicas``,
    each host counts as one.
    """
    own = {host: f"domain {name}" if name else f"host {host}" for host, name in domains.items()}
    replicas = max(0, min(replicas, len(own) - 1))
    if len(set(own.values())) <= replicas:
        own = {host: host for host in own}
    together: dict[str, list[str]] = {}
    for host in sorted(own):
        together.setdefault(own[host], []).append(host)
    rows = zip_longest(*(together[name] for name in sorted(together)))
    hosts = tuple(host for row in rows for host in row if host is not None)
    return Ring(hosts, tuple(own[host] for host in hosts), replicas)


def to_keep(ring: Ring, host: str, holders: Mapping[str, Collection]) -> Collection:
    """Return the other hosts' pieces for ``host`` to keep, without its own.

    ``holders`` must be complete for the parameters of its ``wards``.

    Raises:
        LayoutError: They disagree about a tensor, or a box reaches outside of its tensor.
    """
    of_wards = [holders[ward] for ward in ring.wards(host) if ward in holders]
    names = {tensor.name for held in of_wards for tensor in held.tensors if tensor.numel}
    sources = index_sources([Holder(name, holders[name]) for name in sorted(holders)], names)
    atoms = sources.atoms.boxes
    member_atom, _ = expand(np.diff(sources.member_begin))
    held = np.zeros((len(atoms), len(sources.hosts)), dtype=bool)
    held[member_atom, sources.host_of[sources.member_holder]] = True
    patterns, pattern = np.unique(held, axis=0, return_inverse=True)
    is_kept = np.array(
        [ring.keeps(host, _named(sources.hosts, np.flatnonzero(row))) for row in patterns],
        dtype=bool,
    )
    chosen = np.flatnonzero(is_kept[pattern.reshape(-1)]) if len(atoms) else np.zeros(0, np.int64)
    # An atom stands for all tensors of its group.
    kept = [
        (number, row)
        for number, group in enumerate(sources.group.tolist())
        for row in chosen[atoms.tensor[chosen] == group].tolist()
    ]
    rows = np.array([row for _, row in kept], dtype=np.int64)
    tensor = np.array([number for number, _ in kept], dtype=np.int64)
    return Collection(sources.tensors, tensor, atoms.offset[rows], atoms.shape[rows])


def _named(hosts: tuple[str, ...], numbers: Iterable[int]) -> frozenset[str]:
    return frozenset(hosts[number] for number in numbers)


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """Bytes of one generation on a host: its own distinct pieces, and pieces kept for others.

    ``room``: capacity of its store; None: unknown.
    """

    host: str
    own: int
    kept: int
    room: int | None = None

    @property
    def replicas(self) -> int:
        """Bytes of all replicas there at once."""
        return GENERATIONS * self.kept

    @property
    def needed(self) -> int:
        """Bytes of all generations there at once."""
        return GENERATIONS * (self.own + self.kept)

    @property
    def lacks(self) -> int:
        """Bytes beyond its store's capacity; 0 if unknown."""
        return 0 if self.room is None else max(0, self.needed - self.room)

    @property
    def is_short(self) -> bool:
        """True if the generations fit, but not their replicas."""
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
) -> tuple[ReplicaMemory, ...]:
    """Return the memory of a generation on each host of a ring, in the ring's order.

    Args:
        held: Pieces of each host's workers; empty without workers.
        room: Capacity of each store in bytes, if known.

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
    # One entry for each atom and holder, by atom.
    owner, holder = np.divmod(np.unique(owner * len(ring.hosts) + holder), len(ring.hosts))
    own = np.zeros(len(ring.hosts), dtype=np.int64)
    np.add.at(own, holder, size[owner])
    begin = np.searchsorted(owner, np.arange(len(boxes) + 1)).tolist()
    sizes: dict[bytes, int] = defaultdict(int)
    """Bytes by the places of their holders."""
    for atom, each in enumerate(size.tolist()):
        sizes[holder[begin[atom] : begin[atom + 1]].tobytes()] += each
    kept = [0] * len(ring.hosts)
    for holders, each in sizes.items():
        for number in ring.keepers_of(np.frombuffer(holders, np.int64).tolist()):
            kept[number] += each
    return tuple(
        ReplicaMemory(host, int(own[number]), kept[number], room.get(host))
        for number, host in enumerate(ring.hosts)
    )


def shortage(found: Sequence[ReplicaMemory]) -> str:
    """Return the hosts without room for replicas and the way out; empty if all have room."""
    short = [memory for memory in found if memory.is_short]
    if not short:
        return ""
    more = f" and {len(short) - NAMED} more hosts" if len(short) > NAMED else ""
    return (
        f"there is no room for replicas: {'; '.join(map(str, short[:NAMED]))}{more}. Give the "
        "stores more (--store-budget-gb, --shm-size), keep fewer (--replicas) or none "
        "(--replicas 0)."
    )
