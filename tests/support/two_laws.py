"""A job in one process and virtual time: the coordinator's real desk and law, and hosts with the
real law, over a network that a test drives. Workers and stores are simulated.

A state is four tensors, whole on whoever holds them; the fingerprint of one tells its step.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalai.core.errors import ScalaiError
from scalai.core.host import events
from scalai.core.job import membership as m
from scalai.core.job.function_proof import Numbers
from scalai.core.job.membership import Phase
from scalai.core.messages import actions, commands, reports
from scalai.core.messages.events import Event as JobEvent
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.desk import Desk
from scalai.launch.coordinator.losses import Patience
from scalai.launch.coordinator.person_calls import Scale
from support.laws import but
from support.lines import Lines
from support.simulated_host import SimulatedDisk, SimulatedHost
from support.simulated_workers import TENSORS, Clock, Group, SimulatedStores, Worker

TICK_S = 5.0
LOOK_S = 0.5
ROUNDS_A_TICK = 40
_TRAINING = ("train", "snapshot", "write snapshot")
"""What workers do that train."""


@dataclass(slots=True)
class World:
    """The coordinator's desk and the hosts around it; nothing happens but what a test does."""

    folder: Any
    flags: tuple[str, ...] = ("--nnodes", "1:4", "--max-restarts", "9")
    is_replicated: bool = True
    shards: int | None = None
    """Parts of the state, each of which every so-manieth rank holds; None: as ``is_replicated``."""
    snapshot_every: int | str = 0
    is_async: bool = False
    """Whether snapshots on the way are written beside the training."""
    archive_every_s: float = 0.0
    """How often generations come to the disk that all hosts share; 0: it stays empty."""
    has_checks: bool = False
    """Whether hosts have a health check, which they pass before they run workers."""
    broken: set[frozenset[str]] = field(default_factory=set)
    """Pairs of hosts that do not hear each other."""
    disk: SimulatedDisk = field(default_factory=SimulatedDisk)
    hosts: dict[str, SimulatedHost] = field(default_factory=dict)
    log: Lines = field(default_factory=Lines)
    law: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the law's first state, of the job or of one of its records."""
    acts: list[Any] = field(default_factory=list)
    """All actions of the job's law; of what it sends the command."""
    computes: dict[int, Numbers] = field(default_factory=dict)
    """Numbers of a step, by the number of workers."""
    is_proof_late: bool = False
    """Old workers have yet to make their step behind the stop."""
    cannot_run: set[int] = field(default_factory=set)
    """Numbers of workers with which every script raises before its first step."""
    cannot_meet: set[int] = field(default_factory=set)
    """Numbers of workers that wait for each other for ever."""
    ghosts: list[SimulatedHost] = field(default_factory=list)
    """Agents that were paused, and replaced by others of their hosts."""
    save: tuple[int, int] | None = None
    """The save of the training's own that is in flight: its round and iteration."""
    is_save_ending: bool = False
    """It ends with the next step, for all ranks alike."""
    happened: int = 0
    """Counts what the hosts have done."""
    joins: int = 0
    """Counts how often hosts have come."""
    term: int = 1
    """Counts the coordinators."""
    stores: Any = field(init=False)
    """What workers would meet at."""
    spec: JobSpec = field(init=False)
    desk: Desk = field(init=False)

    def __post_init__(self) -> None:
        config = self.folder / "elastic.toml"
        config.write_text(
            "[model]\nglobal_batch_size = 12\n[probe]\nkind = 'none'\n"
            "[resize]\nsettle_s = 1.0\ndrain_timeout_s = 60.0\n"
            "start_timeout_s = 600.0\nhang_s = 300.0\n"
            f"[store]\nsnapshot_every = {self.snapshot_every!r}\n"
        )
        given = ["--elastic", str(config), "--job", "j", "--nproc-per-node", "2", *self.flags]
        if self.archive_every_s:
            given += ["--durable-dir", "disk", "--durable-every", str(self.archive_every_s)]
        self.spec = JobSpec.read(parse_options([*given, "script.py"]))
        self.begin_coordinator()

    def begin_coordinator(self, *, is_successor: bool = False) -> None:
        """A coordinator begins, and knows nothing."""
        self.term = self.term + 1 if is_successor else 1
        patience = Patience(poll_s=0.0, kept_s=0.0)
        self.stores = SimulatedStores()
        self.desk = Desk(
            self.spec, "127.0.0.1", self.stores, self.log, patience, self.term,
            is_successor=is_successor, clock=lambda: Clock.now,
        )  # fmt: skip
        live = self.live
        live.state = but(live.state, **self.law)
        perform = live.perform

        def performed(action: Any) -> None:
            if isinstance(action, actions.StartRound):
                self.check_start(action.generation)
                self.check_health(action.assignment.active)
            self.acts.append(action.command if isinstance(action, actions.Send) else action)
            perform(action)

        live.perform = performed

    @property
    def live(self) -> Any:
        return self.desk.live

    @property
    def phase(self) -> Phase:
        found: Phase = self.live.state.phase
        return found

    @property
    def job(self) -> m.Job:
        found: m.Job = self.live.state
        return found

    @property
    def active(self) -> str:
        """Names of the hosts with workers."""
        return "".join(sorted(m.active(self.job)))

    @property
    def rounds(self) -> list[actions.StartRound]:
        return [act for act in self.acts if isinstance(act, actions.StartRound)]

    @property
    def started(self) -> list[tuple[int, int | None]]:
        """Rounds, and the generations that they began from."""
        return [(each.round, each.generation) for each in self.rounds]

    @property
    def exits(self) -> list[actions.EndJob]:
        return [act for act in self.acts if isinstance(act, actions.EndJob)]

    def numbers(self, world_size: int) -> Numbers:
        """Numbers of a step with so many workers."""
        return self.computes.get(world_size, Numbers(5.0, 2.0, framework="simulated"))

    # ------------------------------------------------------------------ what is true

    def newest_whole(self, *, of_all: bool = False) -> int | None:
        """Return the newest generation that hosts in the job hold wholly on their disks, or hosts
        in it or not (``of_all``)."""
        pieces: dict[int, set[str]] = {}
        for host in self.hosts.values():
            if of_all or (host.is_in and not host.is_silent):
                for number in host.store:
                    pieces.setdefault(number, set()).update(host.sound(number))
        whole_ones = [number for number, names in pieces.items() if len(names) == len(TENSORS)]
        return max(whole_ones, default=None)

    def check_start(self, generation: int | None) -> None:
        """No committed state is passed over."""
        newest = self.newest_whole()
        assert newest is None or (generation is not None and generation >= newest), (
            f"a round begins from {generation}, and generation {newest} is whole"
        )

    def check_health(self, active: Iterable[str]) -> None:
        """No host runs workers that has said that it is not healthy, and not otherwise since."""
        sick = [name for name in active if name in self.hosts and self.hosts[name].is_known_sick]
        assert not sick, f"{sick} have failed their health check, and are used again"

    def can_reach(self, name: str, generation: int) -> bool:
        """Whether a host's data plane gives out a generation."""
        host = self.hosts.get(name)
        return host is not None and not host.is_silent and generation in host.store

    def unheard(self, name: str, others: Iterable[str]) -> tuple[str, ...]:
        """Return which of the others a host does not hear."""
        return tuple(other for other in others if frozenset((name, other)) in self.broken)

    def can_meet(self, number: int) -> bool:
        """Whether the workers of a round reach each other."""
        state = self.live.state
        standby = state.change.standby.assignment if state.change.standby is not None else None
        assignment = state.current if number == state.round else standby
        if assignment is None:
            return True
        is_broken = any(pair <= assignment.members for pair in self.broken)
        return not is_broken and assignment.degrees.world_size not in self.cannot_meet

    def is_training(self) -> bool:
        """Whether every worker of the present round trains."""
        state = self.live.state
        if state.phase is not Phase.RUNNING or not state.current:
            return False
        groups = [
            self.hosts[name].hands.groups.get(state.round)
            for name in state.current.active
            if name in self.hosts
        ]
        return len(groups) == len(state.current.active) and all(
            group is not None
            and all(w.exit is None and w.doing in _TRAINING for w in group.workers.values())
            for group in groups
        )

    def logged(self, text: str) -> list[str]:
        """Return the coordinator's lines with this text."""
        return [line for line in self.log if text in line]

    def holds_back(self, name: str, what: str) -> bool:
        """Whether a host may do this while it makes no replicas of a second generation."""
        return what != "work" or len(self.hosts[name].store) < 2

    # ------------------------------------------------------------------ what happens

    def add(self, name: str, slots: int = 2) -> None:
        """A host's agent starts, with what its store holds if it was there before."""
        if name in self.hosts and self.hosts[name].agent.exit is None:
            return
        if name in self.hosts:
            self.hosts[name].begin()
        else:
            self.hosts[name] = SimulatedHost(self, name, slots)

    def feed(self, event: JobEvent) -> None:
        """The coordinator finds something."""
        with self.desk.lock:
            self.live.feed(event)

    def hear(self, host: str, report: reports.Report) -> None:
        """A host reports something, or its agent that is about to be lost."""
        with self.desk.lock:
            self.live.hear(host, report)

    def fail(self, host: str, reason: str = "died", **how: bool) -> None:
        """Workers of a host in the present round fail."""
        self.hear(host, reports.WorkersFailed(self.job.round, reason, **how))

    def kill(self, name: str, *, is_disk_lost: bool) -> None:
        """A host's agent dies with its workers."""
        host = self.hosts.get(name)
        if host is None:
            return
        self.desk.gone(host)  # type: ignore[arg-type]
        if is_disk_lost:
            self._end_ghosts([name])  # all of its processes are gone with the machine
            del self.hosts[name]
            return
        store, sealed, number = host.store, host.sealed, host.number
        damaged = host.damaged
        fresh = SimulatedHost(self, name, host.slots)
        fresh.store, fresh.sealed, fresh.number = store, sealed, number
        fresh.damaged = damaged
        self.hosts[name] = fresh

    def restart(self) -> None:
        """The whole job is started again, on what the hosts' stores hold."""
        for name in list(self.hosts):
            self.kill(name, is_disk_lost=False)
        self.ghosts.clear()
        self.log.clear()
        self.begin_coordinator()

    def replace_coordinator(self) -> None:
        """The coordinator dies, and another one takes its place, which knows nothing."""
        self.begin_coordinator(is_successor=True)

    def replace(self, name: str) -> None:
        """A host's agent is paused for good or bad, and another one is started on its store."""
        host = self.hosts.get(name)
        if host is not None and host.is_in:
            self.kill(name, is_disk_lost=False)
            self.ghosts.append(host)

    def wake_ghosts(self) -> None:
        """Agents that were replaced go on, and call as if nothing had been."""
        for ghost in self.ghosts:
            if ghost.agent.exit is None and ghost.is_in:
                ghost.exchange()

    def _end_ghosts(self, names: list[str]) -> None:
        """Agents of these hosts that were replaced end, and their connections with them."""
        for ghost in [ghost for ghost in self.ghosts if ghost.name in names]:
            self.desk.gone(ghost)  # type: ignore[arg-type]
            self.ghosts.remove(ghost)

    def cut(self, name: str) -> None:
        """A host's connections break; it makes new ones when it next calls."""
        if name in self.hosts:
            self.desk.gone(self.hosts[name])  # type: ignore[arg-type]

    def leave(self, name: str) -> None:
        if name in self.hosts and self.hosts[name].number:  # one that never joined just ends
            self.hosts[name].agent.feed(events.LeaveAsked())

    def notice(self, name: str, left_s: float | None, source: str = "file") -> None:
        """A host is told that it will be taken away."""
        if name in self.hosts and self.hosts[name].number:
            self.hosts[name].agent.feed(events.Noticed(source, left_s))

    def take_back(self, name: str, source: str = "file") -> None:
        if name in self.hosts and self.hosts[name].number:
            self.hosts[name].agent.feed(events.NoticeWithdrawn(source))

    def scale(self, nproc: int) -> None:
        """A person asks for another number of workers, of which there may be none."""
        person: Any = None
        with contextlib.suppress(ScalaiError):
            self.desk.handle(person, Scale(nproc, None, None, dry_run=False))

    def delay_stores(self, *, is_late: bool) -> None:
        """What workers are to meet at is not there yet, and the job waits for it; or it comes."""
        self.stores.is_late = is_late
        if not is_late:
            self.stores.come()

    def space(self, every: int, ahead: int) -> None:
        """The hosts are told, each when it hears of it, that snapshots lie so many steps apart from
        a step on that is so far ahead: behind them where that is negative."""
        number, step = self.furthest()
        begin = max(0, step + ahead)
        with self.desk.lock:
            self.live.command(self.live.active(), commands.Space(number, begin, every))

    def kill_worker(self, name: str, rank: int) -> None:
        host = self.hosts.get(name)
        for number, group in list(host.hands.groups.items()) if host else []:
            worker = group.workers.get(rank)
            if host is not None and worker is not None and worker.exit is None:
                worker.exit = -9
                host.agent.worker_gone(number, rank)

    def act(self, name: str, what: str, *, is_repeated: bool = False) -> None:
        """Let something of a host go on."""
        host = self.hosts.get(name)
        if host is None or host.is_silent or host.agent.exit is not None:
            return
        if host.wants_to_join:
            self.happened += 1
            host.enter_job()
        elif what == "net":
            host.exchange(is_repeated=is_repeated)
        elif what == "work" and host.work:
            self.happened += 1
            found = host.work.pop(0)()
            for event in found if isinstance(found, list) else [found] if found else []:
                host.agent.feed(event)
        elif what == "workers":
            self._let_work(host)

    def _let_work(self, host: SimulatedHost) -> None:
        for number, group in list(host.hands.groups.items()):
            for worker in group.workers.values():
                is_gone = worker.exit is not None or worker.is_stopped
                if not is_gone and worker.thread_call is None and worker.thread not in ("", "end"):
                    self.happened += worker.thread != "watch"
                    host.hands.ask_thread(number, worker)
                if host.agent.state.exit is not None:
                    return
                is_told = worker.copy != "write" or not worker.is_copying or worker.doing != "train"
                if not is_gone and worker.copy and worker.copy_call is None and is_told:
                    self.happened += 1
                    host.hands.ask_copy(number, worker)
                if host.agent.state.exit is not None:
                    return
                is_hung = worker.is_hung or not self.can_meet(number)
                if not is_gone and not is_hung and worker.call is None:
                    if worker.doing == "proof" and self.is_proof_late:
                        continue
                    if worker.doing != "train":
                        self.happened += 1
                        host.hands.ask(number, worker)
                    elif group.agreed is not None and worker.step >= group.agreed:
                        if not worker.is_late and not self._has_copy(worker):
                            worker.doing = "stand" if self.save_of(number) is not None else "stop"
                    elif self._is_to_snapshot(group, worker) and not self._has_copy(worker):
                        worker.snapped = worker.step
                        if self.is_async:
                            worker.copy = "begin"
                        else:
                            worker.doing = "snapshot"
                if host.agent.state.exit is not None:
                    return

    def train(self) -> None:
        """Make one step, if all ranks of the job can: as a collective does."""
        state = self.live.state
        if not state.current or not self.can_meet(state.round):
            return
        workers = self.workers()
        for group, worker in workers:
            stop = group.agreed if group.agreed is not None else group.proposed
            if worker.doing != "train" or worker.exit is not None or worker.is_hung:
                return
            if worker.is_stopped or worker.thread not in ("", "watch"):
                return  # others wait for it, or it has been told to make no further update
            if worker.copy == "begin":
                return  # the update waits until all is copied
            if (stop is not None and worker.step >= stop) or self._is_to_snapshot(group, worker):
                return
        for _, worker in workers:
            worker.step += 1
        if workers and self.is_save_ending:
            self.save, self.is_save_ending = None, False

    def _has_copy(self, worker: Worker) -> bool:
        """Whether a worker has to wait for what it has copied: from now on that is not late."""
        worker.is_copying = worker.is_copying and not worker.copy
        return bool(worker.copy)

    def furthest(self) -> tuple[int, int]:
        """Return the present round, and the step of the worker of it that is furthest."""
        steps = [worker.step for _, worker in self.workers()]
        return self.live.state.round, max(steps, default=0)

    def workers(self) -> list[tuple[Group, Worker]]:
        """Return all workers of the present round; none where a host lacks them."""
        state, found = self.live.state, list[tuple[Group, Worker]]()
        for name in state.current.active if state.current else ():
            host = self.hosts.get(name)
            group = host.hands.groups.get(state.round) if host else None
            if group is None:
                return []
            found += [(group, worker) for worker in group.workers.values()]
        return found

    def _is_to_snapshot(self, group: Group, worker: Worker) -> bool:
        """Whether a rank has yet to make the snapshot of its step. At a step that may be the stop
        it waits for the word first."""
        stop = group.agreed if group.agreed is not None else group.proposed
        is_at_stop = stop is not None and worker.step >= stop
        worker.schedule = worker.schedule.at(worker.step, group.spaced)
        return (
            worker.schedule.is_due(worker.step) and worker.snapped != worker.step and not is_at_stop
        )

    def save_of(self, number: int) -> int | None:
        """Return the iteration of the save that is in flight in a round, if one is."""
        return self.save[1] if self.save is not None and self.save[0] == number else None

    def begin_save(self) -> None:
        """The training begins a save that goes on beside it, at one step of all ranks."""
        workers = self.workers()
        steps = {worker.step for _, worker in workers}
        is_free = all(
            worker.doing == "train" and (group.agreed is None or worker.step < group.agreed)
            for group, worker in workers
        )
        if self.save is None and is_free and len(steps) == 1:
            self.save, self.is_save_ending = (self.live.state.round, steps.pop()), False

    def end_save(self) -> None:
        self.is_save_ending = self.save is not None

    def slip(self, nproc: int) -> bool:
        """An action of the coordinator raises: the job ends, and what hosts hold stays. Return
        whether there was one to carry out."""

        def raises(action: Any) -> None:
            raise RuntimeError(f"a slip in {type(action).__name__}")

        before = {name: set(host.store) for name, host in self.hosts.items()}
        perform = self.live.perform
        self.live.perform = raises
        self.scale(nproc)
        self.tick()
        self.live.perform = perform
        if not self.live.has_crashed:
            return False
        assert self.phase is Phase.ENDED and self.live.exit_code == 1
        assert any("event=crashed" in line and "a slip in" in line for line in self.log)
        for name in list(self.hosts):
            self.act(name, "net")
        reported = [host.agent.exit for host in self.hosts.values() if host.is_in]
        assert set(reported) <= {None, 0, 1}, reported
        assert all(set(self.hosts[n].store) >= held for n, held in before.items()), "one is gone"
        return True

    def tick(self, seconds: float = TICK_S) -> None:
        """Time passes, for all at once. The coordinator looks more often: else it would take itself
        for one that had stood still."""
        end = Clock.now + seconds
        while Clock.now < end:
            Clock.now = min(end, Clock.now + LOOK_S)
            with self.desk.lock:
                self.desk.tick()
        for host in self.hosts.values():
            if host.agent.exit is not None and host.is_in:
                self._ended(host)
            elif not host.is_silent and host.agent.exit is None:
                host.agent.feed(
                    events.TimePassed(host.clock_s, host.hands.seen(host.agent.state.round))
                )

    def _ended(self, host: SimulatedHost) -> None:
        """An agent has exited: its workers die with it, and its connections end."""
        host.is_in = False
        host.hands.groups.clear()
        self.desk.gone(host)  # type: ignore[arg-type]

    def go_on(self, seconds: float) -> None:
        """Let everything happen that can, for so long."""
        end = Clock.now + seconds
        while Clock.now < end and self.phase is not Phase.ENDED:
            for _ in range(ROUNDS_A_TICK):
                before = self.happened
                for name in list(self.hosts):
                    for what in ("net", "work", "workers"):
                        self.act(name, what)
                if self.happened == before:
                    break
            self.train()
            self.tick(TICK_S if Clock.now + TICK_S < end else 1.0)

    def go_step_by_step(self, count: int) -> None:
        """Let so many things happen, one at a time."""
        end = self.happened + count
        self.until(lambda: self.happened >= end)

    def until(
        self,
        wanted: Phase | Callable[[], bool],
        may: Callable[[str, str], bool] = lambda *_: True,
    ) -> None:
        """Let one thing that ``may`` be happen after the other, until the job is in a phase, or
        something holds."""
        for _ in range(1000):
            for name in list(self.hosts):
                for what in ("net", "work", "workers"):
                    if wanted() if callable(wanted) else self.phase is wanted:
                        return
                    if may(name, what):
                        self.act(name, what)
            self.train()
            self.tick(0.5)
        raise AssertionError((wanted, self.phase, self.log[-30:]))

    def settle(self, seconds: float = 120.0) -> None:
        """Let the job come to rest."""
        self.go_on(seconds)

    def trains(self, seconds: float) -> str:
        """Let everything happen for so long: every worker trains then. Returns the hosts."""
        self.go_on(seconds)
        assert self.is_training(), self.log[-30:]
        return self.active

    def hang(self, name: str, **how: bool) -> None:
        """The workers of a host hang, or do what else is named."""
        for group in self.hosts[name].hands.groups.values():
            for worker in group.workers.values():
                for what, value in (how or {"is_hung": True}).items():
                    setattr(worker, what, value)

    def heal(self) -> None:
        """Faults stop: what hung goes on, who was silent speaks, who had no room has."""
        self._end_ghosts([ghost.name for ghost in self.ghosts])
        self.save, self.disk.is_full = None, False
        self.broken.clear()
        self.cannot_run.clear()
        self.cannot_meet.clear()
        self.is_proof_late = False
        self.delay_stores(is_late=False)
        for host in self.hosts.values():
            host.is_spoilt = host.is_silent = host.is_full = host.cannot_start = False
            host.is_sick = False
            for group in host.hands.groups.values():
                for worker in group.workers.values():
                    worker.is_hung = worker.is_late = False
                    worker.is_stopped = worker.is_torn = worker.is_copying = False


Train = Callable[..., World]
"""Begins a job that trains on hosts (``training`` in some folder)."""


def training(folder: Path, hosts: str = "ab", **facts: object) -> World:
    """Return a world whose hosts train."""
    world = World(folder, **facts)  # type: ignore[arg-type]
    for name in hosts:
        world.add(name)
    world.go_on(60.0)
    assert world.is_training(), world.log[-5:]
    return world
