"""A committed part copied elsewhere: the same bytes and manifest, on a disk."""

import shutil
from dataclasses import replace
from pathlib import Path

from scalai.core.errors import StoreError
from scalai.store.atomic import make_folder, rename_durably, write_new
from scalai.store.attachment import attached_hosts
from scalai.store.manifest import HostManifest, read_manifest, write_manifest
from scalai.store.parts import StoredRows, piece_keys, with_files
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
        there = _parts(folder, manifest)
        wanted = _missing(manifest, there)
        if there and not wanted:
            return folder / manifest.host if folder / manifest.host in there else folder
        target = _free_name(folder, manifest.host)
        _write(rows, wanted, target, directory)
    except OSError as error:
        room = f", {free_bytes(directory)} are free" if directory.is_dir() else ""
        raise StoreError(
            f"{folder / manifest.host} cannot be written ({error.strerror}); "
            f"{manifest.size_bytes} bytes are needed{room}. Make room or choose another "
            "--durable-dir."
        ) from error
    return target


def _parts(folder: Path, manifest: HostManifest) -> dict[Path, HostManifest]:
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
        state, its = (
            (m.step, m.about.get("snapshot"), m.fingerprint_version) for m in (manifest, part)
        )
        if state != its:
            raise StoreError(
                f"{path} holds another state under the same number (step {its[0]}, {its[1]!r}, "
                f"fingerprints of version {its[2]}; this one is step {state[0]}, {state[1]!r}, "
                f"version {state[2]}). Name an empty --durable-dir, or move "
                "that away."
            )
        found[path] = part
    return found


def _missing(manifest: HostManifest, there: dict[Path, HostManifest]) -> list[int]:
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


def _free_name(folder: Path, host: str) -> Path:
    target, number = folder / host, 2
    while target.exists():
        target, number = folder / f"{host}.{number}", number + 1
    return target


def _write(rows: StoredRows, wanted: list[int], target: Path, directory: Path) -> None:
    """Write these files of a part, and the manifest of what lies in them."""
    manifest = replace(with_files(rows.manifest, wanted), host=target.name)
    partial = target.parent / f".{target.name}.partial"
    try:
        make_folder(target.parent)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for number in wanted:
            write_new(partial / rows.manifest.files[number].name, rows.files[number])
        write_manifest(partial, manifest)
        rename_durably(partial, target)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
