"""The ``.metadata`` of torch.distributed.checkpoint: keys, their chunks and the chunks' places.

Source: torch/distributed/checkpoint/metadata.py and filesystem.py of torch 2.13. The file is a
pickle; it is read by the restricted reader and written under the same names, so that neither needs
torch.
"""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from scalai.converters import pickles
from scalai.converters.bounded import open_regular
from scalai.converters.opening import file_inside
from scalai.converters.pickles import Foreign, SealedClass, foreign
from scalai.converters.torch_archive import (
    MAX_PICKLE_BYTES,
    MAX_VALUE_BYTES,
    MAX_VALUES_BYTES,
    StoredTensor,
    check_members,
)
from scalai.converters.zip_members import is_archive
from scalai.core.errors import LayoutError, RefusedError, ScalaiError
from scalai.core.tensors.collection import MAX_NDIM
from scalai.core.tensors.dtypes import FROM_TORCH, TORCH_NAMES
from scalai.core.tensors.region import Box, Index

ObjectPath = tuple[str | int, ...]
"""The keys that lead to a value in a tree of dictionaries and lists."""


def key_of(path: ObjectPath) -> str:
    return ".".join(map(str, path))


_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes ``[begin, begin + size_bytes)`` of a file: one archive of torch's."""

    file: str
    begin: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a key's tensor and its archive.

    ``stored``: its elements, where the archive has more than this box; None: the archive says.
    """

    box: Box
    extent: Extent
    stored: StoredTensor | None = None


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A tensor of a checkpoint under its own key, with its leading axes there."""

    key: str
    shape: Index
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Metadata:
    """Content of ``.metadata``: tensors in the file's order, and objects by key.

    ``paths``: places of keys in the saved tree; empty: not stated.
    ``flat``: keys of tensors stored as flat ranges of a grid of shards, with their shapes
    (``mcore_data`` of megatron-core up to 0.15). Such a key's own shape is the grid's, with the
    elements of a shard as a last axis.
    """

    tensors: tuple[StoredKey, ...]
    objects: Mapping[str, Extent]
    flat: Mapping[str, Index]
    paths: Mapping[str, ObjectPath]


class _Place(metaclass=SealedClass):
    """``MetadataIndex``: a key and an offset, to look up a stored place."""

    __slots__ = ("key", "offset")

    key: str
    offset: Index | None

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.key = str(state["fqn"])
        offset = state.get("offset")
        self.offset = None if offset is None else sizes_of(offset)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Place):
            return NotImplemented
        return (self.key, self.offset) == (other.key, other.offset)

    def __hash__(self) -> int:
        return hash((self.key, self.offset))


def read_metadata(directory: Path, *, trust: bool = False) -> Metadata:
    """Read ``.metadata``.

    Raises:
        RefusedError: It is missing or damaged, or something is stored nowhere, twice, outside of
            the directory or beyond the end of a file.
    """
    path = directory / ".metadata"
    try:
        with open_regular(path) as file:
            data = file.read(MAX_PICKLE_BYTES + 1)
        if len(data) > MAX_PICKLE_BYTES:
            raise RefusedError(
                f"{path} has more than {MAX_PICKLE_BYTES} bytes, and so many are read."
            )
    except OSError as error:
        raise RefusedError(
            f"{path} cannot be read ({error.strerror}); a checkpoint of several files has one. The "
            "save was interrupted: use an older checkpoint."
        ) from error
    classes = {(_METADATA, "MetadataIndex"): _Place}
    value = pickles.loads(data, str(path), classes=classes, trust=trust)
    try:
        return _metadata(value, directory)
    except ScalaiError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise RefusedError(
            f"{path} is not the metadata of a torch checkpoint ({type(error).__name__}: {error}). "
            "Use another checkpoint."
        ) from error


