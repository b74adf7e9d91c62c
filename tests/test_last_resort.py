"""A test that nothing ends is ended, and the others go on."""

import re
import subprocess
import sys
from pathlib import Path

from support.waiting import wait_until

CONFTEST = """
from support.last_resort import LastResort
from support.spread import Spreading

def pytest_configure(config):
    config.pluginmanager.register(LastResort(patience_s=1.0))
    config.pluginmanager.register(Spreading())
"""
DEAF = """
import signal, time
import pytest

def hang():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(600)  # in one call: between two, Python would handle what other threads got

def test_before(): pass

def test_deaf(): hang()

def test_behind(): time.sleep(0.2)

@pytest.fixture
def deaf_at_its_end():
    yield
    hang()

def test_that_fails(deaf_at_its_end): assert False

def test_last(): pass
"""
ALONE = "def test_one(): pass\n\ndef test_two(): pass\n"


def test_a_test_that_no_signal_reaches_has_failed_and_the_run_goes_on(tmp_path: Path) -> None:
    """Each once, whatever else its process was to run: tests of a file, and single ones."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    folder = tmp_path / "tests" / "end_to_end"  # where each test is a unit of its own
    folder.mkdir(parents=True)
    (tmp_path / "test_deaf.py").write_text(DEAF)
    for number in range(3):
        (folder / f"test_{number}.py").write_text(ALONE)
    (folder / "test_deaf_alone.py").write_text(DEAF)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "--timeout=1", "-p", "no:cacheprovider",
         f"--rootdir={tmp_path}", "."],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    for name in ("test_deaf", "test_that_fails"):
        for file in ("test_deaf.py", "tests/end_to_end/test_deaf_alone.py"):
            crash = rf"^worker 'gw\d+' crashed while running '{file}::{name}'$"  # not its summary
            assert len(re.findall(crash, done.stdout, re.MULTILINE)) == 1, done.stdout
    assert "6 failed, 12 passed" in done.stdout, done.stdout
    assert "in test_deaf" in done.stderr, "the stacks say where it stood"


STUCK = """
import os, sys, types
from support.training.worker_pool import WorkerPool

def forever(rank, store, folder):
    open(f"{folder}/{os.getpid()}", "w").close()
    while True:
        pass

stuck = types.ModuleType("support.training.stuck")
stuck.forever = forever
sys.modules[stuck.__name__] = stuck  # in the workers, too, which import this file
if __name__ == "__main__":
    WorkerPool(2, trainer="stuck").run("stuck:forever", [(sys.argv[1],)] * 2)
"""


def test_workers_of_a_pool_end_with_a_killed_session_though_they_are_within_a_call(
    tmp_path: Path,
) -> None:
    (tmp_path / "session.py").write_text(STUCK)
    (folder := tmp_path / "workers").mkdir()
    session = subprocess.Popen([sys.executable, str(tmp_path / "session.py"), str(folder)])
    try:
        wait_until(lambda: len(list(folder.iterdir())) == 2, "both are within a call", 120)
    finally:
        session.kill()
        session.wait(60)
    pids = [path.name for path in folder.iterdir()]
    wait_until(lambda: not any(Path("/proc", pid).exists() for pid in pids), "both end", 120)
