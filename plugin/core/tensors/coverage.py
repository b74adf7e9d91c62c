"""Completeness of a state: every element of every tensor has a holder.

Checked for the snapshots of a drain, after a failure, and for a checkpoint before its use.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scalai.core.errors import LayoutError
from scalai.core.tensors.boxes import (
    NumberLine,
    check_inside,
    distinct,
    refine,
    self_overlapping,
    uncovered,
    without,
)
from scalai.core.tensors.collection import MAX_NDIM, Collection, Tensor
from scalai.core.tensors.region import Box, box_text, whole

NAMED = 5
"""Tensors, and boxes of each, named in an error."""


def find_gaps(collection: Collection) -> list[tuple[Tensor, Box]]:
    """Return the unheld boxes of all tensors in the collection's table, in its order.

    Raises:
        LayoutError: A box reaches outside of its tensor.
    """
    line = NumberLine.of(collection.tensors)
    columns = (collection.tensor, collection.offset, collection.shape)
    check_inside(collection.tensors, line.shape, *columns)
    rows = np.flatnonzero(collection.numel())
    boxes = line.place(collection.tensor[rows], collection.offset[rows], collection.shape[rows])
    boxes = boxes.select(distinct(boxes)[0])
    atoms, _, _ = refine(line, boxes)
    held = np.zeros(len(collection.tensors), dtype=np.int64)
    np.add.at(held, atoms.tensor, atoms.numel())
    gaps: list[tuple[Tensor, Box]] = []
    for number, tensor in enumerate(collection.tensors):
        if held[number] == tensor.numel:
            continue
        skip = MAX_NDIM - len(tensor.shape)
        holders = [
            Box(tuple(atoms.offset[row, skip:].tolist()), tuple(atoms.shape[row, skip:].tolist()))
            for row in np.flatnonzero(atoms.tensor == number)
        ]
        gaps.extend((tensor, gap) for gap in uncovered(whole(tensor.shape), holders))
    return gaps


def find_overlaps(collection: Collection) -> list[tuple[Tensor, Box, Box]]:
    """Return the pairs of unequal boxes with common elements. Equal boxes are replicas."""
    rows = np.flatnonzero(collection.numel())
    line = NumberLine.of(collection.tensors)
    boxes = line.place(collection.tensor[rows], collection.offset[rows], collection.shape[rows])
    first = rows[distinct(boxes)[0]]
    one, two = self_overlapping(boxes.select(distinct(boxes)[0]))
    pairs = []
    for left, right in zip(first[one].tolist(), first[two].tolist(), strict=True):
        tensor, box = collection.box(left)
        pairs.append((tensor, box, collection.box(right)[1]))
    return pairs


class Cover:
    """Pieces of one state held by hosts together; hosts come and go.

    Only tensors with a removed box are searched again; further hosts shrink the known gaps of the
    others.
    """

    def __init__(self) -> None:
        self._hosts: dict[str, tuple[Collection, int]] = {}
        self._expected = Counter[int]()
        """Number of hosts for each stated number of tensors of the state."""
        self._forget_boxes()

    def _forget_boxes(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._holders: dict[str, int] = {}
        """Number of hosts with a tensor."""
        self._boxes: dict[str, dict[bytes, int]] = {}
        """Distinct boxes by tensor, and the number of their hosts."""
        self._held: dict[str, int] = {}
        """Elements of a tensor's distinct boxes."""
        self._missing: dict[str, list[Box]] = {}
        """Known gaps by tensor."""
        self._unknown: set[str] = set()
        """Tensors with unknown gaps."""
        self._has_conflict = False

    def put(self, host: str, pieces: Collection, tensors: int) -> None:
        """Set a host's pieces, of a state of this many ``tensors``."""
        before = self._hosts.get(host)
        self._hosts[host] = pieces, tensors
        self._expected[tensors] += 1
        self._count(pieces)
        if before is not None:
            self._forget_expected(before[1])
            self._discount(before[0], pieces)

    def remove(self, host: str) -> None:
        """Remove a host's pieces."""
        if host in self._hosts:
            held, tensors = self._hosts.pop(host)
            self._forget_expected(tensors)
            self._discount(held)

    def is_whole(self) -> bool:
        """Return True if every element of every tensor is held."""
        expected = max(self._expected, default=0)
        if self._has_conflict or not self._hosts or len(self._tensors) != expected:
            return False
        if self._missing or any(self._is_short(name) for name in self._unknown):
            return False
        boxes = {name: self._boxes[name].keys() for name in self._unknown}
        for name in self._overlapping(boxes):
            gaps = self._gaps(name, boxes[name])
            if gaps:
                self._missing[name] = gaps
        # Boxes without overlaps and with as many elements as the tensor are all of it.
        self._unknown.clear()
        return not self._missing

    def is_whole_without(self, host: str) -> bool:
        """Return True if the state is whole without this host."""
        if host not in self._hosts:
            return self.is_whole()
        if not self.is_whole():  # it may be the one that disagrees, or knows of more tensors
            rest = Cover()
            for name, (held, tensors) in self._hosts.items():
                if name != host:
                    rest.put(name, held, tensors)
            return rest.is_whole()
        pieces, _ = self._hosts[host]
        if any(self._holders[tensor.name] == 1 for tensor in pieces.tensors):
            return False
        left: dict[str, set[bytes]] = {}
        for _, name, key, size in _boxes(pieces):
            if size and self._boxes[name][key] == 1:
                left.setdefault(name, set(self._boxes[name])).discard(key)
        return not any(self._gaps(name, keys) for name, keys in left.items())

    def _is_short(self, name: str) -> bool:
        return self._held[name] < self._tensors[name].numel

    def _count(self, pieces: Collection) -> None:
        for tensor in pieces.tensors:
            name = tensor.name
            self._has_conflict |= self._tensors.setdefault(name, tensor) != tensor
            self._holders[name] = self._holders.get(name, 0) + 1
            if self._holders[name] == 1:
                self._boxes[name], self._held[name] = {}, 0
                self._unknown.add(name)
        for row, name, key, size in _boxes(pieces):
            known = self._boxes[name]
            known[key] = known.get(key, 0) + 1
            if known[key] > 1:
                continue
            self._held[name] += size
            if name in self._missing and not self._has_conflict:
                box = pieces.box(row)[1]
                self._missing[name] = [p for gap in self._missing[name] for p in without(gap, box)]
                if not self._missing[name]:
                    del self._missing[name]

    def _forget_expected(self, tensors: int) -> None:
        self._expected[tensors] -= 1
        if not self._expected[tensors]:
            del self._expected[tensors]

    def _discount(self, pieces: Collection, instead: Collection | None = None) -> None:
        """Remove a host's old pieces; ``instead``: its new ones. Boxes within those leave no
        gap.
        """
        if self._has_conflict:
            self._forget_boxes()
            for held, _ in self._hosts.values():
                self._count(held)
            return
        left: dict[str, npt.NDArray[np.int64]] = {}
        for _, name, key, size in _boxes(pieces):
            self._boxes[name][key] -= 1
            if not self._boxes[name][key]:
                del self._boxes[name][key]
                self._held[name] -= size
                if instead is not None and name not in left:
                    left[name] = _boxes_of(instead, name)
                if instead is None or not _lies_within(key, left[name]):
                    self._missing.pop(name, None)
                    self._unknown.add(name)
        for tensor in pieces.tensors:
            name = tensor.name
            self._holders[name] -= 1
            if not self._holders[name]:
                del self._holders[name], self._tensors[name], self._boxes[name], self._held[name]
                self._missing.pop(name, None)
                self._unknown.discard(name)

    def _overlapping(self, boxes: Mapping[str, Iterable[bytes]]) -> list[str]:
        rows = [(number, key) for number, keys in enumerate(boxes.values()) for key in keys]
        if not rows:
            return []
        names = list(boxes)
        columns = np.frombuffer(b"".join(key for _, key in rows), np.int64)
        offset, shape = columns.reshape(len(rows), 2, MAX_NDIM).swapaxes(0, 1)
        number = np.array([number for number, _ in rows], dtype=np.int64)
        some = np.flatnonzero(shape.prod(axis=1))
        line = NumberLine.of([self._tensors[name] for name in names])
        one, _ = self_overlapping(line.place(number[some], offset[some], shape[some]))
        return [names[each] for each in np.unique(number[some][one]).tolist()]

    def _gaps(self, name: str, keys: Iterable[bytes]) -> list[Box]:
        """The largest boxes come first: they leave little for the others."""
        tensor = self._tensors[name]
        gaps, skip = [whole(tensor.shape)] if tensor.numel else [], MAX_NDIM - len(tensor.shape)
        columns = np.frombuffer(b"".join(keys), np.int64).reshape(-1, 2, MAX_NDIM)
        order = np.argsort(-columns[:, 1].prod(axis=1), kind="stable")
        for offset, shape in columns[order][:, :, skip:].tolist():
            gaps = [p for gap in gaps for p in without(gap, Box(tuple(offset), tuple(shape)))]
            if not gaps:
                break
        return gaps


