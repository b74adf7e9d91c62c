"""What a worker and its children do at signals that mean the agent."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.fault

DEADLINE_S = 120.0
PROLOGUE = """
import multiprocessing, os, signal, subprocess, sys, time
from torch.utils.data import DataLoader
from scalai.patches.signals import keep_ending_children, leave_signals_to_the_agent
leave_signals_to_the_agent()
keep_ending_children()
"""


def run(script: str) -> str:
    """Run a worker's script in a process of its own. Returns what it prints; it must end well."""
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + script],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr, done.stderr
    return done.stdout


def test_a_worker_lives_on_and_a_handler_of_the_script_gets_the_signal() -> None:
    logged = run("""
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    os.kill(os.getpid(), number)
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
os.kill(os.getpid(), signal.SIGTERM)
print("alive")
""")
    assert logged.split() == ["handled", "alive"]


def test_a_worker_lives_on_at_a_signal_that_torchruns_flag_names() -> None:
    script = "os.kill(os.getpid(), signal.SIGUSR2); print('alive')"
    named = 'import os; os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGUSR2"\n'
    done = subprocess.run(
        [sys.executable, "-c", named + PROLOGUE + script],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, ["alive"]), done.stderr


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
    logged = run("""
loader = DataLoader(range(8), num_workers=2)
samples = iter(loader)
next(samples)
stranger = subprocess.run([sys.executable, "-c", '''
import os, signal, sys
for pid in sys.argv[1:]:
    os.kill(int(pid), signal.SIGTERM)
''', *(str(process.pid) for process in samples._workers)], check=True)
print(len(list(samples)))
ended = iter(loader)
next(ended)
workers = ended._workers
del ended
assert not any(process.is_alive() for process in workers)
forgotten = iter(DataLoader(range(10**9), num_workers=2, persistent_workers=True))
next(forgotten)
""")
    assert logged.split() == ["7"]


def test_children_of_the_script_are_ended_by_terminate() -> None:
    logged = run("""
def sleep():
    time.sleep(600)

def say():
    signal.signal(signal.SIGTERM, lambda *_: (print("by its handler", flush=True), os._exit(5)))
    ready.set()
    while True:  # a signal just before a sleep begins is handled at its end
        time.sleep(0.1)

child = multiprocessing.Process(target=sleep)
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
forgotten = multiprocessing.Process(target=sleep, daemon=True)
forgotten.start()
""")
    assert logged.split() == ["by", "its", "handler"]
