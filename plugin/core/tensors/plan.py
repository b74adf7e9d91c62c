"""The reconfiguration plan: elements to copy from held pieces to wanted pieces.

Source: Tenplex/Scalai, arXiv 2312.05181, section 3, the plan between PTC (sigma, phi, alpha) and
PTC' (sigma, phi, alpha of the new layout): split, re-partition, merge. Differs in: one copy does
all three; pieces on a host are taken there, others are fetched once a host for any number of its
ranks; the plan is checked whole before its use.

A host's part of the plan depends on its own ranks' wants, on all holders, and on its position among
the hosts of the new generation, but not on other hosts' wants. So every agent plans for itself
alone; together the parts are the plan of a single planner.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scalai.core.errors import LayoutError
from scalai.core.tensors.boxes import Boxes, check_inside, expand, right_aligned, uncovered
from scalai.core.tensors.collection import MAX_NDIM, Columns, Tensor, split_name
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.holders import Geometry, Holder, check, index_sources, shortfall, solve
from scalai.core.tensors.region import Box, box_text

__all__ = ["Copies", "Fetches", "Holder", "Plan", "Planner", "plan"]

NAMED = 5
"""Tensors and boxes named in an error."""
BATCHES, BATCH_BYTES = 16, 16 << 20
"""Most batches of a host's fetches at a restore, and least bytes of one: workers restore a batch
while the next ones come. Each costs a file and a manifest."""


def batches_of(size_bytes: int, least_bytes: int = BATCH_BYTES) -> int:
    """Return the number of batches of so many bytes to fetch."""
    return max(1, min(BATCHES, size_bytes // least_bytes))


@dataclass(frozen=True, eq=False, slots=True)
class Copies:
    """Copies as columns, each [copies] or [copies, MAX_NDIM], ordered by target and target row.

    ``target`` and ``source`` index the planned sequences of holders, ``target_row`` and
    ``source_row`` the rows of their collections. ``offset`` and ``shape`` are the box to copy, in
    elements of the global tensor, right-aligned as in ``Collection``. ``fetch`` is the row of
    ``Fetches`` with the bytes, or -1 for a source on the target's host.
    """

    target: Columns
    target_row: Columns
    source: Columns
    source_row: Columns
    offset: Columns
    shape: Columns
    fetch: Columns

    def __len__(self) -> int:
        return len(self.target)


@dataclass(frozen=True, eq=False, slots=True)
class Fetches:
    """Boxes fetched to a host as columns, [fetches] or [fetches, MAX_NDIM]; disjoint a host.

    ``host`` indexes ``Plan.hosts``, ``source`` the holders, ``source_row`` the rows of the source's
    collection.
    """

    host: Columns
    source: Columns
    source_row: Columns
    offset: Columns
    shape: Columns

    def __len__(self) -> int:
        return len(self.host)


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """All copies to fill the targets' wanted pieces, and the fetches for them.

    ``bytes_local`` are written from the targets' own hosts, once for each wanting rank;
    ``bytes_remote`` cross to a host.
    """

    hosts: tuple[str, ...]
    copies: Copies
    fetches: Fetches
    bytes_local: int
    bytes_remote: int


@dataclass(frozen=True, eq=False, slots=True)
class _Wants:
    """Wanted, non-empty rows of all targets of a host. ``tensor`` indexes the sources' tensors."""

    target: Columns
    row: Columns
    tensor: Columns
    boxes: Boxes

    def select(self, rows: Columns) -> "_Wants":
        return _Wants(self.target[rows], self.row[rows], self.tensor[rows], self.boxes.select(rows))


