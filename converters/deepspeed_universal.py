"""DeepSpeed's universal checkpoints: a folder a parameter, that a job of any degree loads.

    <save directory>/latest_universal
    <save directory>/<tag>_universal/
        mp_rank_00_model_states.pt  zero_pp_rank_0_mp_rank_00_model_states.pt
        zero/optimizer_state.pt  zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt

What ``ds_to_universal`` writes is for the stages that it came from: 1 and 2, or 3. What is written
here is for both.

Source: ``load_hp_checkpoint_state`` of deepspeed/checkpoint/universal_checkpoint.py and of
runtime/zero/stage3.py, ``load_hp_checkpoint_state_from_checkpoint_dir`` of
runtime/base_optimizer.py, and checkpoint/ds_to_universal.py, all of 0.19.8. These loaders do not
restore buffers and frozen parameters, and stage 3's gives all parameter groups the
hyperparameters of the first: the target's notes say so.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import (
    MAIN,
    PARAM,
    STEP,
    Checkpoint,
    CheckpointFile,
    Piece,
    ReadOptions,
    Target,
    WriteOptions,
    place,
)
from scalai.converters.deepspeed_archives import Archives, Filled, write_tag
from scalai.converters.deepspeed_files import carried, read_dictionary, scalar_of
from scalai.converters.deepspeed_job import DeepSpeedJob, round_robins
from scalai.converters.deepspeed_model import ModelStates
from scalai.converters.deepspeed_writer import Buffer, Writer, job_of
from scalai.converters.torch_archive import NewTensor, StoredTensor, read_archive
from scalai.core.collection import Tensor
from scalai.core.errors import RefusedError
from scalai.core.region import row_major, whole

LATEST = "latest_universal"
SUFFIX = "_universal"
MASTERS, STEPS = "fp32", "step"
GLOBAL_STATE = "zero/optimizer_state.pt"


@dataclass(frozen=True, slots=True)
class DeepSpeedUniversalLayout:
    """The layout ``deepspeed_universal``."""

    name: str = "deepspeed_universal"

    def find(self, path: Path) -> bool:
        """Tell whether there is a tag with a folder of parameters."""
        return _find(path, None) is not None

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Read the metadata of a tag, or of the one that ``latest_universal`` names."""
        directory = _find(path, options.iteration)
        if directory is None:
            raise RefusedError(
                f"{path} holds no universal checkpoint of step {options.iteration}. Name another "
                "--iteration."
            )
        return _open(directory, options.trust_pickle).read()

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> Target:
        """Lay out a tag and ``latest_universal``. Degrees do not matter."""
        return _lay_out(source, options)


def _find(path: Path, step: int | None) -> Path | None:
    if step is None and (path / GLOBAL_STATE).is_file():
        return path
    tags = [f"global_step{step}{SUFFIX}"]
    if step is None:
        try:
            tags = [(path / LATEST).read_text(encoding="utf-8").strip()]
        except (OSError, ValueError):
            return None
    found = [path / tag for tag in tags if tag and "/" not in tag]
    return next((tag for tag in found if (tag / GLOBAL_STATE).is_file()), None)


def _open(directory: Path, trust: bool) -> "_Reader":
    whole_names = sorted(path.name for path in directory.glob("mp_rank_*_model_states.pt"))
    parts = directory.glob("zero_pp_rank_*_mp_rank_*_model_states.pt")
    by_rank = {int(path.name.split("_")[3]): path.name for path in parts}
    names = whole_names or [by_rank[rank] for rank in sorted(by_rank)]
    if any("mp_rank_00_" not in name for name in names):
        raise RefusedError(
            f"{directory} has model-parallel ranks ({names[-1]}), which are not read yet: only "
            "checkpoints of data parallelism are."
        )
    if not names:
        raise RefusedError(f"{directory} has no model_states.pt. Use another checkpoint.")
    model = ModelStates.read(directory, names, is_stage_3=not whole_names, trust=trust)
    if len(names) != (1 if whole_names else model.dp):
        raise RefusedError(
            f"{directory} was made of {model.dp} data-parallel ranks, and has model_states.pt of "
            f"{len(names)}. Convert to universal again, or use another checkpoint."
        )
    if whole_names and model.dp > 1 and round_robins(model.config):
        raise RefusedError(
            f"{directory} was made by ds_to_universal of a job with round_robin_gradients, which "
            "mixes up its parameters (deepspeed 0.19.8). Convert the checkpoint that it was made "
            "of instead."
        )
    state = read_dictionary(directory / GLOBAL_STATE, trust=trust)
    return _Reader(directory, model, state, trust)


