"""Input of an injector: the job, the fault, and a stack of undo actions."""

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalai.core.errors import ScalaiError
from scalai.launch.chaos import job_processes as processes
from scalai.launch.chaos.kinds import Fault
from scalai.launch.chaos.verdicts import ReportedRound
from scalai.launch.config.endpoint import read_card
from scalai.launch.coordinator.person_calls import Status
from scalai.runtime.calls import Channel

LOOK_S = 0.1
ANSWER_S = 3.0
"""Seconds for a coordinator's answer to a connection."""


class JobLog:
    """The log files of this machine's agents, read on from their last position."""

    def __init__(self, given: Sequence[Path]) -> None:
        self._at = {path: _size(path) for path in given}
        self._begins = dict(self._at)
        self.text = ""

    def add(self, path: Path, *, is_new: bool = False) -> None:
        """Also read this file, from now on, or a new one from its beginning."""
        if path not in self._at:
            self._at[path] = 0 if is_new else _size(path)

    def look(self) -> None:
        """Read new whole lines."""
        for path, at in self._at.items():
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(at)
                new = file.read()
                # Whole lines only: half a line has no meaning.
                whole = new[: new.rfind(b"\n") + 1]
                self._at[path] = at + len(whole)
                self.text += whole.decode(errors="replace")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _archived(text: str) -> list[int]:
    """Return the steps of generations logged as archived in the durable directory."""
    return [int(n) for n in re.findall(r"event=archived generation=\d+ step=(\d+)", text)]


