"""What a ``torch_dist`` directory must have before it is read, and what of it is not carried.

Source: megatron/core/dist_checkpointing of 0.16.1.
"""

import io
from collections.abc import Iterator, Mapping
from pathlib import Path

from scalai.converters.checkpoint import REPORT
from scalai.converters.foreign import foreign_text, is_torch_dcp
from scalai.converters.megatron.common_state import (
    COMMON_FILE,
    COMMON_OBJECT,
    MARKER,
    Common,
    marker_of,
)
from scalai.converters.megatron.torch_dist_metadata import Extent, Metadata
from scalai.converters.torch_archive import MAX_VALUE_BYTES, check_members
from scalai.converters.zip_members import is_archive
from scalai.core.errors import RefusedError

_OWN = (".metadata", "latest_checkpointed_iteration.txt", COMMON_FILE, MARKER, REPORT)
_CARRIED = {
    "args", "checkpoint_version", "content_metadata", "iteration", "optimizer",
    "num_floating_point_operations_so_far", "opt_param_scheduler",
}  # fmt: skip


def check_marker(directory: Path) -> None:
    """Refuse a checkpoint that was not ended, or is of another format or version.

    Raises:
        RefusedError: It is one.
    """
    marker = marker_of(directory)
    if "sharded_backend" not in marker and is_torch_dcp(directory):
        raise RefusedError(f"{directory}: {foreign_text(directory)}.")
    if "sharded_backend" not in marker:
        raise RefusedError(
            f"{directory} has no metadata.json that names torch_dist: Megatron writes it last, "
            "so the save was interrupted. Use an older checkpoint."
        )
    if marker["sharded_backend"] != "torch_dist":
        raise RefusedError(
            f"{directory} is of the format {marker['sharded_backend']!r}, and torch_dist is read. "
            "Load it in Megatron and save it with --ckpt-format torch_dist."
        )
    for key in ("sharded_backend_version", "common_backend_version"):
        if marker.get(key, 1) != 1:
            raise RefusedError(
                f"{directory} has {key} {marker[key]!r}, and 1 is read. Use a later release of "
                "Scalai, or save it with a Megatron of 0.14 to 0.19."
            )


def read_objects(directory: Path, objects: Mapping[str, Extent]) -> dict[str, bytes]:
    """Return the archives of objects that are no tensors; they are small.

    Raises:
        RefusedError: One is too large, or not what was saved.
    """
    found = {}
    for key, extent in objects.items():
        if key == COMMON_OBJECT:
            continue
        if extent.size_bytes > MAX_VALUE_BYTES:
            raise RefusedError(
                f"{directory / extent.file} keeps {key}, {extent.size_bytes} bytes that are no "
                f"tensor, and at most {MAX_VALUE_BYTES} are carried. Save without it."
            )
        with open(directory / extent.file, "rb") as file:
            file.seek(extent.begin)
            found[key] = file.read(extent.size_bytes)
        name = f"{directory / extent.file}: {key}"
        if not is_archive(memoryview(found[key])):
            raise RefusedError(
                f"{name}, at byte {extent.begin}, is damaged: it is no whole torch archive. Copy "
                "the file again, or use another checkpoint."
            )
        check_members(io.BytesIO(found[key]), name)
    return found


def notes_of(directory: Path, common: Common, metadata: Metadata) -> Iterator[str]:
    """Yield a note for each thing that is not carried."""
    for key in sorted(set(common.content) - _CARRIED):
        yield f"{common.form} holds {key!r}, which is not carried"
    others = sorted(
        path.name for path in directory.iterdir()
        if path.suffix != ".distcp" and path.name not in _OWN
    )  # fmt: skip
    if others:
        by = "Megatron-Bridge's " if "run_config.yaml" in others else ""
        yield f"not carried: {by}{', '.join(others[:8])}{' ...' * (len(others) > 8)}"
    named = {extent.file for extent in metadata.objects.values()}
    named |= {chunk.extent.file for stored in metadata.tensors for chunk in stored.chunks}
    for path in sorted(directory.glob("*.distcp")):
        if path.name not in named:
            yield f"{path.name} is left over from another save: .metadata places nothing in it"
