"""Stacks of this host's workers: requested by a signal, logged after their answer."""

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scalai.core.messages.reports import FRAMES_APART, SILENT
from scalai.runtime.agent_folder import STACK_SIGNAL, stacks_path

ANSWER_S = 1.0
"""Seconds for a worker to write its stacks; it needs no lock."""
FRAMES = 6
"""Innermost frames of the main thread to log; the file has all."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Asked:
    rank: str
    pid: int
    begin: int
    """Size of the file before the answer."""


class Stacks:
    """Stacks of one host's workers. Only the agent's own thread calls it; never blocks.

    Args:
        directory: The agent's own.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        for left in directory.glob("stacks-*"):  # of a killed agent
            left.unlink(missing_ok=True)
        self.where: tuple[tuple[int, str], ...] = ()
        """Places of the workers asked last, by rank. Any thread may read it."""
        self._asked: list[_Asked] = []
        self._answers_at = 0.0

    def ask(self, pids: Mapping[str, int]) -> None:
        """Ask these workers, process numbers by rank, to write their stacks."""
        if self._asked:
            return
        self.where = ()
        for rank, pid in pids.items():
            if can_answer(pid):
                path = stacks_path(self._directory, pid)
                self._asked.append(_Asked(rank, pid, path.stat().st_size if path.exists() else 0))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, STACK_SIGNAL)
            else:
                self._note(rank, pid, describe(pid))
        self._answers_at = time.monotonic() + ANSWER_S

    def watch(self) -> None:
        """Log the answers."""
        if not self._asked or time.monotonic() < self._answers_at:
            return
        for asked in self._asked:
            path = stacks_path(self._directory, asked.pid)
            text = path.read_text()[asked.begin :] if path.exists() else ""
            where = FRAMES_APART.join(main_thread(text)[:FRAMES]) or describe(asked.pid)
            self._note(asked.rank, asked.pid, where)
            if not _status(asked.pid):
                path.unlink(missing_ok=True)
        self._asked.clear()

    def _note(self, rank: str, pid: int, where: str) -> None:
        log.warning("event=stack rank=%s pid=%d %s", rank, pid, where)
        self.where = (*self.where, (int(rank), where))


def main_thread(text: str) -> list[str]:
    """Return the main thread's frames, innermost first, from ``faulthandler``'s output: it comes
    last."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.rstrip().endswith(":")]
    found = lines[starts[-1] + 1 :] if starts else []
    return [line.strip().removeprefix("File ") for line in found if line.startswith("  File ")]


def can_answer(pid: int) -> bool:
    """Whether the process runs and catches the signal; without a handler it would die."""
    status = _status(pid)
    caught = int(status.get("SigCgt", "0"), 16) >> (STACK_SIGNAL - 1) & 1
    return bool(caught) and status["State"][0] not in "TtZ"


def describe(pid: int) -> str:
    """Describe a silent process by the kernel's data."""
    state = _status(pid).get("State", "gone")
    waits = ""
    with contextlib.suppress(OSError):
        waits = Path(f"/proc/{pid}/wchan").read_text()
    return f"{SILENT}: state={state!r} wchan={waits or '-'}"


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
