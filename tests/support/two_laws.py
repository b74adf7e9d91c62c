"""A job in one process and virtual time: the coordinator's real desk and law, and hosts with the
real law, over a network that a test drives. Workers and stores are simulated.

A state is four tensors, whole on whoever holds them; the fingerprint of one tells its step.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any

from scalai.core.errors import ScalaiError
from scalai.core.host import events
from scalai.core.membership import Phase
from scalai.launch.desk import Desk
from scalai.launch.flags import parse_options
from scalai.launch.job import JobSpec
from scalai.launch.losses import Patience
from scalai.launch.person_calls import Scale
from support.simulated_host import TENSORS, Clock, Group, NoStores, SimulatedHost, Worker

TICK_S = 5.0
LOOK_S = 0.5
ROUNDS_A_TICK = 40


@dataclass(slots=True)
class World:
    """The coordinator's desk and the hosts around it; nothing happens but what a test does."""

    folder: Any
    flags: tuple[str, ...] = ("--nnodes", "1:4", "--max-restarts", "9")
    is_replicated: bool = True
    hosts: dict[str, SimulatedHost] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    started: list[tuple[int, int | None]] = field(default_factory=list)
    """Rounds, and the generations that they began from."""
    ghosts: list[SimulatedHost] = field(default_factory=list)
    """Agents that were paused, and replaced by others of their hosts."""
    happened: int = 0
    """Counts what the hosts have done."""
    spec: JobSpec = field(init=False)
    desk: Desk = field(init=False)

    def __post_init__(self) -> None:
        config = self.folder / "elastic.toml"
        config.write_text(
            "[model]\nglobal_batch_size = 12\n[probe]\nkind = 'none'\n"
            "[resize]\nsettle_s = 1.0\ndrain_timeout_s = 60.0\nbuild_timeout_s = 20.0\n"
            "start_timeout_s = 600.0\n"
        )
        given = ["--elastic", str(config), "--job", "j", "--nproc-per-node", "2", *self.flags]
        self.spec = JobSpec.read(parse_options([*given, "script.py"]))
        self._open()

    def _open(self) -> None:
        """A coordinator begins, and knows nothing."""
        patience = Patience(poll_s=0.0)
        stores: Any = NoStores()
        self.desk = Desk(self.spec, "127.0.0.1", stores, self.log.append, patience)
        live = self.live
        start = live._start

        def checked(action: Any) -> None:
            self.check_start(action.generation)
            self.started.append((action.round, action.generation))
            start(action)

        live._start = checked

    @property
    def live(self) -> Any:
        return self.desk._live

    @property
    def phase(self) -> Phase:
        found: Phase = self.live.state.phase
        return found

    # ------------------------------------------------------------------ what is true

    def newest_whole(self) -> int | None:
        """Return the newest generation that hosts in the job hold wholly on their disks."""
        pieces: dict[int, set[str]] = {}
        for host in self.hosts.values():
            if host.is_in and not host.is_silent:
                for number, part in host.store.items():
                    pieces.setdefault(number, set()).update(
                        tensor.name for tensor in part.collection.tensors
                    )
        whole_ones = [number for number, names in pieces.items() if len(names) == len(TENSORS)]
        return max(whole_ones, default=None)

    def check_start(self, generation: int | None) -> None:
        """No committed state is passed over."""
        newest = self.newest_whole()
        assert newest is None or (generation is not None and generation >= newest), (
            f"a round begins from {generation}, and generation {newest} is whole"
        )

    def can_reach(self, name: str, generation: int) -> bool:
        """Whether a host's data plane gives out a generation."""
        host = self.hosts.get(name)
        return host is not None and not host.is_silent and generation in host.store

    def is_training(self) -> bool:
        """Whether every worker of the present round trains."""
        state = self.live.state
        if state.phase is not Phase.RUNNING or not state.current:
            return False
        groups = [
            self.hosts[name].hands._groups.get(state.round)
            for name in state.current.active
            if name in self.hosts
        ]
        return len(groups) == len(state.current.active) and all(
            group is not None
            and all(w.doing == "train" and w.exit is None for w in group.workers.values())
            for group in groups
        )

    # ------------------------------------------------------------------ what happens

    def add(self, name: str, slots: int = 2) -> None:
        """A host's agent starts, with what its store holds if it was there before."""
        if name in self.hosts and self.hosts[name].agent.exit is None:
            return
        if name in self.hosts:
            self.hosts[name].begin()
        else:
            self.hosts[name] = SimulatedHost(self, name, slots)

    def kill(self, name: str, *, is_disk_lost: bool) -> None:
        """A host's agent dies with its workers."""
        host = self.hosts.get(name)
        if host is None:
            return
        self.desk.gone(host)  # type: ignore[arg-type]
        if is_disk_lost:
            del self.hosts[name]
            return
        store, sealed, number = host.store, host.sealed, host.number
        fresh = SimulatedHost(self, name, host.slots)
        fresh.store, fresh.sealed, fresh.number = store, sealed, number
        self.hosts[name] = fresh

    def restart(self) -> None:
        """The whole job is started again, on what the hosts' stores hold."""
        for name in list(self.hosts):
            self.kill(name, is_disk_lost=False)
        self.ghosts.clear()
        self.log.clear()
        self._open()

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

    def cut(self, name: str) -> None:
        """A host's connections break; it makes new ones when it next calls."""
        if name in self.hosts:
            self.desk.gone(self.hosts[name])  # type: ignore[arg-type]

    def leave(self, name: str) -> None:
        if name in self.hosts:
            self.hosts[name].agent.feed(events.LeaveAsked())

    def scale(self, nproc: int) -> None:
        """A person asks for another number of workers, of which there may be none."""
        person: Any = None
        with contextlib.suppress(ScalaiError):
            self.desk.handle(person, Scale(nproc, None, None, dry_run=False))

    def kill_worker(self, name: str, rank: int) -> None:
        host = self.hosts.get(name)
        for number, group in list(host.hands._groups.items()) if host else []:
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
            event = host.work.pop(0)()
            if event is not None:
                host.agent.feed(event)
        elif what == "workers":
            self._let_work(host)

    def _let_work(self, host: SimulatedHost) -> None:
        for number, group in list(host.hands._groups.items()):
            for worker in group.workers.values():
                if worker.exit is None and not worker.is_hung and worker.call is None:
                    if worker.doing != "train":
                        self.happened += 1
                        host.hands.ask(number, worker)
                    elif group.agreed is not None and worker.step >= group.agreed:
                        worker.doing = "stop"
                if host.agent.state.exit is not None:
                    return

    def train(self) -> None:
        """Make one step, if all ranks of the job can: as a collective does."""
        state = self.live.state
        if not state.current:
            return
        workers: list[tuple[Group, Worker]] = []
        for name in state.current.active:
            host = self.hosts.get(name)
            group = host.hands._groups.get(state.round) if host else None
            if group is None:
                return
            workers += [(group, worker) for worker in group.workers.values()]
        for group, worker in workers:
            stop = group.agreed if group.agreed is not None else group.proposed
            if worker.doing != "train" or worker.exit is not None or worker.is_hung:
                return
            if stop is not None and worker.step >= stop:
                return
        for _, worker in workers:
            worker.step += 1

    def tick(self, seconds: float = TICK_S) -> None:
        """Time passes, for all at once. The coordinator looks more often: else it would take itself
        for one that had stood still."""
        end = Clock.now + seconds
        while Clock.now < end:
            Clock.now = min(end, Clock.now + LOOK_S)
            with self.desk._lock:
                self.desk.tick()
        for host in self.hosts.values():
            if not host.is_silent and host.agent.exit is None:
                host.agent.feed(events.Ticked(Clock.now, host.hands.seen(host.agent.state.round)))

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

    def heal(self) -> None:
        """Faults stop: what hung goes on, who was silent speaks, who had no room has."""
        self.ghosts.clear()
        for host in self.hosts.values():
            host.is_silent = host.is_full = host.cannot_start = False
            for group in host.hands._groups.values():
                for worker in group.workers.values():
                    worker.is_hung = False
