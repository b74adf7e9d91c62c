"""The ranks' side of a conversion: save with megatron-core's own checkpointing, load and train on.

The trees are those of Megatron-LM's ``generate_state_dict`` and ``load_checkpoint``
(megatron/training/checkpointing.py), which the megatron-core wheel does not have.
"""

import argparse
import multiprocessing
import queue
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from jobs import AFTER, BEFORE, OTHER_SEED, SEED, Job
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from tiny_gpt import SEVERAL_BUCKETS, Training

from scalai.patches.megatron.shapes import unwrap

# The writer's results would come through a spawned manager, which imports the main module again.
filesystem_async._get_write_results_queue = lambda *args, **kwargs: queue.Queue()

if not hasattr(np, "product"):
    np.product = np.prod  # type: ignore[attr-defined]  # megatron-core 0.15 and numpy 2

Run = tuple[list[dict[int, float]], float, list[int]]
"""Losses of the steps behind the save by sample, the last learning rate, skipped steps."""


def train_save_train(rank: int, store: dist.Store, job: Job, directory: str, sharding: str) -> Run:
    """Train, save, train on without interruption."""
    training = Training(job, rank, store, SEED)
    training.train(BEFORE)
    if job.distributed and job.overlap:
        # As Megatron-LM before a save: what other ranks own is one step old here.
        for chunk in training.chunks:
            chunk.start_param_sync(force_sync=True)
    metadata = {
        "distrib_optim_sharding_type": sharding,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    Path(directory).mkdir(parents=True, exist_ok=True)
    # The writer forks; a daemon, as the pool's workers are, may have no children.
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False
    try:
        dist_checkpointing.save(
            {
                **_sharded(training, metadata, is_loading=False),
                "opt_param_scheduler": training.scheduler.state_dict(),
                "iteration": AFTER.start,
                "checkpoint_version": 3.0,
                "args": arguments_of(job),
            },
            directory,
            content_metadata=metadata,
        )
    finally:
        process._config["daemon"] = True
    return train_to_the_end(training)


def load_train(rank: int, store: dist.Store, job: Job, directory: str) -> Run:
    """Build a fresh job of other weights, load a checkpoint as Megatron-LM does, train on."""
    training = Training(job, rank, store, OTHER_SEED)
    metadata = dist_checkpointing.load_content_metadata(directory)
    tree = _sharded(training, metadata, is_loading=True)
    state = dist_checkpointing.load(tree, directory)
    for number, chunk in enumerate(training.chunks):
        unwrap(chunk).load_state_dict(state[chunk_name(number, training)])
    training.optimizer.load_state_dict(state["optimizer"])
    training.scheduler.num_steps = 0  # a fresh one; it adds what it loads
    training.scheduler.load_state_dict(state["opt_param_scheduler"])
    assert state["iteration"] == AFTER.start
    return train_to_the_end(training)


def _sharded(training: Training, metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    models = {
        chunk_name(number, training): unwrap(chunk).sharded_state_dict(metadata=metadata)
        for number, chunk in enumerate(training.chunks)
    }
    optimizer = training.optimizer.sharded_state_dict(
        models["model"] if len(models) == 1 else models, is_loading=is_loading, metadata=metadata
    )
    return {**models, "optimizer": optimizer}


def chunk_name(number: int, training: Training) -> str:
    return "model" if len(training.chunks) == 1 else f"model{number}"


def arguments_of(job: Job) -> argparse.Namespace:
    """Return the arguments of Megatron-LM that a conversion looks at."""
    return argparse.Namespace(
        tensor_model_parallel_size=job.tp,
        pipeline_model_parallel_size=job.pp,
        virtual_pipeline_model_parallel_size=job.vpp,
        expert_model_parallel_size=job.ep,
        data_parallel_size=job.world // (job.tp * job.pp),
        world_size=job.world,
        consumed_train_samples=AFTER.start * job.global_batch_size,
        padded_vocab_size=job.padded_vocabulary,
        hidden_size=job.hidden,
        num_layers=job.layers,
        num_attention_heads=job.heads,
        group_query_attention=job.query_groups is not None,
        num_query_groups=job.query_groups or 1,
        seed=SEED,
        transformer_impl="local",
        distributed_backend="gloo",
        untie_embeddings_and_output_weights=not job.is_tied,
        accumulate_allreduce_grads_in_fp32=True,
        overlap_grad_reduce=job.overlap,
        ddp_bucket_size=SEVERAL_BUCKETS if job.overlap else None,
    )


def train_to_the_end(training: Training) -> Run:
    losses = training.train(AFTER)
    answer = losses, training.learning_rate(), training.skipped
    training.close()
    return answer
