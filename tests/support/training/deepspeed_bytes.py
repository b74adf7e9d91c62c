"""Bytes that DeepSpeed keeps on a rank: ``python -m support.training.deepspeed_bytes`` reads a JSON
list of [ranks, configuration, numbers of elements of the parameters] from standard input and
prints, for each, what lies there by part after the first of two micro-batches, and the optimizer's
after the step.

The other ranks are a fake process group's: no collective is run, and no value means anything.
"""

import contextlib
import io
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import deepspeed
import torch

from support.training.judged_deepspeed import forget, join, prepare

Case = tuple[int, dict[str, Any], list[int]]


class Numbers(torch.nn.Module):
    """Parameters of given sizes, all of which its sum depends on."""

    def __init__(self, sizes: Iterable[int]) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self) -> torch.Tensor:
        return torch.stack([part.sum() for part in self.parts]).sum()


def measure(case: Case) -> dict[str, int]:
    """Return the bytes of weights, of their gradients and of the optimizer."""
    world, config, sizes = case
    join(world, 0)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
            model = Numbers(sizes)
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=list(model.parameters()), config=config
            )
            engine.backward(engine())
            kept = gradients(engine)
            engine.step()
            engine.backward(engine())  # the second of two micro-batches
            engine.step()
        return {
            "weights": size(getattr(p, "ds_tensor", p) for p in model.parameters()),
            "gradients": kept, "optimizer": size(optimizer_state(engine)),
        }  # fmt: skip
    finally:
        forget()


def gradients(engine: Any) -> int:
    """Return the bytes of what a backward pass leaves for the update."""
    optimizer = engine.optimizer
    kept = [p.grad for p in engine.module.parameters() if p.grad is not None]
    for name in ("averaged_gradients", "all_grad_tensors", "fp32_groups_gradients_flat"):
        found = getattr(optimizer, name, None) or ()
        kept += tensors(found.values() if isinstance(found, dict) else found)
    return size(kept)


def optimizer_state(engine: Any) -> Iterator[torch.Tensor]:
    """Yield masters, and what the optimizer keeps of each."""
    wrapper = engine.optimizer
    base = getattr(wrapper, "optimizer", wrapper)
    weights = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}
    masters = getattr(wrapper, "fp32_partitioned_groups_flat", None) or [
        p for group in base.param_groups for p in group["params"]
    ]
    yield from (p for p in masters if p.untyped_storage().data_ptr() not in weights)
    for state in base.state.values():
        yield from (value for value in tensors(state.values()) if value.ndim)


def tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among values and lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


def size(held: Iterable[torch.Tensor]) -> int:
    """Return the bytes of memory, each once."""
    storages = (tensor.untyped_storage() for tensor in held)
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def main() -> None:
    cases: list[Case] = json.load(sys.stdin)
    prepare()
    print(json.dumps([measure(case) for case in cases]))


if __name__ == "__main__":
    main()
