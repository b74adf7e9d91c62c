"""The ranks' side of a conversion: save with megatron-core's own checkpointing, load and train on.

The trees are those of Megatron-LM's ``generate_state_dict`` and ``load_checkpoint``
(megatron/training/checkpointing.py), which the megatron-core wheel does not have.
"""

import argparse
import io
import json
import multiprocessing
import queue
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject, tensor_aware_state_dict
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

from scalai.patches.megatron.shapes import unwrap
from support.training.jobs import AFTER, BEFORE, OTHER_SEED, SEED, Job
from support.training.tiny_gpt import SEVERAL_BUCKETS, Training

# The writer's results would come through a spawned manager, which imports the main module again.
for called in ("_get_write_results_queue", "get_write_results_queue"):  # as it is from 0.17 on
    if hasattr(filesystem_async, called):
        setattr(filesystem_async, called, lambda *args, **kwargs: queue.Queue())

if not hasattr(np, "product"):
    np.product = np.prod  # type: ignore[attr-defined]  # megatron-core 0.15 and numpy 2

Run = tuple[list[dict[int, float]], float, list[int]]
"""Losses of the steps behind the save by sample, the last learning rate, skipped steps."""


def train_save_train(
    rank: int,
    store: dist.Store,
    job: Job,
    directory: str,
    sharding: str,
    has_file: bool = True,
    local: tuple[str, str] | None = None,
) -> Run:
    """Train, save, train on without interruption.

    It is a fully parallel save, Megatron's default. ``has_file``: what ranks have in common is in
    ``common.pt``; else among the shards, as megatron-core 0.19 and later have it. ``local``: also
    save local files, by this algorithm, below this directory.
    """
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
    process = multiprocessing.current_process()
    process.daemon = False
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy("torch_dist"), group
    )
    common = {
        "opt_param_scheduler": training.scheduler.state_dict(),
        "iteration": AFTER.start,
        "checkpoint_version": 3.0,
        "args": arguments_of(job),
    }
    if local is not None:
        tree = {**_sharded(training, dict(metadata), is_loading=False), **common}
        _save_local(tree, rank, *local)
    state = {**_sharded(training, dict(metadata), is_loading=False), **common}
    if not has_file:
        state = _with_common_object(state, metadata, rank)
    try:
        dist_checkpointing.save(
            state, directory, strategy, content_metadata=metadata if has_file else None
        )
    finally:
        process.daemon = True
    if not has_file and rank == 0 and Path(directory, "common.pt").exists():
        Path(directory, "common.pt").unlink()
        backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        Path(directory, "metadata.json").write_text(json.dumps(backend))
    return train_to_the_end(training)


def load_train(rank: int, store: dist.Store, job: Job, directory: str) -> Run:
    """Build a fresh job of other weights, load a checkpoint as Megatron-LM does, train on."""
    training = Training(job, rank, store, OTHER_SEED)
    if not hasattr(dist_checkpointing.serialization, "_legacy_common_state_exists"):
        _write_common_file(Path(directory))
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


def _save_local(tree: dict[str, Any], rank: int, algorithm: str, directory: str) -> None:
    """Save a rank's file as ``LocalCheckpointManager`` of nvidia-resiliency-ext does. That need not
    be installed: no name of it is in the file."""
    vars(tensor_aware_state_dict)["HAVE_NVRX"] = True
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state, _ = tensor_aware_state_dict.MCoreTensorAwareStateDict.from_state_dict(
        tree, algo=algorithm, parallelization_group=group
    )
    state.copy_tensors_to_cpu()
    path = Path(directory, str(rank), f"iter_{AFTER.start:07d}_{rank}_local.pt")
    path.parent.mkdir(parents=True)
    torch.save(state, path)


def _with_common_object(state: dict[str, Any], metadata: Any, rank: int) -> dict[str, Any]:
    """Put all that is not sharded into one object, as ``save`` of core_v0.19.0 does."""
    sharded, common = save_preprocess({**state, "content_metadata": metadata}, False)
    sharded["common_state"] = ShardedObject("common_state", common, (1,), (0,), replica_id=rank)
    return dict(sharded)


def _write_common_file(directory: Path) -> None:
    """Let a release before 0.19 load what is in its successors' form: take the object out of the
    shards as ``load_common_state_dict`` of core_v0.19.0 does."""
    if (directory / "common.pt").exists() or dist.get_rank():
        dist.barrier()
        return
    key = "common_state/shard_0_1"
    loaded: dict[str, Any] = {key: io.BytesIO()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    torch.save(loaded[key][0], directory / "common.pt")
    dist.barrier()


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
        optimizer=job.optimizer,
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
