"""Copies of committed parts on a durable disk, at the end of a job or during training.

During training, a part is written under a hidden name and shown once all hosts have written theirs:
a directory shows whole generations only, even after a host's death. A later repair finishes an
interrupted one.

``<durable_dir>/<job>/generation-<n>/.<host>.archived`` is not shown yet;
``<durable_dir>/<job>/.retired-<n>-<token>`` is being removed.
"""

import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from scalai.core.errors import LayoutError, StoreError
from scalai.store.atomic import make_folder, open_new, rename_durably, sync_directory, write_new
from scalai.store.generation import check_whole, unite_hosts
from scalai.store.manifest import HostManifest, read_manifest, write_manifest
from scalai.store.parts import (
    StoredRows,
    attached_hosts,
    is_fetched,
    piece_keys,
    snapshot_name,
    with_files,
)
from scalai.store.places import NUMBERED, generation_name
from scalai.store.pool import free_bytes

STEP_BYTES = 64 << 20
"""Bytes between two syncs: the page cache is left to the training, and a copy can be given up in
between."""
HIDDEN = ".archived"
RETIRED = ".retired-"

log = logging.getLogger(__name__)


class HiddenCopy:
    """A running copy of this generation. Any thread may give it up."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._reason: str | None = None

    def give_up(self, reason: str) -> None:
        self._reason = self._reason or reason

    def check(self) -> None:
        """Raise ``StoreError`` if it was given up."""
        if self._reason is not None:
            raise StoreError(f"generation {self.generation} is not archived: {self._reason}")


def write_hidden(
    rows: StoredRows, directory: Path, *, own_only: bool, check: Callable[[], None]
) -> int:
    """Write a part's files missing on the disk, so that ``show`` can let it appear as
    ``<directory>/generation-<n>/<host>``.

    Args:
        rows: Pieces of the part.
        own_only: Leave out files with pieces of other hosts: those hosts write them.
        check: Called between blocks of ``STEP_BYTES``; raises to end the copy.

    Returns:
        Bytes written.

    Raises:
        StoreError: No room; or another state is there under this number.
    """
    manifest = rows.manifest
    folder = directory / generation_name(manifest.generation)
    try:
        there = parts_there(folder, manifest)
        wanted = missing_files(manifest, there)
        if there and not wanted:
            return 0
        if own_only:
            wanted = [number for number in wanted if not is_fetched(manifest.files[number])]
        name = free_name(folder, manifest.host).name
        place = folder / f".{name}{HIDDEN}"
        shutil.rmtree(place, ignore_errors=True)  # of a failed attempt
        write_part(rows, wanted, name, place, lambda path, data: _write(path, data, check))
    except OSError as error:
        raise no_disk(directory, manifest, error) from error
    return sum(manifest.files[number].size_bytes for number in wanted)


def _write(path: Path, content: memoryview, check: Callable[[], None]) -> None:
    with open_new(path) as file:
        for low in range(0, len(content), STEP_BYTES):
            check()
            file.write(content[low : low + STEP_BYTES])
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), low, STEP_BYTES, os.POSIX_FADV_DONTNEED)


def show(directory: Path, generation: int, snapshot: str) -> None:
    """Let all readable hidden parts of this snapshot appear, also of a host lost after its write.
    Several hosts may do so at once.

    Raises:
        StoreError: The disk refuses.
    """
    folder = directory / generation_name(generation)
    try:
        for path, part in _hidden(folder):
            if snapshot_name(part) == snapshot:
                _appear(path, part)
    except OSError as error:
        raise StoreError(
            f"{error.filename or folder} cannot be renamed ({error.strerror}), as the last step of "
            "archiving it. Repair the disk, or name another --durable-dir."
        ) from error


def repair(directory: Path, host: str) -> None:
    """Finish interrupted archives below ``<durable_dir>/<job>``.

    Hidden parts appear if their generation is already shown (so it was written as a whole), or if
    they are the whole of it. An incomplete generation without shown parts gets a warning. This
    host's partial writes are removed.
    """
    for folder in sorted(directory.glob("generation-*")) if directory.is_dir() else ():
        if NUMBERED.fullmatch(folder.name) is None:
            continue
        try:
            shown = {snapshot_name(part) for part in _shown(folder)}
            hidden = dict(_hidden(folder))
            lacks = "" if shown or not hidden else _lacks(hidden.values())
            for path, part in hidden.items():
                if snapshot_name(part) in shown or not (shown or lacks):
                    log.warning("event=repaired directory=%s", path)
                    _appear(path, part)
            if lacks:  # ``retire`` removes it with later generations
                log.warning("event=not_shown directory=%s is not whole: %s", folder, lacks)
            shutil.rmtree(folder / f".{host}.partial", ignore_errors=True)
        except OSError as error:
            log.debug("%s: %s", folder, error)
    _remove_retired(directory)


def retire(directory: Path, before: int) -> list[int]:
    """Remove the generations older than ``before`` below ``<durable_dir>/<job>``, each by one
    rename.

    Several hosts may do so at once.

    Returns:
        Generations removed by this call.

    Raises:
        StoreError: The disk refuses.
    """
    removed = []
    try:
        for folder in sorted(directory.glob("generation-*")):
            match = NUMBERED.fullmatch(folder.name)
            if match is None or int(match[2]) >= before:
                continue
            with suppress(FileNotFoundError):  # another host was faster
                target = directory / f"{RETIRED}{match[2]}-{secrets.token_hex(4)}"
                rename_durably(folder, target)
                removed.append(int(match[2]))
    except OSError as error:
        raise StoreError(
            f"{error.filename or directory} cannot be removed ({error.strerror}), which is older "
            "than what is kept there. Remove it by hand."
        ) from error
    finally:
        _remove_retired(directory)
    return removed


def _remove_retired(directory: Path) -> None:
    for left in directory.glob(f"{RETIRED}*"):
        shutil.rmtree(left, ignore_errors=True)


def _lacks(parts: Iterable[HostManifest]) -> str:
    try:
        generation = unite_hosts(list(parts))
        if len({snapshot_name(part) for part in generation.hosts}) > 1:
            return "its parts are of several snapshots"
        check_whole(generation.hosts, exact=False)
    except (LayoutError, StoreError) as error:
        return str(error)
    return ""


def _hidden(folder: Path) -> Iterator[tuple[Path, HostManifest]]:
    for path in sorted(folder.glob(f".*{HIDDEN}")):
        with suppress(StoreError, FileNotFoundError):  # it was shown meanwhile, or is torn
            yield path, read_manifest(path)


def _shown(folder: Path) -> Iterator[HostManifest]:
    for path in sorted(folder.iterdir()):
        if not path.name.startswith("."):
            with suppress(StoreError, FileNotFoundError):
                yield read_manifest(path)


def _appear(path: Path, part: HostManifest) -> None:
    """Rename a hidden part. A part already of its name is the same state, saved at the end of a
    job.
    """
    target = path.parent / part.host
    with suppress(FileNotFoundError):  # another host was faster
        if target.exists():
            shutil.rmtree(path)
        else:
            os.rename(path, target)
        sync_directory(path.parent)


def copy_part(rows: StoredRows, directory: Path) -> Path:
    """Copy a part to ``<directory>/generation-<n>/<host>`` and bring it to disk; returns its path.

    Streams, and appears under its name only once it is whole. An attached generation counts as
    saved. Pieces added to a saved or attached part go beside it, as ``<host>.<k>``.

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
    """Return the error for an unwritable part below a durable directory."""
    room = f", {free_bytes(directory)} are free" if directory.is_dir() else ""
    return StoreError(
        f"{directory / generation_name(part.generation) / part.host} cannot be written "
        f"({error.strerror}); {part.size_bytes} bytes are needed{room}. Make room or choose "
        "another --durable-dir."
    )


def parts_there(folder: Path, manifest: HostManifest) -> dict[Path, HostManifest]:
    """Return the parts of this generation on the disk; damaged ones count as absent.

    Raises:
        StoreError: They are of another state.
    """
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
    """Return the files of a part to be written.

    All files; for a part from the disk or partly there, only files with pieces missing there.
    """
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
    """Return the path of a host's next part: ``<host>``, or ``<host>.<k>``."""
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
    """Write these files of a part with a manifest of their pieces, as the part ``name``.

    It appears at ``place`` once it is whole. A failed attempt is removed.

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
