"""A worker says where it stands, also while it waits for good; one that cannot is not killed."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scalai.launch.agent.progress import Progress, Stacks, describe, main_thread
from scalai.runtime.agent_folder import STACK_SIGNAL
from support.waiting import wait_until

pytestmark = pytest.mark.fault

WAITS = """
import threading
from scalai.runtime.agent_folder import offer_stacks
{offer}
def innermost():
    print("there", flush=True)
    threading.Event().wait()
threading.Thread(target=threading.Event().wait, daemon=True).start()
innermost()
"""


@contextmanager
def waiting(folder: Path, offer: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "SCALAI_AGENT": str(folder)}
    with subprocess.Popen(
        [sys.executable, "-c", WAITS.format(offer=offer)],
        stdout=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None and process.stdout.readline() == "there\n"
            yield process
        finally:
            process.kill()


def answer(stacks: Stacks, caplog: pytest.LogCaptureFixture, what: str) -> str:
    def is_told() -> bool:
        stacks.watch()
        return what in caplog.text

    wait_until(is_told, lambda: f"{what} in {caplog.text}")
    return caplog.text


def test_the_main_threads_frames_are_told_each_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    stacks = Stacks(tmp_path)
    with waiting(tmp_path, "offer_stacks()") as process:
        end, text = time.monotonic() + 60, ""
        for _ in range(2):
            while "in innermost" not in text or "in wait" not in text:  # it is on its way there
                assert time.monotonic() < end, text
                caplog.clear()
                stacks.ask({"3": process.pid})
                text = answer(stacks, caplog, "event=stack rank=3")
            text = ""
        assert process.poll() is None


@pytest.mark.parametrize(("offer", "state"), [("", "S (sleeping)"), ("offer_stacks()", "T (stop")])
def test_one_that_cannot_answer_is_described_and_lives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, offer: str, state: str
) -> None:
    stacks = Stacks(tmp_path)
    with waiting(tmp_path, offer) as process:
        if state.startswith("T"):
            process.send_signal(signal.SIGSTOP)
        wait_until(lambda: f"state='{state[:1]}" in describe(process.pid), f"state {state}")
        stacks.ask({"0": process.pid})
        assert f"state='{state}" in answer(stacks, caplog, "event=stack rank=0")
        assert process.poll() is None


ANSWER_S = 0.05
"""A thread that ends may get a question, and has no answer."""
BUSY = """
import threading
from scalai.runtime.agent_folder import offer_stacks

def deep(n):
    return deep(n - 1) if n else 0

def begin_threads():
    while True:
        thread = threading.Thread(target=deep, args=(50,))
        thread.start()
        thread.join()

offer_stacks()
threading.Thread(target=begin_threads, daemon=True).start()
print("there", flush=True)
while True:
    deep(200)
"""


def test_a_worker_outlives_questions_while_its_threads_come_and_go(tmp_path: Path) -> None:
    environment = {**os.environ, "SCALAI_AGENT": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "there\n"
            (answers,) = tmp_path.glob("stacks-*")
            for _ in range(1500):
                before, end = answers.stat().st_size, time.monotonic() + ANSWER_S
                process.send_signal(STACK_SIGNAL)
                while answers.stat().st_size == before and time.monotonic() < end:
                    assert process.poll() is None, "a question has killed it"
            assert "in deep" in answers.read_text(errors="replace")
        finally:
            process.kill()


def test_the_newest_of_several_dumps_counts() -> None:
    dump = """Current thread 0x2 (most recent call first):
  File "a.py", line 1 in before
Current thread 0x2 (most recent call first):
  File "b.py", line 2 in inner
  File "b.py", line 3 in <module>
"""
    assert main_thread(dump) == ['"b.py", line 2 in inner', '"b.py", line 3 in <module>']
    assert main_thread("") == []


def test_a_stall_is_told_once_and_again_after_twice_as_long() -> None:
    progress = Progress(stall_s=60.0)
    for step in range(10):
        assert progress.stalled_s({0: step, 1: step}, float(step)) is None
    reported = [
        second for second in range(10, 600) if progress.stalled_s({0: 10, 1: 9}, float(second))
    ]
    assert reported == [69, 129, 249, 489]
    assert progress.stalled_s({0: 10, 1: 10}, 601.0) is None
    assert progress.stalled_s({0: 10, 1: 10}, 630.0) is None


def test_long_steps_are_no_stall_nor_is_a_round_that_has_not_begun() -> None:
    progress = Progress(stall_s=60.0)
    for step in range(1, 6):
        assert progress.stalled_s({0: step}, 50.0 * step) is None
    assert progress.patience_s == 500.0
    assert progress.stalled_s({0: 5}, 250.0 + 499.0) is None
    assert progress.stalled_s({0: 5}, 250.0 + 501.0) == 501.0
    assert progress.stalled_s({}, 10_000.0) is None
    assert progress.stalled_s({}, 20_000.0) is None
