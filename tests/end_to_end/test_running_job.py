"""Faults and changes of a job that trains on: workers, agents, hosts and the coordinator die at
every place of a change, hosts leave and join. Each step is made as in a run without any of it.

Two hosts with two workers each hold replicas of each other's state. One job serves all tests of
this file: each leaves it training on both hosts.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from scalai.core.errors import AnswerError
from support.agents import Agents, tiny_agents
from support.command import logged
from support.tiny_job import check_each_once, check_steps

FLAGS = ("--max-restarts", "1000")
DEGREES = '4 = "tp2"\n3 = "tp3"\n2 = "tp1"\n1 = "tp1"'
PLACES = ("build", "write", "commit", "relaunch", "plan", "move", "restore", "proof")
TORN, TORN_BEFORE = "the state is not whole: ", "no newer state was whole"
"""Some ranks have what the others failed to get: each has a step that the others lack. The second
is said by a coordinator that comes after the death. Which of all such states are whole is proven in
``tests/core/host/test_failures.py``."""
WITHIN_A_RESIZE = ("drain", *PLACES, "written", "seal", "sealed", "committed", "leave", "moved")


def is_torn(report: Mapping[str, Any]) -> bool:
    why = str(report.get("steps_lost_why"))
    return TORN in why or (why.startswith(TORN_BEFORE) and report["steps_lost"] == 1)


class SharedJob:
    """One job for many tests; a new one after a test that failed."""

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
        again = {"resize.quarantine_s": 0.0}  # the same hosts die again and again
        jobs = tiny_agents(self._factory.mktemp("job"), DEGREES, flags=FLAGS, constants=again)
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
    """Give two hosts, a and b, that train on 4 ranks. The test must leave them so, without a step
    that was lost or made twice."""
    failed_before = request.session.testsfailed
    agents = shared_job.get()
    made, changes = len(agents.lines()), len(agents.resizes())
    yield agents
    if request.session.testsfailed == failed_before:
        agents.wait_for_all(4)
        reports = agents.resizes()[changes:]
        if any(is_torn(report) for report in reports):
            check_steps(agents.lines())
            pytest.skip("the death came within a collective: survivors stood at two steps")
        try:
            check_each_once(agents.lines()[made - 1 :])
        except AssertionError as error:
            raise AssertionError(agents.logs()) from error
        lost = [report.get("steps_lost", 0) for report in reports]
        assert not any(lost), f"{lost}\n{agents.logs()}"
    else:
        shared_job.close()


def change_degrees(agents: Agents) -> int:
    """Ask for TP 1, or for TP 2 where it is 1. Returns the TP that will be."""
    tp = 2 if agents.lines()[-1]["tp"] == 1 else 1
    agents.scale(degrees=f"tp{tp}")
    return tp


def goes_on(agents: Agents, changes: int, world: int = 4) -> dict[str, object]:
    """Wait until the job trains on ``world`` ranks behind a further change. Returns its report."""
    agents.wait_until(lambda: len(agents.resizes()) > changes, "the job goes on")
    report = agents.resizes()[-1]
    agents.wait_for_step(int(report["step"]) + 3, world=world)
    return report


def adopted(agents: Agents, before: int) -> None:
    agents.wait_until(
        lambda: agents.text().count("event=adopted") > before, "another coordinator takes its place"
    )


# ------------------------------------------------------------------ workers


@pytest.mark.parametrize("ranks", ["03", pytest.param("30", marks=pytest.mark.campaign)])
def test_a_worker_may_die_at_any_place_of_a_resize(agents: Agents, ranks: str) -> None:
    """The first and the last rank take turns."""
    for number, place in enumerate(PLACES):
        agents.wait_for_all(4)
        agents.arm(place, ranks[number % 2])
        changes = len(agents.resizes())
        tp = change_degrees(agents)
        agents.wait_for_death()
        agents.wait_until(lambda: agents.lines()[-1]["tp"] == tp, f"TP {tp} after {place}")  # noqa: B023
        goes_on(agents, changes)


@pytest.mark.fault
def test_a_worker_that_is_killed_costs_no_step_where_another_has_its_state(agents: Agents) -> None:
    changes = len(agents.resizes())
    os.kill(agents.workers("b")[1], signal.SIGKILL)
    report = goes_on(agents, changes)
    assert report["is_emergency"] and "was killed by SIGKILL" in str(report["reason"]), report
    failure = report["failure"]
    assert isinstance(failure, dict) and failure["host"] == "b", report
    assert failure["kind"] == "killed by SIGKILL", report


@pytest.mark.fault
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
        assert not any(report.get("steps_lost") for report in agents.resizes()), agents.logs()


# ------------------------------------------------------------------ hosts


def agent_dies(agents: Agents, place: str, host: str, *, with_its_memory: bool) -> None:
    """Kill an agent at a place of a resize; the other host goes on; the agent comes back."""
    agents.wait_for_all(4)
    agents.arm(place, host)
    change_degrees(agents)
    agents.wait_for_death()
    agents.exit_code(host)
    if with_its_memory:
        agents.remove_store(host)
    agents.wait_for_all(2)
    agents.wait_until(lambda: not agents.workers(host), f"no worker of {host} trains on alone")
    agents.start(host)
    agents.wait_for_all(4)


def test_a_host_may_die_with_its_memory_in_a_resize(agents: Agents) -> None:
    """The first host too: the coordinator is another process."""
    agent_dies(agents, "commit", "a", with_its_memory=True)


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.timeout(900)  # twelve kills
@pytest.mark.parametrize(("with_its_memory", "hosts"), [(True, "ab"), (False, "ba")])
def test_hosts_may_die_at_every_place(agents: Agents, with_its_memory: bool, hosts: str) -> None:
    """They take turns: at each place one dies with its memory, and the other one without."""
    for number, place in enumerate(WITHIN_A_RESIZE):
        if place != "moved":  # nothing is fetched between hosts that both hold everything
            agent_dies(agents, place, hosts[number % 2], with_its_memory=with_its_memory)
    agents.wait_until(
        lambda: all(len(agents.generations(name)) == 2 for name in "ab"),
        "each host holds one generation and the files of the next snapshot",
    )


@pytest.mark.fault
@pytest.mark.parametrize("is_coordinator_lost", [False, True])
def test_a_host_that_dies_with_its_memory_costs_no_step_where_another_has_its_state(
    agents: Agents, is_coordinator_lost: bool
) -> None:
    changes, adoptions = len(agents.resizes()), agents.text().count("event=adopted")
    if is_coordinator_lost:
        agents.kill_coordinator()
    agents.kill("b", with_its_memory=True)
    if is_coordinator_lost:
        adopted(agents, adoptions)
    goes_on(agents, changes, world=2)
    agents.start("b")


@pytest.mark.fault
def test_an_agent_whose_host_was_lost_joins_again(agents: Agents) -> None:
    """It was paused for so long that the others went on without it."""
    paused = [psutil.Process(pid) for pid in (agents.agent_pid("b"), *agents.workers("b"))]
    for process in paused:
        process.suspend()
    agents.wait_for_world(2)
    for process in paused:
        process.resume()
    agents.wait_for_world(4)
    assert "event=expelled host=b" in agents.text()
    assert "event=rejoined host=b" in agents.text()


# ------------------------------------------------------------------ changes


def test_hosts_drain_and_join_the_first_one_too_and_no_step_is_lost(agents: Agents) -> None:
    for host in "ba":
        changes = len(agents.resizes())
        agents.drain(host)
        assert agents.exit_code(host) == 0, agents.logs()
        goes_on(agents, changes, world=2)
        agents.start(host)
        agents.wait_for_all(4)


def test_training_goes_on_while_the_next_workers_build(agents: Agents) -> None:
    agents.drain("b")
    agents.exit_code("b")
    agents.wait_for_all(2)
    unbuilt = agents.text().count("are not built")
    agents.hold_builds()
    agents.start("b")
    agents.wait_until(lambda: len(agents.workers("b")) == 2, "the next workers have started")
    begun = agents.lines()[-1]["step"]
    agents.wait_for_step(begun + 5, world=2)
    agents.let_build()
    agents.wait_for_all(4)
    agents.scale(nproc=3)
    agents.wait_for_all(3)
    agents.scale(nproc=4)
    agents.wait_for_all(4)
    assert agents.text().count("are not built") == unbuilt


def test_a_second_change_during_a_resize_begins_again_from_the_same_state(agents: Agents) -> None:
    before = agents.lines()[-1]["tp"]
    agents.arm("relaunch", "3", "SIGSTOP")
    change_degrees(agents)
    agents.wait_for_death()
    made, changes = len(agents.lines()), len(agents.resizes())
    agents.scale(degrees="tp4")
    agents.wait_until(lambda: len(agents.resizes()) > changes, "every rank has stepped")
    agents.wait_until(lambda: agents.lines()[-1]["tp"] == 4, "TP 4")
    assert {line["tp"] for line in agents.lines()[made - 1 :]} == {before, 4}
    agents.scale(degrees="tp2")
    agents.wait_until(lambda: agents.lines()[-1]["tp"] == 2, "TP 2")


# ------------------------------------------------------------------ the coordinator


def test_workers_train_on_while_another_coordinator_takes_its_place(agents: Agents) -> None:
    for world in (2, 4):
        workers, adoptions = sorted(agents.workers()), agents.text().count("event=adopted")
        agents.kill_coordinator()
        adopted(agents, adoptions)
        agents.wait_for_step(agents.lines()[-1]["step"] + 5)
        assert sorted(agents.workers()) == workers, "they are the same processes"
        agents.scale(nproc=world)
        agents.wait_for_all(world)


def test_a_history_has_the_changes_under_all_coordinators(
    agents: Agents, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = agents.job, "--store-dir", agents.store
    code, said = logged(capsys, "history", *asked, "--json")
    told = [report["at"] for report in json.loads(said)["reports"]]
    assert code == 0 and told == [report["at"] for report in agents.resizes()]
    picture = agents.folder / "history.svg"
    code, said = logged(capsys, "plot", *asked, "-o", picture)
    assert code == 0 and picture.is_file(), said


@pytest.mark.campaign
@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.8, 1.5, 2.5, 4.0])
def test_wherever_a_change_is_when_the_coordinator_dies_no_step_is_lost(
    agents: Agents, after_s: float
) -> None:
    started = "event=coordinator job=tiny term="
    before = agents.text().count(started)
    agents.scale(nproc=2)
    time.sleep(after_s)
    agents.kill_coordinator()
    agents.wait_until(lambda: agents.text().count(started) > before, "another one is there")
    # It adopts the round, which then may have no report, or begins one from the state of the stop.
    agents.wait_for_step(agents.wait_for_world(2) + 5, world=2)

    def takes_requests() -> bool:
        with contextlib.suppress(AnswerError):  # it waits for hosts of the job
            agents.scale(nproc=4)
            return True
        return False

    agents.wait_until(takes_requests, "it takes requests")
    agents.wait_for_all(4)


# ------------------------------------------------------------------ everything


@pytest.mark.fault
def test_a_job_that_grew_and_was_killed_goes_on_at_the_committed_step(
    shared_job: SharedJob,
) -> None:
    """Pieces that the second host has fetched overlap with those that the first one has written."""
    agents = shared_job.get()
    agents.drain("b")
    agents.exit_code("b")
    agents.wait_for_all(2)
    agents.start("b")
    agents.wait_for_all(4)
    committed = agents.resizes()[-1]["step"]
    for process in agents.family():
        process.kill()
    agents.wait_until(lambda: not agents.family(), "nothing of the job is left")
    made = len(agents.lines())
    agents.start("a")
    agents.start("b")
    agents.wait_until(lambda: len(agents.lines()) > made + 3, "it trains again")
    assert check_steps(agents.lines())[made] == committed + 1, agents.logs()
    assert "not the written one" not in agents.text()
    shared_job.close()  # steps were made twice here


# ------------------------------------------------------------------ those who outlive a failure


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    """Give one host with two workers that hold a shard each and make a snapshot every seven steps.
    Each test leaves them training."""
    settings = {"store": "snapshot_every = 7"}
    folder = tmp_path_factory.mktemp("shards")
    with tiny_agents(folder, '2 = "tp2"', nodes="1", settings=settings, flags=FLAGS) as agents:
        agents.start("a")
        yield agents


def train(agents: Agents, steps: int = 16) -> int:
    """Wait until so many steps more are made since every rank has stepped. Returns the number of
    changes so far."""
    agents.wait_until(lambda: bool(agents.resizes()), "every rank has stepped")
    agents.wait_for_step(max(agents.lines()[-1]["step"], agents.resizes()[-1]["step"]) + steps)
    return len(agents.resizes())


def went_on(agents: Agents, changes: int) -> dict[str, Any]:
    """Wait until the job goes on behind a failure. Returns the report."""
    agents.wait_until(lambda: len(agents.resizes()) > changes, "the job goes on")
    report = agents.resizes()[-1]
    agents.wait_for_step(report["step"] + 3)
    check_steps(agents.lines())
    return report


def went_on_without_loss(agents: Agents, changes: int, made: int) -> dict[str, Any]:
    """Likewise, from the step at which it failed: of ``made`` lines on each step is there once."""
    report = went_on(agents, changes)
    assert report.get("steps_lost", 0) == 0, f"{report}\n{agents.logs()}"
    if report["recovery"]["state"]["origin"] == "snapshot":
        assert report["step"] % 7 == 0, report  # the snapshot was of the very step
    else:
        assert report["is_emergency"] and report["seconds"]["snapshot"] > 0, report
    steps = check_steps(agents.lines())[made - 1 :]
    assert steps == list(range(steps[0], steps[-1] + 1)), agents.logs()
    return report


@pytest.mark.fault
def test_a_script_that_raises_costs_no_step_though_nobody_else_has_its_state(
    shards: Agents,
) -> None:
    changes, made = train(shards), len(shards.lines())
    (shards.folder / "raise-1").touch()
    report = went_on_without_loss(shards, changes, made)
    assert "rank 1: RuntimeError: raise-1 was wanted" in report["reason"], report
    assert report["failure"]["kind"] == "the script raised RuntimeError", report
    assert "kind='the script raised RuntimeError'" in shards.text()
    assert "Traceback" in shards.text(), "the script's own words are in the log"


@pytest.mark.fault
@pytest.mark.campaign
def test_shards_of_two_steps_are_no_state(shards: Agents) -> None:
    """A rank fails between the last collective and its own update, which the other has made."""
    changes, unrescued = train(shards), shards.text().count("event=not_rescued step=")
    (shards.folder / "raise-late-1").touch()
    report = went_on(shards, changes)
    assert report["step"] % 7 == 0 and 1 <= report["steps_lost"] <= 8, report
    passed_over = report["recovery"]["others"]
    steps = [each["step"] for each in passed_over if each["origin"] == "survivors"]
    newest = steps[0]
    tried = [newest, newest - 1] if newest - 1 > report["step"] else [newest]  # else the snapshot's
    assert steps == tried, report
    counted = shards.text().count("event=not_rescued step=")
    assert counted == unrescued + len(tried), shards.logs()
    assert all(each["why"] for each in passed_over), report


@pytest.mark.fault
def test_a_worker_in_the_middle_of_an_update_is_not_believed(shards: Agents) -> None:
    changes, torn = train(shards), shards.text().count("event=torn rank=0")
    (shards.folder / "tear-0").touch()
    shards.wait_until(lambda: (shards.folder / "tear-0.held").exists(), "it stands in its update")
    os.kill(shards.workers()[1], signal.SIGKILL)
    shards.wait_until(lambda: shards.text().count("event=torn rank=0") > torn, "it says so")
    (shards.folder / "tear-0").unlink()
    report = went_on(shards, changes)
    assert report["step"] % 7 == 0 and report["steps_lost"] >= 1, report


@pytest.mark.fault
@pytest.mark.campaign
@pytest.mark.turns
def test_a_state_that_nobody_holds_is_lost_since_the_newest_generation(shards: Agents) -> None:
    changes = train(shards)
    os.kill(shards.workers()[1], signal.SIGKILL)
    report = went_on(shards, changes)
    assert report["step"] % 7 == 0 and 1 <= report["steps_lost"] <= 14, report
    assert "event=not_rescued" in shards.text(), shards.logs()


@pytest.mark.fault
def test_a_training_that_hangs_is_started_again_and_loses_no_step(tmp_path: Path) -> None:
    """A worker stands still, and the other waits for it in a collective."""
    settings, constants = {"resize": "hang_s = 3"}, {"resize.stall_s": 1.0}
    with tiny_agents(
        tmp_path, '2 = "tp1"', nodes="1", settings=settings, constants=constants, flags=FLAGS
    ) as agents:
        agents.start("a")
        train(agents)
        changes, made = len(agents.resizes()), len(agents.lines())
        os.kill(agents.workers()[1], signal.SIGSTOP)
        report = went_on_without_loss(agents, changes, made)
        assert "hangs: no worker has made a step for" in report["reason"], report
        assert "behind are a: rank 1 (does not answer: state='T" in report["reason"], report
        assert "event=stack rank=0" in agents.text(), "it is said where they stand"
