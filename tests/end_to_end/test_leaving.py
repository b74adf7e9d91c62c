"""Hosts leave by a signal, a notice of preemption or the loss of devices: the state is saved, and
the others train on. A signal to all processes of a host harms nobody else."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.agents import Agents, command_of, one_worker, tiny_agents
from support.metadata_server import Said, metadata_server
from support.tiny_job import check_steps

pytestmark = pytest.mark.fault

DEGREES = '2 = "tp2"\n1 = "tp1"'


def send_to_all(agents: Agents, number: int) -> None:
    """Send a signal to every process of the job: what Slurm does to a step."""
    for process in agents.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def check_drained(agents: Agents, *, has_begun: bool = True) -> None:
    """The job has ended in order: no step was lost, and there is no traceback."""
    assert agents.exit_code("a") == 75, agents.logs()
    if has_begun or agents.lines():
        agents.check_each_once()
    agents.wait_until(lambda: not agents.family(), "all processes are gone")
    log = (agents.folder / "a.log").read_text()
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
        check_drained(agents, has_begun=False)  # it may import beside the first worker


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
import os, sys
from support.waiting import stay, wait_until
from torch.utils.file_baton import FileBaton
baton = FileBaton(os.environ["TORCH_EXTENSIONS_DIR"] + "/op/lock")
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if os.environ["RANK"] == "0":
    if not baton.try_acquire():
        baton.wait()
    elif is_first:
        stay()
    else:
        baton.release()
elif is_first:
    wait_until(lambda: os.path.exists(baton.lock_file_path), "the lock")
    sys.exit(1)
"""


SHARDS = '3 = "tp3"\n2 = "tp2"\n1 = "tp1"'
EVERY_7 = {"store": "snapshot_every = 7"}


def hosts_abc(folder: Path, **given: Any) -> Any:
    return tiny_agents(folder, SHARDS, nodes="1:3", slots=1, **given)


def workers(agents: Agents) -> set[str]:
    """Return the hosts that have workers since the last change."""
    reports = agents.resizes()
    return {h for h, n in reports[-1]["workers"].items() if n} if reports else set()


def log(agents: Agents, host: str) -> str:
    return (agents.folder / f"{host}.log").read_text()


@pytest.mark.turns
def test_what_only_a_host_holds_leaves_it_where_a_drain_takes_too_long(tmp_path: Path) -> None:
    """A worker of it hangs in the middle of an update, so that no drain can end; nobody keeps
    replicas before the notice comes."""
    notice = tmp_path / "notice"
    flags = ("--replicas", "0")
    with hosts_abc(tmp_path, settings=EVERY_7, flags=flags) as agents:
        agents.start("a")
        agents.start("b")
        agents.start("c", "--preemption", f"file:{notice}")
        agents.wait_until(lambda: workers(agents) == {*"abc"}, "all train")
        agents.wait_for_step(agents.lines()[-1]["step"] + 16)
        (tmp_path / "tear-2").touch()
        time.sleep(20.0)  # a long step, which with a snapshot takes longer than what is left
        notice.write_text("24")
        agents.wait_until(lambda: "event=evacuated" in agents.text(), "it has given what it held")
        assert "that is too long" in agents.text()
        agents.kill("c", with_its_memory=True)
        (tmp_path / "tear-2").unlink()
        agents.wait_until(lambda: workers(agents) == {*"ab"}, "the others go on")
        report = agents.resizes()[-1]
        assert report["step"] > 0 and report["step"] % 7 == 0, report
        assert report["recovery"]["state"]["origin"] == "snapshot", report
        agents.wait_for_step(report["step"] + 15)
        check_steps(agents.lines())


def test_sigusr1_to_every_process_of_a_host_is_a_drain(tmp_path: Path) -> None:
    """As Slurm's ``--signal=USR1@300`` sends it; a SIGTERM behind it does not stop the drain."""
    flags = ("--durable-dir", str(tmp_path / "disk"))
    with tiny_agents(tmp_path, '1 = "tp1"', slots=1, nodes="1", flags=flags) as agents:
        agents.start("a")
        agents.wait_for_step(5)
        for process in agents.family():
            process.send_signal(signal.SIGUSR1)
        agents.wait_until(lambda: "event=signal SIGUSR1" in log(agents, "a"), "it is heard")
        os.kill(agents.agent_pid("a"), signal.SIGTERM)
        assert agents.exit_code("a") == 75, agents.logs()
        agents.check_each_once()


@pytest.mark.campaign
def test_a_clouds_notice_that_is_withdrawn_keeps_the_host_and_one_that_stands_drains_it(
    tmp_path: Path,
) -> None:
    """While the next workers build, the training goes on, and the notice is taken back."""
    preempted, google = "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}
    with metadata_server() as server, tiny_agents(tmp_path, SHARDS, slots=1) as agents:
        agents.start("a")
        agents.start("b", "--preemption", f"signal,gcp@{server.address}")
        agents.wait_until(lambda: workers(agents) == {*"ab"}, "both train")
        server.says[preempted] = Said(text="no answer at all", headers=google)
        agents.wait_until(lambda: "gives no answer" in log(agents, "b"), "it is said")
        rank = tmp_path / "tear-1"
        rank.touch()  # no step ends, so the stop is not reached
        server.says[preempted] = Said(text="TRUE", headers=google)
        agents.wait_until(lambda: "event=notice host=b" in agents.text(), "it is heard")
        server.says[preempted] = Said(text="FALSE", headers=google)
        agents.wait_until(lambda: "event=staying host=b" in agents.text(), "it is taken back")
        rank.unlink()
        agents.wait_for_step(agents.lines()[-1]["step"] + 20, world=2)
        assert agents.exit_codes() == {"a": None, "b": None}
        server.says[preempted] = Said(text="TRUE", headers=google)
        agents.wait_until(lambda: workers(agents) == {"a"}, "it has drained")
        assert agents.exit_code("b") == 0
        agents.check_each_once()


PLANNED = '4 = "tp2"\n2 = "tp1"\n"2->4" = "tp4"\n3 = "tp3"\n1 = "tp1"'


@pytest.mark.campaign
def test_the_job_follows_the_number_of_devices_that_work(tmp_path: Path) -> None:
    devices = tmp_path / "devices"
    devices.write_text("2")
    settings = {"probe": "interval_s = 0.2"}
    flags = ("--probe", f"file:{devices}")
    with tiny_agents(tmp_path, PLANNED, nodes="1", settings=settings, flags=flags) as agents:
        agents.start("a")
        agents.wait_for_all(2)
        for count in (1, 2, 1):
            devices.write_text(str(count))
            agents.wait_for_all(count)
        agents.check_each_once()
        assert [report.get("steps_lost", 0) for report in agents.resizes()] in ([0] * 3, [0] * 4)


def test_a_second_signal_stops_now_and_the_state_stays(tmp_path: Path) -> None:
    # A step is long enough for the second signal to come before the stop of the first.
    with one_worker(tmp_path, step_s=6.0) as agents:
        agents.start("a")
        agents.wait_until(lambda: "event=started" in agents.text(), "the first step")
        agents.drain("a")
        agents.wait_until(lambda: "event=leaving" in agents.text(), "the first signal is heard")
        agents.drain("a")
        assert agents.exit_code("a", deadline_s=15) == 128 + 15, agents.logs()
        agents.wait_until(lambda: not agents.family(), "nothing of the job is left")
        assert "generation-1" in agents.generations("a")
