"""The planner that a job's degrees are chosen by, from its flags and the devices it runs on."""

from scalai.converters.megatron.arguments import MegatronArguments
from scalai.converters.megatron.model_shape import recompute_of, sharding_of, workload_of
from scalai.core.degrees import ModelLimits
from scalai.core.errors import RefusedError
from scalai.core.planner.devices import custom_device, device_named
from scalai.core.planner.preference import Preference, Terms
from scalai.launch.config.elastic_config import PlannerConfig


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
