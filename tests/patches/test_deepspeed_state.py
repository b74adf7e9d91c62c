"""The live state of a DeepSpeed job: listing it disturbs nothing, what cannot move is refused."""

from typing import Any

import pytest

from support.training.deepspeed_jobs import Job
from support.training.worker_pool import WorkerPool

MOVED = [
    Job(world=2, stage=1, zero={"round_robin_gradients": True}),
    Job(world=2, stage=3, zero={"sub_group_size": 300, "stage3_param_persistence_threshold": 60}),
    Job(world=2, stage=0, precision="bf16"),
]
OFFLOAD = {"device": "cpu"}


@pytest.mark.parametrize("job", MOVED, ids=["zero1", "zero3", "bf16-zero0"])
def test_listing_the_state_changes_nothing_and_it_stays_where_it_is(
    deepspeed_pool: WorkerPool, job: Job
) -> None:
    plain, listed = (
        deepspeed_pool.run("deepspeed_state_checks:losses", [(job, is_listed)] * job.world)
        for is_listed in (False, True)
    )
    assert plain == listed
    held = deepspeed_pool.run("deepspeed_state_checks:held_twice", [(job,)] * job.world)
    assert held == [True, True]


def test_buffers_are_those_of_the_first_replica_and_all_get_them(
    deepspeed_pool: WorkerPool,
) -> None:
    first, second = deepspeed_pool.run("deepspeed_state_checks:buffers", [(Job(world=2),)] * 2)
    names = {f"param/{name}" for name in ("calls", "average", "is_seen", "order")}
    assert (first, second) == ((names, names), (set(), names))


def test_random_streams_go_on_from_their_json_or_begin_anew_alike_on_replicas(
    deepspeed_pool: WorkerPool,
) -> None:
    job = Job(world=2, stage=1)
    first, second = deepspeed_pool.run("deepspeed_state_checks:rng_states", [(job,)] * 2)
    assert first["is_continued"] and second["is_continued"]
    assert first["new"] == second["new"] != first["old"]
    assert first["notes"] == [
        "rng=continued",
        "rng=reseeded seed=1234 step=3 degrees_before=dp8,zero3 degrees=dp2",
    ]


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("steps", "one number of steps"),
        ("groups", "in several before"),
        ("accumulation", "1 of 2 micro-batches"),
        ("memory", "param/average"),
        ("degrees", "sp=2"),
    ],
)
def test_scalars_that_do_not_fit_are_refused_by_name(
    deepspeed_pool: WorkerPool, fault: str, named: str
) -> None:
    job = Job(stage=1, config={"gradient_accumulation_steps": 2})
    (message,) = deepspeed_pool.run("deepspeed_state_checks:refused_scalars", [(job, fault)])
    assert named in message


@pytest.mark.parametrize(
    ("zero", "values", "named"),
    [
        ({"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, {}, "nvme"),
        ({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}, {}, "offload_param"),
        ({"stage": 3, "offload_optimizer": {**OFFLOAD, "ratio": 0.5}}, {}, "ratio 0.5"),
        ({"stage": 3, "zero_hpz_partition_size": 2}, {}, "zero_hpz_partition_size 2"),
        ({"stage": 3, "zero_quantized_weights": True}, {}, "zero_quantized_weights"),
        ({}, {"has_moe_layers": True}, "experts"),
        ({}, {"optimizer": None}, "no optimizer"),
        ({"stage": 3, "offload_optimizer": OFFLOAD, "offload_param": OFFLOAD}, {}, ""),
        ({"stage": 1, "round_robin_gradients": True}, {}, ""),
    ],
)
def test_what_cannot_move_is_refused_at_the_start(
    deepspeed_pool: WorkerPool, zero: dict[str, Any], values: dict[str, Any], named: str
) -> None:
    (message,) = deepspeed_pool.run("deepspeed_state_checks:refusal", [(zero, values)])
    assert named in message and bool(message) == bool(named)


def test_an_optimizer_whose_first_step_is_not_known_is_refused(deepspeed_pool: WorkerPool) -> None:
    (message,) = deepspeed_pool.run("deepspeed_state_checks:refused_optimizer", [(Job(stage=1),)])
    assert "RMSprop" in message and "Adam" in message
