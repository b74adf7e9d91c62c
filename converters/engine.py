"""What a run of ``reshard`` may use, and what it needs at least."""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import scalai
from scalai.converters.checkpoint import (
    PARAM,
    REPORT_VERSION,
    USER,
    Checkpoint,
    Placed,
    Target,
)
from scalai.converters.checksums import (
    Checked,
    StorageRecords,
    check_records,
    counted,
    find_records,
)
from scalai.converters.consistency import check_samples
from scalai.converters.destination import (
    AUXILIARY,
    auxiliary_bytes,
    check_apart,
    check_free,
    check_room,
    complete,
    finished,
    identify,
    partial_of,
    place_of,
    publish,
    write_auxiliary,
    writing,
)
from scalai.converters.forked import map_forked
from scalai.converters.journal import (
    Done,
    Journal,
    Noted,
    RunPart,
    alone,
    begin,
    gather,
    remove_journals,
)
from scalai.converters.recorded import check_report, is_recorded
from scalai.converters.streaming import CopyJob, Gatherer, run_tasks
from scalai.converters.suspects import refuse_guessed
from scalai.converters.work import Task, Work, batches, plan_work, unused
from scalai.core.errors import (
    MemoryShortError,
    ProofError,
    RefusedError,
    UsageError,
    is_memory_short,
)
from scalai.core.tensors.collection import Collection, split_name
from scalai.core.tensors.fingerprint import VERSION, combine, tensor_fingerprints
from scalai.store.files import write_at

