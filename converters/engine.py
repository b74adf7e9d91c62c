"""Fills a target from a source: streams in bounded memory, survives kills, proves its output.

Everything is written in a directory beside the destination, ``.<name>.partial``, with a journal of
the tasks on disk; a rename at the end makes it the destination. The same command continues a killed
run; several hosts share the work as parts (``journal``).
"""

import hashlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
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
    CheckpointTarget,
    PlacedTensors,
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
from scalai.converters.streaming import CopyJob, Gatherer, make_file, run_tasks
from scalai.converters.suspects import refuse_guessed
from scalai.converters.work import Task, Work, batches, plan_work, unused
from scalai.core.errors import (
    MemoryShortError,
    ProofError,
    RefusedError,
    ScalaiError,
    UsageError,
    is_memory_short,
)
from scalai.core.tensors.collection import Collection, split_name
from scalai.core.tensors.fingerprint import VERSION, combine, tensor_fingerprints

MAX_BUFFER_BYTES = 4 << 20
MIN_BUFFER_BYTES = 1 << 20
WORKER_BYTES = 24 << 20
"""Anonymous memory of a worker beside its buffers, after the fork: measured, rounded up."""
ROW_BYTES, FILE_BYTES = 1400, 2200
"""Memory of a piece and of a file in the tables of the parent process: measured."""
BUFFERS = 3
"""Buffers of a worker: for gathering, for reading back, for the wide numbers of a fingerprint."""

WHOLE = RunPart()

Progress = Callable[[int, int], None]
"""Called with the bytes on disk and all bytes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of memory and processes of a run. ``table_bytes`` of the memory belong to the parent
    process (``table_bytes_of``)."""

    memory_bytes: int
    workers: int
    table_bytes: int = 0

    @property
    def least_bytes(self) -> int:
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


def table_bytes_of(source: Checkpoint, target: CheckpointTarget) -> int:
    """Return the bytes of the tables of pieces and finished tasks: few, except for very many
    tensors."""
    rows = len(source.placed.collection) + len(target.placed.collection)
    files = len(source.placed.files) + len(target.placed.files)
    return rows * ROW_BYTES + files * FILE_BYTES


@dataclass(frozen=True, slots=True)
class ReshardOutlook:
    """Sizes of a run before it begins.

    ``unused`` counts the source's tensors, by kind, without a tensor in the target: steps among the
    target's scalars, or state outside the target's layout.
    """

    tensors: int
    read_bytes: int
    write_bytes: int
    peak_bytes: int
    tasks: int
    files: int
    unused: Mapping[str, int]


