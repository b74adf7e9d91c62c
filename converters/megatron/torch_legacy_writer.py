"""Lays out a legacy ``torch`` checkpoint: for each model-parallel rank what Megatron would save.

Megatron loads it by order and by place, so it has to be what the job's own ranks expect: the
degrees, the virtual stages and, for the distributed optimizer, the buckets that its arguments make.
``distrib_optim.pt`` is independent of the number of data-parallel ranks, but for the size of
buckets where communication overlaps.

Source: ``save_checkpoint`` and ``generate_state_dict`` of megatron/training/checkpointing.py and
the optimizers' ``state_dict`` in megatron/core/optimizer (0.16.1).
"""

import argparse
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.converters.archive_layout import lay_out_archive
from scalai.converters.checkpoint import (
    PARAM,
    Checkpoint,
    CheckpointFile,
    Piece,
    Target,
    WriteOptions,
    place,
)
from scalai.converters.megatron.iterations import TRACKER
from scalai.converters.megatron.modules import has_extra_state
from scalai.converters.megatron.rank_rng_states import rng_states_of
from scalai.converters.megatron.torch_legacy_job import Coordinate, Job, Local, folder_name
from scalai.converters.megatron.torch_legacy_state import (
    Fill,
    buffers_of,
    filled,
    groups_of,
    link_of,
)
from scalai.store.atomic import replace_file, sync_directory

MODEL, OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"


def lay_out(source: Checkpoint, options: WriteOptions) -> Target:
    """Lay out a checkpoint of ``source``'s state at other degrees.

    Raises:
        RefusedError: The model cannot be cut so, is not one whose order is known, or lacks masters
            or hyperparameters.
    """
    job = Job.of(source, options)
    files: list[CheckpointFile] = []
    pieces: list[Piece] = []
    fixed: dict[int, Sequence[tuple[int, bytes]]] = {}
    for coordinate in job.coordinates():
        for path, value, fills in _rank_files(job, coordinate):
            archive = lay_out_archive(value, Path(path).stem)
            fixed[len(files)] = archive.fixed
            files.append(CheckpointFile(path, archive.size_bytes))
            begins = {id(t): at for t, at in zip(archive.tensors, archive.begin, strict=True)}
            pieces += [
                Piece(fill.tensor, fill.box, path, begins[id(fill.into)] + fill.offset)
                for fill in fills
            ]

    def finish(directory: Path, _: npt.NDArray[np.uint64]) -> None:
        for file in files:
            sync_directory((directory / file.path).parent)
        sync_directory(directory / job.folder)
        replace_file(directory / TRACKER, str(source.values.step).encode())

    return Target("torch", place(pieces, files), fixed, finish, tuple(job.notes))


def _rank_files(job: Job, coordinate: Coordinate) -> Iterator[tuple[str, Any, Sequence[Fill]]]:
    """Yield path, content and what is to be filled in for each file of a rank."""
    folder = f"{job.folder}/{folder_name(coordinate, job.degrees)}"
    locals_ = job.locals(coordinate)
    fills: list[Fill] = []
    tree: dict[str, Any] = {}
    if job.arguments is not None:
        tree["args"] = argparse.Namespace(**job.arguments)
    extra = job.source.values.extra
    tree["checkpoint_version"] = extra.get("checkpoint_version", 3.0)
    tree["iteration"] = job.source.values.step
    for chunk in range(job.degrees["vpp"]):
        name = "model" if job.degrees["vpp"] == 1 else f"model{chunk}"
        of_chunk = [local for local in locals_ if local.chunk == chunk]
        is_last = (coordinate[1], chunk) == (job.degrees["pp"] - 1, job.degrees["vpp"] - 1)
        tree[name] = _model(job, of_chunk, fills, is_last=is_last)
    trained = [local for local in locals_ if job.is_trained(local.name)]
    links = [trained]
    if job.is_chained:
        links = [[local for local in trained if local.is_expert == flag] for flag in (False, True)]
    if job.is_split is not None:
        states = [
            link_of(job, link, groups_of(job, number), fills) for number, link in enumerate(links)
        ]
        tree["optimizer"] = states if job.is_chained else states[0]
    if job.source.values.scheduler is not None:
        tree["opt_param_scheduler"] = job.source.values.scheduler
    tree["rng_state"] = rng_states_of(job.source, job.degrees, coordinate, job.notes)
    flops = "num_floating_point_operations_so_far"
    tree[flops] = extra.get(flops, 0)
    yield f"{folder}/{MODEL}", tree, fills
    if job.is_split:
        flat: list[Fill] = []
        numel = sum(local.numel for local in trained)
        # The dense parameters' state is with the first of the ranks that share them.
        buffers = [
            buffers_of(job, coordinate, link, numel, flat) if number or not coordinate[2] else None
            for number, link in enumerate(links)
        ]
        yield f"{folder}/{OPTIMIZER}", buffers if job.is_chained else buffers[0], flat


def _model(
    job: Job, locals_: Sequence[Local], fills: list[Fill], *, is_last: bool
) -> dict[str, Any]:
    """Return a chunk's state dict."""
    state: OrderedDict[str, Any] = OrderedDict()
    extra: dict[str, None] = {"output_layer._extra_state": None} if is_last else {}
    for local in locals_:
        state[local.key] = filled(local, job.tensors[f"{PARAM}/{local.name}"], fills)
        module = local.key.rpartition(".")[0]
        if has_extra_state(local.key):
            extra[f"{module}._extra_state"] = None
        if not job.naming.is_local and local.key.endswith("linear_proj.weight"):
            attention = module.removesuffix(".linear_proj")
            extra[f"{attention}.core_attention._extra_state"] = None
    state.update(extra)
    return state
