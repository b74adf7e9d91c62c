"""The device probe: what counts as a working device, and that silence is not zero."""

from pathlib import Path

import pytest

from scalai.launch.agent.probe import DeviceProbe, visible_devices
from scalai.launch.config.driver import Commands
from scalai.launch.config.elastic_config import ProbeConfig
from support.driver_script import Install, install_into

HEALTHY = "0, GPU-aa, 34, No, None\n1, GPU-bb, 35, No, None\n"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    return install_into(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("output", "count"),
    [
        (HEALTHY, 2),
        ("0, GPU-aa, 34\n1, GPU-bb, 35\n", 2),
        ("0, GPU-aa, 34, [N/A], [N/A]\n", 1),
        ("0, GPU-aa, 34, No, None\n1, GPU-bb, [GPU requires reset], No, None\n", 1),
        ("0, GPU-aa, 34, No, None\n1, GPU-bb, ERR!, [Unknown Error], None\n", 1),
        ("0, GPU-aa, 34, Yes, None\n1, GPU-bb, 35, No, Reset\n2, GPU-cc, 36, No, None\n", 1),
        (
            "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.\n"
            "1, GPU-bb, 35, No, None\n",
            1,
        ),
        ("No devices were found\n", 0),
        ("", 0),
    ],
)
def test_only_devices_that_work_count(output: str, count: int) -> None:
    assert sum(visible_devices(output).values()) == count


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (["1"], ["GPU-bb"]),
        (["GPU-bb", "GPU-aa"], ["GPU-bb", "GPU-aa"]),
        (["1", "0"], ["GPU-bb", "GPU-aa"]),
        (["7"], []),
        ([""], []),
        (None, ["GPU-aa", "GPU-bb"]),
    ],
)
def test_only_visible_devices_count_in_their_order(
    visible: list[str] | None, found: list[str]
) -> None:
    assert list(visible_devices(HEALTHY, visible)) == found


@pytest.mark.fault
@pytest.mark.parametrize("is_broken_at_first", [False, True])
def test_workers_are_to_take_the_devices_that_work(
    nvidia_smi: Install, is_broken_at_first: bool
) -> None:
    """A rank's device is that of its number: with the first one broken, all are others."""
    broken = "0, GPU-aa, 34, Yes, None\n1, GPU-bb, 35, No, None\n"
    lost = "Unable to determine the device handle: GPU is lost.\n1, GPU-bb, 35, No, None\n"
    asked = DeviceProbe(ProbeConfig())
    if not is_broken_at_first:
        nvidia_smi(f"printf '{HEALTHY}'")
        assert (asked.read(), asked.narrowed) == (2, None)
        nvidia_smi(f"printf '{lost}'")
        assert (asked.read(), asked.narrowed) == (1, "GPU-bb")
    nvidia_smi(f"printf '{broken}'")
    assert (asked.read(), asked.narrowed) == (1, "GPU-bb")
    nvidia_smi(f"printf '{HEALTHY}'")
    assert (asked.read(), asked.narrowed) == (2, "GPU-aa,GPU-bb"), "forks have the narrower ones"


def test_nvidia_smi_is_asked(nvidia_smi: Install) -> None:
    nvidia_smi(f"printf '{HEALTHY}'")
    asked = DeviceProbe(ProbeConfig())
    assert asked.read() == 2
    nvidia_smi("echo No devices were found; exit 6")
    assert (asked.read(), asked.problem) == (0, None)


def test_an_older_driver_is_asked_for_less(nvidia_smi: Install) -> None:
    nvidia_smi(
        'case "$1" in *recovery*) echo Field is not a valid field to query.; exit 2;; esac\n'
        "echo 0, GPU-aa, 34"
    )
    assert DeviceProbe(ProbeConfig()).read() == 1


def test_a_driver_that_never_saw_a_device_has_no_answer(nvidia_smi: Install) -> None:
    nvidia_smi("echo No devices were found; exit 6")
    asked = DeviceProbe(ProbeConfig())
    assert asked.read() is None
    assert "sees no working device: No devices were found" in str(asked.problem)


def test_without_nvidia_smi_there_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = DeviceProbe(ProbeConfig())
    assert asked.read() is None
    assert asked.problem == "nvidia-smi: No such file or directory"


def test_a_command_prints_the_number() -> None:
    asked = DeviceProbe(ProbeConfig("command", command="echo 1 2 | wc -w"))
    assert (asked.read(), asked.problem) == (2, None)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("echo lost >&2; exit 3", "ended with 3: lost"),
        ("echo two", "says 'two', which is not a number"),
        ("true", "says '', which is not a number"),
    ],
)
def test_a_command_that_fails_is_no_answer(command: str, problem: str) -> None:
    asked = DeviceProbe(ProbeConfig("command", command=command))
    assert asked.read() is None
    assert problem in str(asked.problem)


def test_a_command_that_hangs_is_ended() -> None:
    hangs = ProbeConfig("command", command="sleep 1000 | cat")
    asked = DeviceProbe(hangs, commands=Commands(0.2))
    assert asked.read() is None
    assert asked.problem == "/bin/sh gave no answer within 0.2 s"


def test_a_file_holds_the_number(tmp_path: Path) -> None:
    path = tmp_path / "devices"
    asked = DeviceProbe(ProbeConfig("file", file=str(path)))
    assert asked.read() is None
    assert "No such file" in str(asked.problem)
    path.write_text("3\n")
    assert (asked.read(), asked.problem) == (3, None)
    path.write_text("")
    assert asked.read() is None


def test_no_probe_has_no_answer() -> None:
    asked = DeviceProbe(ProbeConfig("none"))
    assert asked.read() is None
    assert "no probe is configured" in str(asked.problem)
