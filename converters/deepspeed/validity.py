"""The meaning of a DeepSpeed configuration for a step: refusals in a ZeRO stage at any degrees,
computation and state.

DeepSpeed refuses only in the first round of a stage, possibly after a running job's change.
``core/degrees/degrees.py`` checks faults by degree.

Source: ``DeepSpeedConfig`` of deepspeed/runtime/config.py, validators of runtime/zero/config.py,
``_do_sanity_check`` and ``_do_optimizer_sanity_check`` of runtime/engine.py, the optimizers of
runtime/zero/stage_1_and_2.py and stage3.py; 0.16.0 to 0.19.8. Of the workload: ``get_data_types``
of engine.py and ``ipg_buffer`` of stage_1_and_2.py. Imports nothing of DeepSpeed.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from scalai.converters.deepspeed.config import autotp_size, stage_of
from scalai.converters.deepspeed.job import AUTO, enables_bf16, uses_bf16_optimizer, zero_config
from scalai.core.degrees.passes import Offload
from scalai.core.errors import RefusedError
from scalai.core.planner.columns import GRADIENTS, NO_SHARDING, OPTIMIZER, WEIGHTS, Workload
from scalai.core.planner.shape import ModelShape

DEFAULT_CLIPPING = 1.0
"""``GRADIENT_CLIPPING_DEFAULT`` of the releases with ``compute_grad_norm``."""
Release = tuple[int, ...]
"""Numbers of a release; empty: unknown, so check only the refusals of all releases."""
AUTOTP_WITH_WEIGHTS = (0, 19, 1)
"""First release with weights sharded among tensor-parallel ranks."""
BF16_SUMS_ARE_BF16 = (0, 17, 6)
"""First release, at the latest, with bf16 sums of bf16 gradients without ZeRO."""
PARAM_DTYPE_COUNTS = (0, 19, 4)
"""First release to read ``data_types.param_dtype``."""
SUMS_COUNT = (0, 19, 5)
"""First release with sums of gradients in place of averages."""
TESTED_WITH_ZERO = ("adam", "adamw", "adagrad", "lion", "muon", "muadam", "muadamw")
"""Optimizer types in ``ZERO_SUPPORTED_OPTIMIZERS`` of deepspeed/runtime/zero/utils.py."""
MASTERS_IN_ALL_STAGES = (0, 18, 1)
"""First release with 16-bit masters in all stages of ZeRO, in bf16 too; before, stage 2 in fp16
only."""
SWITCHES_COUNT_ALONE = (0, 17, 6)
"""First release, at the latest, to read the switch without its precision."""
_DTYPES: Mapping[str, str] = {
    f"{prefix}{alias}": name
    for name, aliases in {
        "fp16": ("fp16", "float16", "half"), "bf16": ("bf16", "bfloat16"),
        "fp32": ("fp32", "float32", "float"), "int8": ("int8",),
    }.items()
    for alias in aliases
    for prefix in ("", "torch.")
}  # fmt: skip
"""``DtypeEnum`` of deepspeed/runtime/config.py; it takes some with ``torch.``."""


def stages_of(config: Mapping[str, Any], by_world: Mapping[str, int]) -> frozenset[int]:
    """Return the stages a job may come to have.

    Args:
        by_world: Table ``deepspeed.zero_stage`` of the elastic configuration.

    Raises:
        UsageError: The configuration's stage is unknown.
    """
    return frozenset((*by_world.values(), by_world.get("default", stage_of(config))))


def refuse_invalid(
    config: Mapping[str, Any],
    stages: Iterable[int],
    release: Release,
    *,
    has_own_optimizer: bool = False,
) -> None:
    """Check that DeepSpeed takes a configuration in all possible stages of a job.

    Args:
        has_own_optimizer: Whether the script builds, or may build, its optimizer. DeepSpeed then
            ignores the configured one (``_configure_optimizer``, runtime/engine.py).

    Raises:
        RefusedError: Names all faults, with their stages.
    """
    if has_own_optimizer:
        config = {key: value for key, value in config.items() if key != "optimizer"}
    of_stages = (
        f"{fault} (ZeRO stage {stage})"
        for stage in sorted(stages)
        for fault in _faults_of_stage(config, stage, release)
    )
    faults = (*_faults(config, release), *of_stages)
    if faults:
        raise RefusedError(
            f"DeepSpeed would not take its configuration: {'; '.join(faults)}. Correct it, or "
            "[deepspeed] zero_stage."
        )


def _faults(config: Mapping[str, Any], release: Release) -> Iterator[str]:
    if _is_on(config, "fp16") and enables_bf16(config):
        yield "fp16 and bf16 are both enabled; it trains in one of them"
    stated, precision = _data_type(config, "param_dtype"), precision_of(config)
    if stated not in (None, precision or stated) and release >= PARAM_DTYPE_COUNTS:
        yield f"data_types.param_dtype {stated} is not {precision}, which fp16 and bf16 ask for"


def _faults_of_stage(config: Mapping[str, Any], stage: int, release: Release) -> Iterator[str]:
    zero = zero_config(config)
    sums, precision = _data_type(config, "grad_accum_dtype"), precision_of(config)
    # Up to 0.16 bf16 is added up in fp32; in a pipeline in bf16 too.
    may_differ = precision == "bf16" and sums == "fp32" and release < BF16_SUMS_ARE_BF16
    if stage == NO_SHARDING and sums not in (None, precision or sums) and not may_differ:
        yield (
            f"data_types.grad_accum_dtype {sums} with {precision}: without ZeRO gradients are "
            "added up in the dtype of the weights"
        )
    optimizer = _section(config, "optimizer").get("type")
    is_tested = optimizer is None or str(optimizer).lower() in TESTED_WITH_ZERO
    if stage != NO_SHARDING and not is_tested and not config.get("zero_allow_untested_optimizer"):
        yield f"optimizer.type {optimizer}: with ZeRO it needs zero_allow_untested_optimizer"
    if _number(_section(zero, "offload_optimizer").get("ratio"), 1.0) < 1:
        if stage != WEIGHTS:
            yield "offload_optimizer.ratio: a part is offloaded in stage 3 alone"
        elif is_offloaded(config) and not _is_cpu_adam(config):
            yield "offload_optimizer.ratio: a part is offloaded of DeepSpeedCPUAdam alone"
    is_sum = str(config.get("gradient_allreduce_op")).lower() == "sum"
    if stage == WEIGHTS and is_sum and release >= SUMS_COUNT:
        yield "gradient_allreduce_op sum: gradients are averaged in stage 3"
    if zero.get("compute_grad_norm") is False:
        yield from _faults_without_norm(config, stage)
    yield from _faults_of_masters(config, stage, release)
    if stage == WEIGHTS and autotp_size(config) > 1 and () < release < AUTOTP_WITH_WEIGHTS:
        yield "tensor_parallel.autotp_size: this release knows AutoTP up to stage 2"


def _faults_without_norm(config: Mapping[str, Any], stage: int) -> Iterator[str]:
    stated = config.get("gradient_clipping", DEFAULT_CLIPPING)
    clipping = _number(stated, 0.0)  # Trainer checks its own values
    is_summed_apart = _data_type(config, "grad_accum_dtype") == "fp32" and enables_bf16(config)
    what = "compute_grad_norm false"
    if stage not in (OPTIMIZER, GRADIENTS):
        yield f"{what}: the norm may be left out in stages 1 and 2 alone"
    elif clipping > 0:
        yield f"{what}: gradient_clipping {clipping} needs the norm; set it to 0"
    elif is_offloaded(config):
        yield f"{what}: an offloaded optimizer needs the norm"
    elif stage == OPTIMIZER and is_summed_apart:
        yield f"{what}: bf16 with sums in fp32 needs the norm in stage 1"


def _faults_of_masters(config: Mapping[str, Any], stage: int, release: Release) -> Iterator[str]:
    for switch in _master_switches(config, release):
        if stage == NO_SHARDING:
            yield f"{switch}: without ZeRO masters are in fp32"
        elif stage != GRADIENTS and () < release < MASTERS_IN_ALL_STAGES:
            yield f"{switch}: in this release stage 2 alone keeps masters in 16 bits"
        elif uses_bf16_optimizer(config, stage):
            continue  # it ignores the switch
        elif not is_offloaded(config) or not _is_cpu_adam(config):
            yield f"{switch}: masters in 16 bits are updated by an offloaded DeepSpeedCPUAdam alone"
    bf16 = _bf16(config)
    if bf16.get("bf16_optimizer_states") and not bf16.get("bf16_master_weights_and_grads"):
        yield "bf16.bf16_optimizer_states needs bf16_master_weights_and_grads"


def _master_switches(config: Mapping[str, Any], release: Release) -> Iterator[str]:
    """Yield the enabled switches for 16-bit masters; old releases also need their precision."""
    fp16, is_old = _section(config, "fp16"), release < SWITCHES_COUNT_ALONE
    if fp16.get("fp16_master_weights_and_grads") and (not is_old or _is_on(config, "fp16")):
        yield "fp16_master_weights_and_grads"
    if _bf16(config).get("bf16_master_weights_and_grads") and release >= MASTERS_IN_ALL_STAGES:
        yield "bf16_master_weights_and_grads"


def _bf16(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return _section(config, "bf16" if "bf16" in config else "bfloat16")


def _is_cpu_adam(config: Mapping[str, Any]) -> bool:
    """Whether an offloaded optimizer is DeepSpeedCPUAdam; the script's own may be."""
    optimizer = _section(config, "optimizer")
    is_adam = str(optimizer.get("type", "adam")).lower() in ("adam", "adamw")
    return is_adam and not _section(optimizer, "params").get("torch_adam")


