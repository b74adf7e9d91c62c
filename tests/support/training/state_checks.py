"""Facts about the live state of one job, on its ranks."""

import json
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from scalai.core.errors import RefusedError
from scalai.patches.megatron.scalars import put_scalars, take_scalars
from scalai.patches.megatron.state import MegatronState
from support.training.jobs import BEFORE, SEED, Job
from support.training.tiny_gpt import Training


def losses(rank: int, store: dist.Store, job: Job, is_listed: bool) -> Any:
    """Train a fresh job, whose state was listed before the first step or not."""
    training = Training(job, rank, store, SEED)
    if is_listed:
        MegatronState(training.chunks, training.optimizer, training.scheduler).slots()
    result = training.train(BEFORE)
    training.close()
    return result


def held_twice(rank: int, store: dist.Store, job: Job) -> bool:
    """List the state twice: the same tensors, in the same memory, also after training."""
    training = Training(job, rank, store, SEED)
    state = MegatronState(training.chunks, training.optimizer, training.scheduler)
    places = [(slot.tensor, slot.buffer.data_ptr(), slot.pieces) for slot in state.slots()]
    training.train(BEFORE)
    same = places == [(slot.tensor, slot.buffer.data_ptr(), slot.pieces) for slot in state.slots()]
    training.close()
    return same


def rng_states(rank: int, store: dist.Store, job: Job) -> dict[str, Any]:
    """Continue the streams from their JSON; then begin new ones."""
    training = Training(job, rank, store, SEED)
    state = MegatronState(training.chunks, training.optimizer, seed=SEED)
    saved = json.loads(json.dumps(state.rank_state()))
    old = _draw()
    state.load_rank_state(saved, step=3)
    is_continued = _draw() == old
    state.load_rank_state(None, step=3)
    new = _draw()
    training.close()
    return {"is_continued": is_continued, "old": old, "new": new}


def another_schedule(rank: int, store: dist.Store) -> str:
    """Scalars of a job with other parameter groups are refused; returns the message."""
    leaf = SimpleNamespace(is_stub_optimizer=False, optimizer=SimpleNamespace(param_groups=[]))
    leaf.optimizer.param_groups = [_group(wd_mult=1.0, params=[1], lr=0.5, step=7)]
    scalars = take_scalars(leaf, None)
    leaf.optimizer.param_groups = [_group(wd_mult=0.0, params=[1], lr=0.5, step=7)]
    try:
        put_scalars(scalars, leaf, None)
    except RefusedError as error:
        return str(error)
    return "not refused"


def owner_of_a_group(rank: int, store: dist.Store) -> Any:
    """A rank without parameters of a group does not count its steps, and does not say any."""
    leaf = SimpleNamespace(is_stub_optimizer=False, optimizer=SimpleNamespace(param_groups=[]))
    leaf.optimizer.param_groups = [_group(wd_mult=1.0, params=[], lr=0.5, step=3)]
    (silent,) = take_scalars(leaf, None)["param_groups"].values()
    leaf.optimizer.param_groups = [_group(wd_mult=1.0, params=[1], lr=0.5, step=7)]
    (owner,) = take_scalars(leaf, None)["param_groups"].values()
    return silent, owner


def _group(**values: Any) -> dict[str, Any]:
    return {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, **values}


def _draw() -> dict[str, Any]:
    """Draw from Python's, numpy's and torch's streams, and from this tensor-parallel rank's own."""
    with get_cuda_rng_tracker().fork():
        own = torch.rand(1).item()
    return {"shared": (random.random(), np.random.rand(), torch.rand(1).item()), "own": own}
