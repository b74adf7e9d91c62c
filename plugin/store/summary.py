"""A host's part in few words: what the coordinator has to know of it, and what other hosts plan
with. What grows with the number of hosts that gave something (a row for each fetched piece, the
states of all ranks) stays on the host."""

from dataclasses import replace

import numpy as np

from scalai.core.collection import Collection, concatenate
from scalai.core.source_list import Pieces, Reference, merged, used_only
from scalai.store.manifest import HostManifest, StoredFile, manifest_bytes


def snapshot_name(part: HostManifest) -> str:
    """Return what the parts of one snapshot have in common: the run of the coordinator, the round
    and the step, which a host's part says about itself."""
    return str(part.about.get("snapshot", f"generation-{part.generation}"))


def pieces_of(part: HostManifest, rows: int | None = None) -> Pieces:
    """Return the first ``rows`` pieces of a part; None: all."""
    chosen = np.arange(len(part.collection))[:rows]
    return Pieces(
        snapshot_name(part),
        part.step,
        part.fingerprint_version,
        used_only(part.collection.select(chosen)),
        part.fingerprint[chosen],
    )


def reference_of(part: HostManifest) -> Reference:
    """Return by what others know the pieces of a part, or of that which ``part`` summarizes."""
    if part.summarizes is not None:
        return part.summarizes
    return Reference(len(part.collection), pieces_of(part).digest().hex())


def summary_bytes(part: HostManifest) -> bytes:
    """Return the summary of a part as it travels."""
    return manifest_bytes(summary(part))


def summary(part: HostManifest) -> HostManifest:
    """Return a part without the states of its ranks, of which only the coordinates stay; of a
    committed one also with fewer rows, of the same elements, and without their fingerprints: those
    of the tensors are stated."""
    states = dict.fromkeys(part.rank_state)
    short = replace(part, rank_state=states, summarizes=reference_of(part))
    stated = part.committed.fingerprints if part.committed is not None else {}
    if any(tensor.numel and tensor.name not in stated for tensor in part.collection.tensors):
        return short
    is_unproven = np.isin(part.file, part.unproven)
    groups: list[Collection] = []
    for chosen in (~is_unproven, is_unproven):
        groups.append(merged(part.collection.select(np.flatnonzero(chosen))))
    rows = concatenate(groups)
    counts = [len(group) for group in groups]
    files = tuple(
        StoredFile(name, int(group.size_bytes().sum()))
        for name, group in zip(("proven", "unproven"), groups, strict=True)
    )
    return replace(
        short,
        collection=rows,
        file=np.repeat(np.arange(2), counts).astype(np.int64),
        begin=np.zeros(len(rows), dtype=np.int64),
        fingerprint=np.zeros(len(rows), dtype=np.uint64),
        files=files,
        unproven=(1,) if counts[1] else (),
    )