def is_offloaded(config: Mapping[str, Any]) -> bool:
    """Tell whether the optimizer's state is off the devices."""
    zero = zero_config(config)
    device = _section(zero, "offload_optimizer").get("device", "none")
    return bool(zero.get("cpu_offload")) or device != "none"


OFFLOADS: tuple[Offload, ...] = ("optimizer", "parameters")
"""States in host memory, if ZeRO has them."""


def offload_of(config: Mapping[str, Any]) -> Offload:
    """Return the state in host memory by a configuration."""
    zero = zero_config(config)
    if zero.get("cpu_offload_param") or _section(zero, "offload_param").get("device") == "cpu":
        return "parameters"
    return "optimizer" if is_offloaded(config) else "none"


def offload_fault(config: Mapping[str, Any], stages: Iterable[int]) -> str | None:
    """Return the reason against other state in host memory than configured; None: it may go there.

    Args:
        stages: All possible ZeRO stages of the job.
    """
    zero = zero_config(config)
    if any(zero.get(f"{name}offload{rest}") for name, rest in _OFFLOADING):
        return "zero_optimization's own offload stays as given"
    if max(stages, default=0) == NO_SHARDING:
        return "it needs ZeRO stage 1, 2 or 3"
    optimizer = _section(config, "optimizer").get("type")
    if optimizer is not None and str(optimizer).lower() not in ("adam", "adamw"):
        return f"optimizer.type {optimizer}: Adam and AdamW go there"
    if (
        any(_master_switches(config, MASTERS_IN_ALL_STAGES))
        or zero.get("compute_grad_norm") is False
    ):
        return "16-bit masters and compute_grad_norm false do not go with it"
    return None


