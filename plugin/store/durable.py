"""A committed part copied elsewhere: the same bytes and manifest, on a disk."""

import os
import shutil
from pathlib import Path

from scalai.core.errors import StoreError
from scalai.store.manifest import read_manifest, sync_directory, write_manifest
from scalai.store.places import generation_name
from scalai.store.pool import free_bytes
from scalai.store.rows import StoredRows


def copy_part(rows: StoredRows, directory: Path) -> Path:
    """Copy a part to ``<directory>/generation-<n>/<host>`` and bring it to disk; returns that.

    Streams, and appears under its name only when it is whole. One that is already there is left as
    it is.

    Raises:
        StoreError: No room, or another state is there under this number.
    """
    manifest = rows.manifest
    target = directory / generation_name(manifest.generation) / manifest.host
    if target.exists():
        if read_manifest(target).digest() == manifest.digest():
            return target
        raise StoreError(
            f"{target} holds another state under the same number. Name an empty --durable-dir, or "
            "remove it."
        )
    partial = target.parent / f".{manifest.host}.partial"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for stored, data in zip(manifest.files, rows.files, strict=True):
            with open(partial / stored.name, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        write_manifest(partial, manifest)
        os.rename(partial, target)
        sync_directory(target.parent)
        sync_directory(directory)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        room = f", {free_bytes(directory)} are free" if directory.is_dir() else ""
        raise StoreError(
            f"{target} cannot be written ({error.strerror}); {manifest.size_bytes} bytes are "
            f"needed{room}. Make room or choose another --durable-dir."
        ) from error
    return target
