"""Both laws at once: what is lost with workers, hosts, files and all memory, and what is not."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from scalai.core.job.membership import Phase
from scalai.core.job.spacing import Pace
from support.simulated_workers import Worker
from support.two_laws import Train, World

NO_REPLICAS = ("--nnodes", "1:4", "--max-restarts", "9", "--replicas", "0")
DAMAGE = pytest.mark.parametrize("what", ["rotten", "cut", "wrong for the script"])


def workers(world: World, name: str) -> list[Worker]:
    (group,) = world.hosts[name].hands.groups.values()
    return list(group.workers.values())


def begun_at(world: World) -> int:
    """Return the step that the last round began from."""
    assert world.is_training(), world.log
    number = world.started[-1][1]
    assert number is not None
    return int(world.live.generations.step(number))


# ---------------------------------------------------------------------- memory that outlives


def trained(train: Train, hosts: str = "ab", **facts: object) -> tuple[World, int]:
    """Return a job that has gone beyond its newest generation, and its step."""
    world = train(hosts, **{"flags": ("--nnodes", "1:4"), **facts})
    world.go_on(30.0)
    _, step = world.furthest()
    assert step > world.live.state.newest_generation.step
    return world, step


def fail(world: World, name: str) -> None:
    """The script of a host's first worker raises."""
    number, _ = world.furthest()
    worker = workers(world, name)[0]
    world.hosts[name].hands.fail(number, worker, "Connection closed by peer")


def stop_worker(world: World) -> None:
    workers(world, "b")[0].is_stopped = True
    world.kill_worker("a", 0)


def silence(world: World) -> None:
    world.hosts["c"].is_silent = True
    world.kill_worker("a", 0)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda world: world.kill_worker("a", 0), id="a worker is killed"),
        pytest.param(stop_worker, id="another is stopped", marks=pytest.mark.fault),
        pytest.param(silence, id="a host is silent meanwhile", marks=pytest.mark.fault),
    ],
)
def test_who_does_not_answer_costs_no_step_where_others_hold_the_state(
    train: Train, fault: Callable[[World], None]
) -> None:
    world, step = trained(train, "abc")
    fault(world)
    world.go_on(180.0)
    assert begun_at(world) == step, world.log


def test_a_host_that_is_lost_costs_no_step_where_others_hold_the_state(train: Train) -> None:
    world, step = trained(train)
    left = world.job.budget.left
    world.kill("b", is_disk_lost=True)
    world.go_on(120.0)
    assert begun_at(world) == step and world.logged(f"event=rescued committed=2 step={step}")
    assert world.job.budget.left == left and not world.logged("event=went_back")


def test_what_nobody_else_held_is_lost_with_its_host(train: Train) -> None:
    world, step = trained(train, is_replicated=False)
    world.kill("b", is_disk_lost=False)
    world.go_on(120.0)
    assert world.logged(f"event=not_rescued step={step}"), world.log
    assert not world.is_training() or begun_at(world) < step


def test_a_worker_in_the_middle_of_an_update_is_not_believed(train: Train) -> None:
    world, step = trained(train)
    world.kill_worker("a", 0)
    for worker in (*workers(world, "a"), *workers(world, "b")):
        worker.is_torn, worker.step = True, step + 1
    world.go_on(120.0)
    assert begun_at(world) < step and world.logged("event=went_back"), world.log


@pytest.mark.fault
def test_the_furthest_step_is_written_that_is_whole(train: Train) -> None:
    world, step = trained(train, "abc")
    world.kill_worker("a", 0)
    for worker in workers(world, "b"):
        worker.step = step + 1  # it has ended an update that the others had only begun
    world.go_on(120.0)
    assert begun_at(world) == step + 1, world.log


