"""The demonstration's processes: what they say when they fail, and that none outlives it."""

import subprocess
import sys
from pathlib import Path

import pytest
from demo_hosts import DemoError, Hosts

ORPHAN = """
import subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"],
    stdout=subprocess.PIPE, start_new_session=True,
)
child.stdout.readline()
print(child.pid)
"""


def hosts(folder: Path, script: str) -> Hosts:
    return Hosts(lambda host: [sys.executable, "-c", script, host], folder)


def test_a_host_that_ends_too_early_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    some = hosts(tmp_path, "import sys; print('UserWarning: old'); print('bad luck'); sys.exit(3)")
    some.start("a")
    with pytest.raises(DemoError, match="host a ended with code 3, while the end") as error:
        some.wait_for("the end", lambda: None)
    assert "bad luck" in str(error.value)
    assert "UserWarning" not in str(error.value)


def test_what_is_found_counts_although_a_host_has_ended(tmp_path: Path) -> None:
    some = hosts(tmp_path, "")
    some.start("a")
    some.wait_for_end("a", 0)
    assert some.names == ()
    assert some.wait_for("a number", lambda: 7) == 7


def test_another_exit_code_is_an_error(tmp_path: Path) -> None:
    some = hosts(tmp_path, "import sys; sys.exit(1)")
    some.start("a")
    with pytest.raises(DemoError, match="host a ended with code 1; expected 75"):
        some.wait_for_end("a", 75)


def test_processes_of_dead_parents_are_ended_too() -> None:
    """In a process of its own, because it adopts orphans from then on."""
    script = f"""
import os, subprocess, sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2] / "examples")!r})
from demo_hosts import no_process_left
with no_process_left():
    orphan = int(subprocess.check_output([sys.executable, "-c", {ORPHAN!r}]))
    os.kill(orphan, 0)
try:
    os.kill(orphan, 0)
except ProcessLookupError:
    print("ended")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "ended\n", done.stderr


def test_an_error_inside_is_not_hidden() -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2] / "examples")!r})
from demo_hosts import DemoError, no_process_left
with no_process_left():
    raise DemoError("as it was")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert "as it was" in done.stderr
