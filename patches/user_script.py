"""The user's script: frames and lines of its own files, and its variables.

Counters, running sums, copies of the weights and accumulating objects change with every step, and
are only carried on request. The variables of the functions above a step are compared behind the
first steps of a round; later steps cost nothing.
"""

import ast
import logging
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

log = logging.getLogger(__name__)

_LIBRARIES = ("site-packages", "dist-packages")
_STANDARD = sysconfig.get_path("stdlib")
_OURS = "scalai"
_FRAMEWORKS = frozenset(("accelerate", "deepspeed", "scalai", "torch", "transformers"))


def script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the user's own files, from the innermost one on."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__")).partition(".")[0]
        if module != _OURS and is_own_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def is_of_framework(frame: FrameType, frameworks: frozenset[str] = _FRAMEWORKS) -> bool:
    """True for code of a framework or of the hooks, False for a script's."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in frameworks


def script_place() -> str:
    """Return the calling line of the user's script, ``train.py:41``; empty: none."""
    frame = next(script_frames(sys._getframe(1)), None)
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def is_own_file(name: str) -> bool:
    """True for a file outside installed packages and Python itself."""
    is_installed = any(folder in Path(name).parts for folder in _LIBRARIES)
    return not name.startswith(("<", _STANDARD)) and not is_installed


class Names:
    """How a file's code binds names.

    Attributes:
        lines: By name, also ``self.name``, the line of its first assignment or of its loop.
        added_to: Targets of ``+=`` and the like.
        enumerated: Counters of ``enumerate``.
        deciding: Names in comparisons, or left of ``%``.
    """

    def __init__(self, tree: ast.AST) -> None:
        self.lines: dict[str, int] = {}
        self.added_to: set[str] = set()
        self.enumerated: set[str] = set()
        self.deciding: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.AugAssign):
                self.added_to.add(_name(node.target))
            elif isinstance(node, ast.Compare):
                self.deciding.update(map(_name, ast.walk(node)))
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                self.deciding.update(map(_name, ast.walk(node.left)))
            elif isinstance(node, ast.For):
                self._bind(node.target, node.lineno)
                called = [call.func for call in ast.walk(node.iter) if isinstance(call, ast.Call)]
                if any(isinstance(f, ast.Name) and f.id == "enumerate" for f in called):
                    first = node.target.elts[0] if isinstance(node.target, ast.Tuple) else None
                    self.enumerated.add("" if first is None else _name(first))
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self._bind(target, node.lineno)
            elif isinstance(node, ast.AnnAssign):
                self._bind(node.target, node.lineno)

    def _bind(self, target: ast.expr, line: int) -> None:
        for part in target.elts if isinstance(target, ast.Tuple | ast.List) else (target,):
            name = _name(part)
            self.lines[name] = min(line, self.lines.get(name, line))


@cache
def names_of(path: str, first_line: int = 0) -> Names:
    """Read the function at a line of a file, or else the whole file. An unreadable file binds
    nothing."""
    try:
        tree = ast.parse(Path(path).read_text())
    except (OSError, SyntaxError, ValueError):
        return Names(ast.Module([], []))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if first_line in (node.lineno, *(part.lineno for part in node.decorator_list)):
                return Names(node)
    return Names(tree)


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return ""


LOOKS = 3
"""Number of steps with a comparison of variables."""
_KEEPERS = frozenset(("torchmetrics", "evaluate", "torch_ema", "ema_pytorch", "timm"))
"""Packages with accumulating objects."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Tensors readable on one rank alone; other classes may wait for all ranks."""
_CARRIED = (torch.optim.Optimizer, LRScheduler, DataLoader, Dataset, Sampler)

Variable = tuple[str, int, str]
"""The file, the first line of the function, the name."""
Digest = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class KeptVariable:
    """A variable changed by every step.

    Attributes:
        name: Its name in the script, ``steps`` or ``self.steps``.
        place: The line of its origin, ``train.py:41``.
        is_count: A whole number with equal growth each step.
        is_fresh: Such a number, begun in this round.
        is_enumerated: A counter of ``enumerate``.
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
        """Keeps identities unique."""

    @property
    def is_done(self) -> bool:
        return len(self._looks) == LOOKS

    def look(
        self, frame: FrameType | None, engine: Any, keepers: Sequence[Any] = ()
    ) -> list[KeptVariable]:
        """Look at the script's variables behind a step, and at the attributes of ``keepers``.
        Returns the changing ones behind the last of ``LOOKS`` steps."""
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
    """Return the digest of any script's value; None: unreadable."""
    try:
        return _digest(value, name, names, known)
    except Exception as error:  # of any class that a script uses; a look must not end its training
        log.debug("event=own_state unread=%s detail=%r", name, error)
        return None


def _digest(value: Any, name: str, names: Names, known: set[int]) -> Digest | None:
    """Return a digest to detect changes of a value; None: the value accumulates nothing."""
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
    """Return an element of the first and of the last readable tensor."""
    some = [t for t in tensors if type(t) in _PLAIN and t.layout is torch.strided and t.numel()]
    return tuple(t.detach()[(0,) * t.ndim].item() for t in (some[0], some[-1])) if some else ()


def _kept(variable: Variable, looks: list[Digest]) -> KeptVariable | None:
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
    return KeptVariable(name, place, is_count, is_fresh, name in names.enumerated)


def _file_of(kind: type) -> str:
    """Return the file of a class; ``<unknown>`` for none."""
    module = sys.modules.get(kind.__module__)
    return str(getattr(module, "__file__", None) or "<unknown>")
