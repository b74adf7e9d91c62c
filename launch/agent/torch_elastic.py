"""A host's worker processes; the only user of torch.distributed.elastic's private hooks.

``WorkerSet`` is torch's ``LocalElasticAgent`` with the coordinator's assignment as rendezvous.
Torch does starting, environment, logs, error files and death of workers; others decide when to
start and stop them. Torch waits only a moment for killed workers; ``awaited_ends`` waits longer.

``self_check`` refuses a torch with other hooks; tests/launch/test_torch_elastic.py states the same
contract.
"""

import atexit
import importlib
import inspect
import json
import logging
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, get_context, resource_tracker
from operator import attrgetter
from pathlib import Path
from select import POLLIN, poll
from types import ModuleType
from typing import Any

import torch
from torch.distributed import HashStore  # not in its __all__
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, SubprocessContext
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from scalai.core.errors import RefusedError
from scalai.core.job.deadlines import GONE_S
from scalai.launch import host_signals

GONE_REPORT_S = 5.0
"""Seconds before a killed worker still alive is logged."""
LOOK_MS = 500.0

log = logging.getLogger(__name__)


@contextmanager
def awaited_ends(pids: Iterable[int], is_over: Callable[[], bool]) -> Iterator[None]:
    """Wait, at the end of this context, for the processes killed in it: ``GONE_S`` at most, or
    until ``is_over``.

    Torch waits only a moment (2.13 and newer); a kernel with a hanging device, or much pinned
    memory, takes longer.
    """
    watched = dict[int, int]()
    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                watched[os.pidfd_open(pid)] = pid
        yield
        _wait(watched, is_over)
    finally:
        for descriptor in watched:
            os.close(descriptor)


def _wait(watched: dict[int, int], is_over: Callable[[], bool]) -> None:
    waiter, began, next_report_s = poll(), time.monotonic(), GONE_REPORT_S
    for descriptor in watched:
        waiter.register(descriptor, POLLIN)
    while watched:
        for descriptor, _ in waiter.poll(LOOK_MS):
            waiter.unregister(descriptor)
            os.close(descriptor)
            del watched[descriptor]
        since_s = time.monotonic() - began
        if watched and since_s > next_report_s:
            next_report_s *= 2
            pids = ",".join(map(str, sorted(watched.values())))
            log.warning(
                "event=stuck pids=%s since_s=%.0f: the kernel has not ended these workers, which "
                "hold the memory of their devices; the next round waits for it",
                pids, since_s,
            )  # fmt: skip
        if since_s > GONE_S or is_over():
            return


WORKER_MODULE = "scalai.patches.worker"
PRELOAD_MODULE = "scalai.patches.preload"
STARTED_S = 1.0
"""Seconds for the kernel to show a new process's command line."""
MOST_RAISED = 400
"""Characters of a script's error in a failure's reason."""
LOCK_S = 1.0
"""Seconds to wait for an event's lock, normally held for microseconds."""

_HOOKS: Mapping[str, tuple[str, ...]] = {
    "_initialize_workers": ("self", "worker_group"),
    "_assign_worker_ranks": ("self", "store", "group_rank", "group_world_size", "spec"),
    "_set_local_rank_env": ("self", "worker_env", "local_rank", "spec"),
    "_monitor_workers": ("self", "worker_group"),
}
_CLOSE = ("self", "death_sig", "timeout")
"""Parameters of ``_close`` of torch's process contexts."""
_FINISHED_EVENT = "_worker_finished_event"
_EVENT_PARTS = ("_flag", "_cond", "_cond._sleeping_count", "_cond._wait_semaphore")
_WAY_OUT = (
    "This version of scalai-run was made for torch 2.10 to 2.15 and CPython 3.11 to 3.13; install "
    "those or a newer scalai."
)


# The agent has its own handlers to drain; torch need not register its own.
logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(
    lambda record: "Failed to register signal handlers" not in record.getMessage()
)