MAX_BUFFER_BYTES = 4 << 20
MIN_BUFFER_BYTES = 1 << 20
WORKER_BYTES = 24 << 20
"""Anonymous memory of a worker beside its buffers, after the fork: measured, rounded up."""
ROW_BYTES, FILE_BYTES = 1400, 2200
"""Of a piece and of a file in the tables of the process that starts the workers: measured."""
BUFFERS = 3
"""Buffers of a worker: what is gathered, what is read back, what a fingerprint widens."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may use: bytes of memory, and processes. ``table_bytes`` of the memory are of the
    process that starts the others (``table_bytes_of``)."""

    memory_bytes: int
    workers: int
    table_bytes: int = 0

    @property
    def least_bytes(self) -> int:
        """The least memory that does."""
        return self.table_bytes + self.workers * (WORKER_BYTES + BUFFERS * MIN_BUFFER_BYTES)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one buffer of a worker.

        Raises:
            UsageError: Memory is too little for that many workers.
        """
        left = self.memory_bytes - self.table_bytes
        each = (left // self.workers - WORKER_BYTES) // BUFFERS
        if each < MIN_BUFFER_BYTES:
            raise UsageError(
                f"--memory of {self.memory_bytes} bytes is too little for {self.workers} workers "
                f"and {self.table_bytes} bytes of tables. Give at least {self.least_bytes}, or "
                "fewer --workers."
            )
        # A power of two, so that a little more or less free memory does not undo a started run.
        return min(1 << (each.bit_length() - 1), MAX_BUFFER_BYTES)


def table_bytes_of(source: Checkpoint, target: Target) -> int:
    """Return how much memory it takes to know what lies where, and what has been done: little, but
    for very many tensors."""
    rows = len(source.placed.collection) + len(target.placed.collection)
    files = len(source.placed.files) + len(target.placed.files)
    return rows * ROW_BYTES + files * FILE_BYTES


WHOLE = RunPart()

Progress = Callable[[int, int], None]
"""Called with the bytes that are on disk and all bytes."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a run would do.

    ``unused`` counts the source's tensors, by kind, that are no tensors of the target: steps that
    it keeps among its scalars, or what it does not carry.
    """

    tensors: int
    read_bytes: int
    write_bytes: int
    peak_bytes: int
    tasks: int
    files: int
    unused: Mapping[str, int]


def look_ahead(source: Checkpoint, target: Target, limits: Limits) -> tuple[Work, Outlook]:
    """Plan a run and say what it would do.

    Raises:
        RefusedError: It would prove states of parameters that they are not known to belong to; or
            as ``plan_work`` does.
    """
    kinds = {split_name(tensor.name)[0] for tensor in target.placed.collection.tensors}
    if not target.keeps_order and kinds - {PARAM, USER}:
        refuse_guessed(
            source,
            "Say the optimizer's order: --args-from FILE with [[deepspeed.group]] and its "
            'parameters (["*"] are all, in the module\'s order; a list of names is in its own), or '
            "with a checkpoint of the job in ZeRO stage 1; on the way to another framework convert "
            "it to deepspeed_zero1 so, first.",
        )
    work = plan_work(source, target, limits.buffer_bytes)
    return work, Outlook(
        tensors=len(target.placed.collection.tensors),
        read_bytes=work.size_bytes,
        write_bytes=sum(file.size_bytes for file in target.placed.files) + auxiliary_bytes(target),
        peak_bytes=limits.table_bytes
        + limits.workers * (WORKER_BYTES + BUFFERS * limits.buffer_bytes),
        tasks=len(work.tasks),
        files=len(target.placed.files) + len(target.auxiliary),
        unused={kind: len(names) for kind, names in unused(source, target).items()},
    )


def reshard(
    source: Checkpoint,
    target: Target,
    destination: Path,
    limits: Limits,
    *,
    overwrite: bool = False,
    part: RunPart = WHOLE,
    progress: Progress = lambda done, total: None,
) -> Mapping[str, Any] | None:
    """Write ``target``, or a part of it, to ``destination``.

    Returns:
        The report that is also left in the destination as ``scalai.json``: fingerprints of all
        tensors, sizes, seconds. None: this part is done, and another one will finish.

    Raises:
        UsageError: The destination exists and ``overwrite`` is not given, or lies in the source; or
            the parts were not started with the same arguments.
        RefusedError: Too little room; the source is not whole.
        ProofError: What was read back is not what was read; or the source contradicts itself or the
            proof that a conversion left beside it.
        PeerError: A worker died, or could not be started; or another process writes this
            destination.
        MemoryShortError: The workers find less memory than ``limits`` says.
    """
    began = time.monotonic()
    destination = place_of(destination)
    check_apart(source, destination)
    if part.is_whole:
        check_free(destination, overwrite)
    work, outlook = look_ahead(source, target, limits)
    check_samples(source)
    identity = _identity(source, target, limits.buffer_bytes)
    files = part.files([file.size_bytes for file in target.placed.files])
    partial = partial_of(destination)
    with writing(destination):
        destination.parent.mkdir(parents=True, exist_ok=True)
        with alone(destination):
            before = None if part.is_whole else finished(destination, identity)
            if before is not None:
                return before
            check_free(destination, overwrite)
            check_room(partial, outlook.write_bytes)
            journal = begin(partial, identity, part)
        with journal:
            resumed = len(journal.done)
            _prepare(partial, target, files)
            records = find_records(source, work)
            with Gatherer(work, source.directory) as gatherer:
                job = CopyJob(work, gatherer, partial, counted(work, records))
                _run(job, files, journal, limits, progress)
            with alone(destination):
                done = gather(partial, journal, len(work.tasks))
                if done is None:
                    journal.close()
                    return None
                rows, report = _prove(source, target, partial, limits, records, done, identity)
                report |= {"bytes": outlook.write_bytes, "resumed_tasks": resumed}
                report["seconds"] = round(time.monotonic() - began, 3)
                complete(partial, target, rows, report)
                publish(partial, destination, overwrite)
                remove_journals(destination)
    return report


def _prove(
    source: Checkpoint,
    target: Target,
    partial: Path,
    limits: Limits,
    records: StorageRecords,
    done: Done,
    identity: str,
) -> tuple[npt.NDArray[np.uint64], dict[str, Any]]:
    """Write what is carried as it is, and compare what was read with what is known of it.

    Returns:
        The fingerprint of each row of the target, and the report.

    Raises:
        RefusedError: The source was changed meanwhile.
        ProofError: As ``_check_read``.
    """
    rows = _row_fingerprints(done, len(target.placed.collection))
    report = {
        **_report(source, target, rows),
        AUXILIARY: write_auxiliary(partial, target),
        "conversion": identity,
    }
    if _identity(source, target, limits.buffer_bytes) != identity:
        raise _changed(source)
    report["checksums"] = _check_read(source, records, done, report, limits, partial)
    return rows, report


def _check_read(
    source: Checkpoint,
    records: StorageRecords,
    done: Done,
    report: Mapping[str, Any],
    limits: Limits,
    partial: Path,
) -> Mapping[str, int]:
    """Compare what was read with what the source's files note of it; return what they did.

    Raises:
        ProofError: It is not what was saved. Then ``partial`` is gone: a file that is copied anew
            may have the times of the damaged one, and the same command would go on from it.
    """
    runs = (run for recorded in done.values() for run in recorded.runs)
    prints = {name: int(value, 16) for name, value in report["fingerprints"].items()}
    try:
        check_records(source, records, runs, limits.workers)
        check_report(source, prints)
    except ProofError:
        shutil.rmtree(partial, ignore_errors=True)  # what failed matters more
        raise
    without = records.unchecked, len(records.bare_files)
    return asdict(Checked(records.checked, *without, is_recorded(source, prints)))


def _changed(source: Checkpoint) -> RefusedError:
    return RefusedError(
        f"{source.directory} was changed while it was read. Wait until the save or the copy has "
        "ended, and run the same command again."
    )


def _identity(source: Checkpoint, target: Target, buffer_bytes: int) -> str:
    """Return a digest of all that decides which bytes go where, and how they are proven."""
    digest = hashlib.sha256(f"{buffer_bytes} {VERSION}".encode())
    for file in source.placed.files:
        stat = None if file.content is not None else (source.directory / file.path).stat()
        when = (stat.st_size, stat.st_mtime_ns) if stat else file.content
        digest.update(repr((file.path, when)).encode())
    for placed in (source.placed, target.placed):
        _add_placed(digest, placed)
    for number in sorted(target.fixed):
        for at, data in target.fixed[number]:
            digest.update(repr((number, at)).encode() + data)
    for auxiliary in target.auxiliary:
        digest.update(identify(auxiliary))
    return digest.hexdigest()


def _add_placed(digest: Any, placed: Placed) -> None:
    digest.update(repr([(file.path, file.size_bytes) for file in placed.files]).encode())
    digest.update(repr(placed.collection.tensors).encode())
    columns = placed.collection.tensor, placed.collection.offset, placed.collection.shape
    for column in (*columns, placed.file, placed.begin, placed.stride, placed.rounded()):
        digest.update(np.ascontiguousarray(column).tobytes())


def _prepare(partial: Path, target: Target, files: Iterable[int]) -> None:
    """Make files in their sizes, with the bytes that are known."""
    for number in files:
        file = target.placed.files[number]
        path = partial / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            os.ftruncate(descriptor, file.size_bytes)
            for at, data in target.fixed.get(number, ()):
                write_at(descriptor, memoryview(data), at)
        finally:
            os.close(descriptor)


def _run(
    job: CopyJob, files: Iterable[int], journal: Journal, limits: Limits, progress: Progress
) -> None:
    """Do the tasks of these files that the journal does not know."""
    chosen = set(files)
    tasks = [task for task in job.work.tasks if task.file in chosen]
    open_ = [task for task in tasks if task.number not in journal.done]
    total = sum(task.size_bytes for task in tasks)
    done = total - sum(task.size_bytes for task in open_)
    progress(done, total)

    def run(batch: Sequence[Task]) -> dict[int, Noted]:
        return run_tasks(job, batch)

    try:
        for batch, rows in map_forked(run, batches(open_, limits.workers), limits.workers):
            journal.add(rows)
            done += sum(task.size_bytes for task in batch)
            progress(done, total)
    except (MemoryError, MemoryShortError, OSError) as error:
        if is_memory_short(error):
            raise MemoryShortError(
                f"memory ran out: {limits.workers} workers with --memory of {limits.memory_bytes} "
                "bytes find less here (see `ulimit -d -v`, and the limit of this container). What "
                "is done stays: run the same command again with a smaller --memory or fewer "
                "--workers."
            ) from error
        assert isinstance(error, OSError)
        raise RefusedError(
            f"{job.destination} cannot be written, or {job.gatherer.files.directory} not be read "
            f"({error.strerror}). Repair that and run the same command again to go on."
        ) from error


def _row_fingerprints(done: Done, rows: int) -> npt.NDArray[np.uint64]:
    totals = [0] * rows
    for task in done.values():
        for row, value in task.rows.items():
            totals[row] = combine((totals[row], value))
    return np.array(totals, dtype=np.uint64)


def _report(source: Checkpoint, target: Target, rows: npt.NDArray[np.uint64]) -> dict[str, Any]:
    once = _once(target.placed.collection)
    prints = tensor_fingerprints(target.placed.collection.select(once), rows[once])
    return {
        "format": "scalai-reshard",
        "version": REPORT_VERSION,
        "scalai": scalai.__version__,
        "source": {"path": str(source.directory), "layout": source.layout},
        "layout": target.layout,
        "step": source.values.step,
        "notes": list(target.notes),
        "fingerprint_version": VERSION,
        "fingerprints": {name: f"{value:016x}" for name, value in sorted(prints.items())},
    }


def _once(collection: Collection) -> npt.NDArray[np.intp]:
    """Return the rows that hold every tensor once: its whole, where a layout keeps that beside
    parts of it (ZeRO's fp32 weights)."""
    numel = np.array([tensor.numel for tensor in collection.tensors], dtype=np.int64)
    is_whole = collection.numel() == numel[collection.tensor]
    has_whole = np.bincount(collection.tensor[is_whole], minlength=len(numel)) > 0
    return np.flatnonzero(is_whole | ~has_whole[collection.tensor])
