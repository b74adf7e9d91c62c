"""The training state of a live DeepSpeed engine, as slots over DeepSpeed's own memory.

Source: the Parallelizable Tensor Collection of Tenplex/Scalai (arXiv 2312.05181, section 3) for
DeepSpeed 0.16 to 0.19. Differs in: optimizer state is part of the collection, also in ZeRO's flat
ranges; nothing is gathered.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import Piece, row_major, whole
from scalai.patches.continuation import refuse_changed_axes
from scalai.patches.deepspeed import parallel_ranks, small_state, unsupported
from scalai.patches.deepspeed.masters import (
    Fragment,
    Master,
    cut_alike,
    cut_pieces,
    is_vouched,
    masters_of,
    memory_of,
    shard_fragment,
    vouched_parts,
)
from scalai.patches.deepspeed.parallel_ranks import TensorParallel
from scalai.patches.deepspeed.small_state import STEP, put_scalars, take_scalars
from scalai.runtime.live import Slot, dtype_name


@dataclass(frozen=True, eq=False, slots=True)
class EngineShard:
    """A parameter or a persistent buffer of this rank.

    Attributes:
        name: The same in every layout.
        shape: Shape of the global tensor.
        data: DeepSpeed's own parameter, or the buffer.
        pieces: Its boxes, as positions in it, flattened; with ZeRO 3, as if gathered.
        memory: Flat memory of the model.
        range: Range of ``data``, and its place in ``memory``.
        is_vouched: True if this rank may vouch for it.
    """

    name: str
    shape: tuple[int, ...]
    data: torch.Tensor
    pieces: tuple[Piece, ...]
    memory: torch.Tensor
    range: Fragment
    is_vouched: bool


def shards_of(
    module: torch.nn.Module, tensor_parallel: TensorParallel, *, is_first_replica: bool
) -> Iterator[EngineShard]:
    """Yield the parameters and persistent buffers of a model, in its order. Shared ones once.

    Buffers may differ between replicas, as running means do: the first one's are vouched for, as
    DeepSpeed's checkpoints keep them.

    Raises:
        RefusedError: Something cannot be carried; the message names it.
    """
    for name, parameter in module.named_parameters():
        yield _parameter_shard(name, parameter, tensor_parallel)
    for name, buffer in persistent_buffers(module):
        yield _buffer_shard(name, buffer, is_first_replica)


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a model's ``state_dict``, with their names."""
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            raise RefusedError(
                f"{prefix} ({type(part).__name__}) keeps extra state, which need not mean the same "
                "in another layout. Keep this module out of an elastic job."
            )
        for key, buffer in part._buffers.items():
            if buffer is None or key in part._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield f"{prefix}.{key}" if prefix else key, buffer


def _parameter_shard(name: str, parameter: Any, tensor_parallel: TensorParallel) -> EngineShard:
    local = tuple(getattr(parameter, "ds_shape", parameter.shape))
    shape, pieces = tensor_parallel.pieces(name, parameter, local)
    # Replicas on tensor-parallel ranks need not be equal to the last bit: the first one's counts.
    may_vouch = is_vouched(parameter) and (tensor_parallel.rank == 0 or shape != local)
    if hasattr(parameter, "ds_tensor"):
        memory = parameter.ds_tensor.detach().view(-1)
        part = shard_fragment(parameter, memory, name)
    else:
        memory, part = _run_of_memory(name, parameter)
    return EngineShard(name, shape, parameter, pieces, memory, part, may_vouch)


def _buffer_shard(name: str, buffer: torch.Tensor, is_first_replica: bool) -> EngineShard:
    shape = tuple(buffer.shape)
    memory, part = _run_of_memory(name, buffer)
    pieces = (Piece(whole(shape), 0, row_major(shape)),)
    return EngineShard(name, shape, buffer, pieces, memory, part, is_first_replica)


def _run_of_memory(name: str, data: torch.Tensor) -> tuple[torch.Tensor, Fragment]:
    if not data.is_contiguous():
        raise RefusedError(
            f"{name} has strides {data.stride()} for shape {list(data.shape)}, so it is not one "
            "run of memory. Make it contiguous before deepspeed.initialize."
        )
    return data.detach().view(-1), Fragment(data, 0, data.numel(), 0)


