"""Workers, scripts, hosts and coordinators fail, hang or stand still: no phase of a job lasts for
ever, and no step is lost where somebody holds the state."""

import contextlib
import fcntl
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from scalai.core.errors import PeerError
from support.agents import Agents, one_worker, tiny_agents
from support.tiny_job import check_steps

pytestmark = pytest.mark.fault

REPLICAS = '4 = "tp1"\n2 = "tp1"\n1 = "tp1"'
SHARDS, TO_ONE = '2 = "tp2"', '2 = "tp2"\n1 = "tp1"'
FLAGS = ("--max-restarts", "100")


@pytest.mark.campaign
def test_a_job_without_restarts_ends_and_the_same_command_goes_on(tmp_path: Path) -> None:
    with tiny_agents(tmp_path, REPLICAS, nodes="1") as agents:
        agents.start("a")
        agents.wait_for_all(2)
        agents.wait_for_step(agents.lines()[-1]["step"] + 5)
        agents.kill_worker(1)
        assert agents.exit_code("a") == 1, agents.logs()
        made = agents.lines()[-1]["step"]
        agents.start("a")
        agents.wait_for_step(made + 3)
        agents.check_each_once()


@pytest.mark.campaign
def test_an_agent_that_comes_back_brings_what_it_had_sealed(tmp_path: Path) -> None:
    """Its worker's pieces are nowhere else: the job waits for them, and loses no step."""
    with tiny_agents(tmp_path, '4 = "tp4"\n3 = "tp3"', nodes="2", flags=FLAGS) as agents:
        agents.start("a")
        agents.start("b")
        world = 4
        for place in ("commit", "sealed", "committed"):
            agents.wait_for_all(world)
            agents.arm(place, "b")
            changes = len(agents.resizes())
            world = 7 - world
            agents.scale(nproc=world)
            agents.wait_for_death()
            agents.exit_code("b")
            agents.start("b")
            agents.wait_for_world(world)
            agents.wait_until(lambda: len(agents.resizes()) > changes, "the report")  # noqa: B023
            assert not any(report.get("steps_lost") for report in agents.resizes()), (
                f"{place}: {agents.logs()}"
            )
        steps = check_steps(agents.lines())
        assert steps == sorted(set(steps)), "no step was made twice"


@pytest.mark.campaign
@pytest.mark.parametrize("standby", ["auto", "brink"])
def test_workers_that_hang_while_they_build_are_given_up(tmp_path: Path, standby: str) -> None:
    given, settings = {"resize.build_timeout_s": 10.0}, {"resize": f"standby = '{standby}'"}
    with tiny_agents(tmp_path, TO_ONE, nodes="1", constants=given, settings=settings) as agents:
        agents.start("a")
        agents.wait_until(lambda: "event=warm" in agents.text(), "workers can be forked")
        agents.arm("build", "0", "SIGSTOP")
        agents.scale(nproc=1)
        agents.wait_for_death()
        agents.wait_for_world(1)
        agents.check_each_once()
        assert "not built within 10 s" in agents.text()
        agents.wait_until(lambda: len(agents.workers()) == 1, "nothing else is left")


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_worker_of_a_change_by_the_brink_may_die_at_any_place(tmp_path: Path) -> None:
    """No step is lost or made twice: the old state is whole until the new one is proven."""
    settings = {"resize": "standby = 'brink'"}
    again = {"resize.quarantine_s": 0.0}
    with tiny_agents(
        tmp_path, '2 = "tp2"', nodes="1", settings=settings, flags=FLAGS, constants=again
    ) as agents:
        agents.start("a")
        agents.wait_for_all(2)
        agents.wait_until(lambda: "event=warm" in agents.text(), "workers can be forked")
        for number, place in enumerate(("build", "write", "relaunch", "restore", "proof")):
            agents.arm(place, str(number % 2))
            changes, tp = len(agents.resizes()), 1 + number % 2
            levels = agents.text().count("level=brink")
            agents.scale(degrees=f"tp{tp}")
            agents.wait_for_death()
            agents.wait_until(
                lambda: agents.lines()[-1]["tp"] == tp,  # noqa: B023
                f"TP {tp} after {place}",
            )
            agents.wait_until(lambda: len(agents.resizes()) > changes, "the report")  # noqa: B023
            assert agents.text().count("level=brink") > levels, place
        agents.check_each_once()


FAULTY_JOB = Path(__file__).parents[1] / "support" / "faulty_job.py"


@contextlib.contextmanager
def faulty(folder: Path, degrees: str, *options: str, **settings: Any) -> Iterator[Agents]:
    script = [str(FAULTY_JOB), "--metrics", str(folder / "metrics.jsonl"), *options]
    with Agents(folder, degrees, script, **settings) as agents:
        yield agents


