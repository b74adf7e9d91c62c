"""What a host has to run workers: its devices, its health check, and kills for want of memory."""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from scalai.core.errors import UsageError
from scalai.launch.agent import host_checks
from scalai.launch.agent.host_checks import (
    DeviceMemory,
    DeviceProbe,
    HealthCheck,
    describe_rise,
    driver_device,
    oom_kills,
    visible_devices,
)
from scalai.launch.command_runner import CommandRunner, NoAnswerError
from scalai.launch.config.elastic_config import ProbeConfig
from support.driver_script import Install, install_into

HEALTHY = "0, GPU-aa, 34, No, None\n1, GPU-bb, 35, No, None\n"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    return install_into(tmp_path, monkeypatch)


# ------------------------------------------------------------------ the memory of killed workers

USES = """echo >> asked
case $(wc -l < asked) in {cases} esac
"""


def devices(nvidia_smi: Install, folder: Path, *used: int) -> DeviceMemory:
    """Devices of which the first uses so many MiB at each question, and at last always as much; the
    second is another job's."""
    cases = "".join(f"{n}) echo 0, GPU-aa, {size};; " for n, size in enumerate(used[:-1], 1))
    asked = str(folder / "asked")
    text = USES.format(cases=f"{cases} *) echo 0, GPU-aa, {used[-1]};;").replace("asked", asked)
    nvidia_smi(f"{text}\necho 1, GPU-bb, $(date +%s)\n")
    return DeviceMemory(["0"])


@pytest.mark.fault
@pytest.mark.parametrize(
    ("used", "questions", "says"),
    [
        ((10, 500), 2, ""),
        ((10, 9000, 9000, 20), 4, "event=device_memory held='GPU-aa 8990 MiB': waiting for it"),
    ],
    ids=["it is free at once", "it is free later"],
)
def test_the_memory_of_killed_workers_is_waited_for(
    nvidia_smi: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, used: tuple[int, ...], questions: int, says: str,
) -> None:  # fmt: skip
    caplog.set_level("INFO", "scalai")
    monkeypatch.setattr(host_checks, "HELD_LOOK_S", 0.01)
    devices(nvidia_smi, tmp_path, *used).wait(lambda: False)
    assert len((tmp_path / "asked").read_text().splitlines()) == questions
    assert says in caplog.text and ("event=" in caplog.text) is bool(says)


@pytest.mark.fault
def test_memory_that_stays_held_is_waited_for_once(
    nvidia_smi: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = devices(nvidia_smi, tmp_path, 10, 9000)
    memory.wait(lambda: False, held_s=0.0)
    assert "the next workers start beside it" in caplog.text
    caplog.clear()
    memory.wait(lambda: False)
    memory.wait(lambda: True)
    assert caplog.text == ""


def test_where_no_driver_answers_nothing_is_waited_for(nvidia_smi: Install) -> None:
    nvidia_smi("echo No devices were found; exit 6")
    DeviceMemory().wait(lambda: False)


@pytest.mark.fault
def test_a_driver_that_hangs_leaves_its_last_answer(
    nvidia_smi: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    nvidia_smi("echo 0, GPU-aa, 7")
    memory, asking = DeviceMemory(), list[threading.Thread]()

    def submit(work: Callable[[], None]) -> None:
        asking.append(threading.Thread(target=work))
        asking[-1].start()

    monkeypatch.setattr(host_checks, "FREE_S", 60.0)
    assert memory.free(submit) == [7 << 20]
    os.mkfifo(tmp_path / "hangs")
    nvidia_smi(f"read line < {tmp_path}/hangs; echo 0, GPU-aa, 5")
    monkeypatch.setattr(host_checks, "FREE_S", 0.01)
    for _ in range(2):
        assert memory.free(submit) == [7 << 20]
    assert "what it said last counts: 7 MiB free" in caplog.text and len(asking) == 2
    (tmp_path / "hangs").write_text("go on\n")
    asking[-1].join(60.0)
    monkeypatch.setattr(host_checks, "FREE_S", 60.0)
    nvidia_smi("exit 6")
    assert memory.free(submit) == [5 << 20]
    monkeypatch.setattr(host_checks, "OLD_S", 0.0)
    assert memory.free(submit) == [], "others may have taken it since"
    for each in asking:
        each.join(60.0)


# ------------------------------------------------------------------ commands


@pytest.mark.fault
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["sleep", "1000"], "sleep gave no answer within 0.3 s"),
        (["sh", "-c", "echo it waits; sleep 1000 | cat"], "sh gave no answer .*: it waits"),
        (["sh", "-c", "yes"], "gave no answer"),
        (["sh", "-c", "exec >&- 2>&-; sleep 9"], "gave no answer"),
        (["/nowhere/check", "--quick"], "/nowhere/check: No such file or directory"),
        (["/etc/passwd"], "/etc/passwd: Permission denied"),
        (["true", "\0"], "true: embedded null byte"),
    ],
)
def test_a_command_that_does_not_end_or_begin_has_no_answer(
    words: Sequence[str], problem: str
) -> None:
    with pytest.raises(NoAnswerError, match=problem):
        CommandRunner(0.3).run(words)


