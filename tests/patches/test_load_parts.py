"""Which tensor of a checkpoint fills which one of an engine."""

import _thread
import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from scalai.converters.checkpoint import (
    REPORT,
    REPORT_VERSION,
    CheckpointFile,
    FilePiece,
    PlacedTensors,
    place,
)
from scalai.converters.checksums import FileStorage
from scalai.core.errors import MemoryShortError, ProofError, RefusedError
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.fingerprint import VERSION, piece_fingerprint
from scalai.core.tensors.region import Box, Piece, whole
from scalai.patches.deepspeed.checkpoint import filling
from scalai.patches.deepspeed.checkpoint.filling import (
    Row,
    check_proofs,
    check_storages,
    proof,
    share,
    touched,
)
from scalai.patches.deepspeed.checkpoint.load_plan import TensorOrigin, fitted, origins, used
from scalai.runtime.live import Slot, held_rows, host_bits
from scalai.runtime.live_fingerprints import live_fingerprints

SHAPE = (4, 3)
FULL, ROUND, MASTER = (
    Tensor(name, SHAPE, dtype)
    for name, dtype in (("param/w", "F32"), ("param/w", "BF16"), ("main/w", "F32"))
)
MOMENT = Tensor("exp_avg/w", SHAPE, "F32")


def by_name(*tensors: Tensor) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in tensors}


@pytest.mark.parametrize(
    ("saved", "wanted", "found"),
    [
        ((FULL, MOMENT), (FULL, MOMENT), (TensorOrigin(FULL), TensorOrigin(MOMENT))),
        ((ROUND, MASTER), (ROUND, MASTER), (TensorOrigin(ROUND), TensorOrigin(MASTER))),
        ((FULL,), (ROUND, MASTER), (TensorOrigin(FULL, is_rounded=True), TensorOrigin(FULL))),
        ((ROUND, MASTER), (FULL,), (TensorOrigin(MASTER),)),
        (
            (ROUND, MASTER),
            (Tensor("param/w", SHAPE, "F16"),),
            (TensorOrigin(MASTER, is_rounded=True),),
        ),
        ((ROUND,), (MASTER, MOMENT), ()),
    ],
)
def test_weights_of_another_precision_come_from_fp32(
    saved: tuple[Tensor, ...], wanted: tuple[Tensor, ...], found: tuple[TensorOrigin, ...]
) -> None:
    assert tuple(origins(by_name(*saved), by_name(*wanted)).values()) == found


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (ROUND, FULL),
        (FULL, Tensor("param/w", (4, 4), "F32")),
        (MOMENT, Tensor("exp_avg/w", SHAPE, "BF16")),
    ],
)
def test_what_does_not_fit_is_refused_by_name(saved: Tensor, wanted: Tensor) -> None:
    with pytest.raises(RefusedError, match=wanted.name):
        origins(by_name(saved), by_name(wanted))


def test_pieces_keep_their_places_under_other_names() -> None:
    halves = [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    pieces = [
        FilePiece(tensor, box, "file", 100 * number)
        for number, (tensor, box) in enumerate(
            (tensor, box) for box in halves for tensor in (MOMENT, FULL)
        )
    ]
    source = place(pieces, [CheckpointFile("file", 1000)])
    wanted = by_name(ROUND, MASTER)
    found = origins(by_name(FULL, MOMENT), wanted)
    placed = fitted(source, found, wanted)
    rows = [placed.collection.box(row) for row in range(len(placed.collection))]
    assert rows == [(tensor, box) for tensor in (ROUND, MASTER) for box in halves]
    assert placed.begin.tolist() == [100, 300, 100, 300]
    assert placed.rounded().tolist() == [True, True, False, False]
    assert used(source.collection, found).tolist() == [False, True]


STORAGES = [
    FileStorage("b", "data/0", 64, 40, 1), FileStorage("b", "data/1", 128, 400, 1),
    FileStorage("a", "data/0", 64, 8, 1), FileStorage("a", "data/1", 128, 40, 1),
]  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_every_storage_is_checked_by_one_rank(world_size: int) -> None:
    shares = [share(STORAGES, rank, world_size) for rank in range(world_size)]
    assert [stored for one in shares for stored in one] == STORAGES
    assert share([], 0, world_size) == []


@pytest.mark.parametrize(
    ("file", "begin", "expected"),
    [
        (0, 64, [2]),
        (0, 167, [3]),
        (0, 168, []),
        (0, 100, []),
        (0, 0, []),
        (1, 103, [0]),
        (1, 500, [1]),
        (1, 528, []),
    ],
)
def test_the_storage_of_a_piece_is_found(file: int, begin: int, expected: list[int]) -> None:
    box = np.zeros((1, 1), dtype=np.int64)
    collection = Collection((Tensor("x", (1,), "U8"),), np.zeros(1, dtype=np.int64), box, box + 1)
    files = (CheckpointFile("a", 168), CheckpointFile("b", 528))
    placed = PlacedTensors(collection, np.array([file]), np.array([begin]), box + 1, files)
    assert np.flatnonzero(touched(STORAGES, placed)).tolist() == expected


NOTHING = PlacedTensors(
    Collection.of([]), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64),
    np.zeros((0, 0), dtype=np.int64), (),
)  # fmt: skip


