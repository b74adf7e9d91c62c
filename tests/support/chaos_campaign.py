"""``make chaos``: faults of every kind strike a tiny job while it trains, one after the other, and
what it trains is compared with a run that nobody interrupts, step by step and at its end.

    PYTHONPATH=tests python -m support.chaos_campaign [--parts NAME,...] [--seed N] [--out DIR]

Each part is a job with its own hosts and the kinds that strike it by ``scalai chaos``. The last
line of its output is one JSON object:

* ``faults``: kinds whose injection was seen and judged; ``passed``: those of them that were
  survived as stated, of which no step and no final tensor differs from the uninterrupted run.
* ``steps_lost_max``: by kind, beside its limit.
* ``detect_s_max``: until the job knew, where a process ends, and where a host is silent.

Stores and disks are small file systems in a mount namespace of its own, and hosts with a link are
network namespaces: as root. Elsewhere the kinds that need them are skipped, and it is said.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from scalai.core.tensors.fingerprint import piece_fingerprint
from scalai.core.tensors.region import Box
from scalai.launch.chaos.kinds import TRIGGERS
from scalai.launch.commands.chaos import final_fingerprints
from support.agents import TINY_JOB, Agents, one_worker
from support.chaos_hosts import ChaosHosts
from support.network_namespaces import NetworkHosts
from support.tiny_job import advance, initial, sums

INSIDE = "SCALAI_CHAOS_INSIDE"
SNAPSHOT_EVERY = 7
SILENT_S = 3
MOST_STEPS = 40_000
PART_S = 420.0
WHOLE_S = 1800.0
FINAL = ("param/matrix", "param/vector", "step/matrix")
SHARDS = '3 = "tp3"\n2 = "tp2"\n1 = "tp1"'


@dataclass(frozen=True, slots=True)
class Part:
    """One job and what strikes it. ``flags``: of its agents; ``has_links``: its hosts are network
    namespaces."""

    name: str
    faults: tuple[str, ...]
    hosts: str = "abc"
    flags: tuple[str, ...] = ()
    has_links: bool = False


PARTS = (
    Part("processes", (
        "kill-worker", "segv-worker", "abort-worker", "bus-worker", "exit-worker", "raise-worker",
        "memory-worker", "tear-worker", "stop-worker", "kill-in-snapshot", "kill-in-recovery",
        "term-worker", "int-worker", "kill-agent", "kill-agents", "kill-in-commit",
        "stop-agent", "term-agent", "int-agent", "hup-agent", "usr1-agent", "duplicate-host",
    )),
    Part("hosts", (
        "kill-host", "stop-host", "notice", "clock-forward", "clock-back", "stop-coordinator",
        "fail-health", "term-coordinator", "int-coordinator", "kill-coordinator",
    )),
    Part("replicas", ("kill-hosts", "truncate-store", "corrupt-store"), flags=("--replicas", "2")),
    Part("state", ("full-memory", "full-disk", "refuse-disk", "torn-lease", "second-run",
                   "kill-more-hosts", "damage-disk"),
         flags=("--replicas", "0")),
    # A second fault at each station of the recovery from a first one.
    Part("doubles", tuple(
        f"{kind}@station={station}"
        for kind in ("kill-worker", "kill-agent")
        for station, trigger in TRIGGERS.items() if trigger == "kill-worker"
    )),
    Part("between", ("cut-pair",), has_links=True),
    Part("links", ("reset-link", "drop-link", "slow-link"), hosts="ab", has_links=True),
)  # fmt: skip
SHORT = {
    "processes": ("kill-worker", "memory-worker", "term-agent", "kill-agents"),
    "replicas": ("corrupt-store",),
    "state": ("refuse-disk", "torn-lease", "second-run", "kill-more-hosts"),
}
"""What a short campaign runs, by part."""


@dataclass(slots=True)
class Ground:
    """Where a campaign works: stores, disks, and what is left of it."""

    memory: Path
    disk: Path
    out: Path
    reference: Mapping[int, int] = field(default_factory=dict)

    @property
    def reference_file(self) -> Path:
        return self.out / "reference.jsonl"


@contextlib.contextmanager
def ground(out: Path) -> Iterator[Ground]:
    """Give the folders; in a mount namespace of our own, small file systems lie there."""
    # Short, because of the sockets of multiprocessing.
    top = Path(tempfile.mkdtemp(prefix="scalai-", dir="/dev/shm"))
    memory, disk = top / "m", top / "d"
    for folder, size in ((memory, "64m"), (disk, "16m")):
        folder.mkdir()
        if INSIDE in os.environ:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
            subprocess.run(mount, check=True, timeout=30)
    try:
        yield Ground(memory, disk, out)
    finally:
        for folder in (memory, disk):
            if os.path.ismount(folder):
                subprocess.run(["umount", "-l", str(folder)], check=False, timeout=30)
        shutil.rmtree(top, ignore_errors=True)


def final_of(steps: int) -> dict[str, int]:
    """Return the fingerprints of the state after so many steps of an uninterrupted run."""
    matrix, vector = initial()
    for step in range(1, steps + 1):
        advance(matrix, vector, step)
    found = {}
    for name, values in zip(FINAL, (matrix, vector, np.asarray(steps, np.int64)), strict=True):
        bits = np.asarray(values).view(np.uint64)
        found[name] = piece_fingerprint(bits, Box((0,) * bits.ndim, bits.shape), bits.shape)
    return found


def check_reference(where: Ground, folder: Path) -> None:
    """Train without any interruption on one host, and see that what is computed here is the same:
    the losses and the final state."""
    folder.mkdir(parents=True)
    flags = ("--durable-dir", str(where.disk / "reference"))
    with one_worker(folder, flags=flags, store=where.memory / "r", step_s=0.0) as agents:
        agents.start("a")
        agents.wait_for_step(120)
        agents.drain("a")
        assert agents.exit_code("a") == 75, agents.logs()
        made = {line["step"]: line["sum"] for line in agents.lines()}
    step, prints = final_fingerprints(where.disk / "reference" / agents.job)
    assert step == max(made) and list(made) == list(range(1, step + 1))
    assert all(where.reference[each] == total for each, total in made.items())
    expected = final_of(step)
    assert {name: prints[name] for name in FINAL} == expected, (prints, expected)


def run_part(part: Part, where: Ground, seed: int, faults: Sequence[str]) -> dict[str, Any]:
    """Train, inject, drain, and judge. Returns the verdict."""
    folder = where.out / part.name
    folder.mkdir(parents=True)
    disk = where.disk / part.name
    disk.mkdir()
    flags = (
        "--max-restarts", "1000", "--snapshot-every", str(SNAPSHOT_EVERY),
        "--silent-s", str(SILENT_S), "--durable-dir", str(disk), "--durable-every", "1",
        *part.flags,
    )  # fmt: skip
    settings = {"resize": "hang_s = 3"}
    constants = {"resize.quarantine_s": 0.0, "resize.stall_s": 1.0}
    script = [
        str(TINY_JOB), "--steps", str(MOST_STEPS), "--step-s", "0.02",
        "--metrics", str(folder / "metrics.jsonl"),
    ]  # fmt: skip
    given: dict[str, Any] = {
        "slots": 1, "nodes": f"1:{len(part.hosts)}", "flags": flags, "settings": settings,
        "constants": constants, "store": where.memory / part.name[0],
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        agents: Agents
        if part.has_links:
            hosts = stack.enter_context(NetworkHosts(tuple(part.hosts)))
            agents = stack.enter_context(ChaosHosts(hosts, folder, SHARDS, script, **given))
        else:
            agents = stack.enter_context(Agents(folder, SHARDS, script, **given))
        for host in part.hosts:
            good, notice = folder / f"good-{host}", folder / f"notice-{host}"
            good.touch()
            agents.start(
                host, "--health-check", f"test -e {good}", "--preemption", f"signal,file:{notice}"
            )
        agents.wait_until(lambda: _has_all(agents, len(part.hosts)), "all hosts train")
        _wait_for_disk(agents)
        command = [
            sys.executable, "-m", "scalai.launch.cli", "chaos", agents.job,
            "--store-dir", str(agents.store), "--seed", str(seed), "--faults", ",".join(faults),
            "--every", str(3 * SNAPSHOT_EVERY), "--out", str(folder / "chaos"), "--wait-s", "90",
        ]  # fmt: skip
        if isinstance(agents, ChaosHosts):
            command = [*agents.beside(part.hosts[0], command), "--hosts", ",".join(part.hosts[1:])]
        ran = subprocess.run(command, timeout=PART_S, check=False, stdout=subprocess.DEVNULL)
        assert ran.returncode in (0, 4), f"scalai chaos: exit code {ran.returncode}"
        _drain(agents, part.hosts)
        judge = [
            sys.executable, "-m", "scalai.launch.cli", "chaos", agents.job, "--judge",
            "--out", str(folder / "chaos"), "--losses", str(agents.metrics),
            "--reference", str(where.reference_file), "--loss-key", "sum",
        ]  # fmt: skip
        subprocess.run(judge, timeout=120, check=False, stdout=subprocess.DEVNULL)
    verdict: dict[str, Any] = json.loads((folder / "chaos" / "verdict.json").read_text())
    step, prints = final_fingerprints(disk / "tiny")
    wrong = [n for n, value in final_of(step).items() if prints.get(n) != value]
    verdict["differs"] += [f"the final fingerprint of {name} differs" for name in wrong]
    verdict["final_step"] = step
    return verdict


def _has_all(agents: Agents, count: int) -> bool:
    reports = agents.resizes()
    return bool(reports) and sum(reports[-1]["workers"].values()) == count


def _wait_for_disk(agents: Agents) -> None:
    """Faults of the disk need two generations on it."""
    agents.wait_until(lambda: agents.text().count("event=archived") >= 2, "the disk has two")


def _drain(agents: Agents, hosts: str) -> None:
    """Have all hosts leave; the last one saves the state. Those that the command has started again
    are found by their store."""
    for pid in agents.agents_now():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 15)
    agents.wait_until(lambda: not agents.agents_now(), "all hosts have drained")


def united(verdicts: Sequence[tuple[Part, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the figures of all parts."""
    faults, failed, differs = set(), set[str](), []
    skipped, lost = dict[str, str](), dict[str, Any]()
    detect: dict[str, float] = {}
    for part, verdict in verdicts:
        failed |= set(verdict["failed"])
        faults |= {each["kind"] for each in verdict["outcomes"] if each["sign"]} | failed
        skipped |= verdict["skipped"]
        lost |= verdict["steps_lost_max"]
        differs += [f"{part.name}: {each}" for each in verdict["differs"]]
        for heard, seconds in verdict["detect_s_max"].items():
            if seconds is not None:
                detect[heard] = max(detect.get(heard, 0.0), seconds)
    return {
        "chaos": "make chaos",
        "faults": len(faults),
        "passed": 0 if differs else len(faults - failed),
        "failed": sorted(failed),
        "skipped": skipped,
        "steps_lost_max": lost,
        "detect_s_max": detect,
        "differs": differs,
        "steps": sum((verdict.get("losses") or {}).get("steps", 0) for _, verdict in verdicts),
        "again": sum((verdict.get("losses") or {}).get("again", 0) for _, verdict in verdicts),
    }


