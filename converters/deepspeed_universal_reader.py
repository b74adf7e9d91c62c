"""Reads DeepSpeed's universal checkpoints, of any stage.

Source: as ``deepspeed_universal``.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from scalai.converters.checkpoint import (
    MAIN,
    PARAM,
    STEP,
    Checkpoint,
    CheckpointFile,
    Piece,
    place,
)
from scalai.converters.deepspeed_files import carried, read_dictionary, scalar_of
from scalai.converters.deepspeed_job import DeepSpeedJob, round_robins
from scalai.converters.deepspeed_model import ModelStates
from scalai.converters.deepspeed_universal_files import GLOBAL_STATE, MASTERS, STEPS, SUFFIX
from scalai.converters.torch_archive import StoredTensor, read_archive
from scalai.core.collection import Tensor
from scalai.core.errors import RefusedError
from scalai.core.region import row_major, whole


def open_universal(directory: Path, trust: bool) -> "UniversalReader":
    """Read a tag's metadata but that of its parameters. Raises ``RefusedError``."""
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
    return UniversalReader(directory, model, state, trust)


@dataclass(frozen=True, slots=True)
class UniversalReader:
    """One universal checkpoint that is being read."""

    directory: Path
    model: ModelStates
    state: dict[str, Any]
    trust: bool
    pieces: list[Piece] = field(default_factory=list)
    twins: list[Piece] = field(default_factory=list)
    files: dict[str, CheckpointFile] = field(default_factory=dict)
    number_steps: list[bool] = field(default_factory=list)
    steps: dict[float, str] = field(default_factory=dict)

    def read(self) -> Checkpoint:
        """Return the checkpoint. Raises ``RefusedError`` where a parameter's file is missing."""
        self._check_folders()
        self.pieces.extend(self.model.pieces())
        for name in self.model.files:
            self._add_file(name)
        for shapes in self.model.shapes():
            for name, shape in shapes.items():
                self._place_parameter(name, shape)
        self._check_steps()
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
        """Refuse folders of parameters that the model does not have.

        For stages 1 and 2 ds_to_universal makes one also of what is not trained.
        """
        names = set(self.model.first["module"])
        folders = sorted(path.name for path in (self.directory / "zero").iterdir() if path.is_dir())
        stray = next((name for name in folders if name not in names), None)
        if stray is not None:
            raise RefusedError(
                f"{self.directory} has zero/{stray}, and no such parameter by "
                f"{self.model.files[0]}. Files of two checkpoints are mixed: use another one."
            )

    def _check_steps(self) -> None:
        """Refuse parameters that have made unequally many steps."""
        if len(self.steps) > 1:
            few = ", ".join(f"{name}: {step:g}" for step, name in list(self.steps.items())[:3])
            raise RefusedError(
                f"{self.directory}: parameters have made unequally many optimizer steps ({few}). "
                "Files of two checkpoints are mixed: use another one."
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
                self._place_step(name, value, path)
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
            self._place_step(name, inner.get(0, {}).get("step"), self.directory / GLOBAL_STATE)

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

    def _place_step(self, name: str, value: Any, path: Path) -> None:
        step = scalar_of(value, path)
        if step is None:
            return
        self.number_steps.append(isinstance(value, int))
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
        job = self.model.job(
            names,
            rest,
            has_number_steps=any(self.number_steps),
            is_bf16=bool(bf16.get("enabled")),
        )
        return replace(job, tag=job.tag.removesuffix(SUFFIX))
