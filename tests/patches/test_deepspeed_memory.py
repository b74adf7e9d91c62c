"""What the planner holds a rank of a DeepSpeed job to keep is what DeepSpeed keeps, to the byte."""

import json
import subprocess
import sys
from typing import Any

import pytest

from scalai.converters.deepspeed.config import stage_of
from scalai.converters.deepspeed.validity import workload_of
from scalai.core.degrees.degrees import Degrees
from scalai.core.errors import RefusedError
from scalai.core.planner.columns import Layout, columns_of
from scalai.core.planner.devices import device_named
from scalai.core.planner.step_memory import StepMemory, step_memory
from support.model_shapes import gpt

SHAPE = gpt(2, 32, 4, 64, 32)
PARTS = 8
"""Parameters of one size, so that none lies on two ranks."""
PRECISIONS: list[dict[str, Any]] = [
    {},
    {"bf16": {"enabled": True}},
    {"fp16": {"enabled": True, "loss_scale": 1}},
    {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
]
BUCKET = 1024


def config_of(world: int, stage: int, precision: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_batch_size": 4 * world, "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 0.001}},
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": BUCKET, "stage3_param_persistence_threshold": 0,
        },
        **precision,
    }  # fmt: skip


def estimate(world: int, config: dict[str, Any]) -> StepMemory:
    work = workload_of(config, SHAPE, 4 * world)
    layout = Layout(Degrees(1, 1, world), 2, "none", stage_of(config))
    return step_memory(columns_of([(work, device_named("a100"), layout)]))


@pytest.mark.turns
def test_weights_gradients_and_optimizer_are_those_of_an_engine_in_every_stage() -> None:
    pytest.importorskip("deepspeed")
    total = SHAPE.total_parameters
    assert total % (4 * PARTS) == 0
    cases = [
        (world, config_of(world, stage, precision), [total // PARTS] * PARTS)
        for world in (1, 2, 4)
        for precision in PRECISIONS
        for stage in range(4)
        if stage or "data_types" not in precision
    ]
    done = subprocess.run(
        [sys.executable, "-m", "support.training.deepspeed_bytes"], input=json.dumps(cases),
        capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    measured = json.loads(done.stdout.splitlines()[-1])
    for (world, config, _), found in zip(cases, measured, strict=True):
        mine = estimate(world, config)
        expected = {name: float(getattr(mine, name)[0]) for name in found}
        assert found == expected, (world, config)


def test_buckets_and_what_updates_the_masters_are_counted() -> None:
    bf16 = {"bf16": {"enabled": True}}
    none, one = (estimate(4, config_of(4, stage, bf16)).buffers[0] for stage in (0, 1))
    total = SHAPE.total_parameters
    assert none == pytest.approx(4 * total)
    assert one == pytest.approx(4 * total / 4 + 2 * BUCKET)


def test_a_precision_that_only_the_start_knows_is_not_guessed() -> None:
    with pytest.raises(RefusedError, match="the precision is not known"):
        workload_of({"bf16": {"enabled": "auto"}}, SHAPE, 8)


@pytest.mark.parametrize("part", ["offload_optimizer", "offload_param"])
def test_an_offloaded_state_is_not_modelled(part: str) -> None:
    config = {"zero_optimization": {"stage": 3, part: {"device": "cpu"}}}
    with pytest.raises(RefusedError, match="offloads a part of the state"):
        workload_of(config, SHAPE, 8)
