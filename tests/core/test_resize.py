"""The rules of membership: tables of what happens, and random histories with simulated hosts."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from membership_simulation import Simulation, assign_all, job

from scalai.core import membership as m
from scalai.core.degrees import Degrees
from scalai.core.resize import TRAINING, active, advance, staying

RESTING = (m.Phase.WAITING, m.Phase.RUNNING, m.Phase.ENDED)


def two_hosts(**settings: object) -> Simulation:
    """Return a running job on hosts a and b, two slots each, whose start is stored."""
    simulation = Simulation(job(**{"max_hosts": 2, **settings}))
    simulation.join("a", 2)
    simulation.join("b", 2)
    simulation.settle()
    simulation.snapshot()
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING
    return simulation


def rounds(simulation: Simulation) -> list[m.StartRound]:
    return [action for action in simulation.said if isinstance(action, m.StartRound)]


def until(simulation: Simulation, phase: m.Phase) -> None:
    """Let the hosts answer until the job is in this phase."""
    while simulation.job.phase is not phase:
        simulation.answer(simulation.waiting()[0])


# ------------------------------------------------------------------ planned changes


def test_a_full_job_starts_at_once_and_a_smaller_one_once_it_has_settled() -> None:
    simulation = Simulation(job(max_hosts=2))
    simulation.join("a", 2)
    assert simulation.job.phase is m.Phase.WAITING
    simulation.join("b", 2)
    assert simulation.job.phase is m.Phase.STARTING
    alone = Simulation(job(max_hosts=2))
    alone.join("a", 2)
    alone.tick(0.5)
    assert alone.job.phase is m.Phase.WAITING
    alone.tick(0.6)
    assert alone.job.phase is m.Phase.STARTING


def test_two_joins_within_the_settling_time_are_one_change() -> None:
    simulation = Simulation(job(max_hosts=4))
    simulation.join("a", 2)
    simulation.settle()
    simulation.join("b", 1)
    simulation.tick(0.5)
    simulation.join("c", 1)
    simulation.tick(0.8)
    assert simulation.job.phase is m.Phase.RUNNING
    simulation.settle()
    assert [r.assignment.degrees.world_size for r in rounds(simulation)] == [2, 4]


def test_the_first_host_may_drain_and_nothing_is_lost() -> None:
    simulation = two_hosts()
    simulation.train(7)
    simulation.feed(m.HostLeaving("a", simulation.now))
    simulation.settle()
    assert set(simulation.hosts) == {"b"} and simulation.job.phase is m.Phase.RUNNING
    last = rounds(simulation)[-1]
    assert last.assignment.active == ("b",) and last.steps_lost == 0
    assert simulation.job.failures_left == 3


def test_hosts_that_stay_keep_their_order() -> None:
    simulation = Simulation(job(max_hosts=3))
    for name in "cab":
        simulation.join(name, 2)
    simulation.settle()
    simulation.feed(m.HostLeaving("c", simulation.now))
    simulation.settle()
    simulation.join("c", 2)
    simulation.settle()
    assert [name for name, _ in staying(simulation.job)] == ["a", "b", "c"]


def test_an_idle_host_comes_and_goes_without_a_resize() -> None:
    simulation = Simulation(job(max_hosts=2, assign=assign_all(allowed=(2, 4))))
    simulation.join("a", 2)
    simulation.join("b", 1)
    simulation.settle()
    assert simulation.job.current is not None
    assert simulation.job.current.workers == (("a", 2), ("b", 0))
    simulation.feed(m.HostLeaving("b", simulation.now))
    simulation.settle()
    simulation.join("c", 1)
    simulation.settle()
    assert len(rounds(simulation)) == 1 and set(simulation.hosts) == {"a", "c"}


def test_a_stop_that_comes_too_late_is_taken_back_and_tried_with_more_margin() -> None:
    simulation = two_hosts()
    simulation.feed(m.HostLeaving("b", simulation.now))
    stops = [simulation.job.stop]
    for _ in range(3):
        for name in ("a", "b"):
            simulation.hosts[name].step = simulation.job.stop
            simulation.answer(name)
        stops.append(simulation.job.stop)
        # The hosts forget the old stop before they hear of the new one.
        assert isinstance(simulation.said[-2], m.Withdraw)
    assert [later - sooner for sooner, later in pairwise(stops)] == [2, 4, 8]
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING and simulation.job.margin == 1


def test_the_last_host_saves_to_the_durable_directory_and_the_job_is_resumable() -> None:
    simulation = two_hosts(has_durable_dir=True)
    simulation.feed(m.HostLeaving("a", simulation.now))
    simulation.feed(m.HostLeaving("b", simulation.now))
    simulation.settle()
    assert [(e.hosts, e.code) for e in simulation.exits] == [(("a", "b"), 75)]


@pytest.mark.parametrize("what", ["lost", "full"])
def test_a_part_that_is_not_saved_is_no_resumable_end(what: str) -> None:
    simulation = two_hosts(has_durable_dir=True)
    simulation.feed(m.HostLeaving("a", simulation.now))
    simulation.feed(m.HostLeaving("b", simulation.now))
    until(simulation, m.Phase.SAVING)
    if what == "lost":
        simulation.lose("b")
    else:
        simulation.feed(m.NotSaved("b", "no space left"))
    assert [e.code for e in simulation.exits] == [1]


def test_a_host_may_leave_a_job_that_has_not_begun() -> None:
    simulation = Simulation(job(assign=assign_all(minimum=3)))
    simulation.join("a", 2)
    simulation.join("b", 2)
    simulation.settle()
    simulation.feed(m.HostLeaving("a", simulation.now))
    assert simulation.said[-1] == m.Release(0, None, ("a",))
    simulation.feed(m.HostLeaving("b", simulation.now))
    assert [(e.hosts, e.code) for e in simulation.exits] == [(("b",), 0)]


def test_where_no_world_fits_without_a_leaving_host_the_job_goes_on_with_it() -> None:
    simulation = two_hosts(assign=assign_all(minimum=2))
    simulation.feed(m.HostLeaving("a", simulation.now))
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING and active(simulation.job) == {"a", "b"}
    simulation.join("c", 2)
    simulation.settle()
    assert set(simulation.hosts) == {"b", "c"} and rounds(simulation)[-1].steps_lost == 0


# ------------------------------------------------------------------ failures


PHASES = [
    m.Phase.STARTING, m.Phase.PREPARING, m.Phase.DRAINING, m.Phase.COMMITTING, m.Phase.STOPPING
]  # fmt: skip


@pytest.mark.parametrize("victim", ["a", "b"])
@pytest.mark.parametrize("phase", PHASES)
def test_with_replicas_a_host_lost_in_a_resize_costs_no_step_that_was_deposited(
    phase: m.Phase, victim: str
) -> None:
    simulation = two_hosts(max_hosts=3)
    simulation.train(5)
    simulation.join("c", 2)
    simulation.tick()
    until(simulation, phase)
    stop = simulation.job.stop
    simulation.lose(victim)
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING
    assert victim not in active(simulation.job)
    newest = simulation.job.newest_generation
    assert newest is not None
    lost = rounds(simulation)[-1].steps_lost
    if phase is m.Phase.PREPARING:  # the workers had no agreed stop yet
        assert newest.step < stop and lost > 0
    else:
        # In a start, who was quick has made the first step: it is made again.
        assert newest.step == stop and lost == (phase is m.Phase.STARTING)


def test_without_replicas_a_host_lost_at_the_commit_costs_the_steps_since_the_generation() -> None:
    """The hosts that stay answer for a generation that is not whole any more: none is awaited for
    ever, and the older one is used."""
    simulation = two_hosts(max_hosts=3)
    simulation.train(5)
    simulation.is_replicated = False
    simulation.feed(m.HostLeaving("b", simulation.now))
    until(simulation, m.Phase.COMMITTING)
    reached = simulation.job.stop
    simulation.lose("b")
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING
    last = rounds(simulation)[-1]
    assert last.steps_lost == reached - simulation.steps[last.generation or 0] > 0


def test_workers_that_fail_start_again_from_the_newest_generation_within_the_budget() -> None:
    simulation = two_hosts(failures_left=2)
    for left in (1, 0):
        simulation.train(3)
        made = simulation.hosts["b"].step - simulation.steps[1]
        simulation.feed(m.WorkersFailed("a", simulation.job.round, "rank 0 died"))
        simulation.settle()
        assert (simulation.job.phase, simulation.job.failures_left) == (m.Phase.RUNNING, left)
        assert rounds(simulation)[-1].steps_lost == made >= 3
    simulation.feed(m.WorkersFailed("a", simulation.job.round, "rank 0 died"))
    assert [e.code for e in simulation.exits] == [1]


def test_resizes_do_not_count_against_the_budget() -> None:
    simulation = two_hosts(failures_left=0)
    for _ in range(3):
        simulation.feed(m.HostLeaving("b", simulation.now))
        simulation.settle()
        simulation.join("b", 2)
        simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING and len(rounds(simulation)) == 7


@pytest.mark.parametrize("phase", [p for p in m.Phase if p not in (m.Phase.RUNNING,)])
def test_a_failure_of_an_earlier_round_is_ignored(phase: m.Phase) -> None:
    state = replace(two_hosts().job, phase=phase, round=5)
    assert advance(state, m.WorkersFailed("a", 4, "late")) == (state, ())


def test_a_second_change_during_a_resize_starts_again_from_the_same_generation() -> None:
    simulation = two_hosts(max_hosts=4)
    simulation.train(5)
    simulation.join("c", 2)
    simulation.tick()
    until(simulation, m.Phase.STARTING)
    simulation.join("d", 2)
    simulation.tick()
    assert simulation.job.phase is m.Phase.STOPPING
    simulation.settle()
    first, second = rounds(simulation)[-2:]
    assert first.generation == second.generation and second.steps_lost <= 1
    assert second.assignment.degrees.world_size == 8


def test_a_snapshot_replaces_the_older_generation_only_once_every_host_has_it() -> None:
    simulation = two_hosts()
    simulation.train(4)
    simulation.snapshot()
    number = simulation.numbers
    simulation.answer("a")
    assert m.Release(1, number, ()) not in simulation.said
    simulation.answer("b")
    assert simulation.said[-1] == m.Release(1, number, ())


@pytest.mark.parametrize("phase", [m.Phase.PREPARING, m.Phase.DRAINING])
def test_a_snapshot_during_a_drain_makes_room_for_the_deposit_after_it(phase: m.Phase) -> None:
    simulation = two_hosts()
    simulation.train(4)
    simulation.feed(m.HostLeaving("b", simulation.now))
    until(simulation, phase)
    simulation.snapshot()
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING and set(simulation.hosts) == {"a"}


def test_an_idle_host_that_goes_during_a_snapshot_does_not_keep_older_generations() -> None:
    simulation = two_hosts(max_hosts=3, assign=assign_all(allowed=(4,)))
    simulation.join("c", 2)
    simulation.settle()
    simulation.train(4)
    simulation.snapshot()
    simulation.lose("c")
    simulation.settle()
    assert [len(host.parts) for host in simulation.hosts.values()] == [1, 1]


def test_a_host_that_comes_back_brings_the_state_that_the_job_waits_for() -> None:
    simulation = two_hosts()
    simulation.is_replicated = False
    simulation.feed(m.HostLeaving("b", simulation.now))
    simulation.join("c", 2)
    simulation.settle()
    simulation.train(3)
    lost = simulation.lose("c")
    simulation.settle()
    assert simulation.job.phase is m.Phase.WAITING
    *_, told = (action for action in simulation.said if isinstance(action, m.Say))
    assert "if their memory is lost: stop the job, run scalai clean" in told.text
    simulation.join("c", 2, lost.parts)
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING
    assert rounds(simulation)[-1].generation == max(lost.parts)


def test_an_ended_job_stays_ended() -> None:
    ended = replace(two_hosts().job, phase=m.Phase.ENDED)
    covered = ended.generations
    for event in (
        m.HostJoined("z", 8, covered, False, 9.0), m.HostLeaving("a", 9.0), m.Ticked(99.0, 3),
        m.HostLost("a", covered, 9.0), m.WorkersFailed("a", 1, "late"), m.Finished("a", 1),
    ):  # fmt: skip
        assert advance(ended, event) == (ended, ())


def test_the_job_is_done_when_the_workers_of_every_host_are() -> None:
    simulation = two_hosts()
    simulation.feed(m.Finished("a", 1))
    assert simulation.job.phase is m.Phase.RUNNING
    simulation.feed(m.Finished("b", 1))
    assert [(e.hosts, e.code) for e in simulation.exits] == [(("a", "b"), 0)]


def test_idle_hosts_do_not_make_an_assignment_another_one() -> None:
    small = m.Assignment((("a", 2),), Degrees(1, 1, 2), 1, "")
    assert small.is_same_as(m.Assignment((("a", 2), ("b", 0)), Degrees(1, 1, 2), 2, "other"))
    assert not small.is_same_as(m.Assignment((("a", 2),), Degrees(2, 1, 1), 1, ""))


# ------------------------------------------------------------------ workers that are built ahead


def building(**settings: object) -> Simulation:
    """Return a job on a and b that has begun to build for c as well."""
    simulation = two_hosts(**{"max_hosts": 3, "build_timeout_s": 30.0, **settings})
    simulation.train(5)
    simulation.join("c", 2)
    simulation.tick(1.0)
    assert simulation.job.phase is m.Phase.BUILDING
    return simulation


def test_workers_train_on_while_the_next_ones_build_and_stop_once_all_have_built() -> None:
    simulation = building()
    for name in "abc":
        assert not any(isinstance(action, m.Prepare) for action in simulation.said)
        simulation.train(2)
        simulation.answer(name)
    assert simulation.job.phase is m.Phase.PREPARING
    simulation.settle()
    last = rounds(simulation)[-1]
    assert last.is_built and last.steps_lost == 0
    assert last.assignment.active == ("a", "b", "c")
    assert simulation.steps[last.generation or 0] > 10  # of the stop, not of the start


def test_a_host_that_leaves_is_not_kept_by_what_is_built() -> None:
    simulation = two_hosts(build_timeout_s=30.0)
    simulation.feed(m.HostLeaving("a", simulation.now))
    assert [type(action) for action in simulation.said[-2:]] == [m.Build, m.Prepare]
    assert simulation.job.phase is m.Phase.PREPARING
    simulation.settle()
    assert rounds(simulation)[-1].is_built and set(simulation.hosts) == {"b"}


def test_where_a_host_cannot_build_the_workers_start_after_the_stop() -> None:
    simulation = two_hosts(max_hosts=3, build_timeout_s=30.0, failures_left=0)
    simulation.cannot_build.add("b")
    simulation.join("c", 2)
    simulation.settle()
    first, last = rounds(simulation)
    assert not last.is_built and last.assignment.active == ("a", "b", "c")
    assert last.round == first.round + 2, "the number of what was given up is not used again"


def test_what_takes_too_long_to_build_is_given_up() -> None:
    simulation = building()
    simulation.tick(29.0)
    assert simulation.job.phase is m.Phase.BUILDING
    simulation.tick(2.0)
    assert [type(action) for action in simulation.said[-3:]] == [m.GiveUp, m.Say, m.Prepare]


def test_another_change_while_they_build_builds_anew() -> None:
    simulation = building(max_hosts=4)
    simulation.join("d", 2)
    assert [type(action) for action in simulation.said[-2:]] == [m.GiveUp, m.Build]
    simulation.settle()
    assert len(rounds(simulation)) == 2 and rounds(simulation)[-1].is_built
    assert rounds(simulation)[-1].assignment.degrees.world_size == 8


def test_a_change_that_is_taken_back_leaves_the_job_as_it_is() -> None:
    simulation = building()
    simulation.feed(m.Rescaled(assign_all(allowed=(4,)), simulation.now))
    assert simulation.job.phase is m.Phase.RUNNING
    simulation.settle()
    assert len(rounds(simulation)) == 1 and simulation.hosts["a"].built is None


@pytest.mark.parametrize("victim", ["a", "c"])
def test_a_host_that_is_lost_takes_what_was_built_with_it(victim: str) -> None:
    simulation = building()
    simulation.answer("a")
    lives = {"a", "b", "c"} - {victim}
    simulation.lose(victim)
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING and active(simulation.job) == lives
    # The host of training workers is a failure, the newcomer is none.
    assert simulation.job.failures_left == (2 if victim == "a" else 3)
    assert rounds(simulation)[-1].steps_lost == (0 if victim == "c" else 5)


def test_workers_that_fail_while_others_build_start_again_without_what_was_built() -> None:
    """It expected a state that is newer than any checkpoint."""
    simulation = building()
    simulation.answer("a")
    simulation.feed(m.WorkersFailed("b", simulation.job.round, "rank 3 died"))
    simulation.settle()
    last = rounds(simulation)[-1]
    assert not last.is_built and last.steps_lost == 5 and simulation.job.failures_left == 2


def test_what_was_built_may_fail_once_and_is_not_counted() -> None:
    simulation = building(failures_left=0)
    until(simulation, m.Phase.STARTING)
    simulation.feed(m.WorkersFailed("c", simulation.job.round, "rank 4 died"))
    assert simulation.job.phase is m.Phase.STOPPING
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING and not rounds(simulation)[-1].is_built
    until_again = replace(simulation.job, phase=m.Phase.STARTING)
    ended, _ = advance(until_again, m.WorkersFailed("c", until_again.round, "rank 4 died"))
    assert ended.phase is m.Phase.ENDED


# ------------------------------------------------------------------ random histories


NAMES = st.sampled_from("abcd")


class Histories(RuleBasedStateMachine):
    """Hosts come, drain, die and come back, workers fail, answers arrive in any order."""

    @initialize(
        max_hosts=st.integers(1, 4), is_durable=st.booleans(), is_replicated=st.booleans(),
        minimum=st.integers(1, 2), failures=st.integers(0, 4),
        build_timeout_s=st.sampled_from([0.0, 8.0, 60.0]),
    )  # fmt: skip
    def begin(
        self,
        max_hosts: int,
        is_durable: bool,
        is_replicated: bool,
        minimum: int,
        failures: int,
        build_timeout_s: float,
    ) -> None:
        self.simulation = Simulation(
            job(
                max_hosts=max_hosts,
                has_durable_dir=is_durable,
                assign=assign_all(minimum),
                failures_left=failures,
                build_timeout_s=build_timeout_s,
            )
        )
        self.simulation.is_replicated = is_replicated
        self.stores: dict[str, dict[int, frozenset[int]]] = {}
        self.numbers_seen: list[int] = []

    @rule(name=NAMES, slots=st.integers(1, 3), is_kept=st.booleans())
    def join(self, name: str, slots: int, is_kept: bool) -> None:
        if name not in self.simulation.hosts and self.simulation.job.phase is not m.Phase.ENDED:
            parts = self.stores.pop(name, {})
            self.simulation.join(name, slots, parts if is_kept else None)

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        self.simulation.feed(m.HostLeaving(name, self.simulation.now))

    @rule(name=NAMES)
    def lose(self, name: str) -> None:
        left = self.simulation.job.failures_left
        if name in self.simulation.hosts:
            self.stores[name] = self.simulation.lose(name).parts
        assert self.simulation.job.failures_left in (left, left - 1)

    @rule(name=NAMES)
    def fail(self, name: str) -> None:
        simulation = self.simulation
        left = simulation.job.failures_left
        if name in simulation.hosts and simulation.hosts[name].round == simulation.job.round:
            simulation.feed(m.WorkersFailed(name, simulation.job.round, "died"))
        assert simulation.job.failures_left in (left, left - 1)

    @rule(name=NAMES)
    def fill_memory(self, name: str) -> None:
        self.simulation.cannot_build ^= {name}

    @rule(name=NAMES)
    def lose_what_was_built(self, name: str) -> None:
        host = self.simulation.hosts.get(name)
        left = self.simulation.job.failures_left
        if host is not None and host.built is not None:
            round, host.built = host.built, None
            self.simulation.feed(m.NotBuilt(name, round, "died"))
        assert self.simulation.job.failures_left == left

    @rule(name=NAMES, slots=st.integers(1, 3))
    def probe(self, name: str, slots: int) -> None:
        self.simulation.feed(m.SlotsChanged(name, slots, self.simulation.now))

    @rule(minimum=st.integers(1, 2))
    def scale(self, minimum: int) -> None:
        self.simulation.feed(m.Rescaled(assign_all(minimum), self.simulation.now))

    @rule(seconds=st.sampled_from([0.0, 0.6, 5.0]))
    def tick(self, seconds: float) -> None:
        left = self.simulation.job.failures_left
        self.simulation.tick(seconds)
        assert self.simulation.job.failures_left == left

    @rule(steps=st.integers(1, 5))
    def train(self, steps: int) -> None:
        self.simulation.train(steps)

    @rule()
    def snapshot(self) -> None:
        job = self.simulation.job
        is_early = job.phase in (*TRAINING, m.Phase.PREPARING, m.Phase.DRAINING)
        hosts = self.simulation.hosts
        has_room = all(len(hosts[name].parts) < 2 for name in active(job) if is_early)
        if is_early and has_room and not self.simulation.deposits and not job.uncommitted:
            self.simulation.snapshot()

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.simulation.waiting():
            self.simulation.answer(data.draw(st.sampled_from(self.simulation.waiting())))

    @rule()
    def rest(self) -> None:
        self.simulation.settle()
        current = self.simulation.job
        assert current.phase in RESTING
        if current.phase is m.Phase.WAITING:
            hosts = staying(current)
            fits = bool(hosts) and current.assign(hosts, None) is not None
            assert not fits or (current.has_state and not self.simulation.covered())

    @invariant()
    def whoever_is_awaited_is_there_and_has_something_to_do(self) -> None:
        current = self.simulation.job
        if current.phase in RESTING:
            return
        assert current.awaited, f"{current.phase} waits for nobody"
        assert current.awaited <= set(self.simulation.waiting())

    @invariant()
    def generations_are_whole_and_in_order(self) -> None:
        known = [generation.number for generation in self.simulation.job.generations]
        assert known == sorted(set(known))
        if self.simulation.job.phase is not m.Phase.ENDED and known:
            covered = [generation.number for generation in self.simulation.covered()]
            assert known[-1] == covered[-1]


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
