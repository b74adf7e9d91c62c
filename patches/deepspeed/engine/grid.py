"""Where this rank stands on the parallel axes of an engine."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from scalai.patches.deepspeed.engine.tensor_parallel import TensorParallel


def degrees(engine: Any) -> Mapping[str, int]:
    """Return the sizes of the parallel axes; ``dp`` is how many ranks ZeRO partitions over."""
    from deepspeed.utils import bwc, groups

    return {
        "tp": tensor_parallel(engine).size,
        "pp": bwc.bwc_pipeline_parallel_world_size(engine.mpu),
        "sp": groups._get_sequence_parallel_world_size(),
        "dp": dist.get_world_size(engine.seq_data_parallel_group),
    }


def fixed_degrees(engine: Any) -> Mapping[str, int]:
    """Return the degrees that may not change: no adapter is proven for another split of
    sequences."""
    return {"sp": degrees(engine)["sp"]}


def coordinate(engine: Any) -> str:
    """Return this rank's position, ``tp0-pp1-dp0``."""
    dp_rank = dist.get_rank(engine.seq_data_parallel_group)
    return f"tp{tensor_parallel(engine).rank}-pp{stage(engine)}-dp{dp_rank}"


def tensor_parallel(engine: Any) -> TensorParallel:
    """Return this rank's place among the ranks that cut parameters."""
    from deepspeed.utils import bwc

    return TensorParallel(
        bwc.bwc_tensor_model_parallel_rank(engine.mpu),
        bwc.bwc_tensor_model_parallel_world_size(engine.mpu),
    )


def is_first_replica(engine: Any) -> bool:
    """Whether this rank is the first of those that have the same layers."""
    return dist.get_rank(engine.seq_data_parallel_group) == 0 == tensor_parallel(engine).rank


def stage(engine: Any) -> int:
    """Return the pipeline stage of this rank, 0 without a pipeline."""
    mpu = engine.mpu
    for name in ("get_pipeline_model_parallel_rank", "get_pipe_parallel_rank"):
        if hasattr(mpu, name):
            return int(getattr(mpu, name)())
    return 0