@pytest.mark.turns
@pytest.mark.parametrize("standby", ["auto", pytest.param("never", marks=pytest.mark.campaign)])
def test_degrees_that_a_script_cannot_run_are_given_up_for_those_that_ran(
    tmp_path: Path, standby: str
) -> None:
    settings = {"resize": f"standby = '{standby}'"}
    with faulty(tmp_path, TO_ONE, "--raise-at-world", "1", nodes="1", settings=settings) as agents:
        agents.start("a")
        agents.wait_for_all(2)
        agents.scale(nproc=1)
        agents.wait_until(lambda: "is not tried again" in agents.text(), "the change has failed")
        made = agents.lines()[-1]["step"]
        agents.wait_for_step(made + 5, world=2)
        with pytest.raises(PeerError, match="failed on these hosts before"):
            agents.scale(nproc=1)
        agents.check_each_once()


@pytest.mark.turns
@pytest.mark.parametrize(
    ("how", "is_forked"),
    [
        ((), True),
        (("--exit",), False),
        pytest.param(("--exit",), True, marks=pytest.mark.campaign),
    ],
)
def test_a_script_that_ends_while_a_stop_waits_for_it_has_ended(
    tmp_path: Path, how: tuple[str, ...], is_forked: bool
) -> None:
    """It is behind its loop, in an evaluation or its last save, and will not come to the stop."""
    with faulty(
        tmp_path, TO_ONE, "--enough", str(tmp_path / "enough"), "--after-s", "12",
        *how, nodes="1", settings={"resize": "standby = 'never'"},
    ) as agents:  # fmt: skip
        agents.start("a")
        if is_forked:
            agents.wait_until(lambda: "event=warm" in agents.text(), "workers can be forked")
            agents.scale(nproc=1)
        agents.wait_for_all(1 if is_forked else 2)
        agents.let_end()
        agents.wait_until((tmp_path / "behind-the-loop").exists, "the loop has ended")
        agents.scale(nproc=2 if is_forked else 1)
        assert agents.exit_code("a") == 0, agents.logs()
        agents.check_each_once()


NEVER_STANDBY = "standby = 'never'\n"


@contextlib.contextmanager
def two_hosts(folder: Path, degrees: str = SHARDS, **settings: Any) -> Iterator[Agents]:
    """Give two hosts, a and b, with a worker each, that train."""
    with tiny_agents(folder, degrees, slots=1, **settings) as agents:
        agents.start("a")
        agents.start("b")
        agents.wait_for_all(2)
        yield agents


def worker(agents: Agents, rank: int) -> psutil.Process:
    """Return the process of a cold worker."""
    (found,) = [p for p in agents.family() if p.environ().get("RANK") == str(rank)]
    return found


def stalled(agents: Agents) -> list[int]:
    """Return the ranks that make no steps, as the job's status has them."""
    shown = json.loads(agents.command("status", "--json").stdout)["no_progress"]
    return [rank for host in shown.values() for rank in host["ranks"]]


@pytest.mark.campaign
def test_a_worker_that_stands_still_in_training_is_reported_with_its_state(tmp_path: Path) -> None:
    """And a stop that it does not come to is taken back: the training goes on as soon as it can."""
    settings = {"resize": f"{NEVER_STANDBY}drain_timeout_s = 2"}
    constants = {"resize.stall_s": 2.0}
    with two_hosts(tmp_path, settings=settings, constants=constants, flags=FLAGS) as agents:
        agents.wait_for_step(10, world=2)
        stopped = worker(agents, 1)
        stopped.suspend()
        agents.wait_until(lambda: "event=no_progress" in agents.text(), "the stall is reported")
        agents.wait_until(lambda: "state='T (stopped)'" in agents.text(), "the stopped one")
        agents.wait_until(lambda: "in all_reduce" in agents.text(), "the stack of one that waits")
        made = agents.lines()[-1]["step"]
        agents.wait_until(lambda: 1 in stalled(agents), "the status shows it")
        agents.scale(degrees="tp1")
        agents.wait_until(lambda: "event=withdrawn" in agents.text(), "the stop is taken back")
        os.kill(stopped.pid, signal.SIGCONT)
        agents.wait_for_step(made + 5)
        agents.wait_until(lambda: agents.lines()[-1]["tp"] == 1, "the change is tried again")
        agents.wait_until(lambda: not stalled(agents), "the status is clear again")
        agents.check_each_once()


@pytest.mark.turns
def test_a_start_that_hangs_goes_back_to_the_degrees_that_ran(tmp_path: Path) -> None:
    settings = {"resize": f"{NEVER_STANDBY}start_timeout_s = 15"}
    with two_hosts(tmp_path, settings=settings) as agents:
        agents.arm("relaunch", "1", "SIGSTOP")
        agents.scale(degrees="tp1")
        agents.wait_for_death()
        made = agents.lines()[-1]["step"]
        agents.wait_until(lambda: "no progress of the start" in agents.text(), "it is overdue")
        agents.wait_for_step(made + 5)
        assert agents.lines()[-1]["tp"] == 2
        agents.check_each_once()


