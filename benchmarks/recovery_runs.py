"""The runs of ``recovery.py``: a job on several hosts of which one dies, under Scalai or torchrun,
and one that takes snapshots in some of its steps."""

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from recovery_hosts import Hosts
from recovery_saves import newest_save, step_of

from scalai.launch.coordinator.losses import LOST_AFTER_S

TIMEOUT_S = 300.0
EVERY = 10
"""Steps between two states that outlive a host."""
BEHIND = 5
"""Steps behind such a state at which a host dies."""
SLOTS = {"a": 2, "b": 1, "c": 1}
NAMES = tuple(SLOTS)
VICTIM = "c"
LEFT = sum(count for name, count in SLOTS.items() if name != VICTIM)
STAGES = (1, 1, 3, 2)
"""Pipeline stages of 1, 2, ... ranks: gradients of few replicas cross, so that steps are short."""
VOCABULARY = 1024
TOKEN = "0123456789abcdef0123456789abcdef"
MARKS = ("script", "imported", "entered", "connected", "built", "restored")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    """A GPT of some size."""

    hidden: int
    layers: int
    seq_length: int = 8
    global_batch: int = 4

    @property
    def state_bytes(self) -> int:
        """Parameters and Adam's moments in fp32: 12 bytes a parameter."""
        block = 12 * self.hidden**2 + 13 * self.hidden
        return 12 * (self.layers * block + (VOCABULARY + self.seq_length + 2) * self.hidden)

    def flags(self) -> list[str]:
        sizes = {
            "hidden": self.hidden, "layers": self.layers, "vocabulary": VOCABULARY,
            "seq-length": self.seq_length, "global-batch-size": self.global_batch,
        }  # fmt: skip
        return [part for name, size in sizes.items() for part in (f"--{name}", str(size))]


@dataclass(frozen=True)
class Recovery:
    """What became of the death of a host: seconds until the last step was passed, in parts, steps
    that were made once more, and the loss of each step."""

    total_s: float
    parts: Mapping[str, float]
    steps_lost: int
    losses: Mapping[int, float]


@dataclass(frozen=True)
class Blocks:
    """Ten steps with a snapshot and ten without: seconds, processor seconds of all processes, and
    for how long the snapshot kept the step from going on."""

    with_s: float
    without_s: float
    with_cpu_s: float
    without_cpu_s: float
    stall_s: float


class Marks:
    """What all ranks have noted so far, by round and rank."""

    def __init__(self, folder: Path) -> None:
        self.rounds: dict[int, dict[int, list[dict[str, Any]]]] = {}
        for path in sorted(folder.glob("round-*.jsonl")):
            number, rank = map(int, path.stem.split("-")[1:])
            lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
            self.rounds.setdefault(number, {})[rank] = [json.loads(line) for line in lines]

    def made(self, number: int, ranks: int) -> int:
        """Return the newest step that all of so many ranks have made in a round; 0: none."""
        there = self.rounds.get(number, {})
        if len(there) < ranks:
            return 0
        newest = (
            max((e["step"] for e in events if e["event"] == "step"), default=0)
            for events in there.values()
        )
        return min(newest)

    def when(self, number: int, event: str, step: int | None = None) -> float:
        """Return when the last rank of a round was there for the first time."""
        return max(
            next(
                float(e["at"])
                for e in events
                if e["event"] == event and step in (None, e.get("step"))
            )
            for events in self.rounds[number].values()
        )

    def losses(self) -> dict[int, float]:
        """Return the loss of each step, as it was made last; only the last stage has one."""
        found = dict[int, float]()
        for _, ranks in sorted(self.rounds.items()):
            for events in ranks.values():
                steps = (e for e in events if e["event"] == "step" and e["loss"])
                found |= {e["step"]: e["loss"] for e in steps}
        return found


