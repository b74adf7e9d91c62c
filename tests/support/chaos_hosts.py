"""Agents of one job, each on a network namespace of this machine, whose stores all lie in one
folder: what strikes them can be told where they are, and reaches no other network."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.agents import Agents
from support.network_namespaces import PORT, TOKEN, NetworkHosts


class ChaosHosts(Agents):
    """The first host runs the coordinator."""

    def __init__(self, hosts: NetworkHosts, folder: Path, *arguments: Any, **settings: Any) -> None:
        self._hosts = hosts
        super().__init__(folder, *arguments, environment={"SCALAI_JOB_TOKEN": TOKEN}, **settings)
        first = next(iter(hosts.addresses.values()))
        self.launcher += ["--coordinator", f"{first}:{PORT}"]

    def _on(self, host: str, command: list[str]) -> list[str]:
        return self.beside(host, command)

    def beside(self, host: str, command: Sequence[str]) -> list[str]:
        """Return a command that runs in the network of a host."""
        return ["ip", "netns", "exec", self._hosts.space(host), *command]
