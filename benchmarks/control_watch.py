"""How the processes of the control plane's benchmark hear from each other: shared times, counts and
gates."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.sharedctypes import RawArray, RawValue
from typing import Any

NOTED = (
    "opened", "begun", "joined", "stepped", "verified", "ready", "restored", "proceeded",
    "stepped_after",
)  # fmt: skip
"""Moments of a host."""
COUNTED = ("retries", "expelled", "gave_up")
GATES = ("join", "move", "restore")
"""What hosts wait for until the benchmark opens it."""
GATE_S = 0.02
AT_ONCE = 4
"""Hosts of a process that pass a gate at once. A thousand that do are not a thousand machines here,
but two cores, and whoever waits for one of them counts as silent."""


class Watch:
    """Moments of all hosts by the one clock of the machine (0: not yet), and gates.

    Args:
        hosts: How many there are.
        processes: Of hosts; each counts for itself.
    """

    def __init__(self, hosts: int, processes: int) -> None:
        self._recorded = {name: RawArray("d", hosts) for name in NOTED}
        self._counted = {name: RawArray("q", processes) for name in COUNTED}
        self._gates = {name: RawValue("b", 0) for name in GATES}
        self._process = 0
        self._mutex = threading.Lock()
        self._waiting: dict[str, list[Callable[[], Any]]] = {}

    # ------------------------------------------------------------------ the benchmark

    def open(self, gate: str) -> None:
        """Let the hosts pass."""
        self._gates[gate].value = 1

    def is_open(self, gate: str) -> bool:
        return bool(self._gates[gate].value)

    def first(self, name: str) -> float:
        """Return when the first host had come so far."""
        return float(min(at for at in self._recorded[name] if at))

    def last(self, name: str) -> float:
        """Return when the last host had come so far."""
        return float(max(self._recorded[name]))

    def came(self, name: str, hosts: Sequence[int]) -> list[int]:
        """Return which of these hosts have come so far."""
        noted = self._recorded[name]
        return [host for host in hosts if noted[host]]

    def counts(self) -> Counter[str]:
        """Return what all processes have counted."""
        return Counter({name: sum(values) for name, values in self._counted.items()})

    # ------------------------------------------------------------------ a process of hosts

    def begin(self, process: int) -> None:
        """This process is this one."""
        self._process = process

    def note(self, name: str, host: int) -> None:
        """A host has come so far now."""
        self._recorded[name][host] = time.monotonic()

    def count(self, name: str) -> None:
        with self._mutex:
            self._counted[name][self._process] += 1

    def say(self, text: str) -> None:
        """Write a line to standard error."""
        print(text, file=sys.stderr, flush=True)

    def when(self, gate: str, do: Callable[[], Any]) -> None:
        """Do something once a gate is open."""
        with self._mutex:
            self._waiting.setdefault(gate, []).append(do)

    def pass_gates(self) -> None:
        """Do what waits for gates that are open; a few hosts each time."""
        for gate in GATES:
            if self.is_open(gate):
                with self._mutex:
                    waiting = self._waiting.get(gate, [])
                    due, self._waiting[gate] = waiting[:AT_ONCE], waiting[AT_ONCE:]
                for do in due:
                    do()

    def wait(self, gate: str) -> None:
        """Wait for a gate. The processes of hosts end with the benchmark."""
        while not self.is_open(gate):
            time.sleep(GATE_S)
