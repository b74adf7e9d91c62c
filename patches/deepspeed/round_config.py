"""DeepSpeed's configuration for one round: the same global batch at another DP, and the degrees.

Values in, values out: nothing of DeepSpeed is imported.
Source: ``DeepSpeedConfig`` of deepspeed/runtime/config.py and ``initialize`` of
deepspeed/__init__.py, 0.19.8.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from scalai.converters.deepspeed.config import (
    ACCUMULATION,
    AUTOTP,
    AUTOTP_SIZE,
    MICRO,
    TRAIN,
    ZERO,
    StatedBatch,
    read_config,
    refuse_fixed,
    stage_of,
    step_samples,
)
from scalai.core.degrees.batches import Batches, fit_batches
from scalai.core.degrees.degrees import MOST_SHARDED_WITH_STAGES
from scalai.core.degrees.passes import Offload
from scalai.core.errors import RefusedError
from scalai.core.planner.columns import WEIGHTS


@dataclass(frozen=True, slots=True)
class RoundOrder:
    """A round's demands on DeepSpeed's configuration.

    Attributes:
        tp, pp, dp: Degrees.
        micro_batch_size: A person's choice with the degrees; None: none.
        global_batch_size: The first round's, if the configuration does not state it; None: this is
            the first.
        usual_micro_batch_size: The first round's micro-batch, known to fit in memory.
        zero_stage: None: as configured.
        has_mpu: True if the script gives DeepSpeed its replicas. With AutoTP alone it counts every
            rank as one.
        is_in_stages: True if the model is a pipeline, even of one stage.
        has_fillers: True if DP need not divide the global batch.
        offload: State in host memory; None: as configured.
        has_own_optimizer: True if the script gives DeepSpeed its optimizer.
        has_cpu_adam: False if DeepSpeedCPUAdam cannot be compiled here.
        paces: As of ``Batches``.
        first_dp: The first round's, if the script makes the configuration; None: a file states it,
            or this is the first round.
    """

    tp: int
    pp: int
    dp: int
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    usual_micro_batch_size: int | None = None
    zero_stage: int | None = None
    has_mpu: bool = False
    is_in_stages: bool = False
    has_fillers: bool = False
    offload: Offload | None = None
    has_own_optimizer: bool = False
    has_cpu_adam: bool = True
    paces: tuple[int, ...] = ()
    first_dp: int | None = None

    def is_by_ranks(self, total: int) -> bool:
        """True if a script's global batch is the job's, but multiplied by this round's ranks."""
        known, first = self.global_batch_size, self.first_dp
        if known is None or first is None:
            return False
        return total != known and total * first == known * self.dp


def config_of(args: Any, config: Any, config_params: Any) -> dict[str, Any] | None:
    """Return a copy of the configuration for ``deepspeed.initialize``; None: none is readable, and
    DeepSpeed has the better message.

    Args:
        args: Its ``deepspeed_config``, or the older ``deepscale_config``, is a path or base64.
        config, config_params: A path, base64 or a dictionary.
    """
    named = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    source = next((given for given in (config, config_params, named) if given is not None), None)
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    return None if source is None else read_config(str(source))


def has_configured_optimizer(config: Mapping[str, Any]) -> bool:
    """True if DeepSpeed makes an optimizer by the configuration, which names its type."""
    section = config.get("optimizer")
    return isinstance(section, Mapping) and bool(section.get("type"))


def batches_of(config: Mapping[str, Any], order: RoundOrder) -> Batches:
    """Return this round's spread of the global batch over its replicas.

    The global batch is the configuration's, or the product of micro-batch and accumulation in the
    first round. If the script multiplies it by the ranks, the job's stays.

    Raises:
        RefusedError: It does not divide, or the configuration does not state its size.
    """
    refuse_fixed(config)
    if config.get("managed_gradient_accumulation") is False:
        raise RefusedError(
            "managed_gradient_accumulation is false: the script counts its micro-batches itself, "
            "and would keep to their number at another DP. Leave it out, or run without "
            "--elastic."
        )
    stated = stated_batch(config, order)
    resolved = stated.resolved(order.dp)
    if resolved is None:
        raise RefusedError(
            f"DeepSpeed's configuration states neither {TRAIN} nor {MICRO}. State one of them."
        )
    total = stated.train or order.global_batch_size or resolved[0]
    if order.global_batch_size is not None and order.is_by_ranks(total):
        total = order.global_batch_size
    if order.micro_batch_size is not None:
        return Batches(total, order.micro_batch_size, order.dp, order.has_fillers, order.paces)
    usual = stated.micro or order.usual_micro_batch_size or resolved[1]
    return fit_batches(total, order.dp, usual, has_fillers=order.has_fillers, paces=order.paces)