@dataclass(frozen=True, slots=True)
class _Reader:
    """One universal checkpoint that is being read."""

    directory: Path
    model: ModelStates
    state: dict[str, Any]
    trust: bool
    pieces: list[Piece] = field(default_factory=list)
    twins: list[Piece] = field(default_factory=list)
    files: dict[str, CheckpointFile] = field(default_factory=dict)
    steps: dict[float, str] = field(default_factory=dict)

    def read(self) -> Checkpoint:
        self._check_folders()
        self.pieces.extend(self.model.pieces())
        for name in self.model.files:
            self._add_file(name)
        for shapes in self.model.shapes():
            for name, shape in shapes.items():
                self._place_parameter(name, shape)
        if len(self.steps) > 1:
            few = ", ".join(f"{name}: {step:g}" for step, name in list(self.steps.items())[:3])
            raise RefusedError(
                f"{self.directory}: parameters have made unequally many optimizer steps ({few}). "
                "Files of two checkpoints are mixed: use another one."
            )
        files = list(self.files.values())
        path = self.directory / GLOBAL_STATE
        job = self._job()
        return Checkpoint(
            "deepspeed_universal",
            self.directory,
            place(self.pieces, files),
            self.model.values(job, carried(self._param_groups(), path)),
            twins=place(self.twins, files) if self.twins else None,
        )

    def _check_folders(self) -> None:
        """Refuse folders of parameters that the model does not have."""
        names = {name for shapes in self.model.shapes() for name in shapes}
        folders = sorted(path.name for path in (self.directory / "zero").iterdir() if path.is_dir())
        stray = next((name for name in folders if name not in names), None)
        if stray is not None:
            raise RefusedError(
                f"{self.directory} has zero/{stray}, and no such parameter by "
                f"{self.model.files[0]}. Files of two checkpoints are mixed: use another one."
            )

    def _add_file(self, name: str) -> None:
        size = (self.directory / name).stat().st_size
        self.files.setdefault(name, CheckpointFile(name, size))

    def _param_groups(self) -> list[dict[str, Any]]:
        groups = self.state.get("param_groups")
        if not isinstance(groups, list):
            raise RefusedError(f"{self.directory / GLOBAL_STATE} has no param_groups.")
        return groups

    def _place_parameter(self, name: str, shape: tuple[int, ...]) -> None:
        folder = f"zero/{name}"
        found = sorted(path.stem for path in (self.directory / folder).glob("*.pt"))
        if MASTERS not in found:
            raise RefusedError(
                f"{self.directory} has no {folder}/{MASTERS}.pt: the conversion to universal was "
                "interrupted, or files are missing. Convert again."
            )
        for kind in found:
            file = f"{folder}/{kind}.pt"
            path = self.directory / file
            value = read_archive(path, trust=self.trust)
            if kind == STEPS:
                self._place_step(name, scalar_of(value, path))
                continue
            stored = value.get("param") if isinstance(value, dict) else value
            if not isinstance(stored, StoredTensor) or stored.shape not in (
                shape,
                (int(np.prod(shape, dtype=np.int64)),),
            ):
                raise RefusedError(
                    f"{path} holds {getattr(stored, 'shape', stored)!r}, and {name} is "
                    f"{list(shape)} by {self.model.files[0]}. Files of two checkpoints are mixed: "
                    "use another one."
                )
            self._add_file(file)
            self._place(name, kind, shape, stored, file)
        if STEPS not in found:
            inner = self.state.get("optimizer_state_dict", {}).get("state", {})
            step = inner.get(0, {}).get("step")
            self._place_step(name, scalar_of(step, self.directory / GLOBAL_STATE))

    def _place(
        self, name: str, kind: str, shape: tuple[int, ...], stored: StoredTensor, file: str
    ) -> None:
        weight = self.model.weight_dtype(name)
        is_weight = kind == MASTERS and stored.dtype == weight
        known = PARAM if is_weight else MAIN if kind == MASTERS else kind
        into = self.twins if is_weight and not self.model.is_stage_3 else self.pieces
        stride = stored.stride if stored.shape == shape else row_major(shape)
        box = whole(shape)
        into.append(
            Piece(Tensor(f"{known}/{name}", shape, stored.dtype), box, file, stored.begin, stride)
        )
        if kind == MASTERS and not is_weight and self.model.is_stage_3:
            rounded = Tensor(f"{PARAM}/{name}", shape, weight)
            self.pieces.append(Piece(rounded, box, file, stored.begin, stride, is_rounded=True))

    def _place_step(self, name: str, step: float | None) -> None:
        if step is None:
            return
        self.steps.setdefault(step, name)
        file = f"(step {step:g})"
        content = np.float32(step).tobytes()
        self.files[file] = CheckpointFile(file, len(content), content)
        self.pieces.append(Piece(Tensor(f"{STEP}/{name}", (), "F32"), whole(()), file, 0))

    def _job(self) -> DeepSpeedJob:
        names = [tuple(shapes) for shapes in self.model.shapes()]
        if self.model.is_stage_3:
            parts = [group["params"] for group in self._param_groups()]
            names = [tuple(name for part in group for name in names[part]) for group in parts]
        kept = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
        path = self.directory / GLOBAL_STATE
        rest = carried({key: self.state[key] for key in kept if key in self.state}, path)
        config = self.model.config
        bf16 = config.get("bf16") or config.get("bfloat16") or {}
        job = self.model.job(names, rest, has_number_steps=False, is_bf16=bool(bf16.get("enabled")))
        return replace(job, tag=job.tag.removesuffix(SUFFIX))


