"""What is known about a job before it runs, from the flags of its script and the configurations."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from scalai.converters.deepspeed.config import (
    autotp_size,
    refuse_fixed,
    stated_stages,
    step_samples,
)
from scalai.converters.megatron.arguments import MegatronArguments, is_megatron, read_arguments
from scalai.converters.megatron.releases import shares_query_groups
from scalai.converters.megatron.rules import allows_untested
from scalai.core.choice import DegreePolicy
from scalai.core.degrees import DegreeRequest, ModelLimits
from scalai.launch.config.elastic_config import ElasticConfig
from scalai.launch.config.options import Options
from scalai.launch.config.planning import read_freedom, read_planner


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
            is_query_group_shared=shares_query_groups(options.script),
        )  # fmt: skip
        limits = config.model.filled_from(arguments.limits)
        planner = read_planner(config.planner, arguments, limits)
        preference, why = (None, planner) if isinstance(planner, str) else (planner, "")
        policy = replace(
            config.policy(arguments.initial, preference),
            freedom=read_freedom(config.planner, arguments),
        )
        return ScriptFacts(limits, policy, arguments, why)
    why = str(read_planner(config.planner, None, config.model))
    freedom = read_freedom(config.planner, None)
    if deepspeed is None:
        return ScriptFacts(
            config.model, replace(config.policy(), freedom=freedom), why_no_planner=why
        )
    refuse_fixed(deepspeed)
    # The micro-batch of a DeepSpeed job follows from its DP: only the global batch is a limit.
    limits = ModelLimits(global_batch_size=step_samples(deepspeed))
    tp, pp = autotp_size(deepspeed), stated_stages(options.script_args) or 1
    initial = DegreeRequest(tp, pp) if tp * pp > 1 else None
    limits = config.model.filled_from(limits)
    policy = replace(config.policy(initial), freedom=freedom)
    return ScriptFacts(limits, policy, why_no_planner=why)
