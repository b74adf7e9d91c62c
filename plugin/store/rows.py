"""Stored pieces as arrays: the files of one host's part, mapped."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from scalai.core.dtypes import Bits, bits_dtype
from scalai.core.errors import StoreError
from scalai.core.fingerprint import piece_fingerprint
from scalai.core.region import Box
from scalai.store.files import box_view, map_file, slices
from scalai.store.manifest import HostManifest


class StoredRows:
    """Read-only views of the pieces of one host's part. The files are mapped once, when it is made.

    Raises:
        StoreError: A file cannot be mapped.
    """

    def __init__(self, directory: Path, manifest: HostManifest) -> None:
        self.directory, self.manifest = directory, manifest
        try:
            self.files = [map_file(directory / stored.name) for stored in manifest.files]
        except OSError as error:
            raise StoreError(
                f"{error.filename} cannot be mapped ({error.strerror}). Use another generation."
            ) from error

    def view(self, row: int) -> Bits:
        """Return piece ``row`` as the unsigned bits of its elements [box.shape], without a copy."""
        tensor, box = self.manifest.collection.box(row)
        data = self.files[self.manifest.file[row]]
        return box_view(data, int(self.manifest.begin[row]), box.shape, bits_dtype(tensor.dtype))

    def part(self, row: int, part: Box) -> Bits:
        """Return the part of piece ``row`` that covers the box ``part`` of the tensor, no copy.

        Raises:
            StoreError: ``part`` does not lie inside the piece.
        """
        tensor, box = self.manifest.collection.box(row)
        if part.numel and part.intersect(box) != part:
            raise StoreError(
                f"box {list(part.offset)}+{list(part.shape)} of {tensor.name!r} is asked for, but "
                f"the piece is {list(box.offset)}+{list(box.shape)}. Ask for a part of the piece."
            )
        inside = tuple(low - start for low, start in zip(part.offset, box.offset, strict=True))
        return np.asarray(self.view(row)[slices(Box(inside, part.shape))])

    def damage(self) -> Iterator[str]:
        """Compute all fingerprints again and yield a line for each piece that has another one."""
        for row, expected in enumerate(self.manifest.fingerprint.tolist()):
            tensor, box = self.manifest.collection.box(row)
            found = piece_fingerprint(
                self.view(row), box, tensor.shape, self.manifest.fingerprint_version
            )
            if found != expected:
                file = self.directory / self.manifest.files[self.manifest.file[row]].name
                yield (
                    f"{tensor.name!r} {list(box.offset)}+{list(box.shape)} in {file} has "
                    f"fingerprint {found:016x}, not {expected:016x}"
                )
