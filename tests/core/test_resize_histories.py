"""The rules of membership: random histories with simulated hosts."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from membership_simulation import Simulation, assign_all, job

from scalai.core import events
from scalai.core import membership as m
from scalai.core.membership import TRAINING, active, staying

RESTING = (m.Phase.WAITING, m.Phase.RUNNING, m.Phase.ENDED)


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
        self.simulation.feed(events.HostLeaving(name, self.simulation.now))

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
            simulation.feed(events.WorkersFailed(name, simulation.job.round, "died"))
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
            self.simulation.feed(events.NotBuilt(name, round, "died"))
        assert self.simulation.job.failures_left == left

    @rule(name=NAMES, slots=st.integers(1, 3))
    def probe(self, name: str, slots: int) -> None:
        self.simulation.feed(events.SlotsChanged(name, slots, self.simulation.now))

    @rule(minimum=st.integers(1, 2))
    def scale(self, minimum: int) -> None:
        self.simulation.feed(events.Rescaled(assign_all(minimum), self.simulation.now))

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
