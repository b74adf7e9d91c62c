"""Which storages of a checkpoint a rank checks before a load."""

import numpy as np
import pytest

from scalai.converters.checkpoint import CheckpointFile, Placed
from scalai.converters.checksums import Stored
from scalai.core.collection import Collection, Tensor
from scalai.patches.deepspeed.checkpoint.storages import share, touched

STORAGES = [
    Stored("b", "data/0", 64, 40, 1), Stored("b", "data/1", 128, 400, 1),
    Stored("a", "data/0", 64, 8, 1), Stored("a", "data/1", 128, 40, 1),
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
