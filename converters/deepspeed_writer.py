"""Lays out a DeepSpeed checkpoint with ZeRO for any number of ranks and any stage.

What is written is what ``engine.load_checkpoint`` of a job at the target's degree and stage reads;
DeepSpeed itself refuses to load at another degree or stage.

Source: deepspeed 0.19.8, as ``deepspeed_zero``. Differs in: no copies of the recovery scripts
(``zero_to_fp32.py``).
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import Checkpoint, Target, WriteOptions
from scalai.converters.deepspeed_archives import Archives, write_tag
from scalai.converters.deepspeed_buffers import buffers_of
from scalai.converters.deepspeed_draft import Draft, dp_of, job_of
from scalai.converters.deepspeed_files import LATEST
from scalai.converters.deepspeed_model_writer import add_model
from scalai.converters.deepspeed_optimizer_writer import add_optimizer


def lay_out(source: Checkpoint, options: WriteOptions, stage: int) -> Target:
    """Lay out a checkpoint of ``source`` at other degrees, with ZeRO's ``stage`` 1 to 3.

    Raises:
        RefusedError: The source has no DeepSpeed job's names, or lacks tensors of them.
    """
    job, archives = job_of(source, options), Archives()
    draft = Draft(source, options, job, stage, dp_of(source, options), archives, job.tag)
    buffers = list(buffers_of(draft))
    for rank in range(draft.dp):
        add_optimizer(draft, rank, buffers)
    for rank in range(draft.dp if stage == 3 else 1):
        add_model(draft, rank, buffers)

    def finish(directory: Path, _: npt.NDArray[np.uint64]) -> None:
        write_tag(directory / LATEST, job.tag)

    notes = [*source.notes, *draft.notes()]
    return Target(f"deepspeed_zero{stage}", archives.placed(), archives.fixed, finish, tuple(notes))
