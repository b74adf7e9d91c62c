"""The small part of the training state: schedule, loss scale, parameter groups. As JSON."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.patches.megatron.optimizer import leaf_optimizers
from scalai.patches.plain import all_live, all_plain, live, plain

_GROUP_VALUES = ("lr", "weight_decay", "step")
"""What changes in a parameter group while it trains; FusedAdam keeps its step there."""


def take_scalars(optimizer: Any, scheduler: Any) -> Mapping[str, Json]:
    """Return the scalars of this rank: all parameter groups, filled where it owns parameters.

    Raises:
        RefusedError: The scheduler keeps something that JSON cannot hold.
    """
    leaves = list(leaf_optimizers(optimizer))
    scalers = [leaf.grad_scaler for leaf in leaves if getattr(leaf, "grad_scaler", None)]
    return {
        "scheduler": all_plain(scheduler.state_dict(), "scheduler") if scheduler else None,
        "grad_scaler": all_plain(scalers[0].state_dict(), "grad scaler") if scalers else None,
        "param_groups": _all_groups(leaves),
    }


def put_scalars(scalars: Mapping[str, Json], optimizer: Any, scheduler: Any) -> None:
    """Put back what ``take_scalars`` returned, united over all ranks.

    Raises:
        RefusedError: A parameter group of this job was not there when the scalars were taken.
    """
    for leaf in leaf_optimizers(optimizer):
        for group in leaf.optimizer.param_groups:
            _put_group(scalars["param_groups"], group)
        scaler = getattr(leaf, "grad_scaler", None)
        if scaler and scalars["grad_scaler"] is not None:
            scaler.load_state_dict(all_live(scalars["grad_scaler"]))
    if scheduler and scalars["scheduler"] is not None:
        if hasattr(scheduler, "num_steps"):
            scheduler.num_steps = 0  # OptimizerParamScheduler.load_state_dict() adds the saved ones
        scheduler.load_state_dict(all_live(scalars["scheduler"]))


def _all_groups(leaves: Sequence[Any]) -> Json:
    groups: dict[str, dict[str, Json]] = {}
    for leaf in leaves:
        for group in leaf.optimizer.param_groups:
            values = groups.setdefault(_identity(group), {})
            if group["params"]:  # FusedAdam counts no steps without any: another rank knows better
                for key in _GROUP_VALUES:
                    if key in group:
                        values[key] = plain(group[key], f"parameter group's {key}")
    return groups


def _put_group(groups: Mapping[str, Mapping[str, Json]], group: dict[str, Any]) -> None:
    saved = groups.get(_identity(group))
    if saved is None:
        raise RefusedError(
            f"no parameter group of the saved state is {_identity(group)}; it has "
            f"{sorted(groups)}. Resume with the optimizer flags that the job had."
        )
    for key, value in saved.items():
        if isinstance(group.get(key), torch.Tensor):
            group[key].copy_(live(value))  # captured in a CUDA graph: keep its place
        else:
            group[key] = live(value)


def _identity(group: Mapping[str, Any]) -> str:
    """Name a parameter group by the keys that megatron's own checkpoints match groups by.

    But not by ``is_expert_parallel``: with another EP degree the same experts may be in a common
    group.
    """
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    return json.dumps(
        {
            key: group.get(key, group.get(f"pre_{key}"))
            for key in param_group_identifier_keys
            if key != "is_expert_parallel"
        },
        sort_keys=True,
    )
