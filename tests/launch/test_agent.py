"""An agent without processes: the loop around the law, with hands that note what they are to do."""

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalai.core.errors import PeerError, StoreError
from scalai.core.host import actions, events
from scalai.core.host.actions import Action
from scalai.core.host.events import Event
from scalai.core.host.rounds import ENDED
from scalai.core.host.state import HostSettings, HostState, Round
from scalai.core.messages import commands, reports
from scalai.core.messages.worker_messages import Hello
from scalai.core.tensors.collection import Collection
from scalai.launch.agent.loop import Agent, Loop
from scalai.launch.agent.participant import OpenResources, Participant
from scalai.launch.agent.worker_group import WorkerGroup
from scalai.store.manifest import manifest_bytes
from support.listed import part_of
from support.wire_words import start

DEADLINE_S = 60.0


class NotingHands:
    """Carries nothing out; some actions fail, or are answered."""

    def __init__(self) -> None:
        self.done: list[Action] = []
        self.failing: tuple[type, Exception] | None = None
        self.results: dict[type, list[Event]] = {}
        self.held: frozenset[int] = frozenset()
        self.calls: list[Future[Any]] = []

    @property
    def groups(self) -> Mapping[int, WorkerGroup]:
        return {}

    def generations(self) -> frozenset[int]:
        return self.held

    def seen(self, current: Round | None) -> events.GroupSeen | None:
        return None

    def arrivals(self) -> Iterable[Event]:
        return ()

    def take_call(self, answer: "Future[Any]") -> int:
        self.calls.append(answer)
        return len(self.calls)

    def perform(self, action: Action) -> Iterable[Event]:
        if self.failing is not None and isinstance(action, self.failing[0]):
            raise self.failing[1]
        self.done.append(action)
        return self.results.get(type(action), ())


class Made:
    """An agent that is built of parts, and runs in no thread of its own."""

    def __init__(self) -> None:
        self.hands, self.loop = NotingHands(), Loop()
        state = HostState(HostSettings("a", True, 9.0), 2, time.monotonic())
        self.agent = Agent(state, self.hands, self.loop)

    def reported(self) -> list[reports.Report]:
        return [
            action.report for action in self.hands.done if isinstance(action, actions.SendReport)
        ]


def test_what_comes_of_an_action_is_fed_at_once_and_in_order() -> None:
    made = Made()
    command = start()
    work = actions.StartGroup(command.workers, is_standby=False)
    made.hands.results[actions.StartGroup] = [events.Failed(work, "no process")]
    made.agent.obey(command)
    (failed,) = made.reported()
    assert isinstance(failed, reports.WorkersFailed) and "no process" in failed.reason


@pytest.mark.parametrize("error", [StoreError("no room."), OSError(28, "No space left")])
def test_an_action_that_fails_fails_the_round_and_the_others_are_done(error: Exception) -> None:
    made = Made()
    made.agent.obey(start())
    made.hands.failing = (actions.ShowStacks, error)
    made.agent.obey(commands.LogStacks())
    (failed,) = made.reported()
    assert isinstance(failed, reports.WorkersFailed) and str(error) in failed.reason
    assert made.agent.exit is None


def test_a_slip_of_our_own_ends_the_loop() -> None:
    made = Made()
    made.agent.obey(start())
    made.hands.failing = (actions.ShowStacks, KeyError("h7"))
    made.loop.put(lambda: made.agent.obey(commands.LogStacks()))
    with pytest.raises(KeyError, match="h7"):
        made.agent.run()


def test_the_law_knows_what_the_store_holds_before_it_decides() -> None:
    made = Made()
    made.hands.held = frozenset({3})
    made.agent.tick()
    assert made.agent.state.generations == {3}


def test_calls_of_workers_are_numbered_and_refused_where_there_is_no_round() -> None:
    made = Made()
    made.agent.call(Future(), Hello(0, 1))
    assert made.hands.done == [actions.AnswerCall(1, error=ENDED)]


def test_a_loop_ticks_however_much_there_is_to_do() -> None:
    made, ticks, ends = Made(), list[int](), threading.Event()

    def busy() -> None:
        if not ends.is_set():
            made.loop.put(busy)

    def tick() -> None:
        ticks.append(1)
        if len(ticks) == 3:
            ends.set()

    made.loop.put(busy)
    made.loop.run(tick, ends.is_set)
    assert len(ticks) == 3


def test_signals_reach_the_law_from_any_thread_and_a_second_one_ends_the_loop() -> None:
    made = Made()
    thread = threading.Thread(target=made.agent.leave)
    thread.start()
    thread.join(DEADLINE_S)
    made.agent.set_slots(1)
    made.agent.stop_now(143)
    assert made.agent.run() == 143 and not made.reported()
    again = Made()
    again.agent.leave()
    again.agent.set_slots(1)
    again.agent.put(events.JobLost("it is gone."))
    assert again.agent.run() == 1
    assert again.reported() == [reports.Leaving("a signal", 9.0), reports.Slots(1)]


def participant(made: Made, **served: Any) -> Participant:
    """Return a member of a job that has nothing open but what is given."""
    parts: dict[str, Any] = dict.fromkeys(("data", "succession", "link", "workers", "performer"))
    parts["store"] = SimpleNamespace(directory="/store")
    holdings = SimpleNamespace(newest=lambda: "newest: generation 7 of step 40")
    given = OpenResources(**{**parts, "holdings": holdings, **served})
    config = SimpleNamespace(probe=SimpleNamespace(health_check=None))
    options = SimpleNamespace(domain="rack=1")
    spec: Any = SimpleNamespace(job="j", to_json=dict, options=options, config=config)
    progress: Any = None
    return Participant(spec, made.agent, given, progress)


@pytest.mark.fault
def test_an_agent_that_cannot_hear_how_the_job_ended_says_where_to_look() -> None:
    made = Made()
    participant(made).lost(PeerError("the process at h:1 cannot be reached."))
    assert made.agent.exit == 1
    (line,) = [action.text for action in made.hands.done if isinstance(action, actions.Log)]
    for words in ("/store", "of step 40", "look for event=exit in the log"):
        assert words in line


def test_an_agent_that_was_expelled_joins_again_with_what_its_store_holds_then() -> None:
    made, asked = Made(), list[Any]()
    examined = ((7, ("it differs",)),)
    part = manifest_bytes(part_of(Collection.of([]), "a", 7))
    found = SimpleNamespace(parts=(part,), sealed=(), damaged=(), examined=examined)
    link = SimpleNamespace(rejoin=lambda brings, joined: asked.append((brings, joined)), term=1)
    holdings = SimpleNamespace(found=lambda: found, attach_beside=lambda then: then(None))
    store = SimpleNamespace(directory=Path("/"))
    data = SimpleNamespace(address=("127.0.0.1", 5))
    one = participant(made, holdings=holdings, link=link, store=store, data=data)
    one.expelled(PeerError("host 'a' is not in the job (any more)."))
    assert made.hands.done[-1] == actions.Rejoin()
    one.rejoin()
    ((brings, _),) = asked
    join = brings("i2")
    assert (join.host, join.incarnation, join.slots) == ("a", "i2", 2)
    assert [each.manifest for each in join.parts] == [part]
    assert (join.domain, join.examined) == ("rack=1", examined)
