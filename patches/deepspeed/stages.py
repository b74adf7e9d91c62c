"""Which ZeRO stages a job may have: those in which DeepSpeed itself trains the same.

* fp16, 0.18.3 to 0.19.8: without ZeRO ``DeepSpeedEngine.backward`` does not multiply the loss by
  the loss scale, and the optimizer divides the gradients by it all the same. So moments of stage 0
  do not go on in stages 1 to 3, nor the reverse: the state is exact, the losses are another
  training's. A scale of 1 changes nothing.
* Stage 2, 0.17.6 to 0.18.2: of the micro-batches of a step only the last one counts (DeepSpeed's
  issue 7718). How many there are follows from DP.

Source: deepspeed/runtime/engine.py, fp16/fused_optimizer.py, fp16/unfused_optimizer.py and
zero/stage_1_and_2.py (``independent_gradient_partition_epilogue``).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from scalai.core.faults import refuse_all
from scalai.core.release import numbers_of

UNSCALED_SINCE = (0, 18, 3)
LOSING_SINCE, KEEPING_SINCE = (0, 17, 6), (0, 18, 3)


def refuse_unfit_stages(
    config: Mapping[str, Any], stages: frozenset[int], before: int | None, version: str
) -> None:
    """Check the stages of a job.

    Args:
        config: DeepSpeed's configuration.
        stages: By ``stages_of`` of ``converters/deepspeed/validity.py``.
        before: That of the round before; None: this is the first.
        version: DeepSpeed's.

    Raises:
        RefusedError: The losses would not go on as they were.
    """
    passed = stages if before is None else stages | {before}
    refuse_all((*_forking(config, passed, version), *_losing(stages, version)))


def _forking(config: Mapping[str, Any], stages: frozenset[int], version: str) -> Iterator[str]:
    fp16 = config.get("fp16") or {}
    is_scaled = fp16.get("enabled") and fp16.get("loss_scale", 0) != 1
    if is_scaled and 0 in stages and stages != {0} and numbers_of(version) >= UNSCALED_SINCE:
        yield (
            f"fp16 with ZeRO stages {', '.join(map(str, sorted(stages)))} in one job: without ZeRO "
            f"DeepSpeed {version} divides gradients by a loss scale by which it has not multiplied "
            "the loss, so the losses would fork. Expected are stage 0 alone, or stages 1 to 3: "
            "correct zero_optimization.stage and [deepspeed] zero_stage, use bf16, or set "
            "fp16.loss_scale to 1"
        )


def _losing(stages: frozenset[int], version: str) -> Iterator[str]:
    if 2 in stages and LOSING_SINCE <= numbers_of(version) < KEEPING_SINCE:
        yield (
            f"ZeRO stage 2 with DeepSpeed {version}: of gradients that it accumulates it keeps "
            "only the last micro-batch's, and another DP accumulates. Use stage 1 or 3, or "
            "DeepSpeed up to 0.17.5 or from 0.18.3 on"
        )
