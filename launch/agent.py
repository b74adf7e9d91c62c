"""The agent: one a host. It starts and stops workers, owns the host's Tensor Store, and does what
the coordinator says.

One thread decides: commands of the coordinator, messages of workers and results of background work
reach it through one queue. What blocks runs beside it.
"""

import logging
import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scalai.core import commands, events, reports
from scalai.core.commands import Command
from scalai.core.errors import PeerError, ScalaiError, UsageError
from scalai.core.messages import JsonText
from scalai.core.worker_messages import (
    AwaitSlot,
    BeginDeposit,
    Hello,
    Publish,
    RankDeposited,
    RankFinished,
    RankRefused,
    RankRestored,
    RankStepped,
    RankUnhooked,
    Stand,
    Welcome,
    WorkerRequest,
)
from scalai.launch.background import Background
from scalai.launch.commits import Commits
from scalai.launch.coordinator_calls import Join, StoreIdentity
from scalai.launch.coordinator_link import CoordinatorLink
from scalai.launch.crew import Crews
from scalai.launch.data_plane import DataPlaneServer
from scalai.launch.deposits import Deposits
from scalai.launch.holdings import Holdings
from scalai.launch.job import JobSpec
from scalai.launch.places import Place
from scalai.launch.progress import ProgressWatch
from scalai.launch.restores import Restores
from scalai.launch.round import Round
from scalai.launch.stacks import Stacks
from scalai.launch.stops import Stops
from scalai.launch.torch_elastic import WorkerSet
from scalai.launch.worker_calls import WorkerCalls
from scalai.launch.workforce import Workforce
from scalai.runtime.control import MAX_WORKERS
from scalai.runtime.failpoints import here, reached
from scalai.store.host import HostStore
from scalai.store.secure import Folder

TICK_S = 0.1
EXIT_GRACE_S = 10.0
OF_THE_PRESENT_ROUND = (
    commands.Expect,
    commands.Proceed,
    commands.Prepare,
    commands.Agree,
    commands.Deposit,
    commands.Withdraw,
)
"""Commands to the workers of a round: where other ones are there, they come too late."""
UNHOOKED = (
    "THE SCRIPT TRAINS, BUT NOTHING CONNECTS IT TO THIS JOB: its state is not kept, and no change "
    "of resources can be made without losing it. Scripts of Megatron-LM, DeepSpeed, Trainer and "
    "Accelerate (these two with DeepSpeed) are connected by hooks; a loop of one's own is by "
    "scalai.elastic() and attach() (docs of scalai.runtime.session). Without --elastic the script "
    "runs as under torchrun."
)

log = logging.getLogger(__name__)


