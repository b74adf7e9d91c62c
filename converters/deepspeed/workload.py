"""The computation and state of a DeepSpeed step, from a configuration and a model's shape.

Source: ``get_data_types`` of deepspeed/runtime/engine.py, ``DeepSpeedZeroOptimizer`` of
runtime/zero/stage_1_and_2.py (flat masters, ``ipg_buffer``), runtime/zero/stage3.py, 0.19.8.
"""

from collections.abc import Mapping
from typing import Any

from scalai.converters.deepspeed.job import zero_config
from scalai.converters.deepspeed.validity import gradient_dtype, is_offloaded, precision_of
from scalai.core.errors import RefusedError
from scalai.core.planner.columns import Workload
from scalai.core.planner.model import ModelShape

BUCKET_ELEMENTS = 500_000_000
"""``reduce_bucket_size`` of deepspeed/runtime/zero/config.py."""
GATHERS_PER_LAYER = 4
"""Stage 3 gathers each matrix separately."""


def workload_of(config: Mapping[str, Any], shape: ModelShape, global_batch: int) -> Workload:
    """Return the workload of a step.

    Raises:
        RefusedError: A part of the state is offloaded, a case without a model here; or the
            precision is unknown.
    """
    zero = zero_config(config)
    if is_offloaded(config) or zero.get("offload_param") or zero.get("cpu_offload_param"):
        raise RefusedError(
            "zero_optimization offloads a part of the state, which is not modelled; choose degrees "
            "by a [degrees] table."
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
