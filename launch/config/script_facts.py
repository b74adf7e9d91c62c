"""Facts about a job before it runs, from its script's flags and the configurations."""

import importlib.metadata
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from scalai.converters.deepspeed.config import (
    AUTOTP,
    MICRO,
    TRAIN,
    StatedBatch,
    autotp_size,
    refuse_fixed,
    stage_of,
    stated_stages,
    step_samples,
)
from scalai.converters.deepspeed.validity import OFFLOADS as DEEPSPEED_OFFLOADS
from scalai.converters.deepspeed.validity import offload_fault, refuse_invalid, stages_of
from scalai.converters.deepspeed.validity import offload_of as deepspeed_offload
from scalai.converters.deepspeed.validity import workload_of as deepspeed_workload
from scalai.converters.megatron.arguments import MegatronArguments, is_megatron, read_arguments
from scalai.converters.megatron.model_shape import (
    more_recompute_of,
    offload_of,
    offloads_of,
    recompute_of,
    sharding_of,
    workload_of,
)
from scalai.converters.megatron.rules import (
    allows_untested,
    fixed_passes,
    release_beside,
    values_of,
)
from scalai.core.degrees.choice import check_initial
from scalai.core.degrees.degrees import DegreeRequest, ModelLimits, Sharding
from scalai.core.degrees.passes import PARTS, RECOMPUTES, Freedom, Part
from scalai.core.degrees.policy import DegreePolicy
from scalai.core.errors import RefusedError, UsageError
from scalai.core.jsonable import Json
from scalai.core.planner.columns import OPTIMIZER, Workload
from scalai.core.planner.devices import GB, Device, device_named
from scalai.core.planner.preference import PlannerTerms, Preference
from scalai.core.planner.shape import ModelShape
from scalai.core.release import numbers_of
from scalai.launch.config.elastic_config import DeepSpeedConfig, ElasticConfig, PlannerConfig
from scalai.launch.config.options import Options

_NEEDED = ("heads", "hidden", "layers", "seq", "vocab")


