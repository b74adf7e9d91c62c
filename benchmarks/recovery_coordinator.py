"""The part of ``recovery.py`` in which a coordinator is lost: its process, or its host, which has
no workers. The two hosts with workers train on, and another coordinator takes its place by the
lease."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from recovery_hosts import Hosts
from recovery_runs import SLOTS, TOKEN, Marks, ScalaiSide, Size, wait

COORDINATOR = "scalai.launch.coordinator.process"
HEAD, WITH_WORKERS = "a", ("b", "c")
STEPS = 8
"""So many are made before the loss, and so many behind it."""


@dataclass(frozen=True)
class Loss:
    """Seconds until the job took a change again, and steps that were made once more."""

    seconds: float
    steps_lost: int


class LeasedSide(ScalaiSide):
    """A job whose coordinator holds a lease; ``head`` is the host that has the first one."""

    def __init__(self, size: Size, head: str) -> None:
        super().__init__(size)
        self._head = head

    def command(self, hosts: Hosts, host: str, home: Path) -> list[str]:
        given = super().command(hosts, host, home)
        given[given.index("--coordinator") + 1] = f"{hosts.addresses[self._head]}:29400"
        return [*given, "--coordinator-lease", f"file:{home / 'leases'}"]

    def start_head(self, hosts: Hosts, home: Path) -> None:
        """Start the coordinator by hand, on a host without workers."""
        run, *given = self.command(hosts, WITH_WORKERS[0], home)
        assert run == "scalai.launch.run"
        command = ["scalai.launch.cli", "coordinator", "--", *given, *self.script_of(home)]
        hosts.start(self._head, command, home / "head.log", self.variables)


def lose(size: Size, home: Path, *, is_host: bool) -> Loss:
    """Have a coordinator die while two hosts train, and wait until the job takes a change again."""
    home.mkdir()
    head = HEAD if is_host else WITH_WORKERS[0]
    world = sum(SLOTS[name] for name in WITH_WORKERS)
    with Hosts((HEAD, *WITH_WORKERS), home) as hosts:
        side = LeasedSide(size, head)
        if is_host:
            side.start_head(hosts, home)
            wait((home / "leases").exists, "a coordinator", home)
        side.start(hosts, WITH_WORKERS, home)
        marks = home / "marks"

        def made() -> int:
            found = Marks(marks)
            return max((found.made(number, world) for number in found.rounds), default=0)

        wait(lambda: made() >= STEPS, f"{STEPS} steps", home)
        asking = _ask(hosts, home, world)
        time.sleep(3.0)  # it has imported what it needs
        before, rounds = made(), len(Marks(marks).rounds)
        killed_at = time.monotonic()
        if is_host:
            hosts.end(HEAD)
        else:
            (pid,) = [p for p in hosts.processes(head) if _is_coordinator(p)]
            os.kill(pid, signal.SIGKILL)
        said, _ = asking.communicate(timeout=400)
        wait(lambda: made() >= before + STEPS, f"{STEPS} steps more", home)
        found = Marks(marks)
        lost = 0
        if len(found.rounds) > rounds:
            last = max(found.rounds)
            lost = before + 1 - min(e["step"] for e in found.rounds[last][0] if "step" in e)
        return Loss(float(said) - killed_at, max(0, lost))


def _ask(hosts: Hosts, home: Path, world: int) -> "subprocess.Popen[str]":
    script = Path(__file__).with_name("recovery_ask.py")
    term, variables = "2", {"SCALAI_JOB_TOKEN": TOKEN}
    words = [str(script), str(home / "leases"), "recovery-benchmark", term, str(world)]
    return hosts.run(WITH_WORKERS[1], [sys.executable, *words], variables)


def _is_coordinator(pid: int) -> bool:
    try:
        return COORDINATOR in psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return False


def figures(size: Size, folder: Path, runs: int) -> Mapping[str, list[Loss]]:
    """Return what became of each loss, by what was lost."""
    kinds = {"process": False, "host": True}
    return {
        name: [lose(size, folder / f"{name}-{n}", is_host=is_host) for n in range(runs)]
        for name, is_host in kinds.items()
    }
