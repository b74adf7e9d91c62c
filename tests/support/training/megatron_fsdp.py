"""Megatron-FSDP of megatron-core on the CPU: its wrapper around a model, and its checkpoints.

The tree is that of Megatron-LM's ``--ckpt-format fsdp_dtensor``: ``generate_state_dict`` and
``preprocess_fsdp_dtensor_state_dict`` of megatron/training/checkpointing.py, which the
megatron-core wheel does not have.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
    preprocess_state_dict_for_uneven_dtensor,
)
from megatron.core.transformer import fsdp_dtensor_checkpoint as split
from megatron.core.transformer.module import Float16Module, MegatronModule
from torch.distributed.device_mesh import DeviceMesh

from support.training.checkpoint_worker import Run, arguments_of, train_to_the_end
from support.training.jobs import AFTER, BEFORE, OTHER_SEED, SEED, Job
from support.training.tiny_gpt import Training

_REAL = torch.device


class _OfDevices(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _REAL)


class _Device(metaclass=_OfDevices):
    """``torch.device``, for which every CUDA device is the CPU."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        text = str(args[0]) if args else ""
        return _REAL("cpu") if text.startswith("cuda") else _REAL(*args, **kwargs)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let Megatron-FSDP build itself: it names CUDA devices by text and in its meshes."""
    original = DeviceMesh.from_group

    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
        return original(group, "cpu", *args, **kwargs)

    with (
        patch.object(torch, "device", _Device),
        patch.object(DeviceMesh, "from_group", from_group),
        patch.object(mcore_fsdp_adapter, "TELinear", type("TELinear", (), {}), create=True),
    ):
        yield


class _Float32Module(Float16Module):
    """``Float16Module`` without a cast: Megatron-FSDP's loader expects the names under it."""

    def __init__(self, config: Any, module: Any) -> None:
        MegatronModule.__init__(self, config)
        self.fp16 = self.bf16 = False
        self.vp_size, self.vp_stage = None, None
        self.pg_collection = module.pg_collection
        self.add_module("module", module)
        self.float16_convertor = lambda value: value


def wrapped(job: Job, config: Any, model: Any) -> Any:
    """Return a model under Megatron-FSDP."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        gradient_reduce_div_fusion=False,
    )
    with on_cpu():
        kind = _Float32Module if job.precision == "fp32" else Float16Module
        made = FullyShardedDataParallel(config, ddp, kind(config, model))
    for group in made.param_and_grad_buffer.parameter_groups:
        if group.main_grad_buffer.data_parallel_group.size() == 1:
            # The buffer of gradients is one with the bucket to reduce then (0.16.1), and would be
            # added to itself.
            group.main_grad_buffer.is_data_distributed = True
    return made


def train_save_train(rank: int, store: dist.Store, job: Job, directory: str) -> Run:
    """Train, save, train on without interruption."""
    training = Training(job, rank, store, SEED)
    training.train(BEFORE)
    state = tree(training, is_loading=False)
    dcp.save(prepared(training, state), checkpoint_id=directory)
    return train_to_the_end(training)


def load_train(rank: int, store: dist.Store, job: Job, directory: str) -> Run:
    """Build a fresh job of other weights, load as Megatron-LM does, train on."""
    training = Training(job, rank, store, OTHER_SEED)
    state = tree(training, is_loading=True)
    raw = {"model": dict(state["model"]), "optimizer": dict(state["optimizer"])}
    state = prepared(training, state)
    dcp.load(state, checkpoint_id=directory)
    state.update(raw)
    training.chunks[0].load_state_dict(state["model"], strict=True)
    training.optimizer.load_state_dict(state["optimizer"])
    training.scheduler.num_steps = 0
    training.scheduler.load_state_dict(state["opt_param_scheduler"])
    assert state["iteration"] == AFTER.start
    return train_to_the_end(training)


def tree(training: Training, *, is_loading: bool) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    arguments = arguments_of(training.job)
    arguments.ckpt_format = "fsdp_dtensor"
    arguments.bf16 = training.job.precision == "bf16"
    arguments.swiglu = training.job.is_gated
    arguments.num_experts = training.job.experts
    arguments.use_megatron_fsdp = True
    model = training.chunks[0].module.state_dict_for_save_checkpoint()
    if is_loading:
        training.optimizer._init_optimizer_states_with_dummy_values()
    _fill(training.optimizer.optimizer)
    optimizer = training.optimizer.sharded_state_dict({}, metadata=metadata)
    return {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": 1 if is_loading else AFTER.start,
        "model": model,
        "optimizer": optimizer,
        "opt_param_scheduler": training.scheduler.state_dict(),
        "num_floating_point_operations_so_far": 0,
    }


def _fill(adam: torch.optim.Optimizer) -> None:
    """Give every rank a state for each parameter, in one order, as Transformer Engine's Adam has
    it: torch's has none where a rank has no part of a parameter. All ranks gather their parts."""
    parameters = [p for group in adam.param_groups for p in group["params"]]
    known = {p: adam.state.pop(p) for p in parameters if p in adam.state}
    step = next(iter(known.values()))["step"]
    for p in parameters:
        empty = {"step": step, "exp_avg": p.detach().clone(), "exp_avg_sq": p.detach().clone()}
        adam.state[p] = {**empty, **known.get(p, {})}


def prepared(training: Training, state: dict[str, Any]) -> dict[str, Any]:
    """As ``preprocess_fsdp_dtensor_state_dict`` of Megatron-LM."""
    state = dict(state)
    split.handle_fp8_extra_state_case(state["model"])
    with on_cpu():
        if training.job.is_gated:
            state["model"], state["optimizer"] = split.handle_swiglu_in_state_dict(
                training.chunks[0].module, state["model"], state["optimizer"]
            )
        if training.job.experts:
            state["model"] = split.handle_experts_in_state_dict(
                state["model"], training.job.experts
            )
        preprocess_state_dict_for_uneven_dtensor(state)
    return state