def campaign(out: Path, seed: int, chosen: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Run these faults, by part. Returns the figures."""
    began = time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    found = []
    with ground(out) as where:
        where.reference = dict(enumerate(sums(MOST_STEPS), 1))
        lines = (json.dumps({"step": s, "sum": total}) for s, total in where.reference.items())
        where.reference_file.write_text("\n".join(lines) + "\n")
        check_reference(where, out / "reference")
        _say(began, "an uninterrupted run trains what is computed here")
        for part in PARTS:
            faults = chosen.get(part.name, ())
            if not faults:
                continue
            obstacle = NetworkHosts.obstacle() if part.has_links else None
            if obstacle is not None:
                _say(began, f"part {part.name} is left out: {obstacle}")
                found.append((part, _left_out(faults, obstacle)))
                continue
            _say(began, f"part {part.name}: {', '.join(faults)}")
            found.append((part, run_part(part, where, seed, faults)))
    return {**united(found), "took_s": round(time.monotonic() - began, 1), "seed": seed}


def _left_out(faults: Sequence[str], why: str) -> dict[str, Any]:
    return {
        "outcomes": [], "failed": [], "skipped": dict.fromkeys(faults, why), "differs": [],
        "steps_lost_max": {}, "detect_s_max": {},
    }  # fmt: skip


def _say(began: float, text: str) -> None:
    print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)


def in_namespace(arguments: Sequence[str]) -> "subprocess.CompletedProcess[str] | None":
    """Run the campaign in a mount namespace of its own; None where none can be made here."""
    words = ["unshare", "-m", "--propagation", "private"]
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return None
    probe = [*words, "mount", "-t", "tmpfs", "none", "/mnt"]
    if subprocess.run(probe, capture_output=True, timeout=30, check=False).returncode:
        return None
    command = [*words, sys.executable, "-m", "support.chaos_campaign", *arguments]
    inside = {**os.environ, INSIDE: "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=inside, text=True, stdout=subprocess.PIPE) as process:
        try:
            said, _ = process.communicate(timeout=WHOLE_S)
        except BaseException:
            process.terminate()  # it ends its jobs
            process.communicate(timeout=60)
            raise
    return subprocess.CompletedProcess(command, process.returncode, said)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ",".join(part.name for part in PARTS if part.name != "doubles")
    parser.add_argument("--parts", default=names, help=f"default: {names}; also: doubles")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/chaos"))
    parser.add_argument("--short", action="store_true", help="few kinds, in two minutes")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    if INSIDE not in os.environ:
        ran = in_namespace(sys.argv[1:])
        if ran is not None:
            print(ran.stdout, end="")
            return ran.returncode
    every = SHORT if options.short else {part.name: part.faults for part in PARTS}
    chosen = {name: every.get(name, ()) for name in options.parts.split(",")}
    figures = campaign(options.out.resolve(), options.seed, chosen)
    print(json.dumps(figures))
    return 0 if figures["faults"] and figures["passed"] == figures["faults"] else 1


if __name__ == "__main__":
    sys.exit(main())
