"""What does not fit together in a manifest, although each value is of its field's kind."""

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from scalai.core.boxes import outside, right_aligned
from scalai.core.collection import MAX_NDIM, Tensor
from scalai.core.dtypes import ITEM_BYTES
from scalai.core.fingerprint import MODULI

if TYPE_CHECKING:
    from scalai.store.manifest import HostManifest

MAX_BYTES = 1 << 60
"""Of a tensor, empty dims counted as one: more than any disk holds, and sums of places stay below
2^63."""


def find_inconsistency(manifest: "HostManifest") -> str | None:
    """Say what does not fit together in a manifest, or None. Reads no file but it."""
    rows, collection = len(manifest.collection), manifest.collection
    for name in ("file", "begin", "fingerprint"):
        if len(getattr(manifest, name)) != rows:
            return f"{len(getattr(manifest, name))} values of {name} for {rows} pieces"
    for what, names in (
        ("file", [stored.name for stored in manifest.files]),
        ("tensor", [tensor.name for tensor in collection.tensors]),
        ("rank", list(manifest.ranks)),
    ):
        if len(set(names)) != len(names):
            twice = next(name for number, name in enumerate(names) if name in names[:number])
            return f"{what} {twice!r} is named twice"
    if any(not 0 <= number < len(manifest.files) for number in manifest.unproven):
        return f"files {list(manifest.unproven)} are unproven, but there are {len(manifest.files)}"
    unfit = next(filter(None, map(_unfit, collection.tensors)), None)
    return unfit or (_misplaced(manifest) if rows else None)


def _unfit(tensor: Tensor) -> str | None:
    """Say why no tensor is this one, or None."""
    found = f"tensor {tensor.name!r} is {tensor.dtype}{list(tensor.shape)}"
    if not tensor.is_possible:
        return found
    if prod(max(size, 1) for size in tensor.shape) * ITEM_BYTES[tensor.dtype] > MAX_BYTES:
        return f"{found}, more than any disk holds"
    return None


def _misplaced(manifest: "HostManifest") -> str | None:
    """Say which piece lies outside of its tensor or its file, or None."""
    collection = manifest.collection
    ndim = np.array([len(tensor.shape) for tensor in collection.tensors], dtype=np.int64)
    is_filled_up = np.arange(MAX_NDIM) < (MAX_NDIM - ndim)[collection.tensor, None]
    full = right_aligned(collection.tensors)
    wrong = outside(full, collection.tensor, collection.offset, collection.shape).tolist()
    wrong += np.flatnonzero((is_filled_up & (collection.shape != 1)).any(axis=1)).tolist()
    if wrong:
        tensor = collection.tensors[collection.tensor[wrong[0]]]
        return f"piece {wrong[0]} lies outside tensor {tensor.name!r}"
    if manifest.file.min() < 0 or manifest.file.max() >= len(manifest.files):
        return f"a piece lies in file {manifest.file.max()}, but there are {len(manifest.files)}"
    sizes = np.array([stored.size_bytes for stored in manifest.files], dtype=np.int64)
    beyond = manifest.begin > sizes[manifest.file] - collection.size_bytes()
    beyond |= manifest.begin < 0
    if beyond.any():
        row = int(beyond.argmax())
        return f"piece {row} ends beyond {manifest.files[manifest.file[row]].name}"
    modulus = MODULI[manifest.fingerprint_version]
    largest = int(manifest.fingerprint.max())
    return None if largest < modulus else f"fingerprint {largest:016x} is not below {modulus:x}"