@pytest.mark.fault
@pytest.mark.parametrize("shards", [1, 2])
def test_of_all_steps_at_which_survivors_may_stand_the_furthest_whole_one_is_gone_on_from(
    train: Train, shards: int
) -> None:
    """Of four ranks one is killed; each other one stands at the last step, has just made one more,
    or is in an update. Survivors at one step that hold all of it are always believed; where no step
    is whole, the newest generation counts."""
    world = train(shards=shards, flags=("--nnodes", "1:4", "--max-restarts", "1000"))
    for stands in product((0, 1, None), repeat=3):
        world.go_on(30.0)
        _, step = world.furthest()
        newest = world.live.state.newest_generation
        assert newest is not None and step > newest.step, world.log[-20:]
        alive = [worker for host in "ab" for worker in workers(world, host)][1:]
        for worker, more in zip(alive, stands, strict=True):
            worker.is_torn, worker.step = more is None, step + (more or 0)
        world.kill_worker("a", 0)
        world.go_on(180.0)
        held = {more: {1 + at for at, each in enumerate(stands) if each == more} for more in (0, 1)}
        whole = [
            step + more
            for more, ranks in held.items()
            if {rank % shards for rank in ranks} == set(range(shards))
        ]
        expected = max(whole, default=newest.step)
        assert begun_at(world) == expected, (stands, world.log[-30:])
        assert whole or stands not in ((0, 0, 0), (1, 1, 1)), "survivors at one step are believed"


def test_shards_of_two_steps_are_no_state(train: Train) -> None:
    world, step = trained(train, is_replicated=False)
    for worker in workers(world, "b"):
        worker.step = step + 1
    fail(world, "a")
    world.go_on(120.0)
    for tried in (step + 1, step):
        assert world.logged(f"event=not_rescued step={tried}"), world.log
    assert begun_at(world) < step, world.log


def test_a_failure_on_the_way_to_a_stop_costs_no_step(train: Train) -> None:
    world, _ = trained(train)
    for worker in workers(world, "b"):
        worker.is_late = True
    world.scale(2)
    world.go_on(20.0)
    _, step = world.furthest()
    world.kill("b", is_disk_lost=True)
    world.go_on(180.0)
    assert begun_at(world) == step, world.log


@pytest.mark.fault
def test_the_loss_that_was_the_failure_costs_no_restart(train: Train) -> None:
    world, step = trained(train)
    left = world.job.budget.left
    world.hosts["b"].is_silent = True
    fail(world, "a")
    world.go_on(180.0)
    assert begun_at(world) == step and world.logged("which was the failure"), world.log
    assert world.job.budget.left == left


def test_a_job_without_restarts_ends_with_what_lives(train: Train) -> None:
    world, step = trained(train, flags=("--nnodes", "2"))
    world.kill_worker("a", 0)
    world.go_on(60.0)
    assert world.phase is Phase.ENDED and world.live.exit_code == 1, world.log
    assert world.logged("the restart budget (--max-restarts) is used up")
    world.restart()
    world.go_on(60.0)
    assert begun_at(world) == step, world.log


# ---------------------------------------------------------------------- files that are damaged


def tear(world: World) -> None:
    """A worker dies in the middle of an update: what was written before is needed."""
    for name in "ab":
        for worker in workers(world, name):
            worker.is_torn = True
    world.kill_worker("b", 2)


def commit_unreplicated(world: World) -> int:
    """Let the job train until it has a newer generation without replicas; return its number."""
    world.go_on(60.0)
    before = world.newest_whole() or 0
    world.until(lambda: (world.newest_whole() or 0) > before, may=world.holds_back)
    return max(world.hosts["a"].store)


@DAMAGE
@pytest.mark.parametrize("is_replicated", [True, False])
def test_a_damaged_part_is_fetched_anew_from_who_has_it_at_no_further_restart(
    train: Train, what: str, is_replicated: bool
) -> None:
    """All hold all of it, or the other one keeps a replica."""
    world = train(is_replicated=is_replicated)
    world.go_on(30.0)
    newest, left = world.newest_whole(), world.job.budget.left
    world.hosts["a"].damage(what, 4)
    assert newest is not None and world.newest_whole() == newest
    tear(world)
    world.trains(300.0)
    assert world.logged("event=damage generation="), world.log[-30:]
    assert world.job.budget.left == left - 1, "the worker that died"
    assert {generation for _, generation in world.started[1:]} == {newest}
    # It has come whole again: no other coordinator hears of it.
    world.log.clear()
    world.replace_coordinator()
    world.trains(60.0)
    assert (world.newest_whole() or 0) >= newest
    assert not world.logged("event=damage "), world.log


