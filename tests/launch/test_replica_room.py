"""A coordinator weighs what replicas take once all hosts of a round have said what they hold."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.region import Box
from support.coordinator_line import FakeAgent, Line, wait_until

MASTER = Tensor("main/w", (4, 4), "F32")
"""Of which each host has two rows, 32 bytes."""
ENOUGH = 2 * (32 + 32)


class Job:
    def __init__(self, folder: Path, *flags: str) -> None:
        self.line = Line(folder, "--nnodes", "2", "--settle-s", "0.1", *flags)
        self.agents = {host: self.line.join(host, is_slow=True) for host in "ab"}

    def publish(self, round: int = 1, room: int = ENOUGH, hosts: str = "ab") -> None:
        agents = [self.agents[host] for host in hosts]
        wait_until(lambda: all(a.round == round for a in agents), f"round {round} begins")
        for host, agent in zip(hosts, agents, strict=True):
            held = Collection.of([(MASTER, Box((2 * "ab".index(host), 0), (2, 4)))])
            agent.tell("holding", round=round, rows=held, room_bytes=room)
            agent.tell("published", round=round, tensors=(MASTER.name,))

    def logged(self, text: str) -> list[str]:
        return [line for line in self.line.log if text in line]

    def step(self, agent: FakeAgent, round: int = 1) -> None:
        agent.tell("stepped", round=round)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[list[Job]]:
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        job.line.end()


def test_what_replicas_take_is_said_for_each_host_before_the_first_step(
    made: list[Job], tmp_path: Path
) -> None:
    made.append(job := Job(tmp_path, "--replicas", "1"))
    job.publish()
    for agent in job.agents.values():
        agent.wait_for("expect")
    for host in "ab":
        (line,) = job.logged(f"event=store_memory host={host}")
        assert f"needed_bytes={ENOUGH} replica_bytes=64 room_bytes={ENOUGH} lacks_bytes=0" in line
    assert not job.logged("event=no_replica_room") and job.line.coordinator._live.exit_code == 0


@pytest.mark.fault
def test_too_little_room_for_replicas_that_were_asked_for_ends_the_job(
    made: list[Job], tmp_path: Path
) -> None:
    made.append(job := Job(tmp_path, "--replicas", "1", "--max-restarts", "3"))
    job.publish(room=ENOUGH - 1)
    for agent in job.agents.values():
        told = agent.wait_for("exit")
        assert told["code"] == 3 and f"needs {ENOUGH} bytes" in told["reason"], told
        assert not agent.heard("expect"), "no worker is let go on"


@pytest.mark.fault
def test_too_little_room_for_those_of_the_default_is_said_and_the_job_goes_on(
    made: list[Job], tmp_path: Path
) -> None:
    made.append(job := Job(tmp_path))
    job.publish(room=ENOUGH - 1)
    for agent in job.agents.values():
        agent.wait_for("expect")
    assert len(job.logged("event=no_replica_room")) == 1
    assert all("lacks_bytes=1" in line for line in job.logged("event=store_memory"))


def test_what_generations_take_is_said_without_replicas_too(
    made: list[Job], tmp_path: Path
) -> None:
    made.append(job := Job(tmp_path, "--replicas", "0"))
    job.publish(room=63)
    job.agents["a"].wait_for("expect")
    (line,) = job.logged("event=store_memory host=a")
    assert "needed_bytes=64 replica_bytes=0 room_bytes=63 lacks_bytes=1" in line


@pytest.mark.fault
def test_a_job_that_runs_is_not_ended_for_want_of_room(made: list[Job], tmp_path: Path) -> None:
    made.append(job := Job(tmp_path, "--replicas", "1", "--max-restarts", "3"))
    job.publish()
    for agent in job.agents.values():
        job.step(agent)
    wait_until(lambda: bool(job.logged("event=started")), "it trains")
    job.agents["a"].tell("workers_failed", round=1, reason="killed", is_chance=True)
    for agent in job.agents.values():
        agent.wait_for("freeze")
        agent.tell("frozen", round=1, steps=())
    job.publish(2, room=ENOUGH - 1)
    assert not job.logged("event=no_replica_room"), "the start is not kept waiting"
    for agent in job.agents.values():
        agent.wait_for("expect", 2)
        job.step(agent, 2)
    wait_until(lambda: bool(job.logged("event=no_replica_room")), "it is said")
    assert not job.agents["a"].heard("exit")


def test_an_agent_that_says_nothing_of_its_room_keeps_nobody_waiting(
    made: list[Job], tmp_path: Path
) -> None:
    made.append(job := Job(tmp_path, "--replicas", "1"))
    job.publish(hosts="a")
    agent = job.agents["b"]
    wait_until(lambda: agent.round == 1, "the round begins")
    agent.tell("published", round=1, tensors=(MASTER.name,))
    agent.wait_for("expect")
    assert not job.logged("event=store_memory")
