"""Errors that a person can repair are one line, with the exit code for them, and no traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from scalai.launch.program import exit_code_of

pytestmark = pytest.mark.fault

DEADLINE_S = 120.0
RUN = ["scalai.launch.run", "--standalone"]
WITHOUT_TORCH = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""


def ended(*command: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


def test_a_number_of_workers_that_is_none() -> None:
    code, logged = ended("-m", *RUN, "--nproc-per-node", "x", __file__)
    assert code == 2
    assert "scalai-run: --nproc-per-node x: expected a number, auto, cpu or gpu" in logged


def test_a_store_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, logged = ended("-m", *RUN, "--store-dir", str(tmp_path / "file" / "store"), __file__)
    assert code == 3 and "--store-dir" in logged
    assert str(tmp_path / "file") in logged


@pytest.mark.parametrize(
    "start",
    [
        "sys.argv = ['scalai', 'doctor']\nfrom scalai.launch.cli import main\nmain()",
        "sys.argv = ['scalai-run', 'x.py']\nfrom scalai.launch.cli import scalai_run as main\n"
        "main()",
    ],
    ids=["scalai-doctor", "scalai-run"],
)
def test_no_torch_is_said(start: str) -> None:
    code, logged = ended("-c", f"{WITHOUT_TORCH}\n{start}")
    assert code == 3
    assert "torch is not installed for" in logged


def test_an_interrupt_is_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert exit_code_of("scalai verify", interrupted) == 130
    assert capsys.readouterr().err == "scalai verify: interrupted\n"


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    def faulty() -> int:
        raise KeyError("x")

    with pytest.raises(KeyError):
        exit_code_of("scalai verify", faulty)


def test_the_version_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scalai.launch.cli", "--version"],
        capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("scalai 0.")


def test_a_script_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    code, logged = ended("-m", *RUN, str(tmp_path / "nosuch.py"))
    assert code == 2 and "there is no script" in logged and "event=" not in logged


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


def test_the_package_is_its_command_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scalai", "--version"],
        capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("scalai ")
