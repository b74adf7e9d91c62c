"""Lays out a DeepSpeed checkpoint with ZeRO for any number of ranks and any stage.

``engine.load_checkpoint`` of a job at the target's degree and stage reads it; DeepSpeed refuses to
load at other degrees or stages.

Source: deepspeed 0.19.8, as ``layout``. Differs in: no copies of the recovery scripts
(``zero_to_fp32.py``).
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import Checkpoint, Target, WriteOptions
from scalai.converters.deepspeed.files import LATEST
from scalai.converters.deepspeed.writing.archives import Archives
from scalai.converters.deepspeed.writing.buffers import buffers_of
from scalai.converters.deepspeed.writing.draft import job_of
from scalai.converters.deepspeed.writing.model import add_experts, add_layers, add_model
from scalai.converters.deepspeed.writing.optimizer import add_optimizer
from scalai.converters.deepspeed.writing.ranks import Ranks
from scalai.store.atomic import replace_file


def lay_out(source: Checkpoint, options: WriteOptions, stage: int) -> Target:
    """Lay out a checkpoint of ``source`` at other degrees, with ZeRO's ``stage`` 1 to 3.

    Raises:
        RefusedError: The source has no DeepSpeed job's names, or lacks some of its tensors.
    """
    job, archives = job_of(source, options), Archives()
    ranks = Ranks.of(source, job, stage, options)
    drafts = ranks.drafts(archives, job.tag)
    for draft in drafts:
        of_experts = draft.of_experts()
        buffers = [list(buffers_of(share)) for share in of_experts]
        for rank in range(draft.dp):
            at = rank % len(of_experts)
            add_optimizer(of_experts[at], rank, buffers[at])
        for rank in range(draft.dp if stage == 3 else 1):
            add_model(of_experts[0], rank, buffers[0])
        add_experts(draft)
    for draft in drafts[: ranks.tp]:
        add_layers(draft)

    def finish(directory: Path, _: npt.NDArray[np.uint64]) -> None:
        replace_file(directory / LATEST, job.tag.encode())

    notes = [*source.notes, *drafts[0].notes(), *ranks.notes()]
    return Target(f"deepspeed_zero{stage}", archives.placed(), archives.fixed, finish, tuple(notes))
