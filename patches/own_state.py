"""What a script keeps itself and changes with every step, seen in its variables: counters, running
sums, copies of the weights, objects that sum up. None of it is carried unless the script says so.

The variables of the functions that lead to a step are looked at behind the first steps of a round;
then it costs nothing.
"""

import logging
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from scalai.patches.script_frames import Names, is_own_file, names_of, script_frames

log = logging.getLogger(__name__)

LOOKS = 3
"""Steps behind which variables are compared."""
_KEEPERS = frozenset(("torchmetrics", "evaluate", "torch_ema", "ema_pytorch", "timm"))
"""Packages whose objects keep something of a training for a script."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Tensors that can be read on one rank alone: one of a class that is spread would wait for all."""
_CARRIED = (torch.optim.Optimizer, LRScheduler, DataLoader, Dataset, Sampler)

Variable = tuple[str, int, str]
"""The file, the first line of the function, the name."""
Digest = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """A variable that changes with every step.

    Attributes:
        name: As the script calls it, ``steps`` or ``self.steps``.
        place: The line that makes it, ``train.py:41``.
        is_count: A whole number that grows by the same amount each step.
        is_fresh: Such a number that began with this round.
        is_enumerated: One that counts the rounds of a loop over something.
    """

    name: str
    place: str
    is_count: bool
    is_fresh: bool
    is_enumerated: bool = False


class OwnState:
    """The variables of one process's script, looked at behind ``LOOKS`` steps."""

    def __init__(self) -> None:
        self._looks: list[dict[Variable, Digest]] = []
        self._alive: list[Any] = []
        """Else another object could come to lie where one was."""

    @property
    def is_done(self) -> bool:
        return len(self._looks) == LOOKS

    def look(self, frame: FrameType | None, engine: Any, keepers: Sequence[Any] = ()) -> list[Kept]:
        """Look at the script's variables behind a step, and at the attributes of ``keepers``.
        Returns what changes, behind the last of the steps that are looked at."""
        known = {id(parameter) for parameter in engine.module.parameters()}
        found: dict[Variable, Digest] = {}
        for keeper in keepers:
            path = _file_of(type(keeper))
            names = names_of(path)
            for key, value in vars(keeper).items() if is_own_file(path) else ():
                name = f"self.{key}"
                digest = _readable(value, name, names, known) if name in names.lines else None
                if digest is not None:
                    found.setdefault((path, 0, name), digest)
                    self._alive.append(value)
        if keepers:
            frame = None  # what else is the script's leads to the trainer's loop, not through it
        for own in script_frames(frame):
            path, first = own.f_code.co_filename, own.f_code.co_firstlineno
            for name, value in _variables(own):
                digest = _readable(value, name, names_of(path, first), known)
                if digest is not None:
                    found.setdefault((path, first, name), digest)
                    self._alive.append(value)
        self._looks.append(found)
        if not self.is_done:
            return []
        kept = [
            _kept(variable, [look[variable] for look in self._looks])
            for variable in self._looks[0]
            if all(variable in look for look in self._looks)
        ]
        self._looks = [{}] * LOOKS
        self._alive.clear()
        return [one for one in kept if one is not None]


def _variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    own = list(frame.f_locals.items())
    for name, value in own:
        if name == "_" or name.startswith("__") or isinstance(value, ModuleType | type):
            continue
        if name == "self" and is_own_file(_file_of(type(value))):
            if not isinstance(value, _CARRIED):
                yield from ((f"self.{key}", one) for key, one in vars(value).items())
        else:
            yield name, value


def _readable(value: Any, name: str, names: Names, known: set[int]) -> Digest | None:
    """Return the digest of a value, whatever a script has: None where it cannot be read."""
    try:
        return _digest(value, name, names, known)
    except Exception as error:  # of any class that a script uses; a look must not end its training
        log.debug("event=own_state unread=%s detail=%r", name, error)
        return None


def _digest(value: Any, name: str, names: Names, known: set[int]) -> Digest | None:
    """Return what tells a changed value from an unchanged one; None: it is nothing that is kept."""
    if isinstance(value, bool) or value is None or isinstance(value, _CARRIED):
        return None
    if isinstance(value, int):
        is_idle = name in names.enumerated and name not in names.deciding
        return None if is_idle else ("count", value)
    if isinstance(value, float) or (type(value) in _PLAIN and not value.ndim):
        return ("sum", float(value)) if name in names.added_to else None
    if isinstance(value, torch.nn.Module):
        parameters = list(value.parameters())
        is_engines = any(id(parameter) in known for parameter in parameters)
        return None if is_engines or not parameters else ("copy", id(value), *_ends(parameters))
    if isinstance(value, dict) and any(isinstance(one, torch.Tensor) for one in value.values()):
        tensors = [one for one in value.values() if isinstance(one, torch.Tensor)]
        is_engines = all(id(one) in known for one in tensors)
        return None if is_engines else ("copy", id(value), *_ends(tensors))
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    is_keeper = package in _KEEPERS or (package != "scalai" and is_own_file(_file_of(kind)))
    if is_keeper and hasattr(value, "__dict__"):
        return ("object", id(value), *(_inner(one) for one in vars(value).values()))
    return None


def _inner(value: Any) -> Any:
    if isinstance(value, int | float):
        return value
    if isinstance(value, torch.Tensor):
        return _ends([value])
    if isinstance(value, Mapping):
        return len(value), _ends([one for one in value.values() if isinstance(one, torch.Tensor)])
    if isinstance(value, list | deque):
        return len(value)
    return _ends(list(value.parameters())) if isinstance(value, torch.nn.Module) else None


def _ends(tensors: list[Any]) -> tuple[Any, ...]:
    """Return an element of the first and of the last tensor that has any that can be read."""
    some = [t for t in tensors if type(t) in _PLAIN and t.layout is torch.strided and t.numel()]
    return tuple(t.detach()[(0,) * t.ndim].item() for t in (some[0], some[-1])) if some else ()


def _kept(variable: Variable, looks: list[Digest]) -> Kept | None:
    path, first, name = variable
    if not all(before != after for before, after in pairwise(looks)):
        return None
    is_same = len({look[:2] for look in looks}) == 1  # the same object, changed in its place
    if looks[0][0] in ("copy", "object") and not is_same:
        return None
    is_count, is_fresh = looks[0][0] == "count", False
    if is_count:
        values = [look[1] for look in looks]
        step = values[1] - values[0]
        if step <= 0 or values[2] - values[1] != step:
            return None
        is_fresh = abs(values[0] - step) <= step  # counted from 0 in this round, before or behind
    names = names_of(path, first)
    line = names.lines.get(name, names_of(path).lines.get(name))
    place = Path(path).name if line is None else f"{Path(path).name}:{line}"
    return Kept(name, place, is_count, is_fresh, name in names.enumerated)


def _file_of(kind: type) -> str:
    """Return the file that a class is of; of one without, what is no own file."""
    module = sys.modules.get(kind.__module__)
    return str(getattr(module, "__file__", None) or "<unknown>")
