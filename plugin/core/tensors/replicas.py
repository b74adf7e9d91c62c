"""Replicas: pieces that would be lost with a host, hosts that keep them, the memory they take.

Data parallelism holds much of a state on several hosts already. The rest (shards of optimizers,
stages of pipelines, experts) is copied to other hosts, so that any ``replicas`` of them may be
lost. Hosts stand in a ring; a piece goes to the hosts behind its first holder, each in another
failure domain. Every host computes its own share from what the others hold.

Source: the placement of replicas on a ring is that of consistent hashing (Karger and others, 1997);
checkpoints in the memory of peers are Gemini's (SOSP 2023). Differs in: only what data parallelism
does not hold anyway is copied.
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
"""Generations that lie in a store at once, each with its replicas: an older one stays until there
are replicas of the newer one."""
NAMED = 5
"""Hosts named in an error."""


@dataclass(frozen=True, slots=True)
class Ring:
    """Hosts that keep replicas for each other, in order, with the failure domain of each; of every
    piece there are to be ``replicas`` beside the first one. ``is_apart``: in as many domains.

    Where hosts of it are ``giving``, they will be taken away: they keep nothing, and the others
    keep so many replicas of what only these hold, and of nothing else."""

    hosts: tuple[str, ...]
    domains: tuple[str, ...]
    replicas: int
    is_apart: bool
    giving: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.domains) != len(self.hosts):
            raise ValueError(f"{len(self.domains)} domains of {len(self.hosts)} hosts")

    def keepers(self, first: str) -> Iterator[str]:
        """Yield who keeps replicas of what ``first`` holds, best first: the hosts behind it, one of
        each further domain."""
        return (self.hosts[number] for number in self._behind(self.hosts.index(first)))

    def _behind(self, place: int) -> Iterator[int]:
        count, taken = len(self.hosts), {self.domains[place]}
        for number in range(place + 1, place + count):
            domain = self.domains[number % count]
            if domain not in taken and self.hosts[number % count] not in self.giving:
                taken.add(domain)
                yield number % count

    def wards(self, keeper: str) -> tuple[str, ...]:
        """Return the hosts of which ``keeper`` may have to keep something."""
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
        """Whether a host is to keep a replica of what these hold."""
        if host in holders or host in self.giving:
            return False
        held = [number for number, name in enumerate(self.hosts) if name in holders]
        return any(self.hosts[number] == host for number in self.keepers_of(held))

    def keepers_of(self, held: Sequence[int]) -> Iterator[int]:
        """Yield the places of the hosts that are to keep a replica of what those at the places
        ``held`` hold, which ascend."""
        taken = {self.domains[number] for number in held}
        missing = self.replicas + 1 - len(taken)
        if self.giving:
            is_elsewhere = any(self.hosts[number] not in self.giving for number in held)
            missing = 0 if is_elsewhere else self.replicas
        if held and missing > 0:
            others = (n for n in self._behind(held[0]) if self.domains[n] not in taken)
            yield from islice(others, missing)


def leaving_ring(staying: Iterable[str], giving: Iterable[str]) -> Ring:
    """Return the ring of hosts that keep what only those hold that will be taken away. Which
    domains they are of says nothing: there is no time to lose, and replicas are made anew later."""
    giving = tuple(sorted(giving))
    hosts = tuple(sorted({*staying, *giving}))
    return Ring(hosts, hosts, 1, True, giving)


def ring_of(domains: Mapping[str, str], replicas: int) -> Ring:
    """Return the ring of hosts, of each of which the failure domain is given ("": one of its own).

    Neighbours are of different domains as far as there are enough. Where there are too few domains
    for so many replicas, each host counts as one.
    """
    own = {host: f"domain {name}" if name else f"host {host}" for host, name in domains.items()}
    replicas = max(0, min(replicas, len(own) - 1))
    is_apart = len(set(own.values())) > replicas
    if not is_apart:
        own = {host: host for host in own}
    together: dict[str, list[str]] = {}
    for host in sorted(own):
        together.setdefault(own[host], []).append(host)
    rows = zip_longest(*(together[name] for name in sorted(together)))
    hosts = tuple(host for row in rows for host in row if host is not None)
    return Ring(hosts, tuple(own[host] for host in hosts), replicas, is_apart)


def to_keep(ring: Ring, host: str, holders: Mapping[str, Collection]) -> Collection:
    """Return the pieces of others that a host is to keep, without those that it has.

    Args:
        ring: The hosts.
        host: One of them.
        holders: What each host holds of the parameters of which the ``wards`` of this one hold
            anything, and of others.

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
) -> tuple[ReplicaMemory, ...]:
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
        ReplicaMemory(host, int(own[number]), kept[number], room.get(host))
        for number, host in enumerate(ring.hosts)
    )


def shortage(found: Sequence[ReplicaMemory]) -> str:
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
