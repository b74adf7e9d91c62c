"""Locks of torch's extension builds. A killed build leaves its lock; later users of the extension
wait for it silently and forever.

Source: ``FileBaton`` of torch/utils/file_baton.py and ``_get_build_directory`` of
torch/utils/cpp_extension.py, 2.13: a builder keeps the lock's file open. Not imported, because it
needs setuptools.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "TORCH_EXTENSIONS_DIR"
LOCK = "lock"
PATIENCE_S = 30.0
"""Seconds before a lock is reported during a start; builds take minutes."""

Identity = tuple[int, int]
"""A file's device and inode; they distinguish successive locks at one path."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock: its path, its age, and this host's process with it open (None: no visible one)."""

    path: Path
    age_s: float
    pid: int | None


def extensions_root() -> Path:
    """Return torch's build directory of extensions in this environment.

    Source: ``user_cache_dir`` of torch/_appdirs.py, 2.13, on Linux.
    """
    cache = os.getenv("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    return Path(os.environ.get(VARIABLE) or Path(cache, "torch_extensions")).resolve()


def find_locks(root: Path) -> Iterator[Lock]:
    """Yield the locks below a directory; torch's default one has another level, for Python's
    version and the accelerator."""
    try:
        found = sorted({*root.glob(f"*/{LOCK}"), *root.glob(f"*/*/{LOCK}")})
    except OSError:  # a network file system does not answer
        return
    for path in found:
        try:
            age_s = time.time() - path.stat().st_mtime
        except OSError:
            continue  # the build has just ended, or the file system does not answer
        yield Lock(path, age_s, _holder(path))


def _holder(path: Path) -> int | None:
    """Return a process with a file open. Reads only names of open files: they may lie on a hanging
    file system."""
    wanted = os.path.realpath(path)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            for name in os.listdir(process / "fd"):
                with suppress(OSError):  # this one is closed meanwhile
                    if os.readlink(process / "fd" / name) == wanted:
                        return int(process.name)
    return None


class WorkersLocks:
    """Extension builds of one round's workers, and the locks of killed ones.

    Removes only locks seen in a worker's hands: others may belong to another job or host.
    """

    def __init__(self, root: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = root, clock
        self._held: dict[int, dict[Path, Identity]] = {}
        self._since: dict[Path, float] = {}
        self._logged: set[Path] = set()

    def look(self, pids: Iterable[int]) -> None:
        """Note the locks these workers hold; a dead worker's stay noted."""
        for pid in pids:
            if _is_alive(pid):
                self._held[pid] = dict(_held_by(pid, self._root))

    def remove_left(self) -> None:
        """All these workers are dead: remove their leftover locks."""
        for path, identity in [item for held in self._held.values() for item in held.items()]:
            try:
                if _identity(path) == identity and _holder(path) is None:
                    path.unlink()
                    log.info("event=build_lock removed=%s: its worker was killed", path)
            except FileNotFoundError:
                pass
            except OSError as error:  # ending workers must not fail here
                log.warning("event=build_lock left=%s: its worker was killed (%s)", path, error)
        self._held.clear()

    def tell_of_waits(self) -> None:
        """Log each old lock once during a start: workers may wait for it."""
        for lock in find_locks(self._root):
            since = self._since.setdefault(lock.path, self._clock())
            if self._clock() - since < PATIENCE_S or lock.path in self._logged:
                continue
            self._logged.add(lock.path)
            if lock.pid is not None:
                text = "process %d builds an extension of torch, and workers that want it wait"
                log.info(f"event=build_lock path=%s {text}", lock.path, lock.pid)
            else:
                log.warning(
                    "event=build_lock path=%s no process of this host holds it, and workers that "
                    "want the extension wait for it without end. Unless another host builds "
                    "there, remove it.", lock.path,
                )  # fmt: skip


def _held_by(pid: int, root: Path) -> Iterator[tuple[Path, Identity]]:
    folder = Path("/proc", str(pid), "fd")
    with suppress(OSError):  # it ends meanwhile
        for name in os.listdir(folder):
            with suppress(OSError):  # this one is closed meanwhile
                path = Path(os.readlink(folder / name))
                if path.name == LOCK and path.is_relative_to(root):
                    yield path, _identity(folder / name)


def _identity(path: Path) -> Identity:
    found = path.stat()
    return found.st_dev, found.st_ino


def _is_alive(pid: int) -> bool:
    """Whether a process lives; a zombie has no files."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
