"""A signal to all processes of a host asks its agent to drain, and harms nobody else."""

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from support.agents import Agents, command_of, one_worker, tiny_agents
from support.tiny_job import check_steps

pytestmark = pytest.mark.fault

DEGREES = '2 = "tp2"\n1 = "tp1"'


def send_to_all(agents: Agents, number: int) -> None:
    """Send a signal to every process of the job: what Slurm does to a step."""
    for process in agents.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def check_drained(agents: Agents, host: str = "a") -> None:
    """The job has ended in order: no step was lost, and there is no traceback."""
    assert agents.exit_code(host) == 75, agents.logs()
    steps = check_steps(agents.lines())
    assert steps == list(range(1, len(steps) + 1))
    agents.wait_until(lambda: not agents.family(), "all processes are gone")
    log = (agents.folder / f"{host}.log").read_text()
    assert "Traceback" not in log and "leaked" not in log, log
    assert "died" not in log, log


@pytest.mark.turns
@pytest.mark.parametrize(
    ("number", "is_warm"),
    [
        pytest.param(signal.SIGTERM, True, id="SIGTERM-warm"),
        pytest.param(signal.SIGINT, False, id="SIGINT-cold"),
        pytest.param(signal.SIGHUP, True, id="SIGHUP-warm"),
        pytest.param(signal.SIGTERM, False, id="SIGTERM-cold", marks=pytest.mark.campaign),
        pytest.param(signal.SIGINT, True, id="SIGINT-warm", marks=pytest.mark.campaign),
    ],
)
def test_a_signal_to_every_process_of_the_last_host_saves_the_state(
    tmp_path: Path, number: int, is_warm: bool
) -> None:
    flags = ("--durable-dir", str(tmp_path / "disk"))
    slots = 2 if is_warm else 1
    with tiny_agents(tmp_path, DEGREES, slots=slots, nodes="1", flags=flags) as agents:
        agents.start("a")
        agents.wait_for_step(5)
        if is_warm:
            agents.wait_until(lambda: "event=warm" in agents.text(), "the fork server is there")
            agents.scale(nproc=1)
            agents.wait_for_world(1)
        send_to_all(agents, number)
        check_drained(agents)


@pytest.mark.campaign
@pytest.mark.turns
def test_a_signal_while_the_fork_server_starts_leaves_no_traceback(tmp_path: Path) -> None:
    with one_worker(tmp_path, flags=("--durable-dir", str(tmp_path / "disk"))) as agents:
        agents.start("a")
        agents.wait_until(
            lambda: any("forkserver" in str(command_of(p)) for p in agents.family()), "it is there"
        )
        send_to_all(agents, signal.SIGINT)
        check_drained(agents)


@pytest.mark.campaign
@pytest.mark.turns
def test_a_signal_while_the_first_workers_start_kills_none_of_them(tmp_path: Path) -> None:
    flags = ("--durable-dir", str(tmp_path / "disk"))
    with tiny_agents(tmp_path, DEGREES, nodes="1:2", flags=flags) as agents:
        agents.start("a")
        agents.wait_until(lambda: len(agents.workers()) == 2, "the workers are there")
        for pid in agents.workers():
            os.kill(pid, signal.SIGTERM)
        agents.wait_for_step(5, world=2)


def start_and_fork(agents: Agents) -> None:
    """Start a host's agent, and bring its job to workers that were forked."""
    agents.start("a")
    agents.wait_for_all(2)
    agents.wait_until(lambda: "event=warm" in agents.text(), "the fork server is there")
    agents.scale(nproc=1)
    agents.wait_for_world(1)


@pytest.mark.turns
def test_ctrl_c_at_a_terminal_reaches_the_agent_alone(tmp_path: Path) -> None:
    with tiny_agents(tmp_path, DEGREES, nodes="1") as agents:
        start_and_fork(agents)
        (agent,) = [p for p in agents.family() if p.pid == agents.agent_pid("a")]
        others = [p.pid for p in agents.family() if p.pid != agent.pid]
        group = os.getpgid(agent.pid)
        trackers = {p.pid for p in agents.family() if "resource_tracker" in str(command_of(p))}
        assert {pid for pid in others if os.getpgid(pid) == group} <= trackers


@pytest.mark.turns
def test_workers_die_with_an_agent_that_is_killed(tmp_path: Path) -> None:
    with tiny_agents(tmp_path, DEGREES, nodes="1") as agents:
        start_and_fork(agents)
        agents.kill("a")
        agents.wait_until(lambda: not agents.workers(), "the workers are gone")


@pytest.mark.campaign
@pytest.mark.turns
def test_a_second_signal_ends_the_agent_and_its_workers_at_once(tmp_path: Path) -> None:
    with one_worker(tmp_path) as agents:
        agents.start("a")
        agents.wait_for_step(5)
        psutil.Process(agents.workers()[0]).suspend()  # so that the drain waits for it
        send_to_all(agents, signal.SIGTERM)
        agents.wait_until(lambda: "event=signal" in agents.text(), "the first one is heard")
        agents.drain("a")
        assert agents.exit_code("a") == 128 + signal.SIGTERM
        agents.wait_until(lambda: not agents.workers(), "the workers are gone")


@pytest.mark.campaign
def test_a_build_whose_worker_was_killed_holds_up_no_later_round(tmp_path: Path) -> None:
    (tmp_path / "extensions" / "op").mkdir(parents=True)
    script = tmp_path / "script.py"
    script.write_text(BUILDS)
    with Agents(
        tmp_path, DEGREES, [str(script)], nodes="1", flags=("--max-restarts", "1"),
        environment={"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")},
    ) as agents:  # fmt: skip
        agents.start("a")
        assert agents.exit_code("a") == 0, agents.logs()
        assert "event=build_lock removed=" in (tmp_path / "a.log").read_text()


BUILDS = """
import os, pathlib, sys, time
from torch.utils.file_baton import FileBaton
baton = FileBaton(os.environ["TORCH_EXTENSIONS_DIR"] + "/op/lock")
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if os.environ["RANK"] == "0":
    if not baton.try_acquire():
        baton.wait()
    elif is_first:
        time.sleep(600)
    else:
        baton.release()
elif is_first:
    while not os.path.exists(baton.lock_file_path):
        time.sleep(0.05)
    sys.exit(1)
"""
