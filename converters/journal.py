"""Which tasks of a conversion are on disk: a line each, written after the data it speaks of.

Every line carries its own checksum. A task is recorded once its file is on disk. A line that was
cut off by a kill counts as not written.
"""

import fcntl
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

from scalai.core.errors import PeerError, StoreError

NAME = ".scalai-journal"
"""What the names of journals begin with."""


@dataclass(frozen=True, slots=True)
class Noted:
    """What a task has done: by row of the target the fingerprint of what it wrote, and the
    checksums of what it read, run by run (``records.Run``)."""

    rows: Mapping[int, int]
    runs: Sequence[tuple[int, int, int, int]] = ()


Done = dict[int, Noted]
"""By task. The identity of a conversion tells the version of fingerprints too: a journal of another
one is begun anew."""


class Journal:
    """An open journal; held by one process at a time."""

    def __init__(self, directory: Path, identity: str, name: str = NAME) -> None:
        """Open a journal in ``directory``, keeping what it says if it is of this ``identity``.

        Raises:
            PeerError: Another process is writing this destination.
            StoreError: The file system has no locks.
        """
        self.path = directory / name
        self._file = open(self.path, "a+b")
        if not try_lock(self._file):
            self._file.close()
            raise PeerError(f"another process is writing {directory}. Wait for it, or end it.")
        self._file.seek(0)
        known, self.done, end = _parse(self._file.read())
        if known == identity:
            self._file.truncate(end)
            return
        self.done = {}
        self._file.truncate(0)
        self._write({"identity": identity})
        self._sync()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def add(self, tasks: Mapping[int, Noted]) -> None:
        """Note that tasks are on disk. Blocks until the notes are, too."""
        for task, recorded in tasks.items():
            self.done[task] = recorded
            rows = {str(row): f"{value:016x}" for row, value in recorded.rows.items()}
            self._write({"task": task, "rows": rows, "runs": recorded.runs})
        self._sync()

    def close(self) -> None:
        """Let others open it."""
        self._file.close()

    def _write(self, content: object) -> None:
        text = json.dumps(content, separators=(",", ":")).encode()
        self._file.write(b"%08x %s\n" % (zlib.crc32(text), text))

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


def read_journal(path: Path) -> tuple[str | None, Done]:
    """Return of which conversion a journal is (None: it does not say yet) and what it notes."""
    identity, done, _ = _parse(path.read_bytes())
    return identity, done


def is_open(path: Path) -> bool:
    """Tell whether a process holds a journal. Raises as ``try_lock``."""
    with open(path, "a+b") as file:
        return not try_lock(file)


def try_lock(file: BufferedRandom) -> bool:
    """Lock a file until it is closed; tell whether that succeeded, or another one has it.

    Args:
        file: Open for writing, as locks over NFS need it.

    Raises:
        StoreError: The file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StoreError(
            f"{file.name} cannot be locked ({error.strerror}), and without locks two runs could "
            "write one destination. Mount the file system with locks (Lustre: -o flock), or name "
            "a destination on another one."
        ) from error
    return True


def _parse(text: bytes) -> tuple[str | None, Done, int]:
    """Return identity and tasks of the lines up to the first damaged one, and where that begins."""
    lines, end = _whole_lines(text)
    if not lines or "identity" not in lines[0]:
        return None, {}, 0
    done = {
        int(line["task"]): Noted(
            {int(row): int(value, 16) for row, value in line["rows"].items()},
            [(int(file), int(at), int(size), int(crc)) for file, at, size, crc in line["runs"]],
        )
        for line in lines[1:]
    }
    return str(lines[0]["identity"]), done, end


def _whole_lines(text: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the content of the lines up to the first damaged one, and where that begins."""
    found: list[dict[str, Any]] = []
    end = 0
    for line in text.splitlines(keepends=True):
        content = line[9:-1]
        if line[-1:] != b"\n" or line[:9] != b"%08x " % zlib.crc32(content):
            break
        found.append(json.loads(content))
        end += len(line)
    return found, end
