"""The state of DeepSpeed's loss scale, in ZeRO's form and in stage 0's.

ZeRO pickles an object (``loss_scaler``). Stage 0 writes some of its attributes, without hysteresis;
missing ones get the configuration's initial values.

Source: deepspeed 0.19.8: ``LossScaler`` and ``DynamicLossScaler`` of runtime/fp16/loss_scaler.py,
``DeepSpeedFP16Config`` of runtime/precision_config.py, the ``state_dict`` of
runtime/fp16/fused_optimizer.py and unfused_optimizer.py.
"""

from collections.abc import Mapping
from typing import Any

from scalai.converters.pickles import Foreign, foreign, made
from scalai.core.errors import RefusedError

_MODULE = "deepspeed.runtime.fp16.loss_scaler"
_ATTRIBUTES = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
"""Attributes of a dynamic scale in both forms."""


def static_scale(scale: float = 1.0) -> dict[str, Any]:
    """Return ZeRO's entries of a static scale; 1: the loss is not scaled."""
    scaler = made(foreign(_MODULE, "LossScaler"), {"cur_scale": scale, "dynamic": False})
    return {"loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False}


def to_zero(tree: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ZeRO's entries for the state of a stage 0 optimizer.

    Args:
        config: The job's configuration, for the hysteresis and the smallest scale.
    """
    if not tree.get("dynamic_loss_scale"):
        return static_scale(tree.get("cur_scale", 1.0))
    section = config.get("fp16") or {}
    hysteresis = section.get("hysteresis", 2)
    scaler = {
        **{name: tree[name] for name in _ATTRIBUTES},
        "dynamic": True,
        "min_scale": section.get("min_loss_scale", 1),
        "delayed_shift": hysteresis,
        "cur_hysteresis": hysteresis,
        "consecutive_hysteresis": section.get("consecutive_hysteresis", False),
        "raise_error_at_min_scale": True,
        "dtype": foreign("torch", "float16"),
    }
    return {
        "loss_scaler": made(foreign(_MODULE, "DynamicLossScaler"), scaler),
        "dynamic_loss_scale": True,
        "overflow": False,
    }


def to_plain(entries: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return stage 0's entries of the scale, from ZeRO's.

    ``steps``: the engine's steps; ZeRO does not count them for a static scale.

    Raises:
        RefusedError: An attribute is missing.
    """
    scaler = entries.get("loss_scaler")
    state = scaler.state if isinstance(scaler, Foreign) and isinstance(scaler.state, dict) else {}
    if not state.get("dynamic"):
        return {
            "dynamic_loss_scale": False,
            "cur_scale": state.get("cur_scale", 1.0),
            "cur_iter": steps,
        }
    missing = [name for name in _ATTRIBUTES if name not in state]
    if missing:
        raise RefusedError(
            f"the state of the fp16 loss scale lacks {', '.join(missing)} (it has "
            f"{sorted(map(str, state))}). Use another checkpoint."
        )
    return {"dynamic_loss_scale": True, **{name: state[name] for name in _ATTRIBUTES}}
