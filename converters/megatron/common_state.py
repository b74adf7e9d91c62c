"""The common state of all ranks in a ``torch_dist`` checkpoint, and its iteration.

Up to megatron-core 0.18 it is a file of its own, ``common.pt``; from 0.19 on an object among the
shards, under the key ``common_state``. Releases from 0.19 on load both, older ones the file alone.

Source: ``save`` and ``load_common_state_dict`` of megatron/core/dist_checkpointing/serialization.py
(core_v0.18.2 and core_v0.19.0).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import Checkpoint, Values
from scalai.converters.dcp_metadata import Extent
from scalai.converters.megatron.beside_tensors import find_below
from scalai.converters.opening import read_json
from scalai.converters.torch_archive import (
    ArchiveLayout,
    lay_out_archive,
    read_archive,
    with_content,
)
from scalai.core.errors import RefusedError
from scalai.store.files import map_file

COMMON_FILE = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
"""Its key in ``.metadata``."""
FORM = "common_state"
"""In ``Values.extra``: ``COMMON_FILE`` or ``COMMON_OBJECT``."""

MARKER = "metadata.json"
BACKEND = "torch_dist"


@dataclass(frozen=True, slots=True)
class Common:
    """The common state: its content, and its place (``FORM``)."""

    content: Mapping[str, Any]
    form: str


def find_iteration(path: Path, iteration: int | None) -> Path | None:
    """Return the directory of an iteration: ``path`` itself, or the tracker's."""
    is_named = marker_of(path).get("sharded_backend") == BACKEND
    if iteration is None and (is_named or (path / COMMON_FILE).is_file()):
        return path
    return find_below(path, iteration)


def marker_of(directory: Path) -> Mapping[str, Any]:
    """Return the content of ``metadata.json``; empty if unreadable."""
    try:
        data = read_json(directory / MARKER)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def marker_for(form: str) -> Mapping[str, Any]:
    marker = {"sharded_backend": BACKEND, "sharded_backend_version": 1}
    if form == COMMON_OBJECT:
        return marker
    return {**marker, "common_backend": "torch", "common_backend_version": 1}


def read_common(directory: Path, objects: Mapping[str, Extent], *, trust: bool = False) -> Common:
    """Read the common state, its few tensors with their bytes.

    Args:
        objects: Places of objects in ``.metadata``.

    Raises:
        RefusedError: It is nowhere, damaged, or no dictionary.
    """
    path, extent = directory / COMMON_FILE, objects.get(COMMON_OBJECT)
    is_file = path.is_file() or extent is None
    if is_file and not path.exists():
        raise RefusedError(
            f"{directory} has no {COMMON_FILE}, and .metadata places no {COMMON_OBJECT} either, "
            "one of which holds the iteration and the optimizer's groups. Copy it too, or use "
            "another checkpoint."
        )
    if is_file or extent is None:
        value, form = read_archive(path, trust=trust), COMMON_FILE
    else:
        path, form = directory / extent.file, COMMON_OBJECT
        value = read_archive(path, extent.begin, extent.size_bytes, trust=trust)
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(value, dict):
        raise RefusedError(f"{path} holds a {type(value).__name__}, not a dictionary ({form}).")
    data = map_file(path)
    return Common(with_content(value, data), form)


def lay_out_common(common: Mapping[str, Any], form: str) -> ArchiveLayout:
    return lay_out_archive([common]) if form == COMMON_OBJECT else lay_out_archive(common, "common")


def form_for(source: Checkpoint, reference: Values | None, notes: list[str]) -> str:
    """Return the form for the target's job: that of ``--args-from``, else of the source; else the
    file, readable by every release.

    Args:
        notes: Gets a line if not every release will load the target.
    """
    for values in (reference, source.values):
        if values is not None and FORM in values.extra:
            form: str = values.extra[FORM]
            break
    else:
        form = COMMON_FILE
    if form == COMMON_OBJECT:
        notes.append(
            f"the common state is written among the shards, as megatron-core 0.19 does, and older "
            f"releases look for {COMMON_FILE}: for these give --args-from one of their checkpoints"
        )
    return form
