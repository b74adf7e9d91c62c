"""The one tree of a job: its model, its generations and its data sets.

    /model            a link to the model of the newest generation
    /generations/<n>  model/…, ledger.json
    /dataset/<name>   source/…, dp-<r>-of-<d>/…

So what a path below ``/generations`` or ``/dataset`` shows never changes, and ``/model`` leads
elsewhere once there is a newer generation; what is open stays what it was.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from scalai.core.errors import UsageError
from scalai.store.generation import Generation
from scalai.store.places import check_job, default_store_dir
from scalai.vfs.cache import BlockCache
from scalai.vfs.dataset import DatasetFolder, DatasetSpec, Job
from scalai.vfs.generations import Generations
from scalai.vfs.nodes import Link, Node, listed, missing
from scalai.vfs.pins import Pins
from scalai.vfs.shares import Order, Sequential

log = logging.getLogger(__name__)


def as_it_lies(name: str, samples: int) -> Order:
    """Return the order in which the samples of a data set lie."""
    return Sequential(samples)


class Tree:
    """The tree of a job, for one process.

    Args:
        directory: Where its generations lie; None: it has none.
        datasets: Its data sets.
        global_batch_size: Samples of a step, for views of replicas.
        cache: Of remote sources.
        pins: What keeps generations that are open.
        order: Makes the order of a data set, by its name and number of samples.

    Raises:
        UsageError: A data set is named twice, or is not there.
    """

    mtime = 0.0

    def __init__(
        self, directory: Path | None, datasets: Sequence[DatasetSpec] = (), *,
        global_batch_size: int | None = None, cache: BlockCache | None = None,
        pins: Pins | None = None, order: Callable[[str, int], Order] = as_it_lies,
    ) -> None:  # fmt: skip
        names = [spec.name for spec in datasets]
        if len(set(names)) < len(names):
            raise UsageError(f"a data set is named twice: {names}. Give each another name.")
        if global_batch_size is not None and global_batch_size < 1:
            raise UsageError(f"--global-batch-size {global_batch_size}: expected 1 or more.")
        self.pins, self._cache = pins or Pins(), cache or BlockCache()
        self.generations = Generations(directory, self.pins)
        job = Job(global_batch_size, order, self._dp, self._consumed)
        folders = {spec.name: DatasetFolder(spec, self._cache, job) for spec in datasets}
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
        self._cache.close()


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
