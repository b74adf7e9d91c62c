"""Performs the decisions of a host's law: the hands of an agent.

Blocking work (faulting pages in, planning and fetching, sealing) runs in threads; its results reach
the agent's loop as events.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from scalai.core.dataset.table import DATASET
from scalai.core.errors import PeerError, ProofError, ScalaiError
from scalai.core.exit_codes import WORKER_OUT_OF_MEMORY
from scalai.core.host import actions, events
from scalai.core.host.actions import Action, Level
from scalai.core.host.events import Done, Event, Failed, GroupOver, GroupSeen
from scalai.core.host.standby import AUTO, BRINK, Standby, StandbyChoice, choose
from scalai.core.host.state import Call, Round
from scalai.core.job.deadlines import GONE_S
from scalai.core.messages import commands, reports
from scalai.core.messages.commands import Replicate
from scalai.core.messages.reports import Report
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import Beside, Welcome
from scalai.launch.agent.fetch import Moving, prepare_restore
from scalai.launch.agent.holdings import Holdings
from scalai.launch.agent.host_checks import DeviceMemory, HealthCheck, describe_rise, oom_kills
from scalai.launch.agent.loop import DISK, ENDS, HEALTH, MEMORY, NETWORK, THREADS
from scalai.launch.agent.network import unheard
from scalai.launch.agent.progress import Stacks
from scalai.launch.agent.replica_fetch import Replicas
from scalai.launch.agent.worker_group import WorkerGroup, WorkerGroups, offer, room_beside
from scalai.launch.config.job_spec import JobSpec
from scalai.runtime.failpoints import here, reached
from scalai.runtime.lanes import Lanes
from scalai.runtime.processes import private_bytes
from scalai.store.host import HostStore
from scalai.store.parts import snapshot_name, summary_bytes
from scalai.store.pool import available_memory
from scalai.store.snapshot import SnapshotSlot

LEVELS = {
    Level.INFO: logging.INFO, Level.WARNING: logging.WARNING, Level.ERROR: logging.ERROR,
}  # fmt: skip

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hands:
    """A performer's tools; the performer opens none itself.

    Attributes:
        token: The job's secret, for other hosts' data planes.
        tell: Sends a report to the coordinator; returns at once.
        feed: Hands the agent's loop an event; any thread may call it.
        rejoin: Joins the job again with the store's content, beside the loop.
        is_over: Whether the agent must end and waits no longer.
        health: Checks this host's fitness for workers.
        memory: Waits for the device memory of killed workers; None: not.
        lanes: Run blocking work beside the loop.
    """

    spec: JobSpec
    host: str
    token: bytes
    store: HostStore
    holdings: Holdings
    groups: WorkerGroups
    stacks: Stacks
    lanes: Lanes
    tell: Callable[[Report], None]
    feed: Callable[[Event], None]
    rejoin: Callable[[], None]
    is_over: Callable[[], bool]
    health: HealthCheck
    memory: DeviceMemory | None = None


class Performer:
    """Performs the actions of one host's law. Only the agent's own thread calls it.

    Args:
        replicas: Makes this host's replicas for others; None: without a rate limit.
    """

    def __init__(self, hands: Hands, replicas: Replicas | None = None) -> None:
        self._hands, self._store = hands, hands.store
        self.groups: dict[int, WorkerGroup] = {}
        """Workers by the number of their round."""
        self._calls, self._last_call = dict[Call, Future[Any]](), 0
        self._oom_kills = oom_kills()
        self._ends = deque[threading.Event](maxlen=THREADS[ENDS])
        """Set after workers ended beside the loop are gone."""
        self._moving: Moving | None = None
        self._replicas = replicas or Replicas(hands.store, hands.token)

    # ------------------------------------------------------------------ state of the workers

    def generations(self) -> frozenset[int]:
        """Return the store's generations."""
        return frozenset(self._store.generations())

    def seen(self, current: Round | None) -> GroupSeen | None:
        """Return the state of a round's workers; None: there are none."""
        group = None if current is None else self.groups.get(current.number)
        if current is None or group is None:
            return None
        page, first = group.page, current.ranks.start
        return GroupSeen(
            newest=group.newest_step(),
            save=page.save_in_flight(),
            looks=page.save_looks(),
            reached=frozenset(r for r in current.ranks if page.has_reached_stop(r - first)),
            ended=group.ended() if current.is_draining or current.emergency else {},
        )

    def arrivals(self) -> Iterable[Event]:
        """Yield news of bytes from other hosts."""
        news = None if self._moving is None else self._moving.news()
        if self._moving is not None and news is not None:
            yield reports.Moved(self._moving.round, news)

    # ------------------------------------------------------------------ calls of workers

    def take_call(self, answer: "Future[Any]") -> Call:
        """Number a worker's call; an action answers it."""
        self._last_call += 1
        self._calls[self._last_call] = answer
        return self._last_call

    def _answer(self, call: Call, value: object) -> None:
        self._calls.pop(call).set_result(value)

    def _refuse(self, call: Call, reason: str) -> None:
        self._calls.pop(call).set_exception(PeerError(reason))

    def _welcome(self, action: actions.AnswerHello) -> None:
        workers, spec = action.workers, self._hands.spec
        welcome = Welcome(
            degrees=workers.degrees,
            micro_batch_size=workers.micro_batch_size,
            snapshot_every=workers.snapshot_every,
            is_async=True,
            has_emergency=spec.config.store.emergency,
            restorable_step=workers.restorable_step,
            is_standby=action.is_standby,
            facts=workers.facts,
            settings=JsonText.of(spec.hook_settings(workers.placement.world_size)),
            run=workers.run,
            offload=workers.offload,
            paces=workers.paces,
            is_at_brink=action.is_at_brink,
            is_from_standby=action.is_from_standby,
            beside=self._beside(workers) if action.is_at_brink else None,
        )
        self._answer(action.call, welcome)

    def _beside(self, workers: commands.Workers) -> Beside:
        """Measure the memory beside the workers of a round."""
        groups = (group for number, group in self.groups.items() if number != workers.round)
        used = sum(private_bytes(pid) for group in groups for pid in group.pids().values())
        count = workers.placement.local_world_size
        return Beside(used // count, available_memory() // count)

    # ------------------------------------------------------------------ actions

    def perform(self, action: Action) -> Iterable[Event]:
        """Perform an action.

        Returns:
            Immediate results; a thread's results reach the agent's loop later.

        Raises:
            ScalaiError, OSError: There is no room, or a file or a process is missing.
        """
        match action:
            case actions.Log(level, text):
                log.log(LEVELS[level], "%s", text)
            case actions.SendReport(report):
                self._hands.tell(report)
            case actions.AnswerCall(call, _, error) if error:
                self._refuse(call, error)
            case actions.AnswerCall(call, value):
                self._answer(call, value)
            case actions.AnswerHello():
                self._welcome(action)
            case actions.LeaveState():
                self._hands.holdings.told_to_exit(action)
            case actions.Rejoin():
                return self._rejoin()
            case _:
                return self._of_the_workers(action)
        return ()

    def _rejoin(self) -> Iterable[Event]:
        try:
            self._hands.rejoin()
        except (ScalaiError, OSError) as error:
            # Without a round to fail, nothing would try again.
            log.exception("event=not_rejoined host=%s", self._hands.host)
            return [
                Failed(
                    actions.Rejoin(),
                    f"event=not_rejoined host={self._hands.host}: {error} The agent ends; the "
                    f"state stays in {self._store.directory}.",
                )
            ]
        return ()

    def _of_the_workers(self, action: Action) -> Iterable[Event]:
        match action:
            case actions.StartGroup():
                return self._start_group(action)
            case actions.BeginGroup(round):
                offer(self.groups[round].pids().values(), is_standby=False)
                here({self._hands.host: os.getpid(), **self.groups[round].pids()})
                reached("relaunch")
            case actions.EndGroup():
                self._end_group(action)
            case actions.PollGroup(round):
                return self._poll(round)
            case actions.WantStop(round, urgency):
                self.groups[round].page.want_stop(urgency)
            case commands.Prepare(round, stop):
                self.groups[round].page.prepare(stop)
                newest = self.groups[round].newest_step()
                return [reports.Prepared(round, stop, newest)]
            case commands.Agree(round, stop, proves):
                over = self._poll(round)
                if over:
                    return over
                self.groups[round].page.agree(stop, proves=proves)
                return [Done(action)]
            case commands.Space(round, begin, every):
                return [Done(action, self.groups[round].space(begin, every))]
            case commands.Withdraw(round):
                self.groups[round].page.withdraw()
            case actions.Kill(round, ranks):
                self._kill(round, ranks)
            case actions.ShowStacks(round):
                self._hands.stacks.ask(self.groups[round].pids())
            case commands.CheckHealth():
                self._check_health(action)
            case commands.Knock(order, peers):
                feed = self._hands.feed
                self._hands.lanes.run(
                    NETWORK,
                    "knocking at other hosts",
                    lambda: unheard(peers),
                    lambda found: feed(reports.Knocked(order, found)),
                )
            case actions.WarmUp():
                return self._warm_up(action)
            case _:
                return self._of_the_store(action)
        return ()

    def _of_the_store(self, action: Action) -> Iterable[Event]:
        store, holdings = self._store, self._hands.holdings
        match action:
            case actions.Reserve():
                self._reserve(action)
            case actions.StopReserving():
                store.stop_reserving()
            case actions.ReuseFiles(slot):
                store.discard(_files(slot))
            case actions.Seal():
                self._seal(action)
            case actions.FetchWanted():
                self._fetch(action)
            case actions.TrustFetched(generation):
                self._hands.lanes.submit(MEMORY, "keeping", lambda: store.prove(generation))
            case commands.Commit():
                return self._commit(action)
            case actions.DiscardSealed(kept):
                for name, sealed in self._sealed().items():
                    if name not in kept:
                        store.discard(sealed)
                store.set_damaged_aside()
            case commands.Drop(generation):
                if generation in store.generations():
                    store.drop(generation)
            case commands.DropSnapshot(snapshot):
                if snapshot in (waiting := self._sealed()):
                    store.discard(waiting[snapshot])
            case commands.Save(generation):
                holdings.save(generation)
            case commands.Archive() | commands.FinishArchive() | commands.Retire():
                holdings.archiver.obey(action)
            case commands.Examine(generation):
                holdings.examine(generation)
            case commands.Doubt(generation):
                holdings.doubt(generation)
            case commands.Look():
                holdings.look()
            case commands.Replicate():
                self._replicate(action)
            case actions.TellHeld(round, held):
                self._hands.tell(reports.Holding(round, held, self._store.most_bytes()))
            case _:
                raise AssertionError(f"nobody carries out {action!r}")
        return ()

    # ------------------------------------------------------------------ workers

    def _start_group(self, action: actions.StartGroup) -> Iterable[Event]:
        workers, hands = action.workers, self._hands
        choice = self._level(action) if action.is_standby else None
        if choice is not None and choice.level is Standby.NOTHING:
            return [Failed(action, choice.reason)]
        try:
            group = hands.groups.start(workers)
        except (ScalaiError, OSError) as error:
            return [Failed(action, str(error))]
        self.groups[workers.round] = group
        if choice is None:
            here({hands.host: os.getpid(), **group.pids()})
            return [Done(action)]
        offer(group.pids().values(), is_standby=True)
        return [Done(action, choice.level)]

    def _warm_up(self, action: actions.WarmUp) -> Iterable[Event]:
        groups, feed = self._hands.groups, self._hands.feed
        groups.warm_up(action.imports, is_last=action.is_last)
        if action.is_last:
            wait = groups.wait_until_warm
            self._hands.lanes.run(MEMORY, "warming up", wait, lambda _: feed(Done(action)))
        return ()

    def _check_health(self, command: commands.CheckHealth) -> None:
        hands = self._hands

        def checked(fault: str | None) -> None:
            is_healthy, reason = fault is None, fault or ""
            hands.feed(reports.HealthChecked(command.order, is_healthy, reason))

        work = partial(hands.health.fault, command.reason)
        hands.lanes.run(HEALTH, "a health check", work, checked)

    def _level(self, action: actions.StartGroup) -> StandbyChoice:
        """Choose how far the next workers go beside the present ones, and say so."""
        present = [pid for group in self.groups.values() for pid in group.pids().values()]
        policy, memory = self._hands.spec.config.resize.standby, self._hands.memory
        is_asked = action.on_devices and action.brink and policy in (AUTO, BRINK)
        submit = partial(self._hands.lanes.submit, MEMORY, "asking for free device memory")
        devices = memory.free(submit) if memory is not None and is_asked else ()
        choice = choose(policy, room_beside(present, action, devices))
        log.info(
            "event=standby host=%s round=%d level=%s reason=%r",
            self._hands.host, action.workers.round, choice.level.value, choice.reason,
        )  # fmt: skip
        return choice

    def _end_group(self, action: actions.EndGroup) -> None:
        """End workers beside the loop: the kernel may take long."""
        round, grace_s = action.round, action.grace_s
        group, is_over, ended = self.groups.pop(round), self._hands.is_over, threading.Event()
        if self._moving is not None and self._moving.round == round:
            self._moving.give_up()
        self._ends.append(ended)
        deadline, is_alone = time.monotonic() + grace_s, not self.groups

        def end() -> Event:
            try:
                while (outcome := group.poll()) is None and time.monotonic() < deadline:
                    if is_over():
                        break
                    time.sleep(0.01)
                group.end(is_over)
                are_killed = outcome is None or bool(outcome.failures)
                if are_killed and is_alone and self._hands.memory is not None:
                    self._hands.memory.wait(is_over)
            except (ScalaiError, OSError):
                log.exception("event=error host=%s workers of round %d", self._hands.host, round)
            finally:
                ended.set()
            return Done(action, group.newest_step())

        self._hands.lanes.run(ENDS, f"ending workers of round {round}", end, self._hands.feed)

    def _poll(self, round: int) -> list[Event]:
        outcome = self.groups[round].poll()
        if outcome is None:
            return []
        failures = outcome.failures
        memory = any(f"exited with {WORKER_OUT_OF_MEMORY}" in failure for failure in failures)
        # A worker killed by a signal may take its peers along.
        is_chance = any("was killed by" in failure for failure in failures)
        if is_chance:
            failures = self._with_the_kernels_word(failures)
        return [GroupOver(round, failures, memory, is_chance)]

    def _with_the_kernels_word(self, failures: tuple[str, ...]) -> tuple[str, ...]:
        """Add the kernel's out-of-memory kills to failures by SIGKILL."""
        before, self._oom_kills = self._oom_kills, oom_kills()
        rise = describe_rise(before, self._oom_kills)
        return tuple(f"{f} ({rise})" if rise and "SIGKILL" in f else f for f in failures)

    def _kill(self, round: int, ranks: frozenset[int]) -> None:
        pids = self.groups[round].pids()
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, KeyError):
                os.kill(pids[str(rank)], signal.SIGKILL)

    def close(self) -> None:
        """End all workers; pending calls get an error."""
        for group in self.groups.values():
            group.end(self._hands.is_over)
        self.groups.clear()
        for ended in self._ends:
            ended.wait(GONE_S)
        for call in list(self._calls):
            self._refuse(call, "the agent ends.")

    # ------------------------------------------------------------------ the store

    def _run(self, lane: str, action: Action, what: str, work: Callable[[], list[Event]]) -> None:
        """Do work in a thread, and feed its results."""

        def safely() -> list[Event]:
            try:
                return work()
            except (ScalaiError, OSError, MemoryError) as error:
                reason = str(error) or "the agent's memory ran out"
                return [Failed(action, f"{what}: {reason}")]

        self._hands.lanes.run(lane, what, safely, self._feed_all)

    def _feed_all(self, found: Iterable[Event]) -> None:
        for event in found:
            self._hands.feed(event)

    def _reserve(self, action: actions.Reserve) -> None:
        def reserve() -> list[Event]:
            return [Done(action, self._store.reserve(action.held))]

        self._run(MEMORY, action, "making room for a snapshot", reserve)

    def _seal(self, action: actions.Seal) -> None:
        slot, about = _files(action.slot), {**action.about, "time": time.time()}
        about[DATASET] = self._hands.spec.dataset(action.about.get("facts", {})).to_json()
        reached("seal")

        def seal() -> list[Event]:
            began = time.monotonic()
            try:
                manifest = self._store.seal(
                    slot, step=action.step, about=about, parts=action.parts,
                    taken_over=action.taken_over,
                )  # fmt: skip
            except (ScalaiError, OSError):
                # The round fails. Discard here: later snapshots need the room.
                self._store.discard(slot)
                raise
            log.info("event=seal step=%d took_s=%.3f", action.step, time.monotonic() - began)
            reached("sealed")
            return [Done(action, summary_bytes(manifest))]

        self._run(MEMORY, action, "sealing the snapshot", seal)

    def _fetch(self, action: actions.FetchWanted) -> None:
        start, round = action.start, action.start.workers.round
        moving = self._moving = Moving(round)
        self._replicas.give_up()
        reached("plan")
        store, token, feed = self._store, self._hands.token, self._hands.feed

        def fetch() -> list[Event]:
            try:
                found = prepare_restore(store, start, action.wants, token, feed, moving.arrived)
            except ProofError as error:
                return [reports.Unproven(round, str(error))]  # the coordinator decides
            finally:
                moving.round = -1  # the next report says more
            return found.to_events(action)

        source = start.sources
        lane = NETWORK if source is None else self._lane_of(source.value.generation)
        self._run(lane, action, "planning and moving", fetch)

    def _lane_of(self, generation: int) -> str:
        """Return the lane of reads from a possible durable directory."""
        return DISK if self._store.is_attached(generation) else NETWORK

    def _replicate(self, command: Replicate) -> None:
        self._replicas.begin(command.order)
        lane = self._lane_of(command.sources.value.generation)
        work = partial(self._replicas.replicated, command)
        self._hands.lanes.run(lane, "fetching replicas", work, self._feed_all)

    def _commit(self, command: commands.Commit) -> Iterable[Event]:
        generation, store = command.generation, self._store
        reached("commit")
        is_there = generation in store.generations()
        if not is_there or snapshot_name(store.manifest(generation)) != command.snapshot:
            sealed = self._sealed()
            if command.snapshot not in sealed:
                found = f"sealed in {store.directory}, but {sorted(sealed)}"
                return [events.NothingToCommit(command, found)]
            try:
                store.commit(sealed[command.snapshot], generation, command.committed)
            except (ScalaiError, OSError) as error:
                return [Failed(command, str(error))]
        reached("committed")
        return [reports.Committed(generation)]

    def _sealed(self) -> dict[str, SnapshotSlot]:
        return {snapshot_name(manifest): sealed for sealed, manifest in self._store.sealed()}


def _files(slot: object) -> SnapshotSlot:
    """Return the store's own slot; the law knows only its writers."""
    assert isinstance(slot, SnapshotSlot)
    return slot