def _lay_out(source: Checkpoint, options: WriteOptions) -> Target:
    job, archives = job_of(source, options), Archives()
    folder = f"{job.tag}{SUFFIX}"
    for stage in (2, 3):
        writer = Writer(source, job, stage, 1, archives, folder)
        groups = list(writer.groups())
        writer.add_model(0, groups)
    writer = Writer(source, job, 2, 1, archives, folder)
    groups = list(writer.groups())
    _add_global_state(writer, groups)
    for group in groups:
        kinds = writer.keys(list(group.shapes))
        for name in group.shapes:
            _add_parameter(writer, name, kinds)

    def finish(directory: Path, _: npt.NDArray[np.uint64]) -> None:
        write_tag(directory / LATEST, folder)

    return Target(
        "deepspeed_universal",
        archives.placed(),
        archives.fixed,
        finish,
        (*source.notes, *_notes(writer)),
    )


def _notes(writer: Writer) -> Iterator[str]:
    job = writer.job
    if job.buffers:
        yield f"DeepSpeed does not restore {len(job.buffers)} buffers from universal checkpoints"
    if job.frozen:
        yield f"DeepSpeed does not restore {len(job.frozen)} frozen parameters from them either"
    if len(job.groups) > 1:
        yield (
            "with stage 3 DeepSpeed will give all parameter groups the hyperparameters of the first"
        )
    yield (
        "loading this with stage 3 is not proven: losses differed by 2e-3 (DeepSpeed 0.19.8); "
        "write deepspeed_zero3 for that"
    )


def _add_global_state(writer: Writer, groups: Sequence[Buffer]) -> None:
    filled = Filled()
    param_groups = writer.param_groups(writer.members(groups))
    state: Mapping[str, Any] = {
        **writer.global_state(),
        "param_groups": param_groups,
        "optimizer_state_dict": {
            "state": {0: writer.step(next(iter(groups[0].shapes)), filled)},
            "param_groups": param_groups,
        },
    }
    writer.archives.add(f"{writer.folder}/{GLOBAL_STATE}", state, filled)


def _add_parameter(writer: Writer, name: str, kinds: Sequence[str]) -> None:
    for kind in (None, *kinds):
        tensor = writer.stored(kind, name)
        new = NewTensor(tensor.dtype, tensor.shape)
        filled: Filled = {new: [Piece(tensor, whole(tensor.shape), "", 0)]}
        value = {"cat_dim": 0, "param": new}
        writer.archives.add(f"{writer.folder}/zero/{name}/{kind or MASTERS}.pt", value, filled)
    steps = Filled()
    step = writer.step(name, steps)
    if step:
        writer.archives.add(f"{writer.folder}/zero/{name}/{STEPS}.pt", step["step"], steps)
