"""Hyper-parameters of parameter groups, by the parameters in them, and the state of an optimizer
before its first step.

Not by a group's number, nor by its values: DeepSpeed drops empty groups, Megatron-LM makes others
at another EP, and two groups may be equal now and differ later. Put groups last: schedules set
values from today's flags when they are made or loaded.

The state has to exist as soon as the job is built: a restore fills it, and the list of a rank's
tensors is made once.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.patches.plain import all_plain, live, only_plain, plain

Group = tuple[dict[str, Any], Sequence[str]]
"""A parameter group as the optimizer has it, and the names of the parameters in it, the same in
every layout."""

_OF_THE_LAYOUT = frozenset({
    "params", "param_names", "is_expert_parallel",
    "capturable", "differentiable", "foreach", "fused",
    "cpu_optimizer_cls", "gpu_optimizer_cls", "offload_fraction", "param_update_in_fp32",
    "pin_cpu_grads", "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d",
})  # fmt: skip
"""Keys about the group's parameters in this layout, and about the way of the same update: torch's
kernels, and the place of Megatron-LM's HybridDeviceOptimizer."""
_NAMED = 5


def take_groups(groups: Iterable[Group]) -> Callable[[], Json]:
    """Return a function that writes down the present values of this rank's groups, and each
    parameter's group. Objects without a JSON form stay the constructor's."""
    # One without parameters counts no steps, and other ranks know better.
    taken = [(_values(group), names) for group, names in groups if names]

    def write() -> Json:
        values: dict[str, Json] = {}
        of: dict[str, str] = {}
        for kept, names in taken:
            digest = _digest(kept)
            values[digest] = kept
            of |= dict.fromkeys(names, digest)
        return {"values": values, "of": of}

    return write


def put_groups(saved: Mapping[str, Any], groups: Sequence[Group]) -> None:
    """Give this rank's groups the values from ``take_groups``, united over all ranks. A group
    without parameters here takes the values common to all groups of its kind.

    Raises:
        RefusedError: Parameters of one group were in groups with other values, or in none; or a
            group does not keep a value.
    """
    for group, names in groups:
        for key, value in _wanted(saved, group, names).items():
            _set(group, key, live(value))
    if found := differences(saved, groups):
        raise RefusedError(
            f"the optimizer does not keep the hyper-parameters that it is given: {_few(found)}. "
            "Let nothing set them while the state is restored."
        )


def differences(saved: Mapping[str, Any], groups: Iterable[Group]) -> list[str]:
    """Return differences from the values of ``take_groups`` as text: a parameter of the group, key,
    value now, value then.

    Raises:
        RefusedError: As ``put_groups``.
    """
    return [
        f"{key} of the group of {names[0]} is {group.get(key)!r}, and was {live(value)!r}"
        for group, names in groups
        if names
        for key, value in _wanted(saved, group, names).items()
        if key not in group or not _is(group[key], live(value))
    ]


def check_schedule(saved: Mapping[str, Json], schedule: Any) -> None:
    """Check a schedule after ``load_state_dict(saved)``.

    Args:
        saved: Its ``state_dict`` from ``all_plain``.

    Raises:
        RefusedError: It did not keep a value.
    """
    now = all_plain(schedule.state_dict(), "schedule")
    found = [
        f"{key} is {live(now.get(key))!r}, and was {live(value)!r}"
        for key, value in saved.items()
        if json.dumps(now.get(key)) != json.dumps(value)
    ]
    if found:
        raise RefusedError(
            f"{type(schedule).__name__} does not keep what its load_state_dict() is given: "
            f"{_few(found)}. Have it take what its state_dict() returns."
        )


def _wanted(
    saved: Mapping[str, Any], group: Mapping[str, Any], names: Sequence[str]
) -> Mapping[str, Json]:
    values = {digest: _of_update(kept) for digest, kept in saved["values"].items()}
    if not names:
        return _common([kept for kept in values.values() if _kind(kept) == _kind(_values(group))])
    found = {saved["of"].get(name): name for name in names}
    if len(found) != 1 or None in found:
        listed = [f"{name} in {_text(values.get(of))}" for of, name in found.items()]
        raise RefusedError(
            f"parameters of one group here were in several before, or in none: {_few(listed)}. "
            "Give the optimizer the parameter groups that the job had."
        )
    (digest,) = found
    return dict(values[digest])


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    present = group.get(key)
    if isinstance(present, torch.Tensor):
        present.copy_(torch.as_tensor(value))  # captured in a graph: keep its place
    else:
        group[key] = tuple(value) if isinstance(present, tuple) else value


def _is(present: Any, value: Any) -> bool:
    if isinstance(present, torch.Tensor):
        return torch.equal(present, torch.as_tensor(value).to(present))
    return json.dumps(plain(present, "")) == json.dumps(plain(value, ""))


def _values(group: Mapping[str, Any]) -> dict[str, Json]:
    return only_plain(_of_update(group))


def _of_update(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in _OF_THE_LAYOUT and k[0] != "_"}


def _kind(values: Mapping[str, Json]) -> Json:
    """Return a group's values other than numbers: they are the same in any layout."""
    return {key: value for key, value in values.items() if isinstance(value, bool | str)}


def _common(found: Sequence[Mapping[str, Json]]) -> Mapping[str, Json]:
    first = found[0] if found else {}
    return {
        key: value
        for key, value in first.items()
        if all(key in other and other[key] == value for other in found)
    }


def _digest(values: Json) -> str:
    """Name values, equal on all ranks."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _text(values: Mapping[str, Json] | None) -> str:
    return "none" if values is None else str({key: live(value) for key, value in values.items()})


def _few(found: Sequence[str]) -> str:
    more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return "; ".join(found[:_NAMED]) + more


def torch_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, group: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the state torch's own optimizer has for a parameter before any step; None: unknown
    optimizer.

    Args:
        parameter: Tensor of any shape under the optimizer's update.

    Raises:
        RefusedError: The first step is unlike the others.
    """
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return _adam_state(parameter, group)
    if isinstance(optimizer, torch.optim.SGD):
        return _sgd_state(parameter, group)
    return None


def _adam_state(parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
    # As torch.optim.Adam._init_group does it: one step tensor a parameter, it adds 1 in place.
    on_device = group.get("capturable") or group.get("fused")
    device = parameter.device if on_device else torch.device("cpu")
    moments = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group.get("amsgrad"))
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        **{name: torch.zeros_like(parameter) for name in moments},
    }


def _sgd_state(parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
    if not group["momentum"]:
        return {}
    if group["dampening"]:
        raise RefusedError(
            f"SGD with dampening={group['dampening']} starts its momentum with the first gradient, "
            "which zeros cannot stand for. Use dampening 0."
        )
    return {"momentum_buffer": torch.zeros_like(parameter)}
