"""Simulated hosts of the control plane's benchmark: the real law of a host, the real link to the
coordinator and a real data plane, around workers that hold nothing and do at once what they are
asked.

The hosts of one process share its loop; each has the threads of its link and of its data plane.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from control_coordinator import TOKEN
from control_layout import NOTHING, Layouts, fingerprints, manifest
from control_messages import ask_and_plan, committed, grown
from control_watch import Watch

from scalai.core.errors import AnswerError, PeerError, StoreError
from scalai.core.host import actions, events
from scalai.core.host.actions import Action
from scalai.core.host.events import Event
from scalai.core.host.state import HostSettings, HostState, Round, Want
from scalai.core.job.function_proof import Made
from scalai.core.messages import commands
from scalai.core.messages.reports import Committed, Grown, Prepared, Replicated
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import (
    BeginSnapshot,
    Hello,
    Publish,
    RankRestored,
    RankStepped,
    RankWritten,
    ReadOrder,
    Source,
    WorkerRequest,
    WriteOrder,
)
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.holders import SourceList
from scalai.launch.agent.data_plane import DataPlaneServer
from scalai.launch.agent.link import CoordinatorLink
from scalai.launch.agent.loop import MEMORY, Agent, Loop
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.calls import HostLists, Join, StoreIdentity
from scalai.launch.coordinator.discovery import Place
from scalai.runtime.lanes import Lanes
from scalai.store.manifest import HostManifest
from scalai.store.parts import summary_bytes

STEP_S = 5.0
"""Of a training step."""
SLOTS = 8
GIVE_WAY_S = 0.0005
"""So long the loop rests between what two hosts do."""
RETRY_S = 0.5
"""A host that could not join tries again after so long, as who supervises agents would."""
NO_FACTS = JsonText.of({})


class StubStore:
    """What a data plane needs of a host's store: the manifests of its generations."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.generations: dict[int, HostManifest] = {}
        self.sealed: dict[str, HostManifest] = {}

    def manifest(self, generation: int) -> HostManifest:
        """Return the manifest of a generation, as ``HostStore``."""
        if generation not in self.generations:
            raise StoreError(f"generation {generation} is not on host {self.host!r}.")
        return self.generations[generation]


@dataclass(slots=True)
class Slot:
    """Files for a snapshot, into which nothing is written."""

    orders: Mapping[int, WriteOrder]

    def take_over(self, lost: int, alive: Iterable[int]) -> dict[int, WriteOrder]:
        return {}


@dataclass(slots=True)
class Group:
    """The workers of one round on a host, which do all things together."""

    workers: commands.Workers
    step: int = 0
    since: float | None = None
    """Since when they train from ``step`` on."""
    limit: int | None = None
    """The step that they do not pass: a stop that is proposed or agreed."""
    answers: list[object] = field(default_factory=list)
    """To what they wait for all together."""

    @property
    def ranks(self) -> range:
        return self.workers.placement.ranks

    @property
    def place(self) -> int:
        """The host's place among those with workers."""
        return self.workers.placement.group_rank

    @property
    def page(self) -> "Group":
        """Their control page, with the numbers of no step."""
        return self

    def made(self, after: int) -> list[Made]:
        return []

    def newest_step(self) -> int:
        """Return the step that they have ended last."""
        if self.since is None:
            return self.step
        made = self.step + int((time.monotonic() - self.since) / STEP_S)
        return made if self.limit is None else min(made, max(self.limit, self.step))

    def pause(self, step: int) -> None:
        """They stand at a step."""
        self.step, self.since = step, None

    def go_on(self, limit: int | None = None) -> None:
        """They train, up to this step."""
        self.step, self.limit, self.since = self.newest_step(), limit, time.monotonic()


