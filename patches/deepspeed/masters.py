"""The tensors and state of DeepSpeed's optimizers for a model's parameters, by class.

Ranks with the same parameter cut it alike. The borders of ZeRO's partitions depend on neighbours,
so a tied weight is cut elsewhere on another stage of a pipeline, and a whole parameter on another
tensor-parallel rank if the shards beside it are uneven. Boxes of one tensor have to be equal in any
overlap: every rank cuts at the borders of all.

Places of elements in flat buffers are read from addresses: DeepSpeed's parameters are views of the
buffers, so its order (``round_robin_gradients``, alignment) need not be known.

Source: deepspeed/runtime (0.16.0 to 0.19.8): zero/stage_1_and_2.py, zero/stage3.py,
bf16_optimizer.py, fp16/fused_optimizer.py, fp16/unfused_optimizer.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from scalai.converters.checkpoint import Order
from scalai.core.errors import LayoutError, RefusedError
from scalai.core.tensors.region import Piece, clip
from scalai.patches.deepspeed import parallel_ranks
from scalai.patches.optimizers import Group, torch_state


@dataclass(frozen=True, eq=False, slots=True)
class Fragment:
    """Elements ``[low, high)`` of a flattened parameter, at ``start`` of a flat buffer.

    ``low == high``: this rank has none of them. ``cuts``: borders between ranks in the flattened
    parameter, ascending, without its ends. Pieces end there on all ranks alike, so equal elements
    lie in equal boxes.
    """

    parameter: torch.Tensor
    low: int
    high: int
    start: int
    cuts: tuple[int, ...] = ()


def offset_in(flat: torch.Tensor, part: torch.Tensor, name: str) -> int:
    """Return the begin of ``part``, a contiguous view of ``flat``, in elements.

    Raises:
        LayoutError: It is not such a view.
    """
    size = flat.element_size()
    offset, rest = divmod(part.data_ptr() - flat.data_ptr(), size)
    inside = rest == 0 <= offset and offset + part.numel() <= flat.numel()
    if part.dtype != flat.dtype or not part.is_contiguous() or not inside:
        raise LayoutError(
            f"{name} ({part.numel()} elements of {part.dtype}) does not lie in DeepSpeed's flat "
            f"buffer ({flat.numel()} of {flat.dtype}), as this version of Scalai expects it. Use a "
            "known version of DeepSpeed, and do not replace the memory of parameters."
        )
    return offset


def partitioned(
    parameter: torch.Tensor, numel: int, offset: int, partition_numel: int, rank: int
) -> Fragment:
    """Return this rank's fragment of a parameter at ``offset`` of a flat buffer of equal
    partitions; the rank owns partition ``rank``."""
    begin = rank * partition_numel
    low = min(max(begin - offset, 0), numel)
    high = min(max(begin + partition_numel - offset, 0), numel)
    first = (offset // partition_numel + 1) * partition_numel - offset
    cuts = tuple(range(first, numel, partition_numel))
    return Fragment(parameter, low, high, offset + low - begin, cuts)


def cut_pieces(
    pieces: Sequence[Piece], low: int, high: int, start: int, cuts: Sequence[int]
) -> Iterator[Piece]:
    """Yield the boxes of elements ``[low, high)`` of a flattened parameter, none across a cut.

    Args:
        pieces: The whole parameter's boxes of the global tensor, and their places in it.
        start: Place of element ``low`` in the buffer of the result.
    """
    ends = [cut for cut in cuts if low < cut < high]
    for begin, end in zip((low, *ends), (*ends, high), strict=True):
        for piece in pieces:
            for part in clip(piece, begin, end):
                yield replace(part, start=part.start + begin - low + start)


def ensure_state(optimizer: Any, values: torch.Tensor, group: dict[str, Any]) -> None:
    """Give a fresh optimizer its first-step state for ``values``.

    Raises:
        RefusedError: This state is unknown.
    """
    if optimizer.state[values]:
        return
    state = torch_state(optimizer, values, group)
    if state is None:
        state = _deepspeed_state(optimizer, values, group)
    optimizer.state[values].update(state)


def _deepspeed_state(optimizer: Any, values: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
    """Source: ``step`` of ops/adam/cpu_adam.py and ops/adam/fused_adam.py (0.16.0 to 0.19.8)."""
    kind = type(optimizer).__name__
    if kind == "DeepSpeedCPUAdam":
        dtype = torch.float32 if optimizer.fp32_optimizer_states else values.dtype
    elif kind == "FusedAdam":
        dtype = values.dtype
    else:
        raise RefusedError(
            f"the state of {kind} does not exist before its first step, and it is not known what "
            "that makes. Use Adam, AdamW (torch's, FusedAdam or DeepSpeedCPUAdam) or torch's SGD."
        )
    moments = {name: torch.zeros_like(values, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": group.get("step", 0), **moments}


Names = Mapping[torch.Tensor, str]
"""An engine's names of its parameters."""


