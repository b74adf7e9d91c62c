"""An agent's link to its coordinator: nothing waits, nothing is lost, nothing arrives twice."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalai.core.errors import PeerError, SilentError, StaleError
from scalai.core.job.membership import Phase
from scalai.core.messages import actions
from scalai.core.messages.commands import Command, Drop, Exit
from scalai.core.messages.reports import Moved
from scalai.core.messages.shared import JsonText, Named
from scalai.launch.agent.link import CoordinatorLink, Health, Waits
from scalai.launch.agent.link import RenewedChannel as CoordinatorLine
from scalai.launch.coordinator.calls import (
    Bye,
    CommandsDue,
    CoordinatorRequest,
    Join,
    Joined,
    Poll,
    StoreIdentity,
    Tell,
)
from scalai.launch.coordinator.discovery import Place
from scalai.runtime.calls import Server
from support.coordinator_line import DEADLINE_S, QUICK, TOKEN, Line, address_of, running
from support.stranger import HTTP, Stranger, other_release
from support.waiting import wait_until

from .conftest import OpenLine

pytestmark = pytest.mark.fault

BYE = Bye("j", "a", "i")
IMPATIENT = Waits(connect_s=1.0, poll_s=0.5, dead_s=0.5)


class Relay:
    """A way to a server that can be cut, or frozen: then it takes bytes and hands none on."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target, self._lock = target, threading.Lock()
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


class NoWorkers:
    """What a link asks of the workers of a host."""

    round = group = None


class LinkedAgent:
    """The link of host ``a``, and what came of it: everything runs in the threads that call."""

    def __init__(
        self,
        address: tuple[str, int],
        spec: Any = None,
        silence_s: float = 60.0,
        waits: Waits = Waits(),  # noqa: B008  # it is frozen
    ) -> None:
        self._spec = spec
        self.commands: list[Command] = []
        self.lost: list[PeerError] = []
        self.expelled: list[PeerError] = []
        self.failed: list[Exception] = []
        self._mutex, self._rejoined = threading.Lock(), threading.Event()
        self.link = CoordinatorLink(
            Place(address, TOKEN), "j", "a", silence_s, self._put,
            self.lost.append, self.expelled.append, waits,
        )  # fmt: skip
        self.link.join(self._brings())

    def _brings(self, spec: Any = None) -> Callable[[str], Join]:
        text = JsonText.of(spec or self._spec)
        address, store = ("127.0.0.1", 1), StoreIdentity("machine", 1, 0)
        return lambda incarnation: Join("j", "a", incarnation, store, 2, address, (), (), (), text)

    def follow(self, present: Any = NoWorkers) -> None:
        self.link.follow(present, self.commands.append)

    def rejoin(self, spec: Any = None) -> None:
        self.link.rejoin(self._brings(spec), self._rejoined.set)

    def has_rejoined(self) -> bool:
        return self._rejoined.is_set()

    def notes(self) -> list[int]:
        return [command.generation for command in self.commands if isinstance(command, Drop)]

    def exits(self) -> list[int]:
        return [command.code for command in self.commands if isinstance(command, Exit)]

    def _put(self, work: Callable[[], None]) -> None:
        with self._mutex:
            try:
                work()
            except RuntimeError as error:
                self.failed.append(error)


