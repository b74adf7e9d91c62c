"""The coordinator dies, stands still or leaves: workers train on, another one takes its place, and
the job can be changed again.

Hosts are agents of this machine, hosts on a network of its namespaces with a register that both
reach, or agents in PID namespaces of their own, as in pods: whose first process ends, all of it
ends.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from scalai.launch.chaos import job_processes as processes
from support.agents import SCALAI_RUN, TINY_JOB, Agents, command_of, tiny_agents
from support.network_namespaces import NetworkAgents, NetworkHosts, network_agents
from support.tiny_job import check_steps

pytestmark = pytest.mark.fault
no_network = NetworkHosts.obstacle()
needs_network = pytest.mark.skipif(no_network is not None, reason=str(no_network))
DEGREES = '2 = "tp2"\n1 = "tp1"'


@contextmanager
def two_hosts(folder: Path, **facts: Any) -> Iterator[Agents]:
    """Give two hosts, a and b, with a worker each, that train."""
    with tiny_agents(folder, DEGREES, slots=1, **facts) as agents:
        agents.start("a")
        agents.start("b")
        agents.wait_for_step(8, world=2)
        agents.wait_for_all(2)
        yield agents


def adopted(agents: Agents) -> None:
    agents.wait_until(lambda: "event=adopted" in agents.text(), "the round is adopted")


@pytest.mark.campaign
def test_a_coordinator_that_stands_still_is_ended_and_replaced(tmp_path: Path) -> None:
    settings = {"resize": "coordinator_timeout_s = 8"}
    with two_hosts(tmp_path, settings=settings) as agents:
        workers = sorted(agents.workers())
        agents.signal_coordinator(signal.SIGSTOP)
        adopted(agents)
        agents.wait_for_step(agents.lines()[-1]["step"] + 3, world=2)
        assert sorted(agents.workers()) == workers
        assert "event=silent_coordinator" in agents.text()
        agents.check_each_once()
        assert not any(report.get("steps_lost") for report in agents.resizes())


@pytest.mark.campaign
def test_what_stops_a_host_leaves_a_coordinator_alone_that_was_started_there(
    tmp_path: Path,
) -> None:
    """It is none of the agent's own processes, the one that takes another's place as little as the
    first."""
    with two_hosts(tmp_path) as agents:
        for term in (1, 2):
            folder = agents.store / agents.job
            coordinator = processes.coordinator(folder)
            assert coordinator is not None
            assert not any(coordinator in processes.family(folder, host) for host in "ab")
            if term == 1:
                agents.kill_coordinator()
                adopted(agents)


@pytest.mark.campaign
def test_every_agent_is_killed_and_started_again_beside_a_new_coordinator(tmp_path: Path) -> None:
    """What a new agent brings is no round under way: the newest state is gone on from."""
    with two_hosts(tmp_path, settings={"store": "snapshot_every = 5"}) as agents:
        agents.kill_coordinator()
        for host in "ab":
            os.kill(agents.agent_pid(host), signal.SIGKILL)
        agents.wait_until(lambda: not agents.workers(), "workers end with their agents")
        made = agents.lines()[-1]["step"]
        agents.start("a")
        agents.start("b")
        agents.wait_for_step(made + 3, world=2)
        check_steps(agents.lines())


def _has_beaten(entry: Path, since: int) -> bool:
    return entry.stat().st_mtime_ns != since


@contextmanager
def leased(
    folder: Path, flag: str = "--coordinator-lease"
) -> Iterator[tuple[NetworkAgents, NetworkHosts]]:
    root = str(folder / "leases")
    flags = (flag, root if flag == "--durable-dir" else f"file:{root}")
    degrees = '2 = "tp1"\n1 = "tp1"'
    with network_agents(folder, degrees, slots=1, flags=flags) as (agents, hosts):
        agents.start("h1")
        agents.wait_for_step(3, world=1)
        agents.start("h2")
        agents.wait_for_step(agents.wait_for_world(2) + 5, world=2)
        if flag == "--durable-dir":  # h2 counts on it once it has seen two of its beats
            (entry,) = Path(root, agents.job).iterdir()
            for _ in range(3):
                beat = entry.stat().st_mtime_ns
                agents.wait_until(partial(_has_beaten, entry, beat), "a beat")
        yield agents, hosts


@needs_network
@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.parametrize("is_heard", [True, False])
def test_the_other_host_takes_over_and_no_step_is_lost(tmp_path: Path, is_heard: bool) -> None:
    with leased(tmp_path, "--durable-dir") as (agents, hosts):
        if not is_heard:
            hosts.set_link("h1", up=False)
        hosts.kill("h1")
        agents.wait_until(lambda: agents.lines()[-1]["world"] == 1, "h2 goes on")
        agents.wait_for_step(agents.lines()[-1]["step"] + 5, world=1)
        steps = check_steps(agents.lines())
        # The host that died may have made this one without having written its line.
        (rescued,) = re.findall(r"event=rescued committed=\d+ step=(\d+)", agents.text())
        made = {*steps, int(rescued)}
        assert made == set(range(1, steps[-1] + 1)), "no step was lost"
        assert len(steps) == len(set(steps)), "none was made twice"
        hosts.set_link("h1", up=True)
        agents.start("h1")  # the same command line, which names itself as the coordinator's host
        agents.wait_for_step(agents.wait_for_world(2) + 3, world=2)
        assert agents.text().count("event=coordinator job=") == 2, "h1 has started no other one"


@needs_network
@pytest.mark.campaign
def test_a_register_that_cannot_be_reached_takes_nobodys_place(tmp_path: Path) -> None:
    with leased(tmp_path) as (agents, _):
        (tmp_path / "leases").rename(tmp_path / "away")
        (tmp_path / "leases").write_text("no folder")
        agents.wait_until(lambda: "event=lease_hangs" in agents.text(), "it is said")
        step = agents.lines()[-1]["step"]
        agents.wait_for_step(step + 20, world=2)
        (tmp_path / "leases").unlink()
        (tmp_path / "away").rename(tmp_path / "leases")
        agents.wait_for_step(agents.lines()[-1]["step"] + 5, world=2)
        assert agents.text().count("event=coordinator job=") == 1


@needs_network
@pytest.mark.campaign
def test_a_coordinator_that_loses_a_host_and_the_register_ends_and_is_followed(
    tmp_path: Path,
) -> None:
    """It cannot know whether that host is the next coordinator's by now."""
    with leased(tmp_path) as (agents, hosts):
        (tmp_path / "leases").rename(tmp_path / "away")
        (tmp_path / "leases").write_text("no folder")
        agents.wait_until(lambda: "event=lease_hangs" in agents.text(), "it is said")
        hosts.kill("h2")
        agents.wait_until(lambda: "event=stood_down" in agents.text(), "it stands down")
        (tmp_path / "leases").unlink()
        (tmp_path / "away").rename(tmp_path / "leases")
        followed = "event=coordinator job=tiny term=2"
        agents.wait_until(lambda: followed in agents.text(), "another one follows")
        agents.wait_for_step(agents.lines()[-1]["step"] + 5, world=1)
        steps = check_steps(agents.lines())
        assert len(steps) == len(set(steps)), "no step was made twice"


