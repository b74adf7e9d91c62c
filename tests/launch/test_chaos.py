"""``scalai chaos`` where there is no job, or no fault can be injected; and what it does to
processes, files and logs, without a job."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from scalai.core.errors import UsageError
from scalai.launch.chaos import processes
from scalai.launch.chaos.fault_run import alone
from scalai.launch.chaos.injectors import TABLE
from scalai.launch.chaos.kinds import KINDS, TRIGGERS
from scalai.launch.chaos.scene import Log
from scalai.launch.chaos.verdicts import draw
from scalai.launch.commands.chaos import read_losses

DEADLINE_S = 30.0
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def chaos(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "scalai.launch.cli", "chaos", *arguments],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip


def test_every_kind_can_be_injected() -> None:
    assert TABLE.keys() == KINDS.keys()


def test_a_job_that_is_not_there_is_an_error_that_says_where_it_was_looked_for(
    tmp_path: Path,
) -> None:
    done = chaos("nowhere", "--store-dir", str(tmp_path))
    assert done.returncode == 2 and str(tmp_path / "nowhere") in done.stderr
    (tmp_path / "empty").mkdir()
    done = chaos("empty", "--store-dir", str(tmp_path))
    assert done.returncode == 2 and "no agent of job 'empty' runs on this machine" in done.stderr


def test_a_kind_that_there_is_not_is_refused_before_anything_is_looked_at(tmp_path: Path) -> None:
    done = chaos("nowhere", "--store-dir", str(tmp_path), "--faults", "kill-worker,eat-worker")
    assert done.returncode == 2 and "eat-worker" in done.stderr and "kill-agent" in done.stderr


def test_all_kinds_are_listed_without_a_job() -> None:
    done = chaos("--list")
    assert done.returncode == 0 and all(name in done.stdout for name in KINDS)


def test_two_commands_at_once_are_refused(tmp_path: Path) -> None:
    with alone(tmp_path):
        with pytest.raises(UsageError, match="another command"), alone(tmp_path):
            pass
    with alone(tmp_path):
        assert not list(tmp_path.iterdir()), "nothing is left in the job's folder"


def test_a_process_is_started_again_as_it_was(tmp_path: Path) -> None:
    told = tmp_path / "told"
    script = "import os, pathlib, time; pathlib.Path('told').write_text(os.environ['ITS'] + ' '"
    script += "+ os.getcwd()); print('begun', flush=True); time.sleep(600)"
    log = tmp_path / "log"
    with log.open("ab") as file:
        first = subprocess.Popen(
            [sys.executable, "-c", script], cwd=tmp_path, env={**os.environ, "ITS": "own"},
            stdout=file, stderr=file,
        )  # fmt: skip
    _until(lambda: told.exists() and told.read_text() != "")
    command = processes.Command.of(first.pid)
    processes.end([first.pid])
    first.wait(DEADLINE_S)
    told.unlink()
    second = command.start()
    try:
        _until(lambda: told.exists() and told.read_text() == f"own {tmp_path}")
        _until(lambda: log.read_text().count("begun") == 2)
        assert os.getsid(second.pid) != os.getsid(0), "it outlives the command"
    finally:
        second.kill()
        second.wait(DEADLINE_S)


def test_a_stopped_process_is_seen_and_one_that_is_gone_is_no_error() -> None:
    process = subprocess.Popen(SLEEP)
    try:
        processes.send(process.pid, signal.SIGSTOP)
        _until(lambda: processes.state(process.pid) == "T")
    finally:
        process.kill()
        process.wait(DEADLINE_S)
    processes.send(process.pid, signal.SIGCONT)
    assert processes.state(process.pid) == "X" and not processes.environment(process.pid)


def test_a_flag_is_read_as_it_may_be_written() -> None:
    process = subprocess.Popen([*SLEEP, "--durable_dir=/d", "--nnodes", "1:3"])
    try:
        _until(lambda: processes.flag(process.pid, "--nnodes") == "1:3")
        assert processes.flag(process.pid, "--durable-dir") == "/d"
        assert processes.flag(process.pid, "--replicas") is None
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def test_half_a_line_of_a_log_is_left_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    log = Log([path])
    with path.open("a") as file:
        print("event=lost ho", end="", file=file, flush=True)
        log.look()
        assert log.text == ""
        print("st=a", file=file, flush=True)
        log.look()
    assert log.text == "event=lost host=a\n"


def test_a_torn_line_of_losses_is_passed_over_and_a_wrong_key_is_not(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    assert read_losses(path, "loss") == [(1, 2.5)]
    with pytest.raises(UsageError, match="line 1: no 'step' and 'sum'"):
        read_losses(path, "sum")
    with pytest.raises(UsageError, match="JSON lines"):
        read_losses(tmp_path / "nothing", "loss")


def test_a_verdict_is_drawn(tmp_path: Path) -> None:
    outcome = {
        "kind": "kill-worker", "hosts": ["a"], "skipped": "", "detect_s": 0.2, "back_s": 4.0,
        "steps_lost": 3, "limit": 14, "problems": [], "rounds": [{"seconds": {"relaunch": 2.0}}],
    }  # fmt: skip
    verdict = {"outcomes": [outcome], "holds": True, "passed": 1, "faults": 1}
    path = draw(verdict, tmp_path / "verdict.png")
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")


PROGRAM = """
import os, sys
from scalai.runtime.failpoints import here, reached
here({"0": os.getpid(), "h": 1})
try:
    reached(sys.argv[1])
except MemoryError as error:
    print("raised", error)
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("armed", "code", "is_reached"),
    [
        ("step:0:exit 7", 7, True),
        ("step:0:raise MemoryError", 3, True),
        ("step:0:SIGKILL", -signal.SIGKILL, True),
        ("update:0:exit 7", 0, False),
        ("step:h:exit 7", 0, False),
        ("step:1:exit 7", 0, False),
    ],
)
def test_a_process_is_struck_where_it_was_said(
    tmp_path: Path, armed: str, code: int, is_reached: bool
) -> None:
    """Nobody else than the process that was named exits or raises."""
    (tmp_path / "point").write_text(armed)
    assert _ends([sys.executable, "-c", PROGRAM, "step"], tmp_path / "point") == code
    assert (tmp_path / "point.reached").exists() == is_reached
    assert _ends([sys.executable, "-c", PROGRAM, "step"], tmp_path / "point") == 0, "once"


def test_every_station_is_a_place_that_the_code_reaches() -> None:
    root = Path(__file__).parents[2]
    files = [path for top in ("plugin", "launch") for path in (root / top).rglob("*.py")]
    lines = [line for path in files for line in path.read_text().splitlines() if "reached(" in line]
    missing = [each for each in TRIGGERS if not any(f'"{each}"' in line for line in lines)]
    assert len(lines) > 15 and not missing


def _ends(command: Sequence[str], point: Path) -> int:
    variables = {**os.environ, "SCALAI_FAILPOINT": str(point)}
    return subprocess.run(command, env=variables, timeout=DEADLINE_S, check=False).returncode


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)
