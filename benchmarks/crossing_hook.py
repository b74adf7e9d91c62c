"""What ``crossing.py`` puts into every process of a job, as its ``sitecustomize``: notes of which
functions of Scalai are called, and what they are given.

Notes are taken while the file ``switch`` in the folder that the environment names holds a byte of
1. Each process appends one JSON line to a file of its own for each function, and for each kind of
value that the function receives or returns, when it first does. Every process and thread has it: it
is passed on at a fork, and to threads that are started without ``threading``.
"""

import _thread
import inspect
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

VARIABLE = "SCALAI_CROSSING"
SWITCH = "switch"
MOST_ITEMS = 8
"""Items of a container that are looked at."""
DEPTH = 3
BUFFER_BYTES = 16 << 10
"""From this size on a buffer is taken for the state's bytes: no tensor of the job is smaller that
matters, and no order of the protocol larger."""
BUFFERS = frozenset({"bytes", "bytearray", "memoryview", "mmap", "ndarray", "Tensor", "Parameter"})

STATE = {
    "scalai.core.collection": "Collection Tensor",
    "scalai.core.fingerprint": "Committed",
    "scalai.core.host.actions": "Fetch Seal",
    "scalai.core.host.events": "Fetched Sealed",
    "scalai.core.host.state": "Published",
    "scalai.core.plan": "Copies Fetches Plan Planner",
    "scalai.core.region": "Piece",
    "scalai.core.reports": "Grown Restored Sealed Unproven",
    "scalai.core.source_list": "Pieces SourceList",
    "scalai.core.sources": "Holder Sources",
    "scalai.core.worker_messages": (
        "Publish RankSnapshot RankWritten RankRestored ReadOrder Source WriteOrder"
    ),
    "scalai.launch.agent.data_plane": "Fetch Parts PiecesHeld ReadPieces",
    "scalai.launch.agent.fetch": "Restore",
    "scalai.patches.megatron.optimizer": "Owned",
    "scalai.patches.megatron.shapes": "Part Shard",
    "scalai.runtime.live": "Slot",
    "scalai.runtime.writing": "MappedFile",
    "scalai.store.snapshot": "Snapshot Share",
    "scalai.store.files": "FileLayout",
    "scalai.store.generation": "Generation",
    "scalai.store.manifest": "HostManifest StoredFile",
    "scalai.store.moves": "Fetched FetchList",
    "scalai.store.parts": "StoredRows",
}
"""Where a tensor's state is described, and what holds its bytes."""
MESSAGES = frozenset(
    f"scalai.{module}"
    for module in (
        *("core.actions", "core.commands", "core.events", "core.reports"),
        *("core.host.actions", "core.host.events", "core.worker_messages"),
        *("launch.coordinator.calls", "launch.agent.data_plane"),
    )
)
"""What the two laws are told and say, and what processes tell each other: all classes of these."""

STATE_TYPES = frozenset(f"{module}.{name}" for module in STATE for name in STATE[module].split())


class Kinds:
    """Which kind of thing a value is: ``state``, ``message``, a message with state in it
    (``carried``), or nothing of interest. A container is what it contains."""

    def __init__(self) -> None:
        self._of: dict[type, str] = {}

    def of(self, value: Any, depth: int = DEPTH) -> Iterator[str]:
        """Yield the kinds, of state with the name of its type: ``state scalai.core.plan.Plan``."""
        kind = self._of.get(type(value))
        if kind is None:
            kind = self._of[type(value)] = _kind_of(type(value))
        if kind == "buffer":
            if _size(value) >= BUFFER_BYTES:
                yield "state bytes"
        elif kind == "container":
            if depth:
                items = value.values() if isinstance(value, Mapping) else value
                for _, item in zip(range(MOST_ITEMS), items, strict=False):
                    yield from self.of(item, depth - 1)
        elif kind == "message":
            yield kind
            if depth:
                for name in getattr(value, "__dataclass_fields__", ()):
                    for inner in self.of(getattr(value, name, None), depth - 1):
                        yield inner.replace("state ", "carried ")
        elif kind:
            yield kind


def _kind_of(cls: type) -> str:
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls.__module__ in MESSAGES:
        return f"carried {name}" if name in STATE_TYPES else "message"
    if name in STATE_TYPES:
        return f"state {name}"
    if cls in (list, tuple, set, frozenset, dict):
        return "container"
    return "buffer" if cls.__name__ in BUFFERS else ""


def _size(value: Any) -> int:
    size = getattr(value, "nbytes", None)
    return int(size) if size is not None else len(value)


class Recorder:
    """Notes the calls of this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with (folder / SWITCH).open("rb") as file:
            self._switch = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        self._kinds = Kinds()
        self._seen: set[tuple[CodeType, str]] = set()
        self._is_known = self._is_fork = False

    def start(self) -> None:
        """Look at every call of this process, of its threads and forks from now on."""
        begin: Callable[..., int] = _thread.start_new_thread

        def start_new_thread(function: Callable[..., object], *rest: Any) -> int:
            def run(*args: Any, **kwargs: Any) -> None:
                sys.setprofile(self.look)
                function(*args, **kwargs)

            return begin(run, *rest)

        _thread.start_new_thread = start_new_thread
        if "threading" in sys.modules:  # it has taken the function under a name of its own
            sys.modules["threading"]._start_new_thread = start_new_thread  # type: ignore[attr-defined]
        os.register_at_fork(after_in_child=self._forked)
        sys.setprofile(self.look)

    def _forked(self) -> None:
        self._seen.clear()
        self._is_known, self._is_fork = False, True

    def look(self, frame: FrameType, event: str, value: Any) -> None:
        """Called by the interpreter at each call and return."""
        if event not in ("call", "return") or self._switch[0] != 1:
            return
        module = frame.f_globals.get("__name__") or ""  # none once the interpreter ends
        code = frame.f_code
        if module == "__main__":
            module = getattr(frame.f_globals.get("__spec__"), "name", "")
        if not module.startswith("scalai") or not code.co_flags & inspect.CO_OPTIMIZED:
            return  # the body of a module or a class is its import
        if event == "call":
            self._note(module, code, "call")
            count = code.co_argcount + code.co_kwonlyargcount
            count += bool(code.co_flags & inspect.CO_VARARGS)
            found = frame.f_locals
            values = [found[name] for name in code.co_varnames[:count] if name in found]
        else:
            values = [value]
        for one in values:
            for kind in self._kinds.of(one):
                self._note(module, code, kind)

    def _note(self, module: str, code: CodeType, kind: str) -> None:
        if (code, kind) in self._seen:
            return
        self._seen.add((code, kind))
        lines = ""
        if not self._is_known:
            self._is_known = True
            lines = json.dumps({"argv": sys.orig_argv, "is_fork": self._is_fork}) + "\n"
        is_written = code.co_filename.endswith(".py")
        what = {"module": module, "function": code.co_qualname, "kind": kind}
        lines += json.dumps({**what, "is_written": is_written}) + "\n"
        with open(self._folder / f"{os.getpid()}.jsonl", "a") as file:
            file.write(lines)


if VARIABLE in os.environ and __name__ == "sitecustomize":
    Recorder(Path(os.environ[VARIABLE])).start()
