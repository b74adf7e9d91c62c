"""Layers over slabs with halos compute, forward and backward, what they compute over the whole.

Four ranks, a fork each, are run by this file as a script, and leave what they found in a folder.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import scalai
from scalai import Slabs
from scalai.runtime.processes import die_with_parent

Grid = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""The sample, its parts along each axis, and the halo."""

GRIDS: tuple[Grid, ...] = (
    ((7, 5), (4, 1), (1, 0)),
    ((7, 5), (2, 2), (1, 2)),
    ((4, 9), (1, 4), (2, 2)),
)
"""Uneven ones, one with corners, one with a halo as wide as a slab."""
RANKS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where four ranks have left what they found."""
    path = tmp_path_factory.mktemp("halo")
    subprocess.run([sys.executable, __file__, str(path)], check=True, timeout=120)
    return path


@pytest.mark.parametrize("number", range(len(GRIDS)))
def test_values_and_gradients_are_those_of_the_whole_sample(folder: Path, number: int) -> None:
    for rank in range(RANKS):
        found = json.loads((folder / f"rank-{rank}.json").read_text())
        assert found["differences"][number] < 1e-12


def test_wrong_calls_are_refused_on_every_rank(folder: Path) -> None:
    for rank in range(RANKS):
        texts = json.loads((folder / f"rank-{rank}.json").read_text())["refused"].splitlines()
        assert texts[0].startswith("LayoutError: a halo of 3 along axis 0 is wider")
        assert "2 slabs need as many ranks, and the group has 4" in texts[1]
        assert f"rank {rank} has [2, 2] of the sample [8, 2], and was given" in texts[2]


@pytest.mark.fault
def test_a_rank_that_dies_in_an_exchange_is_told_to_the_others(folder: Path) -> None:
    told = {rank: folder / f"death-{rank}" for rank in (0, 2, 3)}
    assert {path.read_text() for path in told.values()} <= {"RuntimeError", "DistBackendError"}


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_group_says(folder: Path) -> None:
    """Rank 0 and 2 are its neighbours; rank 3 is neighbour of a rank that has given up."""
    told = [json.loads((folder / f"rank-{rank}.json").read_text())["silence"] for rank in (0, 2)]
    assert "nothing" not in told


# ------------------------------------------------------------------ what a rank does


def layers(
    values: torch.Tensor, kernel: torch.Tensor, widen: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Run two convolutions, of which each is given what ``widen`` makes of its input."""
    for _ in range(2):
        values = functional.conv2d(widen(values), kernel).sin()
    return values


def difference(grid: Grid, rank: int) -> float:
    """Return the largest difference of values and gradients from those without slabs."""
    shape, parts, halo = grid
    torch.manual_seed(7)
    whole = torch.randn(2, 1, *shape, dtype=torch.float64, requires_grad=True)
    size = [2 * more + 1 for more in halo]
    kernel = torch.randn(1, 1, *size, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 1, *shape, dtype=torch.float64)

    def padded(values: torch.Tensor) -> torch.Tensor:
        return functional.pad(values, (halo[1], halo[1], halo[0], halo[0]))

    expected = layers(whole, kernel, padded)
    (expected * weights).sum().backward()
    slabs = Slabs(shape, parts)
    own, wide = slabs.slab(rank), slabs.with_halo(rank, halo)
    missing = []
    for low, size_, begin, extent, more in zip(
        wide.offset, wide.shape, own.offset, own.shape, halo, strict=True
    ):
        missing.append((more - (begin - low), more - (low + size_ - begin - extent)))

    def exchanged(values: torch.Tensor) -> torch.Tensor:
        widened = scalai.exchange_halo(values, slabs, halo)
        return functional.pad(widened, (*missing[1], *missing[0]))

    place: Any = (..., *slabs.index(rank))
    local = whole.detach()[place].clone().requires_grad_()
    mine = kernel.detach().clone().requires_grad_()
    found = layers(local, mine, exchanged)
    (found * weights[place]).sum().backward()
    assert local.grad is not None and mine.grad is not None
    assert whole.grad is not None and kernel.grad is not None
    dist.all_reduce(mine.grad)
    pairs = (
        (found, expected[place]), (local.grad, whole.grad[place]), (mine.grad, kernel.grad),
    )  # fmt: skip
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def refused(rank: int) -> str:
    """Return with which errors wrong calls end, on this rank."""
    texts = []
    calls = (
        (torch.zeros(2, 2), Slabs((8, 2), (4, 1)), (3, 0)),
        (torch.zeros(2, 2), Slabs((4, 2), (2, 1)), (1, 0)),
        (torch.zeros(3, 2), Slabs((8, 2), (4, 1)), (1, 0)),
    )
    for local, slabs, halo in calls:
        try:
            scalai.exchange_halo(local, slabs, halo)
        except scalai.ScalaiError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return "\n".join(texts)


def silence(rank: int) -> str:
    """Have rank 1 not come to an exchange; return what the others are told."""
    group = dist.new_group(range(RANKS), timeout=timedelta(seconds=2))
    told = "nothing"
    if rank != 1:
        try:
            scalai.exchange_halo(torch.zeros(2, 2), Slabs((8, 2), (4, 1)), (1, 0), group)
        except RuntimeError as error:
            told = type(error).__name__
    dist.barrier()
    return told


def death(rank: int) -> str:
    """Have rank 1 die where the others exchange; return what they are told."""
    if rank == 1:
        os._exit(0)
    try:
        for _ in range(3):
            scalai.exchange_halo(torch.zeros(2, 2), Slabs((8, 2), (4, 1)), (1, 0))
            dist.barrier()
    except RuntimeError as error:
        return type(error).__name__
    return "nothing"


def run(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), RANKS)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    differences = [difference(grid, rank) for grid in GRIDS]
    told = {"differences": differences, "refused": refused(rank), "silence": silence(rank)}
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))
    (folder / f"death-{rank}").write_text(death(rank))


def main() -> None:
    folder, parent = Path(sys.argv[1]), os.getpid()
    torch.set_num_threads(1)
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            die_with_parent(parent)
            try:
                run(rank, folder)
            finally:
                sys.stderr.flush()
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
