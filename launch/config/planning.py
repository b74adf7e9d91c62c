"""The planner that a job's degrees are chosen by, from its flags and the devices it runs on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scalai.converters.deepspeed.config import MICRO, TRAIN, StatedBatch, stage_of
from scalai.converters.deepspeed.workload import workload_of as deepspeed_workload
from scalai.converters.megatron.arguments import MegatronArguments
from scalai.converters.megatron.model_shape import (
    more_recompute_of,
    recompute_of,
    sharding_of,
    workload_of,
)
from scalai.converters.megatron.rules import fixed_passes, values_of
from scalai.core.degrees.degrees import ModelLimits, Sharding
from scalai.core.degrees.passes import PARTS, RECOMPUTES, Freedom
from scalai.core.errors import RefusedError, UsageError
from scalai.core.jsonable import Json
from scalai.core.planner.columns import OPTIMIZER, Workload
from scalai.core.planner.devices import Device, custom_device, device_named
from scalai.core.planner.preference import Preference, Terms
from scalai.launch.config.elastic_config import DeepSpeedConfig, PlannerConfig
from scalai.launch.config.model_table import read_table_shape


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of a DeepSpeed job.

    Attributes:
        config: Its configuration.
        micro_batch_size: Samples of a pass where its share of the batch has such; None: nobody
            states it, and no round was there yet.
    """

    config: Mapping[str, Any]
    micro_batch_size: int | None = None


def told_by(config: Mapping[str, Any]) -> Told:
    """Return what a configuration says, before anything runs."""
    return Told(config, StatedBatch.of(config).micro)


def read_planner(
    config: PlannerConfig,
    arguments: MegatronArguments | None,
    limits: ModelLimits,
    deepspeed: Told | None = None,
) -> Preference | str:
    """Return the planner, or why there is none.

    Args:
        arguments: Of a Megatron-LM script; None: it is another one.
        limits: What is known of the model beside its flags.
        deepspeed: Of a DeepSpeed job; None: it is another one.

    Raises:
        RefusedError: A person asked for the planner, and something that it needs is not known; or
            what ``[planner] model`` states is no model.
    """
    if config.kind == "keep":
        return "[planner] kind = keep"
    try:
        if arguments is not None:
            return _planner_of_megatron(config, arguments, limits)
        return _planner_of_deepspeed(config, limits, deepspeed)
    except RefusedError as error:
        if config.kind == "cost":
            raise RefusedError(f"--planner cost: {error} Or use --planner keep.") from error
        return str(error)


def _planner_of_megatron(
    config: PlannerConfig, arguments: MegatronArguments, limits: ModelLimits
) -> Preference:
    device = _device(config)
    work = workload_of(arguments, limits.padded_vocab_size)
    if limits.micro_batch_size is None:
        raise RefusedError("the script's --micro-batch-size is not known; state it.")
    device.peak(work.precision)
    return Preference(
        work, device, recompute_of(arguments), Sharding(sharding_of(arguments)),
        limits.is_sequence_parallel, limits.micro_batch_size, _terms(config),
    )  # fmt: skip


def _planner_of_deepspeed(
    config: PlannerConfig, limits: ModelLimits, told: Told | None
) -> Preference:
    """Return the planner of a DeepSpeed job: no flag says its model."""
    if told is None or not config.model:
        raise RefusedError(
            "degrees are computed for Megatron-LM's scripts, whose flags say the model, and for "
            "DeepSpeed jobs that state it by [planner] model; write them under [degrees]."
        )
    device, batch = _device(config), limits.global_batch_size
    if batch is None or told.micro_batch_size is None:
        raise RefusedError(f"the job's batches are not known; state {TRAIN} and {MICRO}.")
    shape = read_table_shape(config.model, "[planner] model")
    work = deepspeed_workload(told.config, shape, batch)
    device.peak(work.precision)
    recompute = next(kind for kind in RECOMPUTES if kind == config.recompute)
    return Preference(
        work, device, recompute, limits.sharding or Sharding(), False, told.micro_batch_size,
        _terms(config),
    )  # fmt: skip


def _device(config: PlannerConfig) -> Device:
    if config.gpu is None:
        raise RefusedError("no device is known; name it by [planner] gpu.")
    figures = config.figures
    return custom_device(config.gpu, figures) if figures else device_named(config.gpu)


def _terms(config: PlannerConfig) -> Terms:
    return Terms(config.kind == "cost", config.residence_s, trial_steps=config.trial_steps)


def read_freedom(config: PlannerConfig, arguments: MegatronArguments | None) -> Freedom:
    """Return what beside the degrees may be another than the script's flags say."""
    if arguments is None:
        why = "no flag of the script is known that changes it"
        return Freedom(fixed=tuple((part, why) for part in PARTS))
    return Freedom(
        own=recompute_of(arguments),
        more=more_recompute_of(arguments),
        fixed=tuple(fixed_passes(values_of(arguments.given), arguments.release)),
        for_speed=tuple(part for part in PARTS if part in config.may_change),
        for_memory=tuple(part for part in PARTS if part in config.memory_may_change),
    )


def read_workload(arguments: MegatronArguments | None, limits: ModelLimits) -> Workload | None:
    """Return what a step of the job computes; None: its flags do not say all of it."""
    if arguments is None:
        return None
    try:
        return workload_of(arguments, limits.padded_vocab_size)
    except (RefusedError, UsageError):
        return None


def read_sharding(
    world_size: int,
    arguments: MegatronArguments | None,
    config: DeepSpeedConfig,
    deepspeed: Mapping[str, Json] | None,
) -> int:
    """Return what data-parallel ranks keep a part of on so many ranks (``columns.py``): where
    nothing says it, the optimizer's state."""
    if arguments is not None:
        return sharding_of(arguments)
    stage = config.stage_on(world_size)
    if stage is None and deepspeed is not None:
        stage = stage_of(deepspeed)
    return OPTIMIZER if stage is None else stage
