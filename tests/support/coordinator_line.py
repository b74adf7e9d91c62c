"""A coordinator beside the test, and agents that are threads of it; a relay that can be cut or
frozen."""

import contextlib
import itertools
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scalai.core.errors import PeerError
from scalai.core.messages.reports import Stalled
from scalai.core.messages.shared import JsonText, Named
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.calls import Join, Poll, Tell
from scalai.launch.coordinator.losses import Patience, PortProbe
from scalai.launch.coordinator.named_once import HostLists
from scalai.launch.coordinator.rendezvous_store import RendezvousStores, Then
from scalai.launch.coordinator.server import Coordinator
from scalai.runtime.calls import Channel
from scalai.store.manifest import HostManifest, manifest_bytes
from support.wire_words import report_of, store_identity, told_by

TOKEN = b"secret"
DEADLINE_S = 60.0
QUICK = Patience(grace_s=0.1, poll_s=0.1, kept_s=0.2)
"""The agents here have one connection for good: where it ends they are gone; and they leave when
their poll is answered."""


class NoStores(RendezvousStores):
    """What no worker ever meets at: a process a coordinator would take its time.

    ``late``: who waits for a store, where the test opens them itself; None: each is there at once.
    """

    def __init__(self) -> None:
        self._ports = itertools.count(1)
        self.late: list[Then] | None = None

    def wait_ready(self) -> None: ...

    def open(self, then: Then) -> None:
        if self.late is None:
            then(next(self._ports))
        else:
            self.late.append(then)

    def close(self, port: int) -> None: ...

    def end(self) -> None: ...


