"""The command of a health check: what it says, and that nothing of it is left or waited for."""

import os
import signal
import stat
from pathlib import Path

import pytest

from scalai.core.errors import UsageError
from scalai.launch.agent import health
from scalai.launch.agent.health import HealthCheck
from scalai.launch.config.elastic_config import ProbeConfig

pytestmark = pytest.mark.fault

DEADLINE_S = 60.0


def check(command: str | None, timeout_s: float = DEADLINE_S) -> HealthCheck:
    variables = {"SCALAI_HOST": "a", "SCALAI_JOB": "j"}
    return HealthCheck(command, timeout_s, variables)


def test_a_host_is_healthy_where_the_command_ends_with_0() -> None:
    assert check("true").run("it joins the job") is None


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("sh -c 'echo fine; echo GPU 3 is lost >&2; exit 3'", "sh ended with 3: GPU 3 is lost"),
        ("sh -c 'kill -SEGV $$'", "sh was killed by signal 11"),
        ("/nowhere/check --quick", "/nowhere/check: No such file or directory"),
        ("/etc/passwd", "/etc/passwd: Permission denied"),
        ("sh -c 'echo $SCALAI_HOST $SCALAI_JOB: $SCALAI_REASON; exit 1'", "a j: it hangs"),
        ("sh -c 'exec >&- 2>&-; exit 4'", "sh ended with 4"),
    ],
)
def test_else_it_is_said_why_not(command: str, fault: str) -> None:
    assert fault in str(check(command).run("it hangs"))


def test_a_command_that_is_not_a_program_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "check"
    path.write_text("no program")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    assert f"{path}: Exec format error" in str(check(str(path)).run(""))


def test_of_a_flood_the_last_line_is_kept() -> None:
    fault = check("sh -c 'head -c 20000000 /dev/zero; echo; echo full; exit 1'").run("")
    assert str(fault).endswith("ended with 1: full")


@pytest.mark.parametrize("command", ["sleep 1000", "sh -c 'yes'", "sh -c 'exec >&- 2>&-; sleep 9'"])
def test_a_command_that_does_not_end_is_killed_with_its_group(command: str) -> None:
    assert "gave no answer within 0 s" in str(check(command, 0.3).run(""))


def test_what_a_command_has_left_behind_is_not_waited_for(tmp_path: Path) -> None:
    """It holds the output. The command ends only after that has left its group, which is killed."""
    left = tmp_path / "pid"
    leave = f'setsid sh -c "echo \\$\\$ > {left}; exec sleep 60" & until test -s {left}; do :; done'
    assert check(f"sh -c '{leave}'").run("") is None
    os.kill(int(left.read_text()), signal.SIGKILL)  # it is there still


def test_beside_a_command_that_cannot_be_killed_no_other_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "END_S", 0.1)
    monkeypatch.setattr(os, "killpg", lambda group, number: None)
    asked = check("sleep 60", 0.1)
    assert "gave no answer" in str(asked.run(""))
    assert "was killed and has not ended" in str(asked.run(""))
    assert asked._stuck is not None
    asked._stuck.kill()
    assert asked._stuck.wait(DEADLINE_S) == -signal.SIGKILL
    assert "gave no answer" in str(asked.run(""))
    asked._stuck.kill()
    asked._stuck.wait(DEADLINE_S)


def test_a_slip_of_ours_is_a_fault_and_no_command_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = check("test -e /")
    assert asked.fault("it joins") is None

    def fail(reason: str) -> None:
        raise KeyError(reason)

    monkeypatch.setattr(asked, "run", fail)
    assert "the check itself failed: KeyError" in str(asked.fault("it failed"))
    assert check(None).fault("it joins") is None


@pytest.mark.parametrize("command", ["", "  ", "check 'no end"])
def test_what_is_no_command_is_refused(command: str) -> None:
    with pytest.raises(UsageError, match=r"health_check = .*expected a command"):
        ProbeConfig(health_check=command)
