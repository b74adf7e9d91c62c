"""The processes of a job on this machine, found by the job's folder.

The owner of the lock of a host's store is its agent; workers and fork servers have the agent's
directory in their environment.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from scalai.core.errors import PeerError
from scalai.store.lock import LOCK, find_owner
from scalai.store.secure import open_below

COORDINATOR = "scalai.launch.coordinator.process"
AGENT_FOLDER = "agent"
ENDS_S = 30.0
"""Seconds for killed processes to end."""


def agents(folder: Path) -> dict[str, int]:
    """Return the process numbers of a job's agents on this machine, by host."""
    found = {}
    for lock in sorted(folder.glob(f"*/{LOCK}")):
        with suppress(OSError), open_below(folder.parent, folder.name, lock.parent.name) as host:
            owner = find_owner(host)
            if owner is not None and owner.pid:
                found[lock.parent.name] = owner.pid
    return found


def coordinator(folder: Path) -> int | None:
    """Return the process of the job's coordinator on this machine, or None."""
    for pid in _pids():
        words = _words(pid, "cmdline")
        if COORDINATOR in words and str(folder) in words and state(pid) not in "ZX":
            return pid
    return None


def workers(folder: Path, host: str) -> list[int]:
    """Return the live workers of a host in the order of creation, equal to the order of ranks."""
    home = str(folder / host / AGENT_FOLDER)
    found = []
    for pid in _pids():
        if state(pid) in "ZX":
            continue
        variables = environment(pid)
        is_first = variables.get("SCALAI_AGENT") == home and "RANK" in variables
        if is_first and not _is_child_of_a_worker(pid, home):
            found.append((int(variables["RANK"]), pid))
        elif _is_of_fork_server(pid, home) and _is_of_fork_server(_parent(pid), home):
            found.append((pid, pid))
    return [pid for _, pid in sorted(found)]


def family(folder: Path, host: str) -> list[int]:
    """Return the agent of a host, then all its descendants except the coordinator."""
    home = folder / host / AGENT_FOLDER
    preload = f"{home}{os.sep}"
    found = [pid for name, pid in agents(folder).items() if name == host]
    for pid in _pids():
        variables = environment(pid)
        is_own = variables.get("SCALAI_AGENT") == str(home)
        is_own = is_own or variables.get("SCALAI_PRELOAD", "").startswith(preload)
        if is_own and pid not in found and state(pid) not in "ZX":
            found.append(pid)
    return found


def _is_child_of_a_worker(pid: int, home: str) -> bool:
    """Whether a worker started this process (a data loader's): it has the worker's environment."""
    variables = environment(_parent(pid))
    return variables.get("SCALAI_AGENT") == home and "RANK" in variables


def _is_of_fork_server(pid: int, home: str) -> bool:
    words = _words(pid, "cmdline")
    if not any("multiprocessing.forkserver" in word for word in words):
        return False
    return Path(environment(pid).get("SCALAI_PRELOAD", "")).parent == Path(home)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _parent(pid: int) -> int:
    fields = _fields(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def state(pid: int) -> str:
    """Return the kernel's letter for a process's state: Z and X are dead, T is stopped."""
    fields = _fields(pid)
    return fields[0] if fields else "X"


def _fields(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _words(pid: int, what: str) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return []
    return [word.decode(errors="replace") for word in text.split(b"\0") if word]


def environment(pid: int) -> dict[str, str]:
    """Return the initial variables of a process; empty if not readable."""
    return dict(word.partition("=")[::2] for word in _words(pid, "environ"))


def flag(pid: int, name: str) -> str | None:
    """Return the value of a flag on an agent's command line, None without it."""
    words = _words(pid, "cmdline")
    place = _place(words, name)
    if place is None:
        return None
    _, is_joined, value = words[place].partition("=")
    return value if is_joined else "".join(words[place + 1 : place + 2])


def _place(words: Sequence[str], name: str) -> int | None:
    """Return the place of a flag among the words, with dashes or underscores; None: it is not
    there."""
    names = (word.partition("=")[0].replace("_", "-") for word in words)
    return next((place for place, found in enumerate(names) if found == name), None)


def send(pid: int, number: int) -> None:
    """Send a signal; ignore a process already gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def end(pids: Sequence[int]) -> None:
    """Kill processes and wait for their end. Raises ``PeerError`` if one remains."""
    for pid in pids:
        send(pid, signal.SIGKILL)
    deadline = time.monotonic() + ENDS_S
    while left := [pid for pid in pids if state(pid) not in "ZX"]:
        if time.monotonic() > deadline:
            raise PeerError(f"processes {left} do not end though they were killed.")
        time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class AgentCommand:
    """The start of an agent, for a restart: words, variables, directory, output file (None: none to
    open), and a descriptor of its network namespace, if not ours."""

    words: tuple[str, ...]
    variables: Mapping[str, str]
    directory: str
    output: str | None
    network: int | None = None

    @classmethod
    def of(cls, pid: int) -> "AgentCommand":
        """Read it from a live process."""
        is_other = namespace(pid, "net") not in ("", namespace("self", "net"))
        network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY) if is_other else None
        return cls(
            tuple(_words(pid, "cmdline")), environment(pid), os.readlink(f"/proc/{pid}/cwd"),
            output_of(pid), network,
        )  # fmt: skip

    def start(
        self, before: Sequence[str] = (), output: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start it again, behind the words ``before``; it outlives this process."""
        where = str(output) if output is not None else self.output or os.devnull
        if self.network is not None:
            before = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self.network}", *before]
        with open(where, "ab") as file:
            return subprocess.Popen(
                [*before, *self.words], env=dict(self.variables), cwd=self.directory,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def with_flag(self, name: str, value: str) -> "AgentCommand":
        """Return it with another value of a flag of ``scalai-run``."""
        words = list(self.words)
        place = _place(words, name)
        if place is None:
            place = next(n for n, word in enumerate(words) if word.startswith("--"))
            words[place:place] = [name, value]
        else:
            words[place : place + (1 if "=" in words[place] else 2)] = [name, value]
        return replace(self, words=tuple(words))


def output_of(pid: int) -> str | None:
    """Return the file of a process's standard error, None if it is no file."""
    try:
        path = os.readlink(f"/proc/{pid}/fd/2")
    except OSError:
        return None
    return path if path.startswith("/") and Path(path).is_file() else None


def namespace(pid: int | str, kind: str) -> str:
    """Return the process's namespace of a kind; empty if unknown."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""
