"""Files of torch.distributed.checkpoint to be written: torch archives, one behind the other."""

from functools import cache

from scalai.converters.checkpoint import CheckpointFile, FilePiece
from scalai.converters.dcp_metadata import Extent
from scalai.converters.torch_archive import ArchiveLayout, NewTensor, lay_out_archive
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import Box


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


def _name(number: int) -> str:
    return f"__{number}_0.distcp"


@cache
def _archive(dtype: str, shape: tuple[int, ...]) -> ArchiveLayout:
    return lay_out_archive(NewTensor(dtype, shape))
