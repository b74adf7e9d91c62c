"""The numbers of a step, by which a change is proven to compute the same function.

Two layouts have different random streams: only a pass without random numbers is comparable, and it
leaves no trace.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist

from scalai.core.job.function_proof import Numbers
from scalai.core.jsonable import Json
from scalai.runtime.session import Session

log = logging.getLogger(__name__)

OFF = {"moe_input_jitter_eps": None}
"""Values that draw nothing, other than 0."""


@dataclasses.dataclass(slots=True)
class Drawn:
    """Cause of random draws in a pass with all known sources off; empty: none."""

    found: str = ""


@contextmanager
def bare_pass(
    modules: Iterable[torch.nn.Module],
    streams: Callable[[], Json],
    go_on: Callable[[Any], None],
    holders: Iterable[dict[str, Any]],
) -> Iterator[Drawn]:
    """Turn random numbers off for passes within this context. Only gradients remain behind it.

    Args:
        modules: Modules of the pass.
        streams: Returns the state of all random streams of this process.
        go_on: Restores it.
        holders: Attributes of objects, and tables, changed by a pass. Their tensors, containers and
            plain values are put back in place.
    """
    chunks, drawn, before = list(modules), Drawn(), streams()
    put_back = keep(chunks, holders)
    off = [each for chunk in chunks for each in random_attributes(chunk, has_configs=True)]
    for _, owner, key, _ in off:
        setattr(owner, key, OFF.get(key, 0.0))
    try:
        yield drawn
    finally:
        for _, owner, key, value in off:
            setattr(owner, key, value)
        put_back()
        if streams() != before:
            drawn.found = "a pass draws random numbers although dropout and jitter are off"
            go_on(before)


def keep(
    modules: Iterable[torch.nn.Module], holders: Iterable[dict[str, Any]]
) -> Callable[[], None]:
    """Return a function that puts the modules' buffers and the ``holders`` back, as of
    ``bare_pass``."""
    undo = [_keep(holder) for holder in holders]
    undo += [_keep(part._buffers) for module in modules for part in module.modules()]

    def put_back() -> None:
        with torch.no_grad():
            for each in undo:
                each()

    return put_back


def counts_samples(model: torch.nn.Module) -> str:
    """Return the part of a model that counts the samples of each forward pass, and a filler's with
    them; empty: none."""
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            return f"{type(part).__name__} ({name}) counts the samples of each forward pass"
    return ""


def random_attributes(
    model: torch.nn.Module, *, has_configs: bool = False
) -> Iterator[tuple[str, Any, str, float]]:
    """Yield a model's sources of random numbers in training: name of the part, owner of the
    attribute (the part or its configuration), attribute, value."""
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
    """Return a function to restore a value, in place, with all its contents."""
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
    # By ``data``, so that a backward pass to come takes it as unchanged: a filler's has no effect.
    value.data.copy_(saved)


class RepeatedBatches:
    """Deals the micro-batches of a step again. They are read once.

    Args:
        iterator: This rank's iterator.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._read: list[Any] = []
        self._at = 0
        self._is_copying = True

    def __iter__(self) -> "RepeatedBatches":
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
        """Read the first one: a loader draws a seed at its begin, as in any first step."""
        self._read = self._read or [next(self._iterator)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def rewind(self, *, is_copying: bool) -> "RepeatedBatches":
        """Begin again; ``is_copying``: whoever gets them may change them."""
        self._at, self._is_copying = 0, is_copying
        return self


def tell_numbers(session: Session, numbers: Callable[[], Numbers]) -> None:
    """Tell the numbers of a step. An error is logged and is no failure: the job goes on without a
    proof."""
    try:
        session.note_numbers(numbers())
    except Exception as error:
        log.warning("event=function_unproven the step's numbers are not known: %r", error)


def agreed(found: str, device: torch.device | int) -> str:
    """Return ``found``, or a note of other ranks' findings. A collective of all."""
    is_found = torch.tensor([bool(found)], dtype=torch.int, device=device)
    dist.all_reduce(is_found, op=dist.ReduceOp.MAX)
    return found or ("other ranks have found something" if is_found.item() else "")


def mean(value: float, group: Any, device: torch.device) -> float:
    """Return the mean over a group of replicas; a collective on them."""
    summed = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(summed, group=group)
    return float(summed.item()) / dist.get_world_size(group)


def norm_of_gradients(module: torch.nn.Module) -> float | None:
    """Return the norm of gradients of whole parameters in float64; None: no gradients, or an error:
    no step fails for its measure."""
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    try:
        found = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        norms = [float(torch.linalg.vector_norm(grad, dtype=_wide(grad))) for grad in found]
    except Exception as error:
        log.warning("event=function_unproven no norm of the gradients: %r", error)
        return None
    return math.hypot(*norms) if norms else None


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


class RandomDraws:
    """Watches the random streams of this process over the passes within.

    Attributes:
        found: Description of a draw; empty: none.
    """

    found = ""
    _before: list[torch.Tensor]

    def __enter__(self) -> None:
        self._before = _streams()

    def __exit__(self, *error: object) -> None:
        after = _streams()
        if any(not torch.equal(a, b) for a, b in zip(self._before, after, strict=True)):
            self.found = "a forward pass draws random numbers, as dropout does"


def _streams() -> list[torch.Tensor]:
    has_cuda = torch.cuda.is_available()
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if has_cuda else [])]


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def random_parts(model: torch.nn.Module) -> str:
    """Return the first part of a model with random numbers in training; empty: none."""
    for name, _, key, value in random_attributes(model):
        return f"{'dropout' if key == 'p' else key} {value:g} ({name})"
    return ""


