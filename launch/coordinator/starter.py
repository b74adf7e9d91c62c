"""Start of a round's workers: their meeting point and their initial state."""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from scalai.core.dataset.ledger import of_run
from scalai.core.degrees.assignment import place_ranks
from scalai.core.errors import PeerError
from scalai.core.job import membership as m
from scalai.core.job.function_proof import FACT as PROVEN
from scalai.core.messages import actions, commands, events, reports
from scalai.core.messages.shared import JsonText, Shared
from scalai.core.tensors.holders import Listed, SourceList, source_list
from scalai.core.tensors.replicas import leaving_ring, ring_of
from scalai.launch.coordinator.held_states import HeldStates
from scalai.launch.coordinator.members import Members
from scalai.launch.coordinator.rendezvous_store import RendezvousStores
from scalai.store.generation import unite
from scalai.store.parts import ATTACHED, reference_of

Beginning = actions.BuildRound | actions.StartRound
Workers = dict[str, commands.Workers]
"""Workers by host."""
CommandOf = Callable[[commands.Workers], commands.Command]


class Run(Protocol):
    """The job as a starter needs it: run name, members, held states, law."""

    members: Members
    generations: HeldStates
    state: m.Job

    @property
    def run(self) -> str: ...

    def feed(self, event: events.Event) -> None: ...

    def crash(self, error: Exception) -> None: ...


