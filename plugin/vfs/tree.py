"""The one tree of a job: its model, its generations and its data sets.

    /model            a link to the model of the newest generation
    /generations/<n>  model/…, ledger.json
    /dataset/<name>   source/…, dp-<r>-of-<d>/…

So what a path below ``/generations`` or ``/dataset`` shows never changes, and ``/model`` leads
elsewhere once there is a newer generation; what is open stays what it was.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

from scalai.core.dataset.table import DATASET, DatasetTable
from scalai.core.errors import MessageError, UsageError
from scalai.core.jsonable import Json
from scalai.runtime.codec import convert
from scalai.store.generation import Generation
from scalai.store.places import check_job, default_store_dir
from scalai.vfs.dataset import DatasetFolder, DatasetSpec, ViewedJob
from scalai.vfs.generations import Generations
from scalai.vfs.nodes import Link, Node, listed, missing
from scalai.vfs.pins import Pins

log = logging.getLogger(__name__)


class Tree:
    """The tree of a job, for one process.

    Args:
        directory: Where its generations lie; None: it has none.
        given: What this process says of the data sets. It overrules what the job says of them, as
            its newest generation has it now.
        pins: What keeps generations that are open.

    Attributes:
        is_new: Whether the job had no generation yet, and could say nothing.
        told: What the job says of them.
        table: Both.
        left_out: Why data sets are not shown that the job names, and that are not found here.

    Raises:
        UsageError: A data set is not there that this process names, or both contradict each other.
    """

    mtime = 0.0

    def __init__(
        self, directory: Path | None, given: DatasetTable | None = None, pins: Pins | None = None
    ) -> None:
        self.pins = pins or Pins()
        self.generations = Generations(directory, self.pins)
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
        return Link(f"generations/{numbers[-1]}/model", 0.0)

    def _newest(self) -> Generation | None:
        """Return the newest generation, None also where it cannot be read: data sets can."""
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
        """Let go of all that is open."""
        self.pins.close()


def read_table(values: Json) -> DatasetTable:
    """Return the table of plain values. Raises ``UsageError`` where it cannot be."""
    try:
        return convert(values, DatasetTable)
    except MessageError as error:
        raise UsageError(f"data sets cannot be named so: {error.__cause__}") from error


def _told_by(newest: Generation | None) -> DatasetTable:
    """Return what a job says of its data sets. Of what cannot be read here nothing is taken."""
    try:
        return read_table({} if newest is None else newest.about.get(DATASET, {})).checked()
    except UsageError as error:
        log.warning("event=table_ignored: what the job says of its data sets: %s", error)
        return DatasetTable()


def find_job(what: str, store_dir: Path | None, *, may_be_new: bool) -> Path:
    """Return where a job's generations lie: ``what`` is a path, or the name of a job whose store is
    on this machine.

    Args:
        store_dir: Where stores are, if not in their usual place.
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
    """Return where the store of a job on this machine lies; arguments and errors as of
    ``find_job``."""
    folder = (store_dir or default_store_dir()) / check_job(job)
    if folder.is_dir() or may_be_new:
        return folder
    raise UsageError(
        f"no job {job!r} has a store here (looked for {folder}). Name it by --store-dir, or name "
        "a directory."
    )