Dealt = tuple[Sequence[Sequence[str]], bool]
"""Parameters by group, in the optimizer's order; True if it is the module's."""


@dataclass(frozen=True, eq=False, slots=True)
class Master:
    """A tensor under the base optimizer's update, with its own dict of state.

    ``values``: the parameter itself, its fp32 copy, or a flat buffer of several. ``fragments``: one
    for each parameter of the buffer, even without elements on this rank. ``group``: its parameter
    group.
    """

    values: torch.Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    fragments: tuple[Fragment, ...]


def masters_of(engine: Any) -> list[Master]:
    """List the tensors under an engine's optimizer on this rank, with their state.

    A fresh optimizer gets its first-step state.

    Raises:
        RefusedError: The optimizer is unknown.
        LayoutError: Its buffers are not as expected.
    """
    base, parts = _parts_of(engine)
    masters = []
    for values, group, cut in parts:
        fragments = tuple(cut)
        _check_inside(values, fragments, engine.param_names)
        ensure_state(base, values, group)
        masters.append(Master(values, base.state[values], group, fragments))
    return masters


def memory_of(engine: Any) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Yield the present tensors and state of ``masters_of``, without the work of their fragments:
    each step asks."""
    base, parts = _parts_of(engine)
    return ((values, base.state[values]) for values, _, _ in parts)


def _parts_of(engine: Any) -> "tuple[Any, _Parts]":
    """Return the base optimizer of an engine's, and what it updates."""
    optimizer = engine.optimizer
    adapter = _ADAPTERS.get(type(optimizer).__name__)
    base = optimizer.optimizer if adapter is not None else optimizer
    if adapter is None and isinstance(optimizer, torch.optim.Optimizer):
        adapter = _bare
    if adapter is None:
        raise RefusedError(
            f"the optimizer {type(optimizer).__name__} is not known; known are torch's and "
            f"{', '.join(sorted(_ADAPTERS))}. Change the configuration to one of ZeRO 0 to 3 "
            "without further extensions."
        )
    return base, adapter(optimizer, engine.param_names)


def groups_of(
    masters: Sequence[Master], names: Names, vouched: "Iterable[Part] | None" = None
) -> list[Group]:
    """List the parameter groups of this rank, with the names of their parameters: of all, or of
    those of ``vouched_parts`` alone."""
    members: dict[int, tuple[dict[str, Any], list[str]]] = {}
    for master in masters:
        members.setdefault(id(master.group), (master.group, []))
    if vouched is None:
        vouched = ((names[f.parameter], master) for master in masters for f in master.fragments)
    for name, master in vouched:
        members[id(master.group)][1].append(name)
    return list(members.values())


def order_here(engine: Any) -> Dealt:
    """Return how this rank's optimizer orders its parameters, for ``order_of``."""
    groups = groups_of(masters_of(engine), engine.param_names)
    dealt = [[*dict.fromkeys(names)] for _, names in groups]
    place = {name: at for at, name in enumerate(engine.param_names.values())}
    return dealt, all(names == sorted(names, key=place.__getitem__) for names in dealt)


def order_of(ranks: Sequence[Dealt]) -> Order:
    """Return the order of parameters in the optimizer's groups, as the job's ranks have it.

    It knows the order of parameters that one rank has all of; over several ranks, as in stages of
    another pipeline, only if each keeps the module's order.
    """

    def order(names: Sequence[str]) -> Sequence[Sequence[str]] | None:
        trained = {name for groups, _ in ranks for group in groups for name in group} & {*names}
        for groups, _ in ranks:
            if trained <= {name for group in groups for name in group}:
                return groups
        if not all(is_modules for _, is_modules in ranks) or len({len(g) for g, _ in ranks}) != 1:
            return None
        place = {name: at for at, name in enumerate(names)}
        members = [{*chain(*same)} & trained for same in zip(*(g for g, _ in ranks), strict=True)]
        return [sorted(group, key=place.__getitem__) for group in members]

    return order


