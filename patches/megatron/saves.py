"""Megatron-LM's asynchronous saves (``--async-save``), which outlast the step that began them.

A process of each rank writes, and all ranks together finish the save at the beginning of some later
step: only then the tracker file names it. So a rank must not leave before; it says which save is in
flight, and the change waits while the training goes on.

Source: megatron/training/async_utils.py, core/dist_checkpointing/strategies/async_utils.py (0.14 to
0.20), nvidia_resiliency_ext/checkpointing/async_ckpt/core.py (0.4 to 0.6); what is used of them is
the same in all.
"""

import atexit
import logging
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed
import wrapt

from scalai.patches.calls import Args, Call, Kwargs
from scalai.patches.megatron.saved import SavedPlaces
from scalai.runtime.session import Session

log = logging.getLogger(__name__)

QUEUE = "megatron.training.async_utils"
"""Has Megatron's queue of saves in ``_async_calls_queue``, which may be None before the first."""
LOOK_S = 0.1
"""How often it is asked whether a save that all wait for has ended."""


class AsyncSaves:
    """What a rank knows of its saves: the same as every other rank after the same step."""

    _session: Session | None = None

    def __init__(self) -> None:
        self.places = SavedPlaces()
        self._pending: deque[tuple[int, int]] = deque()
        """Iteration of each save in flight, and the number of its last call in the queue."""
        self._numbered = -1

    def hook(self, training: Any) -> None:
        """Hook ``megatron.training.training``."""
        self._get_args: Call = training.get_args
        wrapt.wrap_function_wrapper(training, "maybe_finalize_async_save", self._finalize)
        wrapt.wrap_function_wrapper(training, "save_checkpoint", self._save)

    def begin(self, session: Session) -> None:
        """The job is elastic, and saves asynchronously."""
        self._session = session
        # Before multiprocessing's own, which waits for this process for good (mcore to 0.16).
        atexit.register(self.leave)

    def _save(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """A save begins, in the background or not."""
        self._check(is_saving=True)
        iteration = int(kwargs["iteration"] if "iteration" in kwargs else args[0])
        is_persistent = not kwargs.get("non_persistent_ckpt")
        if is_persistent and iteration in (pending for pending, _ in self._pending):
            return None  # the same state, which is being written
        if is_persistent and self.places.is_done(self._get_args(), iteration):
            return None
        result = wrapped(*args, **kwargs)
        queue = _queue()
        if queue is not None and queue.call_idx > self._numbered:
            self._numbered = queue.call_idx
            self._pending.append((iteration, queue.call_idx))
            self._tell()
        return result

    def _finalize(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Megatron looks whether saves have ended: without waiting before each step, and waiting at
        the end of the training."""
        self._check()
        is_last = bool(kwargs.get("terminate", args[1] if len(args) > 1 else False))
        if kwargs.get("blocking", args[0] if args else False):
            # Megatron's own wait has no end where the process that writes has died.
            self._wait(lambda: wrapped(blocking=False))
        result = wrapped(*args, **kwargs)
        if not is_last:
            self._tell()
        return result

    def at_boundary(self, finalize: Call) -> None:
        """After a step, by all ranks. Where saves overlap or follow each other closely, there may
        never be none in flight: then all wait here for them as soon as a change does.

        Args:
            finalize: Megatron's ``maybe_finalize_async_save``. Collective.
        """
        if self._session is None:
            return
        self._tell()
        if not self._pending:
            return
        urgency = _highest(self._session.stop_urgency)
        if urgency < 2 and not (urgency and len(self._pending) > 1):
            return
        began = time.monotonic()
        log.warning(
            "event=waits_for_saves iterations=%s a change waits for them, and so does the "
            "training, because others would begin before. Save less often.",
            [iteration for iteration, _ in self._pending],
        )  # fmt: skip
        finalize(blocking=True)
        log.info("event=saves_ended took_s=%.1f", time.monotonic() - began)

    def leave(self) -> None:
        """End the process that writes, which waits for the next save: no save is in flight, or this
        process fails and what it began counts for nothing."""
        queue = _queue()
        for process in _persistent_processes(queue):
            with suppress(ValueError):  # it was closed
                process.kill()
        if queue is not None:
            queue.async_calls.clear()
            for caller in _persistent_callers(queue):
                caller.process = None  # else it waits for it when it is collected

    def _wait(self, look: Call) -> None:
        """Wait until no save is in flight on any rank. All ranks do, and look equally often."""
        queue = _queue()
        while queue is not None and queue.get_num_unfinalized_calls():
            look()
            self._check()
            if queue.get_num_unfinalized_calls():
                self._tell()  # that somebody looks
                time.sleep(LOOK_S)

    def _tell(self) -> None:
        queue = _queue()
        calls = queue.async_calls if queue is not None else ()
        oldest = calls[0].idx if calls else self._numbered + 1
        while self._pending and self._pending[0][1] < oldest:
            self._pending.popleft()
        if self._session is not None:
            self._session.note_save(self._pending[0][0] if self._pending else None)

    def _check(self, *, is_saving: bool = False) -> None:
        """Raise ``RuntimeError`` where the process that writes has died with a save in flight, or
        before the next one: Megatron would wait for it, for ever."""
        queue = _queue()
        if queue is None or not (is_saving or queue.async_calls):
            return
        for process in _persistent_processes(queue):
            if process.is_alive() or (not is_saving and _has_written(queue)):
                continue
            what = f"the save of iteration {self._pending[0][0]}" if self._pending else "a save"
            raise RuntimeError(
                f"the process that was to write {what} has ended (exit code {process.exitcode}; "
                "negative: the signal that killed it). That save is not finished and the tracker "
                "file does not name it; this worker ends, and the job goes on from its newest "
                "state."
            )


def _queue() -> Any:
    """Return Megatron's queue of saves; None before the first."""
    return getattr(sys.modules.get(QUEUE), "_async_calls_queue", None)


def _persistent_processes(queue: Any) -> Iterator[Any]:
    """Yield the process that writes this rank's saves one after the other, where there is one."""
    if queue is None:
        return
    processes = [caller.process for caller in _persistent_callers(queue)]
    # mcore from 0.17 on: there before the first save.
    kind = getattr(sys.modules[type(queue).__module__], "PersistentAsyncCaller", None)
    processes.append(getattr(kind, "_persistent_process", None))
    yield from {id(process): process for process in processes if process is not None}.values()


def _persistent_callers(queue: Any) -> Iterator[Any]:
    """Yield what talks to that process."""
    for owner, name in (
        (queue, "persistent_caller"),  # nvrx; mcore before 0.17
        (type(queue), "_persistent_caller"),
        (type(queue), "_warmup_persistent_caller"),
    ):
        caller = getattr(owner, name, None)
        if caller is not None:
            yield caller


def _has_written(queue: Any) -> bool:
    """Whether the oldest save in flight was written before the process ended."""
    caller = queue.async_calls[0].async_caller
    answers = getattr(caller, "comp_q", None) or getattr(caller, "_persistent_comp_q", None)
    if getattr(caller, "cur_item", None) is not None or answers is None:
        return True
    return not answers.empty()


def _highest(value: int) -> int:
    """Return the highest value that any rank has: hosts hear of a change at different moments."""
    found = torch.tensor([value], device=torch.cuda.current_device())
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    return int(found.item())
