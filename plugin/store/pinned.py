"""Files of a generation still read outside of the store: kept by hard links.

A store writes the next snapshot into the files of a dropped generation, unless they have another
name (``FilePool.give``). So a reader gives them one, in a folder of its own:
``pinned-<process>-<n>/generation-<n>/``. Pinned files count as in use (``HostDirectory.room``),
until the store needs the room: the training goes first.
"""

import glob
import itertools
import logging
import os
import secrets
import shutil
import weakref
from contextlib import suppress
from pathlib import Path

from scalai.core.errors import StoreError
from scalai.store.lock import LOCK, StoreLock, find_owner
from scalai.store.places import generation_name
from scalai.store.secure import Folder

PINNED = "pinned"
_FOLDERS = f"{PINNED}-*"

log = logging.getLogger(__name__)


class PinFolder:
    """One process's pins in a host's directory, without access to the store itself.

    They end at the latest with the last reference to it, or the process.

    Raises:
        StoreError: The folder cannot be made: it is not this user's, or there is no room.
    """

    def __init__(self, host_directory: Path) -> None:
        remove_stale(host_directory)
        name = f"{PINNED}-{os.getpid()}-{secrets.token_hex(4)}"
        with Folder.open(host_directory) as host, host.below(name, make=True) as folder:
            self._lock = StoreLock.acquire(folder)
        self.path = host_directory / name
        self._let_go = weakref.finalize(self, _let_go, self.path, self._lock, os.getpid())
        self._numbers = itertools.count()

    def pin(self, directory: Path, generation: int, name: str) -> Path:
        """Keep a file of a generation; return its name for reading.

        Raises:
            FileNotFoundError: The generation went meanwhile. OSError: There is no room for a link.
        """
        folder = self.path / generation_name(generation)
        folder.mkdir(mode=0o700, exist_ok=True)
        link = folder / f"{next(self._numbers)}-{name}"
        os.link(directory / name, link)
        # Only the old name proves the old content: a reused file has lost it.
        if not is_same_file(link.lstat(), directory / name):
            link.unlink(missing_ok=True)
            raise FileNotFoundError(f"generation {generation} went while it was opened")
        return link

    def close(self) -> None:
        """Let all files go."""
        self._let_go()


def _let_go(path: Path, lock: StoreLock, pid: int) -> None:
    """Remove a folder of pins; one inherited by a fork stays its parent's."""
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)
    lock.release()


def remove_stale(host_directory: Path) -> None:
    """Remove the pins of dead processes."""
    for path in _matching(host_directory, _FOLDERS):
        try:
            with Folder.open(path) as folder:
                # Without a lock it is just being made.
                is_stale = (path / LOCK).exists() and find_owner(folder) is None
        except (FileNotFoundError, StoreError):
            continue
        if is_stale:
            shutil.rmtree(path, ignore_errors=True)
            log.info("event=pins_removed directory=%s: their process is gone", path)


def _matching(directory: Path, pattern: str) -> list[Path]:
    """Return the sorted matches; ``Path.glob`` raises if a folder goes meanwhile."""
    return [directory / name for name in sorted(glob.glob(pattern, root_dir=directory))]


def pinned_files(host_directory: Path) -> list[os.stat_result]:
    """Return the status of each pinned file of a host's directory. Pins may end meanwhile."""
    found = []
    for path in _matching(host_directory, f"{_FOLDERS}/generation-*/*"):
        with suppress(FileNotFoundError):
            found.append(path.lstat())
    return found


def expire_dropped(host_directory: Path) -> bool:
    """End the pins of files outside any present generation; True if there were any.

    Their readers get an error from then on (``scalai.vfs.pins``). Files are compared, not names: a
    number may have been used again.
    """
    ended = set()
    for link in _matching(host_directory, f"{_FOLDERS}/generation-*/*"):
        with suppress(FileNotFoundError):
            if not _is_there(link, host_directory / link.parent.name):
                link.unlink()
                ended.add(link.parent)
    for folder in sorted(ended):
        with suppress(OSError):
            folder.rmdir()
        log.warning(
            "event=pin_expired directory=%s: the store needs the room; who still reads that "
            "generation gets an error", folder,
        )  # fmt: skip
    return bool(ended)


def _is_there(link: Path, generation: Path) -> bool:
    """True if a pinned file still belongs to a generation. Raises ``FileNotFoundError`` if the link
    has gone.
    """
    path = generation / link.name.partition("-")[2]
    if path.is_symlink():  # it lies on a disk (which may hang) and takes no room here
        return True
    return is_same_file(link.lstat(), path)


def is_same_file(status: os.stat_result, path: Path) -> bool:
    """Return True if a path leads to the file with this status."""
    try:
        return os.path.samestat(status, path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