class Side(ABC):
    """Who starts the job, and starts it again."""

    name: str
    settings: Mapping[str, Any]
    variables: Mapping[str, str]
    script = Path(__file__).with_name("recovery_job.py")

    def __init__(self, size: Size, timeout_s: float) -> None:
        self.size, self._timeout_s = size, timeout_s

    @abstractmethod
    def command(self, hosts: Hosts, host: str, home: Path) -> list[str]:
        """Return ``python -m``'s arguments for a host, up to the script's."""

    @abstractmethod
    def outlives(self, home: Path) -> int:
        """Return the step of the newest state that outlives a host; 0: there is none."""

    def start(self, hosts: Hosts, names: Sequence[str], home: Path) -> None:
        (home / "marks").mkdir()
        script = self.script_of(home)
        for host in names:
            command = [*self.command(hosts, host, home), *script]
            hosts.start(host, command, home / f"{host}.log", self.variables)

    def script_of(self, home: Path) -> list[str]:
        """Return the script and its arguments."""
        script = [str(self.script), *self.size.flags(), "--marks", str(home / "marks")]
        return [*script, "--timeout-s", str(self._timeout_s), *self.script_flags(home)]

    def script_flags(self, home: Path) -> list[str]:
        return []


class ScalaiSide(Side):
    name = "scalai"

    def __init__(self, size: Size, every: int = EVERY, timeout_s: float = 1800.0) -> None:
        super().__init__(size, timeout_s)
        self._every = every
        self.settings = {"closed_s": 2.0, "silent_s": LOST_AFTER_S, "replicas": 1}
        self.variables = {"SCALAI_JOB_TOKEN": TOKEN}

    def command(self, hosts: Hosts, host: str, home: Path) -> list[str]:
        config = home / "elastic.toml"
        config.write_text(
            "[degrees]\n" + "".join(f'{n} = "tp1 pp{pp}"\n' for n, pp in enumerate(STAGES, 1))
            + f"[model]\nnum_attention_heads = {self.size.hidden // 64}\n"
            f"num_layers = {self.size.layers}\npadded_vocab_size = {VOCABULARY}\n"
            f"global_batch_size = {self.size.global_batch}\nmicro_batch_size = 1\n"
            f"[store]\nsnapshot_every = {self._every}\n[resize]\nsettle_s = 0.0\n"
            '[probe]\nkind = "none"\n'
        )  # fmt: skip
        address = f"{hosts.addresses[hosts.names[0]]}:29400"
        return [
            "scalai.launch.run", "--log-level", "debug", "--job", "recovery-benchmark",
            "--host-id", host,
            "--nnodes", f"{len(hosts.names) - 1}:{len(hosts.names)}",
            "--nproc-per-node", str(SLOTS[host]), "--coordinator", address,
            "--store-dir", str(hosts.memory(host)), "--elastic", str(config),
        ]  # fmt: skip

    def outlives(self, home: Path) -> int:
        text = "".join(path.read_text() for path in home.glob("*.log"))
        steps = dict(re.findall(r"event=snapshot committed=(\d+) step=(\d+)", text))
        kept = re.findall(r"event=replicated generation=(\d+)", text)
        return max((int(steps[number]) for number in kept if number in steps), default=0)


class TorchrunSide(Side):
    name = "torchrun"

    def __init__(self, size: Size, timeout_s: float) -> None:
        super().__init__(size, timeout_s)
        self.settings = {"collectives_s": timeout_s, "last_call_s": 30.0, "keep_alive_s": 5.0}
        # Else a round that begins again meets what the one before has left in the store.
        self.variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def command(self, hosts: Hosts, host: str, home: Path) -> list[str]:
        return [
            "torch.distributed.run", "--nnodes", f"{len(SLOTS) - 1}:{len(SLOTS)}",
            "--nproc-per-node", str(SLOTS[host]), "--max-restarts", "3",
            "--rdzv-backend", "c10d", "--rdzv-id", "recovery-benchmark",
            "--rdzv-endpoint", f"{hosts.addresses[hosts.names[0]]}:29500",
            "--local-addr", hosts.addresses[host],
            "--rdzv-conf", f"is_host={int(host == hosts.names[0])}",
        ]  # fmt: skip

    def script_flags(self, home: Path) -> list[str]:
        saves = home / "saves"
        saves.mkdir(exist_ok=True)
        stages = map(str, STAGES)
        return ["--saves", str(saves), "--save-every", str(EVERY), "--stages", *stages]

    def outlives(self, home: Path) -> int:
        found = newest_save(home / "saves")
        return 0 if found is None else step_of(found)


