"""Index of all holders' pieces: made once, used for every host of a new generation.

Masters and moments of a parameter are cut alike: the geometry is kept once for a group of tensors
with one parameter and equal boxes at equal holders. ``solve`` composes wanted boxes of held ones:
this part of a plan is the same for replicas.

``SourceList`` has the hosts of a generation and their parameters. It is short and the same for all
hosts, without pieces. ``Pieces`` are one host's pieces of a state, with a digest as their name.
"""

import hashlib
import json
from collections.abc import Collection as Names
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from scalai.core.errors import LayoutError
from scalai.core.jsonable import Json
from scalai.core.messages.shared import JsonText
from scalai.core.tensors.boxes import (
    Boxes,
    Index,
    NumberLine,
    check_inside,
    distinct,
    expand,
    intersection,
    refine,
    self_overlapping,
)
from scalai.core.tensors.collection import (
    MAX_NDIM,
    Collection,
    Columns,
    Tensor,
    concatenate,
    split_name,
)

DIGEST_BYTES = 32


@dataclass(frozen=True, eq=False, slots=True)
class Holder:
    """A collection and its host: pieces stored there, or wanted by a rank there."""

    host: str
    collection: Collection
    rank: int = -1


@dataclass(frozen=True, eq=False, slots=True)
class Sources:
    """The pieces of all holders. An *entry* is one row of one holder; a tensor's lie together.

    Attributes:
        tensors: All held tensors.
        number: Index in ``tensors`` by name.
        hosts: The holders' hosts, each once, sorted.
        host_of: Index in ``hosts`` of a holder, [holders].
        holder, row: Holder and row of an entry, [entries].
        begin: First entry of a tensor, [tensors].
        group: Group of a tensor, [tensors].
        line: The groups on a number line.
        atoms: Distinct boxes of the groups, split at overlaps.
        member_begin: First member of an atom, [atoms + 1].
        member: Entries around an atom, counted from the tensor's first, [members].
        member_holder: Holder of each, [members].
        member_boxes: Their whole boxes, [members].
    """

    tensors: tuple[Tensor, ...]
    number: dict[str, int]
    hosts: tuple[str, ...]
    host_of: Columns
    holder: Columns
    row: Columns
    begin: Columns
    group: Columns
    line: NumberLine
    atoms: Index
    member_begin: Columns
    member: Columns
    member_holder: Columns
    member_boxes: Boxes


@dataclass(frozen=True, eq=False, slots=True)
class _Entries:
    """Rows of all holders, ordered by tensor, holder and box."""

    tensor: Columns
    holder: Columns
    row: Columns
    offset: Columns
    shape: Columns
    low: Columns
    high: Columns


def index_sources(source: Sequence[Holder], names: Names[str] | None = None) -> Sources:
    """Index the pieces of ``source``; of all tensors, or only of ``names``.

    Raises:
        LayoutError: A name has tensors of different shape or dtype, or a box reaches outside of its
            tensor.
    """
    tensors, entries = _collect(source, names)
    begin = np.searchsorted(entries.tensor, np.arange(len(tensors) + 1))
    group, chosen = _group(tensors, entries, begin)
    line = NumberLine.of([tensors[number] for number in chosen])

    counts = begin[1:][chosen] - begin[:-1][chosen]
    owner, position = expand(counts)
    entry = begin[:-1][chosen][owner] + position
    boxes = line.place(owner, entries.offset[entry], entries.shape[entry])
    first, which = distinct(boxes)
    atoms, atom_of, box_of = refine(line, boxes.select(first))

    # Atoms of a box, and entries with this box, give the entries around an atom.
    by_box = np.argsort(which, kind="stable")
    box_begin = np.searchsorted(which[by_box], np.arange(len(first) + 1))
    pair, place = expand((box_begin[1:] - box_begin[:-1])[box_of])
    member = by_box[box_begin[:-1][box_of][pair] + place]
    hosts = tuple(sorted({holder.host for holder in source}))
    return Sources(
        tensors=tensors,
        number={tensor.name: number for number, tensor in enumerate(tensors)},
        hosts=hosts,
        host_of=np.array([hosts.index(holder.host) for holder in source], dtype=np.int64),
        holder=entries.holder,
        row=entries.row,
        begin=begin[:-1],
        group=group,
        line=line,
        atoms=Index.of(atoms),
        member_begin=np.searchsorted(atom_of[pair], np.arange(len(atoms) + 1)),
        member=position[member],
        member_holder=entries.holder[entry][member],
        member_boxes=boxes.select(member),
    )


