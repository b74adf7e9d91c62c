"""Agents of one job on this machine, each as a host of its own, for tests of the whole line."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from scalai.core.job.proof_rules import UNTOLD
from scalai.launch.chaos.job_processes import agents
from scalai.launch.config.constants import TEST_VARIABLE
from scalai.launch.config.endpoint import read_card
from scalai.launch.coordinator.person_calls import Scale
from scalai.runtime.calls import Channel
from scalai.runtime.failpoints import VARIABLE

MARK = "SCALAI_TEST_JOB"
"""Variable that all processes of a job inherit, by which they are found."""
DEADLINE_S = 150.0
"""How long anything may take here; generous, because the machine may be busy."""
SCALAI_RUN = Path(sys.executable).with_name("scalai-run")
TINY_JOB = Path(__file__).with_name("tiny_job.py")
TINY_MODEL = "global_batch_size = 12\nmicro_batch_size = 1\nnum_attention_heads = 12"


class Timeout(AssertionError):
    """Something that should happen did not. The message has the logs' ends."""


class Agents:
    """The agents of one job. Use it as a context: at its end no process and no store is left.

    Args:
        folder: For logs, metrics and reports.
        degrees: The ``[degrees]`` table, as TOML lines; None: a plain job, not an elastic one.
        script: The script and its arguments.
        model: Lines of its table ``[model]``.
        settings: More lines of the elastic configuration, by table.
        constants: Other values of ``CONSTANTS``, by ``section.key``.
        flags: More flags of ``scalai-run``.
        environment: More variables of the agents.
        store: Where their stores are; None: in shared memory.
    """

    def __init__(
        self,
        folder: Path,
        degrees: str | None,
        script: Sequence[str],
        *,
        slots: int = 2,
        nodes: str = "1:2",
        model: str = TINY_MODEL,
        settings: Mapping[str, str] | None = None,
        constants: Mapping[str, float] | None = None,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        store: Path | None = None,
    ) -> None:
        self.folder = folder
        self._environment = {TEST_VARIABLE: json.dumps(constants or {}), **(environment or {})}
        self.metrics = folder / "metrics.jsonl"
        self.reports = folder / "reports"
        self.store = store or Path("/dev/shm") / f"scalai-test-{os.getpid()}-{folder.name}"
        self.job = "tiny"
        self.launcher = [
            str(SCALAI_RUN), "--nnodes", nodes,
            "--nproc-per-node", str(slots), "--job", self.job, "--report-dir", str(self.reports),
            "--store-dir", str(self.store), "--probe", "none", "--settle-s", "0.2",
            "--log-level", "debug", *flags,
        ]  # fmt: skip
        if degrees is not None:
            self.launcher += ["--elastic", str(self._configure(degrees, model, settings or {}))]
        self.script = list(script)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.started: list[subprocess.Popen[bytes]] = []
        self._lines: list[dict[str, Any]] = []
        self._read_bytes = 0

    def _configure(self, degrees: str, model: str, settings: Mapping[str, str]) -> Path:
        """Write the elastic configuration and return where."""
        store = settings.get("store", "")
        if "snapshot_every" not in store:  # what comes at which step is the test's to say
            store += "\nsnapshot_every = 0"
        tables = {**settings, "store": store, "model": f"{model}\n{settings.get('model', '')}"}
        text = "".join(f"[{name}]\n{lines}\n" for name, lines in tables.items())
        path = self.folder / "elastic.toml"
        path.write_text(f"[degrees]\n{degrees}\n{text}")
        return path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        # A resource tracker removes what its process left, and ends: it is killed only if it hangs.
        for is_tracker in (False, True):
            for process in self.family():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
                    if is_tracker:
                        process.wait(10)
                    if is_tracker or not any("resource_tracker" in p for p in command_of(process)):
                        process.kill()
        for agent in self.started:
            agent.wait(10)
        shutil.rmtree(self.store, ignore_errors=True)

    # ------------------------------------------------------------------ what to do

    def start(self, host: str, *more: str, output: int | None = None) -> None:
        """Start the agent of a host, with more flags of its own. ``output``: takes what it says,
        in place of its log."""
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", MARK: str(self.store),
            VARIABLE: str(self.folder / "failpoint"), **self._environment,
        }  # fmt: skip
        with (self.folder / f"{host}.log").open("ab") as log:
            process = subprocess.Popen(
                self._on(host, [*self.launcher, "--host-id", host, *more, *self.script]),
                stdout=log if output is None else output, stderr=subprocess.STDOUT, env=environment,
            )  # fmt: skip
        self._processes[host] = process
        self.started.append(process)

    def _on(self, host: str, command: list[str]) -> list[str]:
        """Return the command that runs ``command`` on a host: here all are this machine."""
        return command

    def scale(
        self, nproc: int | None = None, nnodes: int | None = None, degrees: str | None = None
    ) -> None:
        """Ask for other resources or degrees."""
        card = read_card(self.store / self.job)
        assert card is not None, f"no coordinator\n{self.logs()}"
        with contextlib.closing(Channel(*card)) as channel:
            channel.call(Scale(nproc, nnodes, degrees, dry_run=False))

    def command(self, *words: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run ``scalai`` about this job. ``code``: the exit code that is expected; None: any."""
        name, *more = words
        done = subprocess.run(
            [sys.executable, "-m", "scalai.launch.cli", name, "--job", self.job,
             "--store-dir", str(self.store), *more],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert code in (None, done.returncode), done.stdout + done.stderr + self.logs()
        return done

    def let_end(self) -> None:
        """Have the tiny job make its last step."""
        (self.folder / "enough").touch()

    def hold_builds(self) -> None:
        """Have workers of the tiny job that start from now on build nothing before
        ``let_build``."""
        (self.folder / "held").touch()

    def let_build(self) -> None:
        (self.folder / "held").unlink()

    def arm(self, place: str, victim: str, signal_name: str = "SIGKILL") -> None:
        """Have the worker of a rank or the agent of a host die or hang at a place, once."""
        (self.folder / "failpoint.reached").unlink(missing_ok=True)
        aside = self.folder / "failpoint.new"
        aside.write_text(f"{place}:{victim}:{signal_name}")
        aside.rename(self.folder / "failpoint")

    def drain(self, host: str) -> None:
        """Send the first signal."""
        self._processes[host].send_signal(signal.SIGTERM)

    def kill(self, host: str, *, with_its_memory: bool = False) -> None:
        """Kill an agent process; ``with_its_memory``: its whole host dies, and its store with
        it."""
        self._processes[host].kill()
        self._processes[host].wait(10)
        if with_its_memory:
            self.wait_until(lambda: not self.workers(host), f"workers of {host} are gone")
            self.remove_store(host)

    def remove_store(self, host: str) -> None:
        """Take away the memory of a host that died."""
        shutil.rmtree(self.store / self.job / host, ignore_errors=True)

    def kill_coordinator(self) -> None:
        """Kill the process that lives as long as the job."""
        self.signal_coordinator(signal.SIGKILL)

    def signal_coordinator(self, number: signal.Signals) -> None:
        """Send a signal to the process that lives as long as the job."""
        name = "scalai.launch.coordinator.process"
        (process,) = [p for p in self.family() if name in command_of(p)]
        process.send_signal(number)

    def kill_worker(self, rank: int) -> None:
        """Kill the worker of this rank, on the job's one host or in its first round."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                environment = process.environ()
                if environment.get("RANK") == str(rank):
                    process.kill()
                    return
        # Those that a fork server made have its environment; they were made in the order of ranks.
        assert len(self._processes) == 1, f"no worker of rank {rank}"
        os.kill(sorted(self.workers())[rank], signal.SIGKILL)

    def wait_until(
        self, is_so: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S
    ) -> None:
        """Return once ``is_so()``. Raises ``Timeout`` with the logs after the deadline, and sooner
        where no agent is left that could bring it about."""
        end = time.monotonic() + deadline_s
        while not is_so():
            if all(agent.poll() is not None for agent in self.started):
                end = min(end, time.monotonic() + 20.0)
            if time.monotonic() > end:
                raise Timeout(f"still not: {what}\n{self.logs()}")
            time.sleep(0.05)

    def wait_for_step(self, step: int, world: int | None = None) -> None:
        """Wait until a step from ``step`` on was made, by a job of ``world`` ranks."""

        def is_made() -> bool:
            lines = self.lines()
            return any(
                line["step"] >= step and world in (None, line["world"]) for line in lines[-20:]
            )

        self.wait_until(is_made, f"step {step} on {world or 'any number of'} ranks")

    def wait_for_world(self, world: int) -> int:
        """Wait until the newest step was made by ``world`` ranks. Returns that step."""
        self.wait_until(
            lambda: bool(self.lines()) and self.lines()[-1]["world"] == world,
            f"a step on {world} ranks",
        )
        return int(self.lines()[-1]["step"])

    def wait_for_all(self, world: int) -> int:
        """Wait until every one of ``world`` ranks has made its first step. Returns the newest step.

        A change that comes before begins the round again from the same state: its first step is
        made twice, and nothing is written.
        """

        def have_stepped() -> bool:
            reports = self.resizes()
            return bool(reports) and sum(reports[-1]["workers"].values()) == world

        self.wait_until(have_stepped, f"each of {world} ranks has stepped")
        return self.wait_for_world(world)

    def wait_for_death(self) -> None:
        """Wait until the failpoint has killed its process."""
        self.wait_until((self.folder / "failpoint.reached").exists, "the failpoint is reached")

    def exit_code(self, host: str, deadline_s: float = DEADLINE_S) -> int:
        """Wait for an agent to end."""
        self.wait_until(
            lambda: self._processes[host].poll() is not None, f"agent {host} ends", deadline_s
        )
        return int(self._processes[host].returncode)

    # ------------------------------------------------------------------ what is there

    def lines(self) -> list[dict[str, Any]]:
        """Return the metrics so far, one entry a step that was made. Each line is parsed once: a
        test that waits asks many times a second."""
        if self.metrics.exists():
            with self.metrics.open("rb") as file:
                file.seek(self._read_bytes)
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._read_bytes += len(whole) + 1
                self._lines += [json.loads(line) for line in whole.splitlines()]
        return list(self._lines)

    def check_each_once(self) -> None:
        """Check that the tiny job has made each step once, as an uninterrupted run makes it."""
        from support.tiny_job import check_each_once

        assert self.lines()[0]["step"] == 1, self.logs()
        check_each_once(self.lines())

    def resizes(self) -> list[dict[str, Any]]:
        """Return the reports of the resizes that have ended, in order."""
        return [json.loads(path.read_text()) for path in sorted(self.reports.glob("*.json"))]

    def has_reported(self, count: int) -> bool:
        """Whether so many resizes have ended, and what came of the newest proof is known, which old
        workers may tell behind its report."""
        reports = self.resizes()
        return len(reports) >= count and not str(reports[-1].get("function")).endswith(UNTOLD)

    def family(self) -> list[psutil.Process]:
        """Return every live process of this job: agents, workers, fork servers, coordinator."""
        return [p for p in psutil.process_iter() if _is_of(p, str(self.store))]

    def exit_codes(self) -> dict[str, int | None]:
        """Return what each host's newest agent has ended with; None: it runs."""
        return {host: process.poll() for host, process in self._processes.items()}

    def agent_pid(self, host: str) -> int:
        """Return the process number of a host's agent."""
        return self._processes[host].pid

    def agents_now(self) -> dict[int, str]:
        """Return the live agents, whoever has started them: hosts by process number."""
        return {pid: host for host, pid in agents(self.store / self.job).items()}

    def workers(self, host: str | None = None) -> list[int]:
        """Return the live workers' process numbers, of one host or of all."""
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                home = worker_home(process)
                if home is not None and host in (None, home.parent.name):
                    found.append(process.pid)
        return found

    def generations(self, host: str) -> list[str]:
        """Return the directories of a host's store that hold state, sorted."""
        kinds = ("generation-", "snapshot-", "dropped-", "fetched-")
        folder = self.store / self.job / host
        return sorted(p.name for p in folder.glob("*") if p.name.startswith(kinds))

    def text(self) -> str:
        """Return all that the agents have logged: where a test looks for something."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def logs(self) -> str:
        """Return the ends of all logs: what a failing test prints."""
        texts = []
        for path in sorted(self.folder.glob("*.log")):
            texts.append(f"--- {path.name}\n" + "\n".join(path.read_text().splitlines()[-60:]))
        return "\n".join(texts)


def worker_home(process: psutil.Process) -> Path | None:
    """Return its agent's directory if this is a worker: one that the agent started, or one that the
    agent's fork server forked, whose environment is still the server's."""
    environment = process.environ()
    if "SCALAI_AGENT" in environment:
        return Path(environment["SCALAI_AGENT"])
    parent = process.parent()
    if parent is None or not (_is_fork_server(process) and _is_fork_server(parent)):
        return None
    return Path(environment["SCALAI_PRELOAD"]).parent


def command_of(process: psutil.Process) -> list[str]:
    """Return a process's command line; empty where it has ended meanwhile."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def _is_fork_server(process: psutil.Process) -> bool:
    """Whether this is a fork server, or a process that one has forked: their command line is
    one."""
    return any("multiprocessing.forkserver" in part for part in command_of(process))


def _is_of(process: psutil.Process, store: str) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.environ().get(MARK) == store
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


@contextlib.contextmanager
def tiny_agents(
    folder: Path,
    degrees: str,
    *,
    steps: int = 100_000,
    step_s: float = 0.02,
    more: Sequence[str] = (),
    **settings: Any,
) -> Iterator[Agents]:
    """Give agents that run the tiny job, with ``more`` flags of its own."""
    script = [
        str(TINY_JOB), "--steps", str(steps), "--step-s", str(step_s),
        "--held", str(folder / "held"), "--metrics", str(folder / "metrics.jsonl"),
        "--enough", str(folder / "enough"), "--faults", str(folder), *more,
    ]  # fmt: skip
    with Agents(folder, degrees, script, **settings) as agents:
        yield agents


def one_worker(folder: Path, **settings: Any) -> contextlib.AbstractContextManager[Agents]:
    """Give a host that runs the tiny job on one rank: each process more costs seconds to start."""
    return tiny_agents(folder, '1 = "tp1"', slots=1, nodes="1", **settings)