@pytest.mark.campaign
def test_a_host_whose_check_fails_behind_a_failure_stays_idle_until_it_passes(
    tmp_path: Path,
) -> None:
    good = tmp_path / "good"
    good.touch()
    with tiny_agents(tmp_path, REPLICAS) as agents:
        agents.start("a")
        agents.wait_for_step(2)
        agents.start("b", "--health-check", f"test -e {good}")
        agents.wait_until(lambda: agents.lines()[-1]["world"] == 4, "both hosts run workers")
        good.unlink()
        agents.kill_worker(3)
        agents.wait_until(lambda: "b fails its health check" in agents.text(), "it is said")
        agents.wait_until(lambda: agents.lines()[-1]["world"] == 2, "the others train on")
        good.touch()
        agents.wait_until(lambda: agents.lines()[-1]["world"] == 4, "it is asked again")
        agents.wait_until(lambda: sum(agents.resizes()[-1]["workers"].values()) == 4, "the report")
        last = agents.resizes()[-1]
        assert "failure" not in last and "steps_lost" not in last, "that was the change before"
        assert "may run workers" in last["reason"], last
        check_steps(agents.lines())


@pytest.mark.campaign
def test_a_silent_coordinator_holds_nobody_up(tmp_path: Path) -> None:
    """Workers train on, commands end with an error, and two signals end the agent; its state
    stays."""
    with one_worker(tmp_path) as agents:
        agents.start("a")
        agents.wait_for_step(5)
        agents.signal_coordinator(signal.SIGSTOP)
        agents.wait_until(lambda: "event=coordinator_silent" in agents.text(), "it is told of")
        step = int(agents.lines()[-1]["step"])
        agents.wait_for_step(step + 20)
        assert "does not answer" in agents.command("status", code=1).stderr
        agents.drain("a")
        agents.wait_until(lambda: "so nobody can stop the job" in agents.text(), "it says so")
        agents.drain("a")
        assert agents.exit_code("a") == 128 + signal.SIGTERM
        agents.wait_until(lambda: not agents.workers(), "the workers are gone")
        assert agents.generations("a")


@pytest.mark.campaign
def test_a_drain_that_a_silent_coordinator_cannot_serve_ends_by_its_timeout(tmp_path: Path) -> None:
    with one_worker(tmp_path, settings={"resize": "drain_timeout_s = 3"}) as agents:
        agents.start("a")
        agents.wait_for_step(5)
        agents.signal_coordinator(signal.SIGSTOP)
        agents.drain("a")
        assert agents.exit_code("a") == 1
        agents.wait_until(lambda: not agents.workers(), "the workers are gone")
        assert agents.generations("a")
        assert "event=drain_timeout" in agents.text()


@pytest.mark.campaign
@pytest.mark.turns
def test_a_host_is_lost_after_as_much_silence_as_the_command_line_says(tmp_path: Path) -> None:
    """Also where an agent has started the coordinator."""
    flags = ("--max-restarts", "5", "--silent-s", "3")
    with two_hosts(tmp_path, REPLICAS, flags=flags) as agents:
        psutil.Process(agents.agent_pid("b")).suspend()
        agents.wait_until(lambda: "event=lost host=b" in agents.text(), "it is lost")
        (silent_s,) = re.findall(r"event=lost host=b: silent for (\d+) s", agents.text())
        assert int(silent_s) < 10, "by default it is 14"


@pytest.mark.campaign
@pytest.mark.turns
def test_workers_do_not_inherit_the_token_and_meet_on_one_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "0123456789abcdef-a-secret"
    monkeypatch.setenv("SCALAI_JOB_TOKEN", token)
    with tiny_agents(tmp_path, SHARDS, nodes="1") as agents:
        agents.start("a")
        agents.wait_for_step(3)
        for process in agents.family():
            assert token not in " ".join(process.cmdline())
            if process.pid != agents.agent_pid("a"):
                assert token not in str(process.environ()), process.cmdline()
            listening = [c for c in process.net_connections("tcp") if c.status == "LISTEN"]
            assert {c.laddr.ip for c in listening} <= {"127.0.0.1"}, process.cmdline()
        assert token not in agents.text()


@pytest.mark.turns
def test_a_terminal_that_is_halted_holds_up_no_job(tmp_path: Path) -> None:
    """Nobody takes what the agent and the coordinator say; workers write to files."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    logs = ["--redirects", "3", "--log-dir", str(tmp_path / "logs")]
    with tiny_agents(tmp_path, TO_ONE, slots=2, flags=logs) as agents:
        agents.start("a", output=writing)
        os.close(writing)
        agents.wait_for_step(5, world=2)
        agents.scale(nproc=1)
        agents.wait_for_step(agents.wait_for_world(1) + 3)
        agents.let_end()
        assert agents.exit_code("a") == 0
        said = os.read(reading, 1 << 20)
    os.close(reading)
    assert 0 < len(said) <= 4096 and b"event=exit" not in said, "it was halted all the time"
