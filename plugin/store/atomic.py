"""Files and folders with the old or the new content after a crash, never in between.

A file is written aside, in the same folder, and renamed into place. *Durable* also survives a power
cut: its bytes are brought to disk before the rename, and the folder's names after it.
``Folder.write`` of ``secure.py`` does the same by descriptor, in places writable by others.
"""

import os
import secrets
from pathlib import Path
from typing import BinaryIO


def replace_file(
    path: Path,
    content: bytes,
    *,
    mode: int = 0o666,
    is_durable: bool = True,
    is_shared: bool = False,
) -> None:
    """Give the file ``path`` this content. A reader finds the old content or the new, whole.

    A crash or an ``OSError`` leaves the old content, and beside it the file ``partial_of(path)``:
    the next call overwrites it without giving its room back first.

    Args:
        mode: Permissions of the new file, less the umask.
        is_durable: Return once content and name are on disk. Otherwise a power cut may leave the
            file empty.
        is_shared: Several processes may write this file at once, the last one wins. Each writes
            aside under another name, removed on failure.

    Raises:
        OSError: There is no room, or the folder cannot be written to.
    """
    aside = partial_of(path)
    if is_shared:
        aside = aside.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.truncate()
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        if is_shared:
            aside.unlink(missing_ok=True)
        raise
    if is_durable:
        sync_directory(path.parent)


def partial_of(path: Path) -> Path:
    """Return the file aside of ``replace_file``. It uses room reserved there."""
    return path.with_name(f".{path.name}.partial")


def write_new(path: Path, content: bytes | memoryview) -> None:
    """Write a new file for this user alone, and bring its bytes to disk.

    Its name is on disk only after ``sync_directory``. Raises ``OSError``; a partial file stays.
    """
    with open_new(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def open_new(path: Path) -> BinaryIO:
    """Make a new file for this user alone. Raises ``OSError``."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return open(os.open(path, flags, 0o600), "wb")


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents durably, for this user alone. Raises ``OSError``."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    sync_directory(folder.parent)


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file or folder within its file system, durably. Raises ``OSError``."""
    os.rename(source, target)
    sync_directory(target.parent)


def sync_directory(directory: Path) -> None:
    """Bring the names in a directory to disk: a rename survives a power cut only after this."""
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sync_file(path: Path) -> None:
    """Bring a file's content to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
