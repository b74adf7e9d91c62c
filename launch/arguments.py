"""What a worker is started with: the script, its own arguments, and the flags that follow from the
degrees."""

import logging
from collections.abc import Mapping

from scalai.converters.megatron.arguments import derived_flags
from scalai.core.degrees import Degrees
from scalai.core.jsonable import Json
from scalai.launch.job import JobSpec

log = logging.getLogger(__name__)


def worker_arguments(spec: JobSpec, command: Mapping[str, Json]) -> list[str]:
    """Return the arguments of ``scalai.patches.worker`` for one round.

    Args:
        spec: The job.
        command: The coordinator's ``start`` or ``build``: degrees, micro-batch size, and ``facts``
            that workers of earlier rounds told, such as ``padded_vocab_size``.
    """
    options, known = spec.options, spec.script.arguments
    assert options.script is not None
    start = [*(["-m"] if options.is_module else []), options.script, *options.script_args]
    if known is None:
        return start
    facts = command["facts"]
    flags, notes = derived_flags(
        known,
        Degrees.from_json(command["degrees"]),
        facts.get("padded_vocab_size"),
        command["micro_batch_size"],
        facts.get("eval_batch_size"),
    )
    for note in notes:
        log.info("event=flags %s", note)
    return [*start, *flags]
