"""The agents that the coordinator talks to, and the commands that wait for each."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from scalai.runtime.messages import Peer

LOST_AFTER_S = 15.0
"""An agent polls about once a second; one that is silent for so long is gone with its machine."""

Json = Any


class Agent:
    """What the coordinator keeps of one connected agent.

    ``address`` is where its data plane listens; ``newest`` the furthest step of its workers.
    """

    def __init__(self, peer: Peer, address: tuple[str, int]) -> None:
        self.peer = peer
        self.address = address
        self.newest = 0
        self._commands: list[dict[str, Json]] = []
        self._heard_at = time.monotonic()

    @property
    def has_commands(self) -> bool:
        return bool(self._commands)

    @property
    def is_silent(self) -> bool:
        return time.monotonic() - self._heard_at > LOST_AFTER_S

    def heard(self) -> None:
        """It has called."""
        self._heard_at = time.monotonic()

    def command(self, command: dict[str, Json]) -> None:
        self._commands.append(command)

    def take(self) -> list[dict[str, Json]]:
        """Return the commands that wait, oldest first; they wait no longer."""
        commands, self._commands = self._commands, []
        return commands


class Roster:
    """Agents by host: those that take part, and those that were released and fetch their last
    command. ``wake`` is called when commands wait."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._present: dict[str, Agent] = {}
        self._released: dict[str, Agent] = {}

    def __contains__(self, host: object) -> bool:
        return host in self._present

    def __getitem__(self, host: str) -> Agent:
        return self._present[host]

    def hosts(self) -> tuple[str, ...]:
        return tuple(self._present)

    def add(self, host: str, agent: Agent) -> None:
        self._present[host] = agent

    def find(self, host: str) -> Agent | None:
        """Return the agent of a host that takes part or was released just now."""
        return self._present.get(host) or self._released.get(host)

    def release(self, host: str) -> None:
        """It takes part no longer, but may still fetch its commands."""
        self._released[host] = self._present.pop(host)

    def remove(self, host: str) -> None:
        del self._present[host]

    def left(self, peer: Peer) -> list[str]:
        """A connection has ended: forget it, and return the hosts that took part by it."""
        self._released = {h: a for h, a in self._released.items() if a.peer is not peer}
        return [host for host, agent in self._present.items() if agent.peer is peer]

    def silent(self) -> list[str]:
        return [host for host, agent in self._present.items() if agent.is_silent]

    def newest(self) -> int:
        """Return the furthest step of any worker."""
        return max((agent.newest for agent in self._present.values()), default=0)

    def has_commands(self) -> bool:
        agents = (*self._present.values(), *self._released.values())
        return any(agent.has_commands for agent in agents)

    def command(self, hosts: Iterable[str], command: Mapping[str, Json]) -> None:
        """Queue a command for those of the hosts that take part."""
        for host in hosts:
            if host in self._present:
                self._present[host].command(dict(command))
        self._wake()