INSIDE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
DEADLINE_S = 60.0


def no_pods() -> str | None:
    """Return the reason why no PID namespaces can be made here."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "PID namespaces need root and unshare"
    tried = subprocess.run([*INSIDE, "true"], capture_output=True, check=False, timeout=DEADLINE_S)
    return "this machine lets nobody make PID namespaces" if tried.returncode else None


needs_pods = pytest.mark.skipif(no_pods() is not None, reason=str(no_pods()))


class PodAgents(Agents):
    """Agents that are each the first process of a PID namespace, below a shell or not."""

    shell = ""

    def _on(self, host: str, command: list[str]) -> list[str]:
        if self.shell:
            return [*INSIDE, "sh", "-c", self.shell, "sh", *command]
        return [*INSIDE, *command]

    def drain(self, host: str) -> None:
        inside = psutil.Process(self.agent_pid(host)).children(recursive=True)
        (agent,) = [p for p in inside if str(SCALAI_RUN) in command_of(p)[:2]]
        agent.send_signal(signal.SIGTERM)


def pods(folder: Path) -> PodAgents:
    script = [str(TINY_JOB), "--steps", "100000", "--metrics", str(folder / "metrics.jsonl")]
    flags = ("--durable-dir", str(folder / "disk"))
    return PodAgents(folder, DEGREES, script, slots=1, flags=flags)


@needs_pods
@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.parametrize("shell", ["", '"$@"; exit $?'], ids=["first", "below-a-shell"])
def test_the_agent_that_started_the_coordinator_stays_until_the_job_has_ended(
    tmp_path: Path, shell: str
) -> None:
    with pods(tmp_path) as agents:
        agents.shell = shell
        agents.start("a")
        agents.wait_for_step(5, world=1)
        assert "event=container" in (tmp_path / "a.log").read_text()
        agents.start("b")
        joined = agents.wait_for_all(2)
        agents.drain("a")
        agents.wait_until(lambda: "event=stay" in agents.text(), "a stays")
        alone = agents.wait_for_all(1)
        agents.wait_for_step(alone + 20, world=1)
        assert agents.exit_codes()["a"] is None, agents.logs()
        agents.drain("b")
        assert agents.exit_code("b") == 75, agents.logs()
        assert agents.exit_code("a") == 0, agents.logs()
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1)) and joined < alone
        assert "event=container" not in (tmp_path / "b.log").read_text()


@needs_pods
@pytest.mark.campaign
def test_who_started_the_coordinator_that_took_over_stays_for_it_likewise(tmp_path: Path) -> None:
    with pods(tmp_path) as agents:
        agents.start("a")
        agents.wait_for_step(5, world=1)
        agents.start("b")
        agents.wait_for_all(2)
        agents.drain("a")
        agents.wait_until(lambda: "event=stay" in agents.text(), "a stays")
        agents.drain("a")
        assert agents.exit_code("a") == 0, agents.logs()
        agents.wait_until(lambda: "event=adopted" in agents.text(), "b has another coordinator")
        assert "event=container" in (tmp_path / "b.log").read_text()
        agents.start("a")
        agents.wait_for_all(2)
        agents.drain("b")
        said = tmp_path / "b.log"
        agents.wait_until(lambda: "event=stay" in said.read_text(), "b stays")
        alone = agents.wait_for_all(1)
        agents.wait_for_step(alone + 20, world=1)
        assert agents.exit_codes()["b"] is None, agents.logs()
        agents.drain("a")
        assert agents.exit_code("a") == 75, agents.logs()
        assert agents.exit_code("b") == 0, agents.logs()


@needs_pods
def test_where_another_program_began_the_namespace_nothing_is_said() -> None:
    module = "scalai.launch.agent.caretaker"
    asked = f"from {module} import all_end_with_this_process as ends; print(ends())"
    for before, expected in (([], "True"), ([sys.executable, "-c", STARTS], "False")):
        logged = subprocess.run(
            [*INSIDE, *before, sys.executable, "-c", asked],
            capture_output=True, text=True, check=True, timeout=DEADLINE_S,
        )  # fmt: skip
        assert logged.stdout.strip() == expected


STARTS = "import subprocess, sys; subprocess.run(sys.argv[1:])"
