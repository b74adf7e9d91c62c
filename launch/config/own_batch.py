"""The global batch of a job, as far as it is known without its script: for views of its data."""

from collections.abc import Mapping, Sequence

from scalai.converters.deepspeed.config import step_samples
from scalai.converters.megatron.arguments import is_megatron, scan, stated_batch
from scalai.core.dataset.table import DatasetTable
from scalai.core.degrees.batches import BatchRamp
from scalai.core.errors import ScalaiError
from scalai.core.jsonable import Json


def own_batch(
    script_args: Sequence[str], stated: int | None, deepspeed: Mapping[str, Json] | None = None,
    facts: Mapping[str, Json] | None = None,
) -> DatasetTable:  # fmt: skip
    """Return a table that says the job's own global batch and nothing else; nothing at all where it
    is not known, or is none that a table takes.

    Args:
        script_args: Of a script of Megatron-LM, whose flags say it.
        stated: What ``[model]`` says, of other scripts.
        deepspeed: The DeepSpeed configuration; None: there is none.
        facts: What the first workers have told.
    """
    batch: int | BatchRamp | None
    try:
        if is_megatron(script_args):
            batch = stated_batch(scan(script_args))
        else:
            told = (facts or {}).get("global_batch_size")
            of_deepspeed = None if deepspeed is None else step_samples(deepspeed)
            batch = stated or of_deepspeed or (told if type(told) is int else None)
        return DatasetTable.of_batch(batch)
    except ScalaiError:
        return DatasetTable()
