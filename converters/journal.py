"""Journals of a conversion's finished tasks, and the processes that share one conversion.

A journal has a line for each task, written after the task's data are on disk. Every line carries
its own checksum; a line cut off by a kill counts as not written.

Parts of a conversion run on one host, or on many hosts that share the destination's disk. Each part
fills whole files: two hosts that write one page of a file are not coherent on NFS. Parts
communicate through the file system alone: each locks its own journal while it works, and they begin
and end one at a time, under a lock beside the destination. The part that finds all tasks recorded
and no other part at work finishes. A killed part is started again, or a run of the whole does the
rest.
"""

import fcntl
import json
import logging
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from heapq import heapify, heapreplace
from io import BufferedRandom
from pathlib import Path
from typing import Any

from scalai.core.errors import PeerError, StoreError, UsageError

NAME = ".scalai-journal"
"""Begin of the names of journals."""


@dataclass(frozen=True, slots=True)
class Noted:
    """A finished task: the fingerprint of its output by row of the target, and the checksums of its
    reads, run by run (``checksums.Run``)."""

    rows: Mapping[int, int]
    runs: Sequence[tuple[int, int, int, int]] = ()


Done = dict[int, Noted]
"""By task. The identity of a conversion tells the version of fingerprints too: a journal of another
one is begun anew."""


class Journal:
    """An open journal; held by one process at a time."""

    def __init__(self, directory: Path, identity: str, name: str = NAME) -> None:
        """Open a journal in ``directory``, keeping its tasks if it has this ``identity``.

        Raises:
            PeerError: Another process is writing this destination.
            StoreError: The file system has no locks.
        """
        self.path = directory / name
        self._file = open(self.path, "a+b")
        try:
            self._begin(directory, identity)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, directory: Path, identity: str) -> None:
        if not try_lock(self._file):
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
        """Note tasks that are on disk. Blocks until the notes are on disk too."""
        for task, recorded in tasks.items():
            self.done[task] = recorded
            rows = {str(row): f"{value:016x}" for row, value in recorded.rows.items()}
            self._write({"task": task, "rows": rows, "runs": recorded.runs})
        self._sync()

    def close(self) -> None:
        self._file.close()

    def _write(self, content: object) -> None:
        text = json.dumps(content, separators=(",", ":")).encode()
        self._file.write(b"%08x %s\n" % (zlib.crc32(text), text))

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


def read_journal(path: Path) -> tuple[str | None, Done]:
    """Return the conversion of a journal (None: not stated yet) and its tasks."""
    identity, done, _ = _parse(path.read_bytes())
    return identity, done


def is_open(path: Path) -> bool:
    """Whether a process holds a journal. Raises as ``try_lock``."""
    with open(path, "a+b") as file:
        return not try_lock(file)


def try_lock(file: BufferedRandom) -> bool:
    """Lock a file until it is closed; return False if another process holds it.

    Args:
        file: Open for writing, as locks over NFS require.

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
    """Return identity and tasks of the lines before the first damaged one, and its place."""
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
    """Return the lines before the first damaged one, and its place."""
    found: list[dict[str, Any]] = []
    end = 0
    for line in text.splitlines(keepends=True):
        content = line[9:-1]
        if line[-1:] != b"\n" or line[:9] != b"%08x " % zlib.crc32(content):
            break
        found.append(json.loads(content))
        end += len(line)
    return found, end


log = logging.getLogger("scalai.converters")

SILENT_S = 60.0
"""Seconds of waiting before it is logged; doubled each time."""


@dataclass(frozen=True, slots=True)
class RunPart:
    """Part ``number`` (from 1 on) of ``count``; one of one is the whole."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "RunPart":
        """Read ``2/4``. Raises ``UsageError`` for other texts."""
        found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise UsageError(f"--part {text} is no part. Give 1/4, 2/4, 3/4 and 4/4, one a host.")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def is_whole(self) -> bool:
        return self.count == 1

    @property
    def journal(self) -> str:
        return NAME if self.is_whole else f"{NAME}-{self.number}-of-{self.count}"

    def is_mate(self, journal: str) -> bool:
        """Whether a journal is another part's of the same division."""
        is_of_it = not self.is_whole and journal.endswith(f"-of-{self.count}")
        return is_of_it and journal != self.journal

    def files(self, sizes: Sequence[int]) -> list[int]:
        """Return this part's files: each file, the largest first, goes to the part with least.

        Args:
            sizes: Bytes of all files.
        """
        loads = [(0, number) for number in range(1, self.count + 1)]
        heapify(loads)
        mine = []
        for file in sorted(range(len(sizes)), key=lambda file: (-sizes[file], file)):
            load, number = loads[0]
            heapreplace(loads, (load + sizes[file], number))
            if number == self.number:
                mine.append(file)
        return sorted(mine)


