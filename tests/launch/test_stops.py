"""The agent's part in a stop, where a worker dies at it."""

import os
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from scalai.launch.round import DepositUnderWay, Round
from scalai.launch.stops import Stops
from support.wire_words import Told, start


def test_a_dead_worker_whose_connection_stands_is_given_up_and_not_killed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that it has forked holds the connection."""
    current = Round(start(first_rank=2, local_world_size=2))
    current.stop, current.may_deposit = 5, True
    current.deposit = DepositUnderWay("stop", 5, ordered={2, 3}, done={2: Future()})
    current.deposit.parts[2] = None  # type: ignore[assignment]  # it has written
    asked: list[str] = []
    deposits: Any = SimpleNamespace(
        tell_arrived=lambda current: None,
        give_orders=lambda current: None,
        seal_if_complete=lambda current: asked.append("seal"),
    )
    crew = SimpleNamespace(ended=lambda: {3: -9}, pids=lambda: {"2": 1, "3": 2**22 + 1})
    workforce: Any = SimpleNamespace(round=current, crew=crew)
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, signal: killed.append(pid))
    stops = Stops("a", workforce, deposits, Told(), patience_s=0.0)
    stops.watch()
    time.sleep(0.001)
    stops.watch()
    assert current.lost == {3} and asked == ["seal"] and not killed