def _metadata(value: Any, directory: Path) -> Metadata:
    version = str(value.state.get("version") or "1.0.0")
    if version.partition(".")[0] != "1":
        raise RefusedError(
            f"{directory}/.metadata is of version {version}, and 1.0.0 is read. Use a later "
            "release of Scalai, or save with torch up to 2.13."
        )
    sizes: dict[str, int] = {}
    stored = {
        (place.key, place.offset): _extent(info.state, directory, sizes)
        for place, info in value.state["storage_data"].items()
    }
    tensors, objects = [], {}
    for key, entry in value.state["state_dict_metadata"].items():
        if entry.path[1] == "BytesStorageMetadata":
            objects[key] = _stored(stored, key, None, directory)
            continue
        state = entry.state
        shape = sizes_of(state["size"])
        dtype = _dtype(state["properties"].state, key, directory)
        check_shape(f"{directory}/.metadata", key, shape)
        chunks = []
        for chunk in state["chunks"]:
            box = Box(sizes_of(chunk.state["offsets"]), sizes_of(chunk.state["sizes"]))
            check_box(f"{directory}/.metadata", key, box, shape)
            chunks.append(Chunk(box, _stored(stored, key, box.offset, directory)))
        tensors.append(StoredKey(key, shape, dtype, tuple(chunks)))
        check_held(f"{directory}/.metadata", tensors[-1])
    flat = {
        key: sizes_of(data["nd_reformulated_orig_global_shape"])
        for key, data in (value.state.get("mcore_data") or {}).items()
        if data.get("nd_reformulated_orig_global_shape")
    }
    return Metadata(tuple(tensors), objects, flat, _paths(value.state.get("planner_data")))


def _paths(data: Any) -> dict[str, ObjectPath]:
    """Return the paths that the planner noted; other planners note other things."""
    entries = data.items() if isinstance(data, dict) else ()
    return {
        key: path
        for key, path in entries
        if isinstance(key, str)
        and type(path) is tuple
        and all(type(at) in (str, int) for at in path)
        and ".".join(map(str, path)) == key
    }


def check_shape(where: str, key: str, shape: Index) -> None:
    """Raise ``RefusedError`` for a shape that no tensor has."""
    if len(shape) > MAX_NDIM or min(shape, default=0) < 0:
        raise RefusedError(f"{where}: {key} has shape {list(shape)}.")


def check_box(where: str, key: str, box: Box, shape: Index) -> None:
    """Raise ``LayoutError`` if a chunk does not lie in its tensor."""
    is_inside = len(box.offset) == len(box.shape) == len(shape) and all(
        low >= 0 and size >= 0 and low + size <= full
        for low, size, full in zip(box.offset, box.shape, shape, strict=True)
    )
    if not is_inside:
        raise LayoutError(
            f"{where}: a chunk of {key} at {list(box.offset)} of shape {list(box.shape)} reaches "
            f"outside of {list(shape)}. Use another checkpoint."
        )


def check_held(where: str, stored: StoredKey) -> None:
    """Raise ``LayoutError`` if elements are nowhere: a missing layer would be no hole among the
    tensors, it would not exist."""
    count = prod(stored.shape)
    held = sum(box.numel for box in {chunk.box for chunk in stored.chunks})
    if held < count:
        raise LayoutError(
            f"{where}: nobody holds {count - held} of the {count} elements of {stored.key}. The "
            "checkpoint is incomplete: use another one."
        )


def _stored(
    stored: Mapping[tuple[str, Index | None], Extent],
    key: str,
    offset: Index | None,
    directory: Path,
) -> Extent:
    if (key, offset) not in stored:
        raise RefusedError(
            f"{directory}/.metadata names {key} at {offset}, but no file holds it. The save was "
            "interrupted: use an older checkpoint."
        )
    return stored[key, offset]


def _extent(state: Mapping[str, Any], directory: Path, sizes: dict[str, int]) -> Extent:
    name, begin, length = str(state["relative_path"]), int(state["offset"]), int(state["length"])
    if state.get("transform_descriptors"):
        raise RefusedError(
            f"{directory}/{name} is transformed by {state['transform_descriptors']}, which cannot "
            "be streamed. Save without transforms."
        )
    if name not in sizes:
        sizes[name] = file_inside(directory, name, ".metadata").stat().st_size
    if begin < 0 or length < 0 or begin + length > sizes[name]:
        raise RefusedError(
            f"{directory / name} is truncated: it has {sizes[name]} bytes, and .metadata places "
            f"{length} bytes at {begin}. Copy it again, or use another checkpoint."
        )
    return Extent(name, begin, length)


def _dtype(properties: Any, key: str, directory: Path) -> str:
    cls = properties[0]
    name = cls.path[1] if isinstance(cls, type) and issubclass(cls, Foreign) else ""
    if name not in FROM_TORCH:
        raise RefusedError(f"{directory}/.metadata: {key} is of dtype {cls!r}, which is not known.")
    return FROM_TORCH[name]


