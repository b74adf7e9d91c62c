"""Who holds a generation, and of which parameters: all that a host needs to know whom to ask for
the pieces from which it plans. The same for all hosts, and short: pieces are not in it.

``Pieces`` are what a host holds of a state, as others plan with it, and have a digest by which they
know it.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from scalai.core.jsonable import Json
from scalai.core.messages.shared import JsonText
from scalai.core.tensors.collection import MAX_NDIM, Collection, Tensor, concatenate, split_name


@dataclass(frozen=True, eq=False, slots=True)
class Pieces:
    """Pieces of a state of which all hosts have parts (``snapshot`` names it).

    ``collection`` has a row for each piece, ``fingerprint`` [rows] its content. A host that gets
    more of the state adds rows behind these.
    """

    snapshot: str
    step: int
    collection: Collection
    fingerprint: npt.NDArray[np.uint64]

    def __post_init__(self) -> None:
        self.collection.check()
        if self.fingerprint.shape != (len(self.collection),):
            shape = list(self.fingerprint.shape)
            raise ValueError(f"fingerprints of shape {shape} of {len(self.collection)} pieces")

    def __len__(self) -> int:
        return len(self.collection)

    def digest(self) -> bytes:
        """Return the SHA-256 of all of it: two equal digests are equal pieces."""
        table = [[each.name, list(each.shape), each.dtype] for each in self.collection.tensors]
        head = [self.snapshot, self.step, len(self), table]
        found = hashlib.sha256(json.dumps(head).encode())
        held = self.collection
        for column in (held.tensor, held.offset, held.shape):
            found.update(column.astype("<i8").tobytes())
        found.update(self.fingerprint.astype("<u8").tobytes())
        return found.digest()


@dataclass(frozen=True, slots=True)
class Reference:
    """Names a host's pieces: the first ``rows`` of what it has, with their digest, in hex."""

    rows: int
    digest: str


def used_only(collection: Collection) -> Collection:
    """Return the same rows over a table of the tensors that they are of, in order of first use."""
    numbers, first = np.unique(collection.tensor, return_index=True)
    order = np.argsort(first)
    place = np.zeros(len(collection.tensors), dtype=np.int64)
    place[numbers[order]] = np.arange(len(order))
    tensors = tuple(collection.tensors[number] for number in numbers[order].tolist())
    renumbered = place[collection.tensor] if len(collection) else collection.tensor
    return Collection(tensors, renumbered, collection.offset, collection.shape)


def merged(collection: Collection) -> Collection:
    """Return boxes that hold the same elements, fewer of them: boxes that touch on a whole face are
    one, axis by axis from the last. What overlaps stays apart."""
    tensor, offset, shape = collection.tensor, collection.offset, collection.shape
    for axis in reversed(range(MAX_NDIM)):
        if len(tensor) < 2 or not (offset[:, axis].any() or (shape[:, axis] != 1).any()):
            continue
        others = [a for a in range(MAX_NDIM) if a != axis]
        keys = np.column_stack([tensor, offset[:, others], shape[:, others]])
        order = np.lexsort((offset[:, axis], *keys.T[::-1]))
        keys, tensor, offset, shape = keys[order], tensor[order], offset[order], shape[order]
        ends = offset[:-1, axis] + shape[:-1, axis]
        touches = (keys[1:] == keys[:-1]).all(axis=1) & (offset[1:, axis] == ends)
        begins = np.flatnonzero(np.concatenate([[True], ~touches]))
        sizes = np.add.reduceat(shape[:, axis], begins)
        tensor, offset, shape = tensor[begins], offset[begins], shape[begins].copy()
        shape[:, axis] = sizes
    return Collection(collection.tensors, tensor, offset, shape)


def held_together(held: Sequence[Collection]) -> Collection:
    """Return what the ranks of a host hold together: each element once, where boxes are equal or
    apart, in as few rows as there can be."""
    rows = concatenate(held)
    columns = np.column_stack([rows.tensor, rows.offset, rows.shape])
    _, first = np.unique(columns, axis=0, return_index=True)
    return merged(used_only(rows.select(np.sort(first))))


DIGEST_BYTES = 32


