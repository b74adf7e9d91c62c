"""The directory that a conversion writes: where it grows, how it gets its name, what is in its way.

It grows as ``.<name>.partial`` beside its place, and is renamed once it is whole.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import REPORT, Checkpoint, Target
from scalai.core.errors import StoreError, UsageError
from scalai.runtime.at_once import at_once
from scalai.store.atomic import rename_durably, replace_file, sync_directory, sync_file


def place_of(destination: Path) -> Path:
    """Return where a destination lies: a link is followed, so that what it names is filled, and on
    the disk that it names. Raises ``UsageError`` for a link that names itself."""
    try:
        return destination.resolve() if destination.is_symlink() else destination
    except (OSError, RuntimeError) as error:  # a loop is either, by the version of Python
        raise UsageError(
            f"{destination} is a link that leads nowhere ({error}). Name another destination."
        ) from error


def partial_of(destination: Path) -> Path:
    """Return where a destination grows."""
    return destination.parent / f".{destination.name}.partial"


@contextmanager
def writing(destination: Path) -> Iterator[None]:
    """Raise ``StoreError`` for what the operating system refuses meanwhile."""
    try:
        yield
    except BrokenPipeError:  # nobody reads what is told
        raise
    except OSError as error:
        raise StoreError(
            f"{destination} cannot be written: {error.filename or 'a file there'}: "
            f"{error.strerror or error}. Name a destination that this user can write, or mend that "
            "and run the same command again to go on."
        ) from error


def check_apart(source: Checkpoint, destination: Path) -> None:
    """Raise ``UsageError`` where one lies in the other."""
    here, there = source.directory.resolve(), destination.resolve()
    if here.is_relative_to(there) or there.is_relative_to(here):
        raise UsageError(
            f"the destination {destination} and the source {source.directory} lie in each other. "
            "Name another destination."
        )


def check_free(destination: Path, overwrite: bool) -> None:
    """Raise ``UsageError`` where something is there that may not be replaced."""
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
    """Raise ``StoreError`` where the disk has less room than what is still to be written."""
    have = sum(file.stat().st_blocks * 512 for file in partial.rglob("*") if file.is_file())
    free = shutil.disk_usage(partial.parent).free
    if needed - have > free:
        raise StoreError(
            f"{partial.parent} has {free} bytes free, and {needed - have} are needed. Make room, "
            "or name a destination on another disk."
        )


def complete(
    partial: Path, target: Target, rows: npt.NDArray[np.uint64], report: Mapping[str, Any]
) -> None:
    """Write what ends a checkpoint, and bring all to disk."""
    replace_file(partial / REPORT, (json.dumps(report, indent=1) + "\n").encode())
    at_once(sync_file, [partial / file.path for file in target.placed.files])
    target.finish(partial, rows)
    for directory in sorted({(partial / file.path).parent for file in target.placed.files}):
        sync_directory(directory)
    sync_directory(partial)


def publish(partial: Path, destination: Path, overwrite: bool) -> None:
    """Rename the finished directory; what was there before goes last."""
    replaced = destination.parent / f".{destination.name}.replaced"
    _remove(replaced)
    if overwrite and destination.exists():
        os.rename(destination, replaced)
    rename_durably(partial, destination)
    _remove(replaced)


def _remove(path: Path) -> None:
    """Remove a file, or as much of a directory as can be."""
    if path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
