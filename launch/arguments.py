"""What a worker is started with: the script, its own arguments, and the flags that follow from the degrees."""

from collections.abc import Mapping
from typing import Any

from scalai.launch.job import JobSpec

Json = Any


def worker_arguments(
    spec: JobSpec, command: Mapping[str, Json], facts: Mapping[str, Json]
) -> list[str]:
    """Return the arguments of ``scalai.patches.worker`` for one round.

    Args:
        spec: The job.
        command: The coordinator's ``start``: degrees and micro-batch size.
        facts: What workers of earlier rounds told, such as ``padded_vocab_size``.
    """
    options = spec.options
    assert options.script is not None
    return [*(["-m"] if options.is_module else []), options.script, *options.script_args]
