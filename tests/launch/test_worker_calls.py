"""Where workers call their agent: however long the names of a job and a host are."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from scalai.core.errors import PeerError
from scalai.core.messages import JsonText
from scalai.core.worker_messages import Hello, RankFinished, Welcome, WorkerRequest
from scalai.launch.round import Round
from scalai.launch.worker_calls import WorkerCalls
from scalai.runtime.agent_folder import call_agent
from support.wire_words import start

WELCOME = Welcome({"tp": 1}, 2, 0, None, False, JsonText.of({"large": 1 << 100}), JsonText.of({}))


class OneRound:
    """A workforce whose round has one rank."""

    def __init__(self) -> None:
        self.round = Round(start())

    def rounds(self) -> list[Round]:
        return [self.round]


def answer(current: Round, future: "Future[Any]", request: WorkerRequest) -> None:
    future.set_result(WELCOME if isinstance(request, Hello) else None)


def test_names_of_any_length_leave_a_socket_that_is_found(tmp_path: Path) -> None:
    folder = tmp_path / ("job-" * 40) / ("host-" * 40) / "agent"
    folder.mkdir(mode=0o700, parents=True)
    calls = WorkerCalls(folder, OneRound(), lambda work: work(), answer, lambda rank: None)  # type: ignore[arg-type]
    channel = call_agent(str(folder))
    welcome = channel.call(Hello(rank=0, round=1))
    assert welcome == WELCOME and welcome.facts.value() == {"large": 1 << 100}
    channel.close()
    assert len(str(folder / "agent.sock")) > 107
    calls.close()
    assert not (folder / "agent.sock").exists()
    with pytest.raises(PeerError):
        call_agent(str(folder))


@pytest.mark.parametrize("request_", [Hello(0, 2), Hello(1, 1), RankFinished(0, 7, 3)])
def test_words_of_workers_that_are_not_there_are_refused(
    tmp_path: Path, request_: Any
) -> None:
    """They are of a round that has ended, or of another host's."""
    (tmp_path / "agent").mkdir(mode=0o700)
    folder = tmp_path / "agent"
    calls = WorkerCalls(folder, OneRound(), lambda work: work(), answer, lambda rank: None)  # type: ignore[arg-type]
    channel = call_agent(str(folder))
    with pytest.raises(PeerError, match="this round of workers has ended"):
        channel.call(request_)
    channel.close()
    calls.close()
