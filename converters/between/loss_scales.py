"""The dynamic fp16 loss scale of one framework in the other's form.

Both double the scale after a number of steps without an overflow, and halve it at an overflow
without hysteresis left. Megatron counts good steps; DeepSpeed keeps the last bad step, and grows
one step later.

Source: ``DynamicGradScaler`` of megatron/core/optimizer/grad_scaler.py (0.16.1) and
``DynamicLossScaler`` of deepspeed/runtime/fp16/loss_scaler.py (0.19.8).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from scalai.converters.deepspeed.job import DeepSpeedJob
from scalai.converters.deepspeed.loss_scale import to_zero
from scalai.converters.pickles import Foreign
from scalai.converters.torch_archive import NewTensor
from scalai.store.files import number_of

_WINDOW = 1000
"""Good steps before growth, by default in both."""


def to_deepspeed_scale(
    scaler: Mapping[str, Any], config: Mapping[str, Any], step: int
) -> dict[str, Any] | None:
    """Return ZeRO's entries for Megatron's scale; None: the job has no dynamic one.

    Args:
        scaler: State of Megatron's scaler, possibly empty.
    """
    section = config.get("fp16") or {}
    if not section.get("enabled") or section.get("loss_scale") or "scale" not in scaler:
        return None
    tree = {
        "dynamic_loss_scale": True,
        "cur_scale": number_of(scaler["scale"].content or b"", "F32"),
        "cur_iter": step,
        "last_overflow_iter": step - int(scaler["growth_tracker"]) - 2,
        "scale_factor": 2.0,
        "scale_window": section.get("loss_scale_window", _WINDOW),
    }
    entries = to_zero(tree, config)
    entries["loss_scaler"].state["cur_hysteresis"] = max(int(scaler["hysteresis_tracker"]), 1)
    return entries


def to_megatron_scale(job: DeepSpeedJob) -> dict[str, Any] | None:
    """Return Megatron's state for DeepSpeed's scale; None: it is not dynamic."""
    scaler = job.optimizer.get("loss_scaler")
    state = scaler.state if isinstance(scaler, Foreign) and isinstance(scaler.state, dict) else {}
    if not state.get("dynamic"):
        return None
    good = max(int(state["cur_iter"]) - int(state["last_overflow_iter"]) - 2, 0)
    return {
        "scale": NewTensor("F32", (1,), np.float32(state["cur_scale"]).tobytes()),
        "growth_tracker": good % int(state["scale_window"]),
        "hysteresis_tracker": int(state["cur_hysteresis"]),
    }
