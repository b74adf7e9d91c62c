"""What megatron-core saves and what live state holds have the shape of the model that was built."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.checkpoint import PARAM, Checkpoint
from scalai.converters.layouts import open_checkpoint
from scalai.converters.megatron.modules import is_trained
from scalai.converters.megatron.stored_model import read_model
from scalai.store.host import HostStore
from support.training.jobs import Job
from support.training.megatron_layouts import GATED, MOE, SPLIT, TP2
from support.training.resharded import FULL, WHOLE, save
from support.training.resize_case import train_and_snapshot
from support.training.worker_pool import WorkerPool


def with_heads(checkpoint: Checkpoint, job: Job) -> Checkpoint:
    """Return the checkpoint with the arguments of a script that builds this model."""
    arguments = {
        **(checkpoint.values.arguments or {}), "num_attention_heads": job.heads,
        "moe_router_topk": 2, "seq_length": job.sequence,
    }  # fmt: skip
    return replace(checkpoint, values=replace(checkpoint.values, arguments=arguments))


def check(checkpoint: Checkpoint, job: Job) -> None:
    shape = read_model(with_heads(checkpoint, job), None, None).shape
    assert (shape.layers, shape.hidden, shape.heads) == (job.layers, job.hidden, job.heads)
    assert (shape.kv_groups, shape.seq) == (job.query_groups or job.heads, job.sequence)
    assert (shape.is_gated, shape.is_tied) == (job.is_gated, job.is_tied)
    assert (shape.experts, shape.vocab) == (job.experts or 0, job.padded_vocabulary)
    sizes = {
        tensor.name: math.prod(tensor.shape) for tensor in checkpoint.placed.collection.tensors
        if tensor.name.startswith(f"{PARAM}/") and is_trained(tensor.name)
    }  # fmt: skip
    beside = sum(size for name, size in sizes.items() if "q_layernorm" in name or "k_" in name)
    assert shape.total_parameters == sum(sizes.values()) - beside


@pytest.mark.parametrize(
    ("model", "sharding"),
    [
        pytest.param({}, WHOLE, id="gpt"),
        pytest.param(
            {**GATED, "is_rotary": True, "is_tied": False, "query_groups": 2}, WHOLE, id="llama"
        ),
        pytest.param({"has_qk_norm": True, "is_rotary": True}, WHOLE, id="norms of heads"),
        pytest.param({**MOE, **SPLIT, "expert_layers": (0, 1)}, FULL, id="experts"),
    ],
)
def test_a_checkpoint_of_megatron_core(
    pool: WorkerPool, tmp_path: Path, model: dict[str, Any], sharding: str
) -> None:
    job = Job(**{**TP2, "sequence_parallel": True, **model})
    save(pool, job, tmp_path / "saved", sharding)
    check(open_checkpoint(tmp_path / "saved"), job)


def test_a_generation_of_a_live_job(pool: WorkerPool, tmp_path: Path) -> None:
    job = Job(**{**GATED, **TP2})
    with HostStore("case", "here", tmp_path / "store") as store:
        train_and_snapshot(pool, job, store)
        check(open_checkpoint(store.generation_directory(1)), job)
