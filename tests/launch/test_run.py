"""The launcher beside its agent: signals, the device, the log, and errors that a person repairs."""

import fcntl
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalai.core.exit_codes import RESUMABLE
from scalai.launch import host_signals, logs, run
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.host_signals import HeardSignals
from scalai.launch.logs import PatientHandler, PresentStderr, say
from scalai.launch.program import exit_code_of
from scalai.launch.slow_files import PatientWriter, said
from support.agents import SCALAI_RUN
from support.driver_script import install_into
from support.waiting import wait_until

pytestmark = pytest.mark.fault

DEADLINE_S = 120.0


def python(script: str, **how: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", script], timeout=DEADLINE_S, check=False, text=True, **how
    )


# ------------------------------------------------------------------ signals


def test_a_signal_during_the_imports_ends_a_job_that_never_began(tmp_path: Path) -> None:
    """Process 1 of a container has no other end than its handlers."""
    (tmp_path / "torch.py").write_text(
        "import pathlib, support.waiting\n"
        f"pathlib.Path({str(tmp_path / 'imports')!r}).touch()\n"
        "support.waiting.stay()\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    with subprocess.Popen([SCALAI_RUN, "x.py"], env={**os.environ, "PYTHONPATH": path}) as process:
        wait_until((tmp_path / "imports").exists, "it imports torch")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == RESUMABLE


@contextmanager
def attended(*numbers: int) -> Iterator[tuple[list[object], HeardSignals, threading.Event]]:
    """Give an agent whose loop runs and has heard signals: its orders, the signals heard, and the
    return of the launcher, which comes at the loop's end at the latest."""
    orders, heard = list[object](), HeardSignals()
    over, returned = threading.Event(), threading.Event()
    agent: Any = SimpleNamespace(
        leave=lambda: orders.append("leave"), stop_now=orders.append,
        show_stacks=lambda: orders.append("stacks"),
    )  # fmt: skip
    loop = threading.Thread(target=over.wait, daemon=True)
    loop.start()
    for number in numbers:
        heard.hear(number)

    def wait() -> None:
        run.attend(loop, agent, heard)
        returned.set()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    try:
        yield orders, heard, returned
    finally:
        over.set()
        waiting.join(DEADLINE_S)
        loop.join(DEADLINE_S)
    assert returned.is_set()


def test_a_loop_that_stands_still_does_not_outlive_a_second_signal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "STOP_S", 0.1)
    with attended(signal.SIGTERM, signal.SIGTERM) as (orders, _, returned):
        assert returned.wait(DEADLINE_S) and "event=stuck" in caplog.text
        assert orders == ["leave", 128 + 15]


def test_a_terminal_that_closes_drains_and_never_stops(caplog: pytest.LogCaptureFixture) -> None:
    """A shell that is hung up on sends SIGHUP to its jobs again, and systemd SIGTERM with it."""
    caplog.set_level("INFO", "scalai")
    with attended(signal.SIGHUP, signal.SIGTERM, signal.SIGHUP) as (orders, heard, returned):
        wait_until(lambda: caplog.text.count("event=signal") == 3, "all three are heeded")
        assert not returned.is_set()
    assert orders == ["leave"] * 3 and heard.count == 1


