"""A pass without random numbers, behind which everything is as it was before. Two layouts have
different random streams: only without these they compute the same numbers."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

import torch

from scalai.core.jsonable import Json

OFF = {"moe_input_jitter_eps": None}
"""Values with which nothing is drawn, where that is not 0."""


@dataclasses.dataclass(slots=True)
class Drawn:
    """What a pass has drawn from the random streams although all that is known was off; empty:
    nothing."""

    found: str = ""


@contextmanager
def bare_pass(
    modules: Iterable[torch.nn.Module],
    streams: Callable[[], Json],
    go_on: Callable[[Any], None],
    holders: Iterable[dict[str, Any]],
) -> Iterator[Drawn]:
    """Make a pass within this context draw no random numbers, and leave no trace but in gradients.

    Args:
        modules: What the pass runs through.
        streams: Returns the state of all random streams of this process.
        go_on: Takes it back.
        holders: Attributes of objects, and tables, that a pass changes. What they hold is put back
            in place: tensors, containers, plain values.
    """
    chunks, drawn, before = list(modules), Drawn(), streams()
    undo = [_keep(holder) for holder in holders]
    undo += [_keep(part._buffers) for chunk in chunks for part in chunk.modules()]
    off = [each for chunk in chunks for each in random_attributes(chunk, has_configs=True)]
    for _, owner, key, _ in off:
        setattr(owner, key, OFF.get(key, 0.0))
    try:
        yield drawn
    finally:
        for _, owner, key, value in off:
            setattr(owner, key, value)
        with torch.no_grad():
            for put_back in undo:
                put_back()
        if streams() != before:
            drawn.found = "a pass draws random numbers although dropout and jitter are off"
            go_on(before)


def random_attributes(
    model: torch.nn.Module, *, has_configs: bool = False
) -> Iterator[tuple[str, Any, str, float]]:
    """Yield what makes a model draw random numbers in training: the part's name, the owner of the
    attribute, which is the part or its configuration, the attribute's name, and its value."""
    seen = set()
    for name, part in model.named_modules():
        owners = [part, getattr(part, "config", None)] if has_configs else [part]
        for owner in owners:
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            is_dropout = isinstance(owner, torch.nn.modules.dropout._DropoutNd)
            for key, value in list(getattr(owner, "__dict__", {}).items()):
                is_named = "drop" in key or "jitter" in key
                is_rate = isinstance(value, float) and is_named
                if (is_rate or (is_dropout and key == "p")) and value:
                    yield name, owner, key, float(value)


def _keep(value: Any) -> Callable[[], None]:
    """Return what puts a value back as it is now, in place, with all that it holds."""
    if isinstance(value, torch.Tensor):
        saved = value.detach().clone()
        return lambda: None if torch.equal(value, saved) else _copy(value, saved)
    if dataclasses.is_dataclass(value) and hasattr(value, "__dict__"):
        return _keep(vars(value))
    if not isinstance(value, dict | list):
        return lambda: None
    entries: Any = value.copy()
    inner = [_keep(each) for each in (entries.values() if isinstance(value, dict) else entries)]

    def put_back() -> None:
        if isinstance(value, dict):
            for key in value.keys() - entries.keys():
                del value[key]
            value.update(entries)
        else:
            value[:] = entries
        for each in inner:
            each()

    return put_back


def _copy(value: torch.Tensor, saved: torch.Tensor) -> None:
    value.detach().copy_(saved)


class Batches:
    """Deals the micro-batches of a step once more. They are read once.

    Args:
        iterator: Of this rank.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._read: list[Any] = []
        self._at = 0
        self._is_copying = True

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Any:
        if self._at == len(self._read):
            self._read.append(next(self._iterator))
        self._at += 1
        batch = self._read[self._at - 1]
        if self._is_copying:
            with suppress(Exception):  # what nobody can copy is hardly changed either
                return deepcopy(batch)
        return batch

    def prime(self) -> None:
        """Read the first one: a loader draws a seed where it is begun, as in any first step."""
        self._read = self._read or [next(self._iterator)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def rewind(self, *, is_copying: bool) -> "Batches":
        """Begin again; ``is_copying``: whoever gets them may change them."""
        self._at, self._is_copying = 0, is_copying
        return self
