"""The tensors of Megatron's legacy checkpoints: each rank's own, given their places in the model.

A rank's state dict has its parameters in the order of its modules, with layers and experts counted
from the rank's own first one.

Source: ``generate_state_dict`` of megatron/training/checkpointing.py and GPTModel of
megatron/core/models/gpt/gpt_model.py (0.16.1).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from scalai.converters.checkpoint import PARAM, STEP, CheckpointFile, Piece, Placed, place
from scalai.converters.megatron.modules import (
    EMBEDDING,
    OUTPUT,
    Naming,
    gated,
    is_trained,
    parts,
    whole_shape,
)
from scalai.converters.megatron.names import PREDICTED, expert_of, layer_of
from scalai.converters.megatron.torch_legacy_optimizer import (
    CHECKED,
    MODEL,
    Coordinate,
    Found,
    Parameter,
    Rank,
)
from scalai.converters.megatron.values import agreed_step
from scalai.converters.torch_archive import StoredTensor
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import whole

EXTRA_STATE = "_extra_state"
"""What Transformer Engine keeps of a module beside its parameters, as of fp8: bytes, as an object
or as a tensor, which is empty where there is nothing."""
STEP_FILE = "(step)"
"""The file in memory that holds the optimizer's step."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """All tensors that were found; second copies; what else the state dicts tell; notes."""

    placed: Placed
    duplicates: Placed | None
    extra: Mapping[str, Any]
    notes: Sequence[str]


def read_tensors(
    directory: Path,
    ranks: Mapping[Coordinate, Rank],
    degrees: Mapping[str, int],
    groups: Sequence[Mapping[str, Any]],
) -> Tensors:
    """Find all tensors of a checkpoint.

    Args:
        ranks: All ranks of the grid.
        groups: Parameter groups; of the distributed optimizer they know the step.

    Raises:
        RefusedError: Something is missing, or is not what the model's order says.
    """
    return _Reader(directory, ranks, degrees, groups, Found(directory, degrees)).run()


