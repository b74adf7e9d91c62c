"""What is known about a job before it runs, from the flags of its script and the configurations."""

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from scalai.converters.deepspeed.config import (
    AUTOTP,
    autotp_size,
    refuse_fixed,
    stage_of,
    stated_stages,
    step_samples,
)
from scalai.converters.deepspeed.validity import refuse_invalid, stages_of
from scalai.converters.megatron.arguments import MegatronArguments, is_megatron, read_arguments
from scalai.converters.megatron.rules import allows_untested, release_beside
from scalai.core.degrees.choice import check_initial
from scalai.core.degrees.degrees import DegreeRequest, ModelLimits, Sharding
from scalai.core.degrees.policy import DegreePolicy
from scalai.core.release import numbers_of
from scalai.launch.config.elastic_config import ElasticConfig
from scalai.launch.config.model_table import read_table_shape
from scalai.launch.config.options import Options
from scalai.launch.config.planning import read_freedom, read_planner, told_by

AUTOTP_ALONE = "DeepSpeed's AutoTP takes all ranks for its own, those of pipeline stages too"
"""``_init_tp_mesh_device`` of deepspeed/utils/groups.py."""


DEEPSPEED_FIXED = (
    ("vpp", 1, "DeepSpeed's pipelines have no virtual stages"),
    ("cp", 1, "DeepSpeed's sequence parallelism (Ulysses) is not carried"),
    ("ep", 1, "DeepSpeed's experts are not carried"),
)


@dataclass(frozen=True, slots=True)
class ScriptFacts:
    """Limits and policy of a job; ``arguments`` None: the script is not one of Megatron-LM's."""

    limits: ModelLimits
    policy: DegreePolicy
    arguments: MegatronArguments | None = None
    why_no_planner: str = ""
    """Why degrees are not computed; empty: they are, as far as ``[planner] kind`` says."""


def read_script(
    options: Options, config: ElasticConfig, deepspeed: Mapping[str, Any] | None = None
) -> ScriptFacts:
    """Return what the script's flags and the configurations say; the elastic one wins.

    Args:
        deepspeed: The DeepSpeed configuration that the script's arguments name; None: none.

    Raises:
        RefusedError: The flags of a Megatron-LM script, or DeepSpeed's configuration, do not go
        with changing degrees.
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
    freedom = read_freedom(config.planner, None)
    if deepspeed is None:
        why = str(read_planner(config.planner, None, config.model))
        policy = replace(config.policy(), freedom=freedom)
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
        fixed=DEEPSPEED_FIXED,
    )
    tp, pp = autotp_size(deepspeed), stated_stages(options.script_args) or 1
    initial = DegreeRequest(tp, pp) if tp * pp > 1 else None
    if config.planner.model:
        limits = limits.filled_from(_even_cuts(config.planner.model))
    limits = config.model.filled_from(limits)
    planner = read_planner(config.planner, None, limits, told_by(deepspeed))
    preference, why = (None, planner) if isinstance(planner, str) else (planner, "")
    policy = config.policy(initial, preference)
    policy = replace(policy, freedom=freedom, kept_axes=_kept_axes(policy, deepspeed))
    return ScriptFacts(limits, policy, why_no_planner=why)


def _even_cuts(model: Mapping[str, int | bool]) -> ModelLimits:
    """Return what a stated model allows: only even cuts of it are computed, so that no others are
    offered."""
    shape = read_table_shape(model, "[planner] model")
    return ModelLimits(
        num_attention_heads=shape.heads, num_query_groups=shape.kv_groups,
        num_layers=shape.layers, ffn_hidden_size=shape.ffn,
    )  # fmt: skip


def _sharding(by_world: Mapping[str, int], configured: int) -> Sharding | None:
    """Return the ZeRO stage by world; None: it is 0 on all."""
    usual = by_world.get("default", configured)
    sizes = sorted((int(world), stage) for world, stage in by_world.items() if world != "default")
    return Sharding(usual, tuple(sizes)) if any((usual, *dict(sizes).values())) else None


def _kept_axes(policy: DegreePolicy, deepspeed: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the axes on which the script of a DeepSpeed job is not known to cut its model: AutoTP
    does it wherever it is configured, else the script by what [degrees] or its flags ask for."""
    of_table = (request for rule in policy.rules for request in rule.requests)
    asked = [policy.initial or DegreeRequest(), *of_table]
    is_tensor_parallel = AUTOTP in deepspeed or any(request.tp > 1 for request in asked)
    is_in_stages = any(request.pp > 1 for request in asked)
    return ("tp",) * (not is_tensor_parallel) + ("pp",) * (not is_in_stages)


def installed_release(package: str) -> tuple[int, ...]:
    """Return the numbers of the release that is installed here; none: it is not."""
    try:
        return numbers_of(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return ()
