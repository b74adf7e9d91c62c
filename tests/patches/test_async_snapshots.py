"""What frameworks change between two updates, beside what is copied at a step's end: nothing. So a
snapshot whose copy begins behind the next backward pass is that of its step all the same."""

from typing import Any

import pytest

from support.training.deepspeed_jobs import Job as DeepSpeedJob
from support.training.jobs import Job
from support.training.worker_pool import WorkerPool

pytestmark = pytest.mark.fault

MEGATRON: dict[str, dict[str, Any]] = {
    "distributed-overlapped-bf16": {
        "world": 2, "distributed": True, "overlap": True, "precision": "bf16",
    },
    "experts-with-a-bias": {"world": 2, "experts": 4, "ep": 2, "has_expert_bias": True},
    "tp-and-pp-fp16": {"world": 4, "tp": 2, "pp": 2, "precision": "fp16"},
}  # fmt: skip
DEEPSPEED: dict[str, dict[str, Any]] = {
    "zero1-bf16": {"world": 2, "stage": 1, "precision": "bf16"},
    "zero2": {"world": 2, "stage": 2},
    "zero3-offloaded": {
        "world": 2, "stage": 3, "zero": {"offload_optimizer": {"device": "cpu"}},
        "config": {"zero_force_ds_cpu_optimizer": False},
    },
}  # fmt: skip


def check(pool: WorkerPool, job: Any) -> None:
    found = pool.run("async_worker:differing", [(pool.trainer, job)] * job.world)
    assert not any(found), found


@pytest.mark.parametrize("name", MEGATRON)
def test_what_is_copied_behind_a_backward_pass_of_megatron_is_of_its_step(
    pool: WorkerPool, name: str
) -> None:
    check(pool, Job(**MEGATRON[name]))


@pytest.mark.parametrize("name", DEEPSPEED)
def test_what_is_copied_behind_a_backward_pass_of_deepspeed_is_of_its_step(
    deepspeed_pool: WorkerPool, name: str
) -> None:
    check(deepspeed_pool, DeepSpeedJob(**DEEPSPEED[name]))
