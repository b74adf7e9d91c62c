"""A committed part copied elsewhere: the same bytes and manifest, on a disk."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from scalai.core.errors import StoreError
from scalai.store.atomic import make_folder, rename_durably, write_new
from scalai.store.manifest import HostManifest, read_manifest, write_manifest
from scalai.store.parts import StoredRows, attached_hosts, piece_keys, with_files
from scalai.store.places import generation_name
from scalai.store.pool import free_bytes


def copy_part(rows: StoredRows, directory: Path) -> Path:
    """Copy a part to ``<directory>/generation-<n>/<host>`` and bring it to disk; returns that.

    Streams, and appears under its name only when it is whole. An attached generation is found
    saved. What this host has got since it saved or attached it lies beside, as ``<host>.<k>``.

    Raises:
        StoreError: No room, or another state is there under this number.
    """
    manifest = rows.manifest
    folder = directory / generation_name(manifest.generation)
    try:
        there = parts_there(folder, manifest)
        wanted = missing_files(manifest, there)
        if there and not wanted:
            return folder / manifest.host if folder / manifest.host in there else folder
        target = free_name(folder, manifest.host)
        write_part(rows, wanted, target.name, target, write_new)
    except OSError as error:
        raise no_disk(directory, manifest, error) from error
    return target


def no_disk(directory: Path, part: HostManifest, error: OSError) -> StoreError:
    """Return the error for a part that cannot be written below a durable directory."""
    room = f", {free_bytes(directory)} are free" if directory.is_dir() else ""
    return StoreError(
        f"{directory / generation_name(part.generation) / part.host} cannot be written "
        f"({error.strerror}); {part.size_bytes} bytes are needed{room}. Make room or choose "
        "another --durable-dir."
    )


def parts_there(folder: Path, manifest: HostManifest) -> dict[Path, HostManifest]:
    """Return the parts of this generation that are on the disk. Raises ``StoreError`` where they
    are of another state; damaged ones count as absent."""
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith("."):
            continue
        try:
            part = read_manifest(path)
        except StoreError:
            continue
        state, its = ((m.step, m.about.get("snapshot")) for m in (manifest, part))
        if state != its:
            raise StoreError(
                f"{path} holds another state under the same number (step {its[0]}, {its[1]!r}; "
                f"this one is step {state[0]}, {state[1]!r}). Name an empty --durable-dir, or move "
                "that away."
            )
        found[path] = part
    return found


def missing_files(manifest: HostManifest, there: dict[Path, HostManifest]) -> list[int]:
    """Return the files of a part that have to be written: all, or where it came from the disk or
    lies there already, those with pieces that no part there has."""
    if not attached_hosts(manifest) and not any(p.host == manifest.host for p in there.values()):
        return list(range(len(manifest.files)))
    held = {
        (key, value)
        for part in there.values()
        for key, value in zip(piece_keys(part.collection), part.fingerprint.tolist(), strict=True)
    }
    mine = zip(piece_keys(manifest.collection), manifest.fingerprint.tolist(), strict=True)
    files = manifest.file.tolist()
    return sorted({file for piece, file in zip(mine, files, strict=True) if piece not in held})


def free_name(folder: Path, host: str) -> Path:
    """Return where one more part of a host appears: ``<host>``, or ``<host>.<k>``."""
    target, number = folder / host, 2
    while target.exists():
        target, number = folder / f"{host}.{number}", number + 1
    return target


def write_part(
    rows: StoredRows,
    wanted: Sequence[int],
    name: str,
    place: Path,
    write: Callable[[Path, memoryview], None],
) -> None:
    """Write these files of a part, and the manifest of what lies in them, so that it is the part
    ``name``; it appears at ``place`` when it is whole. What an attempt leaves is removed.

    Args:
        write: Writes one file and brings its bytes to disk.
    """
    manifest = replace(with_files(rows.manifest, wanted), host=name)
    partial = place.parent / f".{name}.partial"
    try:
        make_folder(place.parent)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        for number in wanted:
            write(partial / rows.manifest.files[number].name, rows.files[number])
        write_manifest(partial, manifest)
        rename_durably(partial, place)
    except (OSError, StoreError):
        shutil.rmtree(partial, ignore_errors=True)
        raise
