"""What the launcher does beside its agent."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalai.launch import run
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.host_signals import HeardSignals
from support.driver_script import install_into

pytestmark = pytest.mark.fault


def test_a_loop_that_stands_still_does_not_outlive_a_second_signal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "STOP_S", 0.1)
    reported: list[object] = []
    agent: Any = SimpleNamespace(leave=lambda: reported.append("leave"), stop_now=reported.append)
    forever = threading.Event()
    loop = threading.Thread(target=forever.wait, daemon=True)
    loop.start()
    heard = HeardSignals()
    for _ in range(2):
        heard._hear(15, None)
    run._wait(loop, agent, heard)
    assert loop.is_alive() and "event=stuck" in caplog.text
    assert reported == ["leave", 128 + 15]
    forever.set()
    run._wait(loop, agent, heard)
    assert not loop.is_alive()


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
    assert run._with_device(elastic_job(tmp_path)).config.planner.gpu == gpu
    assert line in caplog.text


def test_snapshots_that_are_off_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run._say_configuration(elastic_job(tmp_path))
    assert "event=no_snapshots" not in caplog.text
    run._say_configuration(elastic_job(tmp_path, "--snapshot-every", "0"))
    assert [r.levelname for r in caplog.records if "no_snapshots" in r.message] == ["WARNING"]


def test_the_driver_is_not_asked_where_a_person_has_said_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "scalai")
    install_into(tmp_path, monkeypatch)("echo 0, NVIDIA H200")
    kept = elastic_job(tmp_path, "--planner", "keep")
    assert run._with_device(kept) is kept
    assert caplog.text == ""


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
run._wait(loop, agent, heard)
sys.exit(agent.code)
"""


def test_a_second_signal_in_the_middle_of_the_first_is_heard() -> None:
    """A handler that took a lock of the agent would wait for the thread that it interrupts."""
    done = subprocess.run([sys.executable, "-c", SECOND_SIGNAL_AT_THE_FIRST], timeout=120)
    assert done.returncode == 128 + 15


def test_a_terminal_that_closes_drains_and_never_stops(caplog: pytest.LogCaptureFixture) -> None:
    """A shell that is hung up on sends SIGHUP to its jobs again, and systemd SIGTERM with it."""
    caplog.set_level("INFO", "scalai")
    reported: list[object] = []
    agent: Any = SimpleNamespace(leave=lambda: reported.append("leave"), stop_now=reported.append)
    over = threading.Event()
    loop = threading.Thread(target=over.wait, daemon=True)
    loop.start()
    heard = HeardSignals()
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
        heard._hear(number, None)
    waiting = threading.Thread(target=run._wait, args=(loop, agent, heard))
    waiting.start()
    while caplog.text.count("event=signal") < 3:
        time.sleep(0.01)
    over.set()
    waiting.join(120)
    assert reported == ["leave"] * 3 and heard.count == 1


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
    subprocess.run([sys.executable, "-c", IGNORED], timeout=120, check=True)
