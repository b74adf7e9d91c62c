"""The journal of a conversion: which tasks are on disk, with their fingerprints.

One line of JSON a task, behind a checksum, appended when the task's bytes are on disk. A line that
was cut off by a kill counts as not written.
"""

import fcntl
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from scalai.core.errors import PeerError

NAME = ".scalai-journal"


class Journal:
    """An open journal; held by one process at a time."""

    def __init__(self, directory: Path, identity: str) -> None:
        """Open the journal in ``directory``, keeping what it says if it is of this ``identity``.

        Raises:
            PeerError: Another process is writing this destination.
        """
        self.path = directory / NAME
        self._file = open(self.path, "a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise PeerError(
                f"another process is writing {directory}. Wait for it, or end it."
            ) from error
        self._file.seek(0)
        text = self._file.read()
        lines, end = _whole_lines(text)
        self.is_resumed = bool(lines) and lines[0] == {"identity": identity}
        self.done: dict[int, dict[int, int]] = {}
        if not self.is_resumed:
            self._file.truncate(0)
            self._append({"identity": identity})
            return
        self._file.truncate(end)
        for line in lines[1:]:
            self.done[int(line["task"])] = {
                int(row): int(value, 16) for row, value in line["rows"].items()
            }

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, task: int, rows: Mapping[int, int]) -> None:
        """Note that a task is on disk. Blocks until the note is, too."""
        self.done[task] = dict(rows)
        self._append({"task": task, "rows": {str(r): f"{v:016x}" for r, v in rows.items()}})

    def close(self) -> None:
        """Let others open it."""
        self._file.close()

    def _append(self, content: object) -> None:
        text = json.dumps(content, separators=(",", ":")).encode()
        self._file.write(b"%08x %s\n" % (zlib.crc32(text), text))
        self._file.flush()
        os.fsync(self._file.fileno())


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
