"""The training state of a live megatron-core job, as slots over megatron's own memory.

A model or optimizer without a change of layout is refused at the start, not at the first resize.
The rules are ``scalai.converters.megatron.rules``, as for the arguments of a script; here they
apply to the built objects of any script.

Source: the Parallelizable Tensor Collection of Tenplex/Scalai (arXiv 2312.05181, section 3) for
megatron-core 0.14 to 0.20, without a branch on the version. Differs in: optimizer state is part of
the collection, also in the distributed optimizer's flat ranges; nothing is gathered.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from scalai.converters.megatron.rules import (
    FSDP,
    REFUSED_OPTIMIZERS,
    allows_untested,
    configured_faults,
    summed_axes,
)
from scalai.converters.megatron.sums import BLOCKWISE
from scalai.core.errors import RefusedError, refuse_all
from scalai.core.jsonable import Json
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import Piece, clip, whole
from scalai.patches.continuation import refuse_changed_axes
from scalai.patches.megatron import this_rank
from scalai.patches.megatron.bare_step import watch_optimizer
from scalai.patches.megatron.optimizer_state import (
    Names,
    Owned,
    is_distributed,
    leaf_optimizers,
    owned_parameters,
    put_scalars,
    take_scalars,
)
from scalai.patches.megatron.shapes import ModelShard, TensorPart, shards_of, unwrap
from scalai.runtime.live import Slot, dtype_name
from scalai.runtime.session import Session


def refuse_unsupported(chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Check a live model and its optimizer.

    Raises:
        RefusedError: Names every obstacle, with the reason.
    """
    refuse_all((*_faults_of_model(chunks), *_faults_of_optimizer(optimizer)))


def fixed_axes(chunks: Sequence[torch.nn.Module], optimizer: Any) -> Iterator[str]:
    """Yield the axes with a fixed degree, as far as model and optimizer show it."""
    yield "cp"  # no adapter is proven for another split of sequences
    for chunk in chunks:
        configured = getattr(getattr(unwrap(chunk), "config", None), "__dict__", {})
        yield from (axis for axis, _ in summed_axes(configured, this_rank.release()))
    for leaf in leaf_optimizers(optimizer):
        # TensorParallelMuon calls it mode up to 0.16 and tp_mode since.
        if BLOCKWISE in (getattr(leaf.optimizer, name, None) for name in ("mode", "tp_mode")):
            yield "tp"
            return


def _faults_of_model(chunks: Sequence[torch.nn.Module]) -> Iterator[str]:
    for chunk in chunks:
        model = unwrap(chunk)
        yield from _faults_of_configuration(getattr(model, "config", None))
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "device_mesh"):
                yield f"{name} is a DTensor of torch's FSDP or Megatron-FSDP: {FSDP}"
                break


def _faults_of_optimizer(optimizer: Any) -> Iterator[str]:
    yield from _faults_by_name(optimizer)
    for leaf in leaf_optimizers(optimizer):
        yield from _faults_by_name(leaf)
        yield from _faults_of_configuration(getattr(leaf, "ddp_config", None))
        yield from _faults_of_configuration(leaf.config)


def _faults_of_configuration(config: Any) -> Iterator[str]:
    values = getattr(config, "__dict__", {})
    yield from configured_faults(values, allow_untested=allows_untested(os.environ))


def _faults_by_name(optimizer: Any) -> Iterator[str]:
    name = type(optimizer).__name__
    if name in REFUSED_OPTIMIZERS:
        yield f"{name}: {REFUSED_OPTIMIZERS[name]}"


PARAM, MAIN = "param", "main"
"""Kinds of tensors; the others are the inner optimizer's own names: exp_avg, exp_avg_sq, step."""


