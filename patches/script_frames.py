"""Where in the user's script something is done: frames of its own files, and lines to change."""

import ast
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

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
    """Whether a frame's code belongs to a framework or to the hooks, and not to a script."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in frameworks


def script_place() -> str:
    """Return the line of the user's script that has led here, ``train.py:41``; empty: none has."""
    frame = next(script_frames(sys._getframe(1)), None)
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def is_own_file(name: str) -> bool:
    """Whether a file belongs to no installed package and not to Python itself."""
    is_installed = any(folder in Path(name).parts for folder in _LIBRARIES)
    return not name.startswith(("<", _STANDARD)) and not is_installed


class Names:
    """How a file's code binds names.

    Attributes:
        lines: By name, also ``self.name``, the line that makes it: where it is assigned first, or
            the loop that counts it.
        added_to: Those that something is added to.
        enumerated: Those that count the rounds of a loop over something.
        deciding: Those that are compared with something, or divided by it with a remainder.
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
    """Read the function of a file that begins at a line; where none does, the whole file. One that
    cannot be read binds nothing."""
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
