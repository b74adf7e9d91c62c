"""``scalai background``: a command beside a real small job, and each end of the two."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from scalai.launch.commands.background import WorkerSteps
from scalai.runtime.control import ControlPage, control_path
from support.agents import DEADLINE_S, Agents, one_worker
from support.command import logged
from support.waiting import wait_until

BUSY = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()))\nwhile True: pass"
"""A command that never ends."""
BEGUN = list["subprocess.Popen[str]"]()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    with one_worker(tmp_path_factory.mktemp("job"), step_s=0.05) as agents:
        agents.start("h")
        agents.wait_for_step(2)
        yield agents
        for process in BEGUN:
            process.kill()
            process.wait(DEADLINE_S)


def begin(job: Agents, *command: str, budget: str = "0.5") -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "scalai", "background", "--job", job.job,
             "--store-dir", str(job.store), "--slowdown", budget, "--", *command]  # fmt: skip
    BEGUN.append(subprocess.Popen(words, stderr=subprocess.PIPE, text=True))
    return BEGUN[-1]


def begin_busy(job: Agents, folder: Path) -> "subprocess.Popen[str]":
    return begin(job, sys.executable, "-c", BUSY, str(folder / "pid"))


def under_way(folder: Path) -> psutil.Process:
    """The busy command, once it has run and is stopped."""
    path = folder / "pid"
    wait_until(lambda: path.exists() and path.read_text(), "it runs", DEADLINE_S)
    command = psutil.Process(int(path.read_text()))
    wait_until(lambda: command.status() == psutil.STATUS_STOPPED, "it is stopped", DEADLINE_S)
    return command


def has_ended(command: psutil.Process) -> bool:
    return not command.is_running() or command.status() == psutil.STATUS_ZOMBIE


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    _, said = process.communicate(timeout=DEADLINE_S)
    return process.returncode, said


def has_run(command: psutil.Process, more_s: float) -> None:
    """Wait until it has had so much time more."""
    used = sum(command.cpu_times()[:2])
    wait_until(lambda: sum(command.cpu_times()[:2]) > used + more_s, "it runs", DEADLINE_S)


def test_behind_a_measurement_a_command_runs_to_its_own_end(job: Agents, tmp_path: Path) -> None:
    """Also one that stops itself. The training goes on."""
    scripts = {"sleep 0.1; exit 7": 7, "sleep 0.1; kill -9 $$": 128 + 9, "kill -STOP $$; exit 5": 5}
    begun = {script: begin(job, "sh", "-c", script) for script in scripts}
    process = begin_busy(job, tmp_path)
    command = under_way(tmp_path)
    has_run(command, 0.2)
    assert os.getpriority(os.PRIO_PROCESS, command.pid) == 19
    job.wait_for_step(job.lines()[-1]["step"] + 5)
    process.terminate()
    assert "event=exit" in ended(process)[1]
    assert {script: ended(each)[0] for script, each in begun.items()} == scripts


@pytest.mark.fault
def test_no_command_is_left_stopped_behind_it(job: Agents, tmp_path: Path) -> None:
    begun = {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        (tmp_path / number.name).mkdir()
        begun[number] = begin_busy(job, tmp_path / number.name)
    commands = {number: under_way(tmp_path / number.name) for number in begun}
    for number, process in begun.items():
        process.send_signal(number)
    for number, process in begun.items():
        command = commands[number]
        code, _ = ended(process)
        assert code == (-number if number == signal.SIGKILL else 128 + number)
        wait_until(lambda of=command: has_ended(of), "the command has ended", DEADLINE_S)  # type: ignore[misc]


@pytest.mark.fault
@pytest.mark.campaign
def test_a_command_ends_also_where_it_ignores_signals(job: Agents) -> None:
    deaf = begin(job, "sh", "-c", "trap '' TERM; while :; do :; done")
    wait_until(lambda: psutil.Process(deaf.pid).children(), "it runs", DEADLINE_S)
    deaf.send_signal(signal.SIGTERM)
    assert ended(deaf)[0] == 128 + signal.SIGTERM


@pytest.mark.fault
@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["--job", "none", "--", "true"], 1, "no worker of job 'none' trains on this host"),
        (["--"], 2, "name the command"),
        (["--slowdown", "2", "--", "true"], 2, "is not a part of a step"),
    ],
)
def test_a_wrong_use_says_what_is_expected(
    words: list[str], code: int, why: str, job: Agents, capsys: pytest.CaptureFixture[str]
) -> None:
    found, said = logged(capsys, "background", "--store-dir", job.store, *words)
    assert found == code and why in said


def test_a_command_that_is_not_there_is_named(
    job: Agents, capsys: pytest.CaptureFixture[str]
) -> None:
    about = ("background", "--store-dir", job.store, "--job", job.job)
    found, said = logged(capsys, *about, "--", "no-such-command")
    assert found == 2 and "no-such-command cannot be started" in said


@pytest.mark.campaign
def test_behind_the_job_the_command_runs_to_its_end(tmp_path: Path) -> None:
    with one_worker(tmp_path, step_s=0.05, steps=100_000) as agents:
        agents.start("h")
        agents.wait_for_step(2)
        process = begin_busy(agents, tmp_path)
        command = under_way(tmp_path)
        agents.let_end()
        assert agents.exit_code("h") == 0
        has_run(command, 0.5)
        process.terminate()
        ended(process)


# ------------------------------------------------------------------ which workers are looked at


def page(folder: Path, number: int, *steps: int, at: float) -> ControlPage:
    """An agent makes a round's page; its workers have ended these steps."""
    path = control_path(folder, number)
    made = ControlPage(path, create=True)
    made.clear()
    for rank, step in enumerate(steps):
        made.report(rank, step)
    os.utime(path, (at, at))
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "host" / "agent"
    made.mkdir(parents=True, mode=0o700)
    return made


@pytest.mark.fault
def test_the_next_round_counts_from_its_first_step_on(folder: Path, tmp_path: Path) -> None:
    """Until then the present one trains beside it."""
    present, steps = page(folder, 1, 7, 8, at=10.0), WorkerSteps(tmp_path)
    assert steps.look(0.0) == (1, 7)
    following = page(folder, 2, at=20.0)
    present.report(0, 8)
    assert steps.look(1.0) == (1, 8)
    following.report(0, 9)
    assert steps.look(2.0) == (2, 9)


@pytest.mark.fault
def test_an_agent_that_begins_anew_is_followed(folder: Path, tmp_path: Path) -> None:
    """Its first round has the number, and the path, of the killed one's."""
    page(folder, 1, 7, at=10.0)
    steps = WorkerSteps(tmp_path)
    assert steps.look(0.0) == (1, 7)
    page(folder, 1, 5, at=20.0)
    assert steps.look(1.0) == (1, 5)


@pytest.mark.fault
def test_a_page_that_is_just_being_made_is_left_alone(folder: Path, tmp_path: Path) -> None:
    control_path(folder, 1).touch(mode=0o600)
    assert WorkerSteps(tmp_path).look(0.0) is None
