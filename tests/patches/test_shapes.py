"""Pieces of a parameter are what megatron's own checkpoints would cut out of it."""

import pytest

from support.training.worker_pool import WorkerPool

ALONE = [()]
"""No arguments, one rank."""


def test_a_gated_projection_is_two_boxes_of_one_tensor(pool: WorkerPool) -> None:
    (compared,) = pool.run("factory_checks:gated", ALONE)
    name = "decoder.layers.2.mlp.linear_fc1.weight"
    assert compared == [f"{name} [12, 4] [3, 0]", f"{name} [12, 4] [9, 0]"]


def test_a_mamba_projection_is_a_part_of_four_tensors(pool: WorkerPool) -> None:
    (compared,) = pool.run("factory_checks:mamba", ALONE)
    assert [line.split()[0].rpartition(".")[2] for line in compared] == ["z", "x", "B", "dt"]


def test_a_factory_that_transposes_and_copies_is_followed(pool: WorkerPool) -> None:
    (compared,) = pool.run("factory_checks:transposed", ALONE)
    assert len(compared) == 2


def test_a_factory_that_changes_values_is_refused_by_name(pool: WorkerPool) -> None:
    (message,) = pool.run("factory_checks:averaging", ALONE)
    assert "linear_fc1.weight" in message and "slice" in message


def test_names_do_not_depend_on_how_megatron_counts_layers(pool: WorkerPool) -> None:
    (names,) = pool.run("factory_checks:names", ALONE)
    assert names == [
        "decoder.layers.3.mlp.linear_fc1.weight",
        "decoder.layers.3.mlp.linear_fc1.weight",
        "decoder.layers.3.mlp.experts.experts.1.linear_fc1.weight",
        "decoder.layers.3.mlp.experts.experts.1.linear_fc1.weight",
    ]


@pytest.mark.fault
def test_a_parameter_that_ranks_have_cut_and_that_is_said_to_be_whole_is_refused_by_name(
    pool: WorkerPool,
) -> None:
    """One rank's part would be kept for all."""
    for message in pool.run("state_checks:adapter", [(2, False)] * 2):
        assert "decoder.layers.1.self_attention.lora.b [8, 2]" in message and "axis 0" in message
    assert pool.run("state_checks:adapter", [(2, True)] * 2) == ["taken"] * 2
    assert pool.run("state_checks:adapter", [(1, False)] * 2) == ["taken"] * 2


def test_a_weight_that_transformer_engine_duplicates_and_marks_as_cut_is_taken(
    pool: WorkerPool,
) -> None:
    """So are the down projections of latent attention, up to Megatron-core 0.16."""
    assert pool.run("state_checks:adapter", [(2, False, True)] * 2) == ["taken"] * 2
