"""Reads DeepSpeed's checkpoints without ZeRO (stage 0).

The file does not name the optimizer's parameters, unless torch had names. If shapes and weights
allow several answers in the module's order, it is refused. Parameters that could be exchanged
against this order are noted (``Checkpoint.guessed``).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from scalai.converters.checkpoint import MAIN, STEP, CheckpointFile, FilePiece, Order
from scalai.converters.deepspeed.files import carried, read_dictionary, scalar_of
from scalai.converters.deepspeed.job import enables_bf16
from scalai.converters.deepspeed.loss_scale import to_zero
from scalai.converters.deepspeed.plain.state import (
    MASTERS,
    Advance,
    Flattened,
    PlainState,
    Separate,
    match_names,
    untold,
)
from scalai.converters.deepspeed.reading.grid import RankState
from scalai.converters.deepspeed.reading.model import ModelStates
from scalai.converters.deepspeed.shards.expert_names import expert_of
from scalai.converters.torch_archive import StoredTensor
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import whole

Names = Sequence[tuple[str, ...]]

SAY_THE_ORDER = (
    "Say the optimizer's order by --args-from: a file with [[deepspeed.group]], or a checkpoint of "
    "the job in ZeRO stage 1."
)


@dataclass(frozen=True, slots=True)
class _Tree:
    """An optimizer's state in the file of one expert-parallel rank."""

    model: ModelStates
    path: Path
    tree: Mapping[str, Any]
    ep_rank: int

    @property
    def inner(self) -> Mapping[str, Any]:
        """The state of torch's optimizer in it."""
        inner: Mapping[str, Any] = self.tree.get("optimizer_state_dict", self.tree)
        return inner

    def state(self) -> PlainState:
        """Return it by parameter group. Raises ``RefusedError``: it is of an unknown kind."""
        path, tree, inner = self.path, self.tree, self.inner
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

    def names(self, state: PlainState, order: Order | None) -> tuple[Names, frozenset[str]]:
        """Return the parameters of each group, and the guessed ones among them.

        Raises:
            RefusedError: They cannot be identified, or do not fit ``order``.
        """
        model, groups = self.model, self.inner["param_groups"]
        is_of_experts = [bool(group.get("moe")) for group in groups]
        others = {*(model.first.get("buffer_names") or ()), *model.aliases()}
        has_masters = "fp32_groups" in self.tree or isinstance(state, Flattened)
        weights = {
            name: entry
            for name, entry in model.first["module"].items()
            if isinstance(entry, StoredTensor)
            and name not in others
            and model.experts.is_on(name, self.ep_rank)
            # The 16-bit optimizers leave out parameters without elements.
            and not (has_masters and 0 in entry.shape)
        }

        def file_of(name: str) -> Path:
            return model.directory / model.file_of(name)

        def advance(group: int, at: int, name: str) -> int | None:
            weight = weights[name]
            is_other = is_of_experts[group] != bool(expert_of(name))
            if is_other or not state.fits(group, at, weight, file_of(name)):
                return None
            return at + state.size(weight)

        given = [group.get("param_names") for group in groups]  # torch 2.7, by named_parameters()
        told = None if order is None else order([*weights])
        if all(isinstance(names, list) and weights.keys() >= {*names} for names in given):
            named: Names = [tuple(names) for names in given]
        elif told is not None:
            named = [tuple(filter(weights.__contains__, names)) for names in told]
        else:
            sizes = [state.size(weight) for weight in weights.values()]
            found = match_names(list(weights), sizes, state.ends(), advance)
            if len(found) != 1:
                raise RefusedError(
                    f"{self.path} does not name the optimizer's parameters, and by their shapes "
                    f"{'and weights ' if has_masters else ''}"
                    f"{'no' if not found else 'more than one'} assignment to those of the module "
                    f"is possible. {SAY_THE_ORDER}"
                )
            return found[0], untold(found[0], state, weights, file_of)
        self._check_order(named, state.ends(), advance)
        return named, frozenset()

    def _check_order(self, named: Names, ends: Sequence[int], advance: Advance) -> None:
        places = [0] * len(ends)
        for group, names in enumerate(named[: len(ends)]):
            for name in names:
                beyond = advance(group, places[group], name)
                if beyond is None:
                    raise RefusedError(
                        f"{self.path}: the optimizer's state at place {places[group]} of group "
                        f"{group} is not of {name}, which stands there by the order that was "
                        "given. Correct the order."
                    )
                places[group] = beyond
        if len(named) != len(ends) or places != [*ends]:
            raise RefusedError(
                f"{self.path}: the optimizer has groups of {[*ends]} places, and the order that "
                f"was given of {places}. Correct the order: frozen parameters are in no group."
            )


