"""The fingerprints of a generation: those that were committed, with which every proof compares."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from scalai.core.collection import concatenate
from scalai.core.errors import ProofError
from scalai.core.fingerprint import VERSION, combine, tensor_fingerprints
from scalai.core.region import Box
from scalai.store.manifest import HostManifest

_FETCHED = "fetched-"
"""In the names of files whose pieces came from other hosts."""


def deposited_fingerprints(parts: Iterable[HostManifest]) -> Mapping[str, int]:
    """Return the fingerprint of every tensor by name, added up from the pieces of a deposit. Equal
    boxes on several hosts must agree (``ProofError``)."""
    parts = list(parts)
    rows = concatenate([part.collection for part in parts])
    values = np.concatenate([part.fingerprint for part in parts])
    return tensor_fingerprints(rows, values, one_version(parts))


def one_version(parts: Iterable[HostManifest]) -> int:
    """Return the version of the fingerprints of all these parts. Raises ``ProofError`` where there
    are several: they do not tell anything of each other."""
    found = {part.fingerprint_version: part.host for part in parts}
    if len(found) > 1:
        told = ", ".join(f"{version} on host {host!r}" for version, host in sorted(found.items()))
        raise ProofError(
            f"the parts have fingerprints of several versions ({told}): two releases saved them, "
            "so they are not one state. Remove those of one release, or start without its hosts."
        )
    return next(iter(found))


def committed_fingerprints(parts: Iterable[HostManifest]) -> Mapping[str, int]:
    """Return the fingerprint of every tensor of a whole generation by name, as it was committed.

    Raises:
        ProofError: The parts say different things, or an older release wrote them, which said
            nothing, and their pieces tell it no more.
    """
    parts = list(parts)
    version = one_version(parts) if parts else VERSION
    stated = [(part.host, part.committed) for part in parts if part.committed is not None]
    for host, committed in stated[1:]:
        differ = committed.difference(stated[0][1])
        if differ:
            raise ProofError(
                f"hosts {stated[0][0]!r} and {host!r} hold parts of generation "
                f"{parts[0].generation} that were committed with other fingerprints of "
                f"{len(differ)} tensors ({', '.join(differ[:5])}). One of them is of another "
                "state: remove its part, or start without its host."
            )
    return stated[0][1].fingerprints if stated else _fingerprints_of_a_cover(parts, version)


def _fingerprints_of_a_cover(parts: Sequence[HostManifest], version: int) -> Mapping[str, int]:
    """Add up pieces that cover every tensor once: those that were deposited, before those that were
    fetched and may overlap with them."""
    pieces = [
        (_FETCHED in part.files[file].name, -int(size), number, row)
        for number, part in enumerate(parts)
        for row, (file, size) in enumerate(
            zip(part.file.tolist(), part.collection.size_bytes().tolist(), strict=True)
        )
    ]
    chosen: dict[str, dict[Box, int]] = {}
    for _, _, number, row in sorted(pieces):
        tensor, box = parts[number].collection.box(row)
        boxes, value = chosen.setdefault(tensor.name, {}), int(parts[number].fingerprint[row])
        if boxes.get(box, value) != value:
            raise ProofError(
                f"replicas of {list(box.offset)}+{list(box.shape)} of {tensor.name!r} differ among "
                f"hosts {[part.host for part in parts]}. Resume from an older generation."
            )
        if box.numel and not any(box.intersect(other) for other in boxes):
            boxes[box] = value
    shapes = {t.name: t for part in parts for t in part.collection.tensors}
    holes = [n for n, boxes in chosen.items() if sum(b.numel for b in boxes) != shapes[n].numel]
    if holes:
        raise ProofError(
            f"{len(holes)} tensors of generation {parts[0].generation} are cut so that their "
            f"pieces do not tell their fingerprint: {', '.join(sorted(holes)[:5])}. Resume from "
            "another generation."
        )
    return {name: combine(boxes.values(), version) for name, boxes in chosen.items()}
