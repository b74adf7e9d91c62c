"""The weights of a DeepSpeed pipeline, in a file per layer.

A file's keys are the layer's own; the engine's names have the layer's place as prefix, or the key
of a tied layer. The file lacks this key; names and shapes of the parameters identify it.

A stage has a whole copy of a tied layer, with parameters its own function of the layer may not use,
such as the embedding's positions in a head. DeepSpeed does not keep these equal, and no file names
them; but without a gradient, their moments are zero.

Source: deepspeed 0.19.8: ``save_state_dict``, ``ckpt_layer_path`` and ``_synchronize_tied_weights``
of runtime/pipe/module.py.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import MAIN, PARAM, STEP, FilePiece
from scalai.converters.deepspeed.files import Tag, read_dictionary
from scalai.converters.deepspeed.shards.flat import Shape
from scalai.converters.deepspeed.shards.pipeline import TIED, LayerFile, unit_of
from scalai.converters.torch_archive import StoredTensor
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.region import whole

Shapes = Mapping[str, Shape]

SAMPLED = 4096
"""Elements of a moment's piece to check, spread over it."""


@dataclass(frozen=True, eq=False, slots=True)
class Layers:
    """The layer files of one tensor-parallel rank.

    ``states``: the files' dictionaries, by place, in order; ``names``: the files.
    """

    directory: Path
    names: Mapping[int, str]
    states: Mapping[int, Mapping[str, Any]]

    @classmethod
    def read(cls, tag: Tag, tp_rank: int, *, trust: bool) -> "Layers":
        """Read the files. Raises as ``read_dictionary``; ``RefusedError``: a file holds other
        values than tensors."""
        names = tag.layers[tp_rank]
        states = {}
        for place in sorted(names):
            path = tag.directory / names[place]
            states[place] = read_dictionary(path, trust=trust)
            odd = [k for k, v in states[place].items() if not isinstance(v, StoredTensor)]
            if odd:
                raise RefusedError(
                    f"{path} holds {odd[0]}, which is no tensor: extra state of a layer is not "
                    "read. Save the model without it."
                )
        return cls(tag.directory, names, states)

    def files(self, trained: Shapes, tied: Mapping[int, str]) -> tuple[LayerFile, ...]:
        """Return the layers by place.

        Args:
            trained: Shapes of all trained parameters on this rank, by name; empty: the files do not
                name them.
            tied: Units of known tied layers, by place.

        Raises:
            RefusedError: A file fits several tied layers.
        """
        units: dict[str, dict[str, Shape]] = {}
        for name, shape in trained.items():
            units.setdefault(unit_of(name), {})[name.removeprefix(f"{unit_of(name)}.")] = shape
        return tuple(
            LayerFile(
                place,
                tied.get(place) or self._unit(place, units),
                tuple(state),
                getattr(state, "_metadata", None),
            )
            for place, state in self.states.items()
        )

    def _unit(self, place: int, units: Mapping[str, Shapes]) -> str:
        state = self.states[place]
        if str(place) in units or not state:
            return str(place)
        fitting = [
            unit
            for unit, shapes in units.items()
            if unit.startswith(TIED)
            and all(name in state and state[name].shape == shapes[name] for name in shapes)
        ]
        if len(fitting) > 1:
            raise RefusedError(
                f"{self.directory / self.names[place]} may be of the tied layers "
                f"{', '.join(fitting)}, whose parameters have equal names and shapes. Give them "
                "different names in the model."
            )
        return fitting[0] if fitting else str(place)

    def tensors(self, files: Sequence[LayerFile]) -> dict[str, StoredTensor]:
        """Return the tensors of these layers by the engine's names."""
        return {
            f"{layer.unit}.{name}": self.states[layer.place][name]
            for layer in reversed(files)
            for name in layer.names
        }

    def pieces(self, files: Sequence[LayerFile]) -> Iterator[tuple[FilePiece, bool]]:
        """Yield the tensors of these layers, and whether each is a repeat: tied layers may have a
        file at every place."""
        seen = set()
        for layer in files:
            for name in layer.names:
                stored: StoredTensor = self.states[layer.place][name]
                tensor = Tensor(f"{PARAM}/{layer.unit}.{name}", stored.shape, stored.dtype)
                file, box = self.names[layer.place], whole(stored.shape)
                yield FilePiece(tensor, box, file, stored.begin, stored.stride), tensor.name in seen
                seen.add(tensor.name)


def parameter_of(piece: FilePiece) -> str:
    """Return the name of a piece's parameter."""
    return split_name(piece.tensor.name)[1]


def unused_copies(
    directory: Path, pieces: Sequence[FilePiece], before: Collection[str]
) -> set[str]:
    """Return the parameters with copies on this stage that never had a gradient.

    Args:
        pieces: Pieces of one rank of the stage.
        before: Units of earlier stages.
    """
    found: dict[str, bool] = {}
    for piece in pieces:
        kind, name = split_name(piece.tensor.name)
        if kind not in (PARAM, MAIN, STEP) and unit_of(name) in before:
            is_zero = piece.tensor.dtype == "F32" and not _sample(directory, piece).any()
            found[name] = found.get(name, True) and is_zero
    return {name for name, is_unused in found.items() if is_unused}


def _sample(directory: Path, piece: FilePiece) -> npt.NDArray[Any]:
    count = prod(piece.box.shape)
    data = np.memmap(directory / piece.file, np.uint8, "r", piece.begin, (4 * count,))
    return data.view(np.float32)[:: max(count // SAMPLED, 1)]
