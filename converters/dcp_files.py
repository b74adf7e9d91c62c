"""Files of torch.distributed.checkpoint: torch archives, one behind the other."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import CheckpointFile, FilePiece
from scalai.converters.dcp_metadata import (
    Chunk,
    Extent,
    ObjectPath,
    StoredKey,
    key_of,
    write_metadata,
)
from scalai.converters.torch_archive import (
    ArchiveLayout,
    NewTensor,
    StoredTensor,
    content_of,
    lay_out_archive,
    read_archive,
    with_content,
)
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import Box, Index, whole
from scalai.store.files import map_file, number_of


@dataclass(frozen=True, slots=True)
class StoredArchives:
    """The archives of a directory's tensors during a reading."""

    directory: Path
    trust: bool
    _begins: dict[tuple[Extent, str, Index], tuple[int, Index]] = field(default_factory=dict)

    def begin(self, stored: StoredKey, chunk: Chunk) -> tuple[int, Index]:
        """Return the byte of a chunk's first element in its file, and its strides.

        Raises:
            RefusedError: Another tensor lies there than ``.metadata`` says.
        """
        place = chunk.extent, stored.dtype, chunk.box.shape
        if place not in self._begins:
            path = self.directory / chunk.extent.file
            extent = chunk.extent
            value = read_archive(path, extent.begin, extent.size_bytes, trust=self.trust)
            is_it = isinstance(value, StoredTensor) and value.dtype == stored.dtype
            if not is_it or value.shape != chunk.box.shape:
                raise RefusedError(
                    f"{path}: {stored.key} is {stored.dtype}{list(chunk.box.shape)} by .metadata, "
                    f"but {value!r:.200} lies at byte {extent.begin}. Files of two checkpoints are "
                    "mixed: use another one."
                )
            self._begins[place] = value.begin, value.stride
        return self._begins[place]

    def pieces(self, tensor: Tensor, stored: StoredKey, row: int = 0) -> Iterator[FilePiece]:
        """Yield the pieces of a key; ``row``: of the tensor, where the key's first one stands."""
        for chunk in stored.chunks:
            begin, stride = self.begin(stored, chunk)
            first, *others = (*chunk.box.offset, 0)
            box = Box((first + row, *others)[: len(chunk.box.shape)], chunk.box.shape)
            yield FilePiece(tensor, box, chunk.extent.file, begin, stride)

    def small(self, stored: StoredKey) -> NewTensor:
        """Return a tensor of one chunk, with its bytes."""
        extent = stored.chunks[0].extent
        path = self.directory / extent.file
        value = read_archive(path, extent.begin, extent.size_bytes, trust=self.trust)
        value = with_content(value, map_file(path))
        if not isinstance(value, NewTensor) or value.shape != stored.shape:
            raise RefusedError(
                f"{path}: {stored.key} is {stored.dtype}{list(stored.shape)} by .metadata, but "
                f"{value!r:.200} lies at byte {extent.begin}. Use another checkpoint."
            )
        return value

    def number(self, stored: StoredKey) -> float:
        """Return a tensor's one number."""
        tensor = self.small(stored)
        if len(tensor.content or b"") != ITEM_BYTES[tensor.dtype]:
            raise RefusedError(
                f"{self.directory}: {stored.key} is {stored.dtype}{list(stored.shape)}, and a step "
                "is one number. Use another checkpoint."
            )
        return number_of(tensor.content or b"", tensor.dtype)