@dataclass(frozen=True, eq=False, slots=True)
class SourceList:
    """The hosts that hold parts of a generation.

    Attributes:
        hosts: Sorted.
        addresses: Where the data plane of each listens, [hosts].
        rows: How many pieces each has, [hosts].
        digests: Their digests, one behind the other, [hosts * DIGEST_BYTES].
        parameters: Names of all parameters of which anything is held.
        holds: By host one bit for each parameter, in whole bytes, first bit highest
            (``numpy.packbits``).
        empty: Tensors that have no elements: nobody has a piece of them.
        about: How the state came to be, as a manifest says it.
        scalars: What is no tensor, of all hosts.
        rank_states: By coordinate which of ``hosts`` has the state of that rank; none, where some
            are missing or the degrees are others now: then all ranks begin new ones.
    """

    generation: int
    step: int
    hosts: tuple[str, ...]
    addresses: tuple[tuple[str, int], ...]
    rows: tuple[int, ...]
    digests: bytes
    parameters: tuple[str, ...]
    holds: bytes
    empty: tuple[Tensor, ...]
    about: JsonText
    scalars: JsonText
    rank_states: Mapping[str, int]

    def __post_init__(self) -> None:
        count, width = len(self.hosts), -(-len(self.parameters) // 8)
        found = (len(self.addresses), len(self.rows), len(self.digests), len(self.holds))
        if found != (count, count, count * DIGEST_BYTES, count * width):
            raise ValueError(f"columns of {found} values of {count} hosts")
        if any(not 0 <= number < count for number in self.rank_states.values()):
            raise ValueError(f"the state of a rank is on no host of {count}")

    def __len__(self) -> int:
        return len(self.hosts)

    def reference(self, number: int) -> Reference:
        """Return what names the pieces of host ``number``."""
        digest = self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        return Reference(self.rows[number], digest.hex())

    def holders(self, names: Iterable[str]) -> list[int]:
        """Return the numbers of the hosts that hold anything of the parameters of these tensors."""
        wanted = {split_name(name)[1] for name in names}
        chosen = np.array([name in wanted for name in self.parameters], dtype=bool)
        found: list[int] = np.flatnonzero((self._bits() & np.packbits(chosen)).any(axis=1)).tolist()
        return found

    def sharers(self, hosts: Iterable[str]) -> list[int]:
        """Return the numbers of these hosts, and of those that hold anything of the parameters of
        which these hold anything."""
        bits, wanted = self._bits(), set(hosts)
        is_one = np.array([host in wanted for host in self.hosts], dtype=bool)
        chosen = np.bitwise_or.reduce(bits[is_one], axis=0)
        found: list[int] = np.flatnonzero(is_one | (bits & chosen).any(axis=1)).tolist()
        return found

    def only(self, numbers: Sequence[int]) -> "SourceList":
        """Return the list of these hosts alone; states of ranks that others have are left out."""
        place = {number: at for at, number in enumerate(numbers)}
        digests = (self.digests[n * DIGEST_BYTES : (n + 1) * DIGEST_BYTES] for n in numbers)
        states = {name: place[n] for name, n in self.rank_states.items() if n in place}
        return replace(
            self,
            hosts=tuple(self.hosts[n] for n in numbers),
            addresses=tuple(self.addresses[n] for n in numbers),
            rows=tuple(self.rows[n] for n in numbers),
            digests=b"".join(digests),
            holds=self._bits()[list(numbers)].tobytes(),
            rank_states=states,
        )

    def _bits(self) -> npt.NDArray[np.uint8]:
        """Return ``holds`` as a row of bytes for each host."""
        width = -(-len(self.parameters) // 8)
        return np.frombuffer(self.holds, np.uint8).reshape(len(self), width)


@dataclass(frozen=True, slots=True)
class Listed:
    """One host of a source list."""

    host: str
    address: tuple[str, int]
    reference: Reference
    tensors: Sequence[Tensor]
    coordinates: Iterable[str]


def source_list(
    listed: Sequence[Listed],
    *,
    generation: int,
    step: int,
    about: Mapping[str, Json],
    scalars: Mapping[str, Json],
    ranks: int,
) -> SourceList:
    """Return the list of these hosts, which must be sorted by name; ``ranks``: of so many the
    states are of use, if all are there."""
    numbers: dict[str, int] = {}
    held = []
    for each in listed:
        names = {split_name(tensor.name)[1] for tensor in each.tensors if tensor.numel}
        held.append([numbers.setdefault(name, len(numbers)) for name in sorted(names)])
    bits = np.zeros((len(listed), len(numbers)), dtype=bool)
    for row, chosen in zip(bits, held, strict=True):
        row[chosen] = True
    empty = {t.name: t for each in listed for t in each.tensors if not t.numel}
    where = {name: number for number, each in enumerate(listed) for name in each.coordinates}
    return SourceList(
        generation=generation,
        step=step,
        hosts=tuple(each.host for each in listed),
        addresses=tuple(each.address for each in listed),
        rows=tuple(each.reference.rows for each in listed),
        digests=b"".join(bytes.fromhex(each.reference.digest) for each in listed),
        parameters=tuple(numbers),
        holds=np.packbits(bits, axis=1).tobytes(),
        empty=tuple(empty.values()),
        about=JsonText.of(dict(about)),
        scalars=JsonText.of(dict(scalars)),
        rank_states=where if ranks and len(where) == ranks else {},
    )
