"""Fingerprints of a checkpoint's tensors: computed, and compared with recorded ones.

Fingerprints are recorded by some layouts, and by the conversion that wrote a checkpoint.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import REPORT, REPORT_VERSION, Checkpoint, PlacedTensors
from scalai.converters.forked import map_forked
from scalai.converters.opening import read_json
from scalai.converters.source_files import SourceFiles
from scalai.converters.work import HERE
from scalai.core.errors import ProofError, RefusedError
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.coverage import check_coverage
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.fingerprint import (
    VERSION,
    combine,
    piece_fingerprint,
    sure_fingerprints,
    tensor_fingerprints,
)
from scalai.core.tensors.holders import Holder
from scalai.core.tensors.plan import plan
from scalai.core.tensors.region import Box, box_text, whole
from scalai.store.files import blocks

PART_ELEMENTS = 1 << 22
"""Elements of one look."""
BATCH = 64
"""Rows of a worker's batch."""


def fingerprints(checkpoint: Checkpoint, workers: int) -> Mapping[str, int]:
    """Return the fingerprint of every tensor.

    Raises:
        LayoutError: Holes, or shards that overlap without being replicas.
        ProofError: Replicas of a shard differ.
    """
    placed = checkpoint.placed
    check_coverage(placed.collection, exact_partition=not checkpoint.may_overlap)
    if checkpoint.may_overlap:
        placed = _without_overlaps(placed)
        checkpoint = replace(checkpoint, placed=placed)
    rows = row_fingerprints(checkpoint, range(len(placed.collection)), workers)
    return tensor_fingerprints(placed.collection, rows)


def row_fingerprints(
    checkpoint: Checkpoint, rows: Sequence[int], workers: int
) -> npt.NDArray[np.uint64]:
    values, files = np.zeros(len(rows), dtype=np.uint64), SourceFiles(checkpoint.directory)

    def compute(numbers: range) -> list[int]:
        return [_row_fingerprint(files, checkpoint.placed, rows[number]) for number in numbers]

    for numbers, found in map_forked(compute, row_batches(len(rows)), workers):
        values[numbers.start : numbers.stop] = found
    return values


def _without_overlaps(placed: PlacedTensors) -> PlacedTensors:
    tensors = placed.collection.tensors
    wanted = Collection.of((tensor, whole(tensor.shape)) for tensor in tensors)
    copies = plan([Holder(HERE, placed.collection)], [Holder(HERE, wanted)]).copies
    row = copies.source_row
    items = np.array([ITEM_BYTES[t.dtype] for t in tensors], dtype=np.int64)
    number = placed.collection.tensor[row]
    shift = ((copies.offset - placed.collection.offset[row]) * placed.stride[row]).sum(axis=1)
    return PlacedTensors(
        Collection(tensors, number, copies.offset, copies.shape),
        placed.file[row], placed.begin[row] + shift * items[number], placed.stride[row],
        placed.files,
    )  # fmt: skip


def _row_fingerprint(files: SourceFiles, placed: PlacedTensors, row: int) -> int:
    tensor, box = placed.collection.box(row)
    views = ((part, files.view(placed, row, part)) for part in parts_of(box))
    prints = (piece_fingerprint(view, part, tensor.shape) for part, view in views)
    return combine(prints)


def parts_of(box: Box) -> Iterator[Box]:
    """Yield a box in parts of a bounded number of elements."""
    for block in blocks(box.shape, PART_ELEMENTS):
        yield Box(tuple(a + b for a, b in zip(box.offset, block.offset, strict=True)), block.shape)


def row_batches(count: int) -> list[range]:
    return [range(low, min(low + BATCH, count)) for low in range(0, count, BATCH)]


def checked_fingerprints(checkpoint: Checkpoint, workers: int) -> Mapping[str, int]:
    """Return the fingerprint of every tensor, once all pieces are as their layout notes them.

    Raises:
        LayoutError, ProofError: As ``fingerprints`` and ``check_recorded``.
    """
    if checkpoint.recorded is None:
        return fingerprints(checkpoint, workers)
    check_coverage(checkpoint.placed.collection, exact_partition=False)
    check_recorded(checkpoint, range(len(checkpoint.recorded)), workers)
    known, unsure = recorded_fingerprints(checkpoint)
    return fingerprints(checkpoint, workers) if unsure else known


