"""Megatron-LM's asynchronous saves (``--async-save``), and the place of a save.

A process of each rank writes, and all ranks together finish the save at the begin of a later step:
only then the tracker file names it. A rank must not leave before; it names the save in flight, and
the change waits while the training goes on.

After a step back, an iteration is saved again. Megatron overwrites its files one by one, while the
tracker may name it. A whole, named checkpoint of the same training stays as it is: the state would
be the same. Anything else is made invisible before its first file is overwritten.

Source: megatron/training/async_utils.py, core/dist_checkpointing/strategies/async_utils.py (0.14 to
0.20), nvidia_resiliency_ext/checkpointing/async_ckpt/core.py (0.4 to 0.6); the used parts are the
same in all.
"""

import atexit
import json
import logging
import secrets
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import wrapt

from scalai.patches.hooking import Args, Call, Kwargs
from scalai.runtime.session import Session
from scalai.store.atomic import replace_file

log = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
"""File under ``--save`` and ``--load`` with the newest checkpoint's iteration."""
JOURNAL = ".scalai-saves.json"
"""File under ``--save`` with the iterations saved by one training."""
KEPT = 16
"""So many of the newest are noted."""
LAST_WRITTEN = (".metadata", "metadata.json")
"""Last files of a save: a checkpoint has both. Source: ``save_state_dict_async_finalize`` and
``metadata_finalize_fn``, megatron/core/dist_checkpointing (0.14 to 0.20)."""


class SavedPlaces:
    """The folders written by one training under ``--save``.

    Attributes:
        run: Identity of the training, over all rounds.
    """

    def __init__(self) -> None:
        self.run = secrets.token_hex(8)

    def is_done(self, job: Any, iteration: int) -> bool:
        """Prepare the place of a save. Collective, by all ranks, before it begins.

        Args:
            job: Megatron-LM's arguments.

        Returns:
            True if this training has saved this iteration already, and nothing is left to do.
        """
        if not _is_in_folders(job):
            return False
        is_done = job.rank == 0 and self._make_ready(Path(job.save), iteration)
        flag = torch.tensor([int(is_done)], device=torch.cuda.current_device())
        torch.distributed.broadcast(flag, src=0)
        return bool(flag.item())

    def _make_ready(self, root: Path, iteration: int) -> bool:
        folder, named = _folder(root, iteration), _named(root)
        saved = self._read(root)
        if named == iteration and iteration in saved and _is_whole(folder):
            log.warning(
                "event=saved_before iteration=%d: this training has saved it, and the tracker "
                "names it; %s stays as it is.", iteration, folder,
            )  # fmt: skip
            return True
        if any(file.exists() for file in _files(folder)):
            if named == iteration:
                _name_another(root, iteration)
            log.warning("event=saved_anew iteration=%d what %s held goes", iteration, folder)
            for file in _files(folder):
                file.unlink(missing_ok=True)
        self._write(root, [*(i for i in saved if i != iteration), iteration][-KEPT:])
        return False

    def _read(self, root: Path) -> list[int]:
        try:
            noted = json.loads((root / JOURNAL).read_text())
        except (OSError, ValueError):
            return []
        return [int(i) for i in noted["iterations"]] if noted.get("run") == self.run else []

    def _write(self, root: Path, iterations: list[int]) -> None:
        root.mkdir(parents=True, exist_ok=True)
        noted = json.dumps({"run": self.run, "iterations": iterations})
        replace_file(root / JOURNAL, noted.encode(), is_durable=False)


def _is_in_folders(job: Any) -> bool:
    """True if a save makes a folder with ``.metadata`` in a local file system."""
    is_sharded = getattr(job, "ckpt_format", None) == "torch_dist"
    return bool(job.save) and is_sharded and "://" not in str(job.save)


def _folder(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}"


def _named(root: Path) -> int | None:
    try:
        text = (root / TRACKER).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in LAST_WRITTEN)


def _name_another(root: Path, iteration: int) -> None:
    """Make the tracker name the newest other whole checkpoint, or nothing."""
    others = [
        int(folder.name.removeprefix("iter_"))
        for folder in root.glob("iter_*")
        if folder.name.removeprefix("iter_").isdigit() and _is_whole(folder)
    ]
    older = max((other for other in others if other != iteration), default=None)
    tracker = root / TRACKER
    if older is None:
        tracker.unlink(missing_ok=True)
    else:
        replace_file(tracker, str(older).encode(), is_durable=False)
    log.warning("event=tracker names=%s while iteration %d is written anew", older, iteration)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a checkpoint, the essential ones first; a person's own files there are not
    touched."""
    yield from (folder / name for name in LAST_WRITTEN)
    yield folder / "common.pt"
    yield from sorted(folder.glob("*.distcp"))


QUEUE = "megatron.training.async_utils"
"""Module with Megatron's queue of saves in ``_async_calls_queue``; it may be None before the first.
"""
LOOK_S = 0.1
"""Interval between looks at a save all ranks wait for, in seconds."""


class AsyncSaves:
    """A rank's saves: the same as every other rank's after the same step."""

    _session: Session | None = None

    def __init__(self) -> None:
        self.places = SavedPlaces()
        self._pending: deque[tuple[int, int]] = deque()
        """Iteration of each save in flight, and the number of its last call in the queue."""
        self._numbered = -1

    def hook(self, training: Any) -> None:
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
        """Watch Megatron's look for finished saves: without waiting before each step, and waiting
        at the end of the training."""
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
        """Wait for saves behind a step, by all ranks, as soon as a change does: if saves overlap or
        follow closely, there may always be one in flight.

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
        )
        finalize(blocking=True)
        log.info("event=saves_ended took_s=%.1f", time.monotonic() - began)

    def leave(self) -> None:
        """End the writing process, which waits for the next save: no save is in flight, or this
        process fails and its begun saves count for nothing."""
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
        """Raise ``RuntimeError`` if the writing process has died with a save in flight, or before
        the next one: Megatron would wait for it, for ever."""
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
    """Yield the process of this rank's saves, if there is one."""
    if queue is None:
        return
    processes = [caller.process for caller in _persistent_callers(queue)]
    # mcore from 0.17 on: there before the first save.
    kind = getattr(sys.modules[type(queue).__module__], "PersistentAsyncCaller", None)
    processes.append(getattr(kind, "_persistent_process", None))
    yield from {id(process): process for process in processes if process is not None}.values()


def _persistent_callers(queue: Any) -> Iterator[Any]:
    """Yield the callers of this process."""
    for owner, name in (
        (queue, "persistent_caller"),  # nvrx; mcore before 0.17
        (type(queue), "_persistent_caller"),
        (type(queue), "_warmup_persistent_caller"),
    ):
        caller = getattr(owner, name, None)
        if caller is not None:
            yield caller


def _has_written(queue: Any) -> bool:
    """True if the oldest save in flight was written before the process ended."""
    caller = queue.async_calls[0].async_caller
    answers = getattr(caller, "comp_q", None) or getattr(caller, "_persistent_comp_q", None)
    if getattr(caller, "cur_item", None) is not None or answers is None:
        return True
    return not answers.empty()


def _highest(value: int) -> int:
    """Return the highest value of all ranks: hosts hear of a change at different moments."""
    found = torch.tensor([value], device=torch.cuda.current_device())
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    return int(found.item())
