"""What is noted of a checkpoint's content, by its layout or by the conversion that wrote it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from scalai.converters.checkpoint import REPORT, REPORT_VERSION, Checkpoint
from scalai.converters.fingerprints import fingerprints, row_fingerprints
from scalai.converters.intake import read_json
from scalai.core.coverage import check_coverage
from scalai.core.errors import ProofError, RefusedError
from scalai.core.fingerprint import sure_fingerprints
from scalai.store.files import box_text


def checked_fingerprints(checkpoint: Checkpoint, workers: int) -> Mapping[str, int]:
    """Return the fingerprint of every tensor, once all pieces are as their layout notes them.

    Raises:
        LayoutError, ProofError: As ``fingerprints`` and ``check_noted``.
    """
    if checkpoint.noted is None:
        return fingerprints(checkpoint, workers)
    check_coverage(checkpoint.placed.collection, exact_partition=False)
    check_noted(checkpoint, range(len(checkpoint.noted)), workers)
    known, unsure = noted_fingerprints(checkpoint)
    return fingerprints(checkpoint, workers) if unsure else known


def check_noted(checkpoint: Checkpoint, rows: Sequence[int], workers: int) -> None:
    """Compare some pieces with the fingerprints that their layout keeps.

    Raises:
        ProofError: They differ; names tensors and boxes.
    """
    if checkpoint.noted is None or not len(rows):
        return
    found = row_fingerprints(checkpoint, rows, workers)
    differing = np.flatnonzero(found != checkpoint.noted[list(rows)])
    if len(differing):
        named = (checkpoint.placed.collection.box(rows[number]) for number in differing[:5])
        raise ProofError(
            f"{len(differing)} pieces are not what {checkpoint.directory} says was written: "
            f"{', '.join(tensor.name + box_text(box) for tensor, box in named)}. The files were "
            "damaged or changed: use another checkpoint."
        )


def noted_fingerprints(checkpoint: Checkpoint) -> tuple[Mapping[str, int], Sequence[int]]:
    """Return what a layout's own fingerprints of pieces say of whole tensors; and the rows of
    tensors whose pieces overlap, of which they say nothing."""
    if checkpoint.noted is None:
        return {}, ()
    collection = checkpoint.placed.collection
    known = sure_fingerprints(collection, checkpoint.noted)
    is_unsure = np.array([tensor.name not in known for tensor in collection.tensors], dtype=bool)
    rows = np.flatnonzero(is_unsure[collection.tensor]) if len(collection) else collection.tensor
    return known, rows.tolist()


def check_report(checkpoint: Checkpoint, found: Mapping[str, int]) -> None:
    """Compare fingerprints with those that the layout keeps, and those that a conversion left
    beside a checkpoint.

    Raises:
        ProofError: They differ; names the tensors.
    """
    found = {name: value for name, value in found.items() if name not in checkpoint.changed}
    _compare(found, noted_fingerprints(checkpoint)[0], checkpoint.directory)
    check_reports(checkpoint.directory, found)


def check_reports(directory: Path, found: Mapping[str, int]) -> None:
    """Compare with the fingerprints that a conversion left beside a checkpoint. Raises as
    ``check_report``."""
    for folder in (directory, *directory.parents[:2]):
        _check_report(folder / REPORT, found)


def _check_report(path: Path, found: Mapping[str, int]) -> None:
    """Compare with the fingerprints that a conversion left."""
    if not path.is_file():
        return
    try:
        report = read_json(path)
        noted = {name: int(value, 16) for name, value in report["fingerprints"].items()}
        version = report["version"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedError(f"{path} is damaged ({error}). Remove it, or convert again.") from error
    if version != REPORT_VERSION:
        raise RefusedError(
            f"{path} is of version {version!r}, and {REPORT_VERSION} is read. Use the release of "
            "Scalai that wrote it, or remove it to go on without its proof."
        )
    _compare(found, noted, path)


def _compare(found: Mapping[str, int], noted: Mapping[str, int], where: Path) -> None:
    differing = [name for name in sorted(noted) if name in found and noted[name] != found[name]]
    if differing:
        raise ProofError(
            f"{len(differing)} tensors are not what {where} says was written: "
            f"{', '.join(differing[:5])}. The files were damaged or changed: "
            "use another checkpoint."
        )