def check_recorded(checkpoint: Checkpoint, rows: Sequence[int], workers: int) -> None:
    """Compare some pieces with the fingerprints of their layout.

    Raises:
        ProofError: They differ; names tensors and boxes.
    """
    if checkpoint.recorded is None or not len(rows):
        return
    found = row_fingerprints(checkpoint, rows, workers)
    differing = np.flatnonzero(found != checkpoint.recorded[list(rows)])
    if len(differing):
        named = [_difference(checkpoint, rows[n], int(found[n])) for n in differing[:5].tolist()]
        raise ProofError(
            f"{len(differing)} pieces are not what {checkpoint.directory} says was written: "
            f"{'; '.join(named)}. The files were damaged or changed: use another checkpoint."
        )


def _difference(checkpoint: Checkpoint, row: int, found: int) -> str:
    assert checkpoint.recorded is not None
    placed = checkpoint.placed
    tensor, box = placed.collection.box(row)
    file = checkpoint.directory / placed.files[placed.file[row]].path
    recorded = int(checkpoint.recorded[row])
    return (
        f"{tensor.name}{box_text(box)} in {file} has fingerprint {found:016x}, not {recorded:016x}"
    )


def recorded_fingerprints(checkpoint: Checkpoint) -> tuple[Mapping[str, int], Sequence[int]]:
    """Return whole tensors' fingerprints, from a layout's own ones of pieces; and the rows of
    tensors with overlapping pieces, whose fingerprints these do not give."""
    if checkpoint.recorded is None:
        return {}, ()
    collection = checkpoint.placed.collection
    known = sure_fingerprints(collection, checkpoint.recorded)
    is_unsure = np.array([tensor.name not in known for tensor in collection.tensors], dtype=bool)
    rows = np.flatnonzero(is_unsure[collection.tensor]) if len(collection) else collection.tensor
    return known, rows.tolist()


def check_stated(checkpoint: Checkpoint) -> None:
    """Compare the sum of the pieces' own fingerprints with the stated ones of whole tensors. Reads
    nothing.

    Raises:
        ProofError: They differ; names the tensors.
    """
    known, _ = recorded_fingerprints(checkpoint)
    _compare(known, checkpoint.stated, checkpoint.directory)


def check_report(checkpoint: Checkpoint, found: Mapping[str, int]) -> None:
    """Compare fingerprints with the layout's own, and with those of a conversion's report.

    Raises:
        ProofError: They differ; names the tensors.
    """
    found = {n: value for n, value in found.items() if n not in checkpoint.changed}
    for recorded in (recorded_fingerprints(checkpoint)[0], checkpoint.stated):
        _compare(found, recorded, checkpoint.directory)
    check_reports(checkpoint.directory, found)


def check_reports(directory: Path, found: Mapping[str, int]) -> None:
    """Compare fingerprints with those of a conversion's report.

    Args:
        directory: The checkpoint's.
        found: Its fingerprints, by tensor.

    Raises:
        ProofError: They differ; names the tensors.
    """
    for path, recorded in _reports(directory):
        _compare(found, recorded, path)


def _reports(directory: Path) -> Iterator[tuple[Path, Mapping[str, int]]]:
    """Yield conversions' reports: paths, and fingerprints by tensor."""
    for folder in (directory, *directory.parents[:2]):
        if (folder / REPORT).is_file():
            yield folder / REPORT, _read_report(folder / REPORT)


def _read_report(path: Path) -> Mapping[str, int]:
    try:
        report = read_json(path)
        recorded = {name: int(value, 16) for name, value in report["fingerprints"].items()}
        versions = report["version"], report["fingerprint_version"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedError(f"{path} is damaged ({error}). Remove it, or convert again.") from error
    if versions != (REPORT_VERSION, VERSION):
        raise RefusedError(
            f"{path} is of version {versions[0]!r} with fingerprints of version {versions[1]!r}; "
            f"read are version {REPORT_VERSION} and fingerprints of version {VERSION}. Use the "
            "release of Scalai that wrote it, or remove it to go on without its proof."
        )
    return recorded


def _compare(found: Mapping[str, int], recorded: Mapping[str, int], where: Path) -> None:
    differing = [
        name for name in sorted(recorded) if name in found and recorded[name] != found[name]
    ]
    if differing:
        raise ProofError(
            f"{len(differing)} tensors are not what {where} says was written: "
            f"{', '.join(differing[:5])}. The files were damaged or changed: "
            "use another checkpoint."
        )


def is_recorded(checkpoint: Checkpoint, names: Iterable[str]) -> bool:
    """Whether the layout, or a conversion's report, has fingerprints of all these tensors;
    ``check_report`` compares with them."""
    known = {*recorded_fingerprints(checkpoint)[0], *checkpoint.stated}
    for _, recorded in _reports(checkpoint.directory):
        known |= recorded.keys()
    return known - checkpoint.changed >= set(names)
