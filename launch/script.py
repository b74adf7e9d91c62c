"""What is known about a job before it runs, from the flags of its script and the configuration."""

from dataclasses import dataclass

from scalai.converters.megatron.arguments import MegatronArguments, is_megatron, read_arguments
from scalai.core.choice import DegreePolicy
from scalai.core.degrees import ModelLimits
from scalai.launch.elastic_config import ElasticConfig
from scalai.launch.options import Options


@dataclass(frozen=True, slots=True)
class ScriptFacts:
    """Limits and policy of a job; ``arguments`` None: the script is not one of Megatron-LM's."""

    limits: ModelLimits
    policy: DegreePolicy
    arguments: MegatronArguments | None = None


def read_script(options: Options, config: ElasticConfig) -> ScriptFacts:
    """Return what the script's flags and the configuration say; the configuration wins.

    Raises:
        RefusedError: The flags of a Megatron-LM script do not go with changing degrees.
        UsageError: A value among them is not a number.
    """
    if not is_megatron(options.script_args):
        return ScriptFacts(config.model, config.policy())
    arguments = read_arguments(options.script_args)
    limits = config.model.filled_from(arguments.limits)
    return ScriptFacts(limits, config.policy(arguments.initial), arguments)
