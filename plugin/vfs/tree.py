"""The one tree of a job: its model, its generations and its data sets.

    /model            a link to the model of the newest generation
    /generations/<n>  model/..., ledger.json
    /dataset/<name>   source/..., dp-<r>-of-<d>/...

The content of a path below ``/generations`` or ``/dataset`` never changes; ``/model`` leads
elsewhere once there is a newer generation, and an open file stays as it was.
"""

import errno
import json
import logging
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from scalai.core.dataset.table import DATASET, DatasetTable
from scalai.core.errors import MessageError, ScalaiError, UsageError
from scalai.core.jsonable import Json
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import Box
from scalai.runtime.codec import convert
from scalai.runtime.consumption import LEDGER
from scalai.store.generation import UnitedGeneration, load_generation
from scalai.store.places import MANIFEST, check_job, default_store_dir, find_generations
from scalai.vfs.dataset import DatasetFolder, DatasetSpec, ViewedJob
from scalai.vfs.model_files import TensorElements, model_folder, pieces_of
from scalai.vfs.nodes import ListedFolder, Node, TreeLink, in_memory, listed, missing
from scalai.vfs.pins import Pins

_Known = tuple[tuple[tuple[Path, int, int], ...], UnitedGeneration, ListedFolder]
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
log = logging.getLogger(__name__)
KEPT = 4
"""Generations whose manifests stay in memory."""


class GenerationsFolder:
    """A folder of generations, read anew at every look: the job goes on meanwhile.

    Args:
        directory: As of ``find_generations``: of a host or a job in a store, or a durable one;
            None: the job has no state.
        pins: Keep a generation while its files are open.
    """

    mtime = 0.0

    def __init__(self, directory: Path | None, pins: Pins) -> None:
        self.directory, self._pins = directory, pins
        self._mutex = threading.Lock()
        self._known: dict[int, _Known] = {}
        self._seen: dict[int, tuple[object, int]] = {}

    def numbers(self) -> list[int]:
        """Present generations, oldest first."""
        return [] if self.directory is None else list(find_generations(self.directory))

    def names(self) -> Iterable[str]:
        return [str(number) for number in self.numbers()]

    def child(self, name: str) -> Node:
        if not _NUMBER.fullmatch(name):
            raise missing(name, "generations have numbers")
        return self._load(int(name))[2]

    def newest(self) -> UnitedGeneration | None:
        """Newest generation; None: there is none. Raises ``OSError``: it cannot be read."""
        numbers = self.numbers()
        return self._load(numbers[-1])[1] if numbers else None

    def _load(self, number: int) -> _Known:
        """A generation and its folder. Raises ``OSError``."""
        found = {} if self.directory is None else find_generations(self.directory)
        if number not in found:
            raise missing(str(number), f"the job has generations {list(found)}")
        try:
            state = tuple(_written(path) for path in found[number])
            with self._mutex:
                if number in self._known and self._known[number][0] == state:
                    return self._known[number]
            generation = load_generation(found[number], number)
        except FileNotFoundError as error:
            raise missing(str(number), "it went while it was opened") from error
        except ScalaiError as error:
            raise OSError(errno.EIO, f"generation {number} cannot be read: {error}") from error
        self._check_same(generation)
        known = (state, generation, self._folder(generation, max(each[-1] for each in state) / 1e9))
        with self._mutex:
            self._known[number] = known
            while len(self._known) > KEPT:
                del self._known[next(iter(self._known))]
        return known

    def _check_same(self, generation: UnitedGeneration) -> None:
        """Refuse a number with another state than before: the kernel's cache, and readers of the
        first one, would mix both."""
        state = (generation.about.get("snapshot"), generation.step)
        if self._seen.setdefault(generation.generation, state) != state:
            raise OSError(
                errno.EIO,
                f"generation {generation.generation} is another state than before: the job was "
                "begun anew under the same name. Mount it again.",
            )

    def _folder(self, generation: UnitedGeneration, mtime: float) -> ListedFolder:
        tensors = {tensor.name: tensor for part in generation.hosts
                   for tensor in part.collection.tensors}  # fmt: skip
        model = model_folder(tensors.values(), mtime, self._opener(generation))
        children: dict[str, Callable[[], Node]] = {"model": lambda: model}
        ledger = generation.scalars.get(LEDGER)
        if ledger is not None:
            text = json.dumps(ledger, indent=1).encode() + b"\n"
            children["ledger.json"] = lambda: in_memory(text, mtime)
        return ListedFolder(children, mtime)

    def _opener(self, generation: UnitedGeneration) -> Callable[[Tensor, Box], TensorElements]:
        def opened(tensor: Tensor, box: Box) -> TensorElements:
            pin = self._pins.acquire(generation)
            try:
                return TensorElements(tensor, box, pieces_of(generation, tensor.name), pin)
            except BaseException:
                pin.release()
                raise

        return opened


