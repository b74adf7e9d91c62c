"""A few processes that stay alive from test to test: torch and a framework are imported once."""

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scalai.runtime.processes import end_with

TIMEOUT_S = 270
"""Less than a test may take (pyproject.toml): frameworks are imported in it, also on a busy
machine."""
AFTER_A_FAILURE_S = 2
END_S = 10
LIFE_S = 7200
"""No test session is longer: its workers end, though what was to end them is gone."""
MANY_THREADS = 150
"""A job of four ranks has about 110. Those of a process group stay where something still refers to
the group, as Megatron's gradient hooks do, and each wakes up a hundred times a second."""


class WorkerFailed(Exception):
    """A worker raised, died or did not answer. The pool starts afresh with the next call."""


class WorkerPool:
    """Runs one function on ranks ``0 .. n-1`` at a time; the others stay idle."""

    def __init__(self, size: int, release: Path | None = None, trainer: str = "tiny_gpt") -> None:
        """``release``: a directory with another release of the framework than the installed.
        ``trainer``: the module of this package that trains, with its framework."""
        self._size = size
        self._release = release
        self.trainer = trainer
        self._calls = 0
        self._threads = 0
        self._workers: list[tuple[Any, Connection]] = []
        self._store: dist.TCPStore | None = None

    def run(self, function: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a function on as many workers as there are entries in ``arguments``.

        ``function`` is ``module:name`` of this package, so that this process need not import what
        the workers do. It is called as ``name(rank, store, *arguments[rank])``; no other call uses
        this ``store``. Returns the results by rank.
        """
        world = len(arguments)
        assert world <= self._size, f"{world} ranks asked of a pool of {self._size}"
        if not self._workers:
            self._start()
        self._calls += 1
        for (_, pipe), values in zip(self._workers, arguments, strict=False):
            pipe.send((function, f"call-{self._calls}", values))
        answers = self._answers(world)
        failed = [f"rank {rank}:\n{text}" for rank, (text, *_) in sorted(answers.items()) if text]
        if failed or len(answers) < world:
            self.close()
            silent = [rank for rank in range(world) if rank not in answers]
            raise WorkerFailed("\n".join([*failed, f"ranks without an answer: {silent}"]))
        self._threads = max(threads for *_, threads in answers.values())
        return [answers[rank][1] for rank in range(world)]

    def renew(self) -> None:
        """End the processes where earlier jobs have left them too many threads; between jobs."""
        if self._threads > MANY_THREADS:
            self.close()

    def close(self) -> None:
        """End the processes; ``run`` starts new ones."""
        for _, pipe in self._workers:
            pipe.close()
        for process, _ in self._workers:
            process.join(timeout=1)
            if process.is_alive():
                process.terminate()
                process.join(END_S)
                process.kill()
        self._threads = 0
        self._workers = []
        self._store = None

    def _start(self) -> None:
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            # Megatron's fork server imports torch and megatron once for all pools; there is one a
            # process, so another framework or release is imported once a pool.
            is_forked = self._release is None and self.trainer == "tiny_gpt"
            start = self._start_by_server if is_forked else self._start_by_parent
            start(self._store.port)
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before

    def _start_by_server(self, port: int) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([f"{__package__}.{self.trainer}"])
        for rank in range(self._size):
            here, there = context.Pipe()
            given = (rank, port, os.getpid(), there)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))

    def _start_by_parent(self, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(self._size)]
        theirs = [there for _, there in pipes]
        parent = context.Process(
            target=_fork_workers, args=(theirs, port, os.getpid(), self._release, self.trainer)
        )
        parent.start()
        for here, there in pipes:
            there.close()
            self._workers.append((parent, here))

    def _answers(self, world: int) -> dict[int, tuple[str, Any, int]]:
        """Return what the ranks answer, by rank: an error, a result, its number of threads.

        Where one fails the others wait in vain for it.
        """
        ranks = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:world])}
        answers: dict[int, tuple[str, Any, int]] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while ranks and (ready := wait(list(ranks), max(deadline - time.monotonic(), 0))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = ranks.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = "the process ended", None, 0
                if answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE_S)
        return answers


def _fork_workers(
    pipes: Sequence[Connection], port: int, session: int, release: Path | None, trainer: str
) -> None:
    """Import a framework and fork workers of it; end when they do, or end them when terminated."""
    if release is not None:
        sys.path.insert(0, str(release))
    importlib.import_module(f"{__package__}.{trainer}")
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=_serve, args=(rank, port, session, pipes[rank], pipes), daemon=True)
        for rank in range(len(pipes))
    ]
    for worker in workers:
        worker.start()
    for pipe in pipes:
        pipe.close()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which terminates daemons
    for worker in workers:
        worker.join(LIFE_S)


def _serve(
    rank: int, port: int, session: int, pipe: Connection, pipes: Sequence[Connection] = ()
) -> None:
    """Answer calls until the process ``session`` closes the pipe; end with it, even within one."""
    end_with(session)
    for other in pipes:
        if other is not pipe:
            other.close()  # else nobody would see that its worker died
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    gc.freeze()  # what the frameworks consist of is not looked through again
    while True:
        try:
            function, prefix, values = pipe.recv()
        except EOFError:
            return
        try:
            module, _, name = function.partition(":")
            call = getattr(importlib.import_module(f"{__package__}.{module}"), name)
            error, answer = "", call(rank, dist.PrefixStore(prefix, store), *values)
        except BaseException:
            error, answer = traceback.format_exc(), None
        gc.collect()
        pipe.send((error, answer, len(os.listdir("/proc/self/task"))))
