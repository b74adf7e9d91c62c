"""Where memory or processes run out the tool ends with words: it waits for nothing in vain."""

import _thread
import builtins
import errno
import io
import logging
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

from scalai.converters import engine, forked
from scalai.converters.consistency import verify
from scalai.converters.forked import map_forked
from scalai.converters.layouts import layout_named, open_checkpoint
from scalai.core.errors import MemoryShortError, PeerError, RefusedError
from scalai.runtime.at_once import THREADS, at_once
from support.checkpoints import carry, deepspeed_state, state, write
from support.command import Capsys, logged

pytestmark = pytest.mark.fault

ENDS_S = 120
"""Where the tool waits for ever, a test ends after this."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def is_of_the_interpreter(stack: str) -> bool:
    """Return whether the tool ended where it imports, outside of its own code, or by an error that
    the interpreter has lost: it needs memory where it begins, where it ends and where it makes an
    exception and its traceback, and crashes without."""
    if stack.endswith("SystemError: error return without exception set\n"):
        return True
    modules = [line for line in stack.splitlines() if "<module>" in line]
    has_begun = re.search(r" in main$", stack, re.MULTILINE)
    return bool(stack) and (not has_begun or any("cli.py" not in line for line in modules))


@pytest.mark.parametrize("megabytes", [58, 62, 66, 70, 74, 78])
def test_it_ends_wherever_memory_does(tmp_path: Path, megabytes: int) -> None:
    """Some 60 MB are needed here, other machines need others: at each bound it ends."""

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20, megabytes << 20))

    shapes = {"decoder.final_layernorm.weight": (1024,), "embedding.weight": (512, 1024)}
    write(tmp_path / "source", "deepspeed_zero1", deepspeed_state(shapes=shapes), dp=16)
    command = ["reshard", tmp_path / "source", tmp_path / "new", "--dp", 3, "--workers", 1]
    done = subprocess.run(
        [sys.executable, "-m", "scalai.launch.cli", *map(str, command), "--memory", "36MB"],
        env={**os.environ, **ONE_THREAD, "PYTHONFAULTHANDLER": "1"},
        preexec_fn=bound, capture_output=True, text=True, timeout=ENDS_S,
    )  # fmt: skip
    assert (done.returncode == 0) == (tmp_path / "new").exists()
    if done.returncode:
        # Where the interpreter does not crash without memory, as in imports, it says so itself.
        assert "memory ran out" in done.stderr or is_of_the_interpreter(done.stderr), done


def test_memory_that_runs_out_in_the_kernel_is_called_so_too(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capsys
) -> None:
    """It is an OSError then, of whatever was asked for: here of opening the source's files."""
    write(tmp_path / "source", "deepspeed_zero1", deepspeed_state(), dp=2)
    zero = next((tmp_path / "source").rglob("*optim_states.pt"))

    def opened(path: Any, *args: Any, **named: Any) -> Any:
        if Path(path).name == zero.name:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path))
        return open_file(path, *args, **named)

    open_file = builtins.open
    monkeypatch.setattr(builtins, "open", opened)
    monkeypatch.setattr(io, "open", opened)
    command = ["reshard", tmp_path / "source", tmp_path / "new", "--dp", 1, "--workers", 1]
    code, said = logged(capsys, *command)
    assert code == 1 and "memory ran out" in said
    assert not (tmp_path / "new").exists()