class Conversion:
    """One source, one target and one destination; owns the run from plan to proof."""

    def __init__(
        self,
        source: Checkpoint,
        target: CheckpointTarget,
        destination: Path,
        limits: Limits,
        *,
        overwrite: bool = False,
        part: RunPart = WHOLE,
    ) -> None:
        self.source, self.target, self.limits = source, target, limits
        self._named, self._overwrite, self._part = destination, overwrite, part

    @cached_property
    def work(self) -> Work:
        """The checked plan.

        Raises:
            RefusedError: It would prove states of parameters without knowing their owners; or as
                ``plan_work``.
        """
        target = self.target
        kinds = {split_name(tensor.name)[0] for tensor in target.placed.collection.tensors}
        if not target.keeps_order and kinds - {PARAM, USER}:
            refuse_guessed(
                self.source,
                "Say the optimizer's order: --args-from FILE with [[deepspeed.group]] and its "
                'parameters (["*"] are all, in the module\'s order; a list of names is in its '
                "own), or with a checkpoint of the job in ZeRO stage 1; on the way to another "
                "framework convert it to deepspeed_zero1 so, first.",
            )
        return plan_work(self.source, target, self.limits.buffer_bytes)

    @property
    def outlook(self) -> ReshardOutlook:
        """Sizes of the run. Raises as ``work``."""
        target, limits = self.target, self.limits
        auxiliary_bytes = sum(file.size_bytes for file in target.auxiliary)
        return ReshardOutlook(
            tensors=len(target.placed.collection.tensors),
            read_bytes=self.work.size_bytes,
            write_bytes=sum(file.size_bytes for file in target.placed.files) + auxiliary_bytes,
            peak_bytes=limits.table_bytes
            + limits.workers * (WORKER_BYTES + BUFFERS * limits.buffer_bytes),
            tasks=len(self.work.tasks),
            files=len(target.placed.files) + len(target.auxiliary),
            unused={kind: len(names) for kind, names in unused(self.source, target).items()},
        )

    def run(self, progress: Progress = lambda done, total: None) -> Mapping[str, Any] | None:
        """Write the target, or this part of it, to the destination. Blocks until it is on disk.

        Returns:
            The report, also left in the destination as ``scalai.json``: fingerprints of all
            tensors, sizes, seconds. None: this part is done, and another one will finish.

        Raises:
            UsageError: The destination exists without ``overwrite``, or lies in the source; or the
                parts were not started with the same arguments.
            RefusedError: Too little room; the source is not whole.
            ProofError: Bytes read back differ from bytes read; or the source contradicts itself or
                the report that a conversion left beside it.
            PeerError: A worker died, or could not be started; or another process writes this
                destination.
            MemoryShortError: The workers find less memory than ``limits`` says.
        """
        began = time.monotonic()
        destination = place_of(self._named)
        check_apart(self.source, destination)
        if self._part.is_whole:
            check_free(destination, self._overwrite)
        write_bytes = self.outlook.write_bytes
        check_samples(self.source)
        identity = self._identity()
        partial = partial_of(destination)
        with writing(destination):
            destination.parent.mkdir(parents=True, exist_ok=True)
            with alone(destination):
                before = None if self._part.is_whole else finished(destination, identity)
                if before is not None:
                    return before
                check_free(destination, self._overwrite)
                check_room(partial, write_bytes)
                journal = begin(partial, identity, self._part)
            with journal:
                resumed = len(journal.done)
                records = find_records(self.source, self.work)
                self._copy(partial, journal, records, progress)
                with alone(destination):
                    done = gather(partial, journal, len(self.work.tasks))
                    if done is None:
                        journal.close()
                        return None
                    rows = _row_fingerprints(done, len(self.target.placed.collection))
                    report = self._prove(partial, records, done, rows, identity)
                    report |= {"bytes": write_bytes, "resumed_tasks": resumed}
                    report["seconds"] = round(time.monotonic() - began, 3)
                    complete(partial, self.target, rows, report)
                    publish(partial, destination, self._overwrite)
                    remove_journals(destination)
        return report

    def _identity(self) -> str:
        """Return a digest of everything that decides the bytes, their places and their proof."""
        source, target = self.source, self.target
        digest = hashlib.sha256(f"{self.limits.buffer_bytes} {VERSION}".encode())
        for file in source.placed.files:
            stat = None if file.content is not None else (source.directory / file.path).stat()
            when = (stat.st_size, stat.st_mtime_ns) if stat else file.content
            digest.update(repr((file.path, when)).encode())
            for overlay in file.overlays:
                digest.update(overlay.identity())
        for placed in (source.placed, target.placed):
            _add_placed(digest, placed)
        for number in sorted(target.fixed):
            for at, data in target.fixed[number]:
                digest.update(repr((number, at)).encode() + data)
        for auxiliary in target.auxiliary:
            digest.update(identify(auxiliary))
        return digest.hexdigest()

    def _copy(
        self, partial: Path, journal: Journal, records: StorageRecords, progress: Progress
    ) -> None:
        """Do the tasks of this part's files that are not in the journal."""
        target, limits = self.target, self.limits
        files = self._part.files([file.size_bytes for file in target.placed.files])
        chosen = set(files)
        tasks = [task for task in self.work.tasks if task.file in chosen]
        lost = {n for n in chosen if not (partial / target.placed.files[n].path).exists()}
        unmade = _files_of_one_task(tasks)
        for number in chosen - unmade:
            os.close(make_file(partial, target.placed.files[number], target.fixed.get(number, ())))
        open_ = [task for task in tasks if task.number not in journal.done or task.file in lost]
        total = sum(task.size_bytes for task in tasks)
        done = total - sum(task.size_bytes for task in open_)
        progress(done, total)
        with Gatherer(self.work, self.source.directory) as gatherer:
            known = {number: target.fixed.get(number, ()) for number in unmade}
            job = CopyJob(self.work, gatherer, partial, counted(self.work, records), known)

            def run(batch: Sequence[Task]) -> dict[int, Noted]:
                return run_tasks(job, batch)

            try:
                for batch, rows in map_forked(run, batches(open_, limits.workers), limits.workers):
                    journal.add(rows)
                    done += sum(task.size_bytes for task in batch)
                    progress(done, total)
            except (MemoryError, MemoryShortError, OSError) as error:
                raise self._copy_error(partial, error) from error

    def _copy_error(self, partial: Path, error: BaseException) -> ScalaiError:
        limits = self.limits
        if is_memory_short(error):
            return MemoryShortError(
                f"memory ran out: {limits.workers} workers with --memory of {limits.memory_bytes} "
                "bytes find less here (see `ulimit -d -v`, and the limit of this container). What "
                "is done stays: run the same command again with a smaller --memory or fewer "
                "--workers."
            )
        assert isinstance(error, OSError)
        return RefusedError(
            f"{partial} cannot be written, or {self.source.directory} not be read "
            f"({error.strerror}). Repair that and run the same command again to go on."
        )

    def _prove(
        self,
        partial: Path,
        records: StorageRecords,
        done: Done,
        rows: npt.NDArray[np.uint64],
        identity: str,
    ) -> dict[str, Any]:
        """Write the files without tensors, compare the bytes read with their records, and return
        the report.

        Args:
            rows: Fingerprint of each row of the target, [rows].

        Raises:
            RefusedError: The source was changed meanwhile.
            ProofError: As ``_check_read``.
        """
        report = {
            **self._report(rows),
            AUXILIARY: write_auxiliary(partial, self.target),
            "conversion": identity,
        }
        if self._identity() != identity:
            raise RefusedError(
                f"{self.source.directory} was changed while it was read. Wait until the save or "
                "the copy has ended, and run the same command again."
            )
        report["checksums"] = self._check_read(partial, records, done, report)
        return report

    def _check_read(
        self, partial: Path, records: StorageRecords, done: Done, report: Mapping[str, Any]
    ) -> Mapping[str, int]:
        """Compare the bytes read with the records of the source's files; return ``Checked``'s
        fields.

        Raises:
            ProofError: They differ. ``partial`` is then removed: a file copied anew may have the
                times of the damaged one, and the same command would continue from it.
        """
        runs = (run for recorded in done.values() for run in recorded.runs)
        prints = {name: int(value, 16) for name, value in report["fingerprints"].items()}
        try:
            check_records(self.source, records, runs, self.limits.workers)
            check_report(self.source, prints)
        except ProofError:
            shutil.rmtree(partial, ignore_errors=True)  # the first failure matters more
            raise
        without = records.unchecked, len(records.bare_files)
        return asdict(Checked(records.checked, *without, is_recorded(self.source, prints)))

    def _report(self, rows: npt.NDArray[np.uint64]) -> dict[str, Any]:
        source, target = self.source, self.target
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


