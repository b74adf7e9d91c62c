"""Reads DeepSpeed's checkpoints without ZeRO (stage 0).

The file names no parameter of the optimizer. Where shapes and weights leave several answers, it is
refused rather than guessed at.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scalai.converters.checkpoint import MAIN, STEP, CheckpointFile, Piece
from scalai.converters.deepspeed.files import carried, scalar_of
from scalai.converters.deepspeed.grid import RankState
from scalai.converters.deepspeed.loss_scale import to_zero
from scalai.converters.deepspeed.model import ModelStates
from scalai.converters.deepspeed.names import match_names
from scalai.converters.deepspeed.plain_state import MASTERS, Flattened, PlainState, Separate
from scalai.converters.torch_archive import StoredTensor
from scalai.core.collection import Tensor
from scalai.core.errors import RefusedError
from scalai.core.region import whole


@dataclass(frozen=True, slots=True)
class PlainReader:
    """One model_states file that is being read, the optimizer's state in it."""

    model: ModelStates
    pieces: list[Piece] = field(default_factory=list)
    steps: dict[str, CheckpointFile] = field(default_factory=dict)

    def read(self) -> RankState:
        """Return what the file holds.

        Raises:
            RefusedError: Its optimizer is of an unknown kind, or its parameters cannot be named.
        """
        path = self.model.path
        tree = self.model.first["optimizer"]
        inner = tree.get("optimizer_state_dict", tree)
        state = self._state(tree, inner)
        names = self._names(state)
        scale = {"clip_grad": tree["clip_grad"]} if "clip_grad" in tree else {}
        if "dynamic_loss_scale" in tree:
            scale |= to_zero(carried(_plain_entries(tree), path), self.model.config)
        bf16 = self.model.config.get("bf16") or self.model.config.get("bfloat16") or {}
        job = self.model.job(
            names,
            scale,
            has_number_steps=any(isinstance(s.get("step"), int) for s in inner["state"].values()),
            is_bf16=bool(bf16.get("enabled")),
            is_fused=isinstance(state, Flattened) if inner is not tree else None,
        )
        self.pieces.extend(self.model.pieces())
        for group, members in enumerate(names):
            at = 0
            for name in members:
                weight: StoredTensor = self.model.first["module"][name]
                self._place(name, state.at(group, at, weight.shape))
                at += state.size(weight)
        file = CheckpointFile(path.name, path.stat().st_size)
        return RankState(
            self.model,
            job,
            carried(inner["param_groups"], path),
            self.pieces,
            (),
            [file, *self.steps.values()],
        )

    def _state(self, tree: Mapping[str, Any], inner: Mapping[str, Any]) -> PlainState:
        path = self.model.path
        is_known = inner is tree or {"fp32_groups", "fp32_groups_flat"} & tree.keys()
        if not is_known or not {"state", "param_groups"} <= inner.keys():
            raise RefusedError(
                f"{path} holds an optimizer of another kind ({sorted(tree)[:5]}...): the state of "
                "torch's Adam is expected, or of DeepSpeed's FP16_Optimizer or "
                "FP16_UnfusedOptimizer around one."
            )
        groups = []
        for group in inner["param_groups"]:
            for number in group["params"]:
                if not inner["state"].get(number):
                    raise RefusedError(
                        f"{path}: parameter {number} of the optimizer has no state, so its name "
                        "cannot be told. Save with ZeRO, or train a step first."
                    )
            groups.append([dict(inner["state"][number]) for number in group["params"]])
        for group, masters in zip(groups, tree.get("fp32_groups", ()), strict=False):
            for state, master in zip(group, masters, strict=True):
                state[MASTERS] = master
        if "fp32_groups_flat" not in tree:
            return Separate(path, groups)
        flat = zip(groups, tree["fp32_groups_flat"], strict=True)
        return Flattened(path, [{**state, MASTERS: master} for (state,), master in flat])

    def _names(self, state: PlainState) -> list[tuple[str, ...]]:
        model = self.model
        others = {*(model.first.get("buffer_names") or ()), *model.aliases()}
        has_masters = "fp32_groups" in model.first["optimizer"] or isinstance(state, Flattened)
        weights = {
            name: entry
            for name, entry in model.first["module"].items()
            if isinstance(entry, StoredTensor)
            and name not in others
            # The 16-bit optimizers leave out what has no elements.
            and not (has_masters and 0 in entry.shape)
        }

        def advance(group: int, at: int, name: str) -> int | None:
            weight = weights[name]
            return at + state.size(weight) if state.fits(group, at, weight) else None

        sizes = [state.size(weight) for weight in weights.values()]
        found = match_names(list(weights), sizes, state.ends(), advance)
        if len(found) != 1:
            raise RefusedError(
                f"{model.path} does not name the optimizer's parameters, and by their shapes "
                f"{'and weights ' if has_masters else ''}"
                f"{'no' if not found else 'more than one'} assignment to those of the module is "
                "possible. Save the job with ZeRO stage 1 once."
            )
        return found[0]

    def _place(self, name: str, state: Mapping[str, Any]) -> None:
        file = self.model.path.name
        for key, entry in state.items():
            if isinstance(entry, StoredTensor) and key != STEP:
                kind = MAIN if key == MASTERS else key
                tensor = Tensor(f"{kind}/{name}", entry.shape, entry.dtype)
                box = whole(entry.shape)
                self.pieces.append(Piece(tensor, box, file, entry.begin, entry.stride))
        step = scalar_of(state.get("step"), self.model.path)
        if step is not None:
            known = f"(step {step:g})"
            content = np.float32(step).tobytes()
            self.steps[known] = CheckpointFile(known, len(content), content)
            self.pieces.append(Piece(Tensor(f"{STEP}/{name}", (), "F32"), whole(()), known, 0))


def _plain_entries(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an optimizer keeps beside tensors."""
    large = ("optimizer_state_dict", "fp32_groups", "fp32_groups_flat")
    return {key: value for key, value in tree.items() if key not in large}
