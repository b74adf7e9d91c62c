"""A coordinator in the test's own thread and time, with agents that answer at the test's word; or
one that runs beside the test."""

import contextlib
import itertools
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scalai.core.errors import ScalaiError
from scalai.core.job.membership import Phase
from scalai.core.messages.reports import Report, Stalled
from scalai.core.messages.shared import JsonText, Named
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.calls import HostLists, Join, Poll, Tell
from scalai.launch.coordinator.losses import Patience, PortProbe
from scalai.launch.coordinator.person_calls import Resume, Scale, Status
from scalai.launch.coordinator.rendezvous_store import RendezvousStores, Then
from scalai.launch.coordinator.server import Coordinator
from scalai.store.manifest import HostManifest, manifest_bytes
from support.lines import Lines
from support.wire_words import report_of, store_identity, told_by

TOKEN = b"secret"
DEADLINE_S = 60.0
WAIT_S = 400.0
"""Longest wait in the test's time: more than any limit of the coordinator here."""
QUICK = Patience(poll_s=0.0, kept_s=0.0)
"""Polls are answered at once."""
MANY = ("--nnodes", "1:4", "--settle-s", "0.2", "--max-restarts", "9")


class NoStores(RendezvousStores):
    """Meeting points without a process; ``late``: those that the test opens itself."""

    def __init__(self) -> None:
        self._ports = itertools.count(1)
        self.late: list[Then] | None = None
        self.closed: list[int] = []

    def wait_ready(self) -> None: ...

    def open(self, then: Then) -> None:
        if self.late is None:
            then(next(self._ports))
        else:
            self.late.append(then)

    def close(self, port: int) -> None:
        self.closed.append(port)

    def end(self) -> None: ...


class Wire:
    """A connection of an agent; ``has_unread``: the coordinator has yet to read a call of it."""

    def __init__(self) -> None:
        self.has_unread = False

    def silence_s(self) -> float:
        return 0.0 if self.has_unread else float("inf")


class Line:
    """A coordinator whose time passes where the test says so.

    Attributes:
        code: Exit code once it has ended.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        alone_s: float = 60.0,
        patience: Patience = QUICK,
        probe: PortProbe | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        config = folder / "elastic.toml"
        config.write_text("[model]\nglobal_batch_size = 12\n[probe]\nkind = 'none'\n")
        self.flags = ["--elastic", str(config), "--job", "j", "--nproc-per-node", "2", *flags]
        self.spec = self.spec_of()
        self.log = Lines()
        self.now = 1000.0
        self.stores = NoStores()
        self.coordinator = Coordinator(
            self.spec, ("127.0.0.1", 0), TOKEN, self.log, alone_s, patience, self.stores,
            probe=probe, clock=clock or (lambda: self.now),
        )  # fmt: skip
        self.live = self.coordinator.live
        self.code: int | None = None
        self.agents: list[FakeAgent] = []
        self._settles = False

    def spec_of(self, *more: str, script: str = "script.py") -> JobSpec:
        """The job of a command line with more flags."""
        return JobSpec.read(parse_options([*self.flags, *more, script]))

    @property
    def phase(self) -> Phase:
        return self.live.state.phase

    @property
    def address(self) -> tuple[str, int]:
        return address_of(self.coordinator)

    def join(self, host: str, **brings: Any) -> "FakeAgent":
        agent = FakeAgent(self, host, **brings)
        self.agents.append(agent)
        self.settle()
        return agent

    def settle(self) -> None:
        """Let agents fetch and answer until there is nothing more."""
        if not self._settles:
            self._settles = True
            while any([agent.fetch() for agent in self.agents]):
                pass
            self._settles = False

    def pass_time(self, seconds: float) -> None:
        """Let time pass by looks of the coordinator; agents poll meanwhile."""
        end = self.now + seconds
        while self.now < end and self.code is None:
            self.now = min(end, self.now + self.coordinator.tick_s())
            self.code = self.coordinator.look()
            self.settle()

    def until(self, is_so: Callable[[], object], what: str) -> None:
        """Let time pass until something is so."""
        self.settle()
        end = self.now + WAIT_S
        while not is_so():
            assert self.now < end and self.code is None, f"never: {what}\n" + "\n".join(self.log)
            self.pass_time(self.coordinator.tick_s())

    def logged(self, *words: str) -> list[str]:
        """Log lines with all of these words."""
        return [line for line in self.log if all(word in line for word in words)]

    def ask(self, call: Any) -> Any:
        """Answer to a person's call."""
        person: Any = Wire()
        found = self.coordinator.handle(person, call)
        self.settle()
        assert isinstance(found, JsonText)
        return found.value()

    def scale(self, nproc: int) -> Any:
        return self.ask(Scale(nproc, None, None, dry_run=False))

    def resume(self, generation: int, *, dry_run: bool = False) -> str:
        return str(self.ask(Resume(generation, dry_run=dry_run))["reason"])

    def status(self) -> Any:
        return self.ask(Status())

    def close(self) -> None:
        self.coordinator.close()


