"""A build without storage is the build with storage, once a restore has brought the state."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from scalai.core.errors import RefusedError
from scalai.runtime.unstored import UnstoredBuild


class Block(nn.Module):
    """Cut, tied and marked weights, a mask, and a table that is no state."""

    mask: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 16))
        self.weight.is_cut = True  # type: ignore[attr-defined]
        nn.init.normal_(self.weight)
        self.tied = self.weight
        self.bias = nn.Parameter(torch.randn(16))
        self.register_buffer("mask", torch.ones(8, 8).tril(), persistent=False)
        self.register_buffer("table", torch.outer(torch.arange(8.0), torch.ones(4)).cos())


class Flat:
    """As frameworks make it: parameters in one buffer with padding, gradients, fp32 masters and
    moments of a part."""

    def __init__(self, block: Block) -> None:
        self.data, self.grads = torch.zeros(160), torch.zeros(160)
        begin = 0
        for parameter in (block.weight, block.bias):
            end, old = begin + parameter.numel(), parameter.data
            parameter.data = self.data[begin:end].view(parameter.shape)
            parameter.data.detach().copy_(old)
            parameter.main_grad = self.grads[begin:end].view(parameter.shape)  # type: ignore[attr-defined]
            begin = end
        self.used = begin
        self.master = block.weight.detach().view(-1)[3:70].clone().double()
        self.moment = torch.zeros_like(self.master)
        self.scale = torch.full((50,), 3.0)


@pytest.fixture
def unstored() -> Iterator[UnstoredBuild]:
    build = UnstoredBuild(least_bytes=1)
    build.begin()
    yield build
    build.end()


def size_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_what_a_restore_does_not_bring_is_as_in_a_build_with_storage(
    unstored: UnstoredBuild,
) -> None:
    block = Block()
    flat = Flat(block)
    state = [flat.data, flat.grads, flat.master, flat.moment, block.weight, block.bias]
    assert not any(map(size_of, state)) and unstored.size > 0
    restored = [flat.data[: flat.used], flat.master]
    unstored.check(restored)
    unstored.end()
    unstored.take_back(restored)
    expected = Block()
    assert torch.equal(block.mask, expected.mask) and torch.equal(block.table, expected.table)
    assert not flat.grads.any() and not flat.moment.any() and not flat.data[flat.used :].any()
    assert torch.equal(flat.scale, torch.full((50,), 3.0))
    assert block.tied is block.weight and block.weight.is_cut  # type: ignore[attr-defined]
    flat.data.copy_(torch.arange(160.0))
    assert block.weight[1, 0] == 16 and block.bias[-1] == flat.used - 1
    assert flat.master.shape == (67,) and flat.master.dtype == torch.float64
    loss = (block.weight.sum() + block.bias.sum()).square()
    loss.backward()
    assert block.weight.grad is not None and block.weight.grad.shape == (8, 16)


def test_tensors_that_are_gone_take_nothing_back(unstored: UnstoredBuild) -> None:
    left = torch.zeros(1000)
    torch.zeros(10_000)
    assert unstored.size == size_of(torch.empty(1000, device="meta"))
    unstored.end()
    unstored.take_back([])
    assert not left.any()


@pytest.mark.parametrize("limit", [0, 1, 700, 1 << 20])
def test_memory_taken_ahead_is_the_restores(unstored: UnstoredBuild, limit: int) -> None:
    block = Block()
    flat = Flat(block)
    restored = [flat.data[: flat.used], flat.master]
    unstored.check(restored)
    unstored.end()
    needed = unstored.size
    assert unstored.take_ahead(limit) == min(limit, needed)
    unstored.take_back(restored)
    assert all(map(size_of, (flat.data, flat.grads, flat.master, flat.moment)))
    assert not flat.grads.any() and not flat.moment.any() and not flat.data[flat.used :].any()
    assert torch.equal(flat.scale, torch.full((50,), 3.0))


@pytest.mark.parametrize(
    "compute",
    [
        lambda weight: weight.sum(),
        lambda weight: torch.ones(8, 16).add_(weight.detach()),
        lambda weight: float(weight.detach()[0, 0]),
        lambda weight: torch.stack([weight.detach(), weight.detach()]).sum(),
    ],
    ids=["sum", "in place", "host", "of both"],
)
def test_values_of_parameters_are_not_computed_with(unstored: UnstoredBuild, compute: Any) -> None:
    block = Block()
    with pytest.raises(RefusedError, match="from parameters"):
        compute(block.weight)


def test_state_that_is_joined_is_state(unstored: UnstoredBuild) -> None:
    """As torch's DDP joins parameters for a broadcast, and DeepSpeed for its flat buffers."""
    block = Block()
    joined = torch.cat([block.weight.detach().view(-1), block.bias.detach()])
    assert size_of(joined) == 0 and joined.shape == (144,)
    block.bias.detach().copy_(joined[128:])
    with pytest.raises(RefusedError, match="no part of the state"):
        unstored.check([block.weight.detach().view(-1), block.bias.detach()])
    del joined
    unstored.check([block.weight.detach().view(-1), block.bias.detach()])


def test_memory_of_parameters_that_no_restore_brings_is_refused(unstored: UnstoredBuild) -> None:
    block = Block()
    flat = Flat(block)
    for missing in ([flat.data[: flat.used]], [flat.data[3 : flat.used], flat.master]):
        with pytest.raises(RefusedError, match="no part of the state"):
            unstored.check(missing)