def other_streams(random: str, obstacle: str = "") -> str:
    """Return why the numbers of a step cannot be compared.

    Args:
        random: Why it draws random numbers; empty: it does not.
        obstacle: Why no pass without them is made.
    """
    ending = f"; {obstacle}" if obstacle else ""
    return f"{random}: other degrees have other random streams{ending}" if random else ""


class OwnLoop:
    """Measures the steps of an own loop, known by its ``boundary`` alone: the gradient's norm
    before the update. Behind its stop the worker leaves there.

    Args:
        modules: The trained modules.
        framework: Its name and version.
    """

    def __init__(self, session: Session, modules: list[torch.nn.Module], framework: str) -> None:
        self._session, self._modules, self._framework = session, modules, framework
        self._draws, self._began = RandomDraws(), 0.0
        for module in modules:
            module.register_forward_pre_hook(lambda *_: self._forward(is_begin=True))
            module.register_forward_hook(lambda *_: self._forward(is_begin=False))

    def _forward(self, *, is_begin: bool) -> None:
        if torch.compiler.is_compiling() or _is_capturing():
            return  # a graph has no place for this; its parts are looked at (``random_parts``)
        if self._session.is_proving and is_begin:
            self._began = self._began or time.monotonic()
            self._draws.__enter__()
        elif self._session.is_proving:
            self._draws.__exit__()

    @property
    def is_proving(self) -> bool:
        return self._session.is_proving

    @property
    def is_last(self) -> bool:
        return self._session.is_to_prove

    def tell(self, norm: float | None) -> None:
        """Tell the norm of the step; a worker behind its stop leaves."""
        tell_numbers(self._session, lambda: self._numbers(norm))
        if self.is_last:
            raise SystemExit(0)

    def _numbers(self, norm: float | None) -> Numbers:
        random = self._draws.found or next(filter(None, map(random_parts, self._modules)), "")
        seconds = time.monotonic() - self._began if self._began else 0.0
        self._draws, self._began = RandomDraws(), 0.0
        dtype = next(self._modules[0].parameters()).dtype
        return Numbers(
            norm=norm,
            is_skipped=norm is None,
            dtype=str(dtype).removeprefix("torch."),
            framework=self._framework,
            obstacle=other_streams(random),
            is_random=bool(random),
            seconds=seconds,
        )