class Heard(list[int]):
    """What the coordinator hears, in place of what it does about it."""

    def __init__(self, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
        def hear(host: str, report: Any) -> None:
            self.append(report.bytes)

        monkeypatch.setattr(line.live, "hear", hear)


@pytest.fixture
def line(open_line: OpenLine) -> Iterator[Line]:
    """A coordinator that runs; no time passes for it."""
    with running(open_line(patience=replace(QUICK, poll_s=0.1))) as line:
        yield line


@pytest.fixture
def relay(line: Line) -> Iterator[Relay]:
    with closing(Relay(line.address)) as relay:
        yield relay


@pytest.fixture
def linked(line: Line, relay: Relay) -> Iterator[Callable[..., LinkedAgent]]:
    """Link host ``a`` to the coordinator."""
    agents: list[LinkedAgent] = []

    def link(**how: Any) -> LinkedAgent:
        agents.append(LinkedAgent(relay.address, line.spec.to_json(), **how))
        agents[-1].follow()
        return agents[-1]

    yield link
    for agent in agents:
        agent.link.close()


Linking = Callable[..., LinkedAgent]


def command(line: Line, number: int) -> None:
    with line.coordinator.lock:
        line.live.command(["a"], Drop(number))


def lose(line: Line) -> None:
    with line.coordinator.lock:
        line.live.lose("a")


def test_resets_cost_nothing(
    line: Line, relay: Relay, linked: Linking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each event and each command arrives once, in order, whatever the connections go through."""
    heard, agent = Heard(line, monkeypatch), linked()
    for number in range(60):
        agent.link.tell(Moved(1, number))
        command(line, number)
        if number % 6 == 5:
            wait_until(lambda: len(heard) > number - 6, "some have arrived")  # noqa: B023
            relay.cut()
    wait_until(lambda: heard[-1:] == [59] and agent.notes()[-1:] == [59], "all arrives")
    assert heard == agent.notes() == list(range(60))
    assert not agent.lost and not agent.expelled and not line.logged("event=lost")


def test_a_silent_coordinator_holds_nobody_up(
    line: Line, relay: Relay, linked: Linking, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    caplog.set_level("INFO")
    heard, agent = Heard(line, monkeypatch), linked(waits=IMPATIENT)
    relay.freeze()
    wait_until(lambda: agent.link.silence_s is not None, "the silence is noticed")
    agent.link.tell(Moved(1, 1))  # returns
    command(line, 1)
    relay.thaw()
    wait_until(lambda: heard == [1] == agent.notes(), "all arrives")
    wait_until(lambda: agent.link.silence_s is None, "it is back")
    assert "event=coordinator_silent" in caplog.text and "event=coordinator_back" in caplog.text
    assert not agent.lost


@pytest.mark.parametrize(("is_dead", "said"), [(False, "silent for"), (True, "nobody answers")])
def test_a_coordinator_that_is_dead_or_silent_for_too_long_is_lost(
    relay: Relay, linked: Linking, is_dead: bool, said: str
) -> None:
    agent = linked(silence_s=60.0 if is_dead else 1.0, waits=IMPATIENT)
    relay.close() if is_dead else relay.freeze()
    wait_until(lambda: agent.lost, "it is lost")
    assert said in str(agent.lost[0]) and len(agent.lost) == 1


def expelled_agent(line: Line, linked: Linking) -> LinkedAgent:
    """An agent that was told that its host is not in the job any more."""
    agent = linked()
    lose(line)
    wait_until(lambda: agent.expelled, "it is told")
    return agent


def test_an_agent_that_was_lost_may_join_again(line: Line, linked: Linking) -> None:
    agent = expelled_agent(line, linked)
    assert "not in the job (any more)" in str(agent.expelled[0])
    agent.rejoin()
    wait_until(agent.has_rejoined, "it has joined again")
    agent.follow()
    command(line, 7)
    wait_until(lambda: agent.notes() == [7], "it gets commands")
    assert len(agent.expelled) == 1 and not agent.lost


def test_an_agent_that_may_not_join_again_learns_why(line: Line, linked: Linking) -> None:
    agent = expelled_agent(line, linked)
    agent.rejoin({"argv": [], "elastic_text": "", "deepspeed": 1})
    wait_until(lambda: agent.lost, "it is refused")
    assert not agent.has_rejoined()


def finish(line: Line, code: int = 0) -> None:
    """Bring the job to its end."""
    with line.coordinator.lock:
        live = line.live
        live.state = replace(live.state, phase=Phase.ENDED)
        live.perform(actions.EndJob(live.members.hosts(), code, "the test ends it"))


@pytest.mark.parametrize("code", [0, 75])
@pytest.mark.parametrize("how", ["cut off", "lost", "on its way back"])
def test_an_agent_that_is_away_as_the_job_ends_learns_how_it_ended(
    line: Line, relay: Relay, linked: Linking, how: str, code: int
) -> None:
    """Its connections break, or it is told that it is not in the job any more, or has yet to join
    again: another host has not fetched its exit, so the coordinator stays."""
    line.join("b")
    agent = expelled_agent(line, linked) if how == "on its way back" else linked()
    if how == "cut off":
        relay.bar()
        wait_until(lambda: line.live.members["a"].unlinked_s() is not None, "it is cut off")
    elif how == "lost":
        relay.freeze()
        lose(line)
    finish(line, code)
    told = agent.expelled.copy()
    if how == "on its way back":
        agent.rejoin()
    relay.admit()
    relay.thaw()
    wait_until(lambda: agent.exits() or agent.lost or agent.expelled != told, "it is told")
    assert agent.exits() == [code] and not agent.lost and agent.expelled == told
    assert not agent.has_rejoined()


def test_an_agent_takes_no_farewell_of_a_job_that_it_was_no_part_of(
    relay: Relay, linked: Linking, tmp_path: Path
) -> None:
    """Another job, or a new run of it, has the endpoint and the secret now: its end would have this
    host give up a state."""
    (tmp_path / "other").mkdir()
    agent = linked()
    with running(Line(tmp_path / "other", "--nnodes", "1:3")) as other:
        other.join("b")
        finish(other)
        relay.lead_to(other.address)
        wait_until(lambda: agent.expelled or agent.exits(), "it is told")
        assert not agent.exits() and "join it" in str(agent.expelled[0])
        agent.rejoin()
        wait_until(lambda: agent.lost or agent.exits(), "it is refused")
        assert not agent.exits() and not agent.has_rejoined()


def serving(answer: Callable[[Any], object]) -> "contextlib.closing[Server]":
    """A coordinator that answers as the test says."""
    handle: Any = lambda peer, request: answer(request)  # noqa: E731
    return closing(Server(("127.0.0.1", 0), TOKEN, CoordinatorRequest, handle))


def place_of(server: Server) -> Place:
    return Place(address_of(server), TOKEN)


def test_an_exit_that_comes_late_is_no_exit_of_an_agent_that_has_joined_again() -> None:
    asked, answers, first = threading.Event(), threading.Event(), list[str]()

    def answer(request: CoordinatorRequest) -> object:
        match request:
            case Join():
                first.append(request.incarnation)
                return Joined(1, False, 1)
            case Poll() if request.incarnation == first[0]:
                asked.set()
                assert answers.wait(DEADLINE_S)
                return CommandsDue(1, request.received + 1, (Named(Exit(0, "late")),), 0.1)
            case Poll():
                return CommandsDue(1, request.received + 1, (Named(Drop(request.received)),), 0.1)
            case Tell() | Bye():
                raise StaleError("host 'a' is not in the job (any more).")
        return None

    with serving(answer) as server:
        agent = LinkedAgent(place_of(server).address, {})
        agent.follow()
        assert asked.wait(DEADLINE_S)
        agent.link.tell(Moved(1, 1))
        wait_until(lambda: agent.expelled, "it is told")
        agent.rejoin()
        wait_until(agent.has_rejoined, "it has joined again")
        agent.follow()
        answers.set()
        wait_until(lambda: len(agent.notes()) > 3, "it gets commands")
        assert agent.notes()[:3] == [0, 1, 2] and not agent.exits()
        agent.link.close()


def test_an_agent_that_ends_delivers_what_it_has_told_and_says_goodbye(
    line: Line, linked: Linking, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, agent = Heard(line, monkeypatch), linked()
    for number in range(20):
        agent.link.tell(Moved(1, number))
    agent.link.close()
    assert heard == list(range(20)) and line.logged("event=bye host=a")


def test_a_join_waits_for_a_coordinator_that_is_not_ready_yet(
    line: Line, linked: Linking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rendezvous store imports torch from a slow disk, say."""
    is_ready = threading.Event()
    monkeypatch.setattr(line.stores, "wait_ready", is_ready.wait)
    threading.Timer(1.0, is_ready.set).start()
    linked(waits=Waits(tell_s=0.2))
    assert "a" in line.live.members


def test_a_join_knocks_again_where_the_coordinator_is_busy_and_not_for_ever(
    line: Line, relay: Relay, linked: Linking
) -> None:
    relay.freeze()
    with pytest.raises(SilentError):
        linked(waits=Waits(connect_s=0.1, knock_s=0.5))
    threading.Timer(0.5, relay.thaw).start()
    linked(waits=Waits(connect_s=0.2))
    assert "a" in line.live.members


def test_an_answer_that_takes_longer_than_expected_arrives_all_the_same() -> None:
    def late(request: object) -> None:
        threading.Event().wait(0.3)

    with serving(late) as server:
        line = CoordinatorLine(place_of(server), 4.0, 0.1, Health(60.0, 3.0), threading.Event())
        line.call(BYE)
        line.cut()


def test_an_agent_that_stood_still_itself_asks_again_before_it_gives_up() -> None:
    """It was paused for longer than a coordinator may be silent."""
    with serving(lambda request: None) as server, closing(Relay(place_of(server).address)) as relay:
        place = Place(relay.address, TOKEN)
        line = CoordinatorLine(place, 4.0, 60.0, Health(0.0, 3.0), threading.Event())
        line.call(BYE)
        relay.cut()
        line.call(BYE)
        relay.bar()
        with pytest.raises(PeerError):
            line.call(BYE)
        line.cut()


@pytest.mark.parametrize("answer", [other_release(), HTTP], ids=["v9", "http"])
def test_what_a_stranger_says_is_silence_of_the_coordinator(answer: bytes) -> None:
    with Stranger(answer) as stranger:
        place, is_over, ended = Place(stranger.address, TOKEN), threading.Event(), list[object]()
        health = Health(60.0, 0.0)
        line = CoordinatorLine(place, 4.0, 4.0, health, is_over)

        def call() -> None:
            with pytest.raises(PeerError):
                line.call(BYE)
            ended.append(health.silence_s())

        caller = threading.Thread(target=call)
        caller.start()
        wait_until(lambda: (health.silence_s() or 0.0) > 1.0, "it is silent for many tries")
        assert not ended, "a stranger has ended it"
        is_over.set()
        caller.join(DEADLINE_S)
        assert ended


def test_a_report_that_cannot_be_sent_ends_the_agent(linked: Linking) -> None:
    """To try it again would hold back all that is reported behind it, for ever."""
    agent = linked()
    agent.link.tell(Moved(1, 1 << 70))
    wait_until(lambda: agent.lost, "the agent ends")
    assert "cannot be sent" in str(agent.lost[0])


def test_a_thread_of_the_link_that_fails_ends_the_agent(line: Line, relay: Relay) -> None:
    """Not in silence: a host that fetches no commands would train on without its job."""
    agent = LinkedAgent(relay.address, line.spec.to_json())
    agent.follow(object())  # it has no workers to ask
    wait_until(lambda: agent.failed, "the loop is told")
    assert "the link to the coordinator has failed" in str(agent.failed[0])
    assert isinstance(agent.failed[0].__cause__, AttributeError)
    agent.link.close()