def _boxes_of(pieces: Collection, name: str) -> npt.NDArray[np.int64]:
    """Return a tensor's boxes, [boxes, 2, MAX_NDIM]: offset and shape."""
    number = next((n for n, tensor in enumerate(pieces.tensors) if tensor.name == name), -1)
    rows = np.flatnonzero(pieces.tensor == number)
    boxes = np.empty((len(rows), 2, MAX_NDIM), dtype=np.int64)
    boxes[:, 0], boxes[:, 1] = pieces.offset[rows], pieces.shape[rows]
    return boxes


def _lies_within(key: bytes, boxes: npt.NDArray[np.int64]) -> bool:
    offset, shape = np.frombuffer(key, np.int64).reshape(2, MAX_NDIM)
    begins, ends = boxes[:, 0], boxes[:, 0] + boxes[:, 1]
    return bool(((begins <= offset) & (offset + shape <= ends)).all(axis=1).any())


def _boxes(pieces: Collection) -> Iterator[tuple[int, str, bytes, int]]:
    """Yield each distinct box: one of its rows, its tensor, its key, its elements."""
    names = [pieces.tensors[number].name for number in pieces.tensor.tolist()]
    rows = {each: row for row, each in enumerate(zip(names, pieces.keys(), strict=True))}
    sizes = pieces.numel().tolist()
    for (name, key), row in rows.items():
        yield row, name, key, sizes[row]


