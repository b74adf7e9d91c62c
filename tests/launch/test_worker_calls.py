"""Where workers call their agent: however long the names of a job and a host are."""

import queue
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from scalai.core.errors import PeerError
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import Hello, RankFinished, Welcome, WorkerRequest
from scalai.launch.agent.worker_calls import WorkerCalls
from scalai.runtime.agent_folder import call_agent

WELCOME = Welcome(
    {"tp": 1}, 2, 0, True, True, None, False, JsonText.of({"large": 1 << 100}), JsonText.of({})
)


def answer(future: "Future[Any]", request: WorkerRequest) -> None:
    if isinstance(request, RankFinished):
        future.set_exception(PeerError("this round of workers has ended."))
    else:
        future.set_result(WELCOME)


@pytest.mark.fault
def test_names_of_any_length_leave_a_socket_that_is_found(tmp_path: Path) -> None:
    folder = tmp_path / ("job-" * 40) / ("host-" * 40) / "agent"
    folder.mkdir(mode=0o700, parents=True)
    calls = WorkerCalls(folder, lambda work: work(), answer, lambda *who: None)
    channel = call_agent(str(folder))
    welcome = channel.call(Hello(rank=0, round=1))
    assert welcome == WELCOME and welcome.facts.value() == {"large": 1 << 100}
    channel.close()
    assert len(str(folder / "agent.sock")) > 107
    calls.close()
    assert not (folder / "agent.sock").exists()
    with pytest.raises(PeerError):
        call_agent(str(folder))


def test_a_call_that_is_refused_is_an_error_and_who_goes_away_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    folder.mkdir(mode=0o700)
    gone: queue.Queue[tuple[int, int]] = queue.Queue()
    calls = WorkerCalls(folder, lambda work: work(), answer, lambda *who: gone.put(who))
    silent, channel = call_agent(str(folder)), call_agent(str(folder))
    channel.call(Hello(rank=3, round=7))
    with pytest.raises(PeerError, match="this round of workers has ended"):
        channel.call(RankFinished(3, 7, 41))
    silent.close()
    channel.close()
    assert gone.get(timeout=60) == (7, 3)
    calls.close()
    assert gone.empty(), "who has said nothing is nobody"