class Hands:
    """Does on simulated workers and files what the law of a host decides."""

    def __init__(self, host: "Host") -> None:
        self._host = host
        self.groups: dict[int, Any] = {}
        self._waits: dict[int, tuple[Group, str]] = {}
        self._calls = 0

    def generations(self) -> frozenset[int]:
        return frozenset(self._host.store.generations)

    def seen(self, current: Round | None) -> events.GroupSeen | None:
        group = None if current is None else self.groups.get(current.number)
        return None if group is None else events.GroupSeen(newest=group.newest_step())

    def arrivals(self) -> Iterable[Event]:
        return ()

    def take_call(self, answer: "Future[Any]") -> int:
        raise AssertionError("workers call the law")

    def perform(self, action: Action) -> Iterable[Event]:
        match action:
            case actions.SendReport(report):
                self._host.link.tell(report)
            case actions.AnswerCall(call, _, error) if error:
                self._waits.pop(call, None)
            case actions.AnswerCall(call, value):
                self._answered(call, value)
            case actions.AnswerHello(call):
                self._answered(call, None)
            case actions.StartGroup(workers):
                group = self.groups[workers.round] = Group(workers)
                self._later(self._all, group, "hello")
                return [events.Done(action)]
            case actions.EndGroup(number):
                group = self.groups.pop(number)
                return [events.Done(action, group.newest_step())]
            case commands.Prepare(number, stop):
                group = self.groups[number]
                newest = group.newest_step()
                group.go_on(stop)
                return [Prepared(number, stop, newest)]
            case commands.Agree(number, stop):
                group = self.groups[number]
                group.pause(stop)
                self._later(self._all, group, "stop")
                return [events.Done(action)]
            case commands.Space(number):
                return [events.Done(action, self.groups[number].newest_step())]
            case commands.Withdraw(number):
                self.groups[number].go_on()
            case actions.Rejoin():
                self._host.rejoin()
            case _:
                return self._of_the_store(action)
        return ()

    def _of_the_store(self, action: Action) -> Iterable[Event]:
        host = self._host
        match action:
            case actions.Reserve(_, held):
                slot = Slot({rank: WriteOrder(rank, "", (), ()) for rank in held})
                self._later(host.agent.feed, events.Done(action, slot))
            case actions.Seal():
                host.lanes.run(MEMORY, "a host", partial(host.seal, action), host.feed_later)
            case actions.FetchWanted():
                work = partial(host.verify, action)
                host.lanes.run(
                    MEMORY, "a host", work, lambda found: host.later(partial(host.found, found))
                )
            case commands.Commit(generation, snapshot):
                if snapshot not in host.store.sealed:
                    return [events.NothingToCommit(action, "here")]
                sealed = host.store.sealed.pop(snapshot)
                host.store.generations[generation] = committed(sealed, action)
                return [Committed(generation)]
            case actions.DiscardSealed(kept):
                sealed_parts = host.store.sealed
                host.store.sealed = {n: part for n, part in sealed_parts.items() if n in kept}
            case commands.Replicate(order):  # without tensors there is nothing to fetch
                return [Replicated(order, 0)]
            case commands.Drop(generation):
                host.store.generations.pop(generation, None)
        return ()

    # ------------------------------------------------------------------ workers

    def _later(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._host.later(partial(function, *arguments))

    def _all(self, group: Group, what: str) -> None:
        """All workers of a group call, in the loop."""
        group.answers.clear()
        for rank in group.ranks:
            self._calls += 1
            self._waits[self._calls] = group, what
            request = self._request(group, rank, what)
            self._host.agent.feed(events.Called(self._calls, request))

    def _request(self, group: Group, rank: int, what: str) -> WorkerRequest:
        number, is_first = group.workers.round, rank == group.ranks.start
        match what:
            case "hello":
                return Hello(rank, number)
            case "publish":
                held = self._host.held(group) if is_first else NOTHING
                wanted = self._host.wanted(group)[rank - group.ranks.start]
                return Publish(rank, number, True, held, wanted, f"r{rank}", NO_FACTS, False)
            case "start" | "stop":
                return BeginSnapshot(rank, number, what, group.step)
            case "write start" | "write stop":
                done = group.step
                return RankWritten(rank, number, done, (), f"r{rank}", NO_FACTS, NO_FACTS, 1, {})
            case "restored":
                prints = fingerprints(self._host.wanted(group)[rank - group.ranks.start])
                return RankRestored(rank, number, prints, {}, "restored")
            case _:
                return RankStepped(rank, number, group.step, None)

    def _answered(self, call: int, value: object) -> None:
        group, what = self._waits.pop(call)
        group.answers.append(value)
        if len(group.answers) == len(group.ranks):
            self._go_on(group, what, value)

    def _go_on(self, group: Group, what: str, value: object) -> None:
        """All workers of a group have their answers to what they called."""
        host = self._host
        match what:
            case "hello":
                self._later(self._all, group, "publish")
            case "publish" if isinstance(value, Source):
                group.step = value.step
                host.watch.note("ready", host.number)
                host.watch.when("restore", partial(self._later, self._restore, group))
            case "publish":
                self._later(self._all, group, "start")
            case "start" | "stop" if value is not None:
                self._later(self._all, group, f"write {what}")
            case "stop":  # it was taken back
                group.go_on()
            case "write start":
                self._later(self._all, group, "stepped")
            case "restored":
                host.watch.note("proceeded", host.number)
                self._later(self._all, group, "stepped")
            case "stepped":
                group.go_on()
                host.watch.note("stepped" if group.step == 0 else "stepped_after", host.number)

    def _restore(self, group: Group) -> None:
        self._host.watch.note("restored", self._host.number)
        self._all(group, "restored")


class Host:
    """One host: its agent with the real law, its link, its data plane and its simulated rest."""

    def __init__(
        self, number: int, spec: JobSpec, place: Place, layouts: Layouts, watch: Watch,
        loop: Loop, lanes: Lanes,
    ) -> None:  # fmt: skip
        self.number, self.name = number, f"node-{number:05d}"
        self.watch, self.lanes = watch, lanes
        self.later = partial(_give_way_after, loop)
        self._spec, self._layouts = spec, layouts
        self.store = StubStore(self.name)
        stub: Any = self.store
        self._data = DataPlaneServer(stub, TOKEN)
        self.link = CoordinatorLink(
            place, spec.job, self.name, spec.config.resize.coordinator_timeout_s, self.later,
            self._lost, self._expelled,
        )  # fmt: skip
        settings = HostSettings(self.name, spec.is_elastic, spec.config.resize.drain_timeout_s)
        self.agent = Agent(HostState(settings, SLOTS, time.monotonic()), Hands(self), loop)
        self.sources: SourceList | None = None
        self._group: Sequence[str] = ()
        self._wants: Mapping[int, Want] = {}
        self._fetching: actions.FetchWanted | None = None

    # ------------------------------------------------------------------ the job

    def enter(self) -> None:
        """Become part of the job, however often that must be tried."""
        self.watch.note("begun", self.number)
        while True:
            try:
                self.link.join(self._brings)
                break
            except AnswerError:
                raise
            except PeerError:
                self.watch.count("retries")
                time.sleep(RETRY_S)
        self.watch.note("joined", self.number)
        self._follow()

    def rejoin(self) -> None:
        """Join again beside the loop."""

        def joined() -> None:
            self.agent.feed(events.Done(actions.Rejoin()))
            self._follow()

        self.link.rejoin(self._brings, joined)

    def _follow(self) -> None:
        self.link.follow(self.agent, self.agent.obey)

    def _brings(self, incarnation: str) -> Join:
        named = HostLists()
        parts = named.take(map(summary_bytes, self.store.generations.values()))
        return Join(
            job=self._spec.job,
            host=self.name,
            incarnation=incarnation,
            store=StoreIdentity("boot", 1, self.number),
            slots=SLOTS,
            address=self._data.address,
            parts=parts,
            sealed=(),
            hosts=named.lists,
            damaged=(),
            spec=JsonText.of(self._spec.to_json()),
        )

    def _lost(self, error: PeerError) -> None:
        self.watch.say(f"{self.name} has lost the coordinator: {error}")
        self.watch.count("gave_up")
        self.agent.feed(events.JobLost(str(error)))

    def _expelled(self, error: PeerError) -> None:
        self.watch.say(f"{self.name} is expelled: {error}")
        self.watch.count("expelled")
        self.agent.feed(events.Expelled(str(error)))

    # ------------------------------------------------------------------ its state

    def held(self, group: Group) -> Collection:
        """Return what the workers of a group hold."""
        is_before = self._is_before(group)
        return (self._layouts.held if is_before else self._layouts.held_after)[group.place]

    def wanted(self, group: Group) -> list[Collection]:
        """Return what each worker of a group wants: at the first start they begin anew."""
        if self._is_before(group):
            return [NOTHING] * len(group.ranks)
        return list(self._layouts.wanted[group.place])

    def _is_before(self, group: Group) -> bool:
        return group.workers.placement.world_size == self._layouts.before.world_size

    def _feed_all(self, found: tuple[Event, ...]) -> None:
        for event in found:
            self.feed_later(event)

    def feed_later(self, event: Event) -> None:
        self.later(partial(self.agent.feed, event))

    def seal(self, action: actions.Seal) -> Event:
        """Seal what the workers have written; beside the loop."""
        rows = self._layouts.held[min(action.parts) // SLOTS]
        about = {**action.about, "time": time.time()}
        made = manifest(self.name, action.step, about, tuple(sorted(action.parts)), rows)
        self.store.sealed[str(about["snapshot"])] = made
        return events.Done(action, summary_bytes(made))

    def verify(self, action: actions.FetchWanted) -> commands.Start:
        """Check a start's sources, which arrived with their digest; beside the loop."""
        start = action.start
        assert start.sources is not None and len(start.sources.value.hosts)
        self._wants, self._fetching = action.wants, action
        self.watch.note("verified", self.number)
        return start

    def found(self, start: commands.Start) -> None:
        """The sources are verified: go on with the restore once the benchmark says so."""
        assert start.sources is not None
        self.sources, self._group = start.sources.value, start.workers.placement.group
        self.watch.when(
            "move", lambda: self.lanes.run(MEMORY, "a host", self._fetched, self._feed_all)
        )

    def plan(self) -> tuple[float, int]:
        """Ask the hosts that hold what this one wants, and plan. Returns the seconds that it took,
        and how many were asked."""
        assert self.sources is not None
        begin = time.perf_counter()
        count = ask_and_plan(self.sources, self.store, self._wants, self._group, TOKEN)
        return time.perf_counter() - begin, count

    def _fetched(self) -> tuple[Event, ...]:
        """Have all that the workers want, as if it had been planned and moved; beside the loop."""
        assert self.sources is not None
        own = self.store.generations[self.sources.generation]
        rows = self._layouts.fetched[min(self._wants) // SLOTS]
        nothing = Source(ReadOrder.empty(), own.step, 1, NO_FACTS, NO_FACTS)
        sources, made = dict.fromkeys(self._wants, nothing), grown(own, rows)
        assert self._fetching is not None
        round = self._fetching.start.workers.round
        planned = events.RestorePlanned(round, sources, 0.0, 0, 0)
        fetched = events.Done(self._fetching)
        return (planned, fetched) if made is None else (planned, Grown(made), fetched)

    def tick(self) -> None:
        if not self.agent.is_over():
            self.agent.tick()


def _give_way_after(loop: Loop, work: Callable[[], object]) -> None:
    """Have the loop do something, and then let the threads of other hosts go on: hosts have loops
    of their own, and a loop that is busy for hundreds of them would keep their links waiting."""

    def do() -> None:
        work()
        time.sleep(GIVE_WAY_S)

    loop.put(do)


def join_all(hosts: Iterable[Host]) -> None:
    """Have all hosts join at once, each in a thread of its own."""
    for host in hosts:
        threading.Thread(target=host.enter, name=host.name, daemon=True).start()
