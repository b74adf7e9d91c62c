"""Both laws at once: a coordinator dies, and another one takes its place. The workers train on, no
step is lost, the job can be changed again, and what it remembers holds: restarts that are used up,
changes that have failed, what lies on the disk, and what persons have asked for."""

from pathlib import Path
from typing import Any

import pytest

from scalai.core.errors import UsageError
from scalai.core.host.events import Commanded, GroupOver
from scalai.core.job.membership import Phase
from scalai.core.messages import commands
from scalai.launch.coordinator.person_calls import Scale
from support.simulated_workers import Clock
from support.two_laws import Train, World, training

pytestmark = pytest.mark.fault

MOST_ACTS = 400
SPACED = {"snapshot_every": "auto", "is_async": True}


def workers(world: World) -> int:
    """Return how many workers train."""
    assert world.is_training(), world.log[-8:]
    return int(world.live.state.current.degrees.world_size)


def replaced(world: World, seconds: float, after_s: float = 0.0) -> World:
    """The coordinator dies after this time, and its successor has so many seconds."""
    world.go_on(after_s)
    world.replace_coordinator()
    world.go_on(seconds)
    return world


def test_the_workers_train_on_under_the_new_coordinator(train: Train) -> None:
    world = train()
    (number, step), started = world.furthest(), list(world.started)
    replaced(world, 10.0)
    assert world.phase is Phase.RUNNING and world.job.round == number
    world.go_on(30.0)
    assert world.started == started, "nothing was started anew"
    assert world.furthest()[1] > step and world.logged("event=adopted")


@pytest.mark.parametrize("late", ["a", "b", "ab"])
def test_a_round_is_adopted_however_late_its_hosts_come(train: Train, late: str) -> None:
    world = train()
    started = list(world.started)
    for name in late:
        world.hosts[name].is_silent = True
    replaced(world, 12.0)
    for name in late:
        world.hosts[name].is_silent = False
    world.trains(30.0)
    assert world.started == started, world.log[-6:]


def spaced(world: World) -> set[Any]:
    number, _ = world.furthest()
    return {host.hands.groups[number].spaced for host in world.hosts.values()}


def test_snapshots_stay_as_far_apart_as_the_workers_know(train: Train) -> None:
    world = train(**SPACED)
    world.space(7, 20)
    replaced(world, 30.0, after_s=60.0)
    assert world.phase is Phase.RUNNING and world.job.spacing.every == 7
    before = spaced(world)
    world.go_on(30.0)
    assert before == spaced(world) and len(before) == 1, "nobody is told what all know"


def test_where_the_last_word_has_reached_some_all_are_told(train: Train) -> None:
    world = train(**SPACED)
    number, step = world.furthest()
    world.hosts["a"].agent.feed(Commanded(commands.Space(number, step + 20, 7), None))
    replaced(world, 90.0)
    (found,) = spaced(world)
    assert world.phase is Phase.RUNNING and found is not None, world.log


@pytest.mark.parametrize("is_asked_before", [True, False])
def test_what_a_person_asks_for_holds_under_the_new_coordinator(
    train: Train, is_asked_before: bool
) -> None:
    world = train()
    step = world.furthest()[1]
    if is_asked_before:
        world.scale(2)
    replaced(world, 60.0, after_s=60.0)
    if not is_asked_before:
        world.scale(2)
        world.go_on(60.0)
    assert workers(world) == 2 and world.furthest()[1] > step
    assert world.started[-1][1] is not None


def test_a_host_that_is_gone_with_the_coordinator_costs_no_step(train: Train) -> None:
    world = train("abc")
    step = world.furthest()[1]
    world.kill("a", is_disk_lost=True)
    replaced(world, 100.0)
    assert world.is_training(), world.log[-8:]
    assert "a" not in world.live.state.current.members and world.furthest()[1] >= step


def fixed(folder: Path, flags: tuple[str, ...], hosts: str) -> World:
    world = World(folder, flags=("--nnodes", *flags))
    for name in hosts:
        world.add(name)
    return world


def test_a_job_that_waits_goes_on_waiting(tmp_path: Path) -> None:
    world = fixed(tmp_path, ("2:4", "--max-restarts", "9"), "a")
    replaced(world, 60.0, after_s=10.0)
    assert world.phase is Phase.WAITING
    world.add("b")
    world.trains(60.0)


@pytest.mark.parametrize("acts", range(0, 60, 6))
def test_a_job_of_fixed_size_without_restarts_outlives_its_coordinator(
    tmp_path: Path, acts: int
) -> None:
    """At its first start, and at the stop of a change."""
    world = fixed(tmp_path, ("2", "--max-restarts", "0"), "ab")
    world.go_step_by_step(acts)
    replaced(world, 90.0)
    assert world.is_training(), world.log[-8:]
    world.scale(2)
    world.go_step_by_step(acts)
    replaced(world, 150.0)
    assert world.is_training(), world.log[-8:]


EVERYWHERE = [pytest.mark.campaign, pytest.mark.turns]


