"""Facts about the live state of a DeepSpeed job, on its ranks."""

import json
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from scalai.core.errors import RefusedError
from scalai.patches.deepspeed import masters
from scalai.patches.deepspeed.unsupported import refuse_unsupported
from support.training.deepspeed_jobs import Job
from support.training.live_checks import built


def buffers(rank: int, store: dist.Store, job: Job) -> tuple[set[str], set[str]]:
    """Return the names of the buffers that this rank vouches for, and that it wants."""
    with built("tiny_deepspeed", job, rank, store) as training:
        names = {f"param/{name}" for name, _ in training.engine.module.named_buffers()}
        slots = [slot for slot in training.state().slots() if slot.tensor.name in names]
        held = {slot.tensor.name for slot in slots if slot.is_held}
        return held, {slot.tensor.name for slot in slots if slot.is_wanted}


def refused_state(rank: int, store: dist.Store, job: Job, fault: str) -> str:
    """Take or put a state that does not fit; returns the message."""
    with built("tiny_deepspeed", job, rank, store) as training:
        engine = training.engine
        if fault == "optimizer":
            values = engine.optimizer.param_groups[0]["params"]
            engine.optimizer.optimizer = torch.optim.RMSprop(values)
        try:
            state = training.state()
            state.slots()
            scalars: Any = json.loads(json.dumps(state.scalars()))["deepspeed"]
            name = next(iter(scalars["steps"]))
            if fault == "steps":
                scalars["steps"][name] += 1
            elif fault == "groups":
                scalars["groups"]["of"][name] = "another"
            elif fault == "memory":
                engine.module.average = engine.module.average + 1
            elif fault == "master":
                masters_here = engine.optimizer.single_partition_of_fp32_groups
                masters_here[0] = masters_here[0].clone()
            fixed = {"sp": 2 if fault == "degrees" else 1}
            state.load_scalars({"deepspeed": scalars, "fixed_degrees": fixed})
            engine.micro_steps += fault == "accumulation"
            state.scalars()
        except RefusedError as error:
            return str(error)
        return "not refused"


def kept_without_cuts(rank: int, store: dist.Store, job: Job) -> bool:
    """Return whether the state of a step is kept, and has what ``scalars`` has, without a look at
    how parameters are cut."""
    with built("tiny_deepspeed", job, rank, store) as training, ExitStack() as stack:
        state = training.state()
        state.slots()
        training.train(range(1))
        expected = state.scalars()
        for name in ("offset_in", "partitioned"):
            stack.enter_context(mock.patch.object(masters, name, side_effect=AssertionError))
        kept, _ = state.keep()()
        return bool(kept == expected)


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
