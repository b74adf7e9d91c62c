"""How wanted boxes are made up of held ones: the part of a plan that replicas share."""

from dataclasses import dataclass

import numpy as np

from scalai.core.boxes import Boxes, distinct, expand, intersection, refine, self_overlapping
from scalai.core.collection import Columns
from scalai.core.sources import Sources


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