def test_memory_that_runs_out_while_a_checkpoint_is_read_is_not_called_its_fault_alone(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    def run_out(*_: object) -> None:
        raise MemoryError("Unable to allocate 4.59 KiB for an array with shape (98, 6)")

    write(tmp_path / "source", "deepspeed_zero1", deepspeed_state(), dp=2)
    monkeypatch.setattr(type(layout_named("deepspeed_zero1")), "read", run_out)
    with pytest.raises(RefusedError, match=r"memory ran out while .*source was read.*4.59 KiB"):
        open_checkpoint(tmp_path / "source")


@pytest.fixture(autouse=True)
def _every_worker_ends() -> Iterator[None]:
    before = multiprocessing.active_children()  # those of pools
    yield
    assert [each for each in multiprocessing.active_children() if each not in before] == []


def refuse(*_: object) -> int:
    raise RuntimeError("can't start new thread")


def start_nothing(*_: object) -> int:
    return 0


@pytest.mark.parametrize("start", [refuse, start_nothing])
def test_threads_that_cannot_begin_are_not_waited_for(
    start: Callable[..., int], monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(_thread, "start_new_thread", start)
    done: list[int] = []
    at_once(done.append, range(100))
    assert done == [*range(100)]


def test_several_threads_share_the_items_and_have_small_stacks() -> None:
    meeting = threading.Barrier(THREADS)  # who waits here is at work at the same time as the others
    at_once(lambda _: meeting.wait(ENDS_S), range(THREADS))
    assert threading.stack_size() == 0


def test_calls_that_overlap_leave_the_size_of_stacks_as_it_was(
    monkeypatch: MonkeyPatch,
) -> None:
    """The first one that starts helpers goes on before the second one does."""
    is_there = [threading.Event(), threading.Event()]
    may_go_on = [threading.Event(), threading.Event()]
    left = iter(range(2))

    def start(*_: object) -> int:
        number = next(left)
        is_there[number].set()
        may_go_on[number].wait(ENDS_S)
        return 0

    monkeypatch.setattr(_thread, "start_new_thread", start)
    calls = [threading.Thread(target=at_once, args=(str, range(2))) for _ in range(2)]
    calls[0].start()
    assert is_there[0].wait(ENDS_S)
    calls[1].start()
    is_there[1].wait(0.5)  # it need not: it may wait for the first one
    for call, event in zip(calls, may_go_on, strict=True):
        event.set()
        call.join(ENDS_S)
    assert threading.stack_size() == 0


@pytest.mark.parametrize("bad", [0, 5, 99])
def test_an_error_in_a_thread_is_raised_and_no_thread_is_left_at_work(bad: int) -> None:
    at_work: list[int] = []

    def work(number: int) -> None:
        at_work.append(number)
        try:
            if number == bad:
                raise OSError(f"no room for {number}")
        finally:
            at_work.remove(number)

    with pytest.raises(OSError, match=f"no room for {bad}"):
        at_once(work, range(100))
    assert at_work == []


def end_with(code: int) -> None:
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


@pytest.mark.parametrize(("code", "how"), [(-9, "was killed by SIGKILL"), (7, "ended")])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_worker_that_dies_is_an_error(workers: int, code: int, how: str) -> None:
    def work(number: int) -> int:
        if number == 2:
            end_with(code)
        return number

    with pytest.raises(PeerError, match=rf"worker process \d+ {how}.*Run the same command again"):
        list(map_forked(work, range(6), workers))


@pytest.mark.parametrize("started", [0, 1, 2])
def test_a_worker_that_cannot_be_forked_is_an_error(started: int, monkeypatch: MonkeyPatch) -> None:
    fork, left = os.fork, [started]

    def fork_some() -> int:
        left[0] -= 1
        if left[0] < 0:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", fork_some)
    with pytest.raises(PeerError, match=r"cannot be started \(Resource temporarily unavailable\)"):
        list(map_forked(str, range(6), 3))


@pytest.mark.parametrize("error", [MemoryError(), OSError(12, "Cannot allocate memory")])
def test_memory_that_runs_out_in_a_worker_is_an_error(
    error: Exception, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    def run_out(*_: object) -> None:
        raise error

    source = write(tmp_path / "source")
    with monkeypatch.context() as patched:
        patched.setattr(engine, "run_tasks", run_out)
        with pytest.raises(MemoryShortError, match=r"1 workers with --memory of \d+ bytes"):
            carry(source, tmp_path / "new", tp=2)
    assert not (tmp_path / "new").exists()
    carry(source, tmp_path / "new", tp=2)
    assert verify(open_checkpoint(tmp_path / "new"), 0) == verify(source, 0)


def test_memory_that_runs_out_in_the_command_is_said(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capsys
) -> None:
    def run_out(*_: object) -> None:
        raise MemoryError

    write(tmp_path / "source", source=state())
    monkeypatch.setattr(engine, "plan_work", run_out)
    code, said = logged(capsys, "reshard", tmp_path / "source", tmp_path / "new")
    assert code == 1 and "memory ran out in this process" in said


class LetGoOn(logging.Handler):
    """Does with a stopped process what the log says of it."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if "kill -CONT" in record.getMessage():
            self.text = record.getMessage()
            os.kill(int(self.text.split("kill -CONT ")[1].split("`")[0]), signal.SIGCONT)


def test_a_worker_that_is_stopped_is_named_and_can_go_on(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "SILENT_S", 0.3)
    handler = LetGoOn()
    forked.log.addHandler(handler)

    def work(number: int) -> int:
        if number == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        return 2 * number

    try:
        assert sorted(map_forked(work, range(6), 2)) == [(n, 2 * n) for n in range(6)]
    finally:
        forked.log.removeHandler(handler)
    assert "is at one piece since" in handler.text and "stopped" in handler.text
