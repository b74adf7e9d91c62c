"""Which elements of a parameter lie where in DeepSpeed's flat buffers."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from scalai.core.errors import LayoutError, RefusedError
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.coverage import check_coverage
from scalai.core.tensors.region import Piece, row_major, whole
from scalai.patches.deepspeed.engine.fragments import cut_pieces, offset_in, partitioned
from scalai.patches.deepspeed.engine.parallel_ranks import TensorParallel

SHAPE = (5, 3, 4)
NUMEL = 60
PARAMETER = torch.empty(0)


@pytest.mark.parametrize("offset", [0, 1, 13, 40])
@pytest.mark.parametrize("partition_numel", [7, 20, 50, 200])
def test_partitions_make_up_a_parameter_and_hold_its_elements_in_order(
    offset: int, partition_numel: int
) -> None:
    flat = np.full(1000, -1)
    flat[offset : offset + NUMEL] = np.arange(NUMEL)
    rows: list[Piece] = []
    for rank in range(-(-(offset + NUMEL) // partition_numel)):
        found = partitioned(PARAMETER, NUMEL, offset, partition_numel, rank)
        own = flat[rank * partition_numel :]
        assert own[found.start : found.start + found.high - found.low].tolist() == list(
            range(found.low, found.high)
        )
        piece = Piece(whole(SHAPE), 0, row_major(SHAPE))
        rows += cut_pieces([piece], found.low, found.high, found.start, found.cuts)
    check_coverage(Collection.of((Tensor("param/x", SHAPE, "F32"), row.box) for row in rows))


@pytest.mark.parametrize("cuts", [(), (5,), (1, 17, 18, 59)])
def test_a_whole_copy_is_cut_into_the_boxes_of_the_partitions(cuts: tuple[int, ...]) -> None:
    piece = Piece(whole(SHAPE), 0, row_major(SHAPE))
    ends = (0, *cuts, NUMEL)
    apart = [
        part.box for low, high in pairwise(ends) for part in cut_pieces([piece], low, high, 0, ())
    ]
    assert [part.box for part in cut_pieces([piece], 0, NUMEL, 0, cuts)] == apart


def test_memory_outside_of_the_flat_buffer_is_refused_by_name() -> None:
    flat = torch.zeros(10)
    assert offset_in(flat, flat[4:7], "x") == 4
    for part in (torch.zeros(3), flat[4:7].half(), flat[::2]):
        with pytest.raises(LayoutError, match=r"^weight \(\d+ elements"):
            offset_in(flat, part, "weight")


@pytest.mark.parametrize(("dim", "parts"), [(0, 1), (1, 1), (0, 2), (1, 2)])
def test_tensor_parallel_shards_make_up_the_whole(dim: int, parts: int) -> None:
    full = torch.arange(8 * 12).view(8, 12)
    rebuilt = torch.full_like(full, -1)
    for rank in range(2):
        shard = torch.cat([part.chunk(2, dim)[rank] for part in full.chunk(parts, dim)], dim)
        parameter: Any = torch.nn.Parameter(shard.float())
        parameter.tensor_model_parallel = True
        parameter.partition_dim, parameter.partition_stride = dim, parts
        shape, pieces = TensorParallel(rank, 2).pieces("w", parameter, tuple(shard.shape))
        assert shape == (8, 12)
        for piece in pieces:
            values = (
                shard.contiguous().view(-1).as_strided(piece.box.shape, piece.stride, piece.start)
            )
            at = zip(piece.box.offset, piece.box.shape, strict=True)
            rebuilt[tuple(slice(low, low + size) for low, size in at)] = values
    assert torch.equal(rebuilt, full)


def test_a_shard_that_does_not_say_how_it_is_cut_is_refused_by_name() -> None:
    parameter: Any = torch.nn.Parameter(torch.zeros(4, 2))
    parameter.tensor_model_parallel = True
    with pytest.raises(RefusedError, match=r"up\.weight.*partition_dim"):
        TensorParallel(0, 2).pieces("up.weight", parameter, (4, 2))
