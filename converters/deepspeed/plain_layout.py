"""DeepSpeed's checkpoints without ZeRO (stage 0): data-parallel ranks are equal and share one file.

Source: ``_common_checkpoint_state`` of deepspeed/runtime/engine.py, 0.19.8, and
``_configure_fp16_optimizer``, which chooses an engine's kind of optimizer (``plain_reader``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import (
    MAIN,
    Checkpoint,
    CheckpointTarget,
    FilePiece,
    ReadOptions,
    WriteOptions,
)
from scalai.converters.deepspeed.drafts import Archives, Draft, Filled, Ranks, job_of, naming
from scalai.converters.deepspeed.experts import optimizer_file
from scalai.converters.deepspeed.files import LATEST, find_tag, list_files, tag_of
from scalai.converters.deepspeed.flat import split_each
from scalai.converters.deepspeed.grid import Grid
from scalai.converters.deepspeed.loss_scale import to_plain
from scalai.converters.deepspeed.model_writer import add_experts, add_layers, add_model
from scalai.converters.deepspeed.optimizer_writer import Buffer, inner_state, part
from scalai.converters.deepspeed.plain_reader import PlainReader
from scalai.converters.deepspeed.validity import DEFAULT_CLIPPING
from scalai.converters.torch_archive import NewTensor
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import whole


def _lay_out(source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
    """Lay out a checkpoint of ``source`` without ZeRO.

    Raises:
        RefusedError: The source has no DeepSpeed job's names, or lacks some of its tensors.
    """
    job, archives = job_of(source, options), Archives()
    if job.pipeline is not None and job.is_bf16:
        raise RefusedError(
            "stage 0 is asked of a bf16 pipeline, for which DeepSpeed 0.19.8 cannot load its own "
            "checkpoints without ZeRO. Convert to deepspeed_zero1."
        )
    ranks = Ranks.of(source, job, 0, options)
    drafts = ranks.drafts(archives, job.tag)
    for draft in drafts:
        for share in draft.of_experts():
            filled = Filled()
            optimizer = _optimizer(share, filled)
            if not share.ep_rank:
                add_model(share, 0, [], optimizer, filled)
            if draft.job.experts is not None:
                path = f"{draft.folder}/{optimizer_file(share.ep_rank)}"
                archives.add(path, {"optimizer": optimizer}, filled)
        add_experts(draft)
    for draft in drafts[: ranks.tp]:
        add_layers(draft)
    notes = [*source.notes, *drafts[0].notes(), *ranks.notes()]
    if job.is_fused is None and _has_masters(drafts[0]):
        kind = "FP16_Optimizer" if _is_fused(drafts[0]) else "FP16_UnfusedOptimizer"
        notes.append(f"by its parameter groups, the job's optimizer goes into DeepSpeed's {kind}")
    return CheckpointTarget(
        "deepspeed_zero0",
        archives.placed(),
        archives.fixed,
        naming(LATEST, job.tag),
        tuple(notes),
        keeps_order=job.pipeline is None and _is_cut_alike(source, options),
    )


def _is_cut_alike(source: Checkpoint, options: WriteOptions) -> bool:
    was = source.values.degrees
    return source.layout == "deepspeed_zero0" and all(
        options.degrees.get(axis, was.get(axis, 1)) == was.get(axis, 1)
        for axis in ("tp", "pp", "ep")
    )


def _optimizer(draft: Draft, filled: Filled) -> dict[str, Any]:
    if not _has_masters(draft):
        return _separate(draft, filled)
    scale = to_plain(draft.job.optimizer, draft.source.values.step)
    if not _is_fused(draft):
        masters = [
            [_new(draft.stored(None, name), filled) for name in group] for group in draft.job.groups
        ]
        inner = _separate(draft, filled)
        return {**scale, "optimizer_state_dict": inner, "fp32_groups": masters}
    buffers = [_buffer(draft, group) for group in range(len(draft.job.groups))]
    is_scaled = draft.parameter(draft.job.groups[0][0]).dtype == "F16"
    return {
        **(scale if is_scaled else {}),
        "optimizer_state_dict": inner_state(draft, 0, buffers, filled),
        "fp32_groups_flat": [
            part(draft, None, buffer, 0, buffer.flat.rank_elements, filled) for buffer in buffers
        ],
        "clip_grad": DEFAULT_CLIPPING,
        **draft.clip_grad,
    }


def _has_masters(draft: Draft) -> bool:
    names = (name for group in draft.job.groups for name in group)
    return any(f"{MAIN}/{name}" in draft.tensors for name in names)


def _is_fused(draft: Draft) -> bool:
    """Tell whether the job's optimizer is FusedAdam; if unknown, by the keys of its groups."""
    if draft.job.is_fused is not None:
        return draft.job.is_fused
    group: Mapping[str, Any] = next(iter(draft.param_groups([[] for _ in draft.job.groups])), {})
    return "bias_correction" in group and "amsgrad" not in group


def _separate(draft: Draft, filled: Filled) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    numbers: list[list[int]] = []
    for names in draft.job.groups:
        numbers.append(list(range(len(state), len(state) + len(names))))
        for number, name in zip(numbers[-1], names, strict=True):
            kinds = draft.kinds([name])
            moments = {kind: _new(draft.stored(kind, name), filled) for kind in kinds}
            state[number] = {**draft.step(name, filled), **moments}
    return {"state": state, "param_groups": draft.param_groups(numbers)}


def _buffer(draft: Draft, group: int) -> Buffer:
    shapes = {name: draft.parameter(name).shape for name in draft.job.groups[group]}
    return Buffer(shapes, split_each(shapes, 1), group)


def _new(tensor: Tensor, filled: Filled) -> NewTensor:
    made = NewTensor(tensor.dtype, tensor.shape)
    filled[made] = [FilePiece(tensor, whole(tensor.shape), "", 0)]
    return made


FILE = "mp_rank_00_model_states.pt"
_NEEDED = ("module", "optimizer", "global_steps", "dp_world_size")


@dataclass(frozen=True, slots=True)
class DeepSpeedPlainLayout:
    """The layout ``deepspeed_zero0``."""

    name: str = "deepspeed_zero0"
    framework: str = "deepspeed"

    def find(self, path: Path) -> bool:
        """Tell whether there is a tag with a model file and without ZeRO's optimizer files."""
        directory = find_tag(path, None)
        if directory is None or (directory / "zero").exists():
            return False
        return (directory / FILE).is_file() and not any(directory.glob("*zero_pp_rank_*"))

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Read the metadata of a tag, or of the tag in ``latest``."""
        grid = Grid.of(list_files(tag_of(path, options.iteration)), options)
        states = [
            PlainReader(model, options.trust_pickle, options.order).read()
            for _, model in grid.models(_NEEDED)
        ]
        return grid.unite(self.name, states, is_split=False)

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
        """Lay out a tag and ``latest``, for ``engine.load_checkpoint``."""
        return _lay_out(source, options)
