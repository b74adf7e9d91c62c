"""The slot of a snapshot: its files, and the pieces assigned to each rank of the host.

Source of the assignment: Tenplex/Scalai, arXiv 2312.05181; its public code lets data-parallel rank
0 write alone. Differs in: the replicas on a host share the work, and a piece is written once a
host.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from scalai.core.errors import StoreError
from scalai.core.jsonable import Json
from scalai.core.messages.worker_messages import RankSnapshot, WriteOrder
from scalai.core.tensors.boxes import NumberLine, distinct
from scalai.core.tensors.collection import Collection, Columns, concatenate
from scalai.core.tensors.region import Box
from scalai.store.files import FileLayout, lay_out
from scalai.store.generation import unite
from scalai.store.manifest import UNNUMBERED, HostManifest, StoredFile
from scalai.store.places import rank_file

ROW_BYTES, RANK_BYTES = 128, 32 << 10
"""Bytes of a manifest for each piece besides its box, and for each rank (mostly RNG states)."""


@dataclass(frozen=True, eq=False, slots=True)
class RankShare:
    """One rank's part of a snapshot: ``rows`` of its collection (``pieces``) in one file of this
    layout.
    """

    rank: int
    rows: Columns
    pieces: Collection
    layout: FileLayout

    @property
    def file(self) -> str:
        """Name of the file."""
        return rank_file(self.rank)


def share_out(held: Mapping[int, Collection]) -> tuple[RankShare, ...]:
    """Return each rank's share of a host's pieces, by rank: distinct pieces once.

    Ranks without a share are left out.
    """
    shares = []
    for rank, chosen in sorted(assign_writers(held).items()):
        rows = np.asarray(chosen)
        pieces = held[rank].select(rows)
        if len(pieces):
            layout = lay_out(pieces, {"format": "scalai", "rank": str(rank)})
            shares.append(RankShare(rank, rows, pieces, layout))
    return tuple(shares)


@dataclass(frozen=True, eq=False, slots=True)
class SnapshotSlot:
    """A reserved slot: a directory of files to be written, and the order of each rank.

    ``held`` has the collections by rank. ``collection`` [rows] are the distinct pieces, ``file``
    [rows] indexes ``files``, ``begin`` [rows] is the absolute byte offset. ``orders`` has an entry
    for every rank; ranks without a share have no rows and an empty path.
    """

    directory: Path
    held: Mapping[int, Collection]
    orders: Mapping[int, WriteOrder]
    collection: Collection
    file: Columns
    begin: Columns
    files: tuple[StoredFile, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, headers included."""
        return sum(stored.size_bytes for stored in self.files)

    @property
    def manifest_bytes(self) -> int:
        """Bytes of its future manifest, estimated rather too high."""
        placed = len(json.dumps(self.collection.to_json())) + ROW_BYTES * len(self.collection)
        return placed + RANK_BYTES * len(self.orders)

    @classmethod
    def reserved(
        cls, directory: Path, held: Mapping[int, Collection], shares: Sequence[RankShare]
    ) -> "SnapshotSlot":
        """Return the slot in ``directory``, with files for these shares of ``held``."""
        orders = {rank: WriteOrder(rank, "", (), ()) for rank in sorted(held)}
        for share in shares:
            orders[share.rank] = WriteOrder(
                share.rank,
                str(directory / share.file),
                tuple(share.rows.tolist()),
                tuple(share.layout.begin.tolist()),
            )
        begins = [share.layout.begin for share in shares]
        # An empty tensor has no piece to write: only its name is stored.
        nothing = np.zeros(0, dtype=np.int64)
        tables = [each.select(nothing) for _, each in sorted(held.items())]
        return cls(
            directory,
            dict(held),
            orders,
            concatenate([*(share.pieces for share in shares), *tables]),
            np.repeat(np.arange(len(shares)), [len(begin) for begin in begins]),
            np.concatenate([np.zeros(0, np.int64), *begins]),
            tuple(StoredFile(share.file, share.layout.size_bytes) for share in shares),
        )

    @classmethod
    def sealed(cls, directory: Path, manifest: HostManifest) -> "SnapshotSlot":
        """Return an earlier owner's sealed snapshot: nobody writes to it any more."""
        return cls(
            directory, {}, {}, manifest.collection, manifest.file, manifest.begin, manifest.files
        )

    def manifest(
        self,
        host: str,
        step: int,
        about: Mapping[str, Json],
        parts: Mapping[int, RankSnapshot],
        taken_over: Sequence[tuple[WriteOrder, Sequence[int]]] = (),
    ) -> HostManifest:
        """Return the manifest of the written rows; see ``HostStore.seal``."""
        written = [(self.orders[rank], part.fingerprints) for rank, part in sorted(parts.items())]
        fingerprints = _by_place([*written, *taken_over])
        paths = [str(self.directory / stored.name) for stored in self.files]
        places = [
            (paths[file], begin)
            for file, begin in zip(self.file.tolist(), self.begin.tolist(), strict=True)
        ]
        rows = [row for row, place in enumerate(places) if place in fingerprints]
        kept, file = np.unique(self.file[rows], return_inverse=True)
        return HostManifest(
            generation=UNNUMBERED,
            step=step,
            host=host,
            about=dict(about),
            ranks=tuple(sorted(parts)),
            collection=self.collection.select(np.array(rows, dtype=np.int64)),
            file=file.astype(np.int64),
            begin=self.begin[rows],
            fingerprint=np.array([fingerprints[places[row]] for row in rows], dtype=np.uint64),
            files=tuple(self.files[number] for number in kept),
            scalars=unite(part.scalars for _, part in sorted(parts.items())),
            rank_state={part.coordinate: part.rank_state for _, part in sorted(parts.items())},
        )

    def take_over(self, lost: int, alive: Iterable[int]) -> dict[int, WriteOrder]:
        """Return orders for the ``alive`` ranks with copies of rank ``lost``'s unwritten pieces.

        They write into the lost rank's file. Pieces without a living holder are left out.
        """
        holders: dict[tuple[str, Box], tuple[int, int]] = {}
        for rank in sorted(set(alive) - {lost}, reverse=True):
            for row in range(len(self.held[rank])):
                tensor, box = self.held[rank].box(row)
                holders[tensor.name, box] = (rank, row)
        order = self.orders[lost]
        shares: dict[int, list[tuple[int, int]]] = {}
        for row, begin in zip(order.rows, order.begins, strict=True):
            tensor, box = self.held[lost].box(row)
            if (tensor.name, box) in holders:
                successor, its_row = holders[tensor.name, box]
                shares.setdefault(successor, []).append((its_row, begin))
        return {
            successor: WriteOrder(successor, order.path, *zip(*share, strict=True))
            for successor, share in sorted(shares.items())
        }


