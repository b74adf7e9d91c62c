"""``scalai background``: runs a command beside a training of this host, for the share of the time
that slows its steps no more than stated.

The command's processes are stopped and continued as a group. None stays stopped behind this
process. Where that is killed, the kernel kills the command, and continues what is stopped of its
group, but in a container whose first process has started both.
"""

import argparse
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from scalai.core.errors import PeerError, ScalaiError, UsageError
from scalai.core.host.background import Background, is_free, seen, share
from scalai.launch.logs import configure
from scalai.runtime.control import MAX_WORKERS, ControlPage
from scalai.runtime.processes import die_with_parent
from scalai.store.places import check_job, default_store_dir

TICK_S = 0.02
"""Seconds between two looks at the steps."""
SLICE_S = 0.1
"""Shortest time in which the command runs, where its share is small."""
FIND_S = 0.5
"""Seconds between two looks for the workers' newest round."""
END_S = 10.0
"""Time of the command to end after a signal, in seconds."""

log = logging.getLogger("scalai.background")


def add_parser(commands: Any) -> None:
    """Add the command."""
    about = (
        "Run a command on a host that trains, stopped again and again so that it makes the "
        "training's steps no longer than stated. Its exit code is that of the command."
    )
    parser = commands.add_parser(
        "background", help="run a command beside a training, at a stated cost", description=about
    )
    parser.add_argument("--job", default="default", help="name of the job (default: %(default)s)")
    parser.add_argument(
        "--store-dir",
        type=Path,
        metavar="DIR",
        help="folder of the job's stores (default: /dev/shm)",
    )
    parser.add_argument(
        "--slowdown", type=_slowdown, default=0.01, metavar="PART",
        help="largest slowdown of a step (default: 0.01 = 1 %%)",
    )  # fmt: skip
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command")
    parser.set_defaults(run=_run)


def _slowdown(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.001 <= found <= 0.5:
        raise argparse.ArgumentTypeError(f"{text!r} is not a part of a step from 0.001 to 0.5")
    return found


def _run(args: argparse.Namespace) -> int:
    configure("background")
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise UsageError("name the command behind --: scalai background -- COMMAND")
    folder = (args.store_dir or default_store_dir()) / check_job(args.job)
    steps = WorkerSteps(folder)
    if (at := steps.look(time.monotonic())) is None:
        raise PeerError(f"no worker of job {args.job!r} trains on this host (looked in {folder}).")
    parent, ends = os.getpid(), list[int]()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda number, _: ends.append(number))

    def prepare() -> None:
        die_with_parent(parent)
        os.nice(19)

    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=prepare
        )
    except OSError as error:
        raise UsageError(f"{words[0]} cannot be started: {error.strerror}.") from error
    return HeldCommand(
        process, steps, seen(Background(args.slowdown), time.monotonic(), *at)
    ).until(ends)


class WorkerSteps:
    """Steps of a job's workers on this host, by their control pages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pages: dict[tuple[Path, int], ControlPage] = {}
        """By path and inode: the next agent makes the page of its first round anew."""
        self._round, self._found_at = 0, -FIND_S

    def look(self, now: float) -> tuple[int, int] | None:
        """The newest round, and the step that all have ended; None: nobody trains."""
        if now - self._found_at >= FIND_S:
            self._found_at = now
            self._find()
        ended = _ended(self._pages.values())
        return (self._round, min(ended)) if ended else None

    def _find(self) -> None:
        """Take the pages of the round of the newest page, once a step of it has ended: a killed
        agent leaves older ones, and the next round is built beside the present one."""
        found = list[tuple[float, int, Path, int]]()
        for path in self._folder.glob("*/agent/control-*"):
            with suppress(OSError, ValueError):  # its round has just ended
                status = path.stat()
                number = int(path.name.rpartition("-")[2])
                found.append((status.st_mtime, number, path, status.st_ino))
        newest = max(found)[1] if found else 0
        there = {(path, inode): number for _, number, path, inode in found}
        pages = {place: page for place, page in self._pages.items() if place in there}
        others = dict[tuple[Path, int], ControlPage]()
        for place, number in there.items():
            if number == newest and place not in pages:
                with suppress(OSError, ValueError, ScalaiError):  # it is just being made
                    others[place] = ControlPage(place[0])
        if newest == self._round or not pages or _ended(others.values()):
            self._round, pages = newest, {**pages, **others}
        self._pages = {place: page for place, page in pages.items() if there[place] == self._round}


def _ended(pages: Iterable[ControlPage]) -> list[int]:
    """Return the last steps that workers have ended."""
    return [step for page in pages for step in page.steps(MAX_WORKERS) if step >= 0]


class HeldCommand:
    """A command that is stopped and continued, until its end."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", steps: WorkerSteps, state: Background
    ) -> None:
        self._process, self._steps, self._state = process, steps, state
        self._is_stopped = False
        self._ran_s = self._credit_s = 0.0
        self._said, self._was_free = self._state.share, False

    def until(self, ends: list[int], sleep: Callable[[float], object] = time.sleep) -> int:
        """Lead it to its end, or to that of this process by a signal; returns the exit code."""
        begun = before = time.monotonic()
        try:
            while self._process.poll() is None and not ends:
                sleep(TICK_S)
                now = time.monotonic()
                self._turn(now, now - before)
                before = now
            if ends:
                self._end(ends[0])
        finally:
            self._signal(signal.SIGCONT)
        log.info("event=exit code=%s ran_s=%.1f of_s=%.1f share=%.2f", self._process.returncode,
                 self._ran_s, before - begun, self._state.share)  # fmt: skip
        code = self._process.returncode
        return 128 + ends[0] if ends else code if code >= 0 else 128 - code

    def _turn(self, now: float, took_s: float) -> None:
        if not self._is_stopped:
            self._ran_s += took_s
        if (at := self._steps.look(now)) is not None:
            self._state = seen(self._state, now, *at)
        part = share(self._state, now)
        self._credit_s += took_s * (part - (not self._is_stopped))
        self._credit_s = max(-SLICE_S, min(SLICE_S, self._credit_s))
        if part == 0.0 or (part < 1.0 and self._credit_s <= 0.0 and not self._is_stopped):
            self._signal(signal.SIGSTOP)
        elif self._is_stopped and (part == 1.0 or self._credit_s >= SLICE_S):
            self._signal(signal.SIGCONT)
        self._say(now)

    def _say(self, now: float) -> None:
        if (free := is_free(self._state, now)) != self._was_free:
            self._was_free = free
            text = "no step has ended for a while: the command runs" if free else "steps end again"
            log.info("event=background %s", text)
        if (part := self._state.share) != self._said:
            log.info("event=background share=%.2f before=%.2f step_s=%.3f", part, self._said,
                     self._state.step_s)  # fmt: skip
            self._said = part

    def _end(self, number: int) -> None:
        self._signal(signal.SIGCONT)
        self._signal(number)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                log.warning("event=stuck pid=%d: the kernel has not ended it", self._process.pid)

    def _signal(self, number: int) -> None:
        """Signal the command's group, also where the command itself has left it."""
        if number == signal.SIGSTOP and self._is_stopped:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
        self._is_stopped = number == signal.SIGSTOP or (
            self._is_stopped and number != signal.SIGCONT
        )