def refuse(*_: object) -> int:
    raise RuntimeError("can't start new thread")


@pytest.mark.fault
@pytest.mark.parametrize("start", [refuse, lambda *_: 0], ids=["refused", "never begins"])
def test_all_are_checked_though_no_thread_can_begin(
    start: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[tuple[FileStorage, int]] = []

    def is_damaged(directory: Path, stored: FileStorage) -> bool:
        checked.append((stored, threading.get_ident()))
        return stored is STORAGES[2]

    monkeypatch.setattr(filling, "is_damaged", is_damaged)
    monkeypatch.setattr(_thread, "start_new_thread", start)
    monkeypatch.setattr(threading, "_start_new_thread", start)
    with pytest.raises(ProofError, match=r"/d/a: bytes 64 to 72 .*The engine is as it was"):
        check_storages(Path("/d"), STORAGES, NOTHING)
    assert checked == [(stored, threading.get_ident()) for stored in STORAGES]


@pytest.mark.fault
def test_memory_that_runs_out_in_a_check_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(directory: Path, stored: FileStorage) -> bool:
        raise MemoryError

    monkeypatch.setattr(filling, "is_damaged", run_out)
    with pytest.raises(MemoryShortError, match=r"4 storages of /d.*The engine is as it was"):
        check_storages(Path("/d"), STORAGES, NOTHING)


WEIGHT = Tensor("param/w", (6, 4), "F32")
VALUES = torch.arange(24, dtype=torch.float32)


def half(rank: int) -> list[Row]:
    box = Box((3 * rank, 0), (3, 4))
    return held_rows([Slot(WEIGHT, VALUES[12 * rank : 12 * rank + 12], (Piece(box, 0, (4, 1)),))])


def report(directory: Path, change: int) -> None:
    bits = host_bits(VALUES.view(torch.int32).reshape(6, 4))
    value = piece_fingerprint(bits, whole(WEIGHT.shape), WEIGHT.shape) + change
    content = {
        "version": REPORT_VERSION,
        "fingerprint_version": VERSION,
        "fingerprints": {WEIGHT.name: f"{value:016x}"},
    }
    (directory / REPORT).write_text(json.dumps(content))


def test_recorded_fingerprints_are_compared(tmp_path: Path) -> None:
    source = Collection.of([(WEIGHT, whole(WEIGHT.shape))])
    for change in (0, 1):
        report(tmp_path, change)
        proofs = [proof(half(n), live_fingerprints(half(n))) for n in (0, 1)]
        if change:
            with pytest.raises(ProofError, match=r"1 tensors are not what .*scalai\.json says"):
                check_proofs(tmp_path, source, proofs)
        else:
            check_proofs(tmp_path, source, proofs)


def test_replicas_that_differ_are_found_where_nothing_is_recorded(tmp_path: Path) -> None:
    source = Collection.of([(WEIGHT, whole(WEIGHT.shape))])
    prints = live_fingerprints(half(0))
    proofs = [
        proof(half(0), prints), proof(half(0), prints + 1),
        proof(half(1), live_fingerprints(half(1))),
    ]  # fmt: skip
    with pytest.raises(ProofError, match=r"replicas of .* differ"):
        check_proofs(tmp_path, source, proofs)
