"""Who asks for a change hears whether it outlives the coordinator."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scalai.core.job.membership import Phase, active
from scalai.launch.coordinator.losses import Patience
from scalai.launch.coordinator.person_calls import Scale
from scalai.runtime.calls import Channel
from support.coordinator_line import TOKEN, Line, wait_until

pytestmark = pytest.mark.fault

FLAGS = ("--nnodes", "1:3", "--settle-s", "0.2", "--max-restarts", "9")


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    patience = Patience(grace_s=0.1, poll_s=0.1, kept_s=1.0)
    line = Line(tmp_path, *FLAGS, patience=patience)
    yield line
    line.end()


def scale(line: Line, nproc: int) -> str:
    channel = Channel(line.coordinator.address, TOKEN)
    try:
        answer: Any = channel.call(Scale(nproc, None, None, dry_run=False)).value()
        return str(answer["reason"])
    finally:
        channel.close()


def running(line: Line, count: int) -> None:
    """Wait until the job runs on so many hosts."""

    def is_so() -> bool:
        job = line.coordinator._live.state
        return job.phase is Phase.RUNNING and len(active(job)) == count

    wait_until(is_so, f"the job runs on {count} hosts")


def kept(agent: Any) -> Any:
    """Return what persons had asked for, as an agent keeps it."""
    return agent.heard("remember")[-1]["known"].value.request.value()[0]


def test_the_answer_to_a_request_comes_once_most_hosts_keep_it(line: Line) -> None:
    agents = [line.join(host) for host in "ab"]
    running(line, 2)
    assert "hosts have yet to hear of it" not in scale(line, 2)
    wait_until(lambda: all(kept(agent) == 2 for agent in agents), "both keep what was asked for")
    agents[1].pause()
    said = scale(line, 1)
    assert "hosts have yet to hear of it: ask again if the coordinator is lost" in said
    agents[1].go_on()


def test_a_host_that_comes_later_keeps_it_too(line: Line) -> None:
    line.join("a")
    running(line, 1)
    scale(line, 1)
    late = line.join("b")
    late.wait_for("remember")
    wait_until(lambda: kept(late) == 1, "it keeps what was asked for")