def _collect(
    source: Sequence[Holder], names: Names[str] | None
) -> tuple[tuple[Tensor, ...], _Entries]:
    number: dict[str, int] = {}
    tensors: list[Tensor] = []
    columns = [np.zeros(0, np.int64)]
    for holder in source:
        renumber = np.empty(len(holder.collection.tensors), dtype=np.int64)
        for place, tensor in enumerate(holder.collection.tensors):
            if names is not None and tensor.name not in names:
                renumber[place] = -1
                continue
            known = number.setdefault(tensor.name, len(tensors))
            renumber[place] = known
            if known == len(tensors):
                tensors.append(tensor)
            elif tensors[known] != tensor:
                raise LayoutError(
                    f"{tensor.name!r} is {tensors[known].dtype}{list(tensors[known].shape)} on one "
                    f"holder and {tensor.dtype}{list(tensor.shape)} on host {holder.host!r}. "
                    "Take the pieces of one generation."
                )
        columns.append(renumber[holder.collection.tensor])
    # By parameter, so that the order, and with it every choice, is the same for any selection.
    by_name = sorted(range(len(tensors)), key=lambda place: split_name(tensors[place].name)[::-1])
    rank_of = np.empty(len(tensors) + 1, dtype=np.int64)
    rank_of[by_name], rank_of[-1] = np.arange(len(tensors)), -1
    tensors = [tensors[place] for place in by_name]
    tensor_of = rank_of[np.concatenate(columns)]
    counts = np.array([len(holder.collection) for holder in source], dtype=np.int64)
    holder_of, row = expand(counts)
    none = np.zeros((0, MAX_NDIM), np.int64)
    offset = np.concatenate([none, *(holder.collection.offset for holder in source)])
    shape = np.concatenate([none, *(holder.collection.shape for holder in source)])

    keep = np.flatnonzero((tensor_of >= 0) & (shape.prod(axis=1) != 0))
    tensor_of, holder_of, row = tensor_of[keep], holder_of[keep], row[keep]
    offset, shape = offset[keep], shape[keep]
    line = NumberLine.of(tensors)
    check_inside(tensors, line.shape, tensor_of, offset, shape)
    boxes = line.place(tensor_of, offset, shape)
    low, high = boxes.low - line.start[tensor_of], boxes.high - line.start[tensor_of]
    order = np.lexsort((high, low, holder_of, tensor_of))
    return tuple(tensors), _Entries(
        *(column[order] for column in (tensor_of, holder_of, row, offset, shape, low, high))
    )


def _group(tensors: Sequence[Tensor], entries: _Entries, begin: Columns) -> tuple[Columns, Columns]:
    """Return the group of each tensor, and the first tensor of each group."""
    cut = np.stack([entries.holder, entries.low, entries.high], axis=1)
    groups: dict[tuple[str, tuple[int, ...], bytes], int] = {}
    group = np.empty(len(tensors), dtype=np.int64)
    chosen: list[int] = []
    for number, tensor in enumerate(tensors):
        key = (
            split_name(tensor.name)[1],
            tensor.shape,
            cut[begin[number] : begin[number + 1]].tobytes(),
        )
        group[number] = groups.setdefault(key, len(groups))
        if group[number] == len(chosen):
            chosen.append(number)
    return group, np.array(chosen, dtype=np.int64)


@dataclass(frozen=True, eq=False, slots=True)
class Geometry:
    """Fragments, each inside one held atom, and the copies from them to wanted boxes.

    Attributes:
        boxes: The disjoint fragments.
        numel: Elements of each, [fragments].
        want: A wanted row around each, [fragments].
        member_begin: First member of each, [fragments + 1].
        member: Rows of the sources' member columns around each fragment, [members].
        copy_want, copy_fragment: The copies, ordered by wanted row, [copies].
    """

    boxes: Boxes
    numel: Columns
    want: Columns
    member_begin: Columns
    member: Columns
    copy_want: Columns
    copy_fragment: Columns


def solve(sources: Sources, wants: Boxes) -> Geometry:
    """Cut wanted boxes (of groups, on the sources' number line) into fragments and list the copies.

    Boxes not held in full get too few copies: ``shortfall`` counts the missing elements.
    """
    first, which = distinct(wants)
    unique = wants.select(first)
    want_atoms, atom_of, unique_of = refine(sources.line, unique)
    atom, held = sources.atoms.overlapping(want_atoms)
    held_atoms = sources.atoms.boxes.select(held)
    boxes = sources.line.place(
        held_atoms.tensor, *intersection(want_atoms.select(atom), held_atoms)
    )

    # A distinct wanted box has atoms, an atom has fragments: list the fragments of every distinct
    # box.
    begin = np.searchsorted(atom, np.arange(len(want_atoms) + 1))
    pair, place = expand((begin[1:] - begin[:-1])[atom_of])
    fragment, of_unique = begin[:-1][atom_of[pair]] + place, unique_of[pair]
    order = np.lexsort((fragment, of_unique))
    fragment, of_unique = fragment[order], of_unique[order]

    # Equal wanted boxes copy from the same fragments.
    begin = np.searchsorted(of_unique, np.arange(len(unique) + 1))
    copy_want, place = expand((begin[1:] - begin[:-1])[which])
    copy_fragment = fragment[begin[:-1][which[copy_want]] + place]

    want = np.zeros(len(boxes), dtype=np.int64)
    want[fragment] = first[of_unique]
    counts = (sources.member_begin[1:] - sources.member_begin[:-1])[held]
    owner, place = expand(counts)
    return Geometry(
        boxes=boxes,
        numel=boxes.numel(),
        want=want,
        member_begin=np.concatenate([[0], np.cumsum(counts)]),
        member=sources.member_begin[:-1][held][owner] + place,
        copy_want=copy_want,
        copy_fragment=copy_fragment,
    )


