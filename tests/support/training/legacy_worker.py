"""The ranks' side of a conversion of legacy ``torch`` checkpoints: save, load, train on.

What is called on which rank, and the trees, are those of ``save_checkpoint`` and
``load_checkpoint`` of Megatron-LM (megatron/training/checkpointing.py), which the megatron-core
wheel does not have; every state dict is the real model's and optimizer's own.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from scalai.patches.megatron.shapes import unwrap
from support.training.checkpoint_worker import Run, arguments_of, chunk_name, train_to_the_end
from support.training.jobs import AFTER, BEFORE, OTHER_SEED, SEED, Job
from support.training.tiny_gpt import Training


def train_save_train(rank: int, store: dist.Store, job: Job, directory: str) -> Run:
    """Train, save, train on without interruption."""
    training = Training(job, rank, store, SEED)
    training.train(BEFORE)
    if job.distributed and job.overlap:
        # As Megatron-LM before a save: what other ranks own is one step old here.
        for chunk in training.chunks:
            chunk.start_param_sync(force_sync=True)
    folder = _folder(job, directory)
    folder.mkdir(parents=True, exist_ok=True)
    if job.distributed:
        training.optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
    if parallel_state.get_expert_data_parallel_rank() == 0:
        tree = {
            "args": arguments_of(job),
            "checkpoint_version": 3.0,
            "iteration": AFTER.start,
            **{
                chunk_name(number, training): unwrap(chunk).state_dict_for_save_checkpoint()
                for number, chunk in enumerate(training.chunks)
            },
            "optimizer": training.optimizer.state_dict(),
            "opt_param_scheduler": training.scheduler.state_dict(),
            "rng_state": [_streams()],
            "num_floating_point_operations_so_far": 12345,
        }
        torch.save(tree, folder / "model_optim_rng.pt")
    dist.barrier()
    return train_to_the_end(training)


def load_train(rank: int, store: dist.Store, job: Job, directory: str) -> Run:
    """Build a fresh job of other weights, load a checkpoint as Megatron-LM does, train on."""
    training = Training(job, rank, store, OTHER_SEED)
    folder = _folder(job, directory)
    state = torch.load(folder / "model_optim_rng.pt", map_location="cpu", weights_only=False)
    assert state["iteration"] == AFTER.start
    assert state["args"].tensor_model_parallel_size == job.tp
    assert state["args"].pipeline_model_parallel_size == job.pp
    for number, chunk in enumerate(training.chunks):
        unwrap(chunk).load_state_dict(state[chunk_name(number, training)], strict=True)
    training.optimizer.load_state_dict(state["optimizer"])
    if job.distributed:
        training.optimizer.load_parameter_state(str(folder / "distrib_optim.pt"))
    training.scheduler.num_steps = 0  # a fresh one; it adds what it loads
    training.scheduler.load_state_dict(state["opt_param_scheduler"])
    streams = state["rng_state"][0]
    random.setstate(streams["random_rng_state"])
    np.random.set_state(streams["np_rng_state"])
    torch.set_rng_state(streams["torch_rng_state"])
    torch.cuda.set_rng_state(streams["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(streams["rng_tracker_states"])
    return train_to_the_end(training)


def _folder(job: Job, directory: str) -> Path:
    """Return the folder of this rank, as ``get_checkpoint_name``."""
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if job.pp > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if job.ep > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    return Path(directory, name)


def _streams() -> dict[str, Any]:
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