def places_of(engine: Any) -> dict[str, int]:
    """Return the addresses of all memory behind an engine's slots. A snapshot reads there, so the
    memory has to stay."""
    return {name: tensor.data_ptr() for name, tensor in _tensors(engine)}


def addresses_of(engine: Any) -> list[int]:
    """Return the addresses of ``places_of`` without names, which each step can do without."""
    found: list[int] = []
    for part in engine.module.modules():
        passing = part._non_persistent_buffers_set
        kept = [part._buffers[key] for key in part._buffers if key not in passing]
        owned = (getattr(one, "ds_tensor", one) for one in part._parameters.values())
        found += [one.data_ptr() for one in (*owned, *kept) if one is not None]
    for values, entries in memory_of(engine):
        states = (one for one in entries.values() if isinstance(one, torch.Tensor) and one.ndim)
        found += [values.data_ptr(), *(one.data_ptr() for one in states)]
    return found


def refuse_moved(engine: Any, before: Mapping[str, int], addresses: Sequence[int]) -> None:
    """Compare with the addresses at the listing of slots: ``addresses_of``, and where they differ
    ``places_of``.

    Raises:
        RefusedError: Some memory was replaced.
    """
    if addresses_of(engine) == addresses:
        return
    here = places_of(engine)
    moved = sorted(name for name, place in before.items() if here.get(name) != place)
    if moved:
        raise RefusedError(
            f"the memory of {', '.join(moved[:3])}{' and others' * (len(moved) > 3)} was replaced "
            "since the job was attached, so what was written is old. Change buffers in place "
            "and load checkpoints before attach()."
        )


