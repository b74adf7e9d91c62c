"""Fingerprints: one number for a tensor's content, independent of its cut.

The fingerprint of a piece is a sum over its elements, so each shard is summed in place and the
shards of any layout add up to the same number; replicas count once. ``universal_hash.py`` has the
proof.

Source: own; neither Tenplex/Scalai (arXiv 2312.05181) nor its public code proves a reconfiguration.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scalai.core import fields
from scalai.core.errors import ProofError
from scalai.core.jsonable import Json
from scalai.core.tensors import universal_hash
from scalai.core.tensors.boxes import NumberLine, distinct
from scalai.core.tensors.collection import Collection, Tensor, concatenate
from scalai.core.tensors.coverage import find_gaps, find_overlaps
from scalai.core.tensors.dtypes import Bits
from scalai.core.tensors.region import Box, box_text
from scalai.core.tensors.universal_hash import P

Prints = npt.NDArray[np.uint64]
"""Fingerprints [rows]."""

VERSION = 2
"""Version of fingerprints, stored with them. Different versions are not comparable."""
NAMED = 5
"""Tensors named in an error."""
NOT_COMPARED = 2**64 - 1
"""Fingerprint of a row that may differ between ranks: beyond every modulus."""


def piece_fingerprint(values: Bits, box: Box, shape: tuple[int, ...]) -> int:
    """Return the fingerprint of one piece of a tensor.

    Args:
        values: Bit patterns of the piece [box.shape], unsigned integers of 1, 2, 4 or 8 bytes, any
            strides.
        box: Place of the piece in the global tensor.
        shape: Shape of the global tensor, in elements.
    """
    assert values.dtype.kind == "u" and values.shape == box.shape, (values.dtype, values.shape)
    if not values.size:
        return 0
    return universal_hash.piece_hash(values, box, shape)


def combine(fingerprints: Iterable[int]) -> int:
    """Return the fingerprint of the union of disjoint pieces."""
    return sum(int(value) for value in fingerprints) % P


def distinct_pieces(
    collection: Collection, fingerprints: Iterable[int] | Prints
) -> tuple[Collection, Prints]:
    """Return each distinct, non-empty box once, with its fingerprint, [distinct].

    Args:
        collection: Pieces, including replicas (equal boxes).
        fingerprints: Fingerprint of each row, [rows].

    Raises:
        ProofError: Two replicas of a box differ.
    """
    values = np.array([int(value) for value in fingerprints], dtype=np.uint64)
    rows = np.flatnonzero(collection.numel())
    line = NumberLine.of(collection.tensors)
    boxes = line.place(collection.tensor[rows], collection.offset[rows], collection.shape[rows])
    first, number = distinct(boxes)
    differs = np.flatnonzero(values[rows] != values[rows[first]][number])
    if len(differs):
        row = rows[differs[0]]
        tensor, box = collection.box(row)
        known = int(values[rows[first[number[differs[0]]]]])
        raise replicas_differ(tensor, box, known, int(values[row]), len(differs))
    return collection.select(rows[first]), values[rows[first]]


def differing_replicas(
    held: Mapping[int, Collection], fingerprints: Mapping[int, Sequence[int]]
) -> str:
    """Return the differing pieces of a host's ranks, as text; empty: none.

    Args:
        held: Pieces of each rank.
        fingerprints: Fingerprint of each row, or ``NOT_COMPARED``, by rank.
    """
    ranks = sorted(rank for rank in fingerprints if len(fingerprints[rank]) == len(held[rank]))
    together = concatenate([held[rank] for rank in ranks])
    values = np.array([v for rank in ranks for v in fingerprints[rank]], dtype=np.uint64)
    rank_of = np.repeat(ranks, [len(held[rank]) for rank in ranks])
    rows = np.flatnonzero((together.numel() != 0) & (values != NOT_COMPARED))
    line = NumberLine.of(together.tensors)
    boxes = line.place(together.tensor[rows], together.offset[rows], together.shape[rows])
    first, number = distinct(boxes)
    differs = np.flatnonzero(values[rows] != values[rows[first]][number])
    found: dict[str, set[int]] = {}
    for at in differs.tolist():
        pair = rows[first[number[at]]], rows[at]
        name = together.tensors[together.tensor[pair[0]]].name
        found.setdefault(name, set()).update(int(rank_of[row]) for row in pair)
    # The parameters first: their optimizer's states differ with them.
    by_kind = sorted(found.items(), key=lambda each: (not each[0].startswith("param/"), each[0]))
    named = [f"{name!r} on ranks {sorted(of)}" for name, of in by_kind[:NAMED]]
    more = f" and {len(found) - NAMED} more tensors" if len(found) > NAMED else ""
    return ", ".join(named) + more


def replicas_differ(tensor: Tensor, box: Box, one: int, other: int, count: int = 1) -> ProofError:
    """Return the error for ``count`` differing pieces: this box with these fingerprints."""
    return ProofError(
        f"replicas of {box_text(box)} of {tensor.name!r} differ: fingerprints {one:016x} and "
        f"{other:016x} ({count} such pieces). A rank trained on other values, or its memory was "
        "damaged: resume from an older generation."
    )


def tensor_fingerprints(
    collection: Collection, fingerprints: Iterable[int] | Prints
) -> dict[str, int]:
    """Add up the fingerprints of a whole state's pieces to those of its tensors.

    Args:
        collection: Pieces of all holders. Replicas (equal boxes) count once. The distinct boxes
            must be disjoint (``check_coverage``).
        fingerprints: Fingerprint of each row, [rows].

    Raises:
        ProofError: Two replicas of a box differ.
    """
    pieces, values = distinct_pieces(collection, fingerprints)
    totals = {tensor.name: 0 for tensor in collection.tensors}
    for tensor_number, value in zip(pieces.tensor.tolist(), values.tolist(), strict=True):
        name = collection.tensors[tensor_number].name
        totals[name] = (totals[name] + value) % P
    return totals


class Tally:
    """Fingerprints of tensors, added up host by host; replicas (equal boxes) count once."""

    def __init__(self) -> None:
        self._values: dict[str, dict[bytes, int]] = {}
        self.totals: dict[str, int] = {}
        """Fingerprint of all added pieces, by tensor."""

    def add(self, collection: Collection, fingerprints: Prints) -> None:
        """Add distinct pieces of one host.

        Raises:
            ProofError: A replica differs from a box added before.
        """
        tables = [self._values.setdefault(tensor.name, {}) for tensor in collection.tensors]
        for tensor in collection.tensors:
            self.totals.setdefault(tensor.name, 0)
        rows = zip(
            collection.tensor.tolist(), collection.keys(), fingerprints.tolist(), strict=True
        )
        for row, (number, key, value) in enumerate(rows):
            known = tables[number].setdefault(key, -1)
            if known == value:
                continue
            if known != -1:
                raise replicas_differ(*collection.box(row), known, value)
            tables[number][key] = value
            name = collection.tensors[number].name
            self.totals[name] = (self.totals[name] + value) % P


def sure_fingerprints(
    collection: Collection, fingerprints: Iterable[int] | Prints
) -> dict[str, int]:
    """Return ``tensor_fingerprints`` of the tensors that are whole and without overlaps."""
    unsure = {tensor.name for tensor, _ in find_gaps(collection)}
    unsure |= {tensor.name for tensor, _, _ in find_overlaps(collection)}
    is_sure = np.array([tensor.name not in unsure for tensor in collection.tensors], dtype=bool)
    rows = np.flatnonzero(is_sure[collection.tensor]) if len(collection) else collection.tensor
    values = np.array([int(value) for value in fingerprints], dtype=np.uint64)
    prints = tensor_fingerprints(collection.select(rows), values[rows])
    return {name: value for name, value in prints.items() if name not in unsure}


def compare(before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Raise ``ProofError`` naming the differing tensors of two states."""
    problems = []
    for words, names in (
        ("are missing afterwards", sorted(before.keys() - after.keys())),
        ("were not there before", sorted(after.keys() - before.keys())),
        ("differ", sorted(n for n in before.keys() & after.keys() if before[n] != after[n])),
    ):
        if names:
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            problems.append(f"{len(names)} {words}: {', '.join(names[:NAMED])}{more}")
    if problems:
        raise ProofError(
            f"fingerprints of {len(before)} tensors before and {len(after)} after are not equal; "
            f"{'; '.join(problems)}. The state was not restored exactly: go back to the old "
            "generation."
        )


