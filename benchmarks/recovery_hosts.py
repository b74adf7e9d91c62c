"""Hosts for ``recovery.py``: network namespaces of this machine, joined by a switch of their own.

Each host has an address, and its processes are found by its namespace; what is its memory is a
folder of its own. A host dies with all of its processes: its connections are reset, as where a
machine's processes are killed, or before that its wire is pulled out, as where it loses power.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

ROOM = 15
"""Characters that a device's name may have."""


class Hosts:
    """Hosts by name, for a block; at its end nothing of them is left."""

    def __init__(self, names: Sequence[str], memory: Path) -> None:
        self._mark = f"scb{os.getpid() % 100000}"
        self.names, self._memory = tuple(names), memory
        self.addresses = {name: f"192.0.2.{number}" for number, name in enumerate(names, 1)}
        self.devices = {name: f"{self._mark}{name}"[:ROOM] for name in names}

    def __enter__(self) -> "Hosts":
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise SystemExit("hosts are network namespaces: this needs root, and iproute2's ip")
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for name in self.names:
            space, device, port = self._space(name), self.devices[name], f"p{name}"
            _ip("netns", "add", space)
            _ip("link", "add", device, "netns", space, "type", "veth",
                "peer", "name", port, "netns", self._switch)  # fmt: skip
            _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", space, "addr", "add", f"{self.addresses[name]}/24", "dev", device)
            for link in ("lo", device):
                _ip("-n", space, "link", "set", link, "up")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in self.names:
            self.end(name)
            _ip("netns", "del", self._space(name))
        _ip("netns", "del", self._switch)

    def memory(self, name: str) -> Path:
        """Return the folder that counts as a host's memory."""
        return self._memory / f"memory-{name}"

    def start(
        self, name: str, command: Sequence[str], log: Path, variables: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        """Start ``python -m <command>`` on a host."""
        self.memory(name).mkdir(parents=True, exist_ok=True)
        where = {"GLOO_SOCKET_IFNAME": self.devices[name], "OMP_NUM_THREADS": "1"}
        with log.open("a") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self._space(name), sys.executable, "-m", *command],
                stdout=file, stderr=file, env={**os.environ, **where, **variables},
            )  # fmt: skip

    def run(
        self, name: str, command: Sequence[str], variables: Mapping[str, str]
    ) -> "subprocess.Popen[str]":
        """Start a command on a host; what it prints can be read."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self._space(name), *command],
            stdout=subprocess.PIPE, text=True, env={**os.environ, **variables},
        )  # fmt: skip

    def processes(self, name: str) -> list[int]:
        """Return the processes of a host."""
        done = subprocess.run(
            ["ip", "netns", "pids", self._space(name)],
            capture_output=True, text=True, check=True, timeout=30,
        )  # fmt: skip
        return [int(pid) for pid in done.stdout.split()]

    def cut(self, name: str) -> None:
        """Pull a host's wire out: what is sent to it is lost without a word."""
        _ip("-n", self._space(name), "link", "set", self.devices[name], "down")

    def end(self, name: str) -> None:
        """Kill all processes of a host at once, and take away its memory."""
        deadline = time.monotonic() + 30.0
        while found := self.processes(name):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise SystemExit(f"processes {found} of host {name} do not end")
            time.sleep(0.05)
        shutil.rmtree(self.memory(name), ignore_errors=True)

    @property
    def _switch(self) -> str:
        return f"{self._mark}-switch"

    def _space(self, name: str) -> str:
        return f"{self._mark}-{name}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=30)
