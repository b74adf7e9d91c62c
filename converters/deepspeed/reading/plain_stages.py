"""The layers of each stage of a pipeline without ZeRO.

The files do not record them: the optimizer numbers parameters, and layers have files of their own.
Each stage has consecutive layers, with as many elements as its optimizer has states. Tied layers
look like others, so the user names them (``tied`` in ``[pipeline]`` of a file of cuts).
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from scalai.converters.deepspeed.shards.pipeline import LayerFile, unit_of
from scalai.converters.torch_archive import StoredTensor
from scalai.core.errors import RefusedError

Stages = tuple[frozenset[str], ...]


def units_by_stage(
    directory: Path,
    files: Sequence[LayerFile],
    tied: Mapping[int, str],
    tensors: Mapping[str, StoredTensor],
    states: Sequence[Mapping[str, Any]],
) -> Stages:
    """Return the units of each stage.

    Args:
        files: Layers with files.
        tied: Units of tied layers, by place.
        tensors: Tensors of all layers, by the engine's names.
        states: Content of each stage's model file.

    Raises:
        RefusedError: No cut of the layers fits, or more than one.
    """
    buffers = [frozenset(state.get("buffer_names") or ()) for state in states]
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        if not any(name in names for names in buffers):
            sizes[unit_of(name)] = sizes.get(unit_of(name), 0) + prod(tensor.shape)
    places = {layer.place: layer.unit for layer in files} | dict(tied)
    units = [places[place] for place in sorted(places) if sizes.get(places[place])]
    totals = [_elements(state.get("optimizer") or {}) for state in states]
    found = set(_ways(units, sizes, totals))
    if len(found) != 1:
        raise RefusedError(
            f"{directory} is of a pipeline without ZeRO, and {len(found) or 'none'} of the ways to "
            f"cut its {len(units)} layers into {len(totals)} stages fits their optimizers. If "
            "layers are tied, pass --cuts with a file that says tied = {KEY = [PLACE, PLACE]} in "
            "[pipeline]; else save the job with ZeRO stage 1 once."
        )
    return tuple(
        stage | {unit_of(name) for name in names}
        for stage, names in zip(found.pop(), buffers, strict=True)
    )


def _ways(
    units: Sequence[str], sizes: Mapping[str, int], totals: Sequence[int]
) -> Iterator[Stages]:
    """Yield the cuts of units, in order, into stages with these sums; a stage counts a repeated
    unit once."""
    if not totals:
        if not units:
            yield ()
        return
    for count in range(len(units) + 1):
        stage = frozenset(units[:count])
        if sum(sizes[unit] for unit in stage) == totals[0]:
            for rest in _ways(units[count:], sizes, totals[1:]):
                yield (stage, *rest)


def _elements(tree: Mapping[str, Any]) -> int:
    inner = tree.get("optimizer_state_dict", tree)
    return sum(
        max((prod(t.shape) for t in state.values() if isinstance(t, StoredTensor)), default=0)
        for state in inner.get("state", {}).values()
    )
