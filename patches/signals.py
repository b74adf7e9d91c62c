"""Signals for the agent.

A scheduler sends SIGTERM to every process of a host, a terminal SIGINT to its processes, and SIGHUP
as it closes. All of them, and SIGUSR1 shortly before a job's time limit, ask the agent to drain.
Its workers must live on for the drain: they ignore these signals unless the script installs a
handler. The agent ends its workers by SIGKILL.
"""

import errno
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import wraps
from multiprocessing import popen_fork
from pathlib import Path
from typing import Any

from torch.utils.data import _utils

from scalai.runtime.processes import meant_for_the_agent


def leave_signals_to_the_agent() -> None:
    """Make this process and its children survive signals to the whole host.

    It gets a session of its own, out of any terminal's reach. The parent may have blocked the
    signals until here.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()
    for number in meant_for_the_agent():
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, meant_for_the_agent())
    _outlive_the_terminal()


class _Terminal(io.FileIO):
    """A terminal. Once it has closed, output is lost without an error."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


def _outlive_the_terminal() -> None:
    """Let the script print to a closed terminal: the drain of its host takes steps."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream.isatty():
            buffer = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            patient = io.TextIOWrapper(
                buffer, stream.encoding, stream.errors, line_buffering=True,
                write_through=name == "stderr",
            )  # fmt: skip
            setattr(sys, name, patient)


def keep_ending_children() -> None:
    """Let the script end its children by ``terminate()`` as before, although they inherit an
    ignored SIGTERM."""
    kinds: tuple[Any, ...] = (popen_fork.Popen, subprocess.Popen)
    for kind in kinds:
        kind.terminate = _surely(kind.terminate)
    loop = _utils.worker._worker_loop

    # Torch gives its data loaders' processes a handler that ends them without an error where
    # SIGTERM comes from the loader, and that dies of it where it comes from elsewhere
    # (torch/csrc/DataLoader.cpp, 2.13): the training then dies of its loader.
    @wraps(loop)
    def shielded(*arguments: Any, **named: Any) -> Any:
        _end_only_by(os.getppid())
        return loop(*arguments, **named)

    _utils.worker._worker_loop = shielded


def _surely(terminate: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(terminate)
    def terminate_surely(process: Any) -> None:
        terminate(process)
        if process.returncode is None and _ignores_sigterm(process.pid):
            process.kill()

    return terminate_surely


def _ignores_sigterm(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False  # it has ended
    ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def _end_only_by(parent: int) -> None:
    """Let SIGTERM end this process only if its parent sends it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=wait, name="end-by-parent", daemon=True).start()
