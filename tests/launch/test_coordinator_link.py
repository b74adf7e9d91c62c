"""An agent's link to its coordinator: nothing waits, nothing is lost, nothing arrives twice."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalai.core.errors import PeerError, SilentError
from scalai.core.job.membership import Phase
from scalai.core.messages import actions
from scalai.core.messages.commands import Command, Drop, Exit
from scalai.core.messages.reports import Leaving, Moved
from scalai.core.messages.shared import JsonText, Named
from scalai.launch.agent.coordinator_line import RETRY_S, Health, Waits
from scalai.launch.agent.coordinator_line import Line as CoordinatorLine
from scalai.launch.agent.link import CoordinatorLink
from scalai.launch.coordinator.calls import Bye, Commands, Join, StoreIdentity
from scalai.launch.coordinator.discovery import Place
from scalai.runtime.calls import Server
from support.coordinator_line import QUICK, TOKEN, Line, Relay, wait_until
from support.stranger import HTTP, Stranger, other_release

pytestmark = pytest.mark.fault

BYE = Bye("j", "a", "i")
IMPATIENT = Waits(connect_s=1.0, poll_s=0.5, dead_s=0.5)


class SlowServer:
    """Answers every call after a while."""

    def __init__(self, answer_s: float) -> None:
        self.answer_s = answer_s
        self._server = Server(("127.0.0.1", 0), TOKEN, Bye, self._handle)
        address = self._server.address
        assert not isinstance(address, str)
        self.place = Place(address, TOKEN)
        self.close = self._server.close

    def _handle(self, peer: object, request: Bye) -> None:
        time.sleep(self.answer_s)


class NoWorkers:
    """What a link asks of the workers of a host."""

    round = group = None


class LinkedAgent:
    """The link of host ``a``, and what came of it: everything runs in the threads that call."""

    def __init__(
        self,
        line: Line,
        address: tuple[str, int],
        silence_s: float = 60.0,
        waits: Waits = Waits(),  # noqa: B008  # it is frozen
    ) -> None:
        self._line = line
        self.commands: list[Command] = []
        self.lost: list[PeerError] = []
        self.expelled: list[PeerError] = []
        self.rejoined = threading.Event()
        self._mutex = threading.Lock()
        self.link = CoordinatorLink(
            Place(address, TOKEN), "j", "a", silence_s, self._put,
            self.lost.append, self.expelled.append, waits,
        )  # fmt: skip
        self.link.join(self.brings())
        self.follow()

    def brings(self, spec: Any = None) -> Callable[[str], Join]:
        text = JsonText.of(spec or self._line.spec.to_json())
        address, store = ("127.0.0.1", 1), StoreIdentity("machine", 1, 0)
        return lambda incarnation: Join("j", "a", incarnation, store, 2, address, (), (), (), text)

    def follow(self) -> None:
        present: Any = NoWorkers()
        self.link.follow(present, self.commands.append)

    def notes(self) -> list[int]:
        return [command.generation for command in self.commands if isinstance(command, Drop)]

    def _put(self, work: Callable[[], None]) -> None:
        with self._mutex:
            work()


class Heard:
    """What the coordinator hears, in place of what it does about it."""

    def __init__(self, line: Line) -> None:
        self.numbers: list[int] = []
        line.coordinator._agent_events.hear = (  # type: ignore[method-assign]
            lambda host, report, manifests: self.numbers.append(report.bytes)  # type: ignore[union-attr]
        )


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    flags = ("--nnodes", "1:3", "--settle-s", "0.2", "--max-restarts", "9")
    line = Line(tmp_path, *flags, patience=replace(QUICK, grace_s=20.0))
    yield line
    line.coordinator._losses._patience = replace(QUICK, grace_s=0.0)  # the test need not wait
    line.end()


@pytest.fixture
def relay(line: Line) -> Iterator[Relay]:
    assert not isinstance(line.coordinator.address, str)
    relay = Relay(line.coordinator.address)
    yield relay
    relay.close()


def command(line: Line, number: int) -> None:
    with line.coordinator._lock:
        line.coordinator._live.command(["a"], Drop(number))


def test_resets_cost_nothing(line: Line, relay: Relay) -> None:
    """Each event and each command arrives once, in order, whatever the connections go through."""
    heard, agent = Heard(line), LinkedAgent(line, relay.address)
    for number in range(60):
        agent.link.tell(Moved(1, number))
        command(line, number)
        if number % 6 == 5:
            relay.cut()
        time.sleep(0.01)
    expected = list(range(60))
    wait_until(lambda: heard.numbers[-1:] == [59] and agent.notes()[-1:] == [59], "all arrives")
    assert heard.numbers == expected == agent.notes()
    assert not agent.lost and not agent.expelled
    assert not any("event=lost" in text for text in line.log)
    agent.link.close()


def test_a_silent_coordinator_holds_nobody_up(
    line: Line, relay: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    heard, agent = Heard(line), LinkedAgent(line, relay.address, waits=IMPATIENT)
    wait_until(lambda: "a" in line.coordinator._live.members, "it has joined")
    relay.freeze()
    wait_until(lambda: agent.link.silence_s is not None, "the silence is noticed")
    agent.link.tell(Moved(1, 1))  # returns
    command(line, 1)
    relay.thaw()
    wait_until(lambda: heard.numbers == [1] and agent.notes() == [1], "all arrives")
    wait_until(lambda: agent.link.silence_s is None, "it is back")
    assert "event=coordinator_silent" in caplog.text and "event=coordinator_back" in caplog.text
    assert not agent.lost
    agent.link.close()


def test_a_coordinator_that_is_silent_for_too_long_is_lost(line: Line, relay: Relay) -> None:
    agent = LinkedAgent(line, relay.address, silence_s=1.0, waits=IMPATIENT)
    relay.freeze()
    wait_until(lambda: bool(agent.lost), "it is lost")
    assert "silent for" in str(agent.lost[0])
    agent.link.close()


def test_a_dead_coordinator_is_lost(line: Line, relay: Relay) -> None:
    agent = LinkedAgent(line, relay.address, waits=IMPATIENT)
    relay.close()
    wait_until(lambda: bool(agent.lost), "it is lost")
    assert "nobody answers" in str(agent.lost[0]) and len(agent.lost) == 1
    agent.link.close()


def expelled_agent(line: Line, relay: Relay) -> LinkedAgent:
    """Return an agent that was told that its host is not in the job any more."""
    agent = LinkedAgent(line, relay.address)
    with line.coordinator._lock:
        line.coordinator._live.lose("a")
    wait_until(lambda: bool(agent.expelled), "it is told")
    return agent


def test_an_agent_that_was_lost_may_join_again(line: Line, relay: Relay) -> None:
    agent = expelled_agent(line, relay)
    assert "not in the job (any more)" in str(agent.expelled[0])
    agent.link.rejoin(agent.brings(), agent.rejoined.set)
    wait_until(agent.rejoined.is_set, "it has joined again")
    agent.follow()
    command(line, 7)
    wait_until(lambda: agent.notes() == [7], "it gets commands")
    assert len(agent.expelled) == 1 and not agent.lost
    agent.link.close()


def test_an_agent_that_may_not_join_again_learns_why(line: Line, relay: Relay) -> None:
    agent = expelled_agent(line, relay)
    other = line.join("a", store=["another", 1])
    spec = {"argv": [], "elastic_text": "", "deepspeed": 1}
    agent.link.rejoin(agent.brings(spec), agent.rejoined.set)
    wait_until(lambda: bool(agent.lost), "it is refused")
    assert not agent.rejoined.is_set()
    agent.link.close()
    other.leave()


def finish(line: Line, code: int = 0) -> None:
    """Bring the job to its end."""
    with line.coordinator._lock:
        live = line.coordinator._live
        live.state = replace(live.state, phase=Phase.ENDED)
        live._perform(actions.EndJob(live.members.hosts(), code, "the test ends it"))


def exits(agent: LinkedAgent) -> list[int]:
    return [command.code for command in agent.commands if isinstance(command, Exit)]


@pytest.mark.parametrize("code", [0, 75])
def test_an_agent_whose_connections_break_as_the_job_ends_learns_how_it_ended(
    line: Line, relay: Relay, code: int
) -> None:
    agent = LinkedAgent(line, relay.address)
    relay.bar()
    members = line.coordinator._live.members
    wait_until(lambda: members["a"].unlinked_s() is not None, "it is cut off")
    finish(line, code)
    line.thread.join(1.0)  # its ticks go on meanwhile, or it has ended
    relay.admit()
    wait_until(lambda: exits(agent) == [code] or bool(agent.lost + agent.expelled), "it is told")
    assert exits(agent) == [code] and not agent.lost and not agent.expelled
    agent.link.close()
    line.thread.join(60.0)
    assert line.code == [code]


@pytest.mark.parametrize("code", [0, 75])
def test_an_agent_that_was_lost_before_the_job_ended_learns_how_it_ended(
    line: Line, relay: Relay, code: int
) -> None:
    """Told that it is not in the job any more, or on its way to join it again."""
    stays = line.join("b")
    agent = LinkedAgent(line, relay.address)
    relay.freeze()
    with line.coordinator._lock:
        line.coordinator._live.lose("a")
    stays.pause()  # the farewell goes on
    finish(line, code)
    relay.thaw()
    wait_until(lambda: exits(agent) == [code] or bool(agent.lost + agent.expelled), "it is told")
    assert exits(agent) == [code] and not agent.lost and not agent.expelled
    agent.link.close()
    stays.go_on()


def test_an_agent_that_joins_again_after_the_end_learns_how_it_ended(
    line: Line, relay: Relay
) -> None:
    stays = line.join("b")
    agent = expelled_agent(line, relay)
    stays.pause()
    finish(line)
    agent.link.rejoin(agent.brings(), agent.rejoined.set)
    wait_until(lambda: exits(agent) == [0] or bool(agent.lost), "it is told")
    assert exits(agent) == [0] and not agent.lost and not agent.rejoined.is_set()
    agent.link.close()
    stays.go_on()


def test_an_agent_takes_no_farewell_of_a_job_that_it_was_no_part_of(
    line: Line, relay: Relay, tmp_path: Path
) -> None:
    """Another job, or a new run of it, has the endpoint and the secret now: its end would have this
    host give up a state."""
    (tmp_path / "other").mkdir()
    other = Line(tmp_path / "other", "--nnodes", "1:3", "--settle-s", "0.2")
    stays = other.join("b")
    stays.wait_for("start")
    stays.pause()  # the farewell goes on
    finish(other)
    agent = LinkedAgent(line, relay.address)
    assert not isinstance(other.coordinator.address, str)
    relay.lead_to(other.coordinator.address)
    wait_until(lambda: bool(agent.expelled) or bool(exits(agent)), "it is told")
    assert not exits(agent) and "join it" in str(agent.expelled[0])
    agent.link.rejoin(agent.brings(), agent.rejoined.set)
    wait_until(lambda: bool(agent.lost) or bool(exits(agent)), "it is refused")
    assert not exits(agent) and not agent.rejoined.is_set()
    agent.link.close()
    stays.go_on()
    other.end()


def test_an_exit_that_comes_late_is_no_exit_of_an_agent_that_has_joined_again(
    line: Line, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = LinkedAgent(line, relay.address)
    old, asked, answers = agent.link._member, threading.Event(), threading.Event()

    def answer_late(request: object) -> Commands:
        asked.set()
        assert answers.wait(60.0)
        return Commands(1, old.received + 1, (Named(Exit(0, "late")),), 0.1)

    monkeypatch.setattr(old.polls, "try_call", answer_late)
    wait_until(asked.is_set, "it waits for commands")
    with line.coordinator._lock:
        line.coordinator._live.lose("a")
    agent.link.tell(Leaving())
    wait_until(lambda: bool(agent.expelled), "it is told")
    agent.link.rejoin(agent.brings(), agent.rejoined.set)
    wait_until(agent.rejoined.is_set, "it has joined again")
    agent.follow()
    answers.set()
    for thread in old.threads:
        thread.join(60.0)
    for number in range(3):
        command(line, number)
        wait_until(lambda: agent.notes() == [*range(number + 1)], "it gets commands")  # noqa: B023
    assert not exits(agent) and all(thread.is_alive() for thread in agent.link._member.threads)
    agent.link.close()


def test_an_agent_that_ends_delivers_what_it_has_told_and_says_goodbye(
    line: Line, relay: Relay
) -> None:
    heard, agent = Heard(line), LinkedAgent(line, relay.address)
    for number in range(20):
        agent.link.tell(Moved(1, number))
    agent.link.close()
    assert heard.numbers == list(range(20))
    wait_until(lambda: any("event=bye host=a" in text for text in line.log), "it is gone")


def test_a_join_waits_for_a_coordinator_that_is_not_ready_yet(line: Line, relay: Relay) -> None:
    """Its rendezvous store imports torch from a slow disk, say."""
    line.coordinator._stores.wait_ready = lambda: time.sleep(1.0)  # type: ignore[method-assign]
    agent = LinkedAgent(line, relay.address, waits=Waits(tell_s=0.2))
    assert "a" in line.coordinator._live.members
    agent.link.close()


def test_a_join_knocks_again_where_the_coordinator_is_busy_with_others(
    line: Line, relay: Relay
) -> None:
    relay.freeze()
    threading.Timer(0.5, relay.thaw).start()
    agent = LinkedAgent(line, relay.address, waits=Waits(connect_s=0.2))
    assert "a" in line.coordinator._live.members
    agent.link.close()


def test_a_join_does_not_knock_for_ever(line: Line, relay: Relay) -> None:
    relay.freeze()
    with pytest.raises(SilentError):
        LinkedAgent(line, relay.address, waits=Waits(connect_s=0.1, knock_s=0.5))


def test_an_answer_that_takes_longer_than_expected_arrives_all_the_same() -> None:
    server = SlowServer(0.3)
    line = CoordinatorLine(server.place, 4.0, 0.1, Health(60.0, 3.0), threading.Event())
    line.call(BYE)
    assert line._wait_s == 0.1  # of the next one
    line.cut()
    server.close()


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
        wait_until(lambda: health.silence_s() is not None, "it counts as silent")
        time.sleep(4 * RETRY_S)
        assert not ended, "a stranger has ended it"
        is_over.set()
        caller.join(60.0)
        assert ended


def test_an_agent_that_stood_still_itself_asks_again_before_it_gives_up() -> None:
    """It was paused for longer than a coordinator may be silent."""
    server = SlowServer(0.3)
    health = Health(0.1, 3.0)
    line = CoordinatorLine(server.place, 4.0, 60.0, health, threading.Event())
    line.call(BYE)
    assert line._channel is not None
    line._channel.close()
    time.sleep(0.2)
    line.call(BYE)
    server.close()
    with pytest.raises(PeerError):
        line.call(BYE)


def test_a_report_that_cannot_be_sent_ends_the_agent(line: Line, relay: Relay) -> None:
    """To try it again would hold back all that is reported behind it, for ever."""
    agent = LinkedAgent(line, relay.address)
    agent.link.tell(Moved(1, 1 << 70))
    wait_until(lambda: bool(agent.lost), "the agent ends")
    assert "cannot be sent" in str(agent.lost[0])
    agent.link.close()


def test_a_thread_of_the_link_that_fails_ends_the_agent(
    line: Line, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in silence: a host that fetches no commands would train on without its job."""
    agent, failed = LinkedAgent(line, relay.address), list[Exception]()
    put = agent.link._put

    def loop(work: Callable[[], None]) -> None:
        try:
            put(work)
        except RuntimeError as error:
            failed.append(error)

    monkeypatch.setattr(agent.link, "_put", loop)
    monkeypatch.setattr(agent.link._member.polls, "try_call", lambda request: {})
    wait_until(lambda: bool(failed), "the loop is told")
    assert "the link to the coordinator has failed" in str(failed[0])
    assert isinstance(failed[0].__cause__, AttributeError)
    agent.link.close()