@pytest.mark.parametrize(
    ("hosts", "is_replicated", "every"),
    [
        ("ab", False, 24),
        ("abc", True, 24),
        *(
            pytest.param(hosts, is_replicated, 3, marks=EVERYWHERE)
            for hosts in ("ab", "abc")
            for is_replicated in (True, False)
        ),
    ],
)
def test_wherever_a_change_is_when_the_coordinator_dies_no_step_is_lost(
    tmp_path: Path, hosts: str, is_replicated: bool, every: int
) -> None:
    phases = set()
    for acts in range(0, MOST_ACTS, every):
        Clock.now = 1000.0
        world = training(tmp_path, hosts, is_replicated=is_replicated, snapshot_every=7)
        world.scale(2)
        world.go_step_by_step(acts)
        phases.add(world.phase)
        _, step = world.furthest()
        newest = world.newest_whole()
        replaced(world, 150.0)
        why = f"after {acts} acts: {world.phase} {world.log[-12:]}"
        assert world.is_training(), why
        assert world.furthest()[1] >= step, why
        assert (world.newest_whole() or 0) >= (newest or 0), why
    if every == 3:
        assert {Phase.RUNNING, Phase.BUILDING, Phase.STARTING, Phase.SNAPSHOTTING} <= phases


def finish(world: World, name: str) -> None:
    """The workers of a host come to the end of their script."""
    host = world.hosts[name]
    host.agent.feed(GroupOver(host.agent.state.round.number))  # type: ignore[union-attr]


def all_at_once(world: World, name: str) -> None:
    """Let one host do all that it can, alone."""
    for _ in range(60):
        for what in ("net", "work", "workers"):
            world.act(name, what)


def test_what_a_host_tells_before_the_round_is_adopted_is_heard_then(train: Train) -> None:
    world = train()
    world.replace_coordinator()
    all_at_once(world, "a")
    for name in "ab":
        finish(world, name)
        all_at_once(world, name)
    world.go_on(30.0)
    assert world.phase is Phase.ENDED and world.live.exit_code == 0, world.log[-5:]


def test_a_job_whose_workers_have_all_finished_is_not_begun_again(train: Train) -> None:
    world = train(flags=("--nnodes", "2", "--max-restarts", "0"))
    started = list(world.started)
    finish(world, "b")
    world.kill("a", is_disk_lost=True)  # it has had its exit
    replaced(world, 60.0)
    assert world.phase is Phase.ENDED and world.live.exit_code == 0, world.log[-5:]
    assert world.started == started


def test_a_job_that_had_begun_anew_keeps_what_it_has_made_since(train: Train) -> None:
    world = train(flags=("--nnodes", "1:4", "--fresh"), snapshot_every=7)
    world.go_on(60.0)
    newest = world.newest_whole()
    assert newest is not None and newest > 1
    replaced(world, 30.0)
    assert world.phase is Phase.RUNNING and (world.newest_whole() or 0) >= newest
    assert not world.logged("gives up"), world.log
    world.kill("a", is_disk_lost=False)
    world.trains(60.0)
    assert world.started[-1][1] is not None


# ---------------------------------------------------------------------- requests


def test_a_request_is_refused_until_it_is_known_what_runs(train: Train) -> None:
    world, person = train(), None
    world.replace_coordinator()
    with pytest.raises(UsageError, match="Ask again in a moment"):
        world.desk.handle(person, Scale(2, None, None, dry_run=False))  # type: ignore[arg-type]


def test_a_request_that_workers_are_built_for_is_not_forgotten(train: Train) -> None:
    world = train()
    world.scale(2)
    world.go_step_by_step(6)
    assert world.phase in (Phase.BUILDING, Phase.PREPARING)
    built = world.job.change.last_round
    replaced(world, 120.0)
    assert workers(world) == 2
    assert world.job.round > built, "no number of a round is used twice"


def hear(world: World, hosts: str = "abc") -> None:
    for name in hosts:
        world.act(name, "net")


@pytest.mark.parametrize(
    ("phase", "heard"),
    [(Phase.PREPARING, "ab"), (Phase.DRAINING, "ab"), (Phase.SNAPSHOTTING, "ab"),
     (Phase.PREPARING, "b")],
)  # fmt: skip
def test_a_request_for_which_nothing_is_built_yet_outlives_the_coordinator(
    train: Train, phase: Phase, heard: str
) -> None:
    """Though only one host has heard of it."""
    world = train()
    world.scale(2)
    world.until(lambda: world.phase is phase)
    world.scale(1)
    hear(world, heard)
    replaced(world, 150.0)
    assert workers(world) == 1, world.log[-8:]


def test_a_request_outlives_several_coordinators_and_those_that_know_nothing(train: Train) -> None:
    world = train()
    world.scale(2)
    world.go_on(60.0)
    for _ in range(3):
        world.replace_coordinator()
        hear(world, "a")
    world.go_on(60.0)
    assert workers(world) == 2, world.log[-8:]