def read_table_shape(table: Mapping[str, Any], where: str) -> ModelShape:
    """Return the shape stated by a table; missing sizes are a GPT's.

    Args:
        where: Name of the table in errors.

    Raises:
        RefusedError: A size is missing, unknown or no whole number.
        UsageError: Sizes contradict each other.
    """
    known = {f.name for f in fields(ModelShape)}
    unknown = sorted(set(table) - known)
    if unknown:
        names = ", ".join(sorted(known))
        raise RefusedError(f"{where}: {unknown[0]!r} is no size of a model; known: {names}.")
    missing = sorted(set(_NEEDED) - set(table))
    if missing:
        raise RefusedError(f"{where} lacks {', '.join(missing)}.")
    wrong = sorted(name for name, size in table.items() if not isinstance(size, int))
    if wrong:
        raise RefusedError(f"{where}: {wrong[0]}={table[wrong[0]]!r} is no whole number.")
    hidden, heads = table["hidden"], table["heads"]
    usual = {"ffn": 4 * hidden, "kv_groups": heads, "head_dim": hidden // max(heads, 1)}
    return ModelShape(**{**usual, **table})


@dataclass(frozen=True, slots=True)
class Told:
    """Known facts of a DeepSpeed job.

    Attributes:
        micro_batch_size: Samples of a pass; None: not stated, and no round yet.
    """

    config: Mapping[str, Any]
    micro_batch_size: int | None = None


def told_by(config: Mapping[str, Any]) -> Told:
    """Return the facts of a configuration, before the first start."""
    return Told(config, StatedBatch.of(config).micro)


def read_planner(
    config: PlannerConfig,
    arguments: MegatronArguments | None,
    limits: ModelLimits,
    deepspeed: Told | None = None,
) -> Preference | str:
    """Return the planner, or the reason for none.

    Args:
        arguments: Arguments of a Megatron-LM script; None: another script.
        limits: Known limits of the model beside its flags.
        deepspeed: Facts of a DeepSpeed job; None: another job.

    Raises:
        RefusedError: The user asked for the planner and a needed fact is unknown, or ``[planner]
            model`` is no model.
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
        limits.is_sequence_parallel, limits.micro_batch_size, PlannerTerms(config.kind == "cost"),
        offload=offload_of(arguments),
    )  # fmt: skip


def _planner_of_deepspeed(
    config: PlannerConfig, limits: ModelLimits, told: Told | None
) -> Preference:
    """Return the planner of a DeepSpeed job; its model is in ``[planner] model``."""
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
        PlannerTerms(config.kind == "cost"), offload=deepspeed_offload(told.config),
    )  # fmt: skip


def _device(config: PlannerConfig) -> Device:
    if config.gpu is None:
        raise RefusedError("no device is known; name it by [planner] gpu.")
    device = device_named(config.gpu)
    return replace(device, host_memory=(config.host_memory_gb or 0) * GB)


def read_freedom(
    config: PlannerConfig,
    arguments: MegatronArguments | None,
    deepspeed: Mapping[str, Any] | None = None,
    stages: Iterable[int] = (),
) -> Freedom:
    """Return the allowed differences from the script's flags, beside the degrees.

    Args:
        deepspeed: The configuration of a DeepSpeed job; None: another job.
        stages: Its possible ZeRO stages.
    """
    if arguments is None:
        why = "no flag of the script is known that changes it"
        fixed: list[tuple[Part, str]] = [(part, why) for part in PARTS]
        if deepspeed is None:
            return Freedom(fixed=tuple(fixed))
        fault = offload_fault(deepspeed, stages)
        fixed = [(part, why) for part in PARTS if part != "offload"]
        if fault is not None:
            fixed.append(("offload", fault))
        return Freedom(
            fixed=tuple(fixed),
            for_memory=("offload",) if "offload" in config.memory_may_change else (),
            own_offload=deepspeed_offload(deepspeed), offloads=DEEPSPEED_OFFLOADS,
        )  # fmt: skip
    return Freedom(
        own=recompute_of(arguments),
        more=more_recompute_of(arguments),
        own_offload=offload_of(arguments),
        offloads=offloads_of(arguments),
        fixed=tuple(fixed_passes(values_of(arguments.given), arguments.release)),
        for_speed=tuple(part for part in PARTS if part in config.may_change),
        for_memory=tuple(part for part in PARTS if part in config.memory_may_change),
    )


def read_workload(arguments: MegatronArguments | None, limits: ModelLimits) -> Workload | None:
    """Return the computation of a step; None: the flags do not state all of it."""
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
    """Return the sharding (``columns.py``) on so many ranks; by default the optimizer's state."""
    if arguments is not None:
        return sharding_of(arguments)
    stage = config.stage_on(world_size)
    if stage is None and deepspeed is not None:
        stage = stage_of(deepspeed)
    return OPTIMIZER if stage is None else stage


AUTOTP_ALONE = "DeepSpeed's AutoTP takes all ranks for its own, those of pipeline stages too"
"""``_init_tp_mesh_device`` of deepspeed/utils/groups.py."""


DEEPSPEED_FIXED = (
    ("vpp", 1, "DeepSpeed's pipelines have no virtual stages"),
    ("cp", 1, "DeepSpeed's sequence parallelism (Ulysses) is not carried"),
    ("ep", 1, "DeepSpeed's experts are not carried"),
)


@dataclass(frozen=True, slots=True)
class ScriptFacts:
    """Limits and policy of a job; ``arguments`` None: not a script of Megatron-LM."""

    limits: ModelLimits
    policy: DegreePolicy
    arguments: MegatronArguments | None = None
    why_no_planner: str = ""
    """Reason against computed degrees; empty: computed, subject to ``[planner] kind``."""


def read_script(
    options: Options, config: ElasticConfig, deepspeed: Mapping[str, Any] | None = None
) -> ScriptFacts:
    """Return the facts of the script's flags and the configurations; the elastic one wins.

    Args:
        deepspeed: The DeepSpeed configuration named by the script's arguments; None: none.

    Raises:
        RefusedError: The flags of a Megatron-LM script, or DeepSpeed's configuration, exclude a
            change of degrees.
        UsageError: A value among them is not a number.
    """
    if is_megatron(options.script_args):
        allow_untested = allows_untested(os.environ)
        arguments = read_arguments(
            options.script_args, allow_untested=allow_untested,
            release=release_beside(options.script),
        )  # fmt: skip
        limits = config.model.filled_from(arguments.limits)
        planner = read_planner(config.planner, arguments, limits)
        preference, why = (None, planner) if isinstance(planner, str) else (planner, "")
        policy = replace(
            config.policy(arguments.initial, preference),
            freedom=read_freedom(config.planner, arguments),
        )
        if config.planner.kind != "cost":
            check_initial(limits, policy)
        return ScriptFacts(limits, policy, arguments, why)
    if deepspeed is None:
        why = str(read_planner(config.planner, None, config.model))
        policy = replace(config.policy(), freedom=read_freedom(config.planner, None))
        return ScriptFacts(config.model, policy, why_no_planner=why)
    by_world = config.deepspeed.zero_stage
    refuse_fixed(deepspeed)
    stages, release = stages_of(deepspeed, by_world), installed_release("deepspeed")
    refuse_invalid(deepspeed, stages, release, has_own_optimizer=True)  # for all that is known
    # The micro-batch of a DeepSpeed job follows from its DP: only the global batch is a limit.
    limits = ModelLimits(
        global_batch_size=step_samples(deepspeed),
        sharding=_sharding(by_world, stage_of(deepspeed)),
        no_tp_in_stages=AUTOTP_ALONE if AUTOTP in deepspeed else "",
        has_uneven_stages=True,  # PipelineModule divides any number of layers
        fixed=DEEPSPEED_FIXED,
        has_uneven_shares=config.deepspeed.data_order == "loader",
    )
    tp, pp = autotp_size(deepspeed), stated_stages(options.script_args) or 1
    initial = DegreeRequest(tp, pp) if tp * pp > 1 else None
    if config.planner.model:
        limits = limits.filled_from(_even_cuts(config.planner.model))
    limits = config.model.filled_from(limits)
    planner = read_planner(config.planner, None, limits, told_by(deepspeed))
    preference, why = (None, planner) if isinstance(planner, str) else (planner, "")
    policy = config.policy(initial, preference)
    freedom = read_freedom(config.planner, None, deepspeed, stages)
    policy = replace(policy, freedom=freedom, kept_axes=_kept_axes(policy, deepspeed))
    return ScriptFacts(limits, policy, why_no_planner=why)


def _even_cuts(model: Mapping[str, int | bool]) -> ModelLimits:
    """Return the limits of a stated model; only even cuts of its layers by TP are computed and
    offered."""
    shape = read_table_shape(model, "[planner] model")
    return ModelLimits(
        num_attention_heads=shape.heads, num_query_groups=shape.kv_groups,
        num_layers=shape.layers, ffn_hidden_size=shape.ffn,
    )  # fmt: skip


def _sharding(by_world: Mapping[str, int], configured: int) -> Sharding | None:
    """Return the ZeRO stage by world; None: 0 on all."""
    usual = by_world.get("default", configured)
    sizes = sorted((int(world), stage) for world, stage in by_world.items() if world != "default")
    return Sharding(usual, tuple(sizes)) if any((usual, *dict(sizes).values())) else None


def _kept_axes(policy: DegreePolicy, deepspeed: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the axes not known to be cut by a DeepSpeed job's script.

    AutoTP cuts TP if configured; otherwise the script cuts by [degrees] or its flags.
    """
    of_table = (request for rule in policy.rules for request in rule.requests)
    asked = [policy.initial or DegreeRequest(), *of_table]
    is_tensor_parallel = AUTOTP in deepspeed or any(request.tp > 1 for request in asked)
    is_in_stages = any(request.pp > 1 for request in asked)
    return ("tp",) * (not is_tensor_parallel) + ("pp",) * (not is_in_stages)


def installed_release(package: str) -> tuple[int, ...]:
    """Return the installed release's numbers; empty: not installed."""
    try:
        return numbers_of(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return ()
