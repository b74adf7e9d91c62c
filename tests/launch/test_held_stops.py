"""The agent's part in a stop that waits for a save of the training's own."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalai.core.worker_messages import Stand
from scalai.launch import stops
from scalai.launch.round import Round
from scalai.launch.stops import Stops
from scalai.runtime.control import ControlPage
from support.wire_words import Told, start

ROUND = start(round=3, local_world_size=2)
LATER = start(round=4, local_world_size=2)


class Agent:
    """Stops of a host with a control page, as a worker sees it, and what they tell."""

    def __init__(self, path: Path) -> None:
        self.page = ControlPage(path, create=True)
        self.page.clear()
        self.worker = ControlPage(path)
        self.round = Round(ROUND)
        crew = SimpleNamespace(page=self.page, newest_step=lambda: self.page.newest_step(2))
        workforce: Any = SimpleNamespace(round=self.round, crew=crew, have_ended=lambda: False)
        deposits: Any = SimpleNamespace(withdraw=lambda current: None)
        self.workforce = workforce
        self.told = Told()
        self.stops = Stops("a", workforce, deposits, self.told, 9.0)

    def events(self) -> list[str]:
        return self.told.words()


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Agent:
    monkeypatch.setattr(stops, "HELD_TELL_S", 0.0)
    return Agent(tmp_path / "page")


def test_a_stop_is_proposed_once_no_save_is_in_flight(agent: Agent) -> None:
    agent.worker.report(0, 7)
    agent.worker.report_save(4)
    agent.stops.prepare(8)
    agent.stops.watch()
    assert set(agent.events()) == {"held"} and len(agent.events()) == 2, "it is told again"
    assert "iteration 4 is in flight" in agent.told.events[0]["what"]
    assert not agent.worker.must_stop(10**9) and agent.worker.stop_urgency() == 1
    agent.worker.report(0, 12)
    agent.worker.report_save(None)
    agent.stops.watch()
    agent.stops.watch()
    assert agent.events().count("prepared") == 1
    prepared = {"event": "prepared", "host": "a", "round": 3, "stop": 8, "newest": 12}
    assert agent.told.events[-1] == prepared
    assert not agent.worker.stop_urgency()


def test_a_held_stop_that_is_taken_back_or_whose_round_has_ended_is_not_proposed(
    agent: Agent,
) -> None:
    agent.worker.report_save(0)
    agent.stops.prepare(8)
    agent.stops.withdraw()
    assert not agent.worker.stop_urgency()
    agent.worker.report_save(None)
    agent.stops.watch()
    assert agent.events() == ["held"]
    agent.worker.report_save(0)
    agent.stops.prepare(8)
    agent.workforce.round = Round(LATER)
    agent.worker.report_save(None)
    agent.stops.watch()
    assert agent.events() == ["held", "held"]


def test_workers_that_come_to_a_stop_with_a_save_are_sent_on_and_that_is_told_once(
    agent: Agent,
) -> None:
    agent.stops.prepare(8)
    agent.stops.agree(8)
    answers: list[Future[Any]] = [Future(), Future()]
    for rank, answer in enumerate(answers):
        agent.stops.stand(agent.round, answer, Stand(rank, 3, step=8, iteration=8))
    assert agent.events() == ["prepared", "held"] and not any(a.done() for a in answers)
    agent.stops.withdraw()
    assert all(answer.done() for answer in answers)
    late: Future[Any] = Future()
    agent.stops.stand(agent.round, late, Stand(1, 3, step=8, iteration=8))
    assert late.done(), "its page was read before the stop was taken back"
    assert agent.events() == ["prepared", "held"] and not agent.worker.stop_urgency()
    agent.stops.prepare(9)
    assert agent.events()[-1] == "prepared"
    assert agent.worker.stop_urgency() == 2, "the next stop may be a step that saves as well"


def test_a_leaving_host_waits_for_a_save_as_long_as_somebody_looks_for_it(agent: Agent) -> None:
    assert not agent.stops.saves
    agent.worker.report_save(8)
    assert agent.stops.saves
    assert not agent.stops.saves, "the workers hang"
    agent.worker.report_save(8)
    assert agent.stops.saves
    agent.worker.report_save(None)
    assert not agent.stops.saves


def test_workers_that_stood_when_their_round_ended_keep_no_later_stop_from_being_told(
    agent: Agent,
) -> None:
    agent.stops.prepare(8)
    agent.stops.agree(8)
    agent.stops.stand(agent.round, stood := Future[Any](), Stand(0, 3, step=8, iteration=8))
    stood.set_exception(RuntimeError("this round of workers has ended."))
    later = agent.workforce.round = Round(LATER)
    agent.stops.prepare(9)
    agent.stops.agree(9)
    agent.stops.stand(later, Future[Any](), Stand(0, 4, step=9, iteration=9))
    assert agent.events() == ["prepared", "held", "prepared", "held"]


def test_of_a_save_that_nobody_looks_for_any_more_that_is_said(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training hangs, and the change waits with it."""
    agent.worker.report_save(4)
    agent.stops.prepare(8)
    agent.stops.watch()
    assert not any("no worker has looked" in told["what"] for told in agent.told.events)
    monkeypatch.setattr(stops, "UNLOOKED_S", -1.0)
    agent.stops.watch()
    assert "no worker has looked for its end for 0 s" in agent.told.events[-1]["what"]
