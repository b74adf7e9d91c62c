"""The worker processes of one round on this host: their start, beside those of the present round or
not, the fork server for later rounds, their control page shared with the agent, and the server for
their calls."""

import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from scalai.converters.megatron.arguments import derived_flags, is_megatron
from scalai.core.degrees.degrees import Degrees
from scalai.core.errors import RefusedError, ScalaiError
from scalai.core.host.actions import StartGroup
from scalai.core.host.standby import RoomBeside
from scalai.core.job.spacing import Schedule
from scalai.core.messages import commands
from scalai.core.messages.commands import Workers
from scalai.core.messages.worker_messages import Hello, Imports, WorkerRequest
from scalai.launch.agent.extension_locks import WorkersLocks, extensions_root
from scalai.launch.agent.torch_elastic import (
    GroupPlacement,
    WorkerSet,
    WorkersOutcome,
    wait_until_warm,
    warm_up,
)
from scalai.launch.config.job_spec import JobSpec
from scalai.runtime.agent_folder import SOCKET, TOKEN
from scalai.runtime.calls import Peer, Server
from scalai.runtime.control import ControlPage, control_path
from scalai.runtime.processes import private_bytes
from scalai.store.pool import available_memory
from scalai.store.secure import Folder

OWN_MODULES = ("scalai.launch.agent.torch_elastic", "scalai.patches.worker")
"""Additional modules of every forked process: its entry and its main."""
LOOK_S = 2.0
"""Seconds between looks at the locks of extension builds."""
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
THREADS, THREADS_BY_DEFAULT = "OMP_NUM_THREADS", "SCALAI_THREADS_BY_DEFAULT"
"""The second one: nobody has set the first."""
NCCL_ERRORS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
"""Torch's reaction to a failed NCCL collective (torch 2.11, ProcessGroupNCCL.cpp); the second name
is of older releases. By default the watchdog ends the process a minute later, after a failed link
all at about once, and the state is lost. With 0 workers wait, report it
(``scalai.runtime.emergency_writer``), and are ended after their state is written."""

log = logging.getLogger(__name__)