class Starter:
    """Commands agents to start workers, and opens their meeting point.

    Args:
        interface: Address of the workers' meeting point.
        stores: Rendezvous stores at this address.
        lock: Lock of the job; callers hold it.
    """

    def __init__(
        self, run: Run, interface: str, stores: RendezvousStores, lock: threading.RLock
    ) -> None:
        self._run = run
        self._interface = interface
        self._roster, self._generations = run.members, run.generations
        self._stores, self._lock = stores, lock
        self._port: int | None = None
        self._standby_port: int | None = None
        self._opening: Beginning | None = None
        """The action that waits for its store."""

    def build(self, action: actions.BuildRound, newest: int | None) -> None:
        """Start the next round's workers beside the present ones, for a generation later than
        ``newest``."""
        standby = action.standby
        self.give_up()
        workers = self._workers(standby.round, standby.assignment, newest, action.every)
        self._open(action, workers, commands.Build)

    def give_up(self) -> None:
        """Close the standby workers' store."""
        self._close(self._standby_port)
        self._standby_port = None
        if isinstance(self._opening, actions.BuildRound):
            self._opening = None

    def start(self, action: actions.StartRound) -> None:
        """Start the workers of a round, or let standby workers begin."""
        self._close(self._port)
        self._port = None
        sources = None
        if action.generation is not None:
            sources = Shared(self._sources(action.generation, action.assignment))
        lost = tuple(of_run(self._run.run, each) for each in action.lost)
        workers = self._workers(action.round, action.assignment, action.generation, action.every)
        port, self._standby_port = self._standby_port, None
        # Without a port no host has standby workers yet.
        is_built = action.is_built and port is not None

        def command(each: commands.Workers) -> commands.Start:
            return commands.Start(each, sources, is_built, lost, action.proves)

        if port is None:
            self._open(action, workers, command)
        else:
            self._opening = None
            self._begin(action, workers, command, port)

    def _open(self, action: Beginning, workers: Workers, command: CommandOf) -> None:
        """Begin an action once its store is open. The lock is free until then: agents are heard,
        and the law may change its mind."""
        self._opening = action
        self._stores.open(partial(self._opened, action, workers, command))

    def _opened(
        self, action: Beginning, workers: Workers, command: CommandOf, port: int | PeerError
    ) -> None:
        with self._lock:
            try:
                if not self._is_meant(action):
                    self._close(port if isinstance(port, int) else None)
                    return
                self._opening = None
                if isinstance(port, int):
                    self._begin(action, workers, command, port)
                elif isinstance(action, actions.BuildRound):  # nothing depends on it
                    standby = action.standby
                    host = standby.assignment.active[0]
                    not_built = reports.Built(standby.round, str(port))
                    self._run.feed(events.Reported(host, not_built))
                else:
                    raise port
            except Exception as error:  # as in ``LiveJob.feed``
                self._run.crash(error)

    def _begin(self, action: Beginning, workers: Workers, command: CommandOf, port: int) -> None:
        if isinstance(action, actions.BuildRound):
            self._standby_port = port
        else:
            self._port = port
        for host, each in workers.items():
            self._roster.command([host], command(replace(each, master_port=port)))

    def _is_meant(self, action: Beginning) -> bool:
        """Whether the law still wants the delayed action."""
        job = self._run.state
        if action is not self._opening or job.phase is m.Phase.ENDED:
            return False
        if isinstance(action, actions.BuildRound):
            return (
                job.change.standby is not None and job.change.standby.round == action.standby.round
            )
        return job.phase is m.Phase.STARTING and job.round == action.round

    def replicate(self, action: actions.MakeReplicas) -> None:
        """Command replicas. Each host gets the sources with the parameters of its wards."""
        domains = {host: self._roster[host].domain for host in action.hosts if host in self._roster}
        ring, sources = ring_of(domains, action.replicas), self._sources(action.generation, None)
        if action.giving:
            ring = leaving_ring(domains, action.giving)
        shared_ring, lists = Shared(ring), dict[tuple[int, ...], Shared[SourceList]]()
        wards = ring.all_wards()
        for host in domains:
            numbers = tuple(sources.sharers(wards.get(host) or action.giving))
            if numbers not in lists:
                lists[numbers] = Shared(sources.only(numbers))
            command = commands.Replicate(action.order, lists[numbers], shared_ring)
            self._roster.command([host], command)

    def _sources(self, number: int, assignment: m.Assignment | None) -> SourceList:
        """Holders of a generation, for the workers of an assignment, or unchanged."""
        parts = self._generations.parts(number)
        in_order = sorted(parts.values(), key=lambda part: min(part.ranks, default=1 << 62))
        about = {k: v for k, v in in_order[0].about.items() if k != ATTACHED}
        world, degrees = about.get("world_size", 0), about.get("degrees", {})
        is_alike = assignment is None or (
            world == assignment.degrees.world_size
            and all(degrees.get(a, n) == n for a, n in assignment.degrees.to_json().items())
        )
        return source_list(
            [
                Listed(
                    host,
                    self._roster[host].address,
                    reference_of(part),
                    part.collection.tensors,
                    part.rank_state,
                )
                for host, part in sorted(parts.items())
            ],
            generation=number,
            step=self._generations.step(number),
            about=about,
            scalars=unite(part.scalars for part in in_order),
            # Ranks at other degrees cannot use these states: all begin new ones.
            ranks=world if is_alike else 0,
        )

    def _close(self, port: int | None) -> None:
        if port is not None:
            self._stores.close(port)

    def _workers(
        self, round: int, assignment: m.Assignment, generation: int | None, every: int
    ) -> Workers:
        """Workers of each host of an assignment, with the newest generation's facts; port 0 until
        the store is open."""
        step = None if generation is None else self._generations.step(generation)
        facts = {} if generation is None else dict(self._generations.facts(generation))
        if known := self._run.state.function.known:
            facts[PROVEN] = list(known)
        return {
            host: commands.Workers(
                run=self._run.run,
                round=round,
                placement=placement,
                degrees=assignment.degrees.to_json(),
                micro_batch_size=assignment.micro_batch_size,
                master_addr=self._interface,
                master_port=0,
                generation=generation,
                restorable_step=step,
                facts=JsonText.of(facts),
                snapshot_every=every,
                recompute=assignment.recompute,
                offload=assignment.offload,
                paces=assignment.paces,
            )
            for host, placement in place_ranks(assignment).items()
        }
