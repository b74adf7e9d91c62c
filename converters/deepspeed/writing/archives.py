"""Torch archives of a target, laid out one after the other."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import CheckpointFile, FilePiece, Placed, place
from scalai.converters.deepspeed.shards.cuts import EVERYTHING, Shards, contiguous
from scalai.converters.deepspeed.shards.flat import Span
from scalai.converters.torch_archive import NewTensor, lay_out_archive
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import flat_range

Filled = dict[NewTensor, list[FilePiece]]
"""Pieces of a new tensor, by identity; positions count from its start."""


@dataclass(frozen=True, eq=False, slots=True)
class Archives:
    """Files, their known bytes, and the pieces to fill the rest.

    ``shards``: the parts of the rank with these files; pieces refer to them.
    """

    pieces: list[FilePiece] = field(default_factory=list)
    files: list[CheckpointFile] = field(default_factory=list)
    fixed: dict[int, Sequence[tuple[int, bytes]]] = field(default_factory=dict)
    shards: Shards = EVERYTHING

    def of(self, shards: Shards) -> "Archives":
        """Return the same files, to add those of another rank."""
        return replace(self, shards=shards)

    def add(self, path: str, value: Any, filled: Mapping[NewTensor, Sequence[FilePiece]]) -> None:
        """Add a file; torch reads it as ``value``."""
        archive = lay_out_archive(value, Path(path).stem)
        for tensor, begin in zip(archive.tensors, archive.begin, strict=True):
            for own in filled.get(tensor, ()):
                for part in self.shards.of_whole(own):
                    self.pieces.extend(
                        replace(piece, file=path, begin=begin + piece.begin)
                        for piece in contiguous(part)
                    )
        self.fixed[len(self.files)] = archive.fixed
        self.files.append(CheckpointFile(path, archive.size_bytes))

    def placed(self) -> Placed:
        """Return the rows to fill."""
        return place(self.pieces, self.files)


def pieces_of(tensor: Tensor, span: Span) -> Iterator[FilePiece]:
    """Yield a span of a tensor as boxes, with bytes counted from the start of its buffer."""
    item = ITEM_BYTES[tensor.dtype]
    begin = span.at * item
    for box in flat_range(tensor.shape, span.low, span.high):
        yield FilePiece(tensor, box, "", begin)
        begin += box.numel * item
