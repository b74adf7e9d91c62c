"""The loss scale of fp16: what of DeepSpeed's scalers changes while they train."""

from collections.abc import Mapping
from typing import Any

from scalai.core.jsonable import Json

_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_OVERRIDE = ("custom_loss_scaler", "external_loss_scale")


def take_loss_scale(optimizer: Any) -> Json:
    """Return the scale and what decides on its next change; empty where nothing is scaled."""
    return {**_taken(_scaler(optimizer), _SCALER), **_taken(optimizer, _OVERRIDE)}


def put_loss_scale(saved: Mapping[str, Json], optimizer: Any) -> None:
    """Set what ``take_loss_scale`` returned and this optimizer has, too."""
    for owner, keys in ((_scaler(optimizer), _SCALER), (optimizer, _OVERRIDE)):
        for key in keys:
            if key in saved and hasattr(owner, key):
                setattr(owner, key, saved[key])


def _scaler(optimizer: Any) -> Any:
    """Return what counts: ``LossScaleConfig`` of ZeRO 0 (before 0.18 the optimizer itself), or
    ``LossScaler`` of ZeRO 1 to 3."""
    for name in ("loss_scale_config", "loss_scaler"):
        if hasattr(optimizer, name):
            return getattr(optimizer, name)
    return optimizer if hasattr(optimizer, "cur_iter") else None


def _taken(owner: Any, keys: tuple[str, ...]) -> dict[str, Json]:
    return {key: getattr(owner, key) for key in keys if hasattr(owner, key)}
