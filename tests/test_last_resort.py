"""A test that nothing ends is ended, and the others go on."""

import subprocess
import sys
from pathlib import Path

CONFTEST = """
from support.last_resort import LastResort

def pytest_configure(config):
    config.pluginmanager.register(LastResort(patience_s=1.0))
"""
TESTS = """
import signal, time

def test_before(): pass

def test_deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(600)

def test_behind(): time.sleep(0.2)
"""


def test_a_test_that_no_signal_reaches_has_failed_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", "--timeout=1", "-p", "no:cacheprovider", "."],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 2 passed" in done.stdout, done.stdout
    assert "crashed while running 'test_it.py::test_deaf'" in done.stdout
    assert "in test_deaf" in done.stderr, "the stacks say where it stood"
