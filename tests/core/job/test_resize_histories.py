"""The rules of membership: random histories with simulated hosts."""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scalai.core.job import membership as m
from scalai.core.job.assigning import failure_of, next_assignment
from scalai.core.job.deadlines import LIMITS
from scalai.core.job.membership import TRAINING, active, staying
from scalai.core.messages import events, reports
from support.membership_choice import assign_all, turn_round
from support.membership_simulation import Simulation, job

RESTING = (m.Phase.WAITING, m.Phase.RUNNING, m.Phase.ENDED)
LOSING = (
    m.Phase.PREPARING, m.Phase.DRAINING, m.Phase.SNAPSHOTTING, m.Phase.COMMITTING, m.Phase.STOPPING
)  # fmt: skip
LONG_S = 4 * 3600.0
"""Longer than any deadline, with as many failures as the budget of these tests has."""

NAMES = st.sampled_from("abcd")


class Histories(RuleBasedStateMachine):
    """Hosts come, drain, die and come back, workers fail and hang, agents fall silent, worlds turn
    out not to run, answers arrive in any order."""

    @initialize(
        max_hosts=st.integers(1, 4), is_durable=st.booleans(), is_replicated=st.booleans(),
        minimum=st.integers(1, 2), failures=st.integers(0, 4),
        build_timeout_s=st.sampled_from([0.0, 8.0, 60.0]), is_loss_free=st.booleans(),
        present=st.sampled_from(["", "a", "ab", "ab", "abc"]), replicas=st.integers(0, 1),
        hang_s=st.sampled_from([0.0, 30.0]), hanger=st.sampled_from(["", "", "b"]),
        place=st.sampled_from([m.keep_order, turn_round]),
    )  # fmt: skip
    def begin(
        self,
        max_hosts: int,
        is_durable: bool,
        is_replicated: bool,
        minimum: int,
        failures: int,
        build_timeout_s: float,
        is_loss_free: bool,
        present: str,
        replicas: int,
        hang_s: float,
        hanger: str,
        place: m.Place,
    ) -> None:
        self.simulation = Simulation(
            job(
                place=place,
                max_hosts=max_hosts,
                has_durable_dir=is_durable,
                assign=assign_all(minimum),
                left=failures,
                build_timeout_s=build_timeout_s,
                is_loss_free=is_loss_free,
                replicas=replicas,
                start_timeout_s=600.0,
                hang_s=hang_s,
            )
        )
        self.simulation.hangers = {hanger}
        self.simulation.has_check = set("bc") if hanger or replicas else set()
        self.simulation.is_replicated = is_replicated
        self.stores: dict[str, dict[int, frozenset[int]]] = {}
        self.numbers_seen: list[int] = []
        for name in present:
            self.simulation.join(name, 2)
        self.simulation.settle()
        if self.simulation.job.phase is m.Phase.RUNNING:
            self.simulation.snapshot()
            self.simulation.settle()

    @rule(name=NAMES, slots=st.integers(1, 3), is_kept=st.booleans())
    def join(self, name: str, slots: int, is_kept: bool) -> None:
        if name not in self.simulation.hosts and self.simulation.job.phase is not m.Phase.ENDED:
            parts = self.stores.pop(name, {})
            self.simulation.join(name, slots, parts if is_kept else None)

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        self.simulation.feed(events.HostLeaving(name, self.simulation.now))

    @rule(name=NAMES, left_s=st.sampled_from([None, 1.0, 30.0, 600.0]), is_final=st.booleans())
    def notice(self, name: str, left_s: float | None, is_final: bool) -> None:
        """It is told that it will be taken away, for the first time or once more."""
        now = self.simulation.now
        self.simulation.feed(events.HostLeaving(name, now, "file", left_s, is_final))

    @rule(name=NAMES)
    def take_back(self, name: str) -> None:
        """It stays after all."""
        self.simulation.feed(events.Reported(name, reports.Staying()))

    @rule(name=NAMES)
    def lose(self, name: str) -> None:
        left = self.simulation.job.budget.left
        if name in self.simulation.hosts:
            self.stores[name] = self.simulation.lose(name).parts
        is_free = self.simulation.job.settings.is_loss_free
        assert self.simulation.job.budget.left in ((left,) if is_free else (left, left - 1))

    @rule(name=NAMES, is_kept=st.booleans())
    def replace_an_agent(self, name: str, is_kept: bool) -> None:
        """Another agent of a host comes before the loss of the one before it is known."""
        if name in self.simulation.hosts:
            self.simulation.replace(name, is_kept=is_kept)

    @rule(name=NAMES, is_chance=st.booleans(), is_refusal=st.booleans())
    def fail(self, name: str, is_chance: bool, is_refusal: bool) -> None:
        simulation, before = self.simulation, self.simulation.job
        if name not in simulation.hosts or simulation.hosts[name].round != before.round:
            return
        simulation.feed(
            events.Reported(
                name,
                reports.WorkersFailed(
                    before.round, "died", is_chance=is_chance, is_refusal=is_refusal
                ),
            )
        )
        assert simulation.job.budget.left in (before.budget.left, before.budget.left - 1)
        if before.phase is m.Phase.STARTING and before.change.ran and not is_refusal:
            is_change = before.current and not before.current.is_same_as(before.change.ran)
            target = next_assignment(simulation.job)
            is_back = target is not None and failure_of(simulation.job, target) is None
            assert not is_change or is_back or simulation.job.budget.left < before.budget.left

    @rule(name=NAMES)
    def hang(self, name: str) -> None:
        """Its workers stand still wherever they are."""
        host = self.simulation.hosts.get(name)
        if host is not None and (host.round is not None or name in self.simulation.job.awaited):
            host.is_hung = True

    @rule(name=NAMES)
    def wake(self, name: str) -> None:
        if name in self.simulation.hosts:
            self.simulation.wake(self.simulation.hosts[name])

    @rule(name=NAMES)
    def fall_silent(self, name: str) -> None:
        """Its agent neither answers nor is gone."""
        if name in self.simulation.hosts:
            self.simulation.hosts[name].is_silent ^= True

    @rule(name=NAMES)
    def finish(self, name: str) -> None:
        """Its workers come to the end of their script, also while a stop is agreed."""
        simulation = self.simulation
        host = simulation.hosts.get(name)
        is_free = host is not None and not host.is_hung and not host.stands
        if host is None or not is_free or host.round is None or host.todo is not None:
            return
        if host.round == simulation.job.round and simulation.job.phase is not m.Phase.STARTING:
            host.is_done = True
            simulation.feed(events.Reported(name, reports.Finished(host.round)))

    @rule(name=NAMES, other=NAMES)
    def cut_a_link(self, name: str, other: str) -> None:
        """Two hosts do not hear each other, or hear each other again."""
        pair = frozenset((name, other))
        if pair in self.simulation.cut:
            self.simulation.join_links(name, other)
        elif len(pair) == 2:
            self.simulation.cut.add(pair)

    @rule(name=NAMES)
    def fall_ill(self, name: str) -> None:
        """It fails its health check when it is asked next, or passes it again."""
        self.simulation.sick ^= {name}

    @rule(name=NAMES)
    def spoil(self, name: str) -> None:
        """What it fetches next is not what was committed."""
        if name in self.simulation.hosts:
            self.simulation.spoilt.add(name)

    @rule(name=NAMES, is_read=st.booleans())
    def damage(self, name: str, is_read: bool) -> None:
        """Its part of the newest generation is not what was committed any more."""
        host, newest = self.simulation.hosts.get(name), self.simulation.job.newest_generation
        if host is not None and newest is not None and newest.number in host.parts:
            self.simulation.damaged[name, newest.number] = is_read

    @rule(world=st.sampled_from([2, 3, 4, 6]))
    def break_a_world(self, world: int) -> None:
        self.simulation.cannot_run ^= {world}

    @rule(name=NAMES)
    def fill_memory(self, name: str) -> None:
        self.simulation.cannot_build ^= {name}

    @rule(name=NAMES)
    def lose_what_was_built(self, name: str) -> None:
        host = self.simulation.hosts.get(name)
        left = self.simulation.job.budget.left
        if host is not None and host.built is not None:
            round, host.built = host.built, None
            self.simulation.feed(events.Reported(name, reports.NotBuilt(round, "died")))
        assert self.simulation.job.budget.left == left

    @rule(name=NAMES, slots=st.integers(1, 3))
    def probe(self, name: str, slots: int) -> None:
        self.simulation.feed(events.Reported(name, reports.Slots(slots)))

    @rule(minimum=st.integers(1, 2), most=st.sampled_from([1, 2, 3, 4, 8]))
    def scale(self, minimum: int, most: int) -> None:
        allowed = tuple(world for world in (1, 2, 3, 4, 6, 8) if world <= most)
        request = assign_all(minimum, allowed)
        self.simulation.feed(events.Rescaled(request, self.simulation.now))

    @rule(seconds=st.sampled_from([0.0, 0.6, 5.0, 61.0, 700.0]))
    def tick(self, seconds: float) -> None:
        before, hosts = self.simulation.job, self.simulation.hosts
        hangs = any(host.is_hung for host in hosts.values()) or self.simulation.are_cut(hosts)
        self.simulation.tick(seconds)
        is_overdue = before.phase in (m.Phase.STARTING, m.Phase.EXAMINING, *LOSING)
        is_overdue = is_overdue or bool(before.settings.hang_s and hangs)
        assert is_overdue or self.simulation.job.budget.left == before.budget.left

    @rule(steps=st.integers(1, 5))
    def train(self, steps: int) -> None:
        self.simulation.train(steps)

    @rule(begins=st.booleans())
    def save(self, begins: bool) -> None:
        """The training's own save begins, or ends, on all hosts alike."""
        simulation = self.simulation
        # Ranks that stand at a stop have begun none.
        is_free = not any(host.stands for host in simulation.hosts.values())
        if begins and is_free:
            simulation.begin_save()
        elif not begins:
            simulation.end_save()

    @rule(late=st.sets(NAMES), without=st.sets(NAMES, max_size=1))
    def snapshot(self, late: set[str], without: set[str]) -> None:
        job = self.simulation.job
        is_early = job.phase in (*TRAINING, m.Phase.PREPARING, m.Phase.DRAINING)
        hosts = self.simulation.hosts
        has_room = all(len(hosts[name].parts) < 2 for name in active(job) if is_early)
        stands = any(hosts[name].stands or hosts[name].is_hung for name in active(job) if is_early)
        if is_early and has_room and not stands and not job.states.uncommitted:
            self.simulation.snapshot(late & active(job), without & active(job))

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.simulation.waiting():
            self.simulation.answer(data.draw(st.sampled_from(self.simulation.waiting())))

    @rule(
        change=st.sampled_from(["scale", "leave", "join"]), phase=st.sampled_from(m.Phase),
        fault=st.sampled_from(["hang", "fall_silent", "lose", "finish", "fail", "leave"]),
        name=NAMES, other=NAMES, world=st.sampled_from([1, 2, 3, 4, 8]), is_slow=st.booleans(),
    )  # fmt: skip
    def meet_a_fault_in_a_change(
        self, change: str, phase: m.Phase, fault: str, name: str, other: str, world: int,
        is_slow: bool,
    ) -> None:  # fmt: skip
        """Begin a change, go on to some phase of it, and let something happen to a host there."""
        simulation = self.simulation
        if simulation.job.phase is not m.Phase.RUNNING:
            return
        if change == "scale":
            self.scale(1, world)
        elif change == "leave":
            self.leave(other)
        else:
            self.join(other, 2, True)
            simulation.tick(2.0)
        while simulation.waiting() and simulation.job.phase is not phase:
            simulation.answer(simulation.waiting()[-1])
        if fault == "fail":
            self.fail(name, is_slow, False)
        else:
            getattr(self, fault)(name)
        if is_slow:
            simulation.deliver()

    @rule()
    def wait_long(self) -> None:
        """Whatever hangs: no phase lasts for ever, but where the only host does not answer."""
        self.simulation.pass_time(LONG_S)
        current, hosts = self.simulation.job, self.simulation.hosts
        nobody_else = set(hosts) <= {n for n in hosts if hosts[n].is_silent} | current.awaited
        is_alone = nobody_else and any(hosts[n].is_silent for n in current.awaited)
        if current.phase not in RESTING and not is_alone:
            limit_s, since = LIMITS[current.phase].seconds(current), current.wait.since
            assert limit_s is not None, current
            # Without a beginning it is the last event that led here: the next tick will tell.
            assert since is None or current.now - since <= limit_s, current

    @rule()
    def rest(self) -> None:
        """Faults stop: the job steps again, or waits for something that it says, or has ended."""
        self.simulation.heal()
        self.simulation.pass_time(LONG_S)
        self.simulation.settle()
        current = self.simulation.job
        assert current.phase in RESTING
        for ended in self.simulation.exits:
            assert ended.reason != "damaged" or not self.simulation.covered(), "one was whole"
        if current.phase is m.Phase.RUNNING and not self.simulation.blocked():
            assert all(self.simulation.hosts[h].round == current.round for h in active(current))
        if current.phase is m.Phase.WAITING:
            hosts = staying(current)
            fits = bool(hosts) and current.settings.assign(hosts, None) is not None
            assert not fits or (current.states.has_state and not self.simulation.covered())

    @invariant()
    def who_is_awaited_has_something_to_do_or_a_deadline(self) -> None:
        current = self.simulation.job
        if current.phase in RESTING:
            return
        assert current.awaited, f"{current.phase} waits for nobody"
        stuck = current.awaited - set(self.simulation.waiting())
        if current.phase is m.Phase.STARTING:  # the others of a start wait for these
            stuck = frozenset() if stuck < current.awaited else stuck & self.simulation.blocked()
            assert stuck or self.simulation.waiting(), "nobody has anything to do"
        if stuck:
            has_limit = LIMITS[current.phase].seconds(current) is not None
            assert has_limit or current.phase is m.Phase.SAVING
            assert stuck <= self.simulation.blocked(), f"{stuck} have nothing to do"

    @invariant()
    def generations_are_whole_and_in_order(self) -> None:
        known = [generation.number for generation in self.simulation.job.states.generations]
        assert known == sorted(set(known))
        if self.simulation.job.phase is not m.Phase.ENDED and known:
            covered = [generation.number for generation in self.simulation.covered()]
            assert known[-1] == covered[-1]


TestHistories = pytest.mark.turns(Histories.TestCase)
# The same histories for the same code, so that a run says something of the change that it tests;
# SCALAI_HISTORIES=random looks for others.
TestHistories.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None,
    derandomize=os.environ.get("SCALAI_HISTORIES") != "random",
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