def test_of_a_flood_the_end_is_kept() -> None:
    code, output = CommandRunner().run(
        ["sh", "-c", "head -c 20000000 /dev/zero; echo full; exit 1"]
    )
    assert code == 1 and output.endswith("full\n") and len(output) < 1 << 20


@pytest.mark.fault
def test_what_a_command_has_left_behind_is_not_waited_for(tmp_path: Path) -> None:
    """It holds the output. The command ends only after that has left its group, which is killed."""
    left = tmp_path / "pid"
    leave = f'setsid sh -c "echo \\$\\$ > {left}; exec sleep 60" & until test -s {left}; do :; done'
    assert CommandRunner().run(["sh", "-c", leave]) == (0, "")
    os.kill(int(left.read_text()), signal.SIGKILL)  # it is there still


@pytest.mark.fault
def test_beside_a_command_that_cannot_be_killed_no_other_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands = CommandRunner(0.1, end_s=0.1)
    with monkeypatch.context() as context:
        context.setattr(os, "killpg", lambda group, number: None)
        for problem in ("gave no answer", "was killed and has not ended"):
            with pytest.raises(NoAnswerError, match=problem):
                commands.run(["sleep", "60"])
    assert commands.stuck is not None
    commands.stuck.kill()
    assert commands.stuck.wait(60) == -signal.SIGKILL
    with pytest.raises(NoAnswerError, match="gave no answer"):
        commands.run(["sleep", "60"])
    assert commands.stuck is None


# ------------------------------------------------------------------ the driver


def test_the_driver_names_the_first_device(nvidia_smi: Install) -> None:
    nvidia_smi(
        "echo ERROR: ld.so: it cannot be preloaded, ignored. >&2; "
        "echo 0, NVIDIA H100 80GB HBM3; echo 1, NVIDIA L4"
    )
    assert driver_device() == "NVIDIA H100 80GB HBM3"


