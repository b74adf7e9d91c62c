"""A generation on a disk as a host's own part: the manifest has the rows, links lead to the files.

Nothing is copied, so that a state of any size is at hand at once and each host reads its share.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from scalai.core.errors import StoreError
from scalai.core.tensors.collection import concatenate
from scalai.store.generation import unite_hosts
from scalai.store.manifest import HostManifest, StoredFile
from scalai.store.parts import ATTACHED, attached_hosts, empty_part, piece_keys


@dataclass(frozen=True, eq=False, slots=True)
class Attachment:
    """A host's part with what was attached to it: its manifest, and the target of each link by the
    name of the link."""

    manifest: HostManifest
    links: dict[str, Path]


def attachment(
    host: str, parts: Sequence[tuple[Path, HostManifest]], own: HostManifest | None
) -> Attachment:
    """Return ``host``'s part of a generation with all pieces of these ``parts`` that it has not.

    Args:
        parts: Directory, without links in its path, and manifest of parts of one generation.
        own: What the host has of it already, None for nothing.

    Raises:
        StoreError: They are not parts of one generation, or ``own`` is of another one of the same
            number. LayoutError: Their tensors differ.
    """
    generation = unite_hosts([part for _, part in parts], [path for path, _ in parts])
    first = generation.hosts[0]
    for part in (*generation.hosts, *(() if own is None else (own,))):
        if _state(part) != _state(first):
            raise StoreError(
                f"{parts[0][0].parent} and host {part.host!r} have different states under the "
                f"number {first.generation}: {first.about.get('snapshot')!r} of step {first.step} "
                f"and {part.about.get('snapshot')!r} of step {part.step}. Move one of them away."
            )
    grown = empty_part(first, host) if own is None else own
    held = set(piece_keys(grown.collection))
    links: dict[str, Path] = {}
    for part, directory in zip(generation.hosts, generation.directories, strict=True):
        assert directory is not None
        rows = []
        for row, key in enumerate(piece_keys(part.collection)):
            if key not in held:
                held.add(key)
                rows.append(row)
        if rows:
            grown = _with_rows(grown, part, np.array(rows, dtype=np.int64), directory, links)
    is_first = own is None
    whole = replace(generation, hosts=(*([] if is_first else [grown]), *generation.hosts))
    about = {
        **grown.about,
        ATTACHED: {
            "hosts": sorted({*attached_hosts(grown), *(part.host for part in generation.hosts)}),
            "directory": str(parts[0][0].parent),
        },
    }
    manifest = replace(
        grown,
        about=about,
        ranks=tuple(sorted({*grown.ranks, *(r for part in generation.hosts for r in part.ranks)})),
        scalars=whole.scalars,
        rank_state=whole.rank_state,
    )
    return Attachment(manifest, links)


def _state(part: HostManifest) -> tuple[object, int]:
    """Return what parts of one state have in common."""
    return part.about.get("snapshot"), part.step


def _with_rows(
    own: HostManifest, part: HostManifest, rows: np.ndarray[tuple[int], np.dtype[np.int64]],
    directory: Path, links: dict[str, Path],
) -> HostManifest:  # fmt: skip
    """Return ``own`` with rows of a part, and note the links to their files."""
    used, places = np.unique(part.file[rows], return_inverse=True)
    files: list[StoredFile] = []
    for number in used.tolist():
        stored = part.files[number]
        taken = {file.name for file in (*own.files, *files)}
        place = len(taken)
        while (name := f"{place}-{stored.name}") in taken:
            place += 1  # files in between have gone
        links[name] = directory / stored.name
        files.append(StoredFile(name, stored.size_bytes))
    return replace(
        own,
        collection=concatenate([own.collection, part.collection.select(rows)]),
        file=np.concatenate([own.file, places + len(own.files)]),
        begin=np.concatenate([own.begin, part.begin[rows]]),
        fingerprint=np.concatenate([own.fingerprint, part.fingerprint[rows]]),
        files=(*own.files, *files),
        committed=part.committed if own.committed is None else own.committed.united(part.committed),
        unproven=(
            *own.unproven,
            *(len(own.files) + at for at, n in enumerate(used.tolist()) if n in part.unproven),
        ),
    )
