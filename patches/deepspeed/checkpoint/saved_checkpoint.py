"""The content of a checkpoint for all ranks: read once, sent as bytes.

Rank 0 reads every file's header, checks them, and shares the places of pieces; then each rank reads
its own. Steps, parameter groups and loss scale are in the words of the live state (``steps``,
``groups``, ``loss_scale``).
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scalai.converters.between.mapping import find_mapping
from scalai.converters.checkpoint import (
    STEP,
    Checkpoint,
    CheckpointFile,
    Order,
    PlacedTensors,
    ReadOptions,
)
from scalai.converters.checksums import FileStorage, storages_in
from scalai.converters.consistency import check_samples
from scalai.converters.deepspeed.job import STATE, DeepSpeedJob
from scalai.converters.layouts import open_checkpoint
from scalai.converters.pickles import Foreign
from scalai.converters.suspects import refuse_guessed
from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.core.tensors.collection import Collection, split_name
from scalai.core.tensors.coverage import check_coverage
from scalai.patches.deepspeed.checkpoint.agreement import packed, unpacked
from scalai.patches.deepspeed.checkpoint.model_file import live_value
from scalai.patches.plain import all_plain
from scalai.store.files import number_of

log = logging.getLogger(__name__)

_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True, eq=False, slots=True)
class SavedCheckpoint:
    """A checkpoint read by rank 0.

    Attributes:
        placed: Places of its tensors, without steps.
        steps: Number of the optimizer's steps, by parameter.
        groups: Hyperparameters and their parameters, as from ``take_groups``.
        loss_scale: State of fp16's dynamic scale, as from ``take_loss_scale``; else empty.
        storages: Parts of the files with a checksum.
    """

    placed: PlacedTensors
    steps: Mapping[str, float]
    groups: Mapping[str, Json]
    loss_scale: Mapping[str, Json]
    storages: Sequence[FileStorage]

    def to_bytes(self) -> bytes:
        placed = self.placed
        files = [[file.path, file.size_bytes] for file in placed.files]
        return packed(
            placed.collection,
            [files, self.steps, self.groups, self.loss_scale, list(map(astuple, self.storages))],
            {
                "file": placed.file,
                "begin": placed.begin,
                "stride": placed.stride,
                "is_rounded": placed.rounded(),
            },
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "SavedCheckpoint":
        collection, (paths, steps, groups, loss_scale, storages), rows = unpacked(data)
        files = tuple(CheckpointFile(path, size) for path, size in paths)
        columns = rows["file"], rows["begin"], rows["stride"]
        placed = PlacedTensors(collection, *columns, files, rows["is_rounded"])
        stored = tuple(FileStorage(*values) for values in storages)
        return cls(placed, steps, groups, loss_scale, stored)


def read_saved(
    directory: Path, cuts: str | None = None, order: Order | None = None, *, is_whole: bool = True
) -> SavedCheckpoint:
    """Read the headers of all files of a tag, and check them for one whole save.

    Args:
        cuts: Name or path of a file with the cuts of tensor-parallel ranks, if the checkpoint has
            none.
        order: Order of the optimizer's parameters, if the checkpoint has none.
        is_whole: True if the optimizer's states are wanted, too.

    Raises:
        UsageError: There is no such file of cuts.
        RefusedError: It is damaged, incomplete or of an unknown kind, or the owner of the
            optimizer's states is unknown.
        ProofError: Second copies differ at their start.
    """
    mapping = find_mapping(cuts, "cuts") if cuts else None
    checkpoint = open_checkpoint(directory, ReadOptions(cuts=mapping, order=order))
    check_coverage(checkpoint.placed.collection)
    check_samples(checkpoint)
    if is_whole:
        refuse_guessed(
            checkpoint,
            "Convert it first, with the order of the job that saved it: scalai reshard --to "
            "deepspeed_zero1 --args-from FILE (docs/offline.md); or pass "
            "load_optimizer_states=False.",
        )
    for note in checkpoint.notes:
        log.warning("event=load note=%s", note)
    job = checkpoint.values.extra.get(STATE)
    if not isinstance(job, DeepSpeedJob):
        raise RefusedError(
            f"{directory} is a checkpoint of the layout {checkpoint.layout}, and one that "
            "engine.save_checkpoint wrote is expected. Convert it by scalai reshard."
        )
    placed = _without_steps(checkpoint.placed)
    return SavedCheckpoint(
        placed,
        _steps(checkpoint, job),
        _groups(checkpoint, job),
        _loss_scale(job),
        tuple(stored for file in placed.files for stored in storages_in(directory, file.path)),
    )


def _without_steps(placed: PlacedTensors) -> PlacedTensors:
    """Return the pieces in files; readers make up files for steps."""
    is_stored = np.array([file.content is None for file in placed.files], dtype=bool)
    rows = np.flatnonzero(is_stored[placed.file])
    files = tuple(file for file in placed.files if file.content is None)
    number = np.cumsum(is_stored) - 1
    tensors, tensor = np.unique(placed.collection.tensor[rows], return_inverse=True)
    collection = Collection(
        tuple(placed.collection.tensors[at] for at in tensors),
        tensor,
        placed.collection.offset[rows],
        placed.collection.shape[rows],
    )
    return PlacedTensors(
        collection, number[placed.file[rows]], placed.begin[rows],
        placed.stride[rows], files, placed.rounded()[rows],
    )  # fmt: skip


def _steps(checkpoint: Checkpoint, job: DeepSpeedJob) -> dict[str, float]:
    placed, found = checkpoint.placed, {}
    for row, number in enumerate(placed.collection.tensor.tolist()):
        kind, name = split_name(placed.collection.tensors[number].name)
        content = placed.files[placed.file[row]].content
        if kind == STEP and content is not None:
            found[name] = number_of(content, "F32")
    if job.has_number_steps:
        # FusedAdam counts for the last parameter of a group alone, and uses that for all.
        for group in job.groups:
            newest = max((found[name] for name in group if name in found), default=0.0)
            found |= {name: newest for name in group if name in found}
    return found


def _groups(checkpoint: Checkpoint, job: DeepSpeedJob) -> dict[str, Json]:
    values: dict[str, Json] = {}
    of: dict[str, str] = {}
    # elastic_checkpoint keeps no groups: there are none here then.
    for number, group in enumerate(checkpoint.values.param_groups):
        what = f"parameter group {number} of the checkpoint"
        kept = {key: live_value(value, what) for key, value in group.items() if key[0] != "_"}
        plain = all_plain(kept, what)
        identity = json.dumps(plain, sort_keys=True)
        values[identity] = plain
        of |= dict.fromkeys(job.groups[number], identity)
    return {"values": values, "of": of}


def _loss_scale(job: DeepSpeedJob) -> dict[str, Any]:
    scaler = job.optimizer.get("loss_scaler")
    state = scaler.state if isinstance(scaler, Foreign) and isinstance(scaler.state, dict) else {}
    if not state.get("dynamic"):
        return {}  # the configuration says it
    return all_plain({key: state[key] for key in _SCALE if key in state}, "loss scale")
