"""Which storages of a checkpoint a rank checks before a load, also where memory ends."""

import _thread
import threading
from pathlib import Path

import numpy as np
import pytest

from scalai.converters.checkpoint import CheckpointFile, Placed
from scalai.converters.checksums import FileStorage
from scalai.core.errors import MemoryShortError, ProofError
from scalai.core.tensors.collection import Collection, Tensor
from scalai.patches.deepspeed.checkpoint import filling
from scalai.patches.deepspeed.checkpoint.filling import check_storages, share, touched

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
    placed = Placed(collection, np.array([file]), np.array([begin]), box + 1, files)
    assert np.flatnonzero(touched(STORAGES, placed)).tolist() == expected


NOTHING = Placed(
    Collection.of([]), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64),
    np.zeros((0, 0), dtype=np.int64), (),
)  # fmt: skip


def refuse(*_: object) -> int:
    raise RuntimeError("can't start new thread")


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


def test_memory_that_runs_out_in_a_check_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(directory: Path, stored: FileStorage) -> bool:
        raise MemoryError

    monkeypatch.setattr(filling, "is_damaged", run_out)
    with pytest.raises(MemoryShortError, match=r"4 storages of /d.*The engine is as it was"):
        check_storages(Path("/d"), STORAGES, NOTHING)