def check_coverage(collection: Collection, *, exact_partition: bool = True) -> None:
    """Raise ``LayoutError`` unless every element of every tensor of the table is held.

    ``exact_partition`` also refuses unequal overlapping boxes: fingerprints of tensors need every
    element once in distinct boxes.
    """
    gaps = find_gaps(collection)
    if gaps:
        missing = [(tensor, f"nobody holds {box_text(box)}") for tensor, box in gaps]
        raise LayoutError(
            f"the state is not whole: {_named(missing)}. "
            "Use a generation of which every holder is there, or an older one."
        )
    overlaps = find_overlaps(collection) if exact_partition else []
    if overlaps:
        found = [(t, f"{box_text(a)} overlaps {box_text(b)}") for t, a, b in overlaps]
        raise LayoutError(
            f"shards overlap without being replicas: {_named(found)}. "
            "They were described wrongly or come from two layouts; take the shards of one of them."
        )


def _named(found: Sequence[tuple[Tensor, str]]) -> str:
    by_name: dict[str, list[str]] = {}
    for tensor, what in found:
        by_name.setdefault(f"{tensor.name!r} {list(tensor.shape)}", []).append(what)
    parts = [
        f"{name}: {', '.join(what[:NAMED])}{_more(len(what), 'boxes')}"
        for name, what in list(by_name.items())[:NAMED]
    ]
    return "; ".join(parts) + _more(len(by_name), "tensors")


def _more(count: int, what: str) -> str:
    return f" and {count - NAMED} more {what}" if count > NAMED else ""


@dataclass(frozen=True, slots=True)
class DamagedPiece:
    """A damaged box of a tensor, and the evidence."""

    tensor: str
    box: Box
    reason: str


def still_damaged(found: Iterable[DamagedPiece], held: Collection) -> tuple[DamagedPiece, ...]:
    """Return the damaged pieces not covered by ``held``, a collection without damage."""
    wanted = {piece.tensor for piece in found}
    boxes: dict[str, list[Box]] = {name: [] for name in wanted}
    names = [tensor.name for tensor in held.tensors]
    for row, number in enumerate(held.tensor.tolist()):
        if names[number] in wanted:
            boxes[names[number]].append(held.box(row)[1])
    return tuple(
        piece for piece in found if piece.box.numel and uncovered(piece.box, boxes[piece.tensor])
    )