_OFFLOADING = (("", "_optimizer"), ("", "_param"), ("cpu_", ""), ("cpu_", "_param"))


def gradient_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype of gradient sums; None: Trainer sets it."""
    return _data_type(config, "grad_accum_dtype") or precision_of(config)


def precision_of(config: Mapping[str, Any]) -> str | None:
    """Return the training precision: fp32, bf16 or fp16; None: Trainer sets it."""
    sections = (config.get(name) for name in ("fp16", "bf16", "bfloat16"))
    if any(isinstance(one, Mapping) and one.get("enabled") == AUTO for one in sections):
        return None
    return "fp16" if _is_on(config, "fp16") else "bf16" if enables_bf16(config) else "fp32"


def _data_type(config: Mapping[str, Any], name: str) -> str | None:
    stated = _section(config, "data_types").get(name)
    return None if stated is None else _DTYPES.get(str(stated), str(stated))


def _is_on(config: Mapping[str, Any], section: str) -> bool:
    return bool(_section(config, section).get("enabled"))


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    if not isinstance(section, Mapping):
        return {}
    return {key: value for key, value in section.items() if value != AUTO}


def _number(stated: Any, default: float) -> float:
    return float(stated) if isinstance(stated, int | float) else default


BUCKET_ELEMENTS = 500_000_000
"""``reduce_bucket_size`` of deepspeed/runtime/zero/config.py."""
GATHERS_PER_LAYER = 4
"""Stage 3 gathers each matrix separately."""


def workload_of(config: Mapping[str, Any], shape: ModelShape, global_batch: int) -> Workload:
    """Return the workload of a step.

    Raises:
        RefusedError: State is offloaded in a way without a model here; or the precision is unknown.
    """
    zero = zero_config(config)
    parts = [_section(zero, f"offload_{name}") for name in ("optimizer", "param")]
    is_partial = any(part.get("device") == "nvme" or part.get("ratio", 1) != 1 for part in parts)
    if is_partial or (offload_of(config) == "parameters" and not is_offloaded(config)):
        raise RefusedError(
            "zero_optimization offloads to NVMe, a share of the optimizer's state, or weights "
            "alone, which is not modelled; choose degrees by a [degrees] table."
        )
    precision = precision_of(config)
    if precision is None:
        raise RefusedError(
            'fp16 or bf16 is "auto": the precision is not known before the start; state it.'
        )
    gradient = 4 if gradient_dtype(config) == "fp32" else 2
    elements = float(zero.get("reduce_bucket_size", BUCKET_ELEMENTS))
    buckets = 2 if zero.get("overlap_comm") is True else 1
    return Workload(
        shape, global_batch, precision,
        has_dropout=not shape.is_gated,  # models with a gate are trained without
        gradient_bytes=gradient, gathers_per_layer=GATHERS_PER_LAYER, has_flat_masters=True,
        bucket_bytes=elements * gradient * buckets,
    )  # fmt: skip
