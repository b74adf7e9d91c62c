"""An agent's own decisions, without workers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalai.core.errors import PeerError, StoreError
from scalai.launch.agent import Agent


def test_an_agent_that_cannot_join_again_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its durable directory went away with its network, say. It would wait for ever."""

    def fail(agent: Agent) -> Any:
        raise StoreError("/durable cannot be read.")

    monkeypatch.setattr(Agent, "_brings", fail)
    agent: Any = object.__new__(Agent)
    agent._host, agent._exit, agent._coordinator = "a", None, SimpleNamespace(rejoin=None)
    agent._store = SimpleNamespace(directory=Path("/store"))
    agent._commits = SimpleNamespace(forget=lambda: None)
    agent._workforce = SimpleNamespace(round=None, give_up=lambda: None)
    agent._expelled(PeerError("host 'a' is not in the job (any more)."))
    assert agent._exit == 1
    assert "event=not_rejoined" in caplog.text and "/durable cannot be read" in caplog.text


def test_an_agent_that_cannot_hear_how_the_job_ended_says_where_to_look(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent: Any = object.__new__(Agent)
    agent._exit, agent._store = None, SimpleNamespace(directory=Path("/store"))
    agent._holdings = SimpleNamespace(newest=lambda: "newest: generation 7 of step 40")
    agent._coordinator_gone(PeerError("the process at h:1 cannot be reached."))
    assert agent._exit == 1
    for words in ("/store", "of step 40", "look for event=exit in the log"):
        assert words in caplog.text
