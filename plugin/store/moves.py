"""From a plan to files: fetches by source host, and each new rank's order to read.

The planner counts holders and rows; here they become files and byte offsets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from scalai.core.messages.worker_messages import ReadOrder
from scalai.core.tensors.collection import Collection, Columns
from scalai.core.tensors.holders import Holder
from scalai.core.tensors.plan import Plan, batches_of
from scalai.store.manifest import HostManifest


class HeldPart(Protocol):
    """One host's part of a generation."""

    @property
    def host(self) -> str:
        """Name of the host."""

    @property
    def collection(self) -> Collection:
        """Its pieces."""


def holders_of(manifests: Sequence[HeldPart]) -> list[Holder]:
    """Return the source side of a plan: one holder a host, its rows those of the manifest."""
    return [Holder(part.host, part.collection) for part in manifests]


@dataclass(frozen=True, eq=False, slots=True)
class FetchList:
    """One host's fetches from another: parts of pieces committed there.

    ``row`` [parts] is the piece's row in the other's manifest, ``pieces`` [parts] the boxes,
    ``fetch`` [parts] the row of ``Plan.fetches``.
    """

    host: str
    row: Columns
    pieces: Collection
    fetch: Columns

    def select(self, rows: Columns) -> "FetchList":
        """Return these of its parts."""
        return FetchList(self.host, self.row[rows], self.pieces.select(rows), self.fetch[rows])


def in_batches(lists: Sequence[FetchList], least_bytes: int) -> list[list[FetchList]]:
    """Cut fetches into batches (``batches_of``). Each has its share of every host's list, in order,
    so that all hosts give until the end. A part is never cut.
    """
    ends = [np.cumsum(asked.pieces.size_bytes()) for asked in lists]
    count = batches_of(sum(int(end[-1]) for end in ends), least_bytes)
    batches: list[list[FetchList]] = [[] for _ in range(count)]
    for asked, end in zip(lists, ends, strict=True):
        batch = (end - 1) * count // end[-1]
        for number in np.unique(batch).tolist():
            batches[number].append(asked.select(np.flatnonzero(batch == number)))
    return [batch for batch in batches if batch]


def fetch_lists(plan: Plan, manifests: Sequence[HeldPart], host: str) -> list[FetchList]:
    """Return the fetches of ``host``, one list a source host, in the order of ``manifests``.

    ``plan`` is of ``holders_of(manifests)``; the manifests are of one generation. A host outside of
    ``plan.hosts`` fetches nothing.
    """
    fetches, lists = plan.fetches, []
    if host not in plan.hosts:
        return []
    mine = fetches.host == plan.hosts.index(host)
    for number, manifest in enumerate(manifests):
        fetch = np.flatnonzero(mine & (fetches.source == number))
        if not len(fetch):
            continue
        row, held = fetches.source_row[fetch], manifest.collection
        boxes = Collection(
            held.tensors, held.tensor[row], fetches.offset[fetch], fetches.shape[fetch]
        )
        lists.append(FetchList(manifest.host, row, boxes, fetch))
    return lists


@dataclass(frozen=True, eq=False, slots=True)
class Fetched:
    """A fetch list that has arrived: part ``i`` lies row-major in ``path`` at byte ``begin[i]``."""

    asked: FetchList
    path: Path
    begin: Columns


def read_orders(
    plan: Plan, manifests: Sequence[HeldPart], directories: Mapping[str, Path]
) -> dict[int, ReadOrder]:
    """Return, by index, each target's order to read the planned copies that are not fetched.

    Args:
        plan: Plan of ``holders_of(manifests)`` for targets of this host.
        manifests: Sources in the order of the plan; directly readable ones are ``HostManifest``.
        directories: Directory of each directly readable part by host: this host's own, and on a
            durable directory all.
    """
    files: list[str] = []
    copies, rows = plan.copies, np.flatnonzero(plan.copies.fetch < 0)
    columns = {
        "file": np.full(len(rows), -1, dtype=np.int64),
        "begin": np.zeros(len(rows), dtype=np.int64),
        "source_offset": np.zeros_like(copies.offset[rows]),
        "source_shape": np.ones_like(copies.shape[rows]),
    }
    for number, manifest in enumerate(manifests):
        if manifest.host not in directories:
            continue
        assert isinstance(manifest, HostManifest)
        mine = np.flatnonzero(copies.source[rows] == number)
        stored = copies.source_row[rows[mine]]
        columns["file"][mine] = len(files) + manifest.file[stored]
        columns["begin"][mine] = manifest.begin[stored]
        columns["source_offset"][mine] = manifest.collection.offset[stored]
        columns["source_shape"][mine] = manifest.collection.shape[stored]
        directory = directories[manifest.host]
        files.extend(str(directory / stored.name) for stored in manifest.files)
    assert (columns["file"] >= 0).all(), "a copy reads what is neither here nor fetched"
    return _by_target(plan, rows, files, columns)