Part = tuple[str, Master]
"""A parameter, and what it is a part of."""


def vouched_parts(masters: Sequence[Master], names: Names) -> Iterator[Part]:
    """Yield the names of parameters with elements under this rank's vouch."""
    for master in masters:
        for fragment in master.fragments:
            if fragment.low < fragment.high and is_vouched(fragment.parameter):
                yield names[fragment.parameter], master


def is_vouched(parameter: torch.Tensor) -> bool:
    """True if this rank's copy counts. Later stages of a pipeline have copies of tied modules too;
    of these only the tied weights are trained like the first stage's."""
    return not getattr(parameter, "ds_pipe_replicated", False)


_Parts = Iterator[tuple[torch.Tensor, dict[str, Any], Iterable[Fragment]]]
"""Fragments are made as they are asked for, before the next part."""


def _bare(optimizer: Any, names: Names) -> _Parts:
    """ZeRO 0 in fp32: the base optimizer updates the parameters themselves."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, group, [_whole(parameter)]


def _unfused(optimizer: Any, names: Names) -> _Parts:
    """FP16_UnfusedOptimizer, also for bf16: an fp32 copy of each parameter."""
    groups = optimizer.optimizer.param_groups
    for models, mains, group in zip(
        optimizer.fp16_groups, optimizer.fp32_groups, groups, strict=True
    ):
        for model, main in zip(models, mains, strict=True):
            yield main, group, [_whole(model)]


def _fused(optimizer: Any, names: Names) -> _Parts:
    """FP16_Optimizer: an fp32 copy of all parameters of a group in one buffer."""
    groups = optimizer.optimizer.param_groups
    flats = optimizer.fp16_groups_flat, optimizer.fp32_groups_flat
    for models, flat, main, group in zip(optimizer.fp16_groups, *flats, groups, strict=True):
        fragments = (
            Fragment(model, 0, model.numel(), offset_in(flat, model, names[model]))
            for model in models
            if model.numel()
        )
        yield main, group, fragments


def _stage_1_and_2(optimizer: Any, names: Names) -> _Parts:
    """DeepSpeedZeroOptimizer: a flat buffer a group, cut into one partition a rank."""
    yield from _partitions(
        optimizer,
        optimizer.bit16_groups,
        optimizer.bit16_groups_flat,
        optimizer.single_partition_of_fp32_groups,
        names,
    )


def _bf16(optimizer: Any, names: Names) -> _Parts:
    """BF16_Optimizer: as stage 1."""
    yield from _partitions(
        optimizer,
        optimizer.bf16_groups,
        optimizer.bf16_groups_flat,
        optimizer.fp32_groups_flat_partition,
        names,
    )


def _partitions(
    optimizer: Any,
    model_groups: Sequence[Sequence[torch.Tensor]],
    flats: Sequence[torch.Tensor],
    mains: Sequence[torch.Tensor],
    names: Names,
) -> _Parts:
    columns = (optimizer.optimizer.param_groups, optimizer.real_dp_process_group)
    for models, flat, main, group, ranks in zip(model_groups, flats, mains, *columns, strict=True):
        world, rank = _size_and_rank(ranks)
        if main.numel() * world != flat.numel():
            raise LayoutError(
                f"{world} ranks have {main.numel()} elements each of a flat buffer of "
                f"{flat.numel()}; expected equal partitions. Use a known version of DeepSpeed."
            )
        fragments = (
            partitioned(m, m.numel(), offset_in(flat, m, names[m]), main.numel(), rank)
            for m in models
            if m.numel()
        )
        yield main, group, fragments


def _stage_3(optimizer: Any, names: Names) -> _Parts:
    """DeepSpeedZeroOptimizer_Stage3: a flat buffer a sub-group, of one range of each parameter."""
    for number, (models, flat, main) in enumerate(
        zip(
            optimizer.fp16_groups,
            optimizer.fp16_partitioned_groups_flat,
            optimizer.fp32_partitioned_groups_flat,
            strict=True,
        )
    ):
        if main.numel() != flat.numel():
            raise LayoutError(
                f"the master of sub-group {number} has {main.numel()} elements and its model's "
                f"buffer {flat.numel()}; expected equal ones. Use a known version of DeepSpeed."
            )
        group = optimizer.optimizer.param_groups[optimizer.sub_group_to_group_id[number]]
        yield main, group, (shard_fragment(m, flat, names[m]) for m in models if m.ds_numel)


def shard_fragment(parameter: Any, flat: torch.Tensor, name: str) -> Fragment:
    """Return this rank's range of a stage 3 parameter, as it lies in ``flat``."""
    shard = parameter.ds_tensor
    world, rank = _size_and_rank(parameter.ds_process_group)
    if shard.numel() * world < parameter.ds_numel:
        raise LayoutError(
            f"{world} ranks have {shard.numel()} elements each of {name}, which has "
            f"{parameter.ds_numel}. Use a known version of DeepSpeed."
        )
    fragment = partitioned(parameter, parameter.ds_numel, 0, shard.numel(), rank)
    start = offset_in(flat, shard, name)
    return Fragment(parameter, fragment.low, fragment.high, start, fragment.cuts)


