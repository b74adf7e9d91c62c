"""An index of what all holders hold, made once and asked for every host of the new generation.

Masters and moments of a parameter are cut alike, so the geometry is kept once for each group of
tensors that have one parameter and equal boxes at equal holders.

``solve`` says how wanted boxes are made up of held ones: the part of a plan that replicas share.
"""

from collections.abc import Collection as Names
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalai.core.errors import LayoutError
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
from scalai.core.tensors.collection import MAX_NDIM, Collection, Columns, Tensor, split_name


@dataclass(frozen=True, eq=False, slots=True)
class Holder:
    """A collection and its host: what is stored there, or what a rank there wants."""

    host: str
    collection: Collection
    rank: int = -1


@dataclass(frozen=True, eq=False, slots=True)
class Sources:
    """The pieces of all holders. An *entry* is one row of one holder; a tensor's lie together.

    Attributes:
        tensors: All tensors that are held.
        number: Which of ``tensors`` a name is.
        hosts: The holders' hosts, each once, sorted.
        host_of: Which of ``hosts`` a holder is on, [holders].
        holder, row: Which row of which holder an entry is, [entries].
        begin: First entry of a tensor, [tensors].
        group: Which group a tensor is of, [tensors].
        line: The groups on a number line.
        atoms: The distinct boxes of the groups, split where they overlap.
        member_begin: First member of an atom, [atoms + 1].
        member: Entries that contain an atom, counted from the tensor's first, [members].
        member_holder: The holder of each, [members].
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
    """Rows of all holders as columns, ordered by tensor, holder and box."""

    tensor: Columns
    holder: Columns
    row: Columns
    offset: Columns
    shape: Columns
    low: Columns
    high: Columns


def index_sources(source: Sequence[Holder], names: Names[str] | None = None) -> Sources:
    """Index what ``source`` holds; of all tensors, or only of those named.

    Raises:
        LayoutError: A name stands for tensors of different shape or dtype, or a box reaches outside
            of its tensor.
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

    # Atoms of a box, and entries that have this box, give the entries that contain an atom.
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
    """Gather the rows of all holders that are of the named tensors and not empty."""
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
    """Return the group of each tensor and, of each group, its first tensor."""
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
    """Fragments, each inside one held atom, and which of them each wanted box is copied from.

    Attributes:
        boxes: The fragments; disjoint.
        numel: Their elements, [fragments].
        want: A wanted row that contains each, [fragments].
        member_begin: First of the members of each, [fragments + 1].
        member: Rows of the sources' member columns that contain each fragment, [members].
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

    Wanted boxes that nobody holds, or only in part, have too few copies: ``shortfall`` tells.
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
    """Return how many elements of every wanted row no copy writes, [wants]."""
    written = np.zeros(len(wants), dtype=np.int64)
    np.add.at(written, geometry.copy_want, geometry.numel[geometry.copy_fragment])
    return np.asarray(wants.numel() - written, dtype=np.int64)


def check(geometry: Geometry, sources: Sources, wants: Boxes) -> None:
    """Assert that fragments are disjoint and inside of what is held and of what is wanted."""
    assert not len(self_overlapping(geometry.boxes)[0]), "fragments overlap"
    counts = geometry.member_begin[1:] - geometry.member_begin[:-1]
    assert bool((counts > 0).all()), "a fragment without a holder"
    owner = np.repeat(np.arange(len(counts)), counts)
    held = sources.member_boxes.select(geometry.member)
    assert _inside(geometry.boxes.select(owner), held), "a fragment outside of what is held"
    copied = geometry.boxes.select(geometry.copy_fragment)
    assert _inside(copied, wants.select(geometry.copy_want)), "a copy outside of what is wanted"


def _inside(inner: Boxes, outer: Boxes) -> bool:
    """Is every row of ``inner`` part of the same row of ``outer``?"""
    low = outer.offset <= inner.offset
    high = inner.offset + inner.shape <= outer.offset + outer.shape
    return bool((inner.tensor == outer.tensor).all() and low.all() and high.all())
