"""Pieces of a generation that have not changed since another one that this host holds: they are
copied from there, and do not cross again.

A copy has bytes of its own, so neither generation depends on the other's files, and its fingerprint
is computed of these bytes as that of a piece that has come: what differs is fetched.
"""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scalai.core.collection import Collection, Columns
from scalai.core.errors import StoreError
from scalai.store.files import contiguous_chunks, write_at
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest
from scalai.store.parts import attached_hosts, fingerprints_of, piece_keys

log = logging.getLogger(__name__)

Prints = npt.NDArray[np.uint64]


def copy_unchanged(
    store: HostStore,
    generation: int,
    version: int,
    pieces: Collection,
    stated: Mapping[int, int],
    path: Path,
    begins: Columns,
    check: Callable[[], None],
) -> dict[int, int]:
    """Copy pieces that another generation of this host has with the same content. Blocks.

    Args:
        store: This host's.
        generation: Of which the pieces are.
        version: Of its fingerprints.
        pieces: What is wanted.
        stated: What their hosts say is the fingerprint of each, by row, of those that they have as
            they are wanted.
        path: Where they go.
        begins: At which byte of it, [rows].
        check: Raises where it is not needed any more.

    Returns:
        The fingerprints of the rows that lie there now, by row: each is the stated one.

    Raises:
        OSError: The file cannot be written.
    """
    found: dict[int, int] = {}
    for older in sorted(store.generations(), reverse=True):
        left = {row: value for row, value in stated.items() if row not in found}
        if older != generation and left:
            try:
                found |= _copy(store, older, version, pieces, left, path, begins, check)
            except StoreError as error:  # it was dropped, or a file of it has gone
                check()
                log.warning("event=not_copied generation=%d: %s", older, error)
    return found


def _copy(
    store: HostStore,
    older: int,
    version: int,
    pieces: Collection,
    stated: Mapping[int, int],
    path: Path,
    begins: Columns,
    check: Callable[[], None],
) -> dict[int, int]:
    manifest = store.manifest(older)
    # Files that are attached lie on a disk, which may be slow or hang.
    if manifest.fingerprint_version != version or attached_hosts(manifest):
        return {}
    with store.open_rows(older) as rows:
        pairs = _alike(rows.manifest, pieces, stated)
        if not pairs:
            return {}
        descriptor = os.open(path, os.O_WRONLY)
        try:
            for row, source in pairs.items():
                check()
                begin = int(begins[row])
                for chunk in contiguous_chunks(rows.view(source)):
                    write_at(descriptor, chunk, begin)
                    begin += len(chunk)
        finally:
            os.close(descriptor)
    copied = np.array(list(pairs), dtype=np.int64)
    prints = fingerprints_of(path, pieces.select(copied), begins[copied], version).tolist()
    found = dict(zip(copied.tolist(), prints, strict=True))
    damaged = [row for row, value in found.items() if value != stated[row]]
    if damaged:
        log.warning(
            "event=damaged generation=%d host=%s: %d pieces are not what they were, among them of "
            "%r; they are fetched",
            older, store.host, len(damaged), pieces.box(damaged[0])[0].name,
        )  # fmt: skip
    return {row: value for row, value in found.items() if value == stated[row]}


def _alike(manifest: HostManifest, pieces: Collection, stated: Mapping[int, int]) -> dict[int, int]:
    """Return in which row of a manifest each of these pieces is with the stated fingerprint, by its
    own row; rows that are nowhere are not in it."""
    held = {
        (*key, value): row
        for row, (key, value) in enumerate(
            zip(piece_keys(manifest.collection), manifest.fingerprint.tolist(), strict=True)
        )
    }
    found = {}
    for row, key in enumerate(piece_keys(pieces)):
        source = held.get((*key, stated[row])) if row in stated else None
        if source is None:
            continue
        number = int(manifest.collection.tensor[source])
        if manifest.collection.tensors[number] == pieces.tensors[int(pieces.tensor[row])]:
            found[row] = source
    return found