def sizes_of(value: Any) -> Index:
    """Return a ``torch.Size``, or the plain tuple in its place (Megatron-FSDP's chunks)."""
    if isinstance(value, Foreign):
        return tuple(int(size) for size in value.args[0]) if value.args else ()
    return tuple(int(size) for size in value)


def read_objects(directory: Path, objects: Mapping[str, Extent]) -> dict[str, bytes]:
    """Return the archives of objects other than tensors; they are small.

    Raises:
        RefusedError: One is too large or damaged, or all together are too large.
    """
    check_objects(directory, sum(extent.size_bytes for extent in objects.values()))
    found = {}
    for key, extent in objects.items():
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


def check_objects(directory: Path, size_bytes: int) -> None:
    """Raise ``RefusedError`` if the objects of a checkpoint are too large together."""
    if size_bytes > MAX_VALUES_BYTES:
        raise RefusedError(
            f"{directory} keeps {size_bytes} bytes of objects that are no tensors, and at most "
            f"{MAX_VALUES_BYTES} are carried. Save without some of them; if they are not so many, "
            "it is damaged."
        )


def stray_notes(directory: Path, metadata: Metadata) -> Iterator[str]:
    """Yield a note for each file that no key lies in."""
    named = {extent.file for extent in metadata.objects.values()}
    named |= {chunk.extent.file for stored in metadata.tensors for chunk in stored.chunks}
    for path in sorted(directory.glob("*.distcp")):
        if path.name not in named:
            yield f"{path.name} is left over from another save: .metadata places nothing in it"


def write_metadata(
    tensors: Iterable[StoredKey],
    objects: Mapping[str, Extent],
    paths: Mapping[str, ObjectPath] | None = None,
) -> bytes:
    """Return the content of ``.metadata``: the pickle of a ``Metadata`` of torch 2."""
    entries: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for tensor in tensors:
        chunks = [
            _object(_METADATA, "ChunkStorageMetadata",
                    {"offsets": _size(chunk.box.offset), "sizes": _size(chunk.box.shape)})
            for chunk in tensor.chunks
        ]  # fmt: skip
        entries[tensor.key] = _object(
            _METADATA, "TensorStorageMetadata",
            {"properties": _properties(tensor.dtype), "size": _size(tensor.shape),
             "chunks": chunks},
        )  # fmt: skip
        for chunk in tensor.chunks:
            stored[_index(tensor.key, chunk.box.offset)] = _info(chunk.extent)
    for key, extent in objects.items():
        entries[key] = _object(_METADATA, "BytesStorageMetadata", {})
        stored[_index(key, None)] = _info(extent)
    state = {
        "state_dict_metadata": entries,
        "planner_data": None if paths is None else dict(paths),
        "storage_data": stored,
        "storage_meta": None,
        "version": "1.0.0",
    }
    return pickles.dumps(_object(_METADATA, "Metadata", state))


def _object(module: str, name: str, state: Any) -> Foreign:
    cls = foreign(module, name)
    made = cls.__new__(cls)
    made.state = state
    return made


class _NewIndex(Foreign):
    """``MetadataIndex``, as a key of a dictionary."""

    path = (_METADATA, "MetadataIndex")

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def _index(key: str, offset: Index | None) -> Foreign:
    made = _NewIndex.__new__(_NewIndex)
    made.state = {"fqn": key, "index": None}
    if offset is not None:
        made.state["offset"] = _size(offset)
    return made


def _info(extent: Extent) -> Foreign:
    state = {
        "relative_path": extent.file,
        "offset": extent.begin,
        "length": extent.size_bytes,
    }
    return _object(_FILES, "_StorageInfo", state)


def _size(sizes: Sequence[int]) -> Foreign:
    return foreign("torch", "Size")(tuple(sizes))


def _properties(dtype: str) -> Foreign:
    layout = foreign("torch.serialization", "_get_layout")("torch.strided")
    memory = foreign(_METADATA, "_MEM_FORMAT_ENCODING")(0)
    state = (foreign("torch", TORCH_NAMES[dtype]), layout, False, memory, False)
    return _object(_METADATA, "TensorProperties", state)
