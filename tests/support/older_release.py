"""What an older release left: its fingerprints are of version 1, and nothing says so but the
version of the file that they stand in."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scalai.converters.checkpoint import REPORT, Checkpoint
from scalai.converters.fingerprints import fingerprints
from scalai.core.collection import concatenate
from scalai.core.fingerprint import piece_fingerprint, tensor_fingerprints
from scalai.store.manifest import _digest, read_manifest
from scalai.store.parts import StoredRows
from scalai.store.places import MANIFEST


def saved_by_an_older_release(directories: Sequence[Path]) -> None:
    """Make all parts of a generation, one directory a host, what a release with fingerprints of
    version 1 would have written. Their pieces are as they were written."""
    parts = [read_manifest(directory) for directory in directories]
    prints = []
    for directory, part in zip(directories, parts, strict=True):
        stored = StoredRows(directory, part)
        boxes = [part.collection.box(row) for row in range(len(part.collection))]
        prints.append(
            [
                piece_fingerprint(stored.view(row), box, tensor.shape, 1)
                for row, (tensor, box) in enumerate(boxes)
            ]
        )
    rows = concatenate([part.collection for part in parts])
    values = np.array([value for values in prints for value in values], dtype=np.uint64)
    totals = tensor_fingerprints(rows, values, 1)
    for directory, part, own in zip(directories, parts, prints, strict=True):
        content = part.to_json()
        del content["fingerprint_version"]
        content |= {"version": 1, "fingerprint": [f"{value:016x}" for value in own]}
        if part.committed is not None:
            texts = {name: f"{value:016x}" for name, value in totals.items()}
            content["committed"] = {**content["committed"], "fingerprints": texts}
        text = json.dumps({"digest": _digest(content), **content}, separators=(",", ":"))
        (directory / MANIFEST).write_text(text)


def reported_by_an_older_release(folder: Path, checkpoint: Checkpoint) -> None:
    """Make the report that a conversion left in ``folder`` what a release with fingerprints of
    version 1 would have left."""
    path = folder / REPORT
    report = json.loads(path.read_text())
    del report["fingerprint_version"]
    prints = fingerprints(checkpoint, 1, 1)
    report |= {"version": 1, "fingerprints": {n: f"{v:016x}" for n, v in prints.items()}}
    path.write_text(json.dumps(report))
