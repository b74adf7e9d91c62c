"""What an injector is given: the job, the fault, and where it leaves how to undo what it does."""

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from scalai.launch.chaos import processes
from scalai.launch.chaos.kinds import Fault
from scalai.launch.chaos.watch import Watch


@dataclass(frozen=True, slots=True)
class Settings:
    """What the job was started with, as far as its command lines and logs say: steps between
    snapshots, other hosts that keep what one has, the durable directory and the sources of
    preemption notices and of a host's health."""

    snapshot_every: int | None
    replicas: int
    durable_dir: Path | None


@dataclass(frozen=True, slots=True)
class Scene:
    """One fault of one job. ``before``: words that start the host's agent anew, where it is to be
    started otherwise than it was."""

    folder: Path
    watch: Watch
    fault: Fault
    settings: Settings
    commands: Mapping[str, processes.Command]
    out: Path
    undo: ExitStack
    before: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def host(self) -> str:
        return self.fault.hosts[0]

    def agent(self, host: str | None = None) -> int:
        """Return the agent of a host. Raises ``ProcessLookupError``: there is none."""
        found = processes.agents(self.folder).get(host or self.host)
        if found is None:
            raise ProcessLookupError(f"host {host or self.host} has no agent here")
        return found

    def worker(self) -> int:
        """Return the worker that the fault strikes. Raises ``ProcessLookupError``."""
        found = processes.workers(self.folder, self.host)
        if not found:
            raise ProcessLookupError(f"host {self.host} has no worker here")
        return found[self.fault.worker % len(found)]

    def rank(self) -> int:
        """Return the rank of that worker: hosts have theirs in the order of the status."""
        workers: Mapping[str, int] = (self.watch.status or {}).get("workers", {})
        names = list(workers)
        first = sum(workers[name] for name in names[: names.index(self.host)])
        return first + self.fault.worker % max(1, workers[self.host])


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that has struck, or has been prepared. ``seen``: words by which the injection shows
    by other means than the job's words, empty as long as it does not; ``struck_at``: when it
    struck, by the wall clock, None as long as it has not."""

    seen: Callable[[], str] | None = None
    struck_at: Callable[[], float | None] | None = None


def settings_of(folder: Path) -> Settings:
    """Read what a job was started with."""
    found: dict[str, str] = {}
    for pid in processes.agents(folder).values():
        path = processes.output_of(pid)
        text = "" if path is None else Path(path).read_text(errors="replace")
        found |= dict(re.findall(r"event=config store\.(\w+) = (.*?)  \(", text))
        for name in ("snapshot_every", "replicas", "durable_dir"):
            given = processes.flag(pid, f"--{name.replace('_', '-')}")
            if given is not None:
                found[name] = given
    every, replicas = found.get("snapshot_every", "none"), found.get("replicas", "1")
    disk = found.get("durable_dir", "none")
    return Settings(
        int(every) if every.isdecimal() and every != "0" else None,
        int(replicas) if replicas.isdecimal() else 1,
        None if disk == "none" else Path(disk),
    )


def least_hosts(folder: Path) -> int:
    """Return how many hosts a job needs at least (``--nnodes``)."""
    needed = 1
    for pid in processes.agents(folder).values():
        given = processes.flag(pid, "--nnodes") or "1"
        low = given.partition(":")[0]
        needed = max(needed, int(low) if low.isdecimal() else 1)
    return needed
