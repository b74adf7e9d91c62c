"""Workers, agents and hosts die at every place of a resize: what was written is not lost.

Two hosts with two workers each hold replicas of each other's state. A change of degrees is asked
for, and somebody is killed on the way.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.agents import Agents, one_worker, tiny_agents
from support.tiny_job import check_steps

FLAGS = ("--max-restarts", "100")
PLACES = ("build", "write", "commit", "relaunch", "plan", "move", "restore")
WITHIN_A_RESIZE = ("drain", *PLACES, "written", "seal", "sealed", "committed", "leave", "moved")


class SharedJob:
    """One job for many tests, because every one of them leaves it training on both hosts; a new one
    after a test that failed."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._open = contextlib.ExitStack()
        self._agents: Agents | None = None

    def get(self) -> Agents:
        """Return two hosts, a and b, that train on 4 ranks."""
        if self._agents is None:
            self._agents = self._start()
        self._agents.wait_for_all(4)
        return self._agents

    def _start(self) -> Agents:
        degrees = '4 = "tp2"\n2 = "tp1"\n1 = "tp1"'
        folder = self._factory.mktemp("kills")
        settings = {"resize": "quarantine_s = 0"}  # the same hosts die again and again
        jobs = tiny_agents(folder, degrees, flags=FLAGS, settings=settings)
        agents = self._open.enter_context(jobs)
        agents.start("a")
        agents.start("b")
        agents.wait_until(lambda: len(agents.resizes()) == 1, "every rank has stepped")
        return agents

    def close(self) -> None:
        self._agents = None
        self._open.close()


@pytest.fixture(scope="module")
def shared_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedJob]:
    shared = SharedJob(tmp_path_factory)
    yield shared
    shared.close()


@pytest.fixture
def agents(shared_job: SharedJob, request: pytest.FixtureRequest) -> Iterator[Agents]:
    """Give two hosts, a and b, that train on 4 ranks. The test must leave them so."""
    failed_before = request.session.testsfailed
    yield shared_job.get()
    if request.session.testsfailed > failed_before:
        shared_job.close()


def change_degrees(agents: Agents) -> int:
    """Ask for TP 1, or for TP 2 where it is 1. Returns the TP that will be."""
    tp = 2 if agents.lines()[-1]["tp"] == 1 else 1
    agents.scale(degrees=f"tp{tp}")
    return tp


def steps_lost(agents: Agents) -> list[int]:
    return [report.get("steps_lost", 0) for report in agents.resizes()]


@pytest.mark.parametrize("rank", ["0", "3"])
def test_a_worker_may_die_at_any_place_of_a_resize(agents: Agents, rank: str) -> None:
    for place in PLACES:
        agents.wait_for_all(4)
        agents.arm(place, rank)
        changes = len(agents.resizes())
        tp = change_degrees(agents)
        agents.wait_for_death()
        agents.wait_until(lambda: agents.lines()[-1]["tp"] == tp, f"TP {tp} after {place}")  # noqa: B023
        agents.wait_until(lambda: len(agents.resizes()) > changes, "the report")  # noqa: B023
        assert not any(steps_lost(agents)), f"{place}: {steps_lost(agents)}\n{agents.logs()}"
    check_steps(agents.lines())


def agent_dies(agents: Agents, place: str, host: str, *, with_its_memory: bool) -> None:
    """Kill an agent at a place of a resize; the other host goes on; the agent comes back."""
    agents.wait_for_all(4)
    before = len(agents.resizes())
    agents.arm(place, host)
    change_degrees(agents)
    agents.wait_for_death()
    agents.exit_code(host)
    if with_its_memory:
        agents.remove_store(host)
    agents.wait_for_all(2)
    agents.wait_until(lambda: not agents.workers(host), f"no worker of {host} trains on alone")
    if place not in ("build", "drain"):  # there, others may still need the dead to end a step
        lost = steps_lost(agents)[before:]
        assert not any(lost), f"{place}: {lost}\n{agents.logs()}"
    agents.start(host)
    agents.wait_for_all(4)


