"""The planner that a job's degrees are chosen by, from its flags and the devices it runs on."""

from collections.abc import Mapping

from scalai.converters.deepspeed.job import zero_config
from scalai.converters.megatron.arguments import MegatronArguments
from scalai.converters.megatron.model_shape import (
    more_recompute_of,
    recompute_of,
    sharding_of,
    workload_of,
)
from scalai.converters.megatron.rules import fixed_passes, values_of
from scalai.core.degrees import ModelLimits
from scalai.core.errors import RefusedError, UsageError
from scalai.core.jsonable import Json
from scalai.core.passes import PARTS, Freedom
from scalai.core.planner.columns import NO_SHARDING, OPTIMIZER, WEIGHTS, Workload
from scalai.core.planner.devices import custom_device, device_named
from scalai.core.planner.preference import Preference, Terms
from scalai.launch.config.elastic_config import DeepSpeedConfig, PlannerConfig


def read_planner(
    config: PlannerConfig,
    arguments: MegatronArguments | None,
    limits: ModelLimits,
) -> Preference | str:
    """Return the planner, or why there is none.

    Args:
        arguments: Of a Megatron-LM script; None: it is another one.
        limits: What is known of the model beside its flags.

    Raises:
        RefusedError: A person asked for the planner, and something that it needs is not known.
    """
    if config.kind == "keep":
        return "[planner] kind = keep"
    try:
        return _planner(config, arguments, limits)
    except RefusedError as error:
        if config.kind == "cost":
            raise RefusedError(f"--planner cost: {error} Or use --planner keep.") from error
        return str(error)


def _planner(
    config: PlannerConfig,
    arguments: MegatronArguments | None,
    limits: ModelLimits,
) -> Preference:
    if arguments is None:
        raise RefusedError(
            "degrees are computed for Megatron-LM's scripts alone; write them under [degrees]."
        )
    if config.gpu is None:
        raise RefusedError("no device is known; name it by [planner] gpu.")
    figures = config.figures
    device = custom_device(config.gpu, figures) if figures else device_named(config.gpu)
    work = workload_of(arguments, limits.padded_vocab_size)
    if limits.micro_batch_size is None:
        raise RefusedError("the script's --micro-batch-size is not known; state it.")
    device.peak(work.precision)
    return Preference(
        work, device, recompute_of(arguments), sharding_of(arguments),
        limits.is_sequence_parallel, limits.micro_batch_size,
        Terms(config.kind == "cost", config.residence_s, trial_steps=config.trial_steps),
    )  # fmt: skip


def read_freedom(config: PlannerConfig, arguments: MegatronArguments | None) -> Freedom:
    """Return what beside the degrees may be another than the script's flags say."""
    if arguments is None:
        why = "no flag of the script is known that changes it"
        return Freedom(fixed=tuple((part, why) for part in PARTS))
    return Freedom(
        own=recompute_of(arguments),
        more=more_recompute_of(arguments),
        fixed=tuple(fixed_passes(values_of(arguments.given))),
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
        stage = zero_config(deepspeed).get("stage", NO_SHARDING)
    return stage if isinstance(stage, int) and 0 <= stage <= WEIGHTS else OPTIMIZER
