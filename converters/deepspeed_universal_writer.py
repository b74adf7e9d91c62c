"""Lays out DeepSpeed's universal checkpoints.

Source: as ``deepspeed_universal``.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import Checkpoint, Piece, Target, WriteOptions
from scalai.converters.deepspeed_archives import Archives, Filled, write_tag
from scalai.converters.deepspeed_buffers import Buffer, buffers_of, members
from scalai.converters.deepspeed_draft import Draft, job_of
from scalai.converters.deepspeed_model_writer import add_model
from scalai.converters.deepspeed_optimizer_writer import global_state
from scalai.converters.deepspeed_universal_files import (
    GLOBAL_STATE,
    LATEST,
    MASTERS,
    STEPS,
    SUFFIX,
)
from scalai.converters.torch_archive import NewTensor
from scalai.core.region import whole


def lay_out(source: Checkpoint, options: WriteOptions) -> Target:
    """Lay out a universal checkpoint, for engines of every stage.

    Raises:
        RefusedError: The source has no DeepSpeed job's names, or lacks tensors of them.
    """
    job, archives = job_of(source, options), Archives()
    folder = f"{job.tag}{SUFFIX}"
    for stage in (2, 3):
        draft = Draft(source, options, job, stage, 1, archives, folder)
        buffers = list(buffers_of(draft))
        add_model(draft, 0, buffers)
    draft = Draft(source, options, job, 2, 1, archives, folder)
    buffers = list(buffers_of(draft))
    _add_global_state(draft, buffers)
    for buffer in buffers:
        kinds = draft.kinds(list(buffer.shapes))
        for name in buffer.shapes:
            _add_parameter(draft, name, kinds)

    def finish(directory: Path, _: npt.NDArray[np.uint64]) -> None:
        write_tag(directory / LATEST, folder)

    return Target(
        "deepspeed_universal",
        archives.placed(),
        archives.fixed,
        finish,
        (*source.notes, *_notes(draft)),
    )


def _notes(draft: Draft) -> Iterator[str]:
    job = draft.job
    if job.buffers:
        yield f"DeepSpeed does not restore {len(job.buffers)} buffers from universal checkpoints"
    if job.frozen:
        yield f"DeepSpeed does not restore {len(job.frozen)} frozen parameters from them either"
    if len(job.groups) > 1:
        yield (
            "with stage 3 DeepSpeed will give all parameter groups the hyperparameters of the first"
        )
    if not job.has_number_steps:
        yield (
            "with stage 3 DeepSpeed lets all sub-groups count in one step tensor, which is wrong "
            "where there are several: after load_checkpoint give each its own, by `for state in "
            "engine.optimizer.optimizer.state.values(): state['step'] = state['step'].clone()`, or "
            "write deepspeed_zero3"
        )


def _add_global_state(draft: Draft, buffers: Sequence[Buffer]) -> None:
    filled = Filled()
    param_groups = draft.param_groups(members(draft, buffers))
    state: Mapping[str, Any] = {
        **global_state(draft),
        "param_groups": param_groups,
        "optimizer_state_dict": {
            "state": {0: draft.step(next(iter(buffers[0].shapes)), filled)},
            "param_groups": param_groups,
        },
    }
    draft.archives.add(f"{draft.folder}/{GLOBAL_STATE}", state, filled)


def _add_parameter(draft: Draft, name: str, kinds: Sequence[str]) -> None:
    for kind in (None, *kinds):
        tensor = draft.stored(kind, name)
        new = NewTensor(tensor.dtype, tensor.shape)
        filled: Filled = {new: [Piece(tensor, whole(tensor.shape), "", 0)]}
        value = {"cat_dim": 0, "param": new}
        draft.archives.add(f"{draft.folder}/zero/{name}/{kind or MASTERS}.pt", value, filled)
    steps = Filled()
    step = draft.step(name, steps)
    if step:
        draft.archives.add(f"{draft.folder}/zero/{name}/{STEPS}.pt", step["step"], steps)