def test_sigquit_shows_where_all_stand_and_stops(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown = threading.Event()
    monkeypatch.setattr(host_signals, "SHOWN_S", 0.1)
    monkeypatch.setattr(host_signals, "show_own_stacks", shown.set)
    with attended(signal.SIGQUIT, signal.SIGQUIT) as (orders, _, _):
        wait_until(lambda: len(orders) == 2, "it has stopped")
        assert orders == ["stacks", 128 + 3] and shown.is_set()


SECOND_SIGNAL_AT_THE_FIRST = """
import os, signal, sys, threading
from scalai.launch import host_signals, run

class Agent:
    lock, ended = threading.Lock(), threading.Event()

    def leave(self):
        with self.lock:  # as the queue of the agent's loop has one
            os.kill(os.getpid(), signal.SIGTERM)

    def stop_now(self, code):
        with self.lock:
            self.code = code
        self.ended.set()

agent, heard = Agent(), host_signals.HeardSignals()
heard.listen()
loop = threading.Thread(target=agent.ended.wait, daemon=True)
loop.start()
os.kill(os.getpid(), signal.SIGTERM)
run.attend(loop, agent, heard)
sys.exit(agent.code)
"""


def test_a_second_signal_in_the_middle_of_the_first_is_heard() -> None:
    """A handler that took a lock of the agent would wait for the thread that it interrupts."""
    assert python(SECOND_SIGNAL_AT_THE_FIRST).returncode == 128 + 15


IGNORED = """
import os, signal
from scalai.launch import host_signals
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell ignores it for what it starts with &
heard = host_signals.HeardSignals()
heard.listen()
os.kill(os.getpid(), signal.SIGHUP)
assert heard.next(0.1) is None
os.kill(os.getpid(), signal.SIGQUIT)
assert heard.next(10) == signal.SIGQUIT
"""


def test_what_nohup_ignores_stays_ignored() -> None:
    assert python(IGNORED).returncode == 0


# ------------------------------------------------------------------ the job at its start


def elastic_job(tmp_path: Path, *flags: str) -> JobSpec:
    config = tmp_path / "elastic.toml"
    config.write_text("[model]\nnum_attention_heads = 8\n")
    return JobSpec.read(parse_options(["--elastic", str(config), *flags, "script.py"]))


@pytest.mark.parametrize(
    ("script", "gpu", "line"),
    [
        ("echo 0, NVIDIA H200", "NVIDIA H200", "event=device name='NVIDIA H200'"),
        ("echo 0, NVIDIA K80", "NVIDIA K80", "'NVIDIA K80' is not in the table of devices"),
        ("echo No devices were found; exit 6", None, "no answer: nvidia-smi names no device"),
    ],
)
def test_the_log_has_what_the_driver_says_of_its_device(
    script: str, gpu: str | None, line: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level("INFO", "scalai")
    install_into(tmp_path, monkeypatch)(script)
    assert run.with_device(elastic_job(tmp_path)).config.planner.gpu == gpu
    assert line in caplog.text


def test_the_driver_is_not_asked_where_a_person_has_said_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "scalai")
    install_into(tmp_path, monkeypatch)("echo 0, NVIDIA H200")
    kept = elastic_job(tmp_path, "--planner", "keep")
    assert run.with_device(kept) is kept and caplog.text == ""


def test_snapshots_that_are_off_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run.say_configuration(elastic_job(tmp_path))
    assert "event=no_snapshots" not in caplog.text
    run.say_configuration(elastic_job(tmp_path, "--snapshot-every", "0"))
    assert [r.levelname for r in caplog.records if "no_snapshots" in r.message] == ["WARNING"]


# ------------------------------------------------------------------ errors and exit codes


WITHOUT_TORCH = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
sys.argv = ["scalai", *sys.argv[1:]]
from scalai.launch.cli import main, scalai_run
(main if sys.argv[1] == "doctor" else scalai_run)()
"""


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (["-c", WITHOUT_TORCH, "doctor"], 3, "torch is not installed for"),
        (["-c", WITHOUT_TORCH, "x.py"], 3, "torch is not installed for"),
        (["-m", "scalai", "--version"], 0, "scalai 0."),
        (["-m", "scalai.launch.cli", "--version"], 0, "scalai 0."),
    ],
    ids=["scalai doctor", "scalai-run", "the package", "the command"],
)
def test_what_a_person_can_repair_is_one_line_with_its_exit_code(
    command: list[str], code: int, says: str
) -> None:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == code and says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupt_is_no_fault_and_a_fault_of_ours_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ends(error: BaseException) -> Callable[[], int]:
        def run() -> int:
            raise error

        return run

    assert exit_code_of("scalai verify", ends(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "scalai verify: interrupted\n"
    with pytest.raises(KeyError):
        exit_code_of("scalai verify", ends(KeyError("x")))


ENOUGH = """
import sys
from scalai.launch.program import exit_code_of
def run():
    print("ready", flush=True)
    sys.stdin.read()
    for line in range(100_000):
        print(line)
    return 0
sys.exit(exit_code_of("scalai inspect", run))
"""


def test_who_reads_no_further_gets_no_traceback() -> None:
    """As ``scalai inspect ... | head``."""
    with subprocess.Popen(
        [sys.executable, "-c", ENOUGH], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as command:  # fmt: skip
        assert command.stdout is not None and command.stdout.readline() == "ready\n"
        command.stdout.close()
        assert command.stdin is not None
        command.stdin.close()
        assert command.stderr is not None and command.stderr.read() == ""
        assert command.wait(DEADLINE_S) == 141


# ------------------------------------------------------------------ what may answer nobody


def test_a_late_write_is_waited_for_once_until_all_is_written() -> None:
    written, goes_on = list[str](), threading.Event()
    late, back = list[bool](), list[int]()
    writer = PatientWriter("test", DEADLINE_S, lambda: late.append(True), back.append, most=2)

    def write(name: str) -> str:
        writer.do(lambda: written.append(name))
        return written[-1] if written else ""

    assert write("first") == "first" and not late, "it is done on return"
    writer.answer_s = 0.1
    writer.do(lambda: goes_on.wait(DEADLINE_S))
    assert late == [True]
    writer.answer_s = DEADLINE_S
    assert not writer.drain(0.0)
    began = time.monotonic()
    assert {write(name) for name in ("a", "b", "left out", "left out")} == {"first"}
    assert time.monotonic() - began < DEADLINE_S / 2
    goes_on.set()
    wait_until(lambda: bool(back), "all is written")
    assert (written, back, late) == (["first", "a", "b"], [2], [True])
    assert writer.drain(0.0) and write("c") == "c", "it is waited for again"


def test_a_write_that_raises_is_said_and_others_are_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer, written = PatientWriter("test", DEADLINE_S, lambda: None, lambda _: None), list[int]()

    def fail() -> None:
        raise KeyError("a slip")

    writer.do(fail)
    writer.do(lambda: written.append(1))
    assert written == [1] and "event=not_written" in caplog.text and "a slip" in caplog.text


LINES = """
import logging
from scalai.launch.logs import configure
from scalai.launch.slow_files import drain
configure("test")
for number in range(2000):
    logging.getLogger("scalai").info("line %d", number)
drain(60.0)
"""


def test_a_process_that_ends_leaves_its_last_lines_to_a_slow_reader() -> None:
    with subprocess.Popen([sys.executable, "-c", LINES], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        time.sleep(3.0)  # 2,000 lines are more than a pipe takes
        text = process.stderr.read().decode()
        assert process.wait(DEADLINE_S) == 0
    assert text.count("line ") == 2000 and "left out" not in text


def test_a_line_goes_to_the_standard_error_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one at the start may lie in memory, and be closed by now."""
    handler, before, now = PresentStderr(), io.StringIO(), io.StringIO()
    for stream in (before, now):
        monkeypatch.setattr(sys, "stderr", stream)
        handler.handle(logging.LogRecord("scalai", logging.INFO, __file__, 0, "a line", (), None))
        before.close()
    assert now.getvalue() == "a line\n"
    now.close()
    handler.handle(logging.LogRecord("scalai", logging.INFO, __file__, 0, "late", (), None))


def test_a_process_whose_standard_error_is_closed_logs_nowhere() -> None:
    command = f"exec {sys.executable} -c '{LINES}' 2>&-"
    assert subprocess.run(["sh", "-c", command], timeout=DEADLINE_S, check=False).returncode == 0


@pytest.fixture
def halted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """A pipe that takes no byte more: whoever is to read it has stopped."""
    monkeypatch.setattr(logs, "READ_S", 0.1)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writing, b" " * 4096)
    yield reading, writing
    os.set_blocking(reading, False)
    for end in (reading, writing):
        os.close(end)


