"""From a plan to files: fetches by source host, and each new rank's order to read.

The planner counts holders and rows; here they become files and byte offsets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from scalai.core.messages.worker_messages import ReadOrder
from scalai.core.tensors.collection import Collection, Columns
from scalai.core.tensors.holders import Holder
from scalai.core.tensors.plan import Plan
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
    plan: Plan,
    manifests: Sequence[HeldPart],
    directories: Mapping[str, Path],
    fetched: Sequence[Fetched] = (),
) -> dict[int, ReadOrder]:
    """Return the order to read files of this host for each target of the plan, by its index.

    Args:
        plan: Plan of ``holders_of(manifests)`` for targets of this host.
        manifests: Sources in the order of the plan; directly readable ones are ``HostManifest``.
        directories: Directory of each directly readable part by host: this host's own, and on a
            durable directory all.
        fetched: Arrived parts of other hosts; together all fetches of the plan.
    """
    files: list[str] = []
    first_file = np.full(len(manifests), -1, dtype=np.int64)
    for number, manifest in enumerate(manifests):
        if manifest.host in directories:
            assert isinstance(manifest, HostManifest)
            first_file[number] = len(files)
            directory = directories[manifest.host]
            files.extend(str(directory / stored.name) for stored in manifest.files)
    fetch_file, fetch_begin = np.full((2, len(plan.fetches)), -1, dtype=np.int64)
    for part in fetched:
        fetch_file[part.asked.fetch] = len(files)
        fetch_begin[part.asked.fetch] = part.begin
        files.append(str(part.path))
    source = _sources(plan, manifests, first_file)
    copies, fetches = plan.copies, plan.fetches
    away = copies.fetch >= 0
    source["file"][away] = fetch_file[copies.fetch[away]]
    source["begin"][away] = fetch_begin[copies.fetch[away]]
    source["source_offset"][away] = fetches.offset[copies.fetch[away]]
    source["source_shape"][away] = fetches.shape[copies.fetch[away]]
    assert (source["file"] >= 0).all(), "a copy reads what is neither here nor fetched"
    orders = {}
    for target in np.unique(copies.target).tolist():
        rows = np.flatnonzero(copies.target == target)
        used, file = np.unique(source["file"][rows], return_inverse=True)
        orders[target] = ReadOrder(
            files=tuple(files[number] for number in used),
            row=copies.target_row[rows],
            offset=copies.offset[rows],
            shape=copies.shape[rows],
            file=file.astype(np.int64),
            begin=source["begin"][rows],
            source_offset=source["source_offset"][rows],
            source_shape=source["source_shape"][rows],
        )
    return orders


def _sources(plan: Plan, manifests: Sequence[HeldPart], first_file: Columns) -> dict[str, Columns]:
    """Return the place of each copy's stored piece: columns [copies] of a ``ReadOrder``."""
    copies = plan.copies
    columns = {
        "file": np.full(len(copies), -1, dtype=np.int64),
        "begin": np.zeros(len(copies), dtype=np.int64),
        "source_offset": np.zeros_like(copies.offset),
        "source_shape": np.ones_like(copies.shape),
    }
    for number, manifest in enumerate(manifests):
        if first_file[number] < 0:
            continue
        assert isinstance(manifest, HostManifest)
        rows = np.flatnonzero((copies.source == number) & (copies.fetch < 0))
        stored = copies.source_row[rows]
        columns["file"][rows] = first_file[number] + manifest.file[stored]
        columns["begin"][rows] = manifest.begin[stored]
        columns["source_offset"][rows] = manifest.collection.offset[stored]
        columns["source_shape"][rows] = manifest.collection.shape[stored]
    return columns