class ArchiveFiles:
    """The files ``__<number>_0.distcp`` of a folder; grows as archives are added.

    ``pieces`` are the rows to fill; ``fixed`` the known bytes, by file number.
    """

    def __init__(self, folder: str) -> None:
        """``folder``: relative to the target's directory; empty: the directory itself."""
        self._folder = folder
        self._sizes = [0]
        self.pieces: list[FilePiece] = []
        self.fixed: dict[int, list[tuple[int, bytes]]] = {0: []}

    def files(self) -> list[CheckpointFile]:
        return [CheckpointFile(self._path(n), size) for n, size in enumerate(self._sizes)]

    def size_of(self, number: int) -> int:
        return self._sizes[number]

    def add_object(self, number: int, data: bytes) -> Extent:
        """Add an archive without a tensor to fill to a file."""
        begin = self._begin(number)
        self.fixed[number].append((begin, data))
        self._sizes[number] += len(data)
        return Extent(_name(number), begin, len(data))

    def add_chunk(self, number: int, tensor: Tensor, box: Box, leading: int = 0) -> Extent:
        """Add the archive of a box of a tensor to a file; ``leading``: axes of size 1 before it."""
        archive = _archive(tensor.dtype, (*[1] * leading, *box.shape))
        begin = self._begin(number)
        self.fixed[number] += [(begin + at, data) for at, data in archive.fixed]
        at = archive.begin[0]
        self.pieces.append(FilePiece(tensor, box, self._path(number), begin + at))
        self._sizes[number] += archive.size_bytes
        return Extent(_name(number), begin, archive.size_bytes)

    def _begin(self, number: int) -> int:
        while number >= len(self._sizes):
            self.fixed[len(self._sizes)] = []
            self._sizes.append(0)
        return self._sizes[number]

    def _path(self, number: int) -> str:
        return f"{self._folder}/{_name(number)}" if self._folder else _name(number)


class TreeFiles(ArchiveFiles):
    """The files of a tree, and its ``.metadata``: each value under the path that leads to it."""

    def __init__(self, folder: str, ranks: int) -> None:
        """``ranks``: all save some of the objects."""
        super().__init__(folder)
        self._ranks, self._next = ranks, 0
        self._tensors: list[StoredKey] = []
        self._objects: dict[str, Extent] = {}
        self._paths: dict[str, ObjectPath] = {}

    def add_tensor(
        self, path: ObjectPath, tensor: Tensor, boxes: Iterable[tuple[int, Box]], low: int = 0
    ) -> None:
        """Add boxes of a tensor, by file. ``low``: the tensor's row where the key begins; a key of
        some of its rows has the rows of ``boxes``."""
        key, chunks, stop = self._named(path), [], 0
        for number, box in boxes:
            extent = self.add_chunk(number, tensor, box)
            offset = (box.offset[0] - low, *box.offset[1:]) if box.offset else ()
            chunks.append(Chunk(Box(offset, box.shape), extent))
            stop = max(stop, offset[0] + box.shape[0]) if offset else 0
        shape = (stop, *tensor.shape[1:]) if tensor.shape else ()
        self._tensors.append(StoredKey(key, shape, tensor.dtype, tuple(chunks)))

    def add_value(self, path: ObjectPath, value: Any) -> None:
        """Add a value: a small tensor with its content, or anything that is none."""
        if not isinstance(value, NewTensor):
            self.add_object_at(path, content_of(lay_out_archive(value)))
            return
        key, number = self._named(path), self._turn()
        extent = self.add_object(number, content_of(lay_out_archive(value)))
        chunk = Chunk(whole(value.shape), extent)
        self._tensors.append(StoredKey(key, value.shape, value.dtype, (chunk,)))

    def add_object_at(self, path: ObjectPath, data: bytes) -> None:
        """Add an archive as it is."""
        key, number = self._named(path), self._turn()
        self._objects[key] = self.add_object(number, data)

    def metadata(self) -> bytes:
        return write_metadata(self._tensors, self._objects, self._paths)

    def _named(self, path: ObjectPath) -> str:
        key = key_of(path)
        if key in self._paths:
            raise RefusedError(f"{key} would be twice in the target: {path} and another one.")
        self._paths[key] = path
        return key

    def _turn(self) -> int:
        self._next += 1
        return self._next % self._ranks


def _name(number: int) -> str:
    return f"__{number}_0.distcp"


@cache
def _archive(dtype: str, shape: tuple[int, ...]) -> ArchiveLayout:
    return lay_out_archive(NewTensor(dtype, shape))