def recover(hosts: Hosts, side: Side, home: Path, *, is_cut: bool) -> Recovery:
    """Train, have a host die behind a state that outlives it, and wait until the job has passed the
    step at which it died."""
    side.start(hosts, NAMES, home)
    marks, world = home / "marks", sum(SLOTS.values())

    def first() -> int:
        return min(Marks(marks).rounds, default=0)

    def is_behind() -> bool:
        kept = side.outlives(home)
        return kept >= EVERY and Marks(marks).made(first(), world) >= kept + BEHIND

    wait(is_behind, f"{BEHIND} steps behind a state that outlives a host", home)
    killed_at = time.monotonic()
    if is_cut:
        hosts.cut(VICTIM)
    hosts.end(VICTIM)
    before = first()
    step = Marks(marks).made(before, world)

    def is_passed() -> bool:
        found = Marks(marks)
        last = max(found.rounds)
        return last > before and found.made(last, LEFT) > step

    wait(is_passed, f"step {step + 1} on {LEFT} ranks", home)
    found = Marks(marks)
    last = max(found.rounds)
    restored = min(e["step"] for e in found.rounds[last][0] if e["event"] == "step") - 1
    # A worker that was forked has its imports behind it since long before.
    stages = [killed_at, *(max(killed_at, found.when(last, stage)) for stage in MARKS)]
    stages += [found.when(last, "step", at) for at in dict.fromkeys((restored + 1, step + 1))]
    names = [*MARKS, "first step", "steps again"]
    parts = {
        name: round(at - since, 3)
        for name, (since, at) in zip(names, pairwise(stages), strict=False)  # one step may be both
    }
    return Recovery(stages[-1] - killed_at, parts, step - restored, found.losses())


def run_blocks(folder: Path, size: Size, pairs: int, say: Say) -> list[Blocks]:
    """Train on two hosts of one rank each, with a snapshot and its replicas in every second block
    of ten steps. The first pair, in which workers and stores warm up, does not count."""
    home, names, period = folder / "blocks", ("b", "c"), 2 * EVERY
    home.mkdir()
    times, cpus, wanted = list[float](), list[float](), (pairs + 2) * period
    with Hosts(names, home) as hosts:
        ScalaiSide(size, every=period).start(hosts, names, home)

        def is_enough() -> bool:
            times.append(time.monotonic())
            cpus.append(sum(_cpu_s(pid) for name in names for pid in hosts.processes(name)))
            return Marks(home / "marks").made(0, len(names)) >= wanted

        wait(is_enough, f"{wanted} steps", home, every_s=1.0, timeout_s=7200.0)
        marks = Marks(home / "marks")
    behind = [
        max(e["behind_s"] for events in marks.rounds[0].values() for e in events if _is(e, step))
        for step in range(1, wanted + 1)
    ]
    usual = median(behind)

    def block(first: int) -> tuple[float, float]:
        at = [marks.when(0, "step", step) for step in (first, first + EVERY)]
        began, ended = np.interp(at, times, cpus)
        return at[1] - at[0], float(ended - began)

    found = []
    for first in range(period, (pairs + 1) * period, period):
        (with_s, with_cpu_s), (without_s, without_cpu_s) = block(first), block(first + EVERY)
        stall_s = behind[first - 1] - usual
        found.append(Blocks(with_s, without_s, with_cpu_s, without_cpu_s, stall_s))
        say(f"with a snapshot {with_s:.2f} s, without {without_s:.2f} s, stall {stall_s:.3f} s")
    return found


def _is(event: Mapping[str, Any], step: int) -> bool:
    return bool(event["event"] == "step" and event["step"] == step)


def _cpu_s(pid: int) -> float:
    """Return the processor time that a process has taken; 0 where it has ended."""
    try:
        used = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(used.user + used.system)


def wait(
    is_done: Callable[[], bool],
    what: str,
    home: Path,
    every_s: float = 0.1,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Return once it is done. Ends the benchmark, with the ends of all logs, where it never is."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline:
            logs = "\n".join(
                f"--- {path.name}\n" + "\n".join(path.read_text().splitlines()[-40:])
                for path in sorted(home.glob("*.log"))
            )
            raise SystemExit(f"still not: {what}\n{logs}")
        time.sleep(every_s)