@dataclass(frozen=True, slots=True)
class _Reader:
    directory: Path
    ranks: Mapping[Coordinate, Rank]
    degrees: Mapping[str, int]
    groups: Sequence[Mapping[str, Any]]
    found: Found

    def run(self) -> Tensors:
        naming = self._naming()
        layers = self._first_layers()
        is_tied = self._is_tied()
        for coordinate, rank in sorted(self.ranks.items()):
            mine = list(self._parameters(coordinate, rank, naming, layers, is_tied))
            for parameter in mine:
                file = f"{rank.folder}/{MODEL}"
                self.found.add_stored(PARAM, parameter, parameter.stored, file)
            if "optimizer" in rank.tree:
                self.found.add_optimizer(coordinate, rank, [p for p in mine if is_trained(p.name)])
        pieces, files = list(self.found.pieces), self._files()
        steps = (float(g["step"]) for g in self.groups if g.get("step") is not None)
        step = agreed_step(self.directory, steps)
        if self.found.stepped and step is not None:
            content = np.float32(step).tobytes()
            files.append(CheckpointFile(STEP_FILE, len(content), content))
            pieces += [
                Piece(Tensor(f"{STEP}/{name}", (), "F32"), whole(()), STEP_FILE, 0)
                for name in self.found.stepped
            ]
        extra = {"is_local": naming.is_local, "is_grouped": naming.is_grouped}
        duplicates = place(self.found.duplicates, files) if self.found.duplicates else None
        return Tensors(
            place(pieces, files), duplicates, extra, tuple(dict.fromkeys(self.found.notes))
        )

    def _files(self) -> list[CheckpointFile]:
        names = sorted({piece.file for piece in (*self.found.pieces, *self.found.duplicates)})
        return [CheckpointFile(name, (self.directory / name).stat().st_size) for name in names]

    def _state(self, rank: Rank, chunk: int) -> Mapping[str, Any]:
        """Return the state dict of a model chunk."""
        name = "model" if "model" in rank.tree else f"model{chunk}"
        state = rank.tree.get(name)
        if not isinstance(state, dict) or "language_model" in state:
            raise RefusedError(
                f"{self.directory / rank.folder / MODEL} holds no state dict {name!r} of "
                "megatron-core's models. Load it in Megatron and save it with core models."
            )
        return state

    def _naming(self) -> Naming:
        chunks = range(self.degrees["vpp"])
        ranks = self.ranks.values()
        names = [name for rank in ranks for chunk in chunks for name in self._state(rank, chunk)]
        if any(re.search(r"\.experts\.weight[12]$", name) for name in names):
            raise RefusedError(
                f"{self.directory}: the experts are those of --moe-use-legacy-grouped-gemm, one "
                "transposed tensor for all. Save it in Megatron with --ckpt-format torch_dist."
            )
        if any(name.startswith(PREDICTED) for name in names):
            raise RefusedError(
                f"{self.directory}: the model has layers that predict further tokens (MTP), whose "
                "place among the optimizer's parameters is not known here. Save it in Megatron "
                "with --ckpt-format torch_dist."
            )
        return Naming(
            is_local=any(".input_layernorm.weight" in name for name in names),
            is_grouped=any(re.search(r"\.experts\.linear_fc1\.weight0$", name) for name in names),
        )

    def _first_layers(self) -> Mapping[tuple[int, int], int]:
        """Return the first layer of each (stage, chunk), counted from what the ranks have."""
        found, layer = {}, 0
        for chunk in range(self.degrees["vpp"]):
            for stage in range(self.degrees["pp"]):
                found[stage, chunk] = layer
                state = self._state(self.ranks[0, stage, 0], chunk)
                layer += len({layer_of(name) for name in state} - {None})
        return found

    def _is_tied(self) -> bool:
        """Tell whether the last stage's output layer is the first one's embedding."""
        if self.degrees["pp"] == 1:
            return False
        last = self.ranks[0, self.degrees["pp"] - 1, 0]
        first = self.ranks[0, 0, 0]
        output = self._state(last, self.degrees["vpp"] - 1).get(OUTPUT)
        embedding = self._state(first, 0).get(EMBEDDING)
        stated = getattr(first.tree.get("args"), "untie_embeddings_and_output_weights", None)
        if stated is not None or output is None or embedding is None:
            return not stated
        if (output.dtype, output.shape) != (embedding.dtype, embedding.shape):
            return False
        size = min(CHECKED, prod(output.shape)) * ITEM_BYTES[output.dtype]
        one = self.found.read(f"{first.folder}/{MODEL}", embedding.begin, size)
        return one == self.found.read(f"{last.folder}/{MODEL}", output.begin, size)

    def _parameters(
        self,
        coordinate: Coordinate,
        rank: Rank,
        naming: Naming,
        layers: Mapping[tuple[int, int], int],
        is_tied: bool,
    ) -> Iterator[Parameter]:
        """Yield a rank's tensors in the order of its modules."""
        tp_rank, stage, ep_rank = coordinate
        tp, pp, vpp = self.degrees["tp"], self.degrees["pp"], self.degrees["vpp"]
        for chunk in range(vpp):
            state = self._state(rank, chunk)
            tensors = {
                key: value
                for key, value in state.items()
                if isinstance(value, StoredTensor) and not key.endswith(EXTRA_STATE)
            }
            for key, value in state.items():
                if key not in tensors and not _is_nothing(value):
                    self.found.notes.append(f"{re.sub(r'[.][0-9]+[.]', '.*.', key)} is not carried")
            experts = {expert_of(naming.to_global(key, 0, 0)) for key in tensors} - {None}
            names = {
                key: naming.to_global(key, layers[stage, chunk], ep_rank * len(experts))
                for key in tensors
            }
            local = gated({names[key]: value.shape for key, value in tensors.items()})
            is_last = (stage, chunk) == (pp - 1, vpp - 1)
            is_first = (stage, chunk) == (0, 0)
            for key, stored in tensors.items():
                name = names[key]
                is_copy = is_tied and is_last and name == OUTPUT
                is_shared = is_copy or (is_tied and is_first and name == EMBEDDING)
                name = EMBEDDING if is_copy else name
                shape = whole_shape(name, stored.shape, tp)
                mine = parts(name, shape, tp, tp_rank, is_gated=name in local)
                yield Parameter(name, shape, stored, mine, chunk, is_copy, is_shared)


def _is_nothing(value: Any) -> bool:
    """Tell whether an entry of a state dict that is no parameter says nothing."""
    return value is None or (isinstance(value, StoredTensor) and not prod(value.shape))
