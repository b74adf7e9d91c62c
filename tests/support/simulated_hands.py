"""The hands of a simulated host: what the law of the host has done, and what its workers ask."""

from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from scalai.core.host import actions, events
from scalai.core.host.actions import Action
from scalai.core.host.events import Event
from scalai.core.host.state import Round
from scalai.core.job.spacing import Schedule
from scalai.core.messages import commands, reports
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import (
    AwaitFreeze,
    BeginSnapshot,
    Hello,
    Publish,
    RankFinished,
    RankFrozen,
    RankRestored,
    RankStepped,
    RankWritten,
    Source,
    Stand,
)
from scalai.store.parts import summary_bytes
from support.simulated_workers import Clock, EverySlot, Group, Worker, print_of
from support.wire import travelled

if TYPE_CHECKING:
    from support.simulated_host import SimulatedHost


class SimulatedHands:
    """Does on simulated workers and files what the law of a host decides."""

    def __init__(self, host: "SimulatedHost") -> None:
        self._host = host
        self._groups: dict[int, Group] = {}
        self.waits: dict[int, Worker] = {}
        self.threads: dict[int, Worker] = {}
        """Calls of the threads of workers that wait for a failure."""
        self.copies: dict[int, Worker] = {}
        """Calls of threads that write a snapshot beside the training."""
        self.calls = 0

    @property
    def groups(self) -> Any:
        return self._groups

    def generations(self) -> frozenset[int]:
        return frozenset(self._host.store)

    def seen(self, current: Round | None) -> events.GroupSeen | None:
        group = None if current is None else self._groups.get(current.number)
        if group is None:
            return None
        workers = group.workers.values()
        agreed = group.agreed
        return events.GroupSeen(
            newest=max((worker.step for worker in workers), default=0),
            save=self._host.world.save_of(current.number) if current is not None else None,
            looks=int(Clock.now),
            reached=frozenset(w.rank for w in workers if agreed is not None and w.step >= agreed),
            ended={w.rank: w.exit for w in workers if w.exit is not None},
        )

    def arrivals(self) -> Iterable[Event]:
        return ()

    def take_call(self, answer: "Future[Any]") -> int:
        raise AssertionError("workers call the law")

    def perform(self, action: Action) -> Iterable[Event]:
        host = self._host
        match action:
            case actions.Log():
                host.log.append(action.text)
            case actions.Tell(report):
                host.unsent.append(report)
            case actions.AnswerCall(call, _, error) if error:
                self.waits.pop(call, None)
                self.threads.pop(call, None)
                self._copy_answered(self.copies.pop(call, None), None)
            case actions.AnswerCall(call, value):
                self._answered(call, value)
            case actions.AnswerHello(call):
                self._answered(call, "welcome")
            case actions.StartGroup():
                return self._start(action)
            case actions.EndGroup():
                ended = self._end(action)  # its memory may be in use for long
                host.work.append(lambda: ended)
            case actions.PollGroup(number):
                return self._poll(number)
            case commands.Prepare(number, stop):
                group = self._groups[number]
                group.proposed = stop
                newest = max(worker.step for worker in group.workers.values())
                return [reports.Prepared(number, stop, newest)]
            case commands.Agree(number, stop, proves):
                over = self._poll(number)
                if over:
                    return over
                self._groups[number].agreed = stop
                for worker in self._groups[number].workers.values():
                    worker.proves = proves
                return [events.Done(action)]
            case commands.Space(number, begin, every):
                group = self._groups[number]
                group.spaced = Schedule(every, begin)
                newest = max(worker.step for worker in group.workers.values())
                return [events.Done(action, newest)]
            case commands.Withdraw(number):
                self._groups[number].proposed = self._groups[number].agreed = None
            case actions.Kill(number, ranks):
                for rank in ranks:
                    self._groups[number].workers[rank].exit = -9
            case actions.Rejoin():
                host.wants_to_join = True
            case _:
                return self._of_the_store(action)
        return ()

    def _of_the_store(self, action: Action) -> Iterable[Event]:
        host = self._host
        match action:
            case actions.Reserve(_, held):
                slot = EverySlot(dict(held))
                is_full = host.is_full
                host.work.append(
                    lambda: events.Failed(action, "full") if is_full
                    else events.Done(action, slot)
                )  # fmt: skip
            case actions.Seal():
                host.work.append(lambda: host.seal(action))
            case actions.FetchWanted():
                host.work.append(lambda: host.fetch(action))
            case commands.Commit():
                return host.commit(action)
            case actions.DiscardSealed(kept):
                host.sealed = {n: m for n, m in host.sealed.items() if n in kept}
            case commands.DropSnapshot(name):
                host.sealed.pop(name, None)
            case commands.Drop(generation):
                host.store.pop(generation, None)
            case commands.Examine(generation):
                host.work.append(lambda: host.examine(generation))
            case commands.Doubt(generation):
                left = host.store.get(generation)
                found = None if left is None else summary_bytes(left)
                host.unsent.append(reports.Doubted(generation, found))
            case commands.Replicate():
                host.work.append(lambda: host.replicate(action))
            case commands.Retire(before):
                host.work.append(lambda: host.world.disk.retire(before))
            case commands.Archive() | commands.FinishArchive():
                host.work.append(lambda: host.world.disk.obey(host, action))
            case commands.CheckHealth(asked):
                host.work.append(
                    lambda: reports.HealthChecked(asked, not host.is_sick, "no device")
                )
            case commands.Knock(asked, peers):
                names = [name for name, _ in peers]
                host.work.append(
                    lambda: reports.Knocked(asked, host.world.unheard(host.name, names))
                )
            case commands.Look():
                host.unsent.append(reports.Attached(host.found(), ()))
        return ()

    # ------------------------------------------------------------------ workers

    def _start(self, action: actions.StartGroup) -> Iterable[Event]:
        workers = action.workers
        if self._host.cannot_start:
            return [events.Failed(action, "no process")]
        ranks = workers.placement.ranks
        schedule = Schedule(workers.snapshot_every)
        made = {rank: Worker(rank, schedule=schedule) for rank in ranks}
        self._groups[workers.round] = Group(made, workers.placement.world_size)
        return [events.Done(action)]

    def _end(self, action: actions.EndGroup) -> Event:
        group = self._groups.pop(action.round)
        self._host.is_spoilt &= not self._host.has_spoilt
        self._host.has_spoilt = False
        newest = max((worker.step for worker in group.workers.values()), default=0)
        return events.Done(action, newest)

    def _poll(self, number: int) -> list[Event]:
        workers = self._groups[number].workers.values()
        failed = tuple(f"rank {w.rank} exited with {w.exit}" for w in workers if w.exit)
        if failed:
            is_chance = any((worker.exit or 0) < 0 for worker in workers)
            return [events.GroupOver(number, failed, False, is_chance)]
        if all(worker.exit == 0 for worker in workers):
            return [events.GroupOver(number)]
        return []

    def _thread_answered(self, worker: Worker, value: object) -> None:
        worker.thread_call = None
        match worker.thread:
            case "watch":
                worker.thread = "frozen"
                if worker.copy == "begin":  # it is given up; what is copied may still be told
                    worker.copy = ""
            case "frozen" | "rescue":
                worker.thread = "rescue" if value is not None else "end"

    def ask_thread(self, number: int, worker: Worker) -> None:
        """Let the thread of a worker do what it does next."""
        rank, none = worker.rank, JsonText.of({})
        request: Any
        if worker.thread == "watch":
            request = AwaitFreeze(rank, number)
        elif worker.thread == "frozen":
            step = None if worker.is_torn else worker.step
            request = RankFrozen(rank, number, step, "torn")
        else:
            held = self._host.held_by(worker, number)
            made = tuple(print_of(tensor, worker.step) for tensor in held.tensors)
            request = RankWritten(
                rank, number, worker.step, made, f"r{rank}", none, none, 1, self._host.seconds
            )
        self.calls += 1
        worker.thread_call = self.calls
        self.threads[self.calls] = worker
        self._host.agent.feed(events.Called(self.calls, travelled(request)))

    def ask_copy(self, number: int, worker: Worker) -> None:
        """Let the thread of a worker go on that writes a snapshot beside the training."""
        rank, step, none = worker.rank, worker.snapped, JsonText.of({})
        request: Any = BeginSnapshot(rank, number, "snapshot", step)
        if worker.copy == "write":
            held = self._host.held_by(worker, number)
            made = tuple(print_of(tensor, step) for tensor in held.tensors)
            request = RankWritten(
                rank, number, step, made, f"r{rank}", none, none, 1, self._host.seconds
            )
        self.calls += 1
        worker.copy_call = self.calls
        self.copies[self.calls] = worker
        self._host.agent.feed(events.Called(self.calls, travelled(request)))

    def _copy_answered(self, worker: Worker | None, value: object) -> None:
        if worker is not None:
            worker.copy_call = None
            worker.copy = "write" if worker.copy == "begin" and value is not None else ""

    def _answered(self, call: int, value: object) -> None:
        if call in self.copies:
            self._copy_answered(self.copies.pop(call), value)
            return
        if call in self.threads:
            self._thread_answered(self.threads.pop(call), value)
            return
        worker = self.waits.pop(call, None)
        if worker is None or worker.exit is not None:
            return
        worker.call = None
        match worker.doing:
            case "hello":
                worker.doing = "publish"
            case "publish" if isinstance(value, Source):
                worker.source, worker.doing = value.step, "restored"
                worker.step = value.step
            case "publish":
                worker.doing = "start"
            case "start" | "stop" | "snapshot":
                worker.doing = f"write {worker.doing}" if value is not None else "train"
            case "write start" | "write stop" | "write snapshot":
                if value is not None:
                    return  # once more, for another rank
                if worker.doing == "write stop" and worker.proves:
                    worker.doing = "proof"
                    return
                if worker.doing == "write stop":
                    worker.exit = 0
                worker.doing = "train" if worker.source is not None else "stepped"
                worker.source = worker.source if worker.source is not None else 0
            case "restored":
                worker.doing = "stepped"
            case "stepped":
                worker.doing, worker.thread = "train", "watch"
                worker.step += 1
            case "stand":
                worker.doing = "train"
            case "proof" | "finish":
                worker.exit = 0

    def ask(self, number: int, worker: Worker) -> None:
        """Let a worker do what it does next."""
        world_size = self._groups[number].world_size
        is_broken = worker.doing == "publish" and world_size in self._host.world.cannot_run
        if is_broken or (worker.doing == "restored" and self._host.cannot_read(worker, number)):
            worker.exit = 1
            return
        request = self._request(number, worker)
        self.calls += 1
        worker.call = self.calls
        self.waits[self.calls] = worker
        self._host.agent.feed(events.Called(self.calls, travelled(request)))

    def _request(self, number: int, worker: Worker) -> Any:
        rank, none = worker.rank, JsonText.of({})
        numbers = self._host.world.numbers(self._groups[number].world_size)
        if worker.doing == "proof":  # of a round beside the present one, perhaps
            return RankStepped(rank, number, worker.step, None, numbers)
        held = self._host.held_by(worker, number)
        match worker.doing.partition(" ")[0]:
            case "hello":
                return Hello(rank, number)
            case "publish":
                return Publish(rank, number, True, held, held, f"r{rank}", none, False)
            case "restored":
                self._host.has_spoilt = self._host.is_spoilt
                step = (worker.source or 0) + self._host.is_spoilt
                prints = np.array(
                    [print_of(t, step + self._host.is_read_wrong(t.name)) for t in held.tensors],
                    np.uint64,
                )
                return RankRestored(rank, number, prints, {}, "restored")
            case "stepped":
                return RankStepped(rank, number, worker.step, None, numbers)
            case "start" | "stop" | "snapshot":
                return BeginSnapshot(rank, number, worker.doing, worker.step)
            case "write":
                made = tuple(print_of(tensor, worker.step) for tensor in held.tensors)
                return RankWritten(
                    rank, number, worker.step, made, f"r{rank}", none, none, 1, self._host.seconds
                )
            case "stand":
                return Stand(rank, number, worker.step, self._host.world.save_of(number) or 0)
            case "finish":
                return RankFinished(rank, number, worker.step)
            case _:
                raise AssertionError(worker.doing)
