"""The agent: one a host. It starts and stops workers, owns the host's Tensor Store, and does what
the coordinator says.

One thread decides: commands of the coordinator, messages of workers and results of background work
reach it through one queue. What blocks runs beside it.
"""

import logging
import os
import queue
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from scalai.core.errors import PeerError, ScalaiError, UsageError
from scalai.launch.background import Background
from scalai.launch.coordinator_link import CoordinatorLink
from scalai.launch.crew import Crews
from scalai.launch.data_plane import DataPlaneServer
from scalai.launch.deposits import Deposits
from scalai.launch.durable import adopt, newest_durable
from scalai.launch.generations import deposit_name
from scalai.launch.job import JobSpec
from scalai.launch.places import Place
from scalai.launch.restores import Restores
from scalai.launch.round import Round
from scalai.launch.stops import Stops
from scalai.launch.torch_elastic import WorkerSet
from scalai.launch.worker_calls import WorkerCalls
from scalai.launch.workforce import Workforce
from scalai.runtime.control import MAX_WORKERS
from scalai.runtime.failpoints import here, reached
from scalai.store.host import HostStore
from scalai.store.manifest import manifest_message

Json = Any
TICK_S = 0.1
EXIT_GRACE_S = 10.0
RESUMABLE = 75

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
        directory = self._store.directory / "agent"
        directory.mkdir(mode=0o700, exist_ok=True)
        self._data = DataPlaneServer(self._store, place.token, interface)
        self._coordinator = CoordinatorLink(place, host, self._events.put, self._coordinator_gone)
        self._tell = self._coordinator.tell
        resize = spec.config.resize
        self._crews = Crews(spec, directory, make_workers)
        self._workforce = Workforce(resize.build_ahead, self._crews, self._tell)
        self._background = Background(self._workforce, self._events.put)
        self._restores = Restores(self._store, place.token, self._tell, self._background)
        self._deposits = Deposits(self._store, self._tell, self._background)
        self._stops = Stops(self._workforce, self._deposits, self._tell, resize.drain_timeout_s)
        self._worker_calls = WorkerCalls(
            directory,
            self._workforce,
            self._events.put,
            {
                "hello": self._hello,
                "publish": self._publish,
                "await_slot": self._deposits.await_slot,
                "begin_deposit": self._deposits.begin,
                "deposited": self._deposits.deposited,
                "restored": self._restores.restored,
                "stepped": self._stepped,
                "finished": self._finished,
            },
            self._stops.worker_gone,
        )
        if place.is_new:
            self._resume()
        self._join()

    def _resume(self) -> None:
        """Begin a job: from this host's own store, else from the durable directory, else anew."""
        folder = self._spec.durable_dir
        if folder is None or self._store.generations():
            return
        generation = newest_durable(folder / self._spec.job)
        if generation is not None:
            adopt(self._store, generation)

    def _join(self) -> None:
        parts = [manifest_message(self._store.manifest(n)) for n in self._store.generations()]
        sealed = [manifest_message(manifest) for _, manifest in self._store.sealed()]
        self._coordinator.join(
            slots=self._slots,
            address=list(self._data.address),
            parts=parts,
            sealed=sealed,
            spec=self._spec.to_json(),
        )
        self._coordinator.follow(self._workforce, self._obey, self._is_over)

    # ------------------------------------------------------------------ the loop

    def run(self) -> int:
        """Work until the coordinator says to exit. Returns the exit code."""
        try:
            while self._exit is None:
                try:
                    self._events.get(timeout=TICK_S)()
                except queue.Empty:
                    self._tick()
        finally:
            self._workforce.close()
            self._data.close()
            self._worker_calls.close()
            if self._exit in (0, RESUMABLE) or not self._store.generations():
                # The job goes on elsewhere, is done, or lies in the durable directory.
                self._store.remove()
            else:
                self._store.close()
        return self._exit

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
                self._tell("slots", slots=slots)

        self._events.put(tell)

    def _tick(self) -> None:
        timeout = self._spec.config.resize.drain_timeout_s
        if self._leaving_at is not None and time.monotonic() - self._leaving_at > timeout:
            log.error("event=drain_timeout after_s=%.0f: leaving without a goodbye", timeout)
            self._end(1)
        self._stops.watch()
        self._workforce.watch()

    def _is_over(self) -> bool:
        return self._exit is not None

    def _end(self, code: int) -> None:
        self._exit = code

    def _leave(self) -> None:
        if self._leaving_at is None:
            self._leaving_at = time.monotonic()
            self._tell("leaving")

    def _coordinator_gone(self, error: PeerError) -> None:
        log.error(
            "event=coordinator_lost %s Workers stop; the state stays in %s: start the job again.",
            error, self._store.directory,
        )  # fmt: skip
        self._end(1)

    # ------------------------------------------------------------------ what the coordinator says

    def _obey(self, command: Mapping[str, Json]) -> None:
        arguments = {key: value for key, value in command.items() if key != "command"}
        obey: Mapping[str, Callable[..., None]] = {
            "build": lambda **place: self._workforce.build(command),
            "give_up": self._workforce.give_up,
            "start": lambda **place: self._start(command),
            "expect": self._expect,
            "proceed": self._proceed,
            "prepare": self._stops.prepare,
            "agree": self._stops.agree,
            "hurry": self._stops.hurry,
            "discard": self._discard,
            "withdraw": self._stops.withdraw,
            "commit": self._commit,
            "stop": self._stop,
            "drop": self._drop,
            "save": self._save,
            "exit": self._on_exit,
        }
        obey[command["command"]](**arguments)

    def _start(self, command: Mapping[str, Json]) -> None:
        self._workforce.start(command)
        current, crew = self._workforce.round, self._workforce.crew
        if current is None or crew is None:
            return  # the round has failed
        here({self._host: os.getpid(), **crew.pids()})
        if command["is_built"]:
            reached("relaunch")
        if current.is_complete(current.published):
            self._begin_restore(current)
        if not self._spec.is_elastic:
            self._tell("stepped", round=current.number)

    def _expect(self, tensors: int) -> None:
        if self._workforce.round is not None:
            self._workforce.round.tensors = tensors
            self._deposits.give_orders(self._workforce.round)

    def _proceed(self) -> None:
        if self._workforce.round is not None:
            self._restores.proceed(self._workforce.round)

    def _commit(self, generation: int, deposit: str) -> None:
        reached("commit")
        for sealed, manifest in self._store.sealed():
            if deposit_name(manifest) == deposit:
                self._store.commit(sealed, generation)
        reached("committed")
        self._tell("committed", generation=generation)
        self._deposits.reserve(self._workforce.round)

    def _discard(self) -> None:
        """Give up what was sealed and not committed: the job goes on without it."""
        for sealed, _ in self._store.sealed():
            self._store.discard(sealed)

    def _stop(self, round: int, has_deposited: bool) -> None:
        """End the workers: after a drain they leave by themselves, and may say goodbye to their log
        writers."""
        ended, newest = self._workforce.round, 0
        if ended is not None and ended.number == round:
            newest = self._workforce.end(EXIT_GRACE_S if has_deposited else 0.0, self._is_over)
            self._deposits.give_back(ended)
        self._tell("stopped", round=round, newest=newest)

    def _drop(self, generation: int) -> None:
        if generation in self._store.generations():
            self._store.drop(generation)
        self._deposits.reserve(self._workforce.round)

    def _save(self, generation: int) -> None:
        folder = self._spec.durable_dir
        assert folder is not None

        def save() -> str | None:
            try:
                self._store.copy_to(generation, folder / self._spec.job)
            except (ScalaiError, OSError) as error:
                return str(error)
            return None

        def saved(error: str | None) -> None:
            if error is None:
                self._tell("saved")
            else:
                self._tell("unsaved", reason=error)

        self._background.run(save, saved, "saving to the durable directory", saved)

    def _on_exit(self, code: int, reason: str) -> None:
        log.info("event=exit host=%s code=%d reason=%r", self._host, code, reason)
        self._end(code)

    # ------------------------------------------------------------------ what workers say

    def _hello(self, current: Round, answer: "Future[Json]", rank: int, round: int) -> None:
        command = current.command
        answer.set_result(
            {
                "degrees": command["degrees"],
                "micro_batch_size": command["micro_batch_size"],
                "snapshot_every": self._spec.config.store.snapshot_every,
                "restorable_step": command["restorable_step"],
                "is_ahead": current is not self._workforce.round,
                "facts": command["facts"],
                "settings": self._spec.hook_settings(command["world_size"]),
            }
        )

    def _publish(self, current: Round, answer: "Future[Json]", **told: Json) -> None:
        if self._restores.publish(current, answer, **told):
            if current is self._workforce.round:
                self._begin_restore(current)
            else:
                self._tell("built", round=current.number)

    def _begin_restore(self, current: Round) -> None:
        if not self._restores.begin(current):
            self._deposits.reserve(current)

    def _stepped(
        self, current: Round, answer: "Future[Json]", rank: int, step: int, imports: Json
    ) -> None:
        answer.set_result(None)
        current.stepped.add(rank)
        if imports is not None:
            self._crews.warm_up(imports, self._background.submit)
        if current.is_complete(current.stepped):
            self._tell("stepped", round=current.number)
            self._deposits.reserve(current)

    @staticmethod
    def _finished(current: Round, answer: "Future[Json]", rank: int, step: int) -> None:
        answer.set_result(None)
        current.finished.add(rank)