@dataclass(frozen=True, slots=True)
class PlainReader:
    """One model_states file that is being read, with the optimizer's state in it.

    With experts, each expert-parallel rank has a file with an optimizer's state. Rank 0's experts,
    and all parameters outside experts, occur there again: as ``duplicates``.
    """

    model: ModelStates
    trust: bool
    order: Order | None = None
    pieces: list[FilePiece] = field(default_factory=list)
    duplicates: list[FilePiece] = field(default_factory=list)
    steps: dict[str, CheckpointFile] = field(default_factory=dict)

    def read(self) -> RankState:
        """Return the file's content.

        Raises:
            RefusedError: The optimizer is of an unknown kind, or its parameters have no clear
                names.
        """
        path = self.model.path
        first, *others = self._trees()
        tree, inner = first.tree, first.inner
        state = first.state()
        names, guessed = first.names(state, self.order)
        scale = {"clip_grad": tree["clip_grad"]} if "clip_grad" in tree else {}
        if "dynamic_loss_scale" in tree:
            scale |= to_zero(carried(_plain_entries(tree), path), self.model.config)
        module = self.model.first["module"]
        sizes = {name: prod(module[name].shape) for of in names for name in of}
        param_groups = carried(inner["param_groups"], path)
        groups, param_groups = self.model.experts.whole_groups(names, param_groups, sizes)
        job = self.model.job(
            groups,
            scale,
            has_number_steps=any(isinstance(s.get("step"), int) for s in inner["state"].values()),
            is_bf16=enables_bf16(self.model.config),
            is_fused=isinstance(state, Flattened) if inner is not tree else None,
        )
        self.pieces.extend(self.model.pieces())
        self._place_tree(first, state, names, set())
        known = {name for of in names for name in of}
        for other in others:
            state = other.state()
            names, more = other.names(state, self.order)
            guessed |= more
            self._place_tree(other, state, names, known)
            known.update(name for of in names for name in of)
        paths = [path, *(other.path for other in others)]
        files = [CheckpointFile(path.name, path.stat().st_size) for path in paths]
        return RankState(
            self.model,
            job,
            param_groups,
            self.pieces,
            self.duplicates,
            [*files, *self.model.expert_files(), *self.steps.values()],
            guessed=guessed,
        )

    def _trees(self) -> list[_Tree]:
        """Return the states of all expert-parallel ranks, the model file's first."""
        model = self.model
        trees = [_Tree(model, model.path, model.first["optimizer"], 0)]
        for ep_rank, name in enumerate(model.experts.optimizers):
            path = model.directory / name
            tree = read_dictionary(path, trust=self.trust).get("optimizer")
            if not isinstance(tree, dict):
                raise RefusedError(f"{path} holds no optimizer. Use another checkpoint.")
            trees.append(_Tree(model, path, tree, ep_rank))
        return trees

    def _place_tree(
        self,
        tree: _Tree,
        state: PlainState,
        names: Sequence[Sequence[str]],
        known: Collection[str],
    ) -> None:
        for group, members in enumerate(names):
            at = 0
            for name in members:
                weight: StoredTensor = self.model.first["module"][name]
                into = self.duplicates if name in known else self.pieces
                self._place(name, state.at(group, at, weight.shape), tree.path, into)
                at += state.size(weight)

    def _place(
        self, name: str, state: Mapping[str, Any], path: Path, into: list[FilePiece]
    ) -> None:
        file = path.name
        for key, entry in state.items():
            if isinstance(entry, StoredTensor) and key != STEP:
                kind = MAIN if key == MASTERS else key
                tensor = Tensor(f"{kind}/{name}", entry.shape, entry.dtype)
                box = whole(entry.shape)
                into.append(FilePiece(tensor, box, file, entry.begin, entry.stride))
        step = scalar_of(state.get("step"), path)
        if step is not None:
            known = f"(step {step:g})"
            content = np.float32(step).tobytes()
            self.steps[known] = CheckpointFile(known, len(content), content)
            into.append(FilePiece(Tensor(f"{STEP}/{name}", (), "F32"), whole(()), known, 0))


def _plain_entries(tree: Mapping[str, Any]) -> dict[str, Any]:
    large = ("optimizer_state_dict", "fp32_groups", "fp32_groups_flat")
    return {key: value for key, value in tree.items() if key not in large}