def _add_placed(digest: Any, placed: PlacedTensors) -> None:
    digest.update(repr([(file.path, file.size_bytes) for file in placed.files]).encode())
    digest.update(repr(placed.collection.tensors).encode())
    columns = placed.collection.tensor, placed.collection.offset, placed.collection.shape
    for column in (*columns, placed.file, placed.begin, placed.stride, placed.rounded()):
        digest.update(np.ascontiguousarray(column).tobytes())


def _files_of_one_task(tasks: Iterable[Task]) -> set[int]:
    """Return the files that their task's worker makes; there may be very many."""
    counts = Counter(task.file for task in tasks)
    return {number for number, count in counts.items() if count == 1}


def _row_fingerprints(done: Done, rows: int) -> npt.NDArray[np.uint64]:
    totals = [0] * rows
    for task in done.values():
        for row, value in task.rows.items():
            totals[row] = combine((totals[row], value))
    return np.array(totals, dtype=np.uint64)


def _once(collection: Collection) -> npt.NDArray[np.intp]:
    """Return the rows with every tensor once: the whole tensor, in layouts that keep it beside
    parts of it (ZeRO's fp32 weights)."""
    numel = np.array([tensor.numel for tensor in collection.tensors], dtype=np.int64)
    is_whole = collection.numel() == numel[collection.tensor]
    has_whole = np.bincount(collection.tensor[is_whole], minlength=len(numel)) > 0
    return np.flatnonzero(is_whole | ~has_whole[collection.tensor])
