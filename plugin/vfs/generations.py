"""The generations of a job as folders: ``<n>/model/…`` and ``<n>/ledger.json``."""

import errno
import json
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from scalai.core.errors import ScalaiError
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import Box
from scalai.runtime.consumption import LEDGER
from scalai.store.generation import Generation, load_generation
from scalai.store.places import MANIFEST, find_generations
from scalai.vfs.array_files import Elements
from scalai.vfs.model import model_folder
from scalai.vfs.nodes import Listed, Node, in_memory, missing
from scalai.vfs.pins import Pins
from scalai.vfs.tensors import TensorElements, pieces_of

_Known = tuple[tuple[tuple[Path, int, int], ...], Generation, Listed]
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
KEPT = 4
"""Generations whose manifests stay in memory."""


class Generations:
    """A folder of generations, read anew at every look: the job goes on meanwhile.

    Args:
        directory: As of ``find_generations``: of a host or a job in a store, or a durable one;
            None: of a job that has no state.
        pins: What keeps a generation while its files are open.
    """

    mtime = 0.0

    def __init__(self, directory: Path | None, pins: Pins) -> None:
        self.directory, self._pins = directory, pins
        self._mutex = threading.Lock()
        self._known: dict[int, _Known] = {}
        self._seen: dict[int, tuple[object, int]] = {}

    def numbers(self) -> list[int]:
        """Return the generations that are there, oldest first."""
        return [] if self.directory is None else list(find_generations(self.directory))

    def names(self) -> Iterable[str]:
        return [str(number) for number in self.numbers()]

    def child(self, name: str) -> Node:
        if not _NUMBER.fullmatch(name):
            raise missing(name, "generations have numbers")
        return self._load(int(name))[2]

    def newest(self) -> Generation | None:
        """Return the newest generation, None where there is none. Raises ``OSError`` where it
        cannot be read."""
        numbers = self.numbers()
        return self._load(numbers[-1])[1] if numbers else None

    def _load(self, number: int) -> _Known:
        """Return a generation and its folder. Raises ``OSError``."""
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

    def _check_same(self, generation: Generation) -> None:
        """Refuse a number that meant another state before: who has read that one, and the kernel
        with its cache, would mix them."""
        state = (generation.about.get("snapshot"), generation.step)
        if self._seen.setdefault(generation.generation, state) != state:
            raise OSError(
                errno.EIO,
                f"generation {generation.generation} is another state than before: the job was "
                "begun anew under the same name. Mount it again.",
            )

    def _folder(self, generation: Generation, mtime: float) -> Listed:
        tensors = {tensor.name: tensor for part in generation.hosts
                   for tensor in part.collection.tensors}  # fmt: skip
        model = model_folder(tensors.values(), mtime, self._opener(generation))
        children: dict[str, Callable[[], Node]] = {"model": lambda: model}
        ledger = generation.scalars.get(LEDGER)
        if ledger is not None:
            text = json.dumps(ledger, indent=1).encode() + b"\n"
            children["ledger.json"] = lambda: in_memory(text, mtime)
        return Listed(children, mtime)

    def _opener(self, generation: Generation) -> Callable[[Tensor, Box], Elements]:
        def opened(tensor: Tensor, box: Box) -> Elements:
            pin = self._pins.acquire(generation)
            try:
                return TensorElements(tensor, box, pieces_of(generation, tensor.name), pin)
            except BaseException:
                pin.release()
                raise

        return opened


def _written(directory: Path) -> tuple[Path, int, int]:
    """Return what tells a part from itself after it has grown."""
    status = (directory / MANIFEST).stat()
    return directory, status.st_ino, status.st_mtime_ns
