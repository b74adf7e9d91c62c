"""Checks the used parts of a DeepSpeed configuration.

Source: deepspeed 0.19.8: runtime/zero/config.py, runtime/precision_config.py and
``DeepSpeedConfigModel`` of runtime/config_utils.py, dropping ``"auto"``.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from scalai.core.errors import RefusedError

AUTO = "auto"
"""The value for a default."""

_TABLES = (
    "zero_optimization", "zero_optimization.offload_optimizer", "bf16", "bfloat16", "fp16",
    "data_types",
)  # fmt: skip
_NUMBERS = (
    "gradient_clipping", "zero_optimization.sub_group_size", "fp16.hysteresis",
    "fp16.min_loss_scale",
)  # fmt: skip


def check_config(config: Any, where: str) -> None:
    """Refuse a configuration with a part in another form than DeepSpeed takes.

    Args:
        config: A stored configuration; None: nothing to check.
        where: Its origin, for the message.

    Raises:
        RefusedError: Names the key, the value and the expected form.
    """
    if config is None:
        return
    if not isinstance(config, Mapping):
        raise RefusedError(f"{where} has {config!r:.80} as ds_config, not a table of settings.")
    for keys in _TABLES:
        found = _find(config, keys)
        if found is not None and found != AUTO and not isinstance(found, Mapping):
            raise _odd(where, keys, found, "a table")
    for keys in _NUMBERS:
        found = _find(config, keys)
        if found is not None and found != AUTO and not is_number(found):
            raise _odd(where, keys, found, "a number that is not negative")


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number of 0 or more, or its text."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return isfinite(number) and number >= 0


def _find(config: Mapping[str, Any], keys: str) -> Any:
    found: Any = config
    for key in keys.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _odd(where: str, keys: str, found: Any, expected: str) -> RefusedError:
    return RefusedError(
        f"{where}: ds_config has {keys} = {found!r:.80}, and {expected} is expected. The file is "
        "damaged or was edited: use another checkpoint, or set it right in the job and save again."
    )