@dataclass(frozen=True, slots=True)
class CommitStatement:
    """The coordinator's statement about a snapshot as it became a generation.

    ``hosts`` wrote a part; ``fingerprints`` are those of whole tensors by name, added up from its
    disjoint pieces. Every host's manifest keeps it for later proofs.

    A host keeps the fingerprints of the tensors it has pieces of; all hosts together have all.
    Later fetches may overlap with the snapshot's pieces, so the sums cannot be recomputed.
    """

    hosts: tuple[str, ...]
    fingerprints: Mapping[str, int]

    def to_json(self) -> dict[str, Json]:
        """Return plain values for ``json``; ``from_json`` reads them back."""
        # Text: readers with numbers as doubles would round them.
        fingerprints = {name: f"{value:016x}" for name, value in self.fingerprints.items()}
        return {"hosts": list(self.hosts), "fingerprints": fingerprints}

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "CommitStatement":
        """Read the values of ``to_json``. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for
        others.
        """
        prints = fields.mapped(fields.mapped(data, "committed")["fingerprints"], "fingerprints")
        fingerprints = {
            name: fields.fingerprint(value, f"committed fingerprint of {name!r}")
            for name, value in prints.items()
        }
        hosts = fields.listed(data["hosts"], "committed.hosts")
        return cls(tuple(fields.text(host, "a committed host") for host in hosts), fingerprints)

    def of_tensors(self, names: Iterable[str]) -> "CommitStatement":
        """Return the statement about these tensors."""
        mine = self.fingerprints
        return CommitStatement(self.hosts, {name: mine[name] for name in names if name in mine})

    def united(self, other: "CommitStatement | None") -> "CommitStatement":
        """Return both statements about the same generation in one."""
        if other is None:
            return self
        hosts = self.hosts if set(self.hosts) >= set(other.hosts) else (
            tuple(sorted({*self.hosts, *other.hosts}))
        )  # fmt: skip
        return CommitStatement(hosts, {**other.fingerprints, **self.fingerprints})

    def difference(self, other: "CommitStatement") -> list[str]:
        """Return the tensors with different fingerprints, sorted."""
        mine, its = self.fingerprints, other.fingerprints
        return sorted(name for name in mine.keys() & its.keys() if mine[name] != its[name])


def unite_committed(statements: Iterable[CommitStatement | None]) -> CommitStatement | None:
    """Return these statements in one; None if there is none."""
    hosts: set[str] = set()
    fingerprints: dict[str, int] = {}
    found = [each for each in statements if each is not None]
    last: tuple[str, ...] = ()
    for each in found:
        if each.hosts is not last:  # usually all parts name the same
            hosts.update(each.hosts)
            last = each.hosts
        fingerprints.update(each.fingerprints)
    return CommitStatement(tuple(sorted(hosts)), fingerprints) if found else None
