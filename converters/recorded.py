"""What is recorded of a checkpoint's content, by its layout or by the conversion that wrote it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from scalai.converters.checkpoint import REPORT, REPORT_VERSION, Checkpoint
from scalai.converters.fingerprints import fingerprints, row_fingerprints
from scalai.converters.opening import read_json
from scalai.core.errors import ProofError, RefusedError
from scalai.core.tensors.coverage import check_coverage
from scalai.core.tensors.fingerprint import VERSION, sure_fingerprints
from scalai.core.tensors.region import box_text


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
    """Compare some pieces with the fingerprints that their layout keeps.

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
    """Return what is found of a row in which file, and what is recorded."""
    assert checkpoint.recorded is not None
    placed = checkpoint.placed
    tensor, box = placed.collection.box(row)
    file = checkpoint.directory / placed.files[placed.file[row]].path
    recorded = int(checkpoint.recorded[row])
    return (
        f"{tensor.name}{box_text(box)} in {file} has fingerprint {found:016x}, not {recorded:016x}"
    )


def recorded_fingerprints(checkpoint: Checkpoint) -> tuple[Mapping[str, int], Sequence[int]]:
    """Return what a layout's own fingerprints of pieces say of whole tensors; and the rows of
    tensors whose pieces overlap, of which they say nothing."""
    if checkpoint.recorded is None:
        return {}, ()
    collection = checkpoint.placed.collection
    known = sure_fingerprints(collection, checkpoint.recorded)
    is_unsure = np.array([tensor.name not in known for tensor in collection.tensors], dtype=bool)
    rows = np.flatnonzero(is_unsure[collection.tensor]) if len(collection) else collection.tensor
    return known, rows.tolist()


def check_stated(checkpoint: Checkpoint) -> None:
    """Compare what the pieces' own fingerprints add up to with what is stated of whole tensors, as
    far as they are whole. Reads nothing.

    Raises:
        ProofError: They differ; names the tensors.
    """
    known, _ = recorded_fingerprints(checkpoint)
    _compare(known, checkpoint.stated, checkpoint.directory)


def check_report(checkpoint: Checkpoint, found: Mapping[str, int]) -> None:
    """Compare fingerprints with those that the layout keeps, and those that a conversion left
    beside a checkpoint.

    Raises:
        ProofError: They differ; names the tensors.
    """
    found = {n: value for n, value in found.items() if n not in checkpoint.changed}
    for recorded in (recorded_fingerprints(checkpoint)[0], checkpoint.stated):
        _compare(found, recorded, checkpoint.directory)
    check_reports(checkpoint.directory, found)


def check_reports(directory: Path, found: Mapping[str, int]) -> None:
    """Compare with the fingerprints that a conversion left beside a checkpoint.

    Args:
        directory: The checkpoint's.
        found: Its fingerprints, by tensor.

    Raises:
        ProofError: They differ; names the tensors.
    """
    for path, recorded in _reports(directory):
        _compare(found, recorded, path)


def _reports(directory: Path) -> Iterator[tuple[Path, Mapping[str, int]]]:
    """Yield the reports of conversions: where they lie, and fingerprints by tensor."""
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
    """Tell whether the layout, or a conversion beside a checkpoint, notes fingerprints of all these
    tensors; ``check_report`` compares with them."""
    known = {*recorded_fingerprints(checkpoint)[0], *checkpoint.stated}
    for _, recorded in _reports(checkpoint.directory):
        known |= recorded.keys()
    return known - checkpoint.changed >= set(names)