@pytest.mark.fault
@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo No devices were found; exit 6", "exit code 6.*No devices were found"),
        ("echo NVIDIA-SMI has failed >&2; exit 9", "exit code 9.*NVIDIA-SMI has failed"),
        ("true", "names no device"),
        ("exec sleep 60", "gave no answer within 0.2 s"),
        (None, "nvidia-smi: No such file or directory"),
    ],
)
def test_a_driver_that_names_none_is_told_of(
    nvidia_smi: Install, script: str | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is None:
        monkeypatch.setenv("PATH", "/nowhere")
    else:
        nvidia_smi(script)
    with pytest.raises(NoAnswerError, match=problem):
        driver_device(CommandRunner(0.2) if script == "exec sleep 60" else None)


# ------------------------------------------------------------------ devices that work


@pytest.mark.parametrize(
    ("output", "count"),
    [
        (HEALTHY, 2),
        ("0, GPU-aa, 34\n1, GPU-bb, 35\n", 2),
        ("0, GPU-aa, 34, [N/A], [N/A]\n", 1),
        ("0, GPU-aa, 34, No, None\n1, GPU-bb, [GPU requires reset], No, None\n", 1),
        ("0, GPU-aa, 34, No, None\n1, GPU-bb, ERR!, [Unknown Error], None\n", 1),
        ("0, GPU-aa, 34, Yes, None\n1, GPU-bb, 35, No, Reset\n2, GPU-cc, 36, No, None\n", 1),
        ("Unable to determine the device handle: GPU is lost.\n1, GPU-bb, 35, No, None\n", 1),
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


def test_a_driver_without_devices_counts_as_zero_only_where_some_were_seen(
    nvidia_smi: Install,
) -> None:
    asked, none = DeviceProbe(ProbeConfig()), "echo No devices were found; exit 6"
    nvidia_smi(none)
    assert asked.read() is None
    assert "sees no working device: No devices were found" in str(asked.problem)
    nvidia_smi(f"printf '{HEALTHY}'")
    assert (asked.read(), asked.problem) == (2, None)
    nvidia_smi(none)
    assert (asked.read(), asked.problem) == (0, None)


def test_an_older_driver_is_asked_for_less(nvidia_smi: Install) -> None:
    nvidia_smi(
        'case "$1" in *recovery*) echo Field is not a valid field to query.; exit 2;; esac\n'
        "echo 0, GPU-aa, 34"
    )
    assert DeviceProbe(ProbeConfig()).read() == 1


def command(text: str) -> ProbeConfig:
    return ProbeConfig("command", command=text)


@pytest.mark.parametrize(
    ("config", "slots", "problem"),
    [
        (command("echo 1 2 | wc -w"), 2, None),
        (command("echo lost >&2; exit 3"), None, "ended with 3: lost"),
        (command("echo two"), None, "says 'two', which is not a number"),
        (command("true"), None, "says '', which is not a number"),
        (command("sleep 1000 | cat"), None, "/bin/sh gave no answer within 2 s"),
        (ProbeConfig("file", file="devices"), 3, None),
        (ProbeConfig("file", file="empty"), None, "says '', which is not a number"),
        (ProbeConfig("file", file="nowhere"), None, "No such file"),
        (ProbeConfig("none"), None, "no probe is configured"),
    ],
)
def test_silence_is_not_zero(
    config: ProbeConfig, slots: int | None, problem: str | None,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("devices").write_text("3\n")
    Path("empty").touch()
    asked = DeviceProbe(
        config, commands=CommandRunner(2.0 if "sleep" in str(config.command) else 60.0)
    )
    assert asked.read() == slots and (problem or "None") in str(asked.problem)


# ------------------------------------------------------------------ the health check


def check(command: str | None) -> HealthCheck:
    return HealthCheck(command, {"SCALAI_HOST": "a", "SCALAI_JOB": "j"}, CommandRunner())


@pytest.mark.fault
@pytest.mark.parametrize(
    ("command", "fault"),
    [
        (None, None),
        ("true", None),
        ("sh -c 'echo fine; echo GPU 3 is lost >&2; exit 3'", "sh ended with 3: GPU 3 is lost"),
        ("sh -c 'kill -SEGV $$'", "sh was killed by signal 11"),
        ("sh -c 'echo $SCALAI_HOST $SCALAI_JOB: $SCALAI_REASON; exit 1'", "a j: it hangs"),
        ("sh -c 'exec >&- 2>&-; exit 4'", "sh ended with 4"),
        ("/nowhere/check", "/nowhere/check: No such file or directory"),
    ],
)
def test_a_host_is_healthy_where_the_command_ends_with_0(
    command: str | None, fault: str | None
) -> None:
    found = check(command).fault("it hangs")
    assert found == fault or (fault and fault in str(found))


def test_a_slip_of_ours_is_a_fault() -> None:
    class Slip(CommandRunner):
        def run(self, *_: object) -> tuple[int, str]:
            raise KeyError("h7")

    assert "the check itself failed: KeyError" in str(HealthCheck("true", {}, Slip()).fault("why"))


@pytest.mark.parametrize("command", ["", "  ", "check 'no end"])
def test_what_is_no_command_is_refused(command: str) -> None:
    with pytest.raises(UsageError, match=r"health_check = .*expected a command"):
        ProbeConfig(health_check=command)


# ------------------------------------------------------------------ kills for want of memory


@pytest.mark.fault
@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"proc/self/cgroup": "0::/job/a\n", "cgroup/job/a/memory.events": "oom 3\noom_kill 2\n",
          "proc/vmstat": "pgfault 9\noom_kill 5\n"}, {"cgroup": 2, "machine": 5}),
        ({"proc/self/cgroup": "0::/\n", "cgroup/memory.events": "oom_kill 1\n"}, {"cgroup": 1}),
        ({"proc/self/cgroup": "4:cpu:/\n9:memory:/d/x\n",
          "cgroup/memory/d/x/memory.oom_control": "under_oom 0\noom_kill 4\n"}, {"cgroup": 4}),
        ({"proc/vmstat": "oom_kill 7\n"}, {"machine": 7}),
        ({"proc/vmstat": "nothing of it\n"}, {}),
    ],
)  # fmt: skip
def test_counts_are_read_where_they_are(
    tmp_path: Path, files: dict[str, str], found: dict[str, int]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path / "cgroup", tmp_path / "proc") == found
    assert all(count >= 0 for count in oom_kills().values()), "this machine's"


@pytest.mark.fault
@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"cgroup": 1, "machine": 1}, {"cgroup": 2, "machine": 9}, "this cgroup's"),
        ({"machine": 1}, {"machine": 2}, "the machine's"),
        ({"cgroup": 1}, {"cgroup": 1}, ""),
        ({}, {"cgroup": 7}, ""),
    ],
    ids=["cgroup", "machine", "none", "unknown before"],
)
def test_a_rise_is_told_and_no_other_change(
    before: dict[str, int], after: dict[str, int], said: str
) -> None:
    text = f"out of host memory: {said} count of oom_kill rose by 1"
    assert describe_rise(before, after) == (text if said else "")
