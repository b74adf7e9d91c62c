"""The directory of a conversion: its growth beside its place, its name, its files without tensors.

It grows as ``.<name>.partial`` beside its place and is renamed once it is whole. Files without
tensors are copied, synced and read back; their digests are kept in the report, under ``beside``.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import REPORT, AuxiliaryFile, Checkpoint, CheckpointTarget
from scalai.converters.opening import read_json
from scalai.converters.torch_archive import check_members
from scalai.core.errors import ProofError, RefusedError, StoreError, UsageError
from scalai.runtime.at_once import at_once
from scalai.store.atomic import rename_durably, replace_file, sync_directory, sync_file


def place_of(destination: Path) -> Path:
    """Return a destination's place: a link is followed, so its target, on that disk, is filled.
    Raises ``UsageError`` for a link to itself."""
    try:
        return destination.resolve() if destination.is_symlink() else destination
    except (OSError, RuntimeError) as error:  # a loop is either, by the version of Python
        raise UsageError(
            f"{destination} is a link that leads nowhere ({error}). Name another destination."
        ) from error


def partial_of(destination: Path) -> Path:
    return destination.parent / f".{destination.name}.partial"


@contextmanager
def writing(destination: Path) -> Iterator[None]:
    """Turn refusals of the operating system into ``StoreError``."""
    try:
        yield
    except BrokenPipeError:  # nobody reads the output
        raise
    except OSError as error:
        raise StoreError(
            f"{destination} cannot be written: {error.filename or 'a file there'}: "
            f"{error.strerror or error}. Name a destination that this user can write, or mend that "
            "and run the same command again to go on."
        ) from error


def check_apart(source: Checkpoint, destination: Path) -> None:
    """Raise ``UsageError`` if one lies in the other."""
    here, there = source.directory.resolve(), destination.resolve()
    if here.is_relative_to(there) or there.is_relative_to(here):
        raise UsageError(
            f"the destination {destination} and the source {source.directory} lie in each other. "
            "Name another destination."
        )


def check_free(destination: Path, overwrite: bool) -> None:
    """Raise ``UsageError`` for an existing destination that may not be replaced."""
    is_taken = destination.exists() and (destination.is_file() or any(destination.iterdir()))
    if is_taken and not overwrite:
        raise UsageError(f"{destination} exists. Name another one, or pass --overwrite.")


def finished(destination: Path, identity: str) -> Mapping[str, Any] | None:
    """Return the report of this very conversion, if another part has finished it already."""
    try:
        report = json.loads((destination / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_it = isinstance(report, dict) and report.get("conversion") == identity
    return report if is_it else None


def check_room(partial: Path, needed: int) -> None:
    """Raise ``StoreError`` if the disk has less room than the bytes still to be written."""
    have = sum(file.stat().st_blocks * 512 for file in partial.rglob("*") if file.is_file())
    free = shutil.disk_usage(partial.parent).free
    if needed - have > free:
        raise StoreError(
            f"{partial.parent} has {free} bytes free, and {needed - have} are needed. Make room, "
            "or name a destination on another disk."
        )


def complete(
    partial: Path, target: CheckpointTarget, rows: npt.NDArray[np.uint64], report: Mapping[str, Any]
) -> None:
    """Write the files that complete a checkpoint, and sync everything to disk."""
    replace_file(partial / REPORT, (json.dumps(report, indent=1) + "\n").encode())
    at_once(sync_file, [partial / file.path for file in target.placed.files])
    target.finish(partial, rows)
    for directory in sorted({(partial / file.path).parent for file in target.placed.files}):
        sync_directory(directory)
    sync_directory(partial)


def publish(partial: Path, destination: Path, overwrite: bool) -> None:
    """Rename the finished directory; its predecessor goes last."""
    replaced = destination.parent / f".{destination.name}.replaced"
    _remove(replaced)
    if overwrite and destination.exists():
        os.rename(destination, replaced)
    rename_durably(partial, destination)
    _remove(replaced)


def _remove(path: Path) -> None:
    if path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


AUXILIARY = "beside"
"""The digests' key in the proof."""
BLOCK_BYTES = 4 << 20


def identify(file: AuxiliaryFile) -> bytes:
    """Return a value that changes with a file's content."""
    if file.source is None:
        return repr(file.path).encode() + (file.content or b"")
    stat = file.source.stat()
    return repr((file.path, str(file.source), stat.st_size, stat.st_mtime_ns)).encode()


def write_auxiliary(directory: Path, target: CheckpointTarget) -> dict[str, str]:
    """Write a target's files without tensors.

    Returns:
        Their SHA-256 by path.

    Raises:
        ProofError: Bytes read back differ from bytes written.
        RefusedError: One of torch's files differs from its checksums.
    """
    digests = {file.path: _write_file(directory / file.path, file) for file in target.auxiliary}
    for folder in sorted({(directory / path).parent for path in digests}):
        sync_directory(folder)
    return digests


def _write_file(path: Path, file: AuxiliaryFile) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with open(path, "wb") as target:
        for block in _file_blocks(file):
            digest.update(block)
            target.write(block)
        target.flush()
        os.fsync(target.fileno())
    if _digest(path) != digest.hexdigest():
        raise ProofError(
            f"{path} is not what was written to it. The disk or the memory is not sound: check "
            "them and run again."
        )
    return digest.hexdigest()


def _file_blocks(file: AuxiliaryFile) -> Iterator[bytes]:
    if file.source is None:
        yield file.content or b""
        return
    with open(file.source, "rb") as source:
        check_members(source, str(file.source))
        source.seek(0)
        while block := source.read(BLOCK_BYTES):
            yield block


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_auxiliary(checkpoint: Checkpoint) -> None:
    """Compare the files without tensors with the digests in a conversion's report.

    Raises:
        ProofError: They differ, or are missing; names them.
        RefusedError: The report is damaged.
    """
    for folder in (checkpoint.directory, *checkpoint.directory.parents[:2]):
        recorded = _recorded(folder / REPORT)
        wrong = [
            path
            for path, digest in sorted(recorded.items())
            if not (folder / path).is_file() or _digest(folder / path) != digest
        ]
        if wrong:
            raise ProofError(
                f"{len(wrong)} files beside the tensors are missing or not what {folder / REPORT} "
                f"says was written: {', '.join(wrong[:5])}. They were changed since."
            )


def _recorded(path: Path) -> Mapping[str, str]:
    if not path.is_file():
        return {}
    report: Any = read_json(path)
    recorded = report.get(AUXILIARY, {}) if isinstance(report, dict) else None
    if not isinstance(recorded, dict) or not all(
        isinstance(text, str) and ".." not in Path(text).parts for text in recorded
    ):
        raise RefusedError(f"{path} is damaged. Remove it, or convert again.")
    return recorded
