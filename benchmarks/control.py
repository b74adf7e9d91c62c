"""How the control plane scales: the real coordinator in a process of its own, and simulated hosts
of 8 ranks each (``control_hosts``) with the real law of a host, over the real wire.

The job is a GPT-3 175B (``plan``) of TP8 PP16 that is asked for TP8 PP12: with 2,048 hosts from
16,384 to 12,288 ranks. No worker and no tensor exists; all of it shares this machine's cores.

Figures, N being the number of hosts (``--hosts``); in brackets what is aimed at with 2,048:

* ``join_s_N``: from the first host's first connection until all have joined (20);
* ``idle_cores_N``: processors that the coordinator keeps busy while the job trains (0.10);
* ``start_s_N``: from the accepted ``scale`` until every host of the new round has its ``Start``
  and has verified it (30); ``start_mb_coordinator``: what the coordinator sends meanwhile (200);
* ``plan_s_host``: fetching the manifests that a host needs from its peers, and its plan; of eight
  hosts, one after the other, the longest (2);
* ``grow_s_N``: until the coordinator has heard what every host has fetched;
* ``prove_s_N``: from the first report of a restore until all hosts may go on (10); the hosts begin
  within N / 320 seconds of each other; ``prove_cores``: what the coordinator keeps busy meanwhile;
* ``rss_gb_coordinator``: its most resident memory (2);
* ``lost_hosts``: hosts that it has lost, in all of this and while it was stopped for 20 s (0).
"""

import argparse
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import control_hosts
from control_coordinator import FORK, TOKEN, CoordinatorProcess, die_with_parent
from control_layout import Layouts, degrees_of
from control_watch import COUNTED, Watch
from plan import RANKS_PER_HOST
from report import Report, timed

from scalai.launch.agent.loop import MEMORY, THREADS, Loop
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.discovery import Place
from scalai.launch.coordinator.person_calls import Scale, Status
from scalai.runtime.calls import Channel
from scalai.runtime.lanes import Lanes

HOSTS_A_PROCESS, MAX_PROCESSES = 32, 8
SWITCH_S = 0.1
"""How long a simulated host keeps the others of its process waiting. In truth they have machines of
their own; here they would spend the time asking for this one."""
STACK_BYTES = 1 << 20
"""Of the threads of simulated hosts."""
NICE = 10
"""Hosts have machines of their own: here they take what the coordinator leaves."""
IDLE_S, PAUSE_S, CALM_S = 60.0, 20.0, 20.0
SAMPLES = 8
MOST_GB = 10.0
"""A coordinator that takes more is ended, before the machine's memory is."""
TICKS_A_SECOND = 10
LOOK_S = 0.05
PHASES = ("begin", "join", "idle", "pause", "scale")
AIMS = {
    "join_s": 20, "start_s": 30, "plan_s_host": 2, "start_mb_coordinator": 200, "prove_s": 10,
    "idle_cores": 0.10, "rss_gb_coordinator": 2, "lost_hosts": 0,
}  # fmt: skip


