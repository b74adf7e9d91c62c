"""What a worker is started with: the script, its own arguments, and the flags that follow from the
degrees."""

import logging

from scalai.converters.megatron.arguments import derived_flags
from scalai.core.commands import Workers
from scalai.core.degrees import Degrees
from scalai.launch.job import JobSpec

log = logging.getLogger(__name__)


def worker_arguments(spec: JobSpec, wanted: Workers) -> list[str]:
    """Return the arguments of ``scalai.patches.worker`` for one round.

    Args:
        spec: The job.
        wanted: The round's workers on a host; ``facts`` are those that workers of earlier rounds
            reported, such as ``padded_vocab_size``.
    """
    options, known = spec.options, spec.script.arguments
    assert options.script is not None
    start = [*(["-m"] if options.is_module else []), options.script, *options.script_args]
    if known is None:
        return start
    facts = wanted.facts.value()
    flags, notes = derived_flags(
        known,
        Degrees.from_json(wanted.degrees),
        facts.get("padded_vocab_size"),
        wanted.micro_batch_size,
        facts.get("eval_batch_size"),
    )
    for note in notes:
        log.info("event=flags %s", note)
    return [*start, *flags]