def test_a_host_may_die_with_its_memory_in_a_resize(agents: Agents) -> None:
    """The first host too: the coordinator is another process."""
    agent_dies(agents, "commit", "a", with_its_memory=True)
    check_steps(agents.lines())


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.timeout(900)  # twelve kills
@pytest.mark.parametrize(("with_its_memory", "hosts"), [(True, "ab"), (False, "ba")])
def test_hosts_may_die_at_every_place(agents: Agents, with_its_memory: bool, hosts: str) -> None:
    """They take turns: at each place one dies with its memory, and the other one without."""
    for number, place in enumerate(WITHIN_A_RESIZE):
        if place != "moved":  # nothing is fetched between hosts that both hold everything
            agent_dies(agents, place, hosts[number % 2], with_its_memory=with_its_memory)
    check_steps(agents.lines())
    agents.wait_until(
        lambda: all(len(agents.generations(name)) == 2 for name in "ab"),
        "each host holds one generation and the files of the next snapshot",
    )


# ------------------------------------------------------------------ without replicas elsewhere


@pytest.mark.campaign
def test_a_replica_on_the_same_host_writes_for_a_worker_that_dies(tmp_path: Path) -> None:
    with tiny_agents(tmp_path, '3 = "tp1"\n2 = "tp1"', slots=3, nodes="1", flags=FLAGS) as agents:
        agents.start("a")
        agents.wait_for_step(3, world=3)
        agents.arm("written", "1")
        agents.scale(nproc=2)
        agents.wait_for_death()
        agents.wait_for_world(2)
        check_steps(agents.lines())
        assert not any(steps_lost(agents)), agents.logs()


@pytest.mark.campaign
def test_an_agent_that_comes_back_brings_what_it_had_sealed(tmp_path: Path) -> None:
    """Its worker's pieces are nowhere else: the job waits for them, and loses no step."""
    with tiny_agents(tmp_path, '4 = "tp4"\n3 = "tp3"', nodes="2", flags=FLAGS) as agents:
        agents.start("a")
        agents.start("b")
        world = 4
        for place in ("commit", "sealed", "committed"):
            agents.wait_for_all(world)
            agents.arm(place, "b")
            changes = len(agents.resizes())
            world = 7 - world
            agents.scale(nproc=world)
            agents.wait_for_death()
            agents.exit_code("b")
            agents.start("b")
            agents.wait_for_world(world)
            agents.wait_until(lambda: len(agents.resizes()) > changes, "the report")  # noqa: B023
            assert not any(steps_lost(agents)), f"{place}: {agents.logs()}"
        steps = check_steps(agents.lines())
        assert steps == sorted(set(steps)), "no step was made twice"


# ------------------------------------------------------------------ in the middle of training


@pytest.mark.turns
def test_no_worker_outlives_its_agent_and_a_new_agent_finds_the_state(tmp_path: Path) -> None:
    with one_worker(tmp_path, settings={"store": "snapshot_every = 5"}) as agents:
        agents.start("a")
        agents.wait_for_step(12)
        agents.kill("a")
        agents.wait_until(lambda: not agents.family(), "nothing of the job is left")
        made = agents.lines()[-1]["step"]
        agents.start("a")
        agents.wait_for_step(made + 1)
        steps = check_steps(agents.lines())
        again = [step for step in steps if steps.count(step) > 1]
        assert min(again, default=made) > 5 and len(again) <= 2 * 10, steps


def test_a_second_signal_stops_now_and_the_state_stays(tmp_path: Path) -> None:
    # A step is long enough for the second signal to come before the stop of the first.
    with one_worker(tmp_path, step_s=6.0) as agents:
        agents.start("a")
        agents.wait_until(lambda: "event=started" in agents.text(), "the first step")
        agents.drain("a")
        agents.wait_until(lambda: "event=leaving" in agents.text(), "the first signal is heard")
        agents.drain("a")
        assert agents.exit_code("a", deadline_s=15) == 128 + 15, agents.logs()
        agents.wait_until(lambda: not agents.family(), "nothing of the job is left")
        assert "generation-1" in agents.generations("a")


