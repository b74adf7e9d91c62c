"""What a worker and its children do at signals that mean the agent, and the fork server while it
imports what workers will need."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.agents import worker_home
from support.waiting import wait_until

pytestmark = pytest.mark.fault

DEADLINE_S = 120.0
PROLOGUE = """
import multiprocessing, os, signal, subprocess, sys, time
from torch.utils.data import DataLoader
from scalai.patches.signals import keep_ending_children, leave_signals_to_the_agent
leave_signals_to_the_agent()
keep_ending_children()
from support.waiting import stay
"""


def run(script: str, before: str = "") -> list[str]:
    """Run a worker's script in a process of its own. Returns the words that it prints; it must end
    well."""
    done = subprocess.run(
        [sys.executable, "-c", before + PROLOGUE + script],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr, done.stderr
    return done.stdout.split()


def test_a_worker_lives_on_and_a_handler_of_the_script_gets_the_signal() -> None:
    assert run("""
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    os.kill(os.getpid(), number)
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
os.kill(os.getpid(), signal.SIGTERM)
print("alive")
""") == ["handled", "alive"]


def test_a_worker_lives_on_at_a_signal_that_torchruns_flag_names() -> None:
    named = 'import os; os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGUSR2"\n'
    script = "os.kill(os.getpid(), signal.SIGUSR2); print('alive')"
    assert run(script, named) == ["alive"]


def test_a_script_prints_on_where_its_terminal_has_closed() -> None:
    script = """
print("ready", flush=True)
sys.stdin.read()
print("lost")
print("lost", file=sys.stderr)
os._exit(7)
"""
    here, there = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + script], stdin=subprocess.PIPE, stdout=there, stderr=there
    ) as worker:
        os.close(there)
        said = b""
        while b"ready" not in said:
            said += os.read(here, 1000)
        os.close(here)
        worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == 7


def test_a_data_loader_lives_on_and_ends_with_its_iterator_or_its_worker() -> None:
    assert run("""
loader = DataLoader(range(8), num_workers=2)
samples = iter(loader)
next(samples)
workers = multiprocessing.active_children()
assert len(workers) == 2
stranger = subprocess.run([sys.executable, "-c", '''
import os, signal, sys
for pid in sys.argv[1:]:
    os.kill(int(pid), signal.SIGTERM)
''', *(str(process.pid) for process in workers)], check=True)
print(len(list(samples)))
ended = iter(loader)
next(ended)
workers = multiprocessing.active_children()
assert len(workers) == 2
del ended
assert not any(process.is_alive() for process in workers)
forgotten = iter(DataLoader(range(10**9), num_workers=2, persistent_workers=True))
next(forgotten)
""") == ["7"]


def test_children_of_the_script_are_ended_by_terminate() -> None:
    assert run("""
def say():
    signal.signal(signal.SIGTERM, lambda *_: (print("by its handler", flush=True), os._exit(5)))
    ready.set()
    stay()

child = multiprocessing.Process(target=stay)
child.start()
child.terminate()
child.join(60)
assert child.exitcode is not None
ready = multiprocessing.Event()
child = multiprocessing.Process(target=say)
child.start()
ready.wait(60)
child.terminate()
child.join(60)
assert child.exitcode == 5
child = subprocess.Popen(["sleep", "600"])
child.terminate()
child.wait(60)
forgotten = multiprocessing.Process(target=stay, daemon=True)
forgotten.start()
""") == ["by", "its", "handler"]


# ------------------------------------------------------------------ the fork server

AGENT = """
import os, subprocess, sys
os.environ["SCALAI_AGENT_PID"] = str(os.getpid())
subprocess.run([sys.executable, "-c", "import scalai.patches.preload"])
"""
ENDLESS = """
import os, pathlib, time
here = pathlib.Path(__file__).parent
(here / "new").write_text(str(os.getpid()))
(here / "new").rename(here / "pid")
time.sleep(600)
"""


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return that of a fork server which finds its torch in a folder."""
    told = {"PYTHONPATH": str(folder), "SCALAI_PRELOAD": str(folder / "none")}
    return {**os.environ, **told, **more}


def test_who_only_inherits_what_a_fork_server_is_told_is_not_counted_as_a_worker() -> None:
    """An agent that was started by one that has a fork server, and what it starts itself."""
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    inherited = {**os.environ, "SCALAI_PRELOAD": "/of/another/preload.json"}
    command = [sys.executable, "-c", script]
    parent = subprocess.Popen(command, env=inherited, stdin=subprocess.PIPE)
    try:
        started = psutil.Process(parent.pid)
        wait_until(started.children, "what it starts", DEADLINE_S)
        assert worker_home(started.children()[0]) is None
    finally:
        parent.communicate(b"\n", DEADLINE_S)


def test_a_fork_server_whose_agent_has_ended_before_it_begins_imports_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "torch.py").write_text("import os; os._exit(3)")
    agent = subprocess.Popen([sys.executable, "-c", ""])
    agent.wait(DEADLINE_S)
    server = subprocess.run(
        [sys.executable, "-c", "import scalai.patches.preload"], timeout=DEADLINE_S,
        env=environment(tmp_path, SCALAI_AGENT_PID=str(agent.pid)),
    )  # fmt: skip
    assert server.returncode == 1


def test_a_fork_server_that_still_imports_torch_ends_with_its_agent(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(ENDLESS)
    agent = subprocess.Popen([sys.executable, "-c", AGENT], env=environment(tmp_path))
    try:
        wait_until((tmp_path / "pid").exists, "a fork server", DEADLINE_S)
        server = psutil.Process(int((tmp_path / "pid").read_text()))
    finally:
        agent.kill()
        agent.wait(DEADLINE_S)
    try:
        server.wait(DEADLINE_S)
    except psutil.TimeoutExpired:
        server.kill()
        raise