@pytest.mark.parametrize("before", [3, 0], ids=["started by hand", "the first one's machine"])
def test_a_coordinator_with_the_term_of_the_one_before_it_goes_by_what_hosts_have_kept(
    train: Train, before: int
) -> None:
    """It knows of none before it: its machine has lost its card, or was started anew; and a new
    host is there first."""
    world = train()
    for _ in range(before):
        replaced(world, 30.0)
    world.scale(2)
    world.go_on(60.0)
    assert workers(world) == 2 and world.term == 1 + before
    world.begin_coordinator()
    world.add("c")
    hear(world, "c")
    world.go_on(120.0)
    assert workers(world) == 2, world.log[-8:]
    assert world.live.members.term == before + 2, "what it says is later than what they had"


# ---------------------------------------------------------------------- failures


def test_a_crash_loop_gets_no_restarts_from_new_coordinators(train: Train) -> None:
    world = train(flags=("--nnodes", "2", "--max-restarts", "2"))
    for left in (1, 0):
        world.kill_worker("a", 0)
        world.trains(120.0)
        assert world.job.budget.left == left, world.log[-8:]
        replaced(world, 30.0)
        assert world.is_training() and world.job.budget.left == left, world.log[-8:]
    world.kill_worker("a", 0)
    world.go_on(120.0)
    assert world.phase is Phase.ENDED and world.live.exit_code == 1, world.log[-8:]
    assert world.logged("restart budget")


@pytest.mark.parametrize("phase", [Phase.FREEZING, Phase.RESCUING, Phase.STOPPING, Phase.STARTING])
def test_a_failure_counts_once_though_two_coordinators_hear_of_it(
    train: Train, phase: Phase
) -> None:
    world = train()
    left = world.job.budget.left
    world.kill_worker("a", 0)
    world.until(lambda: world.phase is phase)
    hear(world)
    replaced(world, 150.0)
    assert world.is_training() and world.job.budget.left == left - 1, world.log


def failed_change(train: Train) -> World:
    """Return a job on a and b, for which a change to three hosts has failed on c."""
    world = train()
    world.add("c")
    world.hosts["c"].cannot_start = True
    world.trains(200.0)
    assert world.job.change.failed, world.log
    return world


@pytest.mark.parametrize("is_late", [False, True])
def test_a_change_that_has_failed_is_not_tried_again_under_a_new_coordinator(
    train: Train, is_late: bool
) -> None:
    """Though its host comes to the second coordinator only."""
    world = failed_change(train)
    started = list(world.started)
    world.hosts["c"].is_silent = is_late
    for _ in range(2):
        replaced(world, 20.0 if is_late else 120.0)
    world.hosts["c"].is_silent = False
    world.trains(120.0)
    assert world.job.change.failed, world.log[-8:]
    assert world.started == started, world.log[-8:]


@pytest.mark.parametrize("is_in_before", [False, True])
def test_it_is_tried_again_where_the_agent_of_its_host_is_a_new_one(
    train: Train, is_in_before: bool
) -> None:
    """Also where that agent was new just before the coordinator was lost."""
    world = failed_change(train)
    world.kill("c", is_disk_lost=False)
    if is_in_before:
        world.go_on(0.5)
        hear(world, "c")
        hear(world)
    else:
        world.hosts["c"].cannot_start = False
    replaced(world, 200.0)
    assert world.is_training() and len(world.active) == 3, world.log[-8:]


def test_a_change_that_fails_under_a_new_coordinator_goes_back_to_what_ran(train: Train) -> None:
    world = train()
    left = world.job.budget.left
    world.add("c")
    world.hosts["c"].cannot_start = True
    world.go_on(2.0)
    world.until(lambda: world.phase is Phase.STARTING)
    hear(world)
    replaced(world, 300.0)
    assert world.is_training() and world.job.budget.left == left, world.log
    assert world.active == "ab" and world.job.change.failed


def test_what_the_job_has_brought_to_the_disk_is_known_to_the_next_coordinator(
    train: Train,
) -> None:
    world = train(snapshot_every=7, archive_every_s=30.0)
    world.go_on(120.0)
    archived = world.job.copies.archived
    assert archived, world.log
    replaced(world, 12.0)
    assert world.job.copies.archived[: len(archived)] == archived, world.log


def test_steps_that_were_lost_are_told_to_workers_of_later_coordinators_rounds(
    train: Train,
) -> None:
    """The ledger of samples keeps them, by the names of the rounds that had done them."""
    world = train()
    for name in "ab":
        world.kill(name, is_disk_lost=False)
    world.go_on(120.0)
    lost = [(f"{world.live.run}-{it.round}", it.until) for it in world.job.states.lost]
    assert world.is_training() and lost, world.log[-8:]
    for _ in range(2):
        replaced(world, 30.0)
        assert world.is_training(), world.log[-8:]
        assert [(it.round, it.until) for it in world.job.states.lost] == lost
    world.scale(2)
    world.go_on(60.0)
    rounds = [host.agent.state.round for host in world.hosts.values()]
    starts = [it.command for it in rounds if it and isinstance(it.command, commands.Start)]
    heard = {it.round for command in starts for it in command.lost}
    assert heard == {name for name, _ in lost}