def _by_place(
    written: Iterable[tuple[WriteOrder, Sequence[int]]],
) -> dict[tuple[str, int], int]:
    places: dict[tuple[str, int], int] = {}
    for order, fingerprints in written:
        if len(fingerprints) != len(order.rows):
            raise StoreError(
                f"rank {order.rank} reports {len(fingerprints)} fingerprints for the "
                f"{len(order.rows)} pieces that it was to write. Snapshot again."
            )
        for begin, value in zip(order.begins, fingerprints, strict=True):
            places[order.path, begin] = value
    return places


def assign_writers(held: Mapping[int, Collection]) -> Mapping[int, Columns]:
    """Assign every distinct box on one host to one of its holders.

    Args:
        held: Collection of each rank of the host. Empty boxes are not written.

    Returns:
        Ascending rows of each rank's collection to write. Bytes are balanced: the largest boxes
        first, each to the holder with the least to write, ties to the lowest rank. Depends on the
        content alone.
    """
    ranks = sorted(held)
    together = concatenate([held[rank] for rank in ranks])
    counts = [len(held[rank]) for rank in ranks]
    rank_of = np.repeat(np.arange(len(ranks)), counts)
    row_of = np.concatenate([np.zeros(0, np.int64), *(np.arange(count) for count in counts)])
    rows = np.flatnonzero(together.numel())
    line = NumberLine.of(together.tensors)
    boxes = line.place(together.tensor[rows], together.offset[rows], together.shape[rows])
    _, number = distinct(boxes)
    writers = _balance(number, rank_of[rows], together.size_bytes()[rows], len(ranks))
    chosen = rows[writers]
    return {
        rank: np.sort(row_of[chosen[rank_of[chosen] == index]]) for index, rank in enumerate(ranks)
    }


def _balance(number: Columns, rank: Columns, size_bytes: Columns, ranks: int) -> Columns:
    """Choose one of the rows of every box, so that the bytes of the ranks are balanced.

    Args:
        number: Box of each row, counted from 0, [rows].
        rank: Holder of each row, ascending, [rows].
        size_bytes: Bytes of each row, [rows].
    """
    order = np.argsort(number, kind="stable")
    begin = np.searchsorted(number[order], np.arange(number.max(initial=-1) + 2))
    holders = [order[low:high].tolist() for low, high in pairwise(begin.tolist())]
    # Boxes with one holder come first, so that their load counts for the others.
    holders.sort(key=lambda rows: (len(rows) > 1, -size_bytes[rows[0]], rows[0]))
    load = [0] * ranks
    chosen: list[int] = []
    for rows in holders:
        best = min(rows, key=lambda row: (load[rank[row]], row))
        load[rank[best]] += int(size_bytes[best])
        chosen.append(best)
    return np.array(chosen, dtype=np.int64)
