"""A build up to the brink on a device: no memory for the model before its storage is given back."""

import pytest
import torch
from torch import nn

from scalai.runtime.unstored import UnstoredBuild

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
SIDE, SMALL = 1 << 12, 1 << 20


def test_a_model_takes_memory_of_the_device_once_the_old_one_is_gone() -> None:
    before = torch.cuda.memory_allocated()
    build = UnstoredBuild()
    build.begin()
    try:
        layer = nn.Linear(SIDE, SIDE, bias=False, device="cuda")
        gradient, master = torch.zeros_like(layer.weight), layer.weight.detach().clone().double()
        assert torch.cuda.memory_allocated() - before < SMALL
        build.check([layer.weight.detach().view(-1), master.view(-1)])
    finally:
        build.end()
    build.take_back([layer.weight.detach().view(-1), master.view(-1)])
    taken = sum(each.nbytes for each in (layer.weight, gradient, master))
    assert taken <= torch.cuda.memory_allocated() - before < taken + SMALL
    assert not gradient.any()
    layer.weight.detach().fill_(1.0)
    assert layer(torch.ones(1, SIDE, device="cuda")).eq(SIDE).all()
