"""The optimizers' part of a legacy checkpoint, as a rank's own would have it.

Source: ``state_dict`` of megatron/core/optimizer/optimizer.py, ``get_parameter_state_dp_zero`` of
megatron/core/optimizer/distrib_optimizer.py (0.16.1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scalai.converters.checkpoint import MAIN, PARAM, STEP
from scalai.converters.megatron.grad_buffers import Member, bucket_numel, lay_buffer
from scalai.converters.megatron.modules import group_of
from scalai.converters.megatron.torch_legacy_job import Coordinate, Job, Local
from scalai.converters.pickles import foreign
from scalai.converters.torch_archive import NewTensor
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.dtypes import TORCH_NAMES
from scalai.core.tensors.region import Box, whole


@dataclass(frozen=True, slots=True)
class Fill:
    """A box of a tensor that is to lie in a file's tensor, from byte ``offset`` of it on."""

    tensor: Tensor
    box: Box
    into: NewTensor
    offset: int = 0


def filled(local: Local, tensor: Tensor, fills: list[Fill]) -> NewTensor:
    """Return a new tensor of a rank's shape, which the tensor's boxes are to fill."""
    into = NewTensor(tensor.dtype, local.shape)
    offset = 0
    for part in local.parts:
        fills.append(Fill(tensor, part.box, into, offset))
        offset += NewTensor(tensor.dtype, part.box.shape).size_bytes
    return into


def groups_of(job: Job, number: int) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer: of dense parameters, or of experts."""
    mine = [group for group in job.groups if bool(group.get("is_expert_parallel")) == bool(number)]
    mine = mine or list(job.groups)
    return [{**_counted(group, job.step), "is_expert_parallel": bool(number)} for group in mine]


def _counted(group: Mapping[str, Any], step: float | None) -> dict[str, Any]:
    """Return a parameter group with the optimizer's step, a whole number where it was one."""
    if step is None:
        return dict(group)
    return {**group, "step": int(step) if isinstance(group.get("step"), int) else step}


def link_of(
    job: Job, locals_: Sequence[Local], groups: list[dict[str, Any]], fills: list[Fill]
) -> dict[str, Any]:
    """Return an optimizer's state dict."""
    scaler = job.source.values.grad_scaler
    scalers = {} if scaler is None else {"grad_scaler": scaler}
    if job.is_split:
        return {"optimizer": {"param_groups": groups}, **scalers}
    members: list[list[Local]] = [[] for _ in groups]
    for local in locals_:
        dims = len(job.tensors[f"{PARAM}/{local.name}"].shape)
        members[group_of(local.name, dims, groups)].append(local)
    state: dict[int, Any] = {}
    counted = []
    for group, of_group in zip(groups, members, strict=True):
        first = len(state)
        for local in of_group:
            state[len(state)] = _moments(job, local, fills)
        # Apex's FusedAdam counts in the group, as a whole number; torch's Adam at each parameter.
        if not isinstance(group.get("step"), int):
            group.pop("step", None)
        counted.append({**group, "params": list(range(first, len(state)))})
    inner = {"state": state, "param_groups": counted}
    if not any(name.startswith(f"{MAIN}/") for name in job.tensors) and scaler is None:
        return inner
    masters = [
        [filled(local, job.tensors[f"{MAIN}/{local.name}"], fills)
         for local in of_group if f"{MAIN}/{local.name}" in job.tensors]
        for of_group in members
    ]  # fmt: skip
    return {"optimizer": inner, **scalers, "fp32_from_fp16_params": masters}


def _moments(job: Job, local: Local, fills: list[Fill]) -> dict[str, Any]:
    """Return the state of one parameter of a whole optimizer, as torch's Adam keeps it."""
    state: dict[str, Any] = {}
    if f"{STEP}/{local.name}" in job.tensors:
        state[STEP] = NewTensor("F32", ())
        fills.append(Fill(job.tensors[f"{STEP}/{local.name}"], whole(()), state[STEP]))
    for kind in job.kinds:
        state[kind] = filled(local, job.tensors[f"{kind}/{local.name}"], fills)
    return state


def buffers_of(
    job: Job,
    coordinate: Coordinate,
    locals_: Sequence[Local],
    numel: int,
    fills: list[Fill],
) -> dict[Any, Any]:
    """Return the state of the distributed optimizer, as its first rank gathers it.

    Args:
        numel: Elements of all parameters of the rank.
    """
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for chunk in range(job.degrees["vpp"]):
        of_chunk = [local for local in locals_ if local.chunk == chunk]
        dtypes = {local.name: job.tensors[f"{PARAM}/{local.name}"].dtype for local in of_chunk}
        size = bucket_numel(
            job.arguments or {}, dp=job.ranks, pp_rank=coordinate[1], chunk=chunk, numel=numel
        )
        for dtype in dict.fromkeys(dtypes.values()):
            mine = [local for local in of_chunk if dtypes[local.name] == dtype]
            members = [Member(local.numel, local.is_shared) for local in mine]
            starts, total = lay_buffer(members, size)
            buffer: dict[str, Any] = {}
            for kind in ("param", *job.kinds):
                buffer[kind] = NewTensor("F32", (total,))
                for local, start in zip(mine, starts, strict=True):
                    _fill_flat(job, kind, local, buffer[kind], start, fills)
            buffer["numel_unpadded"] = total
            key = foreign("torch", TORCH_NAMES[dtype]), _grad_dtype(job, dtype)
            state[len(state) - 1] = {key: buffer}
    return state


def _fill_flat(
    job: Job, kind: str, local: Local, into: NewTensor, start: int, fills: list[Fill]
) -> None:
    """Note which boxes fill a parameter's part of a flat buffer."""
    if kind == "param":
        weight, main = (job.tensors.get(f"{k}/{local.name}") for k in (PARAM, MAIN))
        tensor = main or weight
        assert tensor is not None
    else:
        tensor = job.tensors[f"{kind}/{local.name}"]
    if tensor.dtype != into.dtype:
        raise RefusedError(
            f"there is no fp32 {kind} of {local.name}, but {tensor.dtype}. Use a checkpoint that "
            "was saved with its optimizer, or --to torch_dist."
        )
    offset = start * 4
    for part in local.parts:
        fills.append(Fill(tensor, part.box, into, offset))
        offset += 4 * part.box.numel


def _grad_dtype(job: Job, dtype: str) -> Any:
    """Return the dtype of gradients, by which Megatron finds a buffer."""
    given = job.arguments or {}
    is_wide = given.get("accumulate_allreduce_grads_in_fp32", dtype == "BF16")
    return foreign("torch", TORCH_NAMES["F32" if is_wide else dtype])
