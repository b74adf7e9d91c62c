"""Local checkpoints made of a ``torch_dist`` one, without Megatron: a file a rank, whose entries
are the keys of ``.metadata``."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scalai.converters.dcp_metadata import Chunk, StoredKey, read_metadata, read_objects
from scalai.converters.layouts import open_checkpoint
from scalai.converters.megatron.common_state import COMMON_OBJECT, read_common
from scalai.converters.pickles import Foreign, foreign, made
from scalai.converters.torch_archive import (
    content_of,
    lay_out_archive,
    read_archive,
    read_archive_bytes,
    with_content,
)
from scalai.core.tensors.dtypes import TORCH_NAMES
from scalai.store.files import map_file

CORE = "megatron.core.dist_checkpointing"
Fields = dict[str, Any]
Edit = Callable[[Fields], object]
"""Changes an entry's fields."""


def localise(
    source: Path, to: Path, world: int = 2, edit: Edit | None = None, **arguments: Any
) -> list[Path]:
    """Write the state of a checkpoint as the local files of ``world`` ranks, each in its folder.

    A key's chunks go round the ranks; the first rank's second copy of a chunk goes to the next. All
    ranks name all chunks.
    """
    directory = open_checkpoint(source).directory
    metadata = read_metadata(directory)
    common = dict(read_common(directory, metadata.objects).content)
    stated = vars(common["args"]) if "args" in common else {}
    kept = {key: at for key, at in metadata.objects.items() if key != COMMON_OBJECT}
    objects = {
        key: read_archive_bytes(data, directory)[0]
        for key, data in read_objects(directory, kept).items()
    }
    step, paths = open_checkpoint(source).values.step, []
    for rank in range(world):
        args = {**stated, "world_size": world, "rank": rank, **arguments}
        tensors = [
            _tensor(directory, stored, chunk, is_mine=(rank - at) % world < 1 + (not at))
            for stored in metadata.tensors
            for at, chunk in enumerate(stored.chunks)
        ]
        if edit is not None:
            for entry in tensors:
                edit(entry.state)
        tree = {
            "common": {**common, "args": argparse.Namespace(**args)},
            "sharded_state_dict": {"all": tensors, "more": {"objects": [*_objects(objects)]}},
            "_is_hollow": False,
        }
        path = to / str(rank) / f"iter_{step:07d}_{rank}_local.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        cls = foreign(f"{CORE}.tensor_aware_state_dict", "MCoreTensorAwareStateDict")
        path.write_bytes(content_of(lay_out_archive(made(cls, tree))))
        paths.append(path)
    return paths


def rewrite(
    path: Path,
    change: Callable[[Fields, list[Fields]], object],
    keeps: Callable[[Fields], bool] = lambda _: True,
) -> None:
    """Write a rank's file again: ``change`` gets its common state and the entries of tensors.

    Args:
        keeps: Says of the entry of a tensor or object whether it stays.
    """
    root, data = read_archive(path), map_file(path)
    tree = root.state["sharded_state_dict"]
    for shards in (tree["all"], tree["more"]["objects"]):
        shards[:] = [shard for shard in shards if keeps(shard.state)]
        for shard in shards:
            shard.state["data"] = with_content(shard.state["data"], data)
    change(root.state["common"], [entry.state for entry in tree["all"]])
    path.write_bytes(content_of(lay_out_archive(root)))


def _tensor(directory: Path, stored: StoredKey, chunk: Chunk, *, is_mine: bool) -> Foreign:
    path = directory / chunk.extent.file
    value = read_archive(path, chunk.extent.begin, chunk.extent.size_bytes)
    fields = {
        "key": stored.key,
        "data": with_content(value, map_file(path)) if is_mine else None,
        "dtype": foreign("torch", TORCH_NAMES[stored.dtype]),
        "local_shape": chunk.box.shape,
        "global_shape": stored.shape,
        "global_offset": chunk.box.offset,
        "axis_fragmentations": None,
        "replica_id": 0,
        "prepend_axis_num": 0,
        "allow_shape_mismatch": False,
        "flattened_range": None,
    }
    return made(foreign(f"{CORE}.mapping", "ShardedTensor"), fields)


def _objects(objects: dict[str, Any]) -> Iterator[Foreign]:
    for key, value in objects.items():
        name, _, place = key.partition("/shard_")
        at, sizes = (tuple(map(int, part.split("."))) for part in place.split("_"))
        fields = {
            "key": name, "data": value, "global_shape": sizes, "global_offset": at, "replica_id": 0,
        }  # fmt: skip
        yield made(foreign(f"{CORE}.mapping", "ShardedObject"), fields)
