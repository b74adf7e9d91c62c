"""Facts about the live state of one job, on its ranks."""

import json
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from scalai.core.errors import RefusedError
from scalai.patches.megatron.megatron_state import MegatronState
from scalai.patches.megatron.optimizer_state import asked_of, put_scalars, take_scalars
from scalai.patches.megatron.shapes import shards_of, unwrap
from scalai.runtime.live import collection_of, held_rows
from scalai.runtime.live_fingerprints import live_fingerprints
from support.training.jobs import BEFORE, OTHER_SEED, SEED, Job
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


def replicas(rank: int, store: dist.Store, job: Job, drifting: str = "") -> Any:
    """Train a job; return what this rank holds then, and its fingerprints.

    Args:
        drifting: The second rank alone changes parameters of such names.
    """
    training = Training(job, rank, store, SEED)
    slots = training.state().slots()
    training.train(BEFORE)
    for slot in slots:
        if drifting and drifting in slot.tensor.name and rank == 1:
            slot.buffer.add_(1e-6)
    rows = [row for row in held_rows(slots) if not row[0].is_volatile]
    found = collection_of(rows), live_fingerprints(rows).tolist()
    training.close()
    return found


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
    training = Training(Job(), rank, store, SEED)
    scalars = training.state().scalars()
    first, second = training.optimizer.param_groups
    first["params"].append(second["params"].pop())
    try:
        training.state().load_scalars(scalars)
    except RefusedError as error:
        return str(error)
    finally:
        training.close()
    return "not refused"


def owner_of_a_group(rank: int, store: dist.Store) -> Any:
    """A rank without parameters of a group does not count its steps, and does not say any."""
    training = Training(Job(), rank, store, SEED)
    names = training.state()._names
    first, second = training.optimizer.param_groups
    first["step"], second["step"] = 3, 7
    first["params"].clear()
    said = take_scalars(training.optimizer, None, names, None)["groups"]
    first["step"] = 4  # it takes nothing of the other, which is of another kind of weight decay
    put_scalars(
        {"groups": said, "scheduler": None, "grad_scaler": None},
        training.optimizer, None, names, None,
    )  # fmt: skip
    training.close()
    return [values["step"] for values in said["values"].values()], first["wd_mult"]


def adapter(
    rank: int, store: dist.Store, tp: int, is_described: bool, is_duplicated: bool = False
) -> str:
    """List a model with an adapter of a script's own that tensor parallelism cuts; its module says
    so to megatron's checkpoints, or not. Returns the refusal.

    Args:
        is_duplicated: The module is marked as Transformer Engine marks one that nothing cuts.
    """
    training = Training(Job(world=2, tp=tp), rank, store, SEED)
    lora: Any = torch.nn.Module()
    lora.b = torch.nn.Parameter(torch.zeros(8, 2))
    lora.b.tensor_model_parallel, lora.b.partition_dim = True, 0
    if is_duplicated:
        lora.parallel_mode = None
    if is_described:
        lora.sharded_state_dict = lambda prefix="", sharded_offsets=(), metadata=None: (
            make_sharded_tensors_for_checkpoint({"b": lora.b}, prefix, {"b": 0}, sharded_offsets)
        )
    unwrap(training.chunks[0]).decoder.layers[1].self_attention.lora = lora
    try:
        shards_of(training.chunks)
    except RefusedError as error:
        return str(error)
    finally:
        training.close()
    return "taken"


Setting = dict[str, float | list[float]]


def moved_groups(
    rank: int, store: dist.Store, first: Job, set_: Setting, flags: Setting, wins: str
) -> Any:
    """Move the scalars of a job at step 3 into a new one, and train both on by a step.

    Args:
        set_: What a checkpoint or the script has set in the first job's groups.
        flags: What the flags of the new job say otherwise, by attribute of its scheduler.
        wins: Which of Megatron-LM's two flags the new job has; empty: neither.

    Returns:
        The groups' values of both jobs before and after the step; or the refusal.
    """
    then = Training(first, rank, store, SEED)
    asked = asked_of(then.optimizer, then.scheduler)
    for group in then.optimizer.param_groups:
        group.update(set_)
    for key in set_.keys() & vars(then.scheduler).keys():
        setattr(then.scheduler, key, set_[key])
    state = MegatronState(then.chunks, then.optimizer, then.scheduler, asked=asked)
    then.train(BEFORE)
    scalars, found = json.loads(json.dumps(state.scalars())), [_hyperparameters(then)]
    then.train(range(3, 4))
    found.append(_hyperparameters(then))
    then.close()
    now = Training(first, rank, store, OTHER_SEED)
    for group in now.optimizer.param_groups:
        group.update({key: value for key, value in flags.items() if key in group})
    vars(now.scheduler).update(flags)
    now.scheduler.use_checkpoint_opt_param_scheduler = wins == "use_checkpoint"
    now.scheduler.override_opt_param_scheduler = wins == "override"
    asked = asked_of(now.optimizer, now.scheduler)
    state = MegatronState(now.chunks, now.optimizer, now.scheduler, asked=asked)
    try:
        state.load_scalars(scalars)
        found.append(_hyperparameters(now))
        now.train(range(3, 4))
        found.append(_hyperparameters(now))
    except RefusedError as error:
        return str(error)
    finally:
        now.close()
    return found


def moved_rates(rank: int, store: dist.Store) -> Any:
    """Move the scalars of a job with two rates and a schedule of its own that keeps ``num_steps``;
    return the rates of both jobs behind one more step."""
    trainings, schedules = [], []
    found = None
    for number in range(2):
        training = Training(Job(), rank, store, SEED)
        optimizer, schedule = training.optimizer, Halving(training.optimizer, 8)
        for group, rate in zip(optimizer.param_groups, (1.0, 0.5), strict=True):
            group.update(lr=rate, initial_lr=rate, wd_mult=1.0)  # alike, but for their rates
        state = MegatronState(training.chunks, optimizer, schedule)
        if number == 0:
            schedule.step()
            scalars = json.loads(json.dumps(state.scalars()))
        else:
            state.load_scalars(scalars)
        schedule.step()
        schedules.append([group["lr"] for group in optimizer.param_groups])
        training.close()
        trainings.append(schedule.num_steps)
        found = [*zip(trainings, schedules, strict=True)]
    return found


class Halving:
    """A schedule of a script's own, whose length is named as a count of Megatron-LM's is."""

    def __init__(self, optimizer: Any, num_steps: int) -> None:
        self.optimizer, self.num_steps, self.done = optimizer, num_steps, 0

    def step(self) -> None:
        self.done += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 1 - self.done / self.num_steps

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def _hyperparameters(training: Training) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in training.optimizer.param_groups
    ]


def _draw() -> dict[str, Any]:
    """Draw from Python's, numpy's and torch's streams, and from this tensor-parallel rank's own."""
    with get_cuda_rng_tracker().fork():
        own = torch.rand(1).item()
    return {"shared": (random.random(), np.random.rand(), torch.rand(1).item()), "own": own}
