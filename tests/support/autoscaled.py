"""Three jobs under ``scalai autoscale`` on four devices, one of which is lost and comes back; then
a fourth job. DeepSpeed trains one of them, megatron-core the others."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.agents import Agents

EXAMPLES = Path(__file__).parents[2] / "examples"
PACED = Path(__file__).with_name("paced.py")
CONFIGURATION = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 1_000_000,
    "scalai": {"resize": {"settle_s": 0.2}, "probe": {"kind": "none"}},
}
MODEL = ["--layers", "2", "--hidden", "32", "--seq-length", "32"]
DEGREES = '2 = "tp1 pp1"\n1 = "tp1 pp1"'
SETTINGS = {"model": "num_layers = 2\npadded_vocab_size = 256"}
EACH_S = 0.04
"""Seconds of a device for a sample: a step of 12 takes 0.48 s on one, and half of it on two."""
DEADLINE_S = 300.0


@dataclass
class Shared:
    """The jobs, their autoscaler, and what was done when.

    Attributes:
        told: The autoscaler's decisions.
        devices: Devices from a time on, in seconds since 1970.
    """

    folder: Path
    policy: str = "goodput"
    jobs: dict[str, Agents] = field(default_factory=dict)
    devices: list[tuple[float, int]] = field(default_factory=list)
    begun: dict[str, float] = field(default_factory=dict)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def command(self, name: str, *, is_paced: bool = True) -> list[str]:
        """A job's script with its flags."""
        metrics = self.folder / name / ("metrics" if is_paced else "alone")
        metrics.mkdir(parents=True, exist_ok=True)
        script = [*MODEL, "--metrics", str(metrics), "--seed", str(1000 + ord(name[-1]))]
        if name.startswith("deepspeed"):
            path = self.folder / name / "ds.json"
            path.write_text(json.dumps(CONFIGURATION))
            found = [str(EXAMPLES / "train_deepspeed.py"), *script, "--deepspeed_config", str(path)]
        else:
            found = [str(EXAMPLES / "train_gpt.py"), *script, "--micro-batch-size", "1",
                     "--lr-decay-steps", "4000"]  # fmt: skip
        return [str(PACED), str(EACH_S), *found] if is_paced else found

    def describe(self, name: str, most: int) -> Agents:
        """Write a job's file; it does not run yet."""
        is_deepspeed = name.startswith("deepspeed")
        script = [*self.command(name), "--steps", "3900"]
        agents = Agents(
            self.folder / name, None if is_deepspeed else DEGREES, script, slots=most, nodes="1",
            settings=SETTINGS, environment={"DS_BUILD_OPS": "0"},
            store=Path("/dev/shm") / f"scalai-test-{os.getpid()}-{self.folder.name}-{name}",
        )  # fmt: skip
        self.jobs[name] = self._stack.enter_context(agents)
        jobs = self.folder / "jobs"
        jobs.mkdir(mode=0o700, exist_ok=True)
        text = f'job = "tiny"\nstore_dir = "{agents.store}"\ndevices = [1, {most}]\n'
        aside = jobs / f".{name}"
        aside.write_text(text)
        aside.rename(jobs / f"{name}.toml")
        self.begun[name] = time.time()
        return agents

    def set_devices(self, count: int) -> None:
        path = self.folder / "devices"
        path.with_suffix(".new").write_text(f"{count}\n")
        path.with_suffix(".new").rename(path)
        self.devices.append((time.time(), count))

    @contextlib.contextmanager
    def scaling(self) -> Iterator[None]:
        """The autoscaler runs."""
        words = [sys.executable, "-m", "scalai", "autoscale", "--jobs", str(self.folder / "jobs"),
                 "--devices", str(self.folder / "devices"), "--policy", self.policy,
                 "--json"]  # fmt: skip
        with (self.folder / "told.jsonl").open("ab") as output, self.log.open("ab") as log:
            process = subprocess.Popen(words, stdout=output, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)

    @property
    def log(self) -> Path:
        return self.folder / "autoscale.log"

    def told(self) -> list[dict[str, Any]]:
        text = (self.folder / "told.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def steps(self, name: str) -> int:
        path = self.folder / name / "metrics" / "loss.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def workers(self) -> Mapping[str, int]:
        """Workers of each job behind its newest change."""
        reports = {name: agents.resizes() for name, agents in self.jobs.items()}
        return {name: sum(r[-1]["workers"].values()) if r else 0 for name, r in reports.items()}

    def wait_until(self, is_so: Callable[[], object], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not is_so():
            logs = "\n".join(f"{name}:\n{agents.logs()}" for name, agents in self.jobs.items())
            text = f"never: {what}\n{self.log.read_text()}\n{logs}" if self.log.exists() else what
            assert time.monotonic() < end, text
            time.sleep(0.2)

    def wait_for_steps(self, more: int) -> None:
        """Every job that runs makes so many steps more."""
        before = {name: self.steps(name) for name in self.jobs}
        self.wait_until(
            lambda: all(self.steps(n) >= made + more for n, made in before.items()), "more steps"
        )

    def wait_for_sizes(self, is_so: Callable[[Mapping[str, int]], bool], what: str) -> None:
        self.wait_until(lambda: is_so(self.workers()), what)

    def close(self) -> None:
        self._stack.close()


def through_all(shared: Shared, stay: int) -> None:
    """Lead three jobs through the events; each is answered before the next one, ``stay`` steps of
    every job later."""
    shared.set_devices(4)
    for name in ("megatron-a", "deepspeed-b"):
        shared.describe(name, 2).start("h")
    shared.wait_until(lambda: all(shared.steps(n) >= 5 for n in shared.jobs), "two jobs train")
    with shared.scaling():
        shared.wait_for_steps(stay)
        arrive(shared, "megatron-c")
        shared.wait_for_steps(stay)
        shared.set_devices(3)
        shared.wait_for_sizes(lambda now: sum(now.values()) == 3, "a device is given")
        shared.wait_for_steps(stay)
        shared.set_devices(4)
        shared.wait_for_sizes(lambda now: sum(now.values()) == 4, "the new device is taken")
        shared.wait_for_steps(stay)
        arrive(shared, "megatron-d")
        shared.wait_for_steps(stay)


def arrive(shared: Shared, name: str) -> None:
    """A job waits, and starts on its device once that is free: what an engine does."""
    agents = shared.describe(name, 1)
    most = shared.devices[-1][1]
    shared.wait_for_sizes(lambda now: sum(now.values()) < most, f"{name} gets room")
    agents.start("h")
    shared.wait_until(lambda: shared.steps(name) >= 3, f"{name} trains")