class Watch:
    """Follows a job.

    Args:
        folder: ``<store>/<job>`` on this machine.
        logs: JobLog files of agents; those of this machine's agents are found.
    """

    def __init__(self, folder: Path, logs: Sequence[Path] = ()) -> None:
        self.folder = folder
        self.log = JobLog(logs)
        self.status: Mapping[str, Any] | None = None
        self.reports: list[Mapping[str, Any]] = []
        self._channel: Channel | None = None
        self._archived: list[int] = []
        for pid in processes.agents(folder).values():
            path = processes.output_of(pid)
            if path is not None:
                self._archived += _archived(Path(path).read_text(errors="replace"))
                self.log.add(Path(path))

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def look(self) -> None:
        """Ask for the status once, and read new log lines."""
        self.log.look()
        self.status = self._ask()
        last = (self.status or {}).get("last_resize")
        if last is not None and last["at"] not in {each["at"] for each in self.reports}:
            self.reports.append(last)

    def _ask(self) -> Mapping[str, Any] | None:
        """Return the status, None without an answer."""
        try:
            if self._channel is None:
                card = read_card(self.folder, answer_s=ANSWER_S)
                if card is None:
                    return None
                self._channel = Channel(*card, connect_s=ANSWER_S, call_s=ANSWER_S)
            found: Mapping[str, Any] = self._channel.call(Status()).value()
            return found
        except (ScalaiError, OSError):
            self.close()
            return None

    @property
    def step(self) -> int | None:
        """The job's newest known step."""
        return None if self.status is None else self.status["step"]

    @property
    def generation_step(self) -> int | None:
        return None if self.status is None else self.status["generation_step"]

    def is_whole(self, hosts: Sequence[str], world: int) -> bool:
        """Whether the job trains on all of these hosts with ``world`` workers; 0: any number."""
        status = self.status
        if status is None or status["phase"] != "running" or status["step"] is None:
            return False
        busy = {host for host, count in status["workers"].items() if count}
        if not busy >= set(hosts) or world not in (0, status["world_size"]):
            return False
        last = status["last_resize"]
        if last is None:  # a successor coordinator has begun no round yet
            return int(status["term"]) > 1
        return bool(last.get("round") == status["round"])

    def archived(self, newer: int = 0) -> int | None:
        """Return the step of the newest generation logged as archived, without the ``newer`` last
        ones."""
        found = [*self._archived, *_archived(self.log.text)]
        return found[-1 - newer] if len(found) > newer else None

    def wait(self, is_so: Callable[[], bool], for_s: float) -> bool:
        """Look until ``is_so`` holds, for at most ``for_s`` seconds. Returns whether it holds."""
        deadline = time.monotonic() + for_s
        while True:
            self.look()
            if is_so():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_S)

    def rounds_since(self, at: float) -> tuple[ReportedRound, ...]:
        """Return the rounds begun after a time of the wall clock."""
        return tuple(
            ReportedRound(
                str(each["reason"]), each.get("step"), int(each.get("steps_lost", 0)),
                max(0.0, round(each["at"] - each["total_s"] - at, 3)), float(each["total_s"]),
                dict(each["seconds"]),
            )
            for each in self.reports
            if each["at"] > at
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StartSettings:
    """Settings of a job's start, by its command lines and logs: steps between snapshots, number of
    replicas on other hosts, durable directory."""

    snapshot_every: int | None
    replicas: int
    durable_dir: Path | None


@dataclass(frozen=True, slots=True)
class Scene:
    """One fault of one job. ``before``: words to put before the command of the host's agent at its
    next start."""

    folder: Path
    watch: Watch
    fault: Fault
    settings: StartSettings
    commands: Mapping[str, processes.AgentCommand]
    out: Path
    undo: ExitStack
    before: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def host(self) -> str:
        return self.fault.hosts[0]

    def agent(self, host: str | None = None) -> int:
        """Return the agent of a host. Raises ``ProcessLookupError`` without one."""
        found = processes.agents(self.folder).get(host or self.host)
        if found is None:
            raise ProcessLookupError(f"host {host or self.host} has no agent here")
        return found

    def worker(self) -> int:
        """Return the worker to strike. Raises ``ProcessLookupError``."""
        found = processes.workers(self.folder, self.host)
        if not found:
            raise ProcessLookupError(f"host {self.host} has no worker here")
        return found[self.fault.worker % len(found)]

    def rank(self) -> int:
        """Return the rank of this worker: hosts have ranks in the order of the status."""
        workers: Mapping[str, int] = (self.watch.status or {}).get("workers", {})
        names = list(workers)
        first = sum(workers[name] for name in names[: names.index(self.host)])
        return first + self.fault.worker % max(1, workers[self.host])


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault after its injection or preparation.

    ``seen`` returns evidence of the injection beyond the job's own words, empty until there is any;
    ``struck_at`` returns its wall-clock time, None until it strikes; ``again`` leads the job there
    once more, None where nothing does: a recovery passes a station by where it needs it not, as
    that of a worker that is killed just behind a snapshot writes none.
    """

    seen: Callable[[], str] | None = None
    struck_at: Callable[[], float | None] | None = None
    again: Callable[[], None] | None = None


def settings_of(folder: Path) -> StartSettings:
    """Read the settings of a job's start."""
    found: dict[str, str] = {}
    for pid in processes.agents(folder).values():
        path = processes.output_of(pid)
        text = "" if path is None else Path(path).read_text(errors="replace")
        for line in re.findall(r"event=config (.*)", text):
            found |= dict(re.findall(r"\bstore\.(\w+) = (.*?) +\(", line))
        for name in ("snapshot_every", "replicas", "durable_dir"):
            given = processes.flag(pid, f"--{name.replace('_', '-')}")
            if given is not None:
                found[name] = given
    every, replicas = found.get("snapshot_every", "none"), found.get("replicas", "1")
    disk = found.get("durable_dir", "none")
    return StartSettings(
        int(every) if every.isdecimal() and every != "0" else None,
        int(replicas) if replicas.isdecimal() else 1,
        None if disk == "none" else Path(disk),
    )


def least_hosts(folder: Path) -> int:
    """Return the least number of hosts of a job (``--nnodes``)."""
    needed = 1
    for pid in processes.agents(folder).values():
        given = processes.flag(pid, "--nnodes") or "1"
        low = given.partition(":")[0]
        needed = max(needed, int(low) if low.isdecimal() else 1)
    return needed