def fifty_lines(handler: logging.Handler) -> None:
    logger = logging.Logger("test")
    logger.addHandler(handler)
    for number in range(50):
        logger.info("line %d", number)


def read_until(reading: int, last: str) -> str:
    text = ""
    while last not in text:
        text += os.read(reading, 1 << 20).decode()
    return text


@pytest.mark.parametrize("may_wait", [True, False])
def test_a_log_that_nobody_reads_holds_nobody_up(halted: tuple[int, int], may_wait: bool) -> None:
    reading, writing = halted
    os.set_blocking(writing, may_wait)
    assert fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ) <= 1 << 20
    fifty_lines(PatientHandler(writing))
    text = read_until(reading, "line 49\n")
    assert text.strip().splitlines() == [f"line {number}" for number in range(50)]


def test_how_many_lines_were_left_out_is_said(halted: tuple[int, int]) -> None:
    reading, writing = halted
    os.set_blocking(writing, True)
    fifty_lines(PatientHandler(writing, most=10))
    text = read_until(reading, "event=log_back")
    left_out = 50 - text.count("line ")
    assert left_out >= 39 and f"event=log_back {left_out} lines are left out" in text


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("generation=3 round=2 event=went_back steps_lost=94", "WARNING"),
        ("event=lost host=b: its connections have ended", "WARNING"),
        ("event=restart host b is lost; 3 restarts left", "WARNING"),
        ("event=exit code=1 reason='no agent'", "ERROR"),
        ("event=exit code=75 reason='saved'", "INFO"),
        ("event=resized host b joined: paused 2.10 s; no step lost", "INFO"),
        ("event=commit took_s=0.002 generation=8", "DEBUG"),
    ],
)
def test_what_a_job_loses_is_no_information_only(
    line: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "scalai")
    say(line)
    assert [record.levelname for record in caplog.records] == [level]