class Agent:
    """One host's part in a job.

    Args:
        spec: The job, as this host's command line states it.
        host: Name of this host in the job.
        slots: Workers that this host can run.
        place: Where the coordinator is.
        interface: Address that other hosts reach this one by.
        make_workers: Returns an empty set of workers.
    """

    def __init__(
        self,
        spec: JobSpec,
        host: str,
        slots: int,
        place: Place,
        interface: str,
        make_workers: Callable[[], WorkerSet],
    ) -> None:
        if slots > MAX_WORKERS:
            raise UsageError(f"{slots} workers on one host; at most {MAX_WORKERS} are supported.")
        self._spec, self._host, self._slots = spec, host, slots
        self._exit: int | None = None
        self._leaving_at: float | None = None
        self._events: queue.Queue[Callable[[], None]] = queue.Queue()
        self._store = HostStore(spec.job, host, spec.store_dir, spec.store_budget_bytes)
        with Folder.open(self._store.directory / "agent", make=True) as folder:
            directory = folder.path
        self._data = DataPlaneServer(self._store, place.token, interface)
        self._coordinator = CoordinatorLink(
            place,
            spec.job,
            host,
            spec.config.resize.coordinator_timeout_s,
            self._events.put,
            self._coordinator_gone,
            self._expelled,
        )
        self._tell = self._coordinator.tell
        resize = spec.config.resize
        self._crews = Crews(spec, directory, make_workers)
        self._workforce = Workforce(host, resize.build_ahead, self._crews, self._tell)
        self._background = Background(self._workforce, self._events.put)
        self._restores = Restores(self._store, place.token, self._tell, self._background)
        self._deposits = Deposits(self._store, self._tell, self._background)
        self._commits = Commits(self._store, self._tell, self._workforce.fail)
        self._stops = Stops(
            host, self._workforce, self._deposits, self._tell, resize.drain_timeout_s
        )
        self._stacks = Stacks(directory)
        self._progress = ProgressWatch(host, self._workforce, self._stacks, resize.stall_s)
        self._worker_calls = WorkerCalls(
            directory,
            self._workforce,
            self._events.put,
            self._carry_out,
            self._stops.worker_gone,
        )
        self._holdings = Holdings(
            spec, self._store, self._tell, self._background, self._events.put
        )
        self._join()

    def _join(self) -> None:
        try:
            answer = self._coordinator.join(self._brings())
        except PeerError:
            for served in (self._worker_calls, self._data, self._store):
                served.close()
            raise
        self._holdings.begin(answer)
        self._follow()

    def _follow(self) -> None:
        self._coordinator.follow(self._workforce, self._obey, lambda: self._progress.stalled)

    def _brings(self) -> Callable[[str], Join]:
        """Return what this host joins with, as an incarnation: its devices, what its store holds,
        and its command line."""
        found, spec = self._holdings.found(), JsonText.of(self._spec.to_json())
        return lambda incarnation: Join(
            job=self._spec.job,
            host=self._host,
            incarnation=incarnation,
            store=_identity(self._store.directory),
            slots=self._slots,
            address=self._data.address,
            parts=found.parts,
            sealed=found.sealed,
            damaged=found.damaged,
            spec=spec,
        )

    def _expelled(self, error: PeerError) -> None:
        """The job goes on without this host, which was paused or cut off: it joins again."""
        log.warning(
            "event=expelled host=%s %s Its workers end, and it joins again with what its store "
            "holds.", self._host, error,
        )  # fmt: skip
        ended = self._workforce.round
        try:
            self._commits.forget()
            self._workforce.give_up()
            if ended is not None:
                ended.is_expelled = True
                self._workforce.end(0.0, self._is_over)
                self._deposits.give_back(ended)
            self._coordinator.rejoin(self._brings(), self._rejoined)
        except (ScalaiError, OSError):
            # Without a round there is none to fail, and nobody would try again.
            log.exception(
                "event=not_rejoined host=%s: the agent ends; the state stays in %s.",
                self._host, self._store.directory,
            )  # fmt: skip
            self._end(1)

    def _rejoined(self) -> None:
        log.info("event=rejoined host=%s", self._host)
        self._follow()
        self._tell(reports.Slots(self._slots))
        if self._leaving_at is not None:
            self._tell(reports.Leaving())

    # ------------------------------------------------------------------ the loop

    def run(self) -> int:
        """Work until the coordinator says to exit. Returns the exit code."""
        with ExitStack() as closing:  # the last one first, whatever goes wrong in another
            closing.callback(self._holdings.close)
            closing.callback(self._worker_calls.close)
            closing.callback(self._data.close)
            closing.callback(self._coordinator.close)
            closing.callback(self._workforce.close)
            try:
                self._loop()
            except Exception:  # our own slip: its workers must not outlive the loop unseen
                self._exit = 1
                log.exception(
                    "event=crashed host=%s: the agent itself has failed. Its workers end; the "
                    "state stays in %s.", self._host, self._store.directory,
                )  # fmt: skip
        assert self._exit is not None
        return self._exit

    def _loop(self) -> None:
        tick_at = time.monotonic()
        while self._exit is None:
            try:
                self._do(self._events.get(timeout=max(0.0, tick_at - time.monotonic())))
            except queue.Empty:
                pass
            # By the clock, however many events there are.
            if time.monotonic() >= tick_at and self._exit is None:
                self._do(self._tick)
                tick_at = time.monotonic() + TICK_S

    def _do(self, due: Callable[[], None]) -> None:
        """What fails for want of room, of a file or of a process fails the round, not the agent."""
        try:
            due()
        except (ScalaiError, OSError) as error:
            log.exception("event=error host=%s", self._host)
            self._workforce.fail(str(error))

    def leave(self) -> None:
        """A first SIGTERM or SIGINT: drain. Callable from any thread."""
        self._events.put(self._leave)

    def stop_now(self, code: int) -> None:
        """A second signal: end at once; the state stays in the store for a restarted agent."""
        self._exit = code  # now, because the loop may be waiting for workers to leave
        self._events.put(lambda: None)

    def set_slots(self, slots: int) -> None:
        """The device probe reports another number."""

        def tell() -> None:
            if slots != self._slots:
                self._slots = slots
                self._tell(reports.Slots(slots))

        self._events.put(tell)

    def _tick(self) -> None:
        timeout = self._spec.config.resize.drain_timeout_s
        if self._leaving_at is not None and self._stops.saves:
            self._leaving_at = time.monotonic()  # the time of a save that it waits for is its own
        if self._leaving_at is not None and time.monotonic() - self._leaving_at > timeout:
            log.error("event=drain_timeout after_s=%.0f: leaving without a goodbye", timeout)
            self._end(1)
        self._commits.retry()
        self._deposits.retry(self._workforce.round)
        self._restores.watch(self._workforce.round)
        self._stops.watch()
        self._workforce.watch()
        self._progress.watch()
        self._stacks.watch()

    def _is_over(self) -> bool:
        return self._exit is not None

    def _end(self, code: int) -> None:
        self._exit = code

    def _leave(self) -> None:
        if self._leaving_at is None:
            self._leaving_at = time.monotonic()
            self._tell(reports.Leaving())
            silence_s = self._coordinator.silence_s
            if silence_s is not None:
                log.warning(
                    "event=leaving host=%s: the coordinator has been silent for %.0f s, so nobody "
                    "can stop the job at one step. After %.0f s (drain_timeout_s), or at a second "
                    "signal, this host leaves all the same; its newest generation stays in %s.",
                    self._host, silence_s, self._spec.config.resize.drain_timeout_s,
                    self._store.directory,
                )  # fmt: skip

    def _coordinator_gone(self, error: PeerError) -> None:
        log.error(
            "event=coordinator_lost %s Workers stop; what was committed stays in %s (%s): start "
            "the job again. If it has ended meanwhile, this host has not heard how: look for "
            "event=exit in the log of the coordinator or of another host.",
            error, self._store.directory, self._holdings.newest(),
        )  # fmt: skip
        self._end(1)

    # ------------------------------------------------------------------ what the coordinator says

    def _obey(self, command: Command) -> None:
        if not self._is_due(command):
            log.debug("event=late_command %r", command)
            return
        match command:
            case commands.Build():
                self._workforce.build(command)
            case commands.GiveUp(round):
                self._workforce.give_up(round)
            case commands.Start():
                self._start(command)
            case commands.Expect(_, tensors):
                self._expect(tensors)
            case commands.Proceed():
                self._proceed()
            case commands.Prepare(_, stop):
                self._stops.prepare(stop)
            case commands.Agree(_, stop):
                self._stops.agree(stop)
            case commands.Deposit():
                self._stops.deposit()
            case commands.Withdraw():
                self._stops.withdraw()
            case commands.Report():
                self._report()
            case commands.Discard():
                self._commits.discard()
            case commands.Commit():
                self._commits.commit(command)
                self._deposits.reserve(self._workforce.round)
            case commands.Stop(round, has_deposited):
                self._stop(round, has_deposited)
            case commands.Drop(generation):
                self._drop(generation)
            case commands.Save(generation):
                self._holdings.save(generation)
            case commands.Doubt(generation):
                self._holdings.doubt(generation)
            case commands.Look():
                self._holdings.look()
            case commands.Exit():
                self._on_exit(command)

    def _is_due(self, command: Command) -> bool:
        """Whether a command about the workers is about those that are there."""
        if not isinstance(command, OF_THE_PRESENT_ROUND):
            return True
        current = self._workforce.round
        return current is not None and current.number == command.round

    def _start(self, command: commands.Start) -> None:
        self._workforce.start(command)
        current, crew = self._workforce.round, self._workforce.crew
        if current is None or crew is None:
            return  # the round has failed
        here({self._host: os.getpid(), **crew.pids()})
        if command.is_built:
            reached("relaunch")
        if current.is_complete(current.published):
            self._begin_restore(current)
        if not self._spec.is_elastic:
            self._tell(events.Stepped(self._host, current.number))

    def _expect(self, tensors: int) -> None:
        if self._workforce.round is not None:
            self._workforce.round.tensors = tensors
            self._deposits.give_orders(self._workforce.round)

    def _proceed(self) -> None:
        if self._workforce.round is not None:
            self._restores.proceed(self._workforce.round)

    def _report(self) -> None:
        """The job waits for workers of this host: say where they stand."""
        if self._workforce.crew is not None:
            self._stacks.ask(self._workforce.crew.pids())

    def _stop(self, round: int, has_deposited: bool) -> None:
        """End the workers: after a drain they leave by themselves, and may say goodbye to their log
        writers."""
        ended, newest = self._workforce.round, 0
        if ended is not None and ended.number == round:
            newest = self._workforce.end(EXIT_GRACE_S if has_deposited else 0.0, self._is_over)
            self._deposits.give_back(ended)
        self._tell(events.Stopped(self._host, round, newest))

    def _drop(self, generation: int) -> None:
        if generation in self._store.generations():
            self._store.drop(generation)
        self._deposits.reserve(self._workforce.round)

    def _on_exit(self, command: commands.Exit) -> None:
        code, reason = command.code, command.reason
        log.info("event=exit host=%s code=%d reason=%r", self._host, code, reason)
        self._holdings.told_to_exit(command.ending, command.keeps_state)
        self._end(code)

    # ------------------------------------------------------------------ what workers say

    def _carry_out(self, current: Round, answer: "Future[Any]", request: WorkerRequest) -> None:
        match request:
            case Hello():
                answer.set_result(self._welcome(current))
            case Publish():
                self._publish(current, answer, request)
            case AwaitSlot():
                self._deposits.await_slot(current, answer, request)
            case BeginDeposit():
                self._deposits.begin(current, answer, request)
            case Stand():
                self._stops.stand(current, answer, request)
            case RankDeposited():
                self._deposits.deposited(current, answer, request)
            case RankRestored():
                self._restores.restored(current, answer, request)
            case RankStepped():
                answer.set_result(None)
                self._stepped(current, request)
            case RankFinished(rank, _, step):
                answer.set_result(None)
                current.finished.add(rank)
                self._holdings.last_step = max(self._holdings.last_step, step)
            case RankRefused(_, _, reason):
                self._workforce.refuse(current, reason)  # it waits for no answer, but to be ended
            case RankUnhooked(rank):
                answer.set_result(None)
                self._unhooked(current, rank)

    def _welcome(self, current: Round) -> Welcome:
        workers = current.workers
        settings = self._spec.hook_settings(workers.placement.world_size)
        return Welcome(
            degrees=workers.degrees,
            micro_batch_size=workers.micro_batch_size,
            snapshot_every=self._spec.config.store.snapshot_every,
            restorable_step=workers.restorable_step,
            is_ahead=current is not self._workforce.round,
            facts=workers.facts,
            settings=JsonText.of(settings),
        )

    def _unhooked(self, current: Round, rank: int) -> None:
        if not current.is_unhooked:
            current.is_unhooked = True
            log.error("event=unhooked rank=%d %s", rank, UNHOOKED)
            self._tell(events.Unhooked(self._host, current.number))

    def _publish(self, current: Round, answer: "Future[Any]", told: Publish) -> None:
        if current.is_unhooked:  # its first steps were on the way to this
            current.is_unhooked = False
            log.info("event=hooked host=%s the script has connected itself", self._host)
            self._tell(events.Hooked(self._host, current.number))
        if self._restores.publish(current, answer, told):
            if current is self._workforce.round:
                self._begin_restore(current)
            else:
                self._tell(events.Built(self._host, current.number))

    def _begin_restore(self, current: Round) -> None:
        if not self._restores.begin(current):
            self._deposits.reserve(current)

    def _stepped(self, current: Round, told: RankStepped) -> None:
        current.stepped.add(told.rank)
        if told.imports is not None:
            self._crews.warm_up(told.imports, self._background.submit)
        if current.is_complete(current.stepped):
            self._tell(events.Stepped(self._host, current.number))
            self._deposits.reserve(current)


def _identity(directory: Path) -> StoreIdentity:
    """Return what tells a store's directory from any other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    found = directory.stat()
    return StoreIdentity(boot, found.st_dev, found.st_ino)