@pytest.mark.turns
def test_workers_that_fail_in_training_go_back_to_the_newest_snapshot(tmp_path: Path) -> None:
    settings = {"store": "snapshot_every = 7"}
    with tiny_agents(tmp_path, '2 = "tp2"', nodes="1", settings=settings, flags=FLAGS) as agents:
        agents.start("a")
        agents.wait_for_step(16)
        agents.kill_worker(1)
        agents.wait_until(lambda: len(agents.resizes()) == 2, "the workers are started again")
        lost = steps_lost(agents)[-1]
        steps = check_steps(agents.lines())
        again = [step for step in set(steps) if steps.count(step) > 1]
        assert len(again) - 1 <= lost <= 14


@pytest.mark.campaign
def test_a_worker_that_hangs_in_its_snapshot_is_given_up(tmp_path: Path) -> None:
    """The other host has written all: what hangs is not waited for longer than told."""
    settings = {"resize": "drain_timeout_s = 5"}
    with tiny_agents(tmp_path, '4 = "tp2"', settings=settings, flags=FLAGS) as agents:
        agents.start("a")
        agents.start("b")
        agents.wait_for_step(3, world=4)
        agents.arm("write", "3", "SIGSTOP")
        agents.scale(degrees="tp1")
        agents.wait_for_death()
        agents.wait_until(lambda: agents.lines()[-1]["tp"] == 1, "the degrees are changed")
        check_steps(agents.lines())
        assert not any(steps_lost(agents)), agents.logs()


@pytest.mark.campaign
def test_workers_that_hang_while_they_build_are_given_up(tmp_path: Path) -> None:
    settings = {"resize": "build_timeout_s = 10"}
    with tiny_agents(tmp_path, '2 = "tp2"\n1 = "tp1"', nodes="1", settings=settings) as agents:
        agents.start("a")
        agents.wait_until(lambda: "event=warm" in agents.text(), "workers can be forked")
        agents.arm("build", "0", "SIGSTOP")
        agents.scale(nproc=1)
        agents.wait_for_death()
        agents.wait_for_world(1)
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1)), "each step is made once"
        assert "not built within 10 s" in agents.text()
        agents.wait_until(lambda: len(agents.workers()) == 1, "nothing else is left")


def test_a_second_change_during_a_resize_begins_again_from_the_same_state(agents: Agents) -> None:
    before = agents.lines()[-1]["tp"]
    agents.arm("relaunch", "3", "SIGSTOP")
    change_degrees(agents)
    agents.wait_for_death()
    made = len(agents.lines())
    agents.scale(degrees="tp4")
    agents.wait_until(lambda: agents.lines()[-1]["tp"] == 4, "TP 4")
    steps = check_steps(agents.lines())
    assert steps[made - 1 :] == list(range(steps[made - 1], steps[-1] + 1))
    assert {line["tp"] for line in agents.lines()[made - 1 :]} == {before, 4}
    assert not any(steps_lost(agents))


@pytest.mark.campaign
def test_a_job_whose_agents_and_coordinator_died_goes_on_where_it_was(tmp_path: Path) -> None:
    with one_worker(tmp_path, settings={"store": "snapshot_every = 5"}) as agents:
        agents.start("a")
        agents.wait_for_step(7)
        agents.kill_coordinator()
        agents.kill("a")
        agents.wait_until(lambda: not agents.family(), "nothing of the job is left")
        made = agents.lines()[-1]["step"]
        agents.start("a")
        agents.wait_for_step(made + 1)
        steps = check_steps(agents.lines())
        assert steps.count(1) == 1, "the second run did not begin anew"