def self_check() -> None:
    """Raise ``RefusedError`` for a torch without the hooks, or a Python with another event."""
    for name, parameters in _HOOKS.items():
        method = getattr(LocalElasticAgent, name, None)
        found = tuple(inspect.signature(inspect.unwrap(method)).parameters) if method else None
        if found != parameters:
            raise RefusedError(
                f"torch {torch.__version__}: LocalElasticAgent.{name} takes {found}, expected "
                f"{parameters}. {_WAY_OUT}"
            )
    for context in (MultiprocessContext, SubprocessContext):
        if tuple(inspect.signature(context._close).parameters) != _CLOSE:
            raise RefusedError(
                f"torch {torch.__version__}: {context.__name__}._close does not take {_CLOSE}. "
                f"{_WAY_OUT}"
            )
    if _FINISHED_EVENT not in MultiprocessContext.__init__.__code__.co_names:
        raise RefusedError(
            f"torch {torch.__version__}: MultiprocessContext has no {_FINISHED_EVENT}, at which "
            f"finished workers wait for each other. {_WAY_OUT}"
        )
    event = get_context("fork").Event()  # the same class; its semaphores go with it
    for part in _EVENT_PARTS:
        try:
            attrgetter(part)(event)
        except AttributeError as error:
            raise RefusedError(
                f"Python {platform.python_version()}: multiprocessing's Event has no {part}. "
                f"{_WAY_OUT}"
            ) from error


@dataclass(frozen=True, slots=True)
class GroupPlacement:
    """Place of this host's workers in a round."""

    round: int
    group_rank: int
    group_world_size: int
    first_rank: int
    local_world_size: int
    world_size: int
    master_addr: str
    master_port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    outlives_signals: bool = False
    """Whether workers survive SIGTERM or SIGINT to the whole host; then only the agent ends them.
    """


@dataclass(frozen=True, slots=True)
class WorkersOutcome:
    """End of the workers; no failures: all exited with 0."""

    failures: tuple[str, ...] = ()


class _Assigned(RendezvousHandler):
    """A rendezvous with a given result. ``use_agent_store``: the coordinator hosts the workers'
    store."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self.placement: GroupPlacement | None = None

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "scalai"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        assert self.placement is not None
        place = self.placement
        address = RendezvousStoreInfo(place.master_addr, place.master_port)
        return RendezvousInfo(HashStore(), place.group_rank, place.group_world_size, address)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return None

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def run_forked(*arguments: str) -> None:
    """Entry of a worker forked warm: runs the module of a cold worker's ``python -m``."""
    # The script's own processes, such as a data loader's, start as in a cold worker; children of a
    # fork server would ask that server.
    multiprocessing.set_start_method(None, force=True)
    try:
        importlib.import_module(WORKER_MODULE).main(list(arguments))
    finally:
        # multiprocessing leaves by _exit, without the script's exit functions, such as the end of a
        # log writer's run.
        atexit._run_exitfuncs()


class _LettingGo:
    """Torch's event for finished workers to wait for each other, from the parent's side.

    ``multiprocessing.Event.set`` waits for each waiter to wake, so it would never return after one
    was killed.
    """

    def __init__(self, event: Any) -> None:
        self._flag, self._condition = event._flag, event._cond

    def set(self) -> None:
        """Wake all waiters, present and future."""
        is_mine = self._condition.acquire(timeout=LOCK_S)  # a killed process may hold it forever
        self._flag.release()
        while self._condition._sleeping_count.acquire(False):
            self._condition._wait_semaphore.release()
        if is_mine:
            self._condition.release()