class WorkerGroup:
    """The workers of one round, from ``WorkerGroups.start``; ``end`` leaves nothing of them."""

    def __init__(
        self, place: GroupPlacement, workers: WorkerSet, page: ControlPage, path: Path, *,
        builds: bool = True,
    ) -> None:  # fmt: skip
        self.page, self._builds = page, builds
        self._place, self._workers, self._path = place, workers, path
        self._locks = WorkersLocks(extensions_root())
        self._looks_at = 0.0

    def pids(self) -> dict[str, int]:
        """Process numbers of the living workers by global rank, as text."""
        first = self._place.first_rank
        return {str(first + local): pid for local, pid in self._workers.pids().items()}

    def newest_step(self) -> int:
        """Return the highest step any worker has ended; 0 before the first."""
        return max(0, self.page.newest_step(self._place.local_world_size))

    def steps(self) -> dict[int, int]:
        """Return each worker's last ended step, by global rank; -1 before it takes part."""
        steps = self.page.steps(self._place.local_world_size)
        return {self._place.first_rank + local: step for local, step in enumerate(steps)}

    def space(self, begin: int, every: int) -> int:
        """Set the steps between snapshots, from step ``begin`` on; return the newest ended step."""
        self.page.space(Schedule(every, begin))
        return self.newest_step()

    def pace(self) -> tuple[int, float] | None:
        """Return the newest window of passes, and the seconds of one; None: not measured."""
        return self.page.pace(self._place.local_world_size)

    def are_within_steps(self) -> bool:
        """Return whether every worker reports being within a step."""
        return self.page.are_within_steps(self._place.local_world_size)

    def ended(self) -> dict[int, int]:
        """Return exit codes of ended workers by global rank, 0 for those waiting at their script's
        end.

        Ends none, unlike ``poll``.
        """
        first = self._place.first_rank
        return {first + local: code for local, code in self._workers.ended().items()}

    def poll(self) -> WorkersOutcome | None:
        """Return the workers' end; None: some run."""
        self._look_at_builds()
        outcome = self._workers.poll()
        if outcome is not None:
            self._locks.remove_left()
        return outcome

    def _look_at_builds(self) -> None:
        """Look often before the first step, the usual time of builds, and rarely afterwards."""
        now, has_stepped = time.monotonic(), self.newest_step() > 0
        if has_stepped and now < self._looks_at:
            return
        self._locks.look(self._workers.pids().values())
        if now >= self._looks_at:
            self._looks_at = now + LOOK_S
            if self._builds and not has_stepped:
                self._locks.tell_of_waits()

    def end(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """End all workers. Blocks until they are gone; after ``is_over``, not for those the kernel
        cannot end."""
        self._locks.look(self._workers.pids().values())
        self._workers.stop(1, is_over)
        self._locks.remove_left()
        self._path.unlink(missing_ok=True)


class WorkerGroups:
    """Starts the workers of one job on this host, warm once their imports are known.

    Args:
        directory: The agent's own, with the workers' socket and token.
        make_workers: Returns an empty set of workers.
    """

    def __init__(
        self, spec: JobSpec, directory: Path, make_workers: Callable[[], WorkerSet]
    ) -> None:
        self._spec, self._directory, self._make_workers = spec, directory, make_workers
        self._has_server = self._is_warm = False

    def start(self, wanted: commands.Workers) -> WorkerGroup:
        """Start the workers of a round.

        Raises:
            StoreError, OSError: There is no room for the page, or a process cannot be started.
        """
        path = control_path(self._directory, wanted.round)
        page = ControlPage(path, create=True)
        page.clear()
        place = GroupPlacement(
            round=wanted.round,
            group_rank=wanted.placement.group_rank,
            group_world_size=wanted.placement.group_world_size,
            first_rank=wanted.placement.first_rank,
            local_world_size=wanted.placement.local_world_size,
            world_size=wanted.placement.world_size,
            master_addr=wanted.master_addr,
            master_port=wanted.master_port,
            environment=self._environment(wanted),
            outlives_signals=self._spec.is_elastic,
        )
        workers = self._make_workers()
        try:
            workers.start(place, worker_arguments(self._spec, wanted), warm=self._is_warm)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        # Megatron-LM builds no torch extension: such locks are another job's.
        builds = not is_megatron(self._spec.options.script_args)
        return WorkerGroup(place, workers, page, path, builds=builds)

    def _environment(self, wanted: Workers) -> dict[str, str]:
        environment = {"SCALAI_AGENT_PID": str(os.getpid())}
        is_free = THREADS not in os.environ or THREADS_BY_DEFAULT in os.environ
        if wanted.offload is not None and is_free:  # the host's processors update parameters
            cores = len(os.sched_getaffinity(0))
            environment[THREADS] = str(max(1, cores // wanted.placement.local_world_size))
        if (devices := os.environ.get(VISIBLE_DEVICES)) is not None:
            # The present value; a fork server has its start's.
            environment[VISIBLE_DEVICES] = devices
        if self._spec.is_elastic:
            environment |= {"SCALAI_ELASTIC": "1", "SCALAI_AGENT": str(self._directory)}
            has_said = any(name in os.environ for name in NCCL_ERRORS)
            if self._spec.config.store.emergency and not has_said:
                environment[NCCL_ERRORS[0]] = "0"
        return environment

    def warm_up(self, imports: Imports, *, is_last: bool) -> None:
        """Have the fork server for later groups import what a worker has, and start it before.

        Groups start cold until ``wait_until_warm`` has returned: a fork from it would wait.
        """
        try:
            order = write_preload(self._directory / "preload.json", imports, is_last=is_last)
            if not self._has_server:
                warm_up(str(order))
        except (ScalaiError, OSError) as error:
            log.warning("event=cold: later workers start slowly: %s", error)
            self._has_server = False  # it would wait for its last order
            return
        self._has_server = True

    def wait_until_warm(self) -> None:
        """Return once the server has made its last imports and forks, or is done without."""
        began = time.monotonic()
        if not self._has_server:
            return
        try:
            wait_until_warm()
        except RefusedError as error:
            log.warning("event=cold: later workers start slowly: %s", error)
            return
        except (OSError, EOFError) as error:
            log.warning("event=cold: the fork server has ended: %r", error)
            return
        self._is_warm = True
        took_s = time.monotonic() - began
        log.info("event=warm took_s=%.1f: the fork server is ready", took_s)


def write_preload(path: Path, imports: Imports, *, is_last: bool = True) -> Path:
    """Write an order for ``scalai.patches.preload``; return its path.

    Args:
        imports: A worker's imports.
        is_last: No other order follows.

    Raises:
        StoreError: It cannot be written.
    """
    modules = [*imports.modules, *(OWN_MODULES if is_last else ())]
    order = {"modules": modules, "sys_path": imports.sys_path, "is_last": is_last}
    with Folder.open(path.parent) as folder:
        folder.write(path.name, json.dumps(order).encode())
    return path


def worker_arguments(spec: JobSpec, wanted: Workers) -> list[str]:
    """Return the arguments of ``scalai.patches.worker`` for one round.

    Args:
        wanted: The round's workers on a host; ``facts`` come from workers of earlier rounds, such
            as ``padded_vocab_size``.
    """
    options, known = spec.options, spec.script.arguments
    assert options.script is not None
    start = [*(["-m"] if options.is_module else []), options.script, *options.script_args]
    if known is None:
        return start
    facts = wanted.facts.value()
    flags, notes = derived_flags(
        known,
        Degrees.from_json(wanted.degrees),
        facts.get("padded_vocab_size"),
        wanted.micro_batch_size,
        facts.get("eval_batch_size"),
        wanted.recompute,
        wanted.offload,
    )
    for note in notes:
        log.info("event=flags %s", note)
    return [*start, *flags]


FIRST_TO_GO = "1000"
"""Adjustment of the kernel's choice when memory runs out (proc(5))."""


def room_beside(present: Iterable[int], action: StartGroup, devices: Sequence[int]) -> RoomBeside:
    """Measure the room for the workers of a round beside the present ones.

    Args:
        present: Process numbers of the training workers here.
        devices: Free memory of each device, in bytes; empty: unknown.
    """
    workers = action.workers.placement.local_world_size
    device_free = min(devices) // -(-workers // len(devices)) if devices else None
    return RoomBeside(
        workers=workers,
        used=max((private_bytes(pid) for pid in present), default=0),
        free=available_memory(),
        on_devices=action.on_devices,
        device_free=device_free,
        brink=action.brink,
    )


def offer(processes: Iterable[int], *, is_standby: bool) -> None:
    """Mark processes as the first to kill when memory runs out, or as equal to this one."""
    adjustment = FIRST_TO_GO if is_standby else Path("/proc/self/oom_score_adj").read_text()
    for pid in _with_offspring(processes):
        with contextlib.suppress(OSError):  # it is gone
            Path(f"/proc/{pid}/oom_score_adj").write_text(adjustment)


def _with_offspring(workers: Iterable[int]) -> set[int]:
    """Return these processes and their descendants, such as writers of saves: each worker has its
    own session."""
    sessions, found = set(workers), set(workers)
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, ProcessLookupError):
            if os.getsid(int(entry.name)) in sessions:
                found.add(int(entry.name))
    return found


class WorkerCalls:
    """Hands each call to the agent's loop, and its answer back.

    Args:
        directory: The agent's own; gets the workers' socket and token.
        put: Hands the loop something to do.
        carry_out: ``carry_out(answer, request)`` performs a call, in the loop, and answers at once
            or later.
        gone: ``gone(round, rank)``, in the loop, after a worker's connection has ended.
    """

    def __init__(
        self,
        directory: Path,
        put: Callable[[Callable[[], None]], object],
        carry_out: Callable[["Future[Any]", WorkerRequest], None],
        gone: Callable[[int, int], None],
    ) -> None:
        self._put, self._carry_out, self._gone = put, carry_out, gone
        self._callers: dict[Peer, Hello] = {}
        """Callers by connection, after their hello. In the loop alone."""
        token = secrets.token_bytes(32)
        # Open as long as the server: it removes its socket by this path.
        self._folder = Folder.open(directory)
        self._folder.write(TOKEN, token)
        self._folder.remove(SOCKET)
        self._server = Server(
            self._folder.reach(SOCKET), token, WorkerRequest, self._handle, self._left
        )

    def close(self) -> None:
        self._server.close()
        self._folder.close()

    def _handle(self, peer: Peer, request: WorkerRequest) -> object:
        answer: Future[Any] = Future()

        def deliver() -> None:
            if isinstance(request, Hello):
                self._callers[peer] = request
            self._carry_out(answer, request)

        self._put(deliver)
        return answer.result()

    def _left(self, peer: Peer) -> None:
        def deliver() -> None:
            caller = self._callers.pop(peer, None)
            if caller is not None:
                self._gone(caller.round, caller.rank)

        self._put(deliver)