@DAMAGE
@pytest.mark.parametrize(
    "is_heard", [True, pytest.param(False, marks=pytest.mark.fault)], ids=["heard", "unheard"]
)
def test_where_nothing_else_is_whole_the_job_ends_and_says_so(
    train: Train, what: str, is_heard: bool
) -> None:
    """Also where the coordinator has died before it heard what a host had found in its files."""
    world = train(is_replicated=False, flags=NO_REPLICAS)
    world.go_on(30.0)
    world.hosts["a"].damage(what, 4)
    if not is_heard:
        examine_unheard(world, max(world.hosts["a"].store))
    tear(world)
    world.go_on(600.0)
    assert world.phase is Phase.ENDED and world.live.exit_code == 3, world.log[-30:]
    (end,) = world.logged("event=exit")
    assert "nothing else is whole" in end and f"is {what}" in end and "host 'a'" in end
    assert all(host.store for host in world.hosts.values()), "nothing is deleted"


@DAMAGE
def test_what_is_damaged_before_it_is_replicated_is_passed_over(train: Train, what: str) -> None:
    world = train(is_replicated=False, snapshot_every=4)
    commit_unreplicated(world)
    world.hosts["a"].damage(what, 4)
    world.trains(120.0)
    assert world.logged("event=suspected by=b hosts=a"), world.log[-30:]
    assert world.logged("event=damage generation=")
    tear(world)
    world.trains(300.0)
    assert world.live.exit_code == 0, world.log[-30:]


def examine_unheard(world: World, number: int) -> None:
    """Host a reads its part again, and the coordinator dies before it hears what was found."""
    world.hosts["a"].examine(number)
    world.hosts["a"].unsent.clear()
    world.replace_coordinator()
    world.trains(60.0)
    assert world.logged("event=adopted"), world.log[-30:]


@pytest.mark.fault
def test_the_next_coordinator_has_what_is_not_whole_any_more_make_room(train: Train) -> None:
    """As the one before would have, had it lived to hear of it."""
    world = train(is_replicated=False, snapshot_every=4)
    newest = commit_unreplicated(world)
    world.hosts["a"].damage("rotten", 4)
    examine_unheard(world, newest)
    assert world.logged(f"event=given_up generation={newest}"), world.log[-30:]
    assert all(newest not in host.store for host in world.hosts.values())


@pytest.mark.fault
@pytest.mark.parametrize("later", range(5))
def test_whenever_the_coordinator_dies_behind_its_examination_an_older_state_is_gone_on_from(
    train: Train, later: int
) -> None:
    """As the one before would have: no person is asked."""
    world = train(is_replicated=False, snapshot_every=4)
    newest = commit_unreplicated(world)
    world.hosts["a"].damage("cut", 4)
    tear(world)
    world.until(lambda: bool(world.logged("event=damage generation=")))
    world.go_step_by_step(6 * later)
    world.replace_coordinator()
    world.trains(300.0)
    assert all(newest not in host.store for host in world.hosts.values())


# ---------------------------------------------------------------------- a disk of all hosts


def archiving(train: Train, hosts: str = "abc") -> World:
    """Return a job with a snapshot every 4 steps and an archive every 100 s; each host alone has
    written some of it, and no other keeps it."""
    return train(
        hosts, flags=NO_REPLICAS, is_replicated=False, snapshot_every=4, archive_every_s=100.0
    )


def lose(world: World, hosts: str) -> None:
    for host in hosts:
        world.kill(host, is_disk_lost=True)


@pytest.mark.fault
def test_generations_come_to_the_disk_and_older_ones_go(train: Train) -> None:
    world = archiving(train)
    assert not world.disk.shown, "the first one comes after a while"
    world.go_on(120.0)
    (first,) = world.disk.shown
    world.go_on(700.0)
    world.disk.check()
    assert len(world.disk.shown) == 2 and first < min(world.disk.shown), world.log
    assert world.logged("event=archived generation=")


@pytest.mark.fault
@pytest.mark.parametrize("lost", ["ab", "abc"], ids=["most", "all, and others come"])
def test_a_job_that_loses_more_than_it_can_replace_goes_back_to_the_disk_unasked(
    train: Train, lost: str
) -> None:
    world = archiving(train)
    world.go_on(300.0)
    archived = max(world.disk.shown)
    lose(world, lost)
    if lost == "abc":
        world.restart()
        world.add("d")
    world.trains(120.0)
    assert world.started[-1][1] == archived, world.log
    assert lost == "abc" or world.logged("from='a durable directory'"), world.log
    _, step = world.furthest()
    world.go_on(120.0)
    assert world.furthest()[1] > step


