"""The agent: one a host. It starts and stops workers, owns the host's Tensor Store, and does what
the coordinator says.

One thread decides: commands of the coordinator, messages of workers and results of background work
reach it through one queue. What blocks (faulting pages in, planning and fetching, sealing) runs
beside it.
"""

import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from scalai.core.errors import PeerError, ScalaiError, UsageError
from scalai.launch.ahead import obstacle, offer
from scalai.launch.crew import Crew, Crews
from scalai.launch.data_plane import DataPlaneServer
from scalai.launch.deposits import Deposits
from scalai.launch.durable import adopt, newest_durable
from scalai.launch.generations import deposit_name
from scalai.launch.job import JobSpec
from scalai.launch.places import Place
from scalai.launch.restores import Restores
from scalai.launch.round import Round
from scalai.launch.torch_elastic import Outcome, WorkerSet
from scalai.runtime.control import MAX_WORKERS, OUT_OF_MEMORY_EXIT
from scalai.runtime.failpoints import here, reached
from scalai.runtime.messages import Channel, Peer, Server
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
        self._events: queue.Queue[Callable[[], None]] = queue.Queue()
        self._background = ThreadPoolExecutor(4, thread_name_prefix="agent")
        self._store = HostStore(spec.job, host, spec.store_dir, spec.store_budget_bytes)
        self._directory = self._store.directory / "agent"
        self._directory.mkdir(mode=0o700, exist_ok=True)
        worker_token = secrets.token_bytes(32)
        _write_secret(self._directory / "token", worker_token)
        socket_path = self._directory / "agent.sock"
        socket_path.unlink(missing_ok=True)
        self._server = Server(str(socket_path), worker_token, self._on_worker, self._on_worker_gone)
        self._data = DataPlaneServer(self._store, place.token, interface)
        self._crews = Crews(spec, self._directory, make_workers)
        self._crew: Crew | None = None
        self._round: Round | None = None
        self._ahead: tuple[Round, Crew] | None = None
        self._exit: int | None = None
        self._restores = Restores(self._store, place.token, self._tell, self._in_background)
        self._deposits = Deposits(self._store, self._tell, self._in_background)
        self._callers: dict[Peer, tuple[Round, int]] = {}
        self._leaving_at: float | None = None
        self._is_told_to_exit = False
        self._calls = Channel(place.address, place.token)
        self._polls = Channel(place.address, place.token)
        if place.is_new:
            self._resume()
        parts = [manifest_message(self._store.manifest(n)) for n in self._store.generations()]
        sealed = [manifest_message(manifest) for _, manifest in self._store.sealed()]
        self._calls.call(
            "join", host=host, slots=slots, address=list(self._data.address), parts=parts,
            sealed=sealed, spec=spec.to_json(),
        )  # fmt: skip
        threading.Thread(target=self._poll, name="poll", daemon=True).start()

    def _resume(self) -> None:
        """Begin a job: from this host's own store, else from the durable directory, else anew."""
        folder = self._spec.durable_dir
        if folder is None or self._store.generations():
            return
        generation = newest_durable(folder / self._spec.job)
        if generation is not None:
            adopt(self._store, generation)

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
            self._give_up()
            if self._crew is not None:
                self._crew.end()
            self._data.close()
            self._server.close()
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
        if self._ahead is not None:
            outcome = self._ahead[1].poll()
            if outcome is not None:
                self._not_built("; ".join(outcome.failures) or "the script has ended")
        current, crew = self._round, self._crew
        if current is None or crew is None:
            return
        if current.give_up_at is not None and time.monotonic() > current.give_up_at:
            self._fail("workers hang on their way to the stop, or in their deposit")
        if not current.is_draining:
            outcome = crew.poll()
            if outcome is not None:
                self._workers_ended(outcome)

    def _end(self, code: int) -> None:
        self._exit = code

    def _leave(self) -> None:
        if self._leaving_at is None:
            self._leaving_at = time.monotonic()
            self._tell("leaving")

    def _poll(self) -> None:
        """Fetch commands and queue them, in a thread of its own."""
        while self._exit is None:
            current, crew = self._round, self._crew
            newest = crew.newest_step() if crew else 0
            round = current.number if current else 0
            try:
                commands = self._polls.call("poll", host=self._host, round=round, newest=newest)
            except PeerError as error:
                if self._exit is None:
                    self._events.put(partial(self._coordinator_gone, error))
                return
            for command in commands:
                self._is_told_to_exit |= command["command"] == "exit"
                self._events.put(partial(self._obey, command))

    def _coordinator_gone(self, error: PeerError) -> None:
        if self._is_told_to_exit:
            return  # it went before this host had done all that it was told
        log.error(
            "event=coordinator_lost %s Workers stop; the state stays in %s: start the job again.",
            error, self._store.directory,
        )  # fmt: skip
        self._end(1)

    def _tell(self, event: str, **facts: Json) -> None:
        try:
            self._calls.call("tell", host=self._host, event=event, **facts)
        except PeerError as error:
            self._coordinator_gone(error)

    def _in_background(
        self,
        work: Callable[[], Any],
        then: Callable[[Any], None],
        what: str,
        too_late: Callable[[Any], None] = lambda result: None,
    ) -> None:
        """Run ``work`` beside the loop and ``then`` in it. An error of ``work`` fails the round;
        ``too_late`` takes the result where the round has ended meanwhile."""
        current = self._round

        def done(result: "Future[Any]") -> None:
            def deliver() -> None:
                error = result.exception()
                if error is None:
                    (then if current is self._round else too_late)(result.result())
                elif isinstance(error, ScalaiError | OSError):
                    if current is self._round:
                        self._fail(f"{what}: {error}")
                else:
                    raise error

            self._events.put(deliver)

        self._background.submit(work).add_done_callback(done)

    def _fail(self, reason: str, *, out_of_memory: bool = False) -> None:
        if self._round is not None and not self._round.has_failed:
            self._round.has_failed = True
            log.error("event=failed round=%d %s", self._round.number, reason)
            self._tell(
                "failed", round=self._round.number, reason=reason, out_of_memory=out_of_memory
            )

    def _workers_ended(self, outcome: Outcome) -> None:
        assert self._round is not None
        if outcome.failures:
            memory = any(f"exited with {OUT_OF_MEMORY_EXIT}" in f for f in outcome.failures)
            self._fail("; ".join(outcome.failures), out_of_memory=memory)
        elif not self._round.has_failed:
            self._tell("finished", round=self._round.number)

    # ------------------------------------------------------------------ what the coordinator says

    def _obey(self, command: Mapping[str, Json]) -> None:
        arguments = {key: value for key, value in command.items() if key != "command"}
        obey: Mapping[str, Callable[..., None]] = {
            "build": lambda **place: self._build(command),
            "give_up": self._give_up,
            "start": lambda **place: self._start(command),
            "expect": self._expect,
            "proceed": self._proceed,
            "prepare": self._prepare,
            "agree": self._agree,
            "hurry": self._hurry,
            "discard": self._discard,
            "withdraw": self._withdraw,
            "commit": self._commit,
            "stop": self._stop,
            "drop": self._drop,
            "save": self._save,
            "exit": self._on_exit,
        }
        obey[command["command"]](**arguments)

    def _build(self, command: Mapping[str, Json]) -> None:
        """Start the next round's workers beside the present ones."""
        self._give_up()
        pids = self._crew.pids().values() if self._crew else ()
        on_devices = self._round is not None and self._round.uses_devices
        policy = self._spec.config.resize.build_ahead
        reason = obstacle(policy, command["local_world_size"], pids, on_devices=on_devices)
        if reason is None:
            crew = self._crews.start(command)
            offer(crew.pids().values(), is_ahead=True)
            self._ahead = Round(command), crew
        else:
            self._tell("not_built", round=command["round"], reason=reason)

    def _not_built(self, reason: str) -> None:
        assert self._ahead is not None
        round = self._ahead[0].number
        self._give_up()
        self._tell("not_built", round=round, reason=reason)

    def _give_up(self, round: int | None = None) -> None:
        """End what was built ahead: any round, or this one."""
        if self._ahead is not None and round in (None, self._ahead[0].number):
            ahead, crew = self._ahead
            self._ahead = None
            crew.end()
            self._dismiss(ahead)

    def _start(self, command: Mapping[str, Json]) -> None:
        """Begin a round, with the workers that were built for it where there are any."""
        if self._ahead is not None and self._ahead[0].number == command["round"]:
            (self._round, self._crew), self._ahead = self._ahead, None
            self._round.command = command
            offer(self._crew.pids().values(), is_ahead=False)
        else:
            self._give_up()
            self._round, self._crew = Round(command), None
            if command["is_built"]:
                self._fail("what was built ahead is gone")
                return
            self._crew = self._crews.start(command)
        here({self._host: os.getpid(), **self._crew.pids()})
        if command["is_built"]:
            reached("relaunch")
        if self._round.is_complete(self._round.published):
            self._begin_restore(self._round)
        if not self._spec.is_elastic:
            self._tell("stepped", round=self._round.number)

    def _expect(self, tensors: int) -> None:
        if self._round is not None:
            self._round.tensors = tensors
            self._deposits.give_orders(self._round)

    def _proceed(self) -> None:
        if self._round is not None:
            self._restores.proceed(self._round)

    def _prepare(self, stop: int) -> None:
        if self._crew is not None:
            self._crew.page.prepare(stop)
            self._tell("prepared", stop=stop, newest=self._crew.newest_step())

    def _withdraw(self) -> None:
        if self._crew is not None:
            self._crew.page.withdraw()

    def _agree(self, stop: int) -> None:
        current, crew = self._round, self._crew
        if current is None or crew is None:
            return
        # From here on only a connection that ends tells of a worker's death: look once more.
        outcome = crew.poll()
        if outcome is not None:
            self._workers_ended(outcome)
        elif current.lost - current.finished:
            self._fail(f"ranks {sorted(current.lost - current.finished)} died before the stop")
        else:
            current.is_draining = True
            crew.page.agree(stop)

    def _hurry(self) -> None:
        """Other hosts have come to the stop: workers that do not come there hang."""
        current = self._round
        if current is not None and current.give_up_at is None and not current.has_sealed:
            current.give_up_at = time.monotonic() + self._spec.config.resize.drain_timeout_s

    def _commit(self, generation: int, deposit: str) -> None:
        reached("commit")
        for sealed, manifest in self._store.sealed():
            if deposit_name(manifest) == deposit:
                self._store.commit(sealed, generation)
        reached("committed")
        self._tell("committed", generation=generation)
        self._deposits.reserve(self._round)

    def _discard(self) -> None:
        """Give up what was sealed and not committed: the job goes on without it."""
        for sealed, _ in self._store.sealed():
            self._store.discard(sealed)

    def _stop(self, round: int, has_deposited: bool) -> None:
        """End the workers: after a drain they leave by themselves, and may say goodbye to their log
        writers."""
        current, crew, newest = self._round, self._crew, 0
        if current is not None and current.number == round:
            deadline = time.monotonic() + (EXIT_GRACE_S if has_deposited else 0.0)
            while crew is not None and self._exit is None and time.monotonic() < deadline:
                if crew.poll() is not None:
                    break
                time.sleep(0.01)
            if crew is not None:
                crew.end()
                newest = crew.newest_step()
            self._forget_round(current)
        self._tell("stopped", round=round, newest=newest)

    def _forget_round(self, current: Round) -> None:
        """The workers are gone: answer whoever still waits for them, give their files back."""
        self._round = self._crew = None
        self._dismiss(current)
        is_sealing = current.deposit is not None and current.deposit.is_sealing
        if current.reserved is not None and not is_sealing:
            self._store.discard(current.reserved)

    def _dismiss(self, ended: Round) -> None:
        ended.dismiss()
        self._callers = {p: call for p, call in self._callers.items() if call[0] is not ended}

    def _drop(self, generation: int) -> None:
        if generation in self._store.generations():
            self._store.drop(generation)
        self._deposits.reserve(self._round)

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

        self._in_background(save, saved, "saving to the durable directory", saved)

    def _on_exit(self, code: int, reason: str) -> None:
        log.info("event=exit host=%s code=%d reason=%r", self._host, code, reason)
        self._end(code)

    # ------------------------------------------------------------------ what workers say

    def _on_worker(self, peer: Peer, method: str, arguments: Mapping[str, Json]) -> Json:
        """Hand a worker's call to the loop and wait for the answer, in the connection's thread."""
        deposits, restores = self._deposits, self._restores
        calls: Mapping[str, Callable[..., None]] = {
            "hello": self._hello,
            "publish": self._publish,
            "await_slot": deposits.await_slot,
            "begin_deposit": deposits.begin,
            "deposited": deposits.deposited,
            "restored": restores.restored,
            "stepped": self._stepped,
            "finished": self._finished,
        }
        if method not in calls:
            raise UsageError(f"{method!r} is not a call of the agent.")
        answer: Future[Json] = Future()

        def deliver() -> None:
            try:
                round = self._round_of(peer, method, arguments)
                round.unanswered.add(answer)
                answer.add_done_callback(round.unanswered.discard)
                calls[method](round, answer, **arguments)
            except ScalaiError as error:
                if not answer.done():
                    answer.set_exception(error)

        self._events.put(deliver)
        return answer.result()

    def _round_of(self, peer: Peer, method: str, arguments: Mapping[str, Json]) -> Round:
        """Return the round that a worker speaks of, the present one or the one ahead.

        Raises:
            PeerError: It has ended: words of its workers may still be on their way.
        """
        ahead = self._ahead[0] if self._ahead else None
        rounds = [round for round in (self._round, ahead) if round is not None]
        if method == "await_slot":  # on a connection of its own
            found = self._round
        elif method == "hello":
            found = next((r for r in rounds if r.number == arguments["round"]), None)
            if found is not None:
                self._callers[peer] = (found, arguments["rank"])
        else:
            caller = self._callers.get(peer)
            found = caller[0] if caller is not None and caller[0] in rounds else None
        if found is None:
            raise PeerError("this round of workers has ended.")
        return found

    def _on_worker_gone(self, peer: Peer) -> None:
        def deliver() -> None:
            caller = self._callers.pop(peer, None)
            if caller is not None and caller[0] is self._round:
                self._worker_gone(caller[1])

        self._events.put(deliver)

    def _hello(self, current: Round, answer: "Future[Json]", rank: int, round: int) -> None:
        command = current.command
        answer.set_result(
            {
                "degrees": command["degrees"],
                "micro_batch_size": command["micro_batch_size"],
                "snapshot_every": self._spec.config.store.snapshot_every,
                "restorable_step": command["restorable_step"],
                "is_ahead": current is not self._round,
                "facts": command["facts"],
                "settings": self._spec.hook_settings(command["world_size"]),
            }
        )

    def _publish(self, current: Round, answer: "Future[Json]", **told: Json) -> None:
        if self._restores.publish(current, answer, **told):
            if current is self._round:
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

    def _worker_gone(self, rank: int) -> None:
        current, crew = self._round, self._crew
        if current is None or crew is None or rank not in current.ranks:
            return
        current.lost.add(rank)
        if not current.is_draining:
            return
        is_done = current.deposit is not None and rank in current.deposit.parts
        if not is_done and rank not in current.finished:
            if not crew.page.has_reached_stop(rank - current.ranks.start):
                self._fail(f"rank {rank} died on its way to the stop")
                return
            log.error("event=worker_lost rank=%d while it deposits", rank)
            self._hurry()
        if current.is_complete(current.finished):
            self._tell("finished", round=current.number)
        else:
            self._deposits.give_orders(current)
            self._deposits.seal_if_complete(current)


def _write_secret(path: Path, secret: bytes) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret)
