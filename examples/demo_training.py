"""One training of the demonstration: its job, its hosts, and what it writes down."""

import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from demo_frameworks import Framework
from demo_hosts import DEADLINE_S, DemoError, Hosts
from demo_story import Run, read_run

from scalai.launch.commands.job_history import History, Resize, read_folder
from scalai.launch.coordinator.held_states import committed_fingerprints
from scalai.store.generation import load_generation
from scalai.store.places import find_generations

SCRIPTS = Path(sysconfig.get_path("scripts"))
SETTLE_S = 120.0
"""How long the first host waits for the second one; nobody waits once both are there."""
RESUMABLE = 75
"""What the last host ends with where it has saved the state."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the trainings of a demonstration have in common.

    ``data``: text to train on, None: Python's own docs; ``store``: folder of the hosts' stores;
    ``out``: folder of logs.
    """

    framework: Framework
    data: Path | None
    store: Path
    out: Path


class Training:
    """One training: its job, its hosts and what it writes down. ``workers``: at the start, on
    ``hosts`` alike."""

    def __init__(
        self, setting: Setting, name: str, *, hosts: int, steps: int, workers: int = 4
    ) -> None:
        framework, data = setting.framework, setting.data
        self._name, self._store, self._folder = name, setting.store, setting.out / name
        shutil.rmtree(self._folder, ignore_errors=True)
        (self._folder / "metrics").mkdir(parents=True)
        self._script = [
            str(framework.script),
            *framework.arguments,
            *("--steps", str(steps)),
            *("--metrics", str(self._folder / "metrics")),
            *(("--data", str(data.resolve())) if data else ()),
        ]
        self._flags = [
            *("--nnodes", f"1:{hosts}", "--nproc-per-node", str(workers // hosts), "--job", name),
            # Port 0: any free one; agents on one machine find their coordinator by the job's name.
            *("--coordinator", "127.0.0.1:0", "--max-restarts", "0"),
            *("--store-dir", str(self._store), "--durable-dir", str(self._folder / "saved")),
            *("--report-dir", str(self._folder / "reports"), "--settle-s", str(SETTLE_S)),
            *framework.launch,
        ]
        self.hosts = Hosts(self._agent, self._folder / "logs")
        self.first: Mapping[str, int] = {}

    def _agent(self, host: str) -> Sequence[str]:
        return [str(SCRIPTS / "scalai-run"), "--host-id", host, *self._flags, *self._script]

    @property
    def run(self) -> Run:
        """What the training has written down by now."""
        metrics = self._folder / "metrics"
        return read_run(_text(metrics / "loss.jsonl"), _text(metrics / "samples.jsonl"))

    def history(self) -> History:
        """Return all rounds by now, from their reports."""
        return read_folder(self._folder / "reports", self._name)

    def resizes(self) -> Sequence[Resize]:
        """Return the rounds by now, in order."""
        return self.history().resizes

    def wait_for_round(self, number: int) -> Resize:
        """Wait until the round that follows ``number`` - 1 changes has made its first step."""

        def look() -> Resize | None:
            resizes = self.resizes()
            return resizes[number - 1] if len(resizes) >= number else None

        return self.hosts.wait_for(f"round {number} of the {self._name} run", look)

    def wait_for_step(self, step: int) -> None:
        self.hosts.wait_for(
            f"step {step} of the {self._name} run",
            lambda: True if self.run.last_step >= step else None,
        )

    def keep_first_generation(self, hosts: int) -> None:
        """Read what the store of each host says of the state at the start."""

        def look() -> Mapping[str, int] | None:
            parts = find_generations(self._store / self._name).get(1, [])
            return (
                committed_fingerprints(load_generation(parts).hosts)
                if len(parts) == hosts
                else None
            )

        self.first = self.hosts.wait_for("the state at the start", look)

    def scale(self, workers: int) -> None:
        """Run ``scalai scale``."""
        scalai("scale", "--job", self._name, "--store-dir", self._store, "--nproc", workers)

    def saved_step(self) -> int:
        """Return the step of the newest state in the durable directory, -1 where there is none."""
        saved = find_generations(self._folder / "saved" / self._name)
        return load_generation(saved[max(saved)]).step if saved else -1


def scalai(*arguments: object, codes: Sequence[int] = (0,)) -> str:
    """Run a command of ``scalai``; return what it prints.

    Raises:
        DemoError: It ended with none of ``codes``, or not in time.
    """
    command = [str(SCRIPTS / "scalai"), *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise DemoError(f"{' '.join(command)} does not end after {DEADLINE_S:.0f} s.") from None
    if done.returncode not in codes:
        raise DemoError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
