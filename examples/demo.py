"""A GPT that changes its layout four times while it trains, beside one that never does.

    python examples/demo.py [--framework megatron|deepspeed] [--data FILE]

Two hosts start, one leaves, another joins, then the job is scaled to 3 ranks and to 1. Every change
takes another parallel layout; the state goes from memory to memory.
The losses must be those of a run that nobody interrupts. Hosts are agents on this machine.

Exit codes: 0 all checks hold, 1 the demonstration failed, 4 a check does not hold.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from demo_frameworks import FRAMEWORKS, SCHEDULE_STEPS, Framework
from demo_hosts import DemoError, Hosts, compile_first, no_process_left
from demo_picture import draw
from demo_story import ORDINARY_STEPS, Change, Resize, Run, check, read_resize, read_run
from demo_words import (
    change_line,
    check_lines,
    end_line,
    introduction,
    phase_table,
)

from scalai import ScalaiError
from scalai.launch.coordinator.parts import committed_fingerprints
from scalai.store.generation import load_generation
from scalai.store.places import find_generations

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(sysconfig.get_path("scripts"))
STEPS_BETWEEN = 20
"""Steps to train before the next change."""
MOST_STEPS = 10 * SCHEDULE_STEPS
"""The story ends long before."""
SETTLE_S = 120.0
"""How long the first host waits for the second one; nobody waits once both are there."""
RESUMABLE = 75


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--framework", choices=FRAMEWORKS, default="megatron", help="default: %(default)s"
    )
    parser.add_argument("--data", type=Path, help="text to train on (default: Python's own docs)")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build" / "demo",
        help="folder for logs and the picture (default: %(default)s)",
    )
    options = parser.parse_args()
    if options.data is not None and not options.data.is_file():
        parser.error(f"--data {options.data} is not a file.")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        return demonstrate(FRAMEWORKS[options.framework], options.data, options.out)
    except (DemoError, ScalaiError) as error:
        print(f"\nThe demonstration failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped; every process is ended and the store removed.", file=sys.stderr)
        return 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def demonstrate(framework: Framework, data: Path | None, out: Path) -> int:
    """Train twice, compare, print and draw. Returns the exit code."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    memory = Path("/dev/shm")
    store = Path(tempfile.mkdtemp(prefix="scalai-demo-", dir=memory if memory.is_dir() else None))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, store, ignore_errors=True)
        stack.enter_context(no_process_left())
        print(introduction(framework, data), flush=True)
        if framework.compiles:
            print("\n  The framework's extension is compiled, once a machine ...", flush=True)
            compile_first(framework.compiles, out / "compile.log")
        setting = Setting(framework, data, store, out)
        elastic = Training(setting, "elastic", hosts=2, steps=MOST_STEPS)
        _tell(framework.story, elastic)
        steps = elastic.run.last_step
        print(f"\n  Now {steps} steps without any change ...\n", flush=True)
        reference = Training(setting, "reference", hosts=1, steps=steps)
        _train_to_the_end(reference, steps)
    resizes = elastic.resizes()
    checks = check(
        elastic.run,
        reference.run,
        resizes,
        (elastic.first, reference.first),
        elastic.saved_step(),
        framework.story,
    )
    picture = draw(elastic.run, reference.run, resizes, framework.story, out / "scalai-demo.png")
    print(phase_table(elastic.run, resizes, framework.story))
    print(check_lines(checks))
    print(f"\n  picture   {picture}\n  took      {time.monotonic() - began:.0f} s")
    return 0 if all(one.is_kept for one in checks) else 4


@dataclass(frozen=True, slots=True)
class Setting:
    """What both trainings have in common.

    ``data``: text to train on, None: Python's own docs; ``store``: folder of the hosts' stores;
    ``out``: folder of logs.
    """

    framework: Framework
    data: Path | None
    store: Path
    out: Path


class Training:
    """One training on 4 workers at the start: its job, its hosts and what it writes down."""

    def __init__(self, setting: Setting, name: str, *, hosts: int, steps: int) -> None:
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
            *("--nnodes", f"1:{hosts}", "--nproc-per-node", str(4 // hosts), "--job", name),
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

    def resizes(self) -> list[Resize]:
        """Return the reports of all rounds by now, in order."""
        paths = sorted((self._folder / "reports").glob("*.json"))
        reports = [json.loads(path.read_text()) for path in paths]
        return [read_resize(report) for report in reports if "after" in report]

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
        command = [str(SCRIPTS / "scalai"), "scale", "--job", self._name]
        command += ["--store-dir", str(self._store), "--nproc", str(workers)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise DemoError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")

    def saved_step(self) -> int:
        """Return the step of the newest state in the durable directory, -1 where there is none."""
        saved = find_generations(self._folder / "saved" / self._name)
        return load_generation(saved[max(saved)]).step if saved else -1


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _tell(story: Sequence[Change], training: Training) -> None:
    """Carry out the story, until the last host has left."""
    for number, change in enumerate(story, start=1):
        _begin(change, training)
        resize = training.wait_for_round(number)
        if change.kind == "start":
            training.keep_first_generation(hosts=2)
        if change.kind == "leave":
            training.hosts.wait_for_end(change.host, 0)
        # How long the training stood still is known once some ordinary steps are done.
        training.wait_for_step(resize.step + ORDINARY_STEPS + 1)
        print(change_line(change, resize, training.run), flush=True)
        training.wait_for_step(resize.step + STEPS_BETWEEN)
    # Hosts that have no workers just go; the last one leaves the state on disk.
    for host in sorted(training.hosts.names, key=lambda host: host in resize.workers):
        training.hosts.tell_to_leave(host)
        training.hosts.wait_for_end(host, RESUMABLE if host in resize.workers else 0)
    print(end_line(training.run), flush=True)


def _train_to_the_end(training: Training, steps: int) -> None:
    """Train on one host, without any change, until the script ends."""
    training.hosts.start("r")
    training.wait_for_round(1)
    training.keep_first_generation(hosts=1)
    for step in range(1, steps + 1):
        training.wait_for_step(step)
    training.hosts.wait_for_end("r", 0)


def _begin(change: Change, training: Training) -> None:
    """Make the change happen; it goes on while this returns."""
    match change.kind:
        case "start":
            training.hosts.start("a")
            training.hosts.start("b")
        case "leave":
            training.hosts.tell_to_leave(change.host)
        case "join":
            training.hosts.start(change.host)
        case "scale":
            training.scale(change.workers)


if __name__ == "__main__":
    sys.exit(main())