def fetched_orders(plan: Plan, fetched: Sequence[Fetched]) -> dict[int, ReadOrder]:
    """Return, by index, the order of each target with copies of arrived parts to read them."""
    fetches = plan.fetches
    file, begin = np.full((2, len(fetches)), -1, dtype=np.int64)
    for number, part in enumerate(fetched):
        file[part.asked.fetch] = number
        begin[part.asked.fetch] = part.begin
    copies = plan.copies
    rows = np.flatnonzero(copies.fetch >= 0)
    rows = rows[file[copies.fetch[rows]] >= 0]
    fetch = copies.fetch[rows]
    columns = {
        "file": file[fetch],
        "begin": begin[fetch],
        "source_offset": fetches.offset[fetch],
        "source_shape": fetches.shape[fetch],
    }
    return _by_target(plan, rows, [str(part.path) for part in fetched], columns)


def _by_target(
    plan: Plan, rows: Columns, files: Sequence[str], columns: Mapping[str, Columns]
) -> dict[int, ReadOrder]:
    """Return orders for these copies. ``columns``: their stored pieces, as in a ``ReadOrder``."""
    copies, orders = plan.copies, {}
    for target in np.unique(copies.target[rows]).tolist():
        mine = np.flatnonzero(copies.target[rows] == target)
        used, file = np.unique(columns["file"][mine], return_inverse=True)
        orders[target] = ReadOrder(
            files=tuple(files[number] for number in used),
            row=copies.target_row[rows[mine]],
            offset=copies.offset[rows[mine]],
            shape=copies.shape[rows[mine]],
            file=file.astype(np.int64),
            begin=columns["begin"][mine],
            source_offset=columns["source_offset"][mine],
            source_shape=columns["source_shape"][mine],
        )
    return orders


@dataclass(frozen=True, eq=False, slots=True)
class Missing:
    """Wanted elements that are neither here nor fetched: ``targets`` in the order of the plan's;
    ``rows`` [pieces] of each are the originally wanted pieces that they are parts of.
    """

    targets: list[Holder]
    rows: list[Columns]

    @staticmethod
    def all_of(targets: Sequence[Holder]) -> "Missing":
        """Return all pieces of ``targets``."""
        return Missing(list(targets), [np.arange(len(each.collection)) for each in targets])

    def without(self, plan: Plan, fetched: Sequence[Fetched]) -> "Missing":
        """Return what is left behind a plan for ``targets`` with these of its fetches arrived."""
        copies = plan.copies
        arrived = [part.asked.fetch for part in fetched]
        is_left = (copies.fetch >= 0) & ~np.isin(copies.fetch, np.concatenate([[-1], *arrived]))
        targets, rows = list[Holder](), list[Columns]()
        for number, target in enumerate(self.targets):
            left = np.flatnonzero(is_left & (copies.target == number))
            wanted, row = target.collection, copies.target_row[left]
            boxes = Collection(
                wanted.tensors, wanted.tensor[row], copies.offset[left], copies.shape[left]
            )
            targets.append(replace(target, collection=boxes))
            rows.append(self.rows[number][row])
        return Missing(targets, rows)

    def as_wanted(self, orders: Mapping[int, ReadOrder]) -> dict[int, ReadOrder]:
        """Return orders of a plan for ``targets`` with rows of the originally wanted pieces."""
        return {
            number: replace(order, row=self.rows[number][order.row])
            for number, order in orders.items()
        }