@contextlib.contextmanager
def running(line: Line) -> Iterator[Line]:
    """Have a coordinator run in a thread beside the test, in real time."""

    def run() -> None:
        while line.code is None and not is_over.wait(line.coordinator.tick_s()):
            line.code = line.coordinator.look()

    is_over, thread = threading.Event(), threading.Thread(target=run)
    thread.start()
    try:
        yield line
    finally:
        is_over.set()
        thread.join(DEADLINE_S)
        line.close()


class FakeAgent:
    """An agent without workers: it fetches commands, and answers those that it knows.

    Attributes:
        unanswered: Commands for the test to answer.
        damage: Damage found by a second look, by generation; all of the part goes then.
        error: Reason of its last poll's failure.
    """

    def __init__(
        self,
        line: Line,
        host: str,
        *,
        parts: tuple[HostManifest, ...] = (),
        sealed: tuple[HostManifest, ...] = (),
        spec: JobSpec | None = None,
        store: Any = None,
        is_slow: bool = False,
        **facts: Any,
    ) -> None:
        self.host, self._line, self._is_slow = host, line, is_slow
        self.parts = {part.generation: part for part in parts}
        self.damage: dict[int, tuple[str, ...]] = {}
        self.commands: list[dict[str, Any]] = []
        self.is_gone = self.is_paused = False
        self.round = 0
        self.stalled: Stalled | None = None
        self.error: ScalaiError | None = None
        self.incarnation = secrets.token_hex(4)
        self.unanswered: set[str] = set()
        self.wire: Any = Wire()
        self._reported = self._received = 0
        named = HostLists()
        given: dict[str, Any] = {"address": ("127.0.0.1", 1), "damaged": (), **facts}
        joined = self.call(
            Join(
                job="j", host=host, incarnation=self.incarnation, store=store_identity(store),
                slots=2, parts=named.take(map(manifest_bytes, parts)),
                sealed=named.take(map(manifest_bytes, sealed)), hosts=named.lists,
                spec=JsonText.of((spec or line.spec).to_json()), **given,
            )
        )  # fmt: skip
        self.answer = asdict(joined)

    def call(self, call: Any) -> Any:
        return self._line.coordinator.handle(self.wire, call)

    def leave(self) -> None:
        """The agent dies: its connection ends."""
        self.is_gone = True
        self._line.coordinator.gone(self.wire)

    def die(self) -> None:
        """It dies, and is lost once it has had the time to come back."""
        self.leave()
        self._line.until(lambda: self.host not in self._line.live.members, f"{self.host} is lost")

    def tell(self, event: str, **facts: Any) -> None:
        if event in ("prepared", "stepped", "sealed", "stopped", "finished"):
            facts.setdefault("round", self.round)
        self.report(self._reported + 1, report_of(event, **facts))
        self._line.settle()

    def report(self, number: int, report: Report) -> None:
        self._reported = max(self._reported, number)
        self.call(Tell("j", self.host, self.incarnation, number, Named(report)))

    def seal(self, part: HostManifest, reason: str = "snapshot", **facts: Any) -> None:
        self.tell("sealed", reason=reason, part=manifest_bytes(part), seconds={}, **facts)

    def heard(self, name: str) -> list[dict[str, Any]]:
        """Commands of a kind so far."""
        return [command for command in self.commands if command["command"] == name]

    def wait_for(self, name: str, count: int = 1) -> dict[str, Any]:
        """The ``count``-th command of a kind."""
        self._line.until(
            lambda: len(self.heard(name)) >= count, f"{count} times {name} at {self.host}"
        )
        return self.heard(name)[count - 1]

    def fetch(self) -> bool:
        """Poll once and answer the commands. Whether there were any."""
        if self.is_gone or self.is_paused or self.error is not None:
            return False
        received = self._received
        try:
            found = self.call(
                Poll("j", self.host, self.incarnation, received, self.round, 0, self.stalled, 0.0)
            )
        except ScalaiError as error:
            self.error = error
            return False
        for command in (told_by(each.message) for each in found.commands):
            self._received += 1
            self.commands.append(command)
            self._answer(command)
        return self._received > received

    def _answer(self, command: dict[str, Any]) -> None:
        match command["command"]:
            case name if name in self.unanswered:
                return
            case "build":
                self.tell("built", round=command["round"])
            case "start":
                self.round = command["round"]
                if not self._is_slow:
                    self.tell("stepped")
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


def address_of(server: Any) -> tuple[str, int]:
    """Where a server listens, or a coordinator."""
    host, port = server.address
    return host, port
