"""The live state of a megatron job: listing it disturbs nothing, and all of it comes back."""

import pytest

from scalai.core.tensors.fingerprint import differing_replicas
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
    assert "in several before" in message and "'wd_mult': 0.0" in message


def test_steps_are_told_by_ranks_that_own_parameters(pool: WorkerPool) -> None:
    ((steps, _),) = pool.run("state_checks:owner_of_a_group", [()])
    assert steps == [7]


REPLICATED = [
    Job(world=2),
    Job(world=2, tp=2, sequence_parallel=True),
    Job(world=2, pp=2),
    Job(world=4, tp=2, precision="bf16", distributed=True),
    Job(world=4, tp=2, sequence_parallel=True, experts=4, ep=2),
]


@pytest.mark.parametrize("job", REPLICATED, ids=["dp", "tp", "tied-pp", "tp-dp-split", "experts"])
def test_what_ranks_hold_alike_is_equal_bit_by_bit(pool: WorkerPool, job: Job) -> None:
    """Replicas of data and tensor parallelism, and tied weights of stages: a healthy job is never
    taken for one whose replicas drift."""
    held = dict(enumerate(pool.run("state_checks:replicas", [(job,)] * job.world)))
    collections = {rank: collection for rank, (collection, _) in held.items()}
    assert differing_replicas(collections, {rank: of for rank, (_, of) in held.items()}) == ""


def test_replicas_that_drift_are_named(pool: WorkerPool) -> None:
    job = Job(world=2, tp=2)
    name = "param/decoder.layers.1.self_attention.linear_qkv.layer_norm_bias"
    held = dict(enumerate(pool.run("state_checks:replicas", [(job, name)] * 2)))
    collections = {rank: collection for rank, (collection, _) in held.items()}
    found = differing_replicas(collections, {rank: of for rank, (_, of) in held.items()})
    assert found == f"'{name}' on ranks [0, 1]"


LOADED = {"max_lr": 1e-3, "min_lr": 1e-4, "start_wd": 0.2, "end_wd": 0.4}
"""What a checkpoint said, whatever the flags."""
SET = {"betas": (0.9, 0.99), "eps": 1e-6}
"""What a script has set."""


@pytest.mark.fault
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("wins", ["", "use_checkpoint", "override"])
def test_groups_go_on_with_every_value_that_a_checkpoint_or_the_script_gave_them(
    pool: WorkerPool, wins: str, distributed: bool
) -> None:
    job = Job(distributed=distributed)
    (found,) = pool.run("state_checks:moved_groups", [(job, {**LOADED, **SET}, {}, wins)])
    before, after, moved, moved_after = found
    assert moved == before and moved_after == after
    assert all(values["max_lr"] == 1e-3 and values["lr"] < 1e-3 for values in moved)
    assert max(values["weight_decay"] for values in moved) > 0.2


FLAGS = {"max_lr": 5e-2, "lr_decay_steps": 160}
"""What a person has changed before a restart."""


@pytest.mark.fault
def test_flags_that_a_person_has_changed_are_refused_by_name_where_nothing_says_whether_they_count(
    pool: WorkerPool,
) -> None:
    (message,) = pool.run("state_checks:moved_groups", [(Job(), SET, FLAGS, "")])
    for text in ("max_lr 0.05", "0.01", "lr_decay_steps 160", "--override-opt_param-scheduler"):
        assert text in message


@pytest.mark.fault
def test_flags_that_a_person_has_changed_count_where_they_override(pool: WorkerPool) -> None:
    (found,) = pool.run("state_checks:moved_groups", [(Job(), SET, FLAGS, "override")])
    before, _, moved, _ = found
    for then, now in zip(before, moved, strict=True):
        assert now["max_lr"] == 5e-2 and now["lr"] > 4 * then["lr"]
        assert now["betas"] == (0.9, 0.99) and now["weight_decay"] == then["weight_decay"]


def test_flags_that_a_person_has_changed_do_not_count_where_the_state_is_used(
    pool: WorkerPool,
) -> None:
    (found,) = pool.run("state_checks:moved_groups", [(Job(), SET, FLAGS, "use_checkpoint")])
    before, after, moved, moved_after = found
    assert moved == before and moved_after == after


def test_groups_that_say_the_same_of_themselves_keep_their_own_rates_under_a_schedule_of_ones_own(
    pool: WorkerPool,
) -> None:
    (((length, rates), (its, moved)),) = pool.run("state_checks:moved_rates", [()])
    assert (its, moved) == (length, rates) and rates[0] == 2 * rates[1] > 0