class Planner:
    """Plans for one host after the other. Hosts with equal wanted boxes share the geometry."""

    def __init__(self, source: Sequence[Holder], names: Iterable[str] | None = None) -> None:
        """Index the pieces of ``source``, or only those of the named tensors.

        Raises:
            LayoutError: Holders disagree about a tensor, or a box reaches outside of its tensor.
        """
        self.sources = index_sources(source, None if names is None else frozenset(names))
        items = [ITEM_BYTES[tensor.dtype] for tensor in self.sources.tensors]
        kinds = [split_name(tensor.name)[0] for tensor in self.sources.tensors]
        numbers = {kind: number for number, kind in enumerate(sorted(set(kinds)))}
        self._item_bytes = np.array(items, dtype=np.int64)
        self._kind = np.array([numbers[kind] for kind in kinds], dtype=np.int64)
        self._sizes = right_aligned(self.sources.tensors)
        self._solved: dict[bytes, Geometry] = {}

    def plan_host(self, host: str, target: Sequence[Holder], position: int = 0) -> Plan:
        """Plan for the ranks of one host.

        Args:
            host: Name of the host, as the sources spell it.
            target: Wanted pieces of each of its new ranks.
            position: Index of the host among the new generation's hosts. Among equally used
                replicas it decides the first choice, so that hosts spread over them.

        Raises:
            LayoutError: A tensor, or a part of one, is held by nobody, or differs in shape or
                dtype.
        """
        wants = self._wants(target)
        kind = self._kind[wants.tensor]
        served = np.zeros(len(self.sources.hosts), dtype=np.int64)
        parts, fetched = [], 0
        for number in np.unique(kind):
            part = wants.select(np.flatnonzero(kind == number))
            geometry = self._geometry(part, target)
            entry = self._choose(geometry, part, host, position, served)
            parts.append(self._fill(geometry, part, entry, host, fetched))
            fetched += len(parts[-1].fetches)
        return _in_order(_merge((host,), parts))

    def _wants(self, target: Sequence[Holder]) -> _Wants:
        sources = self.sources
        columns = [np.zeros(0, np.int64)]
        for holder in target:
            columns.append(self._numbers(holder)[holder.collection.tensor])
        counts = np.array([len(holder.collection) for holder in target], dtype=np.int64)
        target_of, row = expand(counts)
        none = np.zeros((0, MAX_NDIM), np.int64)
        tensor = np.concatenate(columns)
        offset = np.concatenate([none, *(holder.collection.offset for holder in target)])
        shape = np.concatenate([none, *(holder.collection.shape for holder in target)])
        keep = np.flatnonzero(shape.prod(axis=1))
        tensor, offset, shape = tensor[keep], offset[keep], shape[keep]
        check_inside(sources.tensors, self._sizes, tensor, offset, shape)
        boxes = sources.line.place(sources.group[tensor], offset, shape)
        return _Wants(target_of[keep], row[keep], tensor, boxes)

    def _numbers(self, holder: Holder) -> Columns:
        """Return the sources' tensor numbers; refuse unheld tensors."""
        wanted = holder.collection
        numbers = np.array([self.sources.number.get(t.name, -1) for t in wanted.tensors], np.int64)
        used = np.zeros(len(numbers), dtype=bool)
        used[wanted.tensor[wanted.numel() != 0]] = True
        absent = [repr(wanted.tensors[n].name) for n in np.flatnonzero(used & (numbers < 0))]
        if absent:
            raise LayoutError(
                f"nobody holds any part of {_listed(absent)}, wanted by rank {holder.rank} on host "
                f"{holder.host!r}. The model or its optimizer is not the one that was written: "
                "start the new job with the same model arguments."
            )
        for tensor, number in zip(wanted.tensors, numbers.tolist(), strict=True):
            known = self.sources.tensors[number] if number >= 0 else tensor
            if known != tensor:
                way = (
                    "Keep its precision."
                    if known.shape == tensor.shape
                    else "The size of a whole tensor may not follow the degrees: keep the model's "
                    "sizes, the padded vocabulary among them, and describe a parameter that ranks "
                    "have cut as cut, not as the same on all."
                )
                raise LayoutError(
                    f"{tensor.name!r} is held as {known.dtype}{list(known.shape)}, but rank "
                    f"{holder.rank} on host {holder.host!r} wants "
                    f"{tensor.dtype}{list(tensor.shape)}. {way}"
                )
        return numbers

    def _geometry(self, wants: _Wants, target: Sequence[Holder]) -> Geometry:
        boxes = wants.boxes
        key = np.stack([boxes.low, boxes.high]).tobytes()
        if key not in self._solved:
            geometry = solve(self.sources, boxes)
            missing = shortfall(geometry, boxes)
            if missing.any():
                raise self._not_held(geometry, wants, target, np.flatnonzero(missing))
            check(geometry, self.sources, boxes)
            self._solved[key] = geometry
        return self._solved[key]

    def _not_held(
        self, geometry: Geometry, wants: _Wants, target: Sequence[Holder], short: Columns
    ) -> LayoutError:
        found = []
        for row in short[:NAMED].tolist():
            tensor: Tensor = self.sources.tensors[wants.tensor[row]]
            skip = MAX_NDIM - len(tensor.shape)
            parts = geometry.copy_fragment[geometry.copy_want == row].tolist()
            gaps = uncovered(wants.boxes.box(row), [geometry.boxes.box(part) for part in parts])
            texts = [box_text(Box(gap.offset[skip:], gap.shape[skip:])) for gap in gaps]
            rank = target[wants.target[row]].rank
            found.append(f"{_listed(texts)} of {tensor.name!r} {list(tensor.shape)} (rank {rank})")
        more = f" and {len(short) - NAMED} more wanted pieces" if len(short) > NAMED else ""
        return LayoutError(
            f"nobody holds {'; '.join(found)}{more}. Wait for the missing holder, or restore an "
            "older generation that is whole."
        )

    def _choose(
        self, geometry: Geometry, wants: _Wants, host: str, position: int, served: Columns
    ) -> Columns:
        """Choose a member for every fragment: one on the host, else the least used one.

        Returns:
            Rows of ``geometry.member``, [fragments]. ``served`` [hosts] is counted on.
        """
        sources = self.sources
        begin = geometry.member_begin
        counts = begin[1:] - begin[:-1]
        chosen = begin[:-1].copy()
        member_host = sources.host_of[sources.member_holder[geometry.member]]
        is_local = np.zeros(len(counts), dtype=bool)
        if host in sources.hosts:
            owner = np.repeat(np.arange(len(counts)), counts)
            local = np.flatnonzero(member_host == sources.hosts.index(host))[::-1]
            chosen[owner[local]] = local
            is_local[owner[local]] = True
        size_bytes = geometry.numel * self._item_bytes[wants.tensor[geometry.want]]
        only = np.flatnonzero(~is_local & (counts == 1))
        np.add.at(served, member_host[chosen[only]], size_bytes[only])
        for fragment in np.flatnonzero(~is_local & (counts > 1)).tolist():
            candidates = member_host[begin[fragment] : begin[fragment + 1]]
            # Skewed, so that hosts at a multiple of the count apart begin at different replicas.
            turn = (position + position // len(candidates)) % len(candidates)
            turned = np.concatenate([candidates[turn:], candidates[:turn]])
            best = (turn + int(np.argmin(served[turned]))) % len(candidates)
            chosen[fragment] = begin[fragment] + best
            served[candidates[best]] += size_bytes[fragment]
        return chosen

    def _fill(
        self, geometry: Geometry, wants: _Wants, chosen: Columns, host: str, fetched: int
    ) -> Plan:
        """Return the plan of these wants, with fetches counted from ``fetched``."""
        sources = self.sources
        tensor = wants.tensor[geometry.want]
        member = geometry.member[chosen]
        entry = sources.begin[tensor] + sources.member[member]
        holder = sources.member_holder[member]
        size_bytes = geometry.numel * self._item_bytes[tensor]
        here = sources.hosts.index(host) if host in sources.hosts else -1
        is_remote = sources.host_of[holder] != here
        remote = np.flatnonzero(is_remote)
        fetch = np.where(is_remote, fetched + np.cumsum(is_remote) - 1, -1)
        want, fragment = geometry.copy_want, geometry.copy_fragment
        copies = Copies(
            target=wants.target[want],
            target_row=wants.row[want],
            source=holder[fragment],
            source_row=sources.row[entry][fragment],
            offset=geometry.boxes.offset[fragment],
            shape=geometry.boxes.shape[fragment],
            fetch=fetch[fragment],
        )
        fetches = Fetches(
            host=np.zeros(len(remote), dtype=np.int64),
            source=holder[remote],
            source_row=sources.row[entry][remote],
            offset=geometry.boxes.offset[remote],
            shape=geometry.boxes.shape[remote],
        )
        local_bytes = int(size_bytes[fragment[copies.fetch < 0]].sum())
        return Plan((host,), copies, fetches, local_bytes, int(size_bytes[remote].sum()))


def plan(
    source: Sequence[Holder], target: Sequence[Holder], hosts: Iterable[str] | None = None
) -> Plan:
    """Plan copies from the pieces of ``source`` to all wanted pieces of ``target``.

    Args:
        source: Held pieces. Order decides between replicas on one host.
        target: Wanted pieces and host of each new rank.
        hosts: All hosts of the new generation, in any order: needed by an agent's plan for its own
            ranks alone. Default: the hosts of ``target``.

    Returns:
        The same plan for the same input, checked: every wanted element is written exactly once,
        from a piece with this element, and no byte crosses to a host twice, or to a host with a
        copy.

    Raises:
        LayoutError: A tensor, or a part of one, is held by nobody, or differs in shape or dtype.
    """
    names = {tensor.name for holder in target for tensor in holder.collection.tensors}
    planner = Planner(source, names)
    by_host: dict[str, list[int]] = {}
    for number, holder in enumerate(target):
        by_host.setdefault(holder.host, []).append(number)
    order = sorted(by_host if hosts is None else {*hosts, *by_host})
    parts: list[Plan] = []
    planned, fetched = sorted(by_host), 0
    for host in planned:
        numbers = by_host[host]
        part = planner.plan_host(host, [target[number] for number in numbers], order.index(host))
        parts.append(_renumber(part, np.array(numbers, dtype=np.int64), len(parts), fetched))
        fetched += len(part.fetches)
    return _in_order(_merge(tuple(planned), parts))


def _renumber(part: Plan, targets: Columns, host: int, fetched: int) -> Plan:
    """Return a host's plan with the numbers of the whole plan."""
    copies, fetches = part.copies, part.fetches
    fetch = np.where(copies.fetch < 0, -1, copies.fetch + fetched)
    return replace(
        part,
        copies=replace(copies, target=targets[copies.target], fetch=fetch),
        fetches=replace(fetches, host=np.full(len(fetches), host, dtype=np.int64)),
    )


def _merge(hosts: tuple[str, ...], parts: Sequence[Plan]) -> Plan:
    return Plan(
        hosts,
        Copies(*_stacked([part.copies for part in parts], Copies)),
        Fetches(*_stacked([part.fetches for part in parts], Fetches)),
        sum(part.bytes_local for part in parts),
        sum(part.bytes_remote for part in parts),
    )


def _stacked(
    tables: Sequence[Copies] | Sequence[Fetches], table: type[Copies] | type[Fetches]
) -> list[Columns]:
    columns = []
    for name in table.__slots__:
        shape = (0, MAX_NDIM) if name in ("offset", "shape") else (0,)
        parts = [getattr(one, name) for one in tables]
        columns.append(np.concatenate([np.zeros(shape, np.int64), *parts]))
    return columns


def _in_order(whole: Plan) -> Plan:
    copies = whole.copies
    order = np.lexsort((copies.target_row, copies.target))
    return replace(
        whole, copies=Copies(*(getattr(copies, name)[order] for name in Copies.__slots__))
    )


def _listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - NAMED} more" if len(words) > NAMED else ""
    return ", ".join(words[:NAMED]) + more
