"""A state with a tensor of every kind, on two hosts of two ranks: cut and replicated, of every
dtype, without dims, with all of them, and empty. Its bits follow from the names alone."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scalai.core.messages.worker_messages import RankSnapshot
from scalai.core.tensors.collection import Collection, Tensor, concatenate
from scalai.core.tensors.dtypes import BITS, ITEM_BYTES, Bits
from scalai.core.tensors.fingerprint import CommitStatement, tensor_fingerprints
from scalai.core.tensors.region import Box, flat_range, whole
from scalai.store.host import HostStore
from support.store_states import write

Held = Mapping[str, Mapping[int, Collection]]

STEP, NUMBER = 7, 2
SNAPSHOT = "0a1b2c3d-1-7"
WEIGHT, MASTER = Tensor("param/w", (6, 8), "BF16"), Tensor("main/w", (6, 8), "F32")
COUNT = Tensor("step/w", (), "F32")
NOTHING = Tensor("param/nothing", (0, 4), "BF16")
"""Of rank 3 alone."""
LONG = Tensor("param/long", (3, 301), "BF16")
"""Rows of two segments of words; it is cut in the middle of a word."""
WIDE = Tensor("param/wide", (2, 300), "F64")
DEEP = Tensor("param/deep", (2, 1, 3, 1, 2, 2), "I32")
OF_EACH = tuple(Tensor(f"param/{dtype}", (5,), dtype) for dtype in sorted(ITEM_BYTES))
TENSORS = (WEIGHT, MASTER, COUNT, NOTHING, LONG, WIDE, DEEP, *OF_EACH)


def bits_of(tensor: Tensor) -> Bits:
    """Return the bits of a whole tensor: those of a parameter and of its master are one value."""
    parameter = tensor.name.partition("/")[2].encode()
    made = hashlib.shake_256(parameter).digest(tensor.numel)
    small = np.frombuffer(made, dtype=np.int8).astype(np.int64).reshape(tensor.shape)
    bits = BITS[ITEM_BYTES[tensor.dtype]]
    if tensor.dtype == "BF16":
        return np.asarray((small / 16).astype("<f4").view("<u4") >> np.uint32(16)).astype(bits)
    if tensor.dtype in ("F16", "F32", "F64"):
        return np.asarray((small / 16).astype(f"<f{ITEM_BYTES[tensor.dtype]}")).view(bits)
    if tensor.dtype == "BOOL":
        return np.asarray(small % 2).astype(bits)
    if tensor.dtype.startswith("F8"):
        return np.asarray(small % 120).astype(bits)  # no NaN
    return np.asarray(small * 0x0102030405060708).astype(bits)


def held() -> Held:
    """Return what each rank of each host vouches for: TP2 in a host, replicas over the hosts."""
    rows: dict[int, list[tuple[Tensor, Box]]] = {rank: [] for rank in range(4)}
    for rank, low, high in ((0, 0, 11), (1, 11, 21), (2, 21, 40), (3, 40, 48)):
        rows[rank].append((WEIGHT, Box((0, 4 * (rank % 2)), (6, 4))))
        rows[rank].append((COUNT, whole(())))
        rows[rank] += [(MASTER, box) for box in flat_range(MASTER.shape, low, high)]
    for rank, low, high in ((0, 0, 131), (3, 131, 301)):
        rows[rank].append((LONG, Box((0, low), (3, high - low))))
    rows[1].append((WIDE, Box((0, 0), (1, 300))))
    rows[2].append((WIDE, Box((1, 0), (1, 300))))
    rows[0].append((DEEP, Box((0, 0, 0, 0, 0, 1), (2, 1, 3, 1, 2, 1))))
    rows[2].append((DEEP, Box((0, 0, 0, 0, 0, 0), (2, 1, 3, 1, 2, 1))))
    rows[3].append((NOTHING, whole(NOTHING.shape)))
    for number, tensor in enumerate(OF_EACH):
        rows[number % 4].append((tensor, whole(tensor.shape)))
    of = {rank: Collection.of(boxes) for rank, boxes in rows.items()}
    return {"a": {0: of[0], 1: of[1]}, "b": {2: of[2], 3: of[3]}}


def about() -> dict[str, Any]:
    """Return what an agent says of the state."""
    degrees = {"tp": 2, "pp": 1, "dp": 2, "vpp": 1, "cp": 1, "ep": 1}
    return {
        "snapshot": SNAPSHOT, "consumed_samples": 12 * STEP, "degrees": degrees, "world_size": 4,
        "tensors": len(TENSORS), "hosts": ["a", "b"], "facts": {"padded_vocab_size": 128},
        "lineage": [["9f8e7d6c", 5]],
        "dataset": {"global_batch_size": 12}, "time": 1.5,
    }  # fmt: skip


def report(rank: int, prints: tuple[int, ...]) -> RankSnapshot:
    """Return what a rank tells of its snapshot; a best loss that is none yet is infinite."""
    scalars = {"lr": 1e-05, "best": float("inf"), "user": {"ü": rank // 4}, f"of{rank}": [2**60]}
    return RankSnapshot(prints, f"tp{rank % 2}-dp{rank // 2}", scalars, {"seed": rank})


def stores_of(root: Path) -> dict[str, HostStore]:
    """Commit the state on both hosts, as the agents and the coordinator of a job do; return their
    open stores."""
    stores = {host: HostStore("mixed", host, root) for host in held()}
    slots, manifests = {}, []
    for host, ranks in held().items():
        slots[host] = stores[host].reserve(ranks)
        parts = {
            rank: report(rank, write(slots[host].orders[rank], collection, bits_of=bits_of))
            for rank, collection in ranks.items()
        }
        manifests.append(stores[host].seal(slots[host], step=STEP, about=about(), parts=parts))
    rows = concatenate([manifest.collection for manifest in manifests])
    values = np.concatenate([manifest.fingerprint for manifest in manifests])
    committed = CommitStatement(("a", "b"), tensor_fingerprints(rows, values))
    for host, store in stores.items():
        store.commit(slots[host], NUMBER, committed)
    return stores
