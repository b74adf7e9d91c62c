"""Simulated hosts around the rules of membership: they answer every action, in whatever order a
test chooses, and keep what a real host would keep on disk."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from scalai.core import actions, events
from scalai.core import membership as m
from scalai.core.degrees import Degrees
from scalai.core.membership import TRAINING, active
from scalai.core.resize import advance

PIECES = range(4)
"""A state is whole when each of these pieces is somewhere."""


@dataclass(slots=True)
class SimulatedHost:
    """An agent, its workers and its store. ``parts``: pieces of committed generations; ``built``:
    the round whose workers wait beside the present ones; ``stop``: where they must stop, ``stands``
    once they do. Workers that are ``hung`` do nothing; an agent that is ``silent`` does nothing."""

    name: str
    slots: int
    round: int | None = None
    parts: dict[int, frozenset[int]] = field(default_factory=dict)
    step: int = 0
    built: int | None = None
    stop: int | None = None
    stands: bool = False
    start: actions.StartRound | None = None
    is_hung: bool = False
    is_silent: bool = False
    is_done: bool = False
    """Its workers have come to the end of their script."""
    held: int | None = None
    """The proposed stop that waits for the save in flight."""
    deposited: tuple[int, int] | None = None
    """Round and step of the stop at which it deposited last."""


def assign_all(minimum: int = 1, allowed: tuple[int, ...] = (1, 2, 3, 4, 6, 8)) -> m.Assign:
    """Return an assignment that takes the largest allowed number of workers."""

    def assign(hosts: tuple[tuple[str, int], ...], present: Degrees | None) -> m.Assignment | None:
        world = max((n for n in allowed if n <= sum(s for _, s in hosts)), default=0)
        if len(hosts) < minimum or not world:
            return None
        workers = []
        left = world
        for name, slots in hosts:
            workers.append((name, min(slots, left)))
            left -= workers[-1][1]
        return m.Assignment(tuple(workers), Degrees(1, 1, world), 1, f"dp={world}")

    return assign


def _at_rest(job: m.Job) -> m.Job:
    """Return what of a job does not change by time alone."""
    return replace(job, newest=0, now=0.0, wait=m.Wait(), stepped_at=None, trained_s=0.0, barred={})


class Simulation:
    """A coordinator and its hosts. ``inbox`` has the answers under way: a test picks which comes
    next; answers of one host keep their order, as on one connection."""

    def __init__(self, job: m.Job) -> None:
        self.job = job
        self.now = 0.0
        self.hosts: dict[str, SimulatedHost] = {}
        self.commands: dict[str, list[Callable[[], events.Event | None]]] = {}
        self.said: list[actions.Action] = []
        self.numbers = 0
        self.deposits: dict[str, tuple[int, int, frozenset[int]]] = {}
        self.steps: dict[int, int] = {}
        self.known: dict[int, dict[str, frozenset[int]]] = {}
        self.abandoned: set[int] = set()
        self.is_replicated = True
        self.exits: list[actions.Exit] = []
        self.cannot_build: set[str] = set()
        self.is_saving = False
        """A save of the training's own is in flight: on all hosts, or on none."""
        self.cannot_run: set[int] = set()
        """Worlds in which every script raises before its first step."""

    # ------------------------------------------------------------------ what is true

    def covered(self) -> tuple[m.Generation, ...]:
        """Return the generations that are whole by what the coordinator knows, oldest first: a part
        counts from the moment that its deposit was judged, before its host has renamed it."""
        found = [
            m.Generation(number, self.steps[number], frozenset(parts))
            for number, parts in self.known.items()
            if {piece for pieces in parts.values() for piece in pieces} == set(PIECES)
        ]
        return tuple(sorted(found, key=lambda generation: (generation.step, generation.number)))

    def is_on_disk(self, number: int) -> bool:
        """Whether the hosts present have renamed parts that make this generation whole."""
        pieces = {p for host in self.hosts.values() for p in host.parts.get(number, ())}
        return pieces == set(PIECES)

    def waiting(self) -> list[str]:
        """Return the hosts that have a command to carry out, and can."""
        return sorted(
            n for n, queue in self.commands.items() if queue and not self.hosts[n].is_silent
        )

    def blocked(self) -> set[str]:
        """Return the hosts of which no answer can come."""
        return {
            name
            for name, host in self.hosts.items()
            if host.is_silent or host.is_hung or host.is_done or host.held is not None
        }

    # ------------------------------------------------------------------ events

    def feed(self, event: events.Event) -> None:
        self.job, due = advance(self.job, event)
        for action in due:
            self.said.append(action)
            self.perform(action)

    def join(self, name: str, slots: int, parts: dict[int, frozenset[int]] | None = None) -> None:
        kept = {n: p for n, p in (parts or {}).items() if n not in self.abandoned}
        self.hosts[name] = SimulatedHost(name, slots, parts=kept)
        self.commands[name] = []
        for number, pieces in kept.items():
            self.known.setdefault(number, {})[name] = pieces
        self.feed(events.HostJoined(name, slots, self.covered(), bool(parts), self.now))

    def lose(self, name: str) -> SimulatedHost:
        """The agent dies. Return it with what lies in its store."""
        host = self.hosts.pop(name)
        del self.commands[name]
        self.deposits.pop(name, None)
        self.forget(name)
        self.feed(events.HostLost(name, self.covered(), self.now))
        return host

    def replace(self, name: str, *, is_kept: bool) -> None:
        """Another agent of a host comes, with what lies in its store or with nothing, and its
        workers are gone."""
        host = self.hosts[name]
        self.forget(name)
        self.deposits.pop(name, None)
        self.join(name, host.slots, host.parts if is_kept else None)

    def forget(self, name: str) -> None:
        for parts in self.known.values():
            parts.pop(name, None)

    def tick(self, seconds: float = 10.0) -> None:
        for name, host in sorted(self.hosts.items()):
            if host.held is not None and not host.is_silent and host.round is not None:
                self.feed(events.Held(name, host.round, host.held, f"a save at {self.now}"))
        self.now += seconds
        self.feed(events.Ticked(self.now, max((h.step for h in self.hosts.values()), default=0)))

    def train(self, steps: int) -> None:
        """Make steps, where the workers run freely."""
        if self.job.phase in TRAINING:
            if not any(
                self.hosts[name].is_hung or self.hosts[name].is_done for name in active(self.job)
            ):
                for name in active(self.job):
                    self.hosts[name].step += steps

    def answer(self, name: str) -> None:
        """One host carries out its oldest command and tells of it."""
        event = self.commands[name].pop(0)()
        if event is not None and name in self.hosts:
            self.feed(event)

    def deliver(self) -> None:
        """Carry out everything that is under way."""
        answers = 0
        while self.waiting():
            answers += 1
            assert answers < 1000, f"hosts wait for each other for ever: {self.job}"
            self.answer(self.waiting()[answers % len(self.waiting())])

    def settle(self) -> None:
        """Carry out everything that is under way, and let time pass until nothing changes."""
        for _ in range(200):
            before = self.job
            self.deliver()
            self.tick()
            if _at_rest(self.job) == _at_rest(before) and not self.waiting():
                return
        raise AssertionError(f"the job does not come to rest: {self.job}")

    def pass_time(self, seconds: float, tick_s: float = 90.0) -> None:
        """Let the hosts do what they can for so long."""
        end = self.now + seconds
        while self.now < end and self.job.phase is not m.Phase.ENDED:
            self.deliver()
            self.tick(tick_s)

    def begin_save(self) -> None:
        """The training begins a save that goes on beside it."""
        self.is_saving = self.job.phase in (*TRAINING, m.Phase.PREPARING, m.Phase.DRAINING)

    def end_save(self) -> None:
        """It has ended: the stop that waits for it is proposed."""
        self.is_saving = False
        for host in self.hosts.values():
            if host.held is not None and host.round is not None:
                round, stop, host.held = host.round, host.held, None
                self.tell((host.name,), lambda h, r=round, s=stop: self.prepare(h, r, s))  # type: ignore[misc]

    def heal(self) -> None:
        """Faults stop: what hung goes on."""
        self.end_save()
        self.cannot_run.clear()
        for name in sorted(self.hosts):
            host = self.hosts.get(name)
            if host is not None:
                host.is_silent = False
                self.wake(host)

    def wake(self, host: SimulatedHost) -> None:
        """Workers that hung go on with what they had to do."""
        if not host.is_hung:
            return
        host.is_hung = False
        if host.start is not None:
            self.commands[host.name].append(lambda: self.step(host, host.start))
        elif host.stop is not None and not host.stands:
            self.commands[host.name].append(lambda: self.arrive(host, host.round))

    # ------------------------------------------------------------------ actions

    def tell(
        self, hosts: tuple[str, ...], work: Callable[[SimulatedHost], events.Event | None]
    ) -> None:
        for name in hosts:
            host = self.hosts.get(name)
            if host is not None:
                self.commands[name].append(lambda host=host: work(host))  # type: ignore[misc]

    def perform(self, action: actions.Action) -> None:
        round = self.job.round
        match action:
            case actions.Build(ahead):
                self.tell(ahead.assignment.active, lambda host: self.build(host, ahead.round))
            case actions.GiveUp():
                self.tell(tuple(self.hosts), self.give_up)
            case actions.Prepare(hosts, stop):
                self.tell(hosts, lambda host: self.prepare(host, round, stop))
            case actions.Agree(hosts, stop):
                self.tell(hosts, lambda host: self.agree(host, round, stop))
            case actions.Withdraw(hosts):
                self.tell(hosts, self.withdraw)
            case actions.Deposit(hosts):
                stop = self.job.stop
                self.tell(hosts, lambda host: self.deposit(host, round, stop))
            case actions.Lose(hosts):
                for name in hosts:
                    self.lose(name)
            case actions.Judge(hosts):
                self.judge(hosts)
            case actions.Commit(hosts, generation):
                self.tell(hosts, lambda host: self.commit(host, generation))
            case actions.StopWorkers(hosts):
                self.tell(hosts, lambda host: self.stop(host, round))
            case actions.StartRound():
                self.start(action)
            case actions.Release(_, keep, leaving):
                self.release(keep, leaving)
            case actions.SaveDurable(hosts, generation):
                self.tell(hosts, lambda host: events.Saved(host.name))
            case actions.Exit():
                self.exits.append(action)

    def build(self, host: SimulatedHost, round: int) -> events.Event:
        assert host.built is None, "two rounds are built ahead"
        if host.name in self.cannot_build:
            return events.NotBuilt(host.name, round, "no room")
        host.built = round
        return events.Built(host.name, round)

    @staticmethod
    def give_up(host: SimulatedHost) -> None:
        host.built = None

    def prepare(self, host: SimulatedHost, round: int, stop: int) -> events.Event:
        host.held = stop if self.is_saving and host.round == round else None
        if host.held is not None:
            return events.Held(host.name, round, stop, "a save")
        return events.Prepared(host.name, round, stop, host.step)

    def agree(self, host: SimulatedHost, round: int, stop: int) -> events.Event | None:
        assert host.stop is None, "two stops at once"
        host.stop = stop if host.round == round else None
        return self.arrive(host, round)

    def arrive(self, host: SimulatedHost, round: int | None) -> events.Event | None:
        """The workers come to the stop, where there is one and they can."""
        if host.is_hung or host.is_done or host.stop is None or round is None:
            return None
        host.step, host.stands = host.stop, True
        if self.is_saving:
            return events.Held(host.name, round, host.stop, "a save that began on the way")
        return events.Arrived(host.name, round, host.stop)

    def withdraw(self, host: SimulatedHost) -> None:
        is_deposited = host.stop is not None and host.deposited == (host.round, host.stop)
        assert not is_deposited, "a stop is taken back at which a host has deposited"
        host.stop, host.stands, host.held = None, False, None

    def deposit(self, host: SimulatedHost, round: int, stop: int) -> events.Event | None:
        if host.round != round:
            return None
        assert host.stands and host.stop == stop, "a deposit before the workers stand at the stop"
        others = [self.hosts[name] for name in active(self.job)]
        assert all(h.stands or h.round != round for h in others), "not all have arrived"
        if host.name in self.deposits or len(host.parts) > 1:  # no room yet: it waits
            self.commands[host.name].append(lambda: self.deposit(host, round, stop))
            return None
        # Its agent ends workers that hang from here on: the host has nothing then.
        pieces = frozenset[int]() if host.is_hung else self.pieces(host.name)
        self.deposits[host.name] = (round, stop, pieces)
        host.deposited = round, stop
        return events.Deposited(host.name, round)

    def pieces(self, name: str) -> frozenset[int]:
        """Return what the workers of a host hold in the present round."""
        names = sorted(active(self.job))
        own = (p for p in PIECES if names and names[p % len(names)] == name)
        return frozenset(PIECES) if self.is_replicated else frozenset(own)

    def judge(self, hosts: tuple[str, ...]) -> None:
        mine = {h: self.deposits[h] for h in hosts if h in self.deposits}
        mine = {h: d for h, d in mine.items() if d[:2] == (self.job.round, self.job.stop) and d[2]}
        is_covered = {p for _, _, pieces in mine.values() for p in pieces} == set(PIECES)
        if is_covered:
            self.numbers += 1
            self.steps[self.numbers] = self.job.stop
            self.known[self.numbers] = {h: pieces for h, (_, _, pieces) in mine.items()}
        self.feed(events.Judged(is_covered, self.job.stop, self.numbers, frozenset(mine)))

    def commit(self, host: SimulatedHost, generation: int) -> events.Event:
        deposit = self.deposits.pop(host.name, None)
        if deposit is None or not deposit[2]:
            return events.WorkersFailed(host.name, host.round or 0, "nothing to commit")
        assert len(host.parts) < 2, "more than two generations on a host"
        host.parts[generation] = deposit[2]
        return events.Committed(host.name, generation)

    def stop(self, host: SimulatedHost, round: int) -> events.Event:
        host.round = host.start = host.stop = host.held = None
        host.stands = host.is_hung = host.is_done = False  # whatever hangs is ended
        return events.Stopped(host.name, round, host.step)

    def start(self, action: actions.StartRound) -> None:
        assert all(host.round is None for host in self.hosts.values()), "workers of two rounds"
        if action.generation is None:
            assert not self.covered(), "a state is there and is not used"
        else:
            assert action.generation == self.covered()[-1].number, "not the newest whole state"
        self.deposits.clear()
        self.is_saving = False  # it has ended with the workers
        self.abandoned |= {n for n in self.known if n > (action.generation or 0)}
        for number in self.abandoned & set(self.known):
            del self.known[number]
        self.tell(tuple(self.hosts), self.drop_abandoned)
        self.tell(
            action.assignment.active,
            lambda host: self.step(host, action),
        )

    def drop_abandoned(self, host: SimulatedHost) -> None:
        """The job has gone back behind these."""
        for number in self.abandoned & set(host.parts):
            del host.parts[number]

    def step(self, host: SimulatedHost, start: actions.StartRound | None) -> events.Event | None:
        """Relaunch, plan, move, restore and the first step, of one host."""
        if start is None or start.round != self.job.round:
            return None  # woken too late
        round, source = start.round, start.generation
        assert host.built in (None, round), "workers of a round that was given up"
        if start.is_built and host.built is None:
            host.round = round
            return events.WorkersFailed(host.name, round, "what was built is gone")
        host.round, host.built = round, None
        host.start = start
        if host.is_hung:
            return None
        host.start = None
        if start.assignment.degrees.world_size in self.cannot_run:
            return events.WorkersFailed(host.name, round, "RuntimeError: not supported")
        if source is None:
            host.step = 1
            return events.Stepped(host.name, round)
        if source not in {generation.number for generation in self.covered()}:
            return events.WorkersFailed(host.name, round, "nobody holds a piece")
        host.parts[source] = host.parts.get(source, frozenset()) | self.pieces(host.name)
        self.known[source][host.name] = host.parts[source]
        self.job = m.replace_generations(self.job, self.covered())
        host.step = self.steps[source] + 1
        return events.Stepped(host.name, round)

    def release(self, keep: int | None, leaving: tuple[str, ...]) -> None:
        for name in leaving:
            assert name not in active(self.job), "a host with workers is let go"
            self.hosts.pop(name)
            self.commands.pop(name)
            self.forget(name)
        if keep is None:
            return
        assert self.is_on_disk(keep), "older generations are dropped before the newest is whole"
        for number in [n for n in self.known if n < keep]:
            del self.known[number]
        for host in self.hosts.values():
            for number in [n for n in host.parts if n < keep]:
                del host.parts[number]

    def snapshot(self) -> None:
        """Every active host seals a snapshot, and the coordinator commits it."""
        hosts = tuple(sorted(active(self.job)))
        step = max(self.hosts[name].step for name in hosts)
        self.numbers += 1
        self.steps[self.numbers] = step
        for name in hosts:
            self.deposits[name] = (self.job.round, step, self.pieces(name))
        self.known[self.numbers] = {name: self.pieces(name) for name in hosts}
        self.feed(events.Snapshotted(hosts, step, self.numbers))


def job(**settings: Any) -> m.Job:
    """Return a job as a coordinator makes it."""
    return m.Job(**{"assign": assign_all(), "max_hosts": 3, "settle_s": 1.0, **settings})


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


def rounds(simulation: Simulation) -> list[actions.StartRound]:
    """Return the rounds so far, oldest first."""
    return [action for action in simulation.said if isinstance(action, actions.StartRound)]


def until(simulation: Simulation, phase: m.Phase) -> None:
    """Let the hosts answer until the job is in this phase."""
    while simulation.job.phase is not phase:
        simulation.answer(simulation.waiting()[0])