class WorkerSet(LocalElasticAgent):
    """The worker processes of one host.

    Args:
        run_id: The job's name.
        role, redirects: As torchrun's ``--role``, ``--log-dir``, ``--redirects`` and ``--tee``.
    """

    def __init__(self, run_id: str, role: str, logs: LogsSpecs | None = None) -> None:
        self._assigned = _Assigned(run_id)
        spec = WorkerSpec(
            role=role,
            local_world_size=1,
            rdzv_handler=self._assigned,
            entrypoint=sys.executable,
            args=(),
            max_restarts=0,
        )
        super().__init__(spec, logs or DefaultLogsSpecs(), start_method="forkserver")
        self._is_up = False

    def start(self, place: GroupPlacement, arguments: Sequence[str], *, warm: bool) -> None:
        """Start the workers of ``place``; ``arguments``: the script and its arguments.

        ``warm``: fork them from the server of ``warm_up``; else a plain exec.

        Raises:
            OSError: A process or a thread cannot be started, or the server has died; none of these
                workers remains.
        """
        spec = self._worker_group.spec
        spec.entrypoint = run_forked if warm else sys.executable
        spec.args = tuple(arguments) if warm else ("-u", "-m", WORKER_MODULE, *arguments)
        spec.local_world_size = place.local_world_size
        self._assigned.placement = place
        signals = host_signals.blocked() if place.outlives_signals else nullcontext()
        others = _children()
        try:
            with signals, _without_main() if warm else nullcontext():
                self._initialize_workers(self._worker_group)
        except BaseException as error:
            # Torch does not know the workers started before the failure; they would keep their
            # devices' memory.
            _kill_workers(_children() - others)
            if isinstance(error, EOFError | RuntimeError):  # no server, no thread
                raise OSError(f"a worker or a thread cannot be started: {error!r}") from error
            raise
        if place.outlives_signals:
            self._end_by_kill()
        if warm:
            assert self._pcontext is not None
            event = getattr(self._pcontext, _FINISHED_EVENT)
            setattr(self._pcontext, _FINISHED_EVENT, _LettingGo(event))
        self._is_up = True

    def poll(self) -> WorkersOutcome | None:
        """Return the workers' end; None: some run.

        After one fails, the others live on if they outlive signals, else they are ended too.
        """
        place = self._assigned.placement
        if not self._is_up or place is None:
            return None
        if place.outlives_signals:
            ended = sorted(self.ended().items())
            failed = {place.first_rank + local: code for local, code in ended if code}
            if failed:
                return WorkersOutcome(self._endings(failed))
        result: RunResult = self._monitor_workers(self._worker_group)
        if result.state is WorkerState.HEALTHY:
            return None
        self._is_up = False
        codes = {rank: failure.exitcode for rank, failure in sorted(result.failures.items())}
        # Torch ends the others by SIGTERM and counts them as failed too.
        first = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM} or codes
        is_good = result.state is WorkerState.SUCCEEDED
        return WorkersOutcome(self._endings(first) or (() if is_good else (result.state.name,)))

    def _endings(self, codes: Mapping[int, int]) -> tuple[str, ...]:
        place, files = self._assigned.placement, getattr(self._pcontext, "error_files", {})
        assert place is not None
        raised = {rank: _raised(files.get(rank - place.first_rank)) for rank in codes}
        return tuple(
            f"rank {rank}: {raised[rank]}" if raised[rank] else f"rank {rank} {_ending(code)}"
            for rank, code in codes.items()
        )

    def ended(self) -> dict[int, int]:
        """Return exit codes of ended workers by local rank, 0 for forked ones that returned and
        wait. Ends none."""
        if not self._is_up:
            return {}
        context = self._pcontext
        if isinstance(context, SubprocessContext):
            codes = {r: h.proc.poll() for r, h in context.subprocess_handlers.items()}
        else:
            assert isinstance(context, MultiprocessContext) and context._pc is not None
            codes = {r: p.exitcode for r, p in enumerate(context._pc.processes)}
            for rank, returned in context._ret_vals.items():
                if codes[rank] is None and (rank in context._return_values or not returned.empty()):
                    codes[rank] = 0
        return {rank: code for rank, code in codes.items() if code is not None}

    def stop(self, timeout_s: int = 5, is_over: Callable[[], bool] = lambda: False) -> None:
        """End all workers: SIGTERM, then SIGKILL after ``timeout_s``; those outliving signals at
        once.

        Blocks until they are gone, ``GONE_S`` at most, or until ``is_over``.
        """
        if self._is_up and self._pcontext is not None:
            with awaited_ends(self._pcontext.pids().values(), is_over):
                self._pcontext.close(signal.SIGTERM, timeout_s)
        self._is_up = False
        # Its queues hold named semaphores; the last reference frees them, _exit does not.
        self._pcontext = None
        self._shutdown()  # torch's other processes; before 2.12 it takes no timeout

    def _end_by_kill(self) -> None:
        """Make torch end these workers and their children by SIGKILL: they ignore SIGTERM, or use
        it otherwise."""
        context = self._pcontext
        assert context is not None
        close = type(context)._close
        # A weak reference: the context must not keep itself and its semaphores alive.
        weakly = weakref.ref(context)

        def kill(death_sig: signal.Signals, timeout: int = 30) -> None:
            context = weakly()
            assert context is not None
            for pid in context.pids().values():
                _kill_group(pid)
            close(context, signal.SIGKILL, timeout)

        # After a failure torch ends the others by SIGTERM, with no way to choose another signal.
        context._close = kill  # type: ignore[method-assign]

    def pids(self) -> dict[int, int]:
        """Process numbers by local rank."""
        return {w.local_rank: int(w.id) for w in self._worker_group.workers} if self._is_up else {}

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        place = self._assigned.placement
        assert place is not None
        ranks = range(place.local_world_size)
        return [
            Worker(
                local,
                place.first_rank + local,
                place.first_rank + local,
                place.world_size,
                place.world_size,
            )
            for local in ranks
        ]

    def _set_local_rank_env(
        self, worker_env: dict[str, str | None], local_rank: int, spec: WorkerSpec
    ) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        place = self._assigned.placement
        assert place is not None
        worker_env.update(place.environment)
        worker_env["TORCHELASTIC_RESTART_COUNT"] = str(place.round - 1)
        worker_env.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))


