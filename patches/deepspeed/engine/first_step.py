"""What the base optimizer's first step would make, with DeepSpeed's own optimizers."""

from typing import Any

import torch

from scalai.core.errors import RefusedError
from scalai.patches.first_step import torch_state


def ensure_state(optimizer: Any, values: torch.Tensor, group: dict[str, Any]) -> None:
    """Give a fresh optimizer the state for ``values`` that its first step would make.

    Raises:
        RefusedError: It is not known what it would make.
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
