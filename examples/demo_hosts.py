"""The simulated hosts of the demonstration: one agent process each, their logs, and their end."""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

DEADLINE_S = 240.0
"""How long one thing may take before the demonstration gives up: a loaded machine is slow."""
COMPILE_S = 1500.0
"""How long a compiler may take: a minute on an idle machine, a busy one takes many times that."""
POLL_S = 0.05
TIDY_S = 10.0
TAIL_LINES = 25
_STOPPED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_CHILD_SUBREAPER = 36

Found = TypeVar("Found")


class DemoError(Exception):
    """Something did not happen as it should; the message shows the tail of the hosts' logs."""


class Hosts:
    """Agents of one job on this machine.

    Args:
        command: ``scalai-run`` and its arguments, without ``--host-id``.
        logs: Folder for one log file a host.
    """

    def __init__(self, command: Callable[[str], Sequence[str]], logs: Path) -> None:
        self._command = command
        self._logs = logs
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        logs.mkdir(parents=True, exist_ok=True)

    @property
    def names(self) -> tuple[str, ...]:
        """Hosts that were started and have not been seen to end."""
        return tuple(self._agents)

    def start(self, host: str) -> None:
        """Start the agent of a host; what it and its workers say goes to its log."""
        with open(self._logs / f"{host}.log", "wb") as log:
            self._agents[host] = subprocess.Popen(
                self._command(host),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                # A Ctrl-C at the terminal is for the demonstration alone.
                start_new_session=True,
            )

    def tell_to_leave(self, host: str) -> None:
        """Send the signal that a scheduler sends before it takes a host away."""
        self._agents[host].send_signal(signal.SIGTERM)

    def wait_for(self, what: str, look: Callable[[], Found | None]) -> Found:
        """Look until there is something, while every agent lives.

        Raises:
            DemoError: An agent ended, or nothing came in time.
        """
        deadline = time.monotonic() + DEADLINE_S
        while True:
            ended = {h: a.returncode for h, a in self._agents.items() if a.poll() is not None}
            found = look()
            if found is not None:
                return found
            if ended:
                codes = ", ".join(
                    f"host {host} ended with code {code}" for host, code in ended.items()
                )
                raise DemoError(f"{codes}, while {what} was expected.\n{self._tails()}")
            if time.monotonic() > deadline:
                raise DemoError(
                    f"{what}: nothing after {DEADLINE_S:.0f} s. Is the machine overloaded? Its "
                    f"load is {os.getloadavg()[0]:.0f}.\n{self._tails()}"
                )
            time.sleep(POLL_S)

    def wait_for_end(self, host: str, code: int) -> None:
        """Wait until an agent ends by itself.

        Raises:
            DemoError: It ended with another code, or not in time.
        """
        agent = self._agents[host]
        try:
            found = agent.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise DemoError(
                f"host {host} does not end after {DEADLINE_S:.0f} s.\n{self._tails()}"
            ) from None
        if found != code:
            raise DemoError(
                f"host {host} ended with code {found}; expected {code}.\n{self._tails()}"
            )
        del self._agents[host]

    def _tails(self) -> str:
        """Return the ends of all logs, without the warnings of libraries."""
        parts = []
        for log in sorted(self._logs.glob("*.log")):
            lines = [
                line
                for line in log.read_text(errors="replace").splitlines()
                if line.strip() and "Warning" not in line and "warnings.warn" not in line
            ]
            parts += [f"--- {log}", *lines[-TAIL_LINES:]]
        return "\n".join(parts)


def compile_first(program: str, log: Path) -> None:
    """Run a program that compiles what the workers would compile while the first step is awaited.

    Raises:
        DemoError: It failed, or did not end in time.
    """
    with log.open("wb") as file:
        compiler = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = compiler.wait(COMPILE_S)
        except subprocess.TimeoutExpired:
            raise DemoError(f"the compiler does not end after {COMPILE_S:.0f} s: {log}") from None
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        raise DemoError(f"what the framework compiles at its first use fails.\n{tail}")


def make_place() -> Path:
    """Make a folder for what a demonstration keeps in memory, with this process's number in its
    name."""
    memory = Path("/dev/shm")
    folder = memory if memory.is_dir() else None
    return Path(tempfile.mkdtemp(prefix=f"scalai-demo-{os.getpid()}-", dir=folder))


@contextmanager
def no_process_left() -> Iterator[None]:
    """Kill at the end every process that was started inside, directly or not.

    A process whose parent has died becomes a child of this one, so none gets away.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        with undisturbed():
            _end_descendants()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let no second Ctrl-C leave half of what is inside undone."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _STOPPED_BY}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_descendants() -> None:
    deadline = time.monotonic() + TIDY_S
    # A child may be born while its parent is killed: look again until there is none.
    while descendants := _descendants(os.getpid()):
        for process in descendants:
            # Python's tracker ends by itself when all others have, and removes semaphores.
            if time.monotonic() > deadline or not _is_tracker(process):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_S)


def _is_tracker(process: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def _descendants(ancestor: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of the program, in parentheses, may itself have spaces and parentheses.
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))
    found: list[int] = []
    waiting = [ancestor]
    while waiting:
        born = children.get(waiting.pop(), [])
        found += born
        waiting += born
    return found
