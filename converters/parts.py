"""One conversion done by several processes, on one host or on many that share the disk of DST.

Each part fills whole files: two hosts that write to one page of a file are not coherent on NFS. The
parts talk through the file system alone: each keeps a journal, locked while it is at work, and they
begin and end one at a time, under a lock beside the destination. Who finds that all tasks are
recorded, and that nobody else is at work, finishes. A part that was killed is started again, or a
run of the whole does what is left.
"""

import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heapify, heapreplace
from io import BufferedRandom
from pathlib import Path

from scalai.converters.journal import NAME, Done, Journal, is_open, read_journal, try_lock
from scalai.core.errors import PeerError, StoreError, UsageError

log = logging.getLogger("scalai.converters")

SILENT_S = 60.0
"""A wait that is so long is told of; and again each time that this has doubled."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part ``number`` (from 1 on) of ``count``; one of one is the whole."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Read ``2/4``. Raises ``UsageError`` where it is no such thing."""
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
        """The name of its journal."""
        return NAME if self.is_whole else f"{NAME}-{self.number}-of-{self.count}"

    def is_mate(self, journal: str) -> bool:
        """Tell whether a journal is that of another part of the same division."""
        is_of_it = not self.is_whole and journal.endswith(f"-of-{self.count}")
        return is_of_it and journal != self.journal

    def files(self, sizes: Sequence[int]) -> list[int]:
        """Return which files are this part's: the largest first, each to whoever has least.

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
    """Hold the lock of a destination; waits for whoever has it, and says so while it does.

    The lock is a file beside the destination, which goes when it is released.
    """
    path = destination.parent / f".{destination.name}.lock"
    while True:
        file = open(path, "a+b")
        try:
            _wait_for(file, path)
        except StoreError:
            path.unlink(missing_ok=True)
            raise
        try:
            is_current = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except FileNotFoundError:
            is_current = False
        if is_current:
            break
        file.close()  # its last owner has removed it
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _wait_for(file: BufferedRandom, path: Path) -> None:
    """Lock a file. There is no deadline: who has it may be checking terabytes."""
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


def begin(partial: Path, identity: str, part: Part) -> Journal:
    """Open the journal of a part, which then also knows what others have recorded. Call it alone.

    Args:
        partial: Where the destination grows.
        identity: Of the conversion. What a run of another one left is removed by a run of the
            whole.

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
        _empty(partial)
        known = {}
    journal = Journal(partial, identity, part.journal)
    for _, done in known.values():
        journal.done.update(done)
    return journal


def gather(partial: Path, own: Journal, tasks: int) -> Done | None:
    """Return what all parts have recorded, if that is all there is and nobody else is at work; else
    None, and another one will finish. Call it alone.

    Args:
        own: The journal of this part, which has done its share.
        tasks: How many there are in all.
    """
    done = dict(own.done)
    for path in partial.glob(f"{NAME}*"):
        if path != own.path:
            if is_open(path):
                return None
            done.update(read_journal(path)[1])
    return done if len(done) == tasks else None


def remove_journals(directory: Path) -> None:
    """Remove all journals of a directory."""
    for path in directory.glob(f"{NAME}*"):
        path.unlink()


def _empty(partial: Path) -> None:
    for path in partial.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
