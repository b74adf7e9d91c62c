"""Where workers call their agent: however long the names of a job and a host are."""

from pathlib import Path

import pytest

from scalai.core.errors import PeerError
from scalai.launch.round import Round
from scalai.launch.worker_calls import WorkerCalls
from scalai.runtime.agent_folder import call_agent


class OneRound:
    """A workforce whose round has one rank."""

    def __init__(self) -> None:
        self.round = Round({"round": 1, "first_rank": 0, "local_world_size": 1})

    def rounds(self) -> list[Round]:
        return [self.round]


def test_names_of_any_length_leave_a_socket_that_is_found(tmp_path: Path) -> None:
    folder = tmp_path / ("job-" * 40) / ("host-" * 40) / "agent"
    folder.mkdir(mode=0o700, parents=True)

    def answer(current: Round, future: object, rank: int, round: int) -> None:
        future.set_result(f"rank {rank} of round {round}")  # type: ignore[attr-defined]

    calls = WorkerCalls(
        folder, OneRound(), lambda work: work(), {"hello": answer}, lambda rank: None,
    )  # type: ignore[arg-type]  # fmt: skip
    channel = call_agent(str(folder))
    assert channel.call("hello", rank=0, round=1) == "rank 0 of round 1"
    channel.close()
    assert len(str(folder / "agent.sock")) > 107
    calls.close()
    assert not (folder / "agent.sock").exists()
    with pytest.raises(PeerError):
        call_agent(str(folder))