class HostProcess:
    """A process of simulated hosts.

    Args:
        number: Which one it is.
        hosts: Their numbers.
    """

    def __init__(
        self, number: int, hosts: Sequence[int], spec: JobSpec, place: Place, layouts: Layouts,
        watch: Watch,
    ) -> None:  # fmt: skip
        self.hosts = hosts
        self._line, theirs = FORK.Pipe()
        self._process = FORK.Process(
            target=_be_hosts, args=(number, hosts, spec, place, layouts, watch, theirs), daemon=True
        )
        self._process.start()

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def plan(self, host: int, within_s: float) -> tuple[float, int]:
        """Have a host fetch the manifests that it needs, and plan; returns as ``Host.plan``."""
        self._line.send(host)
        if not self._line.poll(within_s):
            raise SystemExit(f"host {host} has not planned within {within_s:.0f} s.")
        found = self._line.recv()
        if isinstance(found, str):
            raise SystemExit(f"host {host} cannot plan: {found}")
        return found[0], found[1]

    def end(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.join()


def _be_hosts(
    number: int, numbers: Sequence[int], spec: JobSpec, place: Place, layouts: Layouts,
    watch: Watch, line: Connection,
) -> None:  # fmt: skip
    die_with_parent()
    os.nice(NICE)
    sys.setswitchinterval(SWITCH_S)
    logging.disable(logging.WARNING)  # each host would say that the coordinator stands still
    threading.stack_size(STACK_BYTES)
    watch.begin(number)
    loop = Loop()
    lanes = Lanes({MEMORY: THREADS[MEMORY]}, loop.put)
    lanes.start()
    hosts = {
        each: control_hosts.Host(each, spec, place, layouts, watch, loop, lanes) for each in numbers
    }
    for each in numbers:
        watch.note("opened", each)
    turns = [list(hosts.values())[turn::TICKS_A_SECOND] for turn in range(TICKS_A_SECOND)]
    turn = 0

    def tick() -> None:
        nonlocal turn
        watch.pass_gates()
        for host in turns[turn % TICKS_A_SECOND]:
            host.tick()
        turn += 1

    def join() -> None:
        watch.wait("join")
        control_hosts.join_all(hosts.values())

    def plan() -> None:
        while True:
            asked = line.recv()
            try:
                line.send(hosts[asked].plan())
            except Exception as error:  # told to who waits for the plan, and ends the run there
                line.send(repr(error))

    for work in (join, plan):
        threading.Thread(target=work, daemon=True).start()
    loop.run(tick, lambda: False)


class Run:
    """The benchmark under way: its processes, and what waits for them."""

    def __init__(self, report: Report, options: argparse.Namespace, folder: Path) -> None:
        self.report, self.hosts = report, options.hosts
        self.idle_s, self.within_s = options.idle_s, options.within_s
        self.before, self.after = degrees_of(options.hosts)
        self.spec = _spec(folder, options.hosts)
        # First: its memory is to be its own.
        self.coordinator = CoordinatorProcess(self.spec, folder / "coordinator.log")
        self.processes: list[HostProcess] = []
        count = min(MAX_PROCESSES, -(-options.hosts // HOSTS_A_PROCESS))
        self.watch = Watch(options.hosts, count)
        self._process_count = count

    def end(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.end()
        self.coordinator.end()

    def await_(
        self, what: str, missing: Callable[[], object], within_s: float | None = None
    ) -> None:
        """Wait until nothing is missing."""
        within_s = within_s or self.within_s
        end = time.monotonic() + within_s
        while missing():
            if not self.coordinator.is_alive():
                raise SystemExit(f"{what}: the coordinator has ended.")
            if self.coordinator.rss_gb() > MOST_GB:
                raise SystemExit(f"{what}: the coordinator takes more than {MOST_GB:.0f} GB.")
            ended = {process.exit_code for process in self.processes} - {None}
            if ended:
                raise SystemExit(f"{what}: processes of hosts have ended with {ended}.")
            if time.monotonic() > end:
                raise SystemExit(f"{what}: after {within_s:.0f} s missing: {missing()}")
            time.sleep(LOOK_S)

    def await_all(self, name: str, what: str, count: int | None = None) -> None:
        """Wait until so many hosts (None: all) have come to a moment."""
        everyone, needed = range(self.hosts), count or self.hosts

        def missing() -> str:
            came = set(self.watch.came(name, everyone))
            absent = [host for host in everyone if host not in came]
            some = (
                f"hosts such as {absent[:5]}; counts {dict(self.watch.counts())}; "
                if absent
                else ""
            )
            return (
                ""
                if len(came) >= needed
                else (
                    f"{needed - len(came)} of {needed} hosts, {some}"
                    f"heard {dict(self.coordinator.counts.reports())}"
                )
            )

        self.await_(what, missing)

    def _await_heard(self, name: str, count: int) -> None:
        """Wait until the coordinator has heard so many reports of a kind."""
        heard = self.coordinator.counts.reports
        self.await_(f"{name} is heard", lambda: max(0, count - heard()[name]))

    def ask(self, request: Any) -> Any:
        """Ask the coordinator as a person does."""
        channel = Channel(self.coordinator.address, TOKEN, call_s=60.0, connect_s=60.0)
        try:
            return channel.call(request).value()
        finally:
            channel.close()

    def add(self, name: str, value: float | int, unit: str = "", *, suffix: bool = True) -> None:
        """Add a figure, and show what is aimed at."""
        aim = f" (aim with 2048 hosts: at most {AIMS[name]})" if name in AIMS else ""
        full = f"{name}_{self.hosts}" if suffix else name
        self.report.add(full, value, f"{unit}{aim}".strip())

    # ------------------------------------------------------------------ phases

    def begin(self) -> None:
        """Make the layouts and open all hosts."""
        self.await_("the coordinator listens", lambda: not self.coordinator.counts.port.value, 30.0)
        seconds, layouts = timed(lambda: Layouts.of(self.before, self.after))
        rows = sum(len(held) for held in layouts.held)
        self.report.say(
            f"{self.before} to {self.after}: {rows} pieces, laid out in {seconds:.1f} s"
        )
        place = Place(self.coordinator.address, TOKEN)
        count = self._process_count
        for number in range(count):
            numbers = range(number, self.hosts, count)
            self.processes.append(
                HostProcess(number, numbers, self.spec, place, layouts, self.watch)
            )
        self.await_all("opened", "hosts open their data planes")
        pid = self.coordinator.pid
        self.report.say(f"{self.hosts} hosts in {count} processes, the coordinator in {pid}")

    def join(self) -> None:
        """All hosts join at once, and train."""
        self.watch.open("join")
        self.await_all("joined", "hosts join")
        self.add("join_s", self.watch.last("joined") - self.watch.first("begun"), "s")
        self.report.add("join_retries", self.watch.counts()["retries"])
        self.await_all("stepped", "the first round steps")
        took = self.watch.last("stepped") - self.watch.last("joined")
        self.report.add(f"first_round_s_{self.hosts}", took, "s")
        self._await_heard("Committed", self.hosts)
        took = time.monotonic() - self.watch.last("stepped")
        self.report.add(f"first_commit_s_{self.hosts}", took, "s")

    def idle(self) -> None:
        """The job trains, and nothing happens."""
        time.sleep(5.0)
        counts, begin = self.coordinator.counts, time.monotonic()
        used, polls = self.coordinator.cpu_s(), counts.polls.value
        self._stay(self.idle_s)
        took = time.monotonic() - begin
        self.add("idle_cores", (self.coordinator.cpu_s() - used) / took, "cores")
        self.report.say(f"{(counts.polls.value - polls) / took:.0f} polls a second")

    def _stay(self, seconds: float) -> None:
        """Look on for so long."""
        end = time.monotonic() + seconds
        self.await_("the job trains", lambda: time.monotonic() < end, seconds + self.within_s)

    def pause(self) -> None:
        """The coordinator stands still, and goes on."""
        self.coordinator.signal(signal.SIGSTOP)
        time.sleep(PAUSE_S)
        self.coordinator.signal(signal.SIGCONT)
        self.report.say(f"the coordinator stood still for {PAUSE_S:.0f} s")
        self._stay(CALM_S)
        status = self.ask(Status())
        self.report.say(
            f"phase {status['phase']}, {len(status['hosts'])} hosts, round {status['round']}; "
            f"lost {self.coordinator.counts.lost.value}, {dict(self.watch.counts())}"
        )

    def scale(self) -> None:
        """A person asks for other degrees: until all hosts have their start."""
        counts = self.coordinator.counts
        sent, degrees = counts.sent.value, f"tp{self.after.tp} pp{self.after.pp} dp{self.after.dp}"
        self.report.say(f"scale: {self.ask(Scale(None, None, degrees, dry_run=False))['reason']}")
        begin = time.monotonic()
        active = self.after.world_size // RANKS_PER_HOST
        self.await_all("verified", "hosts verify their start", active)
        self.add("start_s", self.watch.last("verified") - begin, "s")
        megabytes = (counts.sent.value - sent) / 1e6
        self.add("start_mb_coordinator", megabytes, "MB", suffix=False)
        self._plan()
        self.watch.open("move")
        moved = time.monotonic()
        self.await_all("ready", "hosts have what they restore", active)
        self._await_heard("Grown", active)
        self.report.add(f"grow_s_{self.hosts}", time.monotonic() - moved, "s")
        used = self.coordinator.cpu_s()
        self.watch.open("restore")
        self.await_all("proceeded", "hosts hear that the state is proven", active)
        took = self.watch.last("proceeded") - self.watch.first("restored")
        self.add("prove_s", took, "s")
        self.report.add("prove_cores", (self.coordinator.cpu_s() - used) / took, "cores")
        self.await_all("stepped_after", "the new round steps", active)
        self.await_("the job runs", lambda: self._phase_beside("running"))
        self.report.say(f"the job runs {self.after}")

    def _phase_beside(self, phase: str) -> str:
        found = str(self.ask(Status())["phase"])
        return "" if found == phase else f"it is {found}"

    def _plan(self) -> None:
        """Some hosts fetch the manifests that they need and plan, one after the other."""
        planners = self.watch.came("verified", range(self.hosts))
        chosen = planners[:: max(1, len(planners) // SAMPLES)][:SAMPLES]
        found = [
            next(process for process in self.processes if host in process.hosts).plan(
                host, self.within_s
            )
            for host in chosen
        ]
        seconds = [each for each, _ in found]
        self.add("plan_s_host", max(seconds), "s", suffix=False)
        self.report.add("plan_s_host_median", median(seconds), "s")
        self.report.add("manifests_fetched", round(median(count for _, count in found)))

    def finish(self) -> None:
        self.add("rss_gb_coordinator", self.coordinator.peak_rss_gb(), "GB", suffix=False)
        self.add("lost_hosts", self.coordinator.counts.lost.value, suffix=False)
        for name in COUNTED[1:]:
            self.report.add(name, self.watch.counts()[name])


def _spec(folder: Path, hosts: int) -> JobSpec:
    """Return the job: it begins once all hosts are there, and may go on with fewer."""
    before, _ = degrees_of(hosts)
    config = folder / "elastic.toml"
    config.write_text(
        f"[degrees]\ndefault = 'tp{before.tp} pp{before.pp}'\n"
        f"[model]\nglobal_batch_size = {16 * before.dp}\n"
        "[probe]\nkind = 'none'\n[resize]\nsettle_s = 60.0\n"
    )
    flags = ["--nproc-per-node", str(RANKS_PER_HOST), "--nnodes", f"1:{hosts}"]
    return JobSpec.read(
        parse_options(["--elastic", str(config), "--job", "control", *flags, "script.py"])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="How the control plane scales.")
    parser.add_argument("--hosts", type=int, default=2048)
    parser.add_argument("--idle-s", type=float, default=IDLE_S, help="how long it looks on idly")
    parser.add_argument("--within-s", type=float, default=600.0, help="how long a phase may take")
    parser.add_argument("--until", choices=PHASES, default=PHASES[-1], help="the last phase")
    parser.add_argument("--log", type=Path, help="keep the coordinator's log in this file")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    report = Report("control")
    with tempfile.TemporaryDirectory(prefix="scalai-control-") as name:
        run = Run(report, options, Path(name))
        try:
            for phase in PHASES[: PHASES.index(options.until) + 1]:
                getattr(run, phase)()
            run.finish()
        except BaseException:
            tail = (Path(name) / "coordinator.log").read_text().splitlines()[-20:]
            report.say("the coordinator said last:\n" + "\n".join(line[:400] for line in tail))
            raise
        finally:
            run.end()
            if options.log is not None:
                shutil.copy(Path(name) / "coordinator.log", options.log)
    report.finish()


if __name__ == "__main__":
    main()