def warm_up(preload_file: str) -> None:
    """Start the fork server with the file's imports. Returns at once; imports run in the server.

    A previous server is left to its children and replaced.
    """
    os.environ.update(SCALAI_PRELOAD=preload_file, SCALAI_AGENT_PID=str(os.getpid()))
    # Frameworks look for devices during import; this way the look does not start CUDA.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    server = forkserver.ForkServer()
    server.set_forkserver_preload([PRELOAD_MODULE])
    with host_signals.blocked():  # it ignores and unblocks some; the others start blocked
        resource_tracker.ensure_running()
    with host_signals.blocked():
        server.ensure_running()
    # The context's processes go through this module's singleton (CPython 3.11 to 3.13,
    # forkserver.py, last lines).
    forkserver._forkserver = server
    for name in (
        "ensure_running",
        "get_inherited_fds",
        "connect_to_new_process",
        "set_forkserver_preload",
    ):
        setattr(forkserver, name, getattr(server, name))
    get_context("forkserver")


def wait_until_warm() -> None:
    """Return once the server has imported everything and forked a process.

    Raises:
        RefusedError: The server has begun CUDA, so its processes cannot use devices.
    """
    process = get_context("forkserver").Process(target=_end_by_use_of_devices)
    with _without_main():
        process.start()
    process.join()
    if process.exitcode:
        raise RefusedError(
            "what the script imports uses CUDA as it is imported, and no fork can use it after that"
        )


def _end_by_use_of_devices() -> None:
    torch = sys.modules.get("torch")
    sys.exit(int(torch is not None and torch.cuda._is_in_bad_fork()))


_MAIN_MUTEX = threading.Lock()


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the agent's main module from processes forked meanwhile; they would run it again
    (``get_preparation_data`` of CPython's multiprocessing/spawn.py)."""
    with _MAIN_MUTEX:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _children() -> set[int]:
    """Return this process's children, direct or through the fork server."""
    found = {process.pid for process in multiprocessing.active_children() if process.pid}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            stat = Path("/proc", pid, "stat").read_text(errors="replace")
            if int(stat.rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(pid))
    return found


def _kill_workers(children: Iterable[int]) -> None:
    """Kill the workers among the processes, with their children."""
    forked = {process.pid for process in multiprocessing.active_children()}
    for pid in children:
        with suppress(OSError):  # it has ended
            if pid in forked or WORKER_MODULE.encode() in _command_of(pid):
                _kill_group(pid)
                os.kill(pid, signal.SIGKILL)


def _kill_group(leader: int) -> None:
    """Kill a worker's group and session.

    A build (ninja) gives each compiler a group of its own; survivors would write beside the next
    build.
    """
    with suppress(ProcessLookupError):  # it leads no group (yet), or the group is empty
        os.killpg(leader, signal.SIGKILL)
    killed = set[int]()
    while left := set(_session_of(leader)) - killed:  # killed processes start no others
        killed |= left
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _session_of(leader: int) -> Iterator[int]:
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            stat = Path("/proc", pid, "stat").read_text(errors="replace")
            if int(stat.rpartition(")")[2].split()[3]) == leader:
                yield int(pid)


def _command_of(pid: int) -> bytes:
    """Return a process's command line; waits, because a new process shows none."""
    end = time.monotonic() + STARTED_S
    while True:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if command or time.monotonic() > end:
            return command
        time.sleep(0.01)


def _raised(error_file: str | None) -> str:
    """Return the error in a worker's file as one line; empty: there is none."""
    try:
        found = json.loads(Path(error_file or os.devnull).read_text())["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # it has raised nothing, or was killed as it wrote
    said = found.get("message", "") if isinstance(found, dict) else found
    return " ".join(str(said).split())[:MOST_RAISED]


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"exited with {exit_code}"
