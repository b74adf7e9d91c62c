"""A DeepSpeed job's own names and values in its checkpoint, and its stored configuration.

Source: deepspeed 0.19.8: runtime/zero/config.py, runtime/precision_config.py and
``DeepSpeedConfigModel`` of runtime/config_utils.py, dropping ``"auto"``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from scalai.converters.deepspeed.cuts import ShardCut
from scalai.converters.deepspeed.experts import Experts
from scalai.converters.deepspeed.pipeline import Pipeline
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


STATE = "deepspeed"
"""Key of a ``DeepSpeedJob`` in ``Values.extra``."""

DEFAULT_SUB_GROUP_ELEMENTS = 1_000_000_000
"""``sub_group_size`` of deepspeed/runtime/zero/config.py, 0.19.8."""

_FP32 = ("fp32", "float32", "float", "torch.float32")
"""Names of fp32 in a configuration."""


@dataclass(frozen=True, eq=False, slots=True)
class DeepSpeedJob:
    """A job's names and values, for its engine at any degree and stage.

    Attributes:
        groups: Names of trained parameters by parameter group, in the optimizer's order.
        module: Keys of the module's ``state_dict``, in order.
        module_values: Its entries other than tensors.
        module_metadata: Its ``_metadata``: versions of modules.
        module_nesting: Paths of its tensors not under their names (``nested``).
        aliases: Names of shared parameters -> names of the kept ones.
        model: Other entries of the model's file, client_state included.
        optimizer: Other entries of a rank's optimizer state: loss scaler, clip_grad.
        has_number_steps: Whether the optimizer's step is a number, not a tensor.
        is_bf16: Whether the engine trains in bf16: its files have a prefix.
        is_fused: Whether the optimizer is FusedAdam, with flat buffers in stage 0; None: not
            stated.
        cuts: Cuts of parameters among tensor-parallel ranks; empty: no such ranks.
        of_ranks: ``model`` by model-parallel rank; empty: the same for all.
        pipeline: Layers of a pipeline engine; None: another engine.
        experts: Layers with experts; None: there are none.
        lacks_frozen: Whether no frozen parameters were saved: there are none, or they were
            excluded.
    """

    tag: str
    groups: tuple[tuple[str, ...], ...]
    module: tuple[str, ...]
    module_values: Mapping[str, Any]
    module_metadata: Any
    dtypes: Mapping[str, str]
    aliases: Mapping[str, str]
    buffers: tuple[str, ...]
    frozen: tuple[str, ...]
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    has_number_steps: bool
    is_bf16: bool
    is_fused: bool | None = None
    cuts: Mapping[str, ShardCut] = field(default_factory=dict)
    of_ranks: tuple[Mapping[str, Any], ...] = ()
    pipeline: Pipeline | None = None
    module_nesting: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    experts: Experts | None = None
    lacks_frozen: bool = False


def zero_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration's ZeRO section, without ``auto`` values."""
    section = config.get("zero_optimization")
    if not isinstance(section, Mapping):
        return {}
    return {key: value for key, value in section.items() if value != AUTO}


def enables_bf16(config: Mapping[str, Any]) -> bool:
    """Tell whether a DeepSpeed configuration trains in bf16."""
    section = config.get("bf16", config.get("bfloat16")) or {}
    return section.get("enabled") not in (None, False, AUTO)


def uses_bf16_optimizer(config: Mapping[str, Any], stage: int) -> bool:
    """Tell whether the engine's optimizer is ``BF16_Optimizer``, not ZeRO's own of this stage.

    Source: ``_do_optimizer_sanity_check`` of deepspeed/runtime/engine.py, 0.19.8.
    """
    types = config.get("data_types") or {}
    offload = zero_config(config).get("offload_optimizer") or {}
    return (
        stage == 1
        and enables_bf16(config)
        and types.get("grad_accum_dtype") in _FP32
        and offload.get("device") != "cpu"
    )


def round_robins(config: Mapping[str, Any]) -> bool:
    """Tell whether stages 1 and 2 order parameters by ``round_robin_gradients``."""
    return bool(zero_config(config).get("round_robin_gradients"))


def aligns_parameters(config: Mapping[str, Any]) -> bool:
    """Tell whether stages 1 and 2 align parameters in their buffers."""
    return bool(zero_config(config).get("parameter_alignment"))


def sub_group_elements(config: Mapping[str, Any]) -> int:
    """Return the ``sub_group_size`` of stage 3."""
    size = zero_config(config).get("sub_group_size", DEFAULT_SUB_GROUP_ELEMENTS)
    return int(float(size))
