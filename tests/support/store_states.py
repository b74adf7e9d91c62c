"""Small states for the store's tests: layouts of a rank, and values that are known by position."""

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scalai.core.jsonable import Json
from scalai.core.messages.worker_messages import RankSnapshot, WriteOrder
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.dtypes import BITS, ITEM_BYTES
from scalai.core.tensors.fingerprint import piece_fingerprint
from scalai.core.tensors.region import Box, whole
from scalai.store.files import slices
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest
from scalai.store.snapshot import SnapshotSlot
from support.wire import travelled

Opener = Callable[..., HostStore]

WEIGHT = Tensor("param/w", (6, 8), "F32")
HALF = Tensor("param/h", (5, 3), "BF16")
STEP = Tensor("step/w", (), "F32")
FLAGS = Tensor("mask/w", (3,), "BOOL")
LONG = Tensor("count/w", (4,), "I64")


def values_of(tensor: Tensor, salt: int = 0) -> np.ndarray[Any, Any]:
    """Return the bits of a whole tensor, different for each name and salt."""
    seed = [salt, *tensor.name.encode()]
    bits = BITS[ITEM_BYTES[tensor.dtype]]
    high = np.iinfo(bits).max
    return np.asarray(
        np.random.default_rng(seed).integers(0, high, tensor.shape, dtype=bits, endpoint=True)
    )


def two_ranks() -> dict[int, Collection]:
    """Return what two ranks hold: one tensor cut by columns, the others replicated."""
    replicated = [(tensor, whole(tensor.shape)) for tensor in (HALF, STEP, FLAGS, LONG)]
    return {
        rank: Collection.of([(WEIGHT, Box((0, 4 * rank), (6, 4))), *replicated]) for rank in (0, 1)
    }


def write(
    order: WriteOrder, held: Collection, salt: int = 0,
    bits_of: Callable[[Tensor], np.ndarray[Any, Any]] | None = None,
) -> tuple[int, ...]:  # fmt: skip
    """Do what a worker does: write the ordered rows and return their fingerprints."""
    order = travelled(order)
    fingerprints = []
    for row, begin in zip(order.rows, order.begins, strict=True):
        tensor, box = held.box(row)
        whole_of = values_of(tensor, salt) if bits_of is None else bits_of(tensor)
        values = np.array(whole_of[slices(box)], order="C")
        with open(order.path, "r+b") as file:
            file.seek(begin)
            file.write(values.tobytes())
        fingerprints.append(piece_fingerprint(values, box, tensor.shape))
    return tuple(fingerprints)


def rot(path: Path) -> None:
    """Change the last byte of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def full_disk(*_: object) -> None:
    """In place of a call that writes."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def size_of(part: HostManifest) -> int:
    """Return the bytes of a part's files."""
    return sum(file.size_bytes for file in part.files)


def report(rank: int, fingerprints: tuple[int, ...]) -> RankSnapshot:
    """Return a rank's report, as it comes through a process border."""
    part = RankSnapshot(fingerprints, f"tp{rank}", {"lr": 0.5, "of": {f"r{rank}": rank}}, [rank])
    return travelled(part)


def snapshot(
    store: HostStore, step: int, held: Mapping[int, Collection] | None = None, **more: Json
) -> tuple[SnapshotSlot, HostManifest]:
    """Reserve, write and seal a state; its salt is the step. ``more``: of its ``about``."""
    held = two_ranks() if held is None else held
    slot = store.reserve(held)
    parts = {rank: report(rank, write(slot.orders[rank], held[rank], step)) for rank in held}
    about = {
        "consumed_samples": 12 * step, "degrees": {"tp": 2}, "world_size": len(held),
        "tensors": len({tensor.name for each in held.values() for tensor in each.tensors}), **more,
    }  # fmt: skip
    manifest = store.seal(slot, step=step, about=about, parts=parts)
    return slot, manifest


def generation(
    store: HostStore, number: int, step: int, held: Mapping[int, Collection] | None = None,
    **more: Json,
) -> HostManifest:  # fmt: skip
    """Snapshot a state and commit it."""
    slot, _ = snapshot(store, step, held, **more)
    return store.commit(slot, number)


def is_undamaged(store: HostStore, number: int) -> bool:
    with store.open_rows(number) as rows:
        return not list(rows.damage())


def is_whole(store: HostStore, number: int, step: int) -> bool:
    """Is everything that ``two_ranks`` holds stored, with the values of ``step``, once?"""
    with store.open_rows(number) as rows:
        if list(rows.damage()):
            return False
        held = [rows.manifest.collection.box(row) for row in range(len(rows.manifest.collection))]
        expected = {(t.name, b) for c in two_ranks().values() for t, b in map(c.box, range(len(c)))}
        same = all(
            np.array_equal(rows.view(row), values_of(tensor, step)[slices(box)])
            for row, (tensor, box) in enumerate(held)
        )
        found = {(tensor.name, box) for tensor, box in held}
        return same and len(held) == len(expected) and found == expected
