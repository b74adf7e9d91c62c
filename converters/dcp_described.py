"""The training in torch.distributed.checkpoint that another framework's state becomes: the tree of
``get_state_dict``, with that framework's groups."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from scalai.converters.checkpoint import PARAM, USER, Checkpoint
from scalai.converters.dcp_job import DcpJob, OptimizerTree
from scalai.converters.deepspeed.job import STATE, DeepSpeedJob
from scalai.converters.megatron.modules import expert_of, group_of
from scalai.converters.torch_archive import content_of, lay_out_archive
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import split_name

INVENTED = "invented: "

ADAMW: Mapping[str, Any] = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False,
    "differentiable": False, "fused": None, "decoupled_weight_decay": True,
}  # fmt: skip
"""Entries of torch's AdamW group beside its rates."""
RATES = ("lr", "betas", "eps", "weight_decay")
"""Adam's hyperparameters under torch's names; all frameworks use them."""


def described(source: Checkpoint, notes: list[str]) -> tuple[DcpJob, tuple[Mapping[str, Any], ...]]:
    """Return a training of a source of another framework, and the values of its groups.

    ``notes``: gets a line for each value not the source's.

    Raises:
        RefusedError: The source does not say the groups of its parameters.
    """
    tensors = source.placed.collection.tensors
    pairs = [split_name(tensor.name) for tensor in tensors]
    trained = list(dict.fromkeys(name for kind, name in pairs if kind not in (PARAM, USER)))
    members = members_of(source, trained)
    given = source.values.param_groups or ({},)
    kept = [(names, group) for names, group in zip(members, given, strict=True) if names]
    return _training(kept, source.values.step, notes)


def described_groups(
    order: Sequence[str], of_name: Mapping[str, Mapping[str, Any]], step: int, notes: list[str]
) -> tuple[DcpJob, tuple[Mapping[str, Any], ...]]:
    """Return a training whose parameters have the groups of another framework.

    Args:
        order: The trained parameters.
        of_name: The group of each.
        notes: As for ``described``.
    """
    found: dict[int, tuple[list[str], Mapping[str, Any]]] = {}
    for name in order:
        group = of_name.get(name, {})
        found.setdefault(id(group) if group else 0, ([], group))[0].append(name)
    kept = [
        (tuple(names), {rate: group[rate] for rate in RATES if rate in group})
        for names, group in found.values()
    ]
    return _training(kept, step, notes)


def _training(
    kept: Sequence[tuple[tuple[str, ...], Mapping[str, Any]]], step: int, notes: list[str]
) -> tuple[DcpJob, tuple[Mapping[str, Any], ...]]:
    objects = {"step": content_of(lay_out_archive(step))}
    job = DcpJob(("model",), objects=objects, paths={"step": ("step",)})
    if not kept:
        return job, ()
    groups = tuple(torch_group(group) for _, group in kept)
    if any("betas" in group for group in groups):
        notes.append(f"{INVENTED}AdamW's flags of parameter groups ({', '.join(ADAMW)})")
    else:
        notes.append("parameter groups have no betas and eps: torch's optimizer takes its own")
    tree = OptimizerTree(("optimizer",), False, tuple(names for names, _ in kept))
    return replace(job, optimizers=(tree,)), groups


def members_of(source: Checkpoint, trained: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the names of each of a source's parameter groups.

    Raises:
        RefusedError: It does not say them.
    """
    groups, job = source.values.param_groups, source.values.extra.get(STATE)
    if isinstance(job, DeepSpeedJob) and len(job.groups) == len(groups):
        known = set(trained)
        return tuple(tuple(name for name in names if name in known) for names in job.groups)
    if len(groups) < 2 or not trained:
        return (tuple(trained), *[()] * (len(groups) - 1))
    dims = {split_name(t.name)[1]: len(t.shape) for t in source.placed.collection.tensors
            if t.name.startswith(f"{PARAM}/")}  # fmt: skip
    members: list[list[str]] = [[] for _ in groups]
    for name in trained:
        members[_group(name, dims[name], groups)].append(name)
    return tuple(map(tuple, members))


def _group(name: str, dims: int, groups: Sequence[Mapping[str, Any]]) -> int:
    """Return Megatron's group of a parameter; experts may have groups of their own."""
    is_expert = expert_of(name) is not None
    alike = [n for n, of in enumerate(groups) if bool(of.get("is_expert_parallel")) == is_expert]
    alike = alike or list(range(len(groups)))
    try:
        return alike[group_of(name, dims, [groups[n] for n in alike])]
    except RefusedError:
        if len(alike) == 1:
            return alike[0]
        raise


def torch_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group as torch's optimizer keeps it: plain values, and AdamW's flags."""
    plain = {key: value for key, value in group.items() if _is_plain(value)}
    return {**ADAMW, **plain} if "betas" in plain else plain


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
