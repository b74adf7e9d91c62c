"""What DeepSpeed itself says of jobs, and keeps of them: ``python -m
support.training.deepspeed_answers`` reads a JSON list from standard input and prints, for each:

* of [ranks, kind, tp, pp, layers, configuration] [what stops it, null], or [null, [samples of a
  step, micro-batch, accumulation, data-parallel ranks]];
* of [ranks, configuration, numbers of elements of the parameters] the bytes on a rank: of weights
  and gradients after the first of two micro-batches, of the optimizer after the step.

The engine is built by ``deepspeed.initialize`` itself, on a fake process group, which stands for
the other ranks: of a pipeline at the first stage and at the last. No collective is run, and no
value means anything.
"""

# What DeepSpeed is to run on is said before it is imported.
# ruff: noqa: E402

import contextlib
import gc
import inspect
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

os.environ |= {"DS_ACCELERATOR": "cpu"}
warnings.filterwarnings("ignore")  # DeepSpeed's own, about what a CPU machine lacks

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject import layers as autotp
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from support.training.fake_group import stand_as

LINEAR = torch.nn.functional.linear
WIDTH = 8

Case = tuple[int, str, int, int, int, dict[str, Any]]
Verdict = tuple[str | None, list[int] | None]


def judge(case: Case) -> Verdict:
    """Return what stops a job, or what its engine has."""
    world, _, tp, pp, _, _ = case
    if world % (tp * pp):
        return f"{world} ranks are no multiple of TP{tp} times PP{pp}", None
    ranks = [0, world - 1] if pp > 1 else [0]
    seen: list[list[int]] = []
    for rank in ranks:
        why, has = _judge_rank(case, rank)
        if has is None:
            return why, None
        seen.append(has)
    return None, seen[0]


def _judge_rank(case: Case, rank: int) -> Verdict:
    join(case[0], rank)
    said = io.StringIO()
    engine: Any = None
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
            engine = _built(case)
        # AutoTP counts tensor-parallel ranks as replicas.
        samples = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
        return None, [
            samples * engine.dp_world_size, engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(), engine.dp_world_size,
        ]  # fmt: skip
    except Exception as error:  # whatever a start may raise is the answer
        assert error.__traceback__ is not None
        where = inspect.getinnerframes(error.__traceback__)[-1]
        first = " ".join(str(error).split())[:200]
        return f"{type(error).__name__} ({Path(where.filename).name}:{where.lineno}): {first}", None
    finally:
        if engine is not None:
            with contextlib.suppress(Exception):
                engine.destroy()
        forget()


def join(world: int, rank: int) -> None:
    """Stand as a rank among others that a fake process group stands for."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    stand_as(rank, world)


def _built(case: Case) -> Any:
    world, kind, tp, pp, layers, config = case
    mpu = None
    if kind in ("grid", "mpu"):
        topology = PipeModelDataParallelTopology(pp, tp, world // pp // tp)
    model: torch.nn.Module
    if kind in ("pipeline", "grid"):
        how = {"topology": topology} if kind == "grid" else {"num_stages": pp}
        model = PipelineModule(
            [torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)], partition_method="uniform",
            loss_fn=torch.nn.functional.mse_loss, **how,
        )  # fmt: skip
    else:
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    if kind == "mpu":
        mpu = PipelineParallelGrid(topology=topology, process_group=dist.group.WORLD)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, config=config, mpu=mpu
    )
    return engine


def forget() -> None:
    """Destroy all process groups, and DeepSpeed's memory of them and of earlier parameters."""
    dist.destroy_process_group()
    deepspeed.zero.Init.param_id = 0
    register = cast(Any, DeepSpeedZeRoOffload._register_deepspeed_module)
    (count,) = register.__defaults__
    count[0] = 0
    torch.nn.functional.linear = LINEAR
    deepspeed.comm.comm.cdb = None
    autotp.set_autotp_mode(training=False)
    groups: Any = vars(deepspeed.utils.groups)
    groups["mpu"] = None
    for name, value in groups.items():
        if name.startswith("_") and name.isupper() and not name.startswith("__"):
            groups[name] = {} if isinstance(value, dict) else None


def _optimizers() -> dict[str, Any]:
    """Return torch's AdamW under the names of DeepSpeed's own, which are compiled."""

    class DeepSpeedCPUAdam(torch.optim.AdamW):
        def __init__(self, groups: Any, lr: float, **_: Any) -> None:
            super().__init__(groups, lr)

    class FusedAdam(DeepSpeedCPUAdam):
        pass

    return {kind.__name__: kind for kind in (DeepSpeedCPUAdam, FusedAdam)}


def prepare() -> None:
    """Have nothing compiled or measured; DeepSpeed asks whether fp16 has fast kernels."""
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))
    accelerator = type(deepspeed.accelerator.get_accelerator())
    accelerator.is_fp16_supported = lambda _: True
    optimizers = _optimizers()
    zero_utils.ZERO_SUPPORTED_OPTIMIZERS.extend(optimizers.values())
    stand_ins = {"see_memory_usage": lambda *_, **__: None, **optimizers}
    for name, module in list(sys.modules.items()):
        for known in stand_ins.keys() & vars(module).keys() if "deepspeed" in name else ():
            setattr(module, known, stand_ins[known])
    gc.collect()
    gc.freeze()


class Numbers(torch.nn.Module):
    """Parameters of given sizes, all of which its sum depends on."""

    def __init__(self, sizes: Iterable[int]) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self) -> torch.Tensor:
        return torch.stack([part.sum() for part in self.parts]).sum()


def measure(world: int, config: dict[str, Any], sizes: list[int]) -> dict[str, int]:
    """Return the bytes of weights, of their gradients and of the optimizer."""
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
    kept = [p.grad for p in engine.module.parameters() if p.grad is not None]
    for name in ("averaged_gradients", "all_grad_tensors", "fp32_groups_gradients_flat"):
        found = getattr(engine.optimizer, name, None) or ()
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


if __name__ == "__main__":
    cases: list[Any] = json.load(sys.stdin)
    prepare()
    print(json.dumps([measure(*case) if len(case) == 3 else judge(case) for case in cases]))
