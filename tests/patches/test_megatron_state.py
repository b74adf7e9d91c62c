"""The live state of a megatron job: listing it disturbs nothing, and all of it comes back."""

import pytest

from support.training.jobs import Job
from support.training.worker_pool import WorkerPool

SPLIT = Job(world=2, distributed=True, overlap=True)


@pytest.mark.parametrize("job", [Job(world=2), SPLIT], ids=["whole", "split"])
def test_listing_the_state_of_a_fresh_job_does_not_change_its_training(
    pool: WorkerPool, job: Job
) -> None:
    listed = pool.run("state_checks:losses", [(job, True)] * job.world)
    assert listed == pool.run("state_checks:losses", [(job, False)] * job.world)


@pytest.mark.parametrize("job", [Job(world=2), SPLIT], ids=["whole", "split"])
def test_slots_stay_where_they_are_while_the_job_trains(pool: WorkerPool, job: Job) -> None:
    assert pool.run("state_checks:held_twice", [(job,)] * job.world) == [True, True]


def test_random_streams_go_on_from_their_json_or_begin_anew_alike_on_all_ranks(
    pool: WorkerPool,
) -> None:
    first, second = pool.run("state_checks:rng_states", [(Job(world=2, tp=2),)] * 2)
    assert first["is_continued"] and second["is_continued"]
    assert first["new"]["shared"] != first["old"]["shared"]
    # Megatron needs it so: equal streams outside of tensor-parallel regions, unequal ones inside.
    assert first["new"]["shared"] == second["new"]["shared"]
    assert first["new"]["own"] != second["new"]["own"]


def test_parameter_groups_of_another_optimizer_are_refused(pool: WorkerPool) -> None:
    (message,) = pool.run("state_checks:another_schedule", [()])
    assert "wd_mult" in message and "flags" in message


def test_steps_are_told_by_ranks_that_own_parameters(pool: WorkerPool) -> None:
    ((silent, owner),) = pool.run("state_checks:owner_of_a_group", [()])
    assert silent == {}
    assert owner == {"lr": 0.5, "step": 7}