class MegatronState:
    """One rank's state of a megatron-core job for other layouts (``LiveState``).

    Build it after the model and the optimizer, on every rank; nothing here communicates.

    Args:
        chunks: The training loop's model: one module, or one a virtual stage.
        optimizer: Optimizer from ``get_megatron_optimizer``; None carries parameters alone.
        scheduler: ``OptimizerParamScheduler`` or another one with a ``state_dict`` of plain values.
        seed: The job's seed. At other degrees, new RNG states begin from it and the step.
        fixed: Axes with a fixed degree, beside those from the optimizer.
        asked: The flags' scheduler (``asked_of``), if a person may change flags before a restart;
            None: the state's values win.

    Raises:
        RefusedError: The job uses a feature without a change of layout; the message names it.
    """

    announces_updates = True

    def __init__(
        self,
        chunks: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: Any,
        scheduler: Any = None,
        *,
        seed: int = 1234,
        fixed: Iterable[str] = (),
        asked: Json = None,
    ) -> None:
        self._chunks = [chunks] if isinstance(chunks, torch.nn.Module) else list(chunks)
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._seed, self._asked = seed, asked
        refuse_unsupported(self._chunks, optimizer)
        self._fixed = frozenset((*fixed, *fixed_axes(self._chunks, optimizer)))

    @cached_property
    def coordinate(self) -> str:
        """Position of this rank: ``tp0-pp1-dp0``."""
        return this_rank.coordinate()

    def watch_steps(self, session: Session) -> None:
        """Tell the norm of the gradients in steps of a proof, in an own loop."""
        watch_optimizer(session, self._chunks, self._optimizer)

    def slots(self) -> Sequence[Slot]:
        """List parameters, persistent buffers, masters and optimizer state of this rank.

        A fresh optimizer gets its first-step state, so call this once the optimizer exists and
        before the first step. With the distributed optimizer a rank vouches for its own range of a
        parameter alone: the rest is one step old under ``overlap_param_gather``.
        """
        owned = {id(entry.parameter): entry for entry in owned_parameters(self._optimizer)}
        is_split = any(map(is_distributed, leaf_optimizers(self._optimizer)))
        return [
            slot
            for shard in shards_of(self._chunks)
            for part in shard.parts
            for slot in _slots(shard, part, owned.get(id(shard.data)), is_split)
        ]

    def scalars(self) -> Mapping[str, Json]:
        """Return schedule, loss scale, parameter groups, and the fixed degrees."""
        return self._scalars()()

    def keep(self) -> Callable[[], tuple[Mapping[str, Json], Json]]:
        scalars, rng = self._scalars(), this_rank.rng_state(self._degrees)
        return lambda: (scalars(), rng())

    def _scalars(self) -> Callable[[], Mapping[str, Json]]:
        scalars, degrees = take_scalars(*self._small, self._asked), self._degrees
        fixed = {axis: degrees[axis] for axis in sorted(self._fixed)}
        return lambda: {"megatron": dict(scalars()), "fixed_degrees": fixed}

    @cached_property
    def _degrees(self) -> Mapping[str, int]:
        # Kept: a script that raises may have taken its groups down before they are asked for.
        return this_rank.degrees()

    def load_scalars(self, scalars: Mapping[str, Json]) -> None:
        """Restore the result of ``scalars``. ``RefusedError`` if a fixed degree changed."""
        refuse_changed_axes(scalars["fixed_degrees"], this_rank.degrees())
        put_scalars(scalars["megatron"], *self._small, self._asked)

    @property
    def _small(self) -> tuple[Any, Any, Names]:
        return self._optimizer, self._scheduler, self._names

    @cached_property
    def _names(self) -> Names:
        of = {
            id(shard.data): [part.name for part in shard.parts] for shard in shards_of(self._chunks)
        }
        owned = owned_parameters(self._optimizer)
        return {id(each.main): of[id(each.parameter)] for each in owned}

    def rank_state(self) -> Json:
        return this_rank.rng_state(self._degrees)()

    def load_rank_state(self, state: Json | None, step: int) -> str:
        """Continue this rank's RNG states, or begin new ones at other degrees."""
        return this_rank.restore_rng(state, self._seed, step)


def _slots(
    shard: ModelShard, part: TensorPart, owned: Owned | None, is_split: bool
) -> Iterator[Slot]:
    """Yield the slots of one part of a parameter: its own, its master's, its optimizer state's."""
    data = shard.data.detach().view(-1)
    tensor = _tensor(PARAM, part, data)
    if owned is None:
        # A buffer or a frozen parameter is ours. What the distributed optimizer trains is not.
        is_trained = isinstance(shard.data, torch.nn.Parameter) and shard.data.requires_grad
        is_buffer = not isinstance(shard.data, torch.nn.Parameter)
        is_held = not (is_split and is_trained)
        yield Slot(tensor, data, part.pieces, is_held=is_held, is_volatile=is_buffer)
        return
    low, high = owned.low, owned.high
    # Replicas own equal ranges, also of a tied weight on two pipeline stages: megatron gives it a
    # bucket of its own, because it adds up the stages' gradients range by range.
    pieces = tuple(cut for piece in part.pieces for cut in clip(piece, low, high))
    yield Slot(tensor, data, part.pieces, is_held=not owned.is_sharded)
    if not pieces:
        return
    if owned.is_sharded:
        yield Slot(tensor, data[low:high], pieces, is_wanted=False)
    masters = [owned.main] if owned.master is None else [owned.master, owned.main]
    for number, main in enumerate(master.detach().view(-1) for master in masters):
        if not _is_same_memory(main, data[low:high]):
            # Of two copies (one on the host, which is updated) the first is the truth.
            yield Slot(_tensor(MAIN, part, main), main, pieces, is_held=not number)
    for kind, value in owned.state.items():
        yield from _state_slot(kind, value, part, pieces, high - low)


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two flat tensors begin at one place, also of a storage that has no bytes yet."""
    storages = one.untyped_storage()._cdata, other.untyped_storage()._cdata
    return storages[0] == storages[1] and one.storage_offset() == other.storage_offset()


def _state_slot(
    kind: str, value: Any, part: TensorPart, pieces: tuple[Piece, ...], numel: int
) -> Iterator[Slot]:
    """Yield the slot of one entry of the inner optimizer's state, if it is a tensor."""
    if value is None:
        return
    if not isinstance(value, torch.Tensor):
        raise RefusedError(
            f"the optimizer keeps {kind}={value!r} for {part.name}, a {type(value).__name__}; only "
            "tensors are carried. Use --optimizer adam or sgd."
        )
    flat = value.detach().view(-1)
    if value.ndim == 0:
        # Torch Adam's step: one tensor a parameter, equal on all ranks that hold a part of it.
        tensor = Tensor(f"{kind}/{part.name}", (), dtype_name(value.dtype))
        yield Slot(tensor, flat, (Piece(whole(()), 0, ()),))
    elif value.numel() == numel:
        yield Slot(_tensor(kind, part, flat), flat, pieces)
    else:
        raise RefusedError(
            f"the optimizer's {kind} of {part.name} has shape {list(value.shape)}, not one value "
            f"for each of the parameter's {numel} elements here. Use --optimizer adam or sgd."
        )


def _tensor(kind: str, part: TensorPart, values: torch.Tensor) -> Tensor:
    return Tensor(f"{kind}/{part.name}", part.shape, dtype_name(values.dtype))
