"""Facts about the live state of a DeepSpeed job, on its ranks."""

import json
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from scalai.core.errors import RefusedError
from scalai.patches.deepspeed.unsupported import refuse_unsupported
from support.training.deepspeed_jobs import Job
from support.training.jobs import BEFORE, SEED
from support.training.tiny_deepspeed import Training


def losses(rank: int, store: dist.Store, job: Job, is_listed: bool) -> Any:
    """Train a fresh job, whose state was listed before the first step or not."""
    training = Training(job, rank, store, SEED)
    if is_listed:
        training.state().slots()
    result = training.train(BEFORE)
    training.close()
    return result


def held_twice(rank: int, store: dist.Store, job: Job) -> bool:
    """List the state twice: the same tensors, in the same memory, also after training."""
    training = Training(job, rank, store, SEED)
    state = training.state()
    places = [(slot.tensor, slot.buffer.data_ptr(), slot.pieces) for slot in state.slots()]
    training.train(BEFORE)
    same = places == [(slot.tensor, slot.buffer.data_ptr(), slot.pieces) for slot in state.slots()]
    training.close()
    return same


def buffers(rank: int, store: dist.Store, job: Job) -> tuple[set[str], set[str]]:
    """Return the names of the buffers that this rank vouches for, and that it wants."""
    training = Training(job, rank, store, SEED)
    names = {f"param/{name}" for name, _ in training.engine.module.named_buffers()}
    slots = [slot for slot in training.state().slots() if slot.tensor.name in names]
    training.close()
    held = {slot.tensor.name for slot in slots if slot.is_held}
    return held, {slot.tensor.name for slot in slots if slot.is_wanted}


def rng_states(rank: int, store: dist.Store, job: Job) -> dict[str, Any]:
    """Continue the streams from their JSON; then begin new ones."""
    training = Training(job, rank, store, SEED)
    state = training.state()
    saved = json.loads(json.dumps(state.rank_state()))
    old = _draw()
    notes = [state.load_rank_state(saved, step=3)]
    is_continued = _draw() == old
    notes.append(state.load_rank_state({**saved, "degrees": {"dp": 8, "zero": 3}}, step=3))
    new = _draw()
    training.close()
    return {"is_continued": is_continued, "old": old, "new": new, "notes": notes}


def _draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def refused_scalars(rank: int, store: dist.Store, job: Job, fault: str) -> str:
    """Take or put scalars that do not fit; returns the message."""
    training = Training(job, rank, store, SEED)
    state, engine = training.state(), training.engine
    state.slots()
    scalars: Any = json.loads(json.dumps(state.scalars()))["deepspeed"]
    name = next(iter(scalars["steps"]))
    if fault == "steps":
        scalars["steps"][name] += 1
    elif fault == "groups":
        scalars["groups"]["of"][name] = "another"
    elif fault == "memory":
        engine.module.average = engine.module.average + 1
    elif fault == "degrees":
        scalars["fixed"] = {"sp": 2}
    fixed = scalars.pop("fixed", {"sp": 1})
    try:
        state.load_scalars({"deepspeed": scalars, "fixed_degrees": fixed})
        engine.micro_steps += fault == "accumulation"
        state.scalars()
    except RefusedError as error:
        return str(error)
    finally:
        training.close()
    return "not refused"


def refusal(rank: int, store: dist.Store, zero: dict[str, Any], values: dict[str, Any]) -> str:
    """Return why an engine with such a configuration is refused; empty: it is not."""
    engine = SimpleNamespace(
        _config=SimpleNamespace(zero_config=DeepSpeedZeroConfig(**zero)),
        has_moe_layers=False,
        optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.1),
        amp_enabled=lambda: False,
    )
    vars(engine).update(values)
    try:
        refuse_unsupported(engine)
    except RefusedError as error:
        return str(error)
    return ""


def refused_optimizer(rank: int, store: dist.Store, job: Job) -> str:
    """Return why the state of a job with another base optimizer is refused."""
    training = Training(job, rank, store, SEED)
    values = training.engine.optimizer.param_groups[0]["params"]
    training.engine.optimizer.optimizer = torch.optim.RMSprop(values)
    try:
        training.state()
    except RefusedError as error:
        return str(error)
    finally:
        training.close()
    return "not refused"
