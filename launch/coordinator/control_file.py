"""``--control-file``: orders to a job from people without its token, by a file.

Who may write the file controls the job, so others must not be able to: neither file nor folder is
writable by all, and a file in a folder of many is the job's user's or root's. A change of the file
is read once; what it holds at the start is passed over, or a restart would repeat it.
"""

import logging
import os
import shlex
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scalai.core.errors import ScalaiError, UsageError
from scalai.launch.coordinator.person_calls import Scale

LOOK_S = 1.0
"""Seconds between two looks; a change is read once it has stood still for one."""
MOST_BYTES = 4096

log = logging.getLogger("scalai.coordinator")


@dataclass(frozen=True, slots=True)
class Drain:
    """This host leaves, as after SIGTERM."""

    host: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A generation beside the schedule, also for the durable directory."""


Order = Scale | Drain | Snapshot

FORMS = "scale [--nproc N] [--nnodes N] [--degrees 'tp2 pp1'], drain HOST, or snapshot"


def read_order(text: str) -> Order | None:
    """Read the order of a file; None: there is none. Raises ``UsageError`` for another content."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        return None
    if len(lines) > 1:
        raise UsageError(f"{len(lines)} lines; expected one order: {FORMS}.")
    try:
        words = shlex.split(lines[0], comments=True)
    except ValueError as error:
        raise UsageError(f"{lines[0]!r}: {error}; expected {FORMS}.") from error
    match words:
        case ["snapshot"]:
            return Snapshot()
        case ["drain", host]:
            return Drain(host)
        case ["scale", *given] if given and len(given) % 2 == 0:
            return _scale(dict(zip(given[::2], given[1::2], strict=True)))
    raise UsageError(f"{lines[0]!r} is no order; expected {FORMS}.")


def _scale(given: dict[str, str]) -> Scale:
    if unknown := sorted(set(given) - {"--nproc", "--nnodes", "--degrees"}):
        raise UsageError(f"scale has no {unknown[0]!r}; expected {FORMS}.")
    counts = {}
    for flag in ("--nproc", "--nnodes"):
        text = given.get(flag)
        if text is not None and (not text.isdecimal() or not 0 < int(text[:9]) < 1 << 24):
            raise UsageError(f"{flag} {text[:40]!r}: expected a number of 1 or more.")
        counts[flag] = None if text is None else int(text)
    return Scale(counts["--nproc"], counts["--nnodes"], given.get("--degrees"), dry_run=False)


class ControlFile:
    """Reads orders from a file. One thread calls it.

    Args:
        path: The file; it need not exist.
        obey: Carries out an order, and returns the answer. Raises ``ScalaiError``: refused.
        refused: Called with the reason where an order is not carried out.
    """

    def __init__(
        self, path: Path, obey: Callable[[Order], str], refused: Callable[[str], object]
    ) -> None:
        self._path, self._obey, self._refused_for = path, obey, refused
        self._known: object = None
        """State of the file whose order was carried out."""
        self._seen: object = None
        """State of the file at the last look."""
        self._refused: object = None
        found = self._look()
        if found is not None:
            self._known = self._seen = found[1]
            os.close(found[0])
            log.info("event=control_file path=%s what it holds now is passed over", path)

    def look(self) -> None:
        """Carry out a new order, if there is one that has stood still since the last look."""
        found = self._look()
        if found is None:
            self._seen = None
            return
        descriptor, state = found
        try:
            is_new = state != self._known and state == self._seen
            self._seen = state
            if is_new and self._is_safe(descriptor):
                self._known = state
                self._carry_out(os.read(descriptor, MOST_BYTES + 1))
        finally:
            os.close(descriptor)

    def _look(self) -> tuple[int, object] | None:
        """A descriptor of the file, and its state; None: it is not there."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(self._path, flags)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._refuse(str(error), error.errno)
            return None
        found = os.fstat(descriptor)
        return descriptor, (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)

    def _is_safe(self, descriptor: int) -> bool:
        file, folder = os.fstat(descriptor), os.stat(self._path.parent)
        why = unsafe(file, folder, os.geteuid())
        if why:
            self._refuse(why, (file.st_ino, file.st_ctime_ns, folder.st_ctime_ns))
        return not why

    def _carry_out(self, content: bytes) -> None:
        try:
            if len(content) > MOST_BYTES:
                raise UsageError(f"more than {MOST_BYTES} bytes.")
            order = read_order(content.decode())
            answer = None if order is None else self._obey(order)
        except (ScalaiError, UnicodeDecodeError) as error:
            self._warn(str(error))
            return
        if answer is not None:
            log.info("event=control path=%s order=%r %s", self._path, order, answer)

    def _refuse(self, why: str, state: object) -> None:
        """Log the reason once."""
        if state != self._refused:
            self._refused = state
            self._warn(why)

    def _warn(self, why: str) -> None:
        log.warning("event=control_refused path=%s %s", self._path, why)
        self._refused_for(why)


def unsafe(file: os.stat_result, folder: os.stat_result, user: int) -> str:
    """The reason not to trust a file for its place and owner; empty: it is fine."""
    if not stat.S_ISREG(file.st_mode):
        return "it is no regular file."
    if file.st_mode & stat.S_IWOTH:
        return "anybody may write to it. chmod o-w, and write the order again."
    if folder.st_mode & stat.S_IWOTH:
        if not folder.st_mode & stat.S_ISVTX:
            return "anybody may write to its folder. chmod o-w the folder."
        if file.st_uid not in (user, 0):
            return (
                f"it is user {file.st_uid}'s, in a folder of everybody. Put it in a folder that "
                "only those who may control the job can write to."
            )
    return ""


def watch_orders(
    path: Path,
    obey: Callable[[Order], str],
    refused: Callable[[str], object],
) -> None:
    """Read orders in a thread of its own: the file's disk may hang."""

    def serve() -> None:
        file: ControlFile | None = None
        while True:
            try:
                file = file or ControlFile(path, obey, refused)
                file.look()
            except Exception as error:  # our own slip, or a folder that is gone
                log.warning("event=control_failed path=%s %r", path, error)
                time.sleep(60.0)
            time.sleep(LOOK_S)

    threading.Thread(target=serve, name="control-file", daemon=True).start()