def _tensors(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in engine.module.named_parameters():
        yield f"param/{name}", getattr(parameter, "ds_tensor", parameter)
    for name, buffer in persistent_buffers(engine.module):
        yield f"param/{name}", buffer
    for number, (values, entries) in enumerate(memory_of(engine)):
        yield f"master {number}", values
        for kind, state in entries.items():
            if isinstance(state, torch.Tensor) and state.ndim:
                yield f"{kind} of master {number}", state


PARAM, MAIN = "param", "main"
"""Kinds of tensors; the others are the base optimizer's own names: exp_avg, exp_avg_sq."""


class DeepSpeedState:
    """One rank's state of a DeepSpeed job for other layouts (``LiveState``).

    Names and shapes depend neither on the ZeRO stage nor on the degrees. Master weights with the
    model's dtype (fp32) and the model's copy are one tensor ``param/...``: the master is held, the
    copy is filled with it. Other masters are ``main/...``.

    Build it on every rank: stages with shared tied weights, and tensor-parallel ranks, exchange the
    cuts of their parameters. Nothing else here communicates.

    Args:
        seed: The job's seed. In another layout, new RNG states begin from it and the step.

    Raises:
        RefusedError: The job uses a feature without a change of layout; the message names it.
    """

    announces_updates = True

    def __init__(self, engine: Any, *, seed: int = 1234) -> None:
        unsupported.refuse_unsupported(engine)
        self._engine = engine
        self._seed = seed
        self._places: dict[str, int] = {}
        self._addresses: list[int] = []
        self._masters = cut_alike(engine, masters_of(engine))
        self._vouched = tuple(vouched_parts(self._masters, engine.param_names))

    @property
    def coordinate(self) -> str:
        """Position of this rank: ``tp0-pp1-dp0``."""
        return parallel_ranks.coordinate(self._engine)

    def slots(self) -> Sequence[Slot]:
        """List parameters, persistent buffers, masters and optimizer state of this rank.

        Call it before the first step.
        """
        self._places, self._addresses = places_of(self._engine), addresses_of(self._engine)
        owners = {
            id(fragment.parameter): (master, fragment)
            for master in self._masters
            for fragment in master.fragments
        }
        shards = shards_of(
            self._engine.module,
            parallel_ranks.tensor_parallel(self._engine),
            is_first_replica=parallel_ranks.is_first_replica(self._engine),
        )
        return [
            slot
            for shard in shards
            for slot in _slots(shard, *owners.get(id(shard.data), (None, None)))
        ]

    def scalars(self) -> Mapping[str, Json]:
        """Return schedule, loss scale, parameter groups, counters, and the fixed degrees.

        Raises:
            RefusedError: The engine accumulates gradients, or the memory of the slots was replaced.
        """
        return self._scalars()()

    def keep(self) -> Callable[[], tuple[Mapping[str, Json], Json]]:
        scalars, rng = self._scalars(), small_state.rng_state(self._engine)
        return lambda: (scalars(), rng())

    def _scalars(self) -> Callable[[], Mapping[str, Json]]:
        refuse_moved(self._engine, self._places, self._addresses)
        scalars = take_scalars(self._engine, self._masters, self._vouched)
        # Not the degrees later: a script that raises may have taken its groups down by then.
        fixed = parallel_ranks.fixed_degrees(self._engine)
        return lambda: {"deepspeed": scalars(), "fixed_degrees": fixed}

    def load_scalars(self, scalars: Mapping[str, Json]) -> None:
        """Restore the result of ``scalars``, and let DeepSpeed see the restored values.

        Raises:
            RefusedError: A fixed degree changed, or the optimizer steps or parameter groups do not
                fit this layout.
        """
        refuse_changed_axes(scalars["fixed_degrees"], parallel_ranks.fixed_degrees(self._engine))
        put_scalars(scalars["deepspeed"], self._engine, self._masters)
        if hasattr(self._engine.optimizer, "checkpoint_event_prologue"):
            # ZeRO 3: frees parameters that are gathered; the next forward pass gathers new values.
            self._engine.optimizer.checkpoint_event_prologue()

    def rank_state(self) -> Json:
        return small_state.rng_state(self._engine)()

    def load_rank_state(self, state: Json | None, step: int) -> str:
        """Continue this rank's RNG states, or begin new ones in another layout."""
        return small_state.restore_rng(self._engine, state, self._seed, step)


def _slots(shard: EngineShard, master: Master | None, owned: Fragment | None) -> Iterator[Slot]:
    """Yield the slots of a parameter or buffer: the model's, its master's, the optimizer's."""
    model = shard.memory
    tensor = _tensor(PARAM, shard, model)
    if master is None or owned is None:  # a buffer, or nothing trains it
        is_buffer = not isinstance(shard.data, torch.nn.Parameter)
        slot = _slot(tensor, model, shard, shard.range, is_held=shard.is_vouched)
        yield replace(slot, is_volatile=is_buffer)
        return
    values = master.values.detach().view(-1)
    is_one_tensor = values.dtype == model.dtype
    is_one_memory = is_one_tensor and _place(values, owned) == _place(model, shard.range)
    # Boxes of one tensor have to be equal wherever they overlap: a second memory is cut alike.
    cuts = owned.cuts if is_one_tensor else ()
    yield _slot(
        tensor,
        model,
        shard,
        shard.range,
        cuts,
        is_held=shard.is_vouched and (is_one_memory or not is_one_tensor),
    )
    if not is_one_memory:
        main = tensor if is_one_tensor else _tensor(MAIN, shard, values)
        yield _slot(main, values, shard, owned, owned.cuts, is_held=shard.is_vouched)
    for kind, state in master.state.items():
        if kind != STEP and state is not None:
            flat = _flat_state(kind, state, shard, values)
            name = _tensor(kind, shard, flat)
            yield _slot(name, flat, shard, owned, owned.cuts, is_held=shard.is_vouched)


def _flat_state(kind: str, state: Any, shard: EngineShard, values: torch.Tensor) -> torch.Tensor:
    if isinstance(state, torch.Tensor) and state.numel() == values.numel():
        return state.detach().view(-1)
    found = list(state.shape) if isinstance(state, torch.Tensor) else repr(state)
    raise RefusedError(
        f"the optimizer keeps {kind} {found} for {shard.name}, not one value for each of the "
        f"{values.numel()} elements that it updates. Use Adam, AdamW or SGD."
    )


def _slot(
    tensor: Tensor,
    buffer: torch.Tensor,
    shard: EngineShard,
    part: Fragment,
    cuts: Sequence[int] = (),
    *,
    is_held: bool,
) -> Slot:
    pieces = cut_pieces(shard.pieces, part.low, part.high, part.start, cuts)
    return Slot(tensor, buffer, tuple(pieces), is_held=is_held)


def _place(buffer: torch.Tensor, part: Fragment) -> tuple[int, int, int]:
    return buffer.data_ptr() + part.start * buffer.element_size(), part.low, part.high


def _tensor(kind: str, shard: EngineShard, values: torch.Tensor) -> Tensor:
    return Tensor(f"{kind}/{shard.name}", shard.shape, dtype_name(values.dtype))