@contextmanager
def alone(destination: Path) -> Iterator[None]:
    """Hold the lock of a destination; waits for its holder, and says so meanwhile.

    The lock is a file beside the destination, removed on release.
    """
    path = destination.parent / f".{destination.name}.lock"
    with _locked(path):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _locked(path: Path) -> BufferedRandom:
    while True:
        with ExitStack() as closing:
            file = closing.enter_context(open(path, "a+b"))
            try:
                _wait_for(file, path)
            except StoreError:
                path.unlink(missing_ok=True)
                raise
            with suppress(FileNotFoundError):  # its last owner has removed it
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    closing.pop_all()
                    return file


def _wait_for(file: BufferedRandom, path: Path) -> None:
    """Lock a file. There is no deadline: the holder may be checking terabytes."""
    began, silent_s = time.monotonic(), SILENT_S
    while not try_lock(file):
        waited_s = time.monotonic() - began
        if waited_s >= silent_s:
            silent_s = 2 * waited_s
            log.warning(
                "waiting since %.0f s for another process that begins or ends this conversion: it "
                "holds %s (`fuser` names it on its host)", waited_s, path,
            )  # fmt: skip
        time.sleep(min(max(waited_s / 8, 0.01), 1))


def begin(partial: Path, identity: str, part: RunPart) -> Journal:
    """Open the journal of a part, with the tasks of all parts. Call it alone.

    Args:
        partial: The growing destination.
        identity: Of the conversion. A run of the whole removes the remains of another one.

    Raises:
        PeerError: A process that is no other part of this run writes the destination.
        UsageError: The directory is not ours; or is of another conversion, and this is a part.
    """
    partial.mkdir(exist_ok=True)
    journals = sorted(partial.glob(f"{NAME}*"))
    if not journals and any(partial.iterdir()):
        raise UsageError(
            f"{partial}, where the destination would grow, is in the way: it has no journal of "
            "ours. Remove it, or name another destination."
        )
    if any(is_open(path) for path in journals if not part.is_mate(path.name)):
        raise PeerError(
            f"another process is writing {partial}. Wait for it, or end it. Several hosts share "
            "the work if each is given its --part, as 1/2 and 2/2."
        )
    known = {path: read_journal(path) for path in journals}
    if any(of not in (None, identity) for of, _ in known.values()):
        if not part.is_whole:
            raise UsageError(
                f"{partial} was begun with another source, target or --memory, or by another "
                "release. Start all parts with the same arguments, or remove it."
            )
        _clear(partial)
        known = {}
    journal = Journal(partial, identity, part.journal)
    for _, done in known.values():
        journal.done.update(done)
    return journal


def gather(partial: Path, own: Journal, tasks: int) -> Done | None:
    """Return the tasks of all parts once all are recorded and no other part is at work; else None:
    another part will finish. Call it alone.

    Args:
        own: The journal of this part, with its share done.
        tasks: Number of all tasks.
    """
    done = dict(own.done)
    for path in partial.glob(f"{NAME}*"):
        if path != own.path:
            if is_open(path):
                return None
            done.update(read_journal(path)[1])
    return done if len(done) == tasks else None


def remove_journals(directory: Path) -> None:
    for path in directory.glob(f"{NAME}*"):
        path.unlink()


def _clear(partial: Path) -> None:
    for path in partial.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