def _written(directory: Path) -> tuple[Path, int, int]:
    """Identity of a part; it changes when the part grows."""
    status = (directory / MANIFEST).stat()
    return directory, status.st_ino, status.st_mtime_ns


class Tree:
    """The tree of a job, for one process.

    Args:
        directory: Directory of its generations; None: it has none.
        given: Data sets by this process. They overrule those of the job's newest generation.
        pins: Keep open generations.

    Attributes:
        is_new: The job had no generation yet, and no table.
        told: Table of the job.
        table: Both tables in one.
        left_out: Reasons why data sets of the job are not shown, by name.

    Raises:
        UsageError: A data set of ``given`` is not there, or both tables contradict each other.
    """

    mtime = 0.0

    def __init__(
        self, directory: Path | None, given: DatasetTable | None = None, pins: Pins | None = None
    ) -> None:
        self.pins = pins or Pins()
        self.generations = GenerationsFolder(directory, self.pins)
        self.left_out: dict[str, str] = {}
        self.is_new = not self.generations.numbers()
        self.told = _told_by(self._newest())
        self.table = (given or DatasetTable()).over(self.told).checked()
        tokens, seeds = self.table.record_tokens, self.table.shuffle
        job = ViewedJob(self.table.batches, self._dp, self._consumed)
        folders: dict[str, Node] = {}
        for name, url in self.table.sources.items():
            spec = DatasetSpec(name, url, tokens.get(name), seeds.get(name))
            try:
                folders[name] = DatasetFolder(spec, job)
            except UsageError as error:
                if given is not None and name in given.sources:
                    raise
                log.warning("event=source_left_out dataset=%s: %s", name, error)
                self.left_out[name] = str(error)
        self._dataset = listed(folders)

    def names(self) -> Iterable[str]:
        return [*(["model"] if self.generations.numbers() else []), "generations", "dataset"]

    def child(self, name: str) -> Node:
        if name == "generations":
            return self.generations
        if name == "dataset":
            return self._dataset
        numbers = self.generations.numbers() if name == "model" else []
        if not numbers:
            raise missing(name)
        return TreeLink(f"generations/{numbers[-1]}/model", 0.0)

    def _newest(self) -> UnitedGeneration | None:
        """Newest generation; None also where it cannot be read: the data sets can."""
        try:
            return self.generations.newest()
        except OSError as error:
            log.warning("event=no_state: %s", error)
            return None

    def _dp(self) -> int | None:
        newest = self._newest()
        return None if newest is None else int(newest.about.get("degrees", {}).get("dp", 1))

    def _consumed(self) -> int:
        newest = self._newest()
        return 0 if newest is None else int(newest.about.get("consumed_samples") or 0)

    def close(self) -> None:
        """Release all that is open."""
        self.pins.close()


def read_table(values: Json) -> DatasetTable:
    """Table from plain values. Raises ``UsageError`` for wrong ones."""
    try:
        return convert(values, DatasetTable)
    except MessageError as error:
        raise UsageError(f"data sets cannot be named so: {error.__cause__}") from error


def _told_by(newest: UnitedGeneration | None) -> DatasetTable:
    """Table of a job's data sets; empty where this release cannot read it."""
    try:
        return read_table({} if newest is None else newest.about.get(DATASET, {})).checked()
    except UsageError as error:
        log.warning("event=table_ignored: what the job says of its data sets: %s", error)
        return DatasetTable()


def find_job(what: str, store_dir: Path | None, *, may_be_new: bool) -> Path:
    """Directory of a job's generations: ``what`` is a path, or the name of a job with a store on
    this machine.

    Args:
        store_dir: Directory of stores, if not the usual one.
        may_be_new: A job may have no store yet.

    Raises:
        UsageError: There is no such directory or job.
    """
    path = Path(what)
    if "/" in what or path.is_dir():
        if not path.is_dir():
            raise UsageError(f"{path} is no directory. Name a job, or a directory of generations.")
        return path.absolute()
    return find_store(what, store_dir, may_be_new=may_be_new)


def find_store(job: str, store_dir: Path | None, *, may_be_new: bool) -> Path:
    """Directory of a job's store on this machine; arguments and errors as of ``find_job``."""
    folder = (store_dir or default_store_dir()) / check_job(job)
    if folder.is_dir() or may_be_new:
        return folder
    raise UsageError(
        f"no job {job!r} has a store here (looked for {folder}). Name it by --store-dir, or name "
        "a directory."
    )
