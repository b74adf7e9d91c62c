"""DeepSpeed's checkpoints without ZeRO (stage 0): every rank is equal, and one file holds all.

The file names no parameter of the optimizer, only numbers them by parameter group. Which is which
follows from the shapes, given that every group keeps the module's order; where that leaves several
answers, the file is refused rather than guessed at.

Source: deepspeed 0.19.8: ``_common_checkpoint_state`` of runtime/engine.py, ``state_dict`` of
runtime/fp16/unfused_optimizer.py; torch.optim's ``state_dict`` in fp32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import (
    MAIN,
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
from scalai.converters.deepspeed_draft import Draft, dp_of, job_of
from scalai.converters.deepspeed_files import LATEST, carried, find_tag, scalar_of
from scalai.converters.deepspeed_model import ModelStates
from scalai.converters.deepspeed_model_writer import add_model
from scalai.converters.torch_archive import NewTensor, StoredTensor
from scalai.core.collection import Tensor
from scalai.core.errors import RefusedError
from scalai.core.region import whole

FILE = "mp_rank_00_model_states.pt"
MASTERS = "fp32"


@dataclass(frozen=True, slots=True)
class DeepSpeedPlainLayout:
    """The layout ``deepspeed_zero0``."""

    name: str = "deepspeed_zero0"

    def find(self, path: Path) -> bool:
        """Tell whether there is a tag with one file of the model and none of an optimizer."""
        directory = find_tag(path, None)
        if directory is None or (directory / "zero").exists():
            return False
        return (directory / FILE).is_file() and not any(directory.glob("*_optim_states.pt"))

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Read the metadata of a tag, or of the one that ``latest`` names."""
        directory = find_tag(path, options.iteration)
        if directory is None:
            raise RefusedError(
                f"{path} holds no tag global_step{options.iteration}. Name another --iteration."
            )
        others = sorted(p.name for p in directory.glob("*_states.pt") if p.name != FILE)
        if others:
            raise RefusedError(
                f"{directory} has {others[0]} beside {FILE}: model-parallel ranks and pipelines "
                "are not read yet."
            )
        model = ModelStates.read(
            directory, (FILE,), is_stage_3=False, trust=options.trust_pickle, needed=_NEEDED
        )
        return _Reader(model).read()

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> Target:
        """Lay out a tag and ``latest``, as ``engine.load_checkpoint`` finds them."""
        job, archives = job_of(source, options), Archives()
        draft = Draft(source, job, 0, dp_of(source, options), archives, job.tag)
        filled = Filled()
        add_model(draft, 0, [], _optimizer(draft, filled), filled)

        def finish(directory: Path, _: npt.NDArray[np.uint64]) -> None:
            write_tag(directory / LATEST, job.tag)

        notes = [*source.notes, *draft.notes()]
        return Target(self.name, archives.placed(), archives.fixed, finish, tuple(notes))


_NEEDED = ("module", "optimizer", "global_steps", "dp_world_size")


