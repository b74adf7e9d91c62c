"""Progress of this host's workers by the control page, and their stacks, asked for by a signal."""

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from scalai.core.job.deadlines import STALL_S, STALL_STEPS
from scalai.core.messages.reports import FRAMES_APART, SILENT, Stalled
from scalai.launch.agent.loop import Agent
from scalai.runtime.agent_folder import STACK_SIGNAL, stacks_path

log = logging.getLogger(__name__)

ANSWER_S = 1.0
"""Seconds for a worker to write its stacks; it needs no lock."""
FRAMES = 6
"""Innermost frames to log; the file has all."""


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
    """Return the frames of the newest of ``faulthandler``'s dumps, innermost first."""
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


USUAL = 32
"""Number of recent steps for the usual time."""
KNOWN = 8
"""Least number of steps in a round for a usual time; the first ones compile and warm up."""
SPREAD = 3 * 1.4826
"""Three standard deviations of a normal distribution, as median deviations."""


class Progress:
    """Measures the time since the slowest worker's last step. Reads no clock.

    Args:
        stall_s: Seconds; shorter waits are no stall.
    """

    def __init__(self, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._ranks: frozenset[int] = frozenset()
        self._lowest, self._since, self._reports = 0, 0.0, 0
        self._took: deque[float] = deque(maxlen=USUAL)
        self.longest_s = 0.0
        """Seconds of the longest step, including an evaluation or a save."""

    @property
    def patience_s(self) -> float:
        """Seconds allowed for the next step."""
        return max(self._stall_s, STALL_STEPS * median(self._took) if self._took else 0.0)

    @property
    def usual_s(self) -> float:
        """Usual longest time of a step in this round, in seconds; 0: unknown. A few outliers do not
        change it."""
        if len(self._took) < KNOWN:
            return 0.0
        middle = median(self._took)
        return middle + SPREAD * median(abs(each - middle) for each in self._took)

    def stalled_s(self, steps: Mapping[int, int], now: float) -> float | None:
        """Record the workers' steps.

        Args:
            steps: Last ended step of each training rank.
            now: Present time, in seconds.

        Returns:
            Seconds since the slowest worker's last step, if due for a report: once, then at doubled
            times.
        """
        lowest = min(steps.values(), default=0)
        made = lowest - self._lowest
        if steps.keys() != self._ranks:
            self._took.clear()
        elif made <= 0:
            waited = now - self._since
            if not steps or waited < self.patience_s * 2**self._reports:
                return None
            self._reports += 1
            return waited
        else:
            self._took.append((now - self._since) / made)
            self.longest_s = max(self.longest_s, (now - self._since) / made)
        self._ranks, self._lowest, self._since, self._reports = frozenset(steps), lowest, now, 0
        return None


@dataclass(frozen=True, slots=True)
class _Stall:
    """Workers without a step since a time, in seconds."""

    ranks: tuple[int, ...]
    step: int
    since: float

    def left(self, steps: Mapping[int, int]) -> "_Stall | None":
        """Return those training and still without a step; None: there are none."""
        ranks = tuple(rank for rank in self.ranks if steps.get(rank) == self.step)
        return replace(self, ranks=ranks) if ranks else None


class ProgressWatch:
    """Reports workers of the present round without steps. Only the agent's own thread calls it.

    Args:
        agent: Owner of the round.
        stall_s: As in ``Progress``.
    """

    def __init__(
        self,
        host: str,
        agent: Agent,
        stacks: Stacks,
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._agent, self._stacks, self._clock = host, agent, stacks, clock
        self._progress = Progress(stall_s)
        self._stall: _Stall | None = None
        self._is_within = False
        self.seen: tuple[int, int] | None = None
        """The round and the step ended by all its workers; None: none train."""

    @property
    def stalled(self) -> Stalled | None:
        """Reported workers still without a step; None: there are none. Any thread may ask."""
        stall = self._stall  # the agent's thread may clear it meanwhile
        if stall is None:
            return None
        for_s = round(self._clock() - stall.since, 1)
        return Stalled(
            stall.ranks,
            stall.step,
            for_s,
            longest_s=round(self._progress.longest_s, 1),
            usual_s=round(self._progress.usual_s, 3),
            is_within=self._is_within,
            where=self._stacks.where,
        )

    def watch(self) -> None:
        """Look once. Ends nothing: the job's law decides on hangs."""
        current, group = self._agent.round, self._agent.group
        if current is None or group is None:
            self._stall = self.seen = None
            return
        alive = set(current.ranks) & current.stepped - current.finished - current.lost
        self._is_within = group.are_within_steps()
        steps = group.steps()
        steps = {rank: steps[rank] for rank in sorted(alive)}
        self.seen = (current.number, min(steps.values())) if steps else None
        self._stall = self._stall and self._stall.left(steps)
        if current.is_draining:
            return
        now = self._clock()
        waited = self._progress.stalled_s(steps, now)
        if waited is None or not steps:
            return
        last = min(steps.values())
        ranks = tuple(rank for rank, step in steps.items() if step == last)
        self._stall = _Stall(ranks, last, now - waited)
        log.warning(
            "event=no_progress host=%s rank=%s step=%d since=%.0f s",
            self._host, ",".join(map(str, ranks)), last, waited,
        )  # fmt: skip
        self._stacks.ask(group.pids())  # all: waiting workers show their reason