def test_what_takes_long_is_said_and_said_again_and_else_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "scalai")
    with pytest.raises(OSError, match="full"), said("the disk"):
        raise OSError("full")
    assert not caplog.messages

    def count() -> int:
        return caplog.text.count("event=waiting for the disk")

    with said("the disk", 0.05):
        wait_until(lambda: count() >= 2, "it is said twice")
    found = count()
    for thread in threading.enumerate():
        if thread.name == "long-wait":
            thread.join(DEADLINE_S)
    assert count() == found, "and never when it is over"


# ------------------------------------------------------------------ a batch script


STUBS = {
    "scontrol": 'echo "$@" >> calls',
    "scalai": "exit 0",
    "scancel": 'echo "$@" >> calls; kill -USR1 $(<agents)',
    "srun": "case \"$*\" in *'scalai coordinator'*) exec sleep 600;; esac; "
    "trap 'sleep 1; exit 75' USR1; echo $$ > agents; while :; do sleep 0.1; done",
}


def test_the_batch_script_hands_its_own_signal_on_and_requeues_what_was_saved(
    tmp_path: Path,
) -> None:
    """As of ``--signal=B:USR1@300``, which reaches the batch shell alone."""
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    (tmp_path / "token").write_text("a secret of this job")
    given = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "TOKEN": str(tmp_path / "token"),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "j", "SLURM_CPUS_ON_NODE": "1",
        "SLURMD_NODENAME": "n1", "SLURM_JOB_NODELIST": "n1",
    }  # fmt: skip
    script = Path(__file__).parents[2] / "examples" / "slurm" / "allocation.sh"
    batch = subprocess.Popen(["bash", script], cwd=tmp_path, start_new_session=True, env=given)
    try:
        wait_until((tmp_path / "agents").exists, "the agents run")
        batch.send_signal(signal.SIGUSR1)
        assert batch.wait(DEADLINE_S) == 0
    finally:
        os.killpg(batch.pid, signal.SIGKILL)
        batch.wait(DEADLINE_S)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["--signal=USR1 7", "requeue 7"]