@dataclass(frozen=True, slots=True)
class _Reader:
    """One file that is being read."""

    model: ModelStates
    pieces: list[Piece] = field(default_factory=list)
    steps: dict[str, CheckpointFile] = field(default_factory=dict)

    def read(self) -> Checkpoint:
        path = self.model.path
        tree = self.model.first["optimizer"]
        inner = tree.get("optimizer_state_dict", tree)
        if tree.get("dynamic_loss_scale"):
            raise RefusedError(
                f"{path} keeps a dynamic fp16 loss scale as stage 0 does, which cannot be read "
                "yet. Save with ZeRO."
            )
        if not {"state", "param_groups"} <= inner.keys() or "fp32_groups_flat" in tree:
            raise RefusedError(
                f"{path} holds an optimizer of another kind ({sorted(tree)[:5]}...): the state of "
                "torch's Adam is expected, or of DeepSpeed's FP16_UnfusedOptimizer around it."
            )
        names = self._names(inner)
        job = self.model.job(
            names,
            {"clip_grad": tree["clip_grad"]} if "clip_grad" in tree else {},
            has_number_steps=any(isinstance(s.get("step"), int) for s in inner["state"].values()),
            is_bf16=bool((self.model.config.get("bf16") or {}).get("enabled")),
        )
        self.pieces.extend(self.model.pieces())
        for group, (numbers, parameters) in enumerate(
            zip((g["params"] for g in inner["param_groups"]), names, strict=True)
        ):
            for at, (number, name) in enumerate(zip(numbers, parameters, strict=True)):
                masters = tree["fp32_groups"][group][at] if "fp32_groups" in tree else None
                self._place(name, inner["state"][number], masters)
        file = CheckpointFile(FILE, path.stat().st_size)
        return Checkpoint(
            "deepspeed_zero0",
            self.model.directory,
            place(self.pieces, [file, *self.steps.values()]),
            self.model.values(job, carried(inner["param_groups"], path), is_split=False),
        )

    def _names(self, inner: Mapping[str, Any]) -> list[tuple[str, ...]]:
        groups = []
        for group in inner["param_groups"]:
            shapes = []
            for number in group["params"]:
                entries = inner["state"].get(number, {}).values()
                tensors = [e for e in entries if isinstance(e, StoredTensor)]
                if not tensors:
                    raise RefusedError(
                        f"{self.model.path}: parameter {number} of the optimizer has no state, so "
                        "its name cannot be told. Save with ZeRO, or train a step first."
                    )
                # A step is a tensor without dims; beside it lie the parameter's own shape.
                shapes.append(max((t.shape for t in tensors), key=len))
            groups.append(tuple(shapes))
        buffers = set(self.model.first.get("buffer_names") or ())
        aliases = self.model.aliases()
        module = {
            name: entry.shape
            for name, entry in self.model.first["module"].items()
            if isinstance(entry, StoredTensor) and name not in buffers and name not in aliases
        }
        found = match_names(module, groups)
        if len(found) != 1:
            raise RefusedError(
                f"{self.model.path} does not name the optimizer's parameters, and by their shapes "
                f"{'no' if not found else 'more than one'} assignment to those of the module is "
                "possible. Save the job with ZeRO stage 1 once."
            )
        return found[0]

    def _place(self, name: str, state: Mapping[str, Any], masters: StoredTensor | None) -> None:
        entries = {**state, MASTERS: masters}
        for key, entry in entries.items():
            if isinstance(entry, StoredTensor) and key != STEP:
                kind = MAIN if key == MASTERS else key
                tensor = Tensor(f"{kind}/{name}", entry.shape, entry.dtype)
                box = whole(entry.shape)
                self.pieces.append(Piece(tensor, box, FILE, entry.begin, entry.stride))
        step = scalar_of(state.get("step"), self.model.path)
        if step is not None:
            file = f"(step {step:g})"
            content = np.float32(step).tobytes()
            self.steps[file] = CheckpointFile(file, len(content), content)
            self.pieces.append(Piece(Tensor(f"{STEP}/{name}", (), "F32"), whole(()), file, 0))


def match_names(
    module: Mapping[str, tuple[int, ...]], groups: Sequence[tuple[tuple[int, ...], ...]]
) -> list[list[tuple[str, ...]]]:
    """Return up to two ways to deal the module's parameters to groups of these shapes.

    Every group keeps the module's order; parameters may be in none (frozen ones).
    """
    names = list(module)

    @cache
    def ways(at: int, taken: tuple[int, ...]) -> tuple[tuple[int | None, ...], ...]:
        """Return, of the names from ``at`` on, the group of each."""
        left = sum(len(group) - done for group, done in zip(groups, taken, strict=True))
        if left > len(names) - at:
            return ()
        if at == len(names):
            return ((),)
        found: list[tuple[int | None, ...]] = []
        for group, done in enumerate(taken):
            if done < len(groups[group]) and groups[group][done] == module[names[at]]:
                after = (*taken[:group], done + 1, *taken[group + 1 :])
                found += [(group, *rest) for rest in ways(at + 1, after)]
        found += [(None, *rest) for rest in ways(at + 1, taken)]
        return tuple(found[:2])

    return [
        [
            tuple(name for name, of in zip(names, way, strict=True) if of == group)
            for group in range(len(groups))
        ]
        for way in ways(0, (0,) * len(groups))
    ]


def _optimizer(draft: Draft, filled: Filled) -> dict[str, Any]:
    """Return the optimizer's tree; what its tensors are filled with goes to ``filled``."""
    job = draft.job
    if job.optimizer.get("dynamic_loss_scale"):
        raise RefusedError(
            "a dynamic fp16 loss scale cannot be written as stage 0 keeps it. Convert to stage 1."
        )

    def new(tensor: Tensor) -> NewTensor:
        made = NewTensor(tensor.dtype, tensor.shape)
        filled[made] = [Piece(tensor, whole(tensor.shape), "", 0)]
        return made

    state: dict[int, dict[str, Any]] = {}
    numbers: list[list[int]] = []
    for names in job.groups:
        numbers.append(list(range(len(state), len(state) + len(names))))
        for number, name in zip(numbers[-1], names, strict=True):
            kinds = draft.kinds([name])
            moments = {kind: new(draft.stored(kind, name)) for kind in kinds}
            state[number] = {**draft.step(name, filled), **moments}
    inner = {"state": state, "param_groups": draft.param_groups(numbers)}
    if not any(f"{MAIN}/{name}" in draft.tensors for names in job.groups for name in names):
        return inner
    return {
        "dynamic_loss_scale": False,
        "cur_scale": 1.0,
        "cur_iter": 0,
        "optimizer_state_dict": inner,
        "fp32_groups": [[new(draft.stored(None, name)) for name in names] for names in job.groups],
    }
