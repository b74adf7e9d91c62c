"""Detects files exchanged between ranks.

Stages 1 and 2 keep weights beside the masters, so exchanged files contradict them. Stage 3 keeps
nothing twice: the remaining marks are a file's name when torch saved it, the devices of its
tensors, and the padding at the end of the last rank's parts, with moments of zero.

Source: ``archive_name`` of caffe2/serialize/inline_container.cc of torch 2.13; ``partition`` of
runtime/zero/partition_parameters.py of DeepSpeed 0.19.8.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from scalai.converters.deepspeed.shards.flat import Shape, part_of
from scalai.converters.torch_archive import StoredTensor
from scalai.core.errors import RefusedError
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.store.files import map_file

MAX_PADDED = 256
"""Parameters with padding to check."""
NO_SECOND_COPY = (
    "stage 3 keeps no second copy of masters and moments, and these files do not say of which rank "
    "they are: optim_states.pt of two ranks that were exchanged for each other are not noticed"
)

_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(?:optim|model)_states")
_DEVICE = re.compile(r"[a-z]+:\d+")


def check_names(directory: Path, trees: Mapping[str, Any]) -> bool:
    """Compare the names of files with their names when torch saved them.

    Args:
        directory: Directory of the files.
        trees: Content by file.

    Returns:
        Whether every file had a stored name to compare.

    Raises:
        RefusedError: A file is another rank's.
    """
    has_all = True
    for name, tree in trees.items():
        tensor = next(_tensors(tree), None)
        root = "" if tensor is None or tensor.storage is None else tensor.storage.record
        own, saved = _FILE.fullmatch(Path(name).stem), _FILE.fullmatch(root.partition("/")[0])
        if own and saved and own.groups() != saved.groups():
            raise RefusedError(
                f"{directory / name} was saved as {saved[0]}.pt, by another rank: files were "
                "exchanged or renamed. Copy them again under their own names."
            )
        has_all &= bool(own and saved)
    return has_all


def check_devices(
    directory: Path, models: Mapping[str, Any], optimizers: Mapping[str, Any]
) -> bool:
    """Compare the devices of each rank's two files, in the order of ranks.

    Returns:
        Whether they distinguish all ranks.

    Raises:
        RefusedError: A rank's two files are from different devices.
    """
    seen = []
    for (model, one), (optimizer, two) in zip(models.items(), optimizers.items(), strict=True):
        devices = _devices(one), _devices(two)
        if all(devices) and not devices[0] & devices[1]:
            raise RefusedError(
                f"{directory / optimizer} was saved from {', '.join(sorted(devices[1]))}, and "
                f"{model} of the same rank from {', '.join(sorted(devices[0]))}: files of two "
                "ranks were exchanged. Copy them again under their own names."
            )
        seen.append(frozenset(devices[0] & devices[1]))
    return all(seen) and len({*seen}) == len(seen)


def check_padding(
    directory: Path, shapes: Mapping[str, Shape], ranks: Sequence[tuple[str, Mapping[str, Any]]]
) -> None:
    """Look for a rank with another rank's padding.

    Args:
        directory: Directory of the files.
        shapes: Shapes of the parameters of a stage 3 buffer, in its order.
        ranks: By rank its file, and the flat buffers of moments by kind.

    Raises:
        RefusedError: A rank has numbers in its padding, and another rank has none there.
    """
    for rank, (file, _) in enumerate(ranks):
        places = list(_padding(shapes, len(ranks), rank))[:MAX_PADDED]
        if not places or _are_zero(directory, *ranks[rank], places):
            continue
        for other, (name, _) in enumerate(ranks):
            if other != rank and _are_zero(directory, *ranks[other], places):
                raise RefusedError(
                    f"{directory / file} has moments where rank {rank} has padding, and {name} has "
                    "padding there: files of two ranks were exchanged. Copy them again under their "
                    "own names."
                )


def _padding(shapes: Mapping[str, Shape], dp: int, rank: int) -> Iterator[range]:
    at = 0
    for shape in shapes.values():
        part = part_of(shape, dp)
        padding = min(max((rank + 1) * part - prod(shape), 0), part)
        at += part
        if padding:
            yield range(at - padding, at)


def _are_zero(
    directory: Path, file: str, moments: Mapping[str, Any], places: Sequence[range]
) -> bool:
    data = map_file(directory / file)
    for stored in moments.values():
        item = ITEM_BYTES[stored.dtype]
        for place in places:
            begin = stored.begin + place.start * item
            if np.frombuffer(data, np.uint8, len(place) * item, begin).any():
                return False
    return True


def _devices(tree: Any) -> set[str]:
    found = (t.storage.device for t in _tensors(tree) if t.storage is not None)
    return {device for device in found if _DEVICE.fullmatch(device)}


def _tensors(tree: Any) -> Iterator[StoredTensor]:
    if isinstance(tree, StoredTensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)
