"""Commands that ask for devices: one that hangs, or cannot be killed, holds nobody up."""

import os
import signal
import time
from pathlib import Path

import pytest

from scalai.launch.config.driver import Commands, NoAnswerError, driver_device
from support.driver_script import Install, install_into

pytestmark = pytest.mark.fault


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    return install_into(tmp_path, monkeypatch)


def test_the_driver_names_the_first_device(nvidia_smi: Install) -> None:
    nvidia_smi(
        "echo ERROR: ld.so: it cannot be preloaded, ignored. >&2; "
        "echo 0, NVIDIA H100 80GB HBM3; echo 1, NVIDIA L4"
    )
    assert driver_device() == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo No devices were found; exit 6", "exit code 6.*No devices were found"),
        ("echo NVIDIA-SMI has failed >&2; exit 9", "exit code 9.*NVIDIA-SMI has failed"),
        ("true", "names no device"),
        ("exec sleep 60", "gave no answer within 0.2 s"),
    ],
)
def test_a_driver_that_names_none_is_told_of(
    nvidia_smi: Install, script: str, problem: str
) -> None:
    nvidia_smi(script)
    with pytest.raises(NoAnswerError, match=problem):
        driver_device(Commands(0.2) if "sleep" in script else None)


def test_a_host_without_a_driver_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoAnswerError, match="nvidia-smi: No such file or directory"):
        driver_device()


def test_a_driver_that_cannot_be_killed_is_not_waited_for(
    nvidia_smi: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi("exec sleep 60")
    monkeypatch.setattr(os, "killpg", lambda group, number: None)
    commands, begun = Commands(0.1, end_s=0.1), time.monotonic()
    with pytest.raises(NoAnswerError, match="gave no answer"):
        driver_device(commands)
    assert time.monotonic() - begun < 30
    with pytest.raises(NoAnswerError, match="was killed and has not ended"):
        driver_device(commands)
    assert commands.stuck is not None
    commands.stuck.kill()
    assert commands.stuck.wait(60) == -signal.SIGKILL
    nvidia_smi("echo 0, NVIDIA H200")
    assert Commands().run(["nvidia-smi"])[1] == "0, NVIDIA H200\n"
    assert driver_device(Commands()) == "NVIDIA H200"


def test_what_a_killed_command_has_left_is_not_waited_for(tmp_path: Path) -> None:
    """It holds the output; who asks would never ask again."""
    left = tmp_path / "pid"
    with pytest.raises(NoAnswerError, match="gave no answer"):
        Commands(0.5, end_s=0.1).run(["/bin/sh", "-c", f"setsid sleep 60 & echo $! > {left}; wait"])
    os.kill(int(left.read_text()), signal.SIGKILL)  # it is there still
