"""A few processes that stay alive from test to test: torch and a framework are imported once."""

import importlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

TIMEOUT_S = 120


class WorkerFailed(Exception):
    """A worker raised, died or did not answer. The pool starts afresh with the next call."""


class WorkerPool:
    """Runs one function on ranks ``0 .. n-1`` at a time; the others stay idle."""

    def __init__(self, size: int, megatron: Path | None = None, trainer: str = "tiny_gpt") -> None:
        """``megatron``: a directory with another release of megatron-core than the installed.
        ``trainer``: the module that trains, with its framework."""
        self._size = size
        self._megatron = megatron
        self.trainer = trainer
        self._calls = 0
        self._workers: list[tuple[Any, Connection]] = []
        self._store: dist.TCPStore | None = None

    def run(self, function: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a function on as many workers as there are entries in ``arguments``.

        ``function`` is ``module:name``, so that this process need not import what the workers do.
        It is called as ``name(rank, store, *arguments[rank])``; no other call uses this ``store``.
        Returns the results by rank.
        """
        world = len(arguments)
        assert world <= self._size, f"{world} ranks asked of a pool of {self._size}"
        if not self._workers:
            self._start()
        self._calls += 1
        for (_, pipe), values in zip(self._workers, arguments, strict=False):
            pipe.send((function, f"call-{self._calls}", values))
        answers = [self._answer(rank) for rank in range(world)]
        failed = [f"rank {rank}:\n{text}" for rank, (text, _) in enumerate(answers) if text]
        if failed:
            self.close()
            raise WorkerFailed("\n".join(failed))
        return [result for _, result in answers]

    def close(self) -> None:
        """End the processes; ``run`` starts new ones."""
        for process, pipe in self._workers:
            pipe.close()
            process.join(timeout=1)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers = []
        self._store = None

    def _start(self) -> None:
        # The fork server imports torch and megatron once; the workers are its children. There is
        # one server a process, so that another framework or release needs processes of their own.
        is_forked = self._megatron is None and self.trainer == "tiny_gpt"
        context: Any = multiprocessing.get_context("forkserver" if is_forked else "spawn")
        if is_forked:
            context.set_forkserver_preload([self.trainer])
        before = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
        folders = [Path(__file__).parent, Path(__file__).parent.with_name("converters")]
        os.environ.update(PYTHONPATH=os.pathsep.join(map(str, folders)), OMP_NUM_THREADS="1")
        try:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            for rank in range(self._size):
                here, there = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(rank, self._store.port, there, self._megatron, self.trainer),
                    daemon=True,
                )
                process.start()
                there.close()
                self._workers.append((process, here))
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def _answer(self, rank: int) -> tuple[str, Any]:
        process, pipe = self._workers[rank]
        try:
            if pipe.poll(TIMEOUT_S):
                answer: tuple[str, Any] = pipe.recv()
                return answer
        except EOFError:
            process.join(timeout=5)
            return f"the process ended with {process.exitcode}", None
        return f"no answer within {TIMEOUT_S} s", None


def _serve(rank: int, port: int, pipe: Connection, megatron: Path | None, trainer: str) -> None:
    if megatron is not None:
        sys.path.insert(0, str(megatron))
    importlib.import_module(trainer)  # before all else: it prepares what the framework imports
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            function, prefix, values = pipe.recv()
        except EOFError:
            return
        try:
            module, _, name = function.partition(":")
            call = getattr(importlib.import_module(module), name)
            answer = "", call(rank, dist.PrefixStore(prefix, store), *values)
        except BaseException:
            answer = traceback.format_exc(), None
        pipe.send(answer)