_ADAPTERS: Mapping[str, Callable[[Any, Names], _Parts]] = {
    "FP16_UnfusedOptimizer": _unfused,
    "FP16_Optimizer": _fused,
    "BF16_Optimizer": _bf16,
    "DeepSpeedZeroOptimizer": _stage_1_and_2,
    "DeepSpeedZeroOptimizer_Stage3": _stage_3,
}


def _whole(parameter: torch.Tensor) -> Fragment:
    return Fragment(parameter, 0, parameter.numel(), 0)


def _size_and_rank(ranks: Any) -> tuple[int, int]:
    from deepspeed import comm

    return comm.get_world_size(group=ranks), comm.get_rank(group=ranks)


def _check_inside(values: torch.Tensor, fragments: Sequence[Fragment], names: Names) -> None:
    for fragment in fragments:
        end = fragment.start + fragment.high - fragment.low
        if fragment.low < fragment.high and not 0 <= fragment.start <= end <= values.numel():
            raise LayoutError(
                f"{names[fragment.parameter]} would end at element {end} of a buffer of "
                f"{values.numel()} of the optimizer. Use a known version of DeepSpeed."
            )


Cuts = tuple[int, ...]


def cut_alike(engine: Any, masters: Sequence[Master]) -> list[Master]:
    """Return the masters with the united cuts of all ranks with the same parameters.

    These ranks exchange a few numbers for each parameter; without pipeline and tensor parallelism
    nothing is done. Call it on every rank.
    """
    cuts = {id(f.parameter): f.cuts for master in masters for f in master.fragments}
    for group, parameters in _sharers(engine):
        own = [cuts.get(id(parameter), ()) for parameter in parameters]
        for parameter, united in zip(parameters, _united(own, group, engine.device), strict=True):
            cuts[id(parameter)] = united
    return [
        replace(
            master,
            fragments=tuple(replace(f, cuts=cuts[id(f.parameter)]) for f in master.fragments),
        )
        for master in masters
    ]


def _sharers(engine: Any) -> Iterator[tuple[Any, list[torch.Tensor]]]:
    """Yield groups of ranks with this one, and their common parameters.

    Source: ``PipelineModule._index_tied_modules``, runtime/pipe/module.py (0.16.0 to 0.19.8).
    """
    from deepspeed.utils import bwc

    tensor_parallel = parallel_ranks.tensor_parallel(engine)
    if tensor_parallel.size > 1:
        named = engine.module.named_parameters()
        whole = [p for name, p in named if not tensor_parallel.is_cut(name, p)]
        yield bwc.bwc_tensor_model_parallel_group(engine.mpu), whole
    tied = getattr(engine.module, "tied_comms", {})
    for key in sorted(tied):
        yield tied[key]["group"], list(tied[key]["module"].parameters())


def _united(own: Sequence[Cuts], group: Any, device: torch.device) -> list[Cuts]:
    """Return for each parameter the cuts of all ranks of the group. Collective."""
    counts = torch.tensor([len(cuts) for cuts in own], dtype=torch.int64, device=device)
    most = torch.stack(_gathered(counts, group)).amax(0).tolist()
    # Padded to equal lengths: what is cut at 0 is not cut.
    padded = [cut for cuts, n in zip(own, most, strict=True) for cut in (*cuts, *[0] * n)[:n]]
    flat = torch.tensor(padded, dtype=torch.int64, device=device)
    ranks = [iter(values.tolist()) for values in _gathered(flat, group)]
    return [tuple(sorted({next(r) for r in ranks for _ in range(n)} - {0})) for n in most]


def _gathered(values: torch.Tensor, group: Any) -> list[torch.Tensor]:
    others = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    if values.numel():
        dist.all_gather(others, values, group=group)
    return others