@pytest.mark.fault
def test_what_not_all_have_written_is_not_shown(train: Train) -> None:
    """A host dies in the middle of an archive, with its part."""
    world = archiving(train)
    world.until(
        lambda: bool(world.disk.hidden),
        may=lambda name, what: (
            (name, what) != ("c", "work") or world.job.copies.archiving is None
        ),  # else it would write its part
    )
    lose(world, "c")
    world.go_on(60.0)
    assert not world.disk.shown and world.logged("event=archive_given_up"), world.log
    world.go_on(200.0)
    assert world.disk.shown, world.log
    world.disk.check()


@pytest.mark.fault
def test_what_all_have_written_is_shown_though_a_host_dies_before(train: Train) -> None:
    world = archiving(train)
    world.until(lambda: len(next(iter(world.disk.hidden.values()), {})) == 3)
    lose(world, "c")
    world.go_on(30.0)
    assert world.disk.shown or world.logged("event=archive_given_up"), world.log
    world.disk.check()


@pytest.mark.fault
def test_a_disk_that_refuses_is_said_and_tried_again(train: Train) -> None:
    world = archiving(train)
    world.disk.is_full = True
    world.go_on(150.0)
    assert world.logged("event=not_archived host=a the disk is full"), world.log
    assert world.is_training() and not world.disk.shown
    world.disk.is_full = False
    world.go_on(150.0)
    assert world.disk.shown, world.log


@pytest.mark.fault
def test_a_host_that_joins_brings_nothing_back_that_the_disk_has(train: Train) -> None:
    world = archiving(train, "ab")
    world.go_on(300.0)
    _, step = world.furthest()
    world.add("c")
    world.trains(120.0)
    assert len(world.active) == 3, world.log
    assert world.furthest()[1] > step
    assert max(len(host.store) for host in world.hosts.values()) <= 2


@pytest.mark.fault
def test_what_an_earlier_run_left_on_the_disk_is_gone_back_to_by_a_person_only(
    train: Train,
) -> None:
    world = archiving(train)
    world.go_on(150.0)
    assert world.disk.shown
    world.restart()
    for host in "abc":
        world.add(host)
    world.trains(60.0)
    assert not world.job.copies.archived, world.log
    lose(world, "ab")
    world.go_on(60.0)
    assert world.phase is Phase.WAITING, world.log


# ---------------------------------------------------------------------- notices and health


@pytest.mark.fault
def test_a_notice_with_enough_time_is_a_drain_that_loses_no_step(train: Train) -> None:
    world = train(is_replicated=False)
    world.notice("a", 300.0)
    world.trains(60.0)
    assert world.hosts["a"].agent.exit == 0, world.log
    assert world.logged("event=notice host=a") and not world.logged("event=went_back")


@pytest.mark.fault
def test_a_host_that_is_killed_before_it_has_drained_has_given_what_it_held(train: Train) -> None:
    world = train(is_replicated=False, flags=("--nnodes", "1:4", "--replicas", "0"))
    newest, change = world.newest_whole(), world.job.change
    slow = replace(change, pace=Pace(step_s=60.0, write_s=1.0, start_s=1.0))
    world.live.state = replace(world.live.state, change=slow)
    for worker in workers(world, "a"):
        worker.is_hung = True  # in the middle of a step of a minute
    world.notice("a", 20.0)
    world.go_on(5.0)
    assert world.logged("event=evacuated"), world.log
    world.kill("a", is_disk_lost=True)
    world.trains(120.0)
    assert newest is not None, world.log
    assert world.started[-1][1] == newest


@pytest.mark.parametrize(
    "phase",
    [None, *(pytest.param(each, marks=pytest.mark.fault) for each in (
        Phase.FREEZING, Phase.STOPPING, Phase.STARTING, Phase.RUNNING))],
)  # fmt: skip
def test_who_fails_its_health_check_is_not_used_until_it_passes_by_another_coordinator_neither(
    train: Train, phase: Phase | None
) -> None:
    """A worker fails, then its host the check; ``phase``: at which the coordinator is replaced."""
    world = train("abc", has_checks=True)
    world.hosts["b"].is_sick = True
    world.kill_worker("b", workers(world, "b")[0].rank)
    if phase is not None:
        world.go_on(0.5)
        world.until(lambda: world.phase is phase)
        world.replace_coordinator()
    for is_sick, used in ((True, {"a", "c"}), (False, {"a", "b", "c"})):
        world.hosts["b"].is_sick = is_sick
        world.trains(400.0)
        assert set(world.active) == used, world.log[-8:]