def stated_batch(config: Mapping[str, Any], order: RoundOrder) -> StatedBatch:
    """Return the configured batch, with the global batch in samples of a step."""
    stated = StatedBatch.of(config)
    return stated if order.has_mpu else replace(stated, train=step_samples(config))


def rewritten(config: Mapping[str, Any], order: RoundOrder, batches: Batches) -> dict[str, Any]:
    """Return the configuration of this round, whose batch counts fillers. The given one stays as it
    is.

    Raises:
        RefusedError: The stage or the degrees do not go together in DeepSpeed.
    """
    _refuse_unfit(config, order)
    mine = copy.deepcopy(dict(config))
    counted = order.tp if AUTOTP in mine and not order.has_mpu else 1
    mine[TRAIN] = batches.passed_samples * counted
    mine[MICRO] = batches.micro_batch_size
    mine[ACCUMULATION] = batches.num_micro_batches
    if order.zero_stage is not None:
        stated = mine.get(ZERO)
        mine[ZERO] = {**(stated if isinstance(stated, dict) else {}), "stage": order.zero_stage}
    mine = spilled(mine, order)
    if counted > 1 and stage_of(mine) == WEIGHTS:
        # Stage 3 reads it once more, without tensor-parallel ranks: both have to come out.
        del mine[TRAIN]
    if order.tp > 1 and AUTOTP in mine:
        mine[AUTOTP] = {**mine[AUTOTP], AUTOTP_SIZE: order.tp}
    elif AUTOTP_SIZE in mine.get(AUTOTP, {}):
        mine[AUTOTP] = {**mine[AUTOTP], AUTOTP_SIZE: 0}  # 1 leaves its groups unmade
    if "data_parallel_size" in mine:
        mine["data_parallel_size"] = order.dp
    return mine


def spilled(config: Mapping[str, Any], order: RoundOrder) -> dict[str, Any]:
    """Return the configuration with the round's state in host memory.

    Torch's Adam updates there where the script brings it, or DeepSpeedCPUAdam cannot be compiled.
    Source: ``_configure_optimizer`` and ``get_optimizer_configuration`` of runtime/engine.py.
    """
    mine, stated = dict(config), config.get(ZERO)
    if order.offload in (None, "none") or not isinstance(stated, dict):
        return mine
    names = ["offload_optimizer"] + ["offload_param"] * (order.offload == "parameters")
    mine[ZERO] = {**stated, **{name: {"device": "cpu", "pin_memory": True} for name in names}}
    optimizer = mine.get("optimizer")
    if order.has_own_optimizer:
        mine["zero_force_ds_cpu_optimizer"] = False
    elif not order.has_cpu_adam and isinstance(optimizer, dict):
        params = optimizer.get("params") or {}
        mine["optimizer"] = {**optimizer, "params": {**params, "torch_adam": True}}
        mine["zero_force_ds_cpu_optimizer"] = False
    return mine


def _refuse_unfit(config: Mapping[str, Any], order: RoundOrder) -> None:
    """Refuse combinations unknown to DeepSpeed's pipelines (``PipelineEngine.__init__``)."""
    if order.pp == 1 and not order.is_in_stages:
        return
    stage = stage_of(config) if order.zero_stage is None else order.zero_stage
    if stage > MOST_SHARDED_WITH_STAGES:
        raise RefusedError(
            f"zero_stage {stage} on {order.tp * order.pp * order.dp} ranks: DeepSpeed's pipelines "
            f"(PP{order.pp}) know stages 0 and 1. Correct [deepspeed] zero_stage."
        )
    if order.tp > 1 and AUTOTP in config:
        raise RefusedError(
            f"TP{order.tp} by AutoTP in a pipeline (PP{order.pp}): AutoTP takes all ranks for its "
            "own, those of other stages too. Build a topology with TP, or leave one of them out."
        )


def without_batches(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration for ``zero.Init``, which counts all ranks as replicas, or for an
    engine without training: both refuse odd batches, and have no use for them. ``"auto"`` stays."""
    mine = copy.deepcopy(dict(config))
    if "auto" not in (mine.get(key) for key in (TRAIN, MICRO, ACCUMULATION)):
        mine[MICRO] = 1
        for key in (TRAIN, ACCUMULATION):
            mine.pop(key, None)
    return mine
