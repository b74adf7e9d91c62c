"""DeepSpeed's universal checkpoints: a folder per parameter, for a job of any degree.

``ds_to_universal`` writes for the stages of its source: 1 and 2, or 3. Scalai writes for both.

Source: ``load_hp_checkpoint_state`` and ``SubparamShape`` of
deepspeed/checkpoint/universal_checkpoint.py, the former also of
runtime/zero/stage3.py, ``load_hp_checkpoint_state_from_checkpoint_dir`` of
runtime/base_optimizer.py, and checkpoint/ds_to_universal.py, all of 0.19.8. The target's notes name
the values these loaders do not restore, or restore wrongly.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import (
    Checkpoint,
    CheckpointTarget,
    FilePiece,
    ReadOptions,
    WriteOptions,
)
from scalai.converters.deepspeed.cuts import ShardCut
from scalai.converters.deepspeed.drafts import Archives, Draft, Filled, Ranks, job_of, naming
from scalai.converters.deepspeed.model_writer import add_model
from scalai.converters.deepspeed.optimizer_writer import Buffer, buffers_of, global_state, members
from scalai.converters.deepspeed.universal_reader import (
    GLOBAL_STATE,
    LATEST,
    MASTERS,
    STEPS,
    SUFFIX,
    find_universal,
    open_universal,
)
from scalai.converters.pickles import Foreign, foreign, made
from scalai.converters.torch_archive import NewTensor
from scalai.core.errors import RefusedError
from scalai.core.tensors.region import whole


def _lay_out(source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
    """Lay out a universal checkpoint, for engines of every stage.

    Raises:
        RefusedError: The source has no DeepSpeed job's names, lacks some of its tensors, or has
            experts.
    """
    job, archives = job_of(source, options), Archives()
    if job.experts is not None:
        raise RefusedError(
            f"{source.directory} has experts ({job.experts.layers[0].name}), for which DeepSpeed "
            "0.19.8 has no universal checkpoints: it takes those of all ranks for one. Convert to "
            "deepspeed_zero0, deepspeed_zero1 or deepspeed_zero2."
        )
    folder = f"{job.tag}{SUFFIX}"
    alone = replace(options, degrees={**options.degrees, "tp": 1, "pp": 1, "dp": 1})
    stages = (2, 3) if job.pipeline is None else (1,)
    for stage in stages:
        (draft,) = Ranks.of(source, job, stage, alone).drafts(archives, folder)
        add_model(draft, 0, list(buffers_of(draft)))
    ranks = Ranks.of(source, job, stages[0], alone)
    (draft,) = ranks.drafts(archives, folder)
    buffers = list(buffers_of(draft))
    _add_global_state(draft, buffers)
    for buffer in buffers:
        kinds = draft.kinds(list(buffer.shapes))
        for name in buffer.shapes:
            _add_parameter(draft, ranks, name, kinds)

    return CheckpointTarget(
        "deepspeed_universal",
        archives.placed(),
        archives.fixed,
        naming(LATEST, folder),
        (*source.notes, *_notes(draft)),
    )


def _notes(draft: Draft) -> Iterator[str]:
    job = draft.job
    yield (
        "DeepSpeed 0.19.8 loads universal checkpoints with ZeRO alone: for a job of stage 0 write "
        "deepspeed_zero0"
    )
    yield (
        "with stage 3 and load_checkpoint(load_optimizer_states=False) DeepSpeed 0.19.8 asks for "
        "the checkpoint that `latest` names beside a universal one: for that write deepspeed_zero3"
    )
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


def _add_parameter(draft: Draft, ranks: Ranks, name: str, kinds: Sequence[str]) -> None:
    for kind in (None, *kinds):
        tensor = draft.stored(kind, name)
        new = NewTensor(tensor.dtype, tensor.shape)
        filled: Filled = {new: [FilePiece(tensor, whole(tensor.shape), "", 0)]}
        value = {**_cut_entries(ranks.known.get(name), tensor.shape), "param": new}
        draft.archives.add(f"{draft.folder}/zero/{name}/{kind or MASTERS}.pt", value, filled)
    steps = Filled()
    step = draft.step(name, steps)
    if step:
        draft.archives.add(f"{draft.folder}/zero/{name}/{STEPS}.pt", step["step"], steps)


def _cut_entries(cut: ShardCut | None, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the entries of a parameter's cut; empty: each rank has all of it. Without a known cut,
    as ds_to_universal writes it."""
    if cut is None:
        return {"cat_dim": 0}
    if cut.dim is None:
        return {}
    if len(cut.parts) == 1:
        return {"cat_dim": cut.dim}
    if len(cut.parts) == 2 and len(set(cut.parts)) == 1:
        return {"cat_dim": cut.dim, "param_n_sub_params": 2}
    parts = (*shape[: cut.dim], cut.parts, *shape[cut.dim + 1 :])
    return {"sub_param_shape": _sub_parameters(parts, cut.dim)}


def _sub_parameters(shape: tuple[Any, ...], dim: int) -> Foreign:
    """Return the entry of a fused parameter; ``shape`` has the sizes of its parts as a tuple at
    ``dim``."""
    cls = foreign("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
    return made(cls, {"patterns": [], "shape": shape, "partition_dim": dim})


@dataclass(frozen=True, slots=True)
class DeepSpeedUniversalLayout:
    """The layout ``deepspeed_universal``."""

    name: str = "deepspeed_universal"
    framework: str = "deepspeed"

    def find(self, path: Path) -> bool:
        """Tell whether there is a tag with folders of parameters."""
        return find_universal(path, None) is not None

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Read the metadata of a tag, or of the tag in ``latest_universal``."""
        directory = find_universal(path, options.iteration)
        if directory is None:
            raise RefusedError(
                f"{path} holds no universal checkpoint of step {options.iteration}. Name another "
                "--iteration."
            )
        return open_universal(directory, options).read()

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
        """Lay out a tag and ``latest_universal``. Degrees do not matter."""
        return _lay_out(source, options)
