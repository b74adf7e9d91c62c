"""Hosts that see each other only over a wire: network namespaces of this machine, joined by a pair
of virtual Ethernet devices, more than two by a switch, each with a /dev/shm of its own."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.agents import TINY_JOB, Agents

PORT = 29400
SWITCH = "switch"
TOKEN = "0123456789abcdef0123456789abcdef"


class NetworkHosts:
    """Hosts on one wire: ``addresses`` by name. Use it as a context; at its end they are gone.

    Two need no bridge: a pair of devices is a wire with two ends.
    """

    def __init__(self, names: Sequence[str] = ("h1", "h2")) -> None:
        self._mark = f"sc{os.getpid()}"
        self.addresses = {name: f"192.0.2.{at}" for at, name in enumerate(names, 1)}
        self.devices = {name: f"{self._mark}v{at}"[-15:] for at, name in enumerate(names, 1)}

    @staticmethod
    def obstacle() -> str | None:
        """Return why there can be none here, or None."""
        if os.geteuid() != 0:
            return "network namespaces need root"
        if shutil.which("ip") is None or shutil.which("unshare") is None:
            return "needs ip and unshare"
        name = f"sctry{os.getpid()}"
        if _ip("netns", "add", name, check=False):
            return "this machine lets nobody make network namespaces"
        failed = _ip(
            "link", "add", f"{name}a"[-15:], "netns", name, "type", "veth",
            "peer", "name", f"{name}b"[-15:], "netns", name, check=False,
        )  # fmt: skip
        _ip("netns", "del", name, check=False)
        return "this machine has no virtual Ethernet devices" if failed else None

    def __enter__(self) -> "NetworkHosts":
        for name in self.addresses:
            _ip("netns", "add", self.space(name))
        if len(self.devices) == 2:
            (first, here), (second, there) = self.devices.items()
            _ip("link", "add", here, "netns", self.space(first), "type", "veth",
                "peer", "name", there, "netns", self.space(second))  # fmt: skip
        else:
            self._plug_into_switch()
        for name, address in self.addresses.items():
            space, device = self.space(name), self.devices[name]
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", device)
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.addresses:
            self.kill(name)
            _ip("netns", "del", self.space(name), check=False)
        if len(self.devices) != 2:
            _ip("netns", "del", self.space(SWITCH), check=False)

    def _plug_into_switch(self) -> None:
        _ip("netns", "add", self.space(SWITCH))
        _ip("-n", self.space(SWITCH), "link", "add", SWITCH, "type", "bridge")
        _ip("-n", self.space(SWITCH), "link", "set", SWITCH, "up")
        for name, device in self.devices.items():
            _ip("link", "add", device, "netns", self.space(name), "type", "veth",
                "peer", "name", name, "netns", self.space(SWITCH))  # fmt: skip
            _ip("-n", self.space(SWITCH), "link", "set", "dev", name, "up", "master", SWITCH)

    def on(self, name: str, command: Sequence[str]) -> list[str]:
        """Return a command that runs on a host; the process that it starts is the command's own."""
        own_memory = 'mount -t tmpfs -o size=1g tmpfs /dev/shm && exec "$@"'
        space = ["ip", "netns", "exec", self.space(name), "unshare", "--mount"]
        return [*space, "sh", "-c", own_memory, "sh", *command]

    def kill(self, name: str) -> None:
        """A host dies: all of its processes end at once, and nobody hears of it where its wire is
        pulled out before."""
        self.send(name, signal.SIGKILL)

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to all processes of a host."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.space(name)],
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), number)

    def set_link(self, name: str, *, up: bool) -> None:
        """Plug a host's wire in, or pull it out."""
        state = "up" if up else "down"
        _ip("-n", self.space(name), "link", "set", self.devices[name], state)

    def sever(self, one: str, other: str, *, is_cut: bool = True) -> None:
        """Have what two hosts send each other get lost, or arrive again; others hear both."""
        for near, far in ((one, other), (other, one)):
            words = ["-n", self.space(near), "neigh"]
            address, device = self.addresses[far], self.devices[near]
            if is_cut:
                nowhere = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
                _ip(*words, "replace", address, *nowhere, "dev", device)
            else:
                _ip(*words, "del", address, "dev", device)

    def space(self, name: str) -> str:
        """Return the name of a host's network namespace."""
        return f"{self._mark}-{name}"


class NetworkAgents(Agents):
    """Agents of one job on ``NetworkHosts``. The first host runs the coordinator."""

    def __init__(self, hosts: NetworkHosts, folder: Path, *arguments: Any, **settings: Any) -> None:
        self._hosts = hosts
        super().__init__(folder, *arguments, **settings)
        first = next(iter(hosts.addresses.values()))
        self.launcher += ["--coordinator", f"{first}:{PORT}"]

    def _on(self, host: str, command: list[str]) -> list[str]:
        return self._hosts.on(host, command)

    def call(self, host: str, *arguments: str) -> str:
        """Run ``scalai`` on a host against the job's coordinator. Returns what it prints."""
        first = next(iter(self._hosts.addresses.values()))
        command = [sys.executable, "-m", "scalai.launch.cli", *arguments]
        done = subprocess.run(
            self._hosts.on(host, [*command, "--job", self.job, "--coordinator", f"{first}:{PORT}"]),
            capture_output=True, text=True, check=True, timeout=60,
            env={**os.environ, "SCALAI_JOB_TOKEN": TOKEN},
        )  # fmt: skip
        return done.stdout


@contextlib.contextmanager
def network_agents(
    folder: Path,
    degrees: str,
    *,
    step_s: float = 0.02,
    names: Sequence[str] = ("h1", "h2"),
    **settings: Any,
) -> Iterator[tuple[NetworkAgents, NetworkHosts]]:
    """Give agents of the tiny job on some hosts, and these hosts."""
    script = [
        str(TINY_JOB), "--steps", "100000", "--step-s", str(step_s),
        "--metrics", str(folder / "metrics.jsonl"),
    ]  # fmt: skip
    environment = {"SCALAI_JOB_TOKEN": TOKEN}
    with NetworkHosts(names) as hosts:
        agents = NetworkAgents(hosts, folder, degrees, script, environment=environment, **settings)
        with agents:
            yield agents, hosts


def _ip(*arguments: str, check: bool = True) -> int:
    done = subprocess.run(["ip", *arguments], capture_output=not check, check=check, timeout=30)
    return done.returncode