def shortfall(geometry: Geometry, wants: Boxes) -> Columns:
    """Return the number of unwritten elements of every wanted row, [wants]."""
    written = np.zeros(len(wants), dtype=np.int64)
    np.add.at(written, geometry.copy_want, geometry.numel[geometry.copy_fragment])
    return np.asarray(wants.numel() - written, dtype=np.int64)


def check(geometry: Geometry, sources: Sources, wants: Boxes) -> None:
    """Assert disjoint fragments inside of held boxes, and copies inside of wanted boxes."""
    assert not len(self_overlapping(geometry.boxes)[0]), "fragments overlap"
    counts = geometry.member_begin[1:] - geometry.member_begin[:-1]
    assert bool((counts > 0).all()), "a fragment without a holder"
    owner = np.repeat(np.arange(len(counts)), counts)
    held = sources.member_boxes.select(geometry.member)
    assert _inside(geometry.boxes.select(owner), held), "a fragment outside of what is held"
    copied = geometry.boxes.select(geometry.copy_fragment)
    assert _inside(copied, wants.select(geometry.copy_want)), "a copy outside of what is wanted"


def _inside(inner: Boxes, outer: Boxes) -> bool:
    low = outer.offset <= inner.offset
    high = inner.offset + inner.shape <= outer.offset + outer.shape
    return bool((inner.tensor == outer.tensor).all() and low.all() and high.all())


@dataclass(frozen=True, eq=False, slots=True)
class Pieces:
    """One host's pieces of a state; ``snapshot`` names the state.

    ``collection`` has a row for each piece, ``fingerprint`` [rows] its content. Pieces acquired
    later are added as rows behind these.
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
        """Return the SHA-256 of all values: two equal digests are equal pieces."""
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
    """The name of a host's pieces: its first ``rows`` pieces, with their digest in hex."""

    rows: int
    digest: str


def used_only(collection: Collection) -> Collection:
    """Return the same rows over a table of their tensors alone, in order of first use."""
    numbers, first = np.unique(collection.tensor, return_index=True)
    order = np.argsort(first)
    place = np.zeros(len(collection.tensors), dtype=np.int64)
    place[numbers[order]] = np.arange(len(order))
    tensors = tuple(collection.tensors[number] for number in numbers[order].tolist())
    renumbered = place[collection.tensor] if len(collection) else collection.tensor
    return Collection(tensors, renumbered, collection.offset, collection.shape)


def merged(collection: Collection) -> Collection:
    """Return fewer boxes with the same elements: boxes touching on a whole face become one, axis by
    axis from the last.

    Overlapping boxes stay apart.
    """
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
    """Return the pieces of a host's ranks in few rows; each element once if boxes are equal or
    apart.
    """
    rows = concatenate(held)
    columns = np.column_stack([rows.tensor, rows.offset, rows.shape])
    _, first = np.unique(columns, axis=0, return_index=True)
    return merged(used_only(rows.select(np.sort(first))))


@dataclass(frozen=True, eq=False, slots=True)
class SourceList:
    """The hosts with parts of a generation.

    Attributes:
        hosts: Names, sorted.
        addresses: Data plane address of each, [hosts].
        rows: Number of pieces of each, [hosts].
        digests: Their digests, concatenated, [hosts * DIGEST_BYTES].
        parameters: Names of all held parameters.
        holds: By host one bit for each parameter, in whole bytes, first bit highest
            (``numpy.packbits``).
        empty: Tensors without elements, hence without pieces.
        about: Origin of the state, as in a manifest.
        scalars: Values other than tensors, of all hosts.
        rank_states: Index in ``hosts`` of each rank's state, by coordinate; empty if some are
            missing or the degrees have changed: then all ranks begin new ones.
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
        """Return the reference of host ``number``'s pieces."""
        digest = self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        return Reference(self.rows[number], digest.hex())

    def holders(self, names: Iterable[str]) -> list[int]:
        """Return the indices of hosts with any part of these tensors' parameters."""
        wanted = {split_name(name)[1] for name in names}
        chosen = np.array([name in wanted for name in self.parameters], dtype=bool)
        found: list[int] = np.flatnonzero((self._bits() & np.packbits(chosen)).any(axis=1)).tolist()
        return found

    def sharers(self, hosts: Iterable[str]) -> list[int]:
        """Return the indices of these hosts, and of all holders of any of their parameters."""
        bits, wanted = self._bits(), set(hosts)
        is_one = np.array([host in wanted for host in self.hosts], dtype=bool)
        chosen = np.bitwise_or.reduce(bits[is_one], axis=0)
        found: list[int] = np.flatnonzero(is_one | (bits & chosen).any(axis=1)).tolist()
        return found

    def only(self, numbers: Sequence[int]) -> "SourceList":
        """Return the list of these hosts alone, without other hosts' states of ranks."""
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
    """Return the list of these hosts, sorted by name.

    ``ranks``: number of states of ranks needed; with fewer, none is listed.
    """
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
