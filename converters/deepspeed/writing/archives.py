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
"""What lies in a new tensor, by identity; positions count from its start."""


@dataclass(frozen=True, eq=False, slots=True)
class Archives:
    """Files, what is known of their bytes, and which pieces fill the rest.

    ``shards``: what the rank has whose files are laid out; pieces are of those.
    """

    pieces: list[FilePiece] = field(default_factory=list)
    files: list[CheckpointFile] = field(default_factory=list)
    fixed: dict[int, Sequence[tuple[int, bytes]]] = field(default_factory=dict)
    shards: Shards = EVERYTHING

    def of(self, shards: Shards) -> "Archives":
        """Return the same files, to which those of another rank are added."""
        return replace(self, shards=shards)

    def add(self, path: str, value: Any, filled: Mapping[NewTensor, Sequence[FilePiece]]) -> None:
        """Add a file that torch reads as ``value``."""
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
        """Return the rows to be filled."""
        return place(self.pieces, self.files)


def pieces_of(tensor: Tensor, span: Span) -> Iterator[FilePiece]:
    """Yield a span of a tensor as boxes, with bytes that count from the start of its buffer."""
    item = ITEM_BYTES[tensor.dtype]
    begin = span.at * item
    for box in flat_range(tensor.shape, span.low, span.high):
        yield FilePiece(tensor, box, "", begin)
        begin += box.numel * item