class Line:
    """A coordinator that runs beside the test."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        alone_s: float = 60.0,
        patience: Patience = QUICK,
        probe: PortProbe | None = None,
    ) -> None:
        config = folder / "elastic.toml"
        config.write_text("[model]\nglobal_batch_size = 12\n[probe]\nkind = 'none'\n")
        self.flags = ["--elastic", str(config), "--job", "j", "--nproc-per-node", "2", *flags]
        self.spec = JobSpec.read(parse_options([*self.flags, "script.py"]))
        self.log: list[str] = []
        self.coordinator = Coordinator(
            self.spec, ("127.0.0.1", 0), TOKEN, self.log.append, alone_s, patience, NoStores(),
            probe=probe,
        )  # fmt: skip
        self.code: list[int] = []
        self.thread = threading.Thread(
            target=lambda: self.code.append(self.coordinator.run()), daemon=True
        )
        self.thread.start()
        self.agents: list[FakeAgent] = []

    def join(self, host: str, **brings: Any) -> "FakeAgent":
        agent = FakeAgent(self, host, **brings)
        self.agents.append(agent)
        return agent

    def end(self) -> None:
        for agent in self.agents:
            agent.is_gone = True
        for agent in self.agents:
            agent.leave()
        self.coordinator._alone_s = 0.0  # the test need not wait for it
        self.thread.join(DEADLINE_S)
        assert self.code


class FakeAgent:
    """An agent without workers: it fetches commands, and answers those that ``answer`` knows."""

    def __init__(
        self,
        line: Line,
        host: str,
        *,
        parts: tuple[HostManifest, ...] = (),
        sealed: tuple[HostManifest, ...] = (),
        spec: JobSpec | None = None,
        store: Any = None,
        damaged: tuple[tuple[int, str], ...] = (),
        examined: tuple[tuple[int, tuple[str, ...]], ...] = (),
        is_slow: bool = False,
        address: tuple[str, int] = ("127.0.0.1", 1),
    ) -> None:
        self.host, self._line, self._is_slow = host, line, is_slow
        self.parts = {part.generation: part for part in parts}
        self.damage: dict[int, tuple[str, ...]] = {}
        """What it finds when it reads its part of a generation again: all of it goes then."""
        self._calling = threading.Event()
        self._calling.set()
        self.commands: list[dict[str, Any]] = []
        self.is_gone = False
        self.round = 0
        self.stalled: Stalled | None = None
        self.error: PeerError | None = None
        """Why it fetches commands no longer."""
        self.incarnation = secrets.token_hex(4)
        self.unanswered: set[str] = set()
        """Commands that it leaves to the test to answer."""
        self._reported, self._received = 0, 0
        self._telling = threading.Lock()
        self._calls, self._polls = (
            Channel(line.coordinator.address, TOKEN, call_s=DEADLINE_S, connect_s=DEADLINE_S)
            for _ in range(2)
        )
        named = HostLists()
        joined = self._calls.call(
            Join(
                job="j", host=host, damaged=damaged, examined=examined,
                incarnation=self.incarnation,
                store=store_identity(store), slots=2, address=address,
                parts=named.take(map(manifest_bytes, parts)),
                sealed=named.take(map(manifest_bytes, sealed)), hosts=named.lists,
                spec=JsonText.of((spec or line.spec).to_json()),
            )
        )  # fmt: skip
        self.answer = asdict(joined)
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """The agent dies."""
        self.is_gone = True
        self._calling.set()
        self._thread.join(DEADLINE_S)
        self._polls.close()
        self._calls.close()

    def pause(self) -> None:
        """It calls nobody any more; its connections stay."""
        self._calling.clear()

    def go_on(self) -> None:
        """After a pause."""
        self._calling.set()

    def tell(self, event: str, **facts: Any) -> None:
        with self._telling:  # the test and the polling thread both tell, in the order of numbers
            self._reported += 1
            if event == "prepared":
                facts.setdefault("round", self.round)
            report = Named(report_of(event, **facts))
            self._calls.call(Tell("j", self.host, self.incarnation, self._reported, report))

    def heard(self, name: str) -> list[dict[str, Any]]:
        """Return the commands of a kind so far."""
        return [command for command in self.commands if command["command"] == name]

    def wait_for(self, name: str, count: int = 1) -> dict[str, Any]:
        """Return the ``count``-th command of a kind."""
        wait_until(lambda: len(self.heard(name)) >= count, f"{count} times {name} at {self.host}")
        return self.heard(name)[count - 1]

    def _poll(self) -> None:
        while not self.is_gone:
            self._calling.wait(DEADLINE_S)
            try:
                found = self._polls.call(
                    Poll("j", self.host, self.incarnation, self._received, self.round, 0,
                         self.stalled, 1.0)
                )  # fmt: skip
            except PeerError as error:
                self.error = error
                return
            for command in (told_by(each.message) for each in found.commands):
                self._received += 1
                self.commands.append(command)
                self._answer(command)

    def _answer(self, command: dict[str, Any]) -> None:
        match command["command"]:
            case name if name in self.unanswered:
                return
            case "build":
                self.tell("built", round=command["round"])
            case "start":
                self.round = command["round"]
                if not self._is_slow:
                    self.tell("stepped", round=self.round)
            case "prepare":
                self.tell("prepared", stop=command["stop"], newest=0)
            case "stop":
                self.tell("stopped", round=command["round"], newest=0)
            case "examine":
                number = command["generation"]
                damage, part = self.damage.get(number, ()), self.parts.get(number)
                left = None if damage or part is None else manifest_bytes(part)
                self.tell(
                    "examined", generation=number, damage=damage, directory="/d", manifest=left
                )
            case "commit":
                self.tell("committed", generation=command["generation"])


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.01)


class Relay:
    """A way to a server that can be cut, or frozen: then it takes bytes and hands none on."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._flows = threading.Event()
        self._flows.set()
        self._is_barred = self._is_closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()
        return host, port

    def freeze(self) -> None:
        """Nothing passes any more; connections stay."""
        self._flows.clear()

    def thaw(self) -> None:
        """All passes again, also what came meanwhile."""
        self._flows.set()

    def cut(self) -> None:
        """Reset all connections; new ones pass."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        _reset(sockets)

    def lead_to(self, target: tuple[str, int]) -> None:
        """Reset all connections; new ones lead to another server."""
        with self._lock:
            self._target = target
        self.cut()

    def bar(self) -> None:
        """Reset all connections, and new ones too."""
        self._is_barred = True
        self.cut()

    def admit(self) -> None:
        """New connections pass again."""
        self._is_barred = False

    def close(self) -> None:
        """Nobody listens any more."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.thaw()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                if self._is_barred:
                    near.close()
                    continue
            except OSError:
                return
            wanted = self._target
            try:
                far = socket.create_connection(wanted, timeout=DEADLINE_S)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                if wanted != self._target:  # it leads elsewhere since that moment
                    _reset([near, far])
                    continue
                self._sockets += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, target), daemon=True).start()
            if self._is_closed or self._is_barred:  # it came at that moment
                self.cut()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flows.wait(DEADLINE_S)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _reset(sockets: list[socket.socket]) -> None:
    for end in sockets:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.shutdown(socket.SHUT_RD)
            end.close()
