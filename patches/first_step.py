"""What an optimizer's first step would make, before it is made.

The state has to exist as soon as the job is built: a restore fills it, and the list of a rank's
tensors is made once.
"""

from typing import Any

import torch

from scalai.core.errors import RefusedError


def torch_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, group: dict[str, Any]
) -> dict[str, Any] | None:
    """Return what torch's own optimizer keeps for a parameter after no steps; None: not known.

    Args:
        parameter: What the optimizer updates; of any shape.
        group: The parameter group that it is in, or will be.

    Raises:
        RefusedError: Its first step is unlike the others.
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
