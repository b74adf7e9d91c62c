from argparse import Namespace

import pytest

from scalai.core.errors import LayoutError
from scalai.patches.continuation import choose_source, describe_source
from scalai.patches.megatron.training_hooks import checkpoint_step, put_progress, take_progress


def arguments(**values: object) -> Namespace:
    counters = {
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
        "padded_vocab_size": 128,
    }
    return Namespace(**{**counters, **values})


@pytest.mark.parametrize(
    ("generation", "checkpoint", "source"),
    [
        (None, None, "nothing"),
        (None, 100, "checkpoint"),
        (0, None, "generation"),
        (100, 99, "generation"),
        (100, 100, "generation"),
        (100, 101, "checkpoint"),
        (0, 0, "generation"),
    ],
)
def test_the_newer_state_wins_and_the_generation_at_the_same_step(
    generation: int | None, checkpoint: int | None, source: str
) -> None:
    assert choose_source(generation, checkpoint) == source


def test_both_states_are_named_in_the_log() -> None:
    line = describe_source("generation", 120, 100, "/checkpoints")
    assert "step 120" in line
    assert "iteration 100" in line
    assert "/checkpoints" in line


@pytest.mark.parametrize(
    ("tracker", "ckpt_step", "is_finetune", "step"),
    [
        (None, None, False, None),
        (None, 50, False, None),
        ("100", None, False, 100),
        ("100\n", None, False, 100),
        ("100", 50, False, 50),
        ("release", None, False, 0),
        ("100", None, True, 0),
    ],
)
def test_the_iteration_of_a_checkpoint_is_what_megatron_would_count_from(
    tracker: str | None, ckpt_step: int | None, is_finetune: bool, step: int | None
) -> None:
    assert checkpoint_step(tracker, ckpt_step, is_finetune) == step


def test_counters_survive_a_change_of_the_workers() -> None:
    before = arguments(
        consumed_train_samples=96, consumed_valid_samples=24, skipped_train_samples=8
    )
    saved = take_progress(before, iteration=12, flops=3.5e9).to_json()
    after = arguments()
    put_progress(after, saved)
    assert (after.iteration, after.num_floating_point_operations_so_far) == (12, 3.5e9)
    assert take_progress(after, 12, 3.5e9).to_json() == saved


def test_another_padding_of_the_vocabulary_is_refused_with_the_way_out() -> None:
    saved = take_progress(arguments(padded_vocab_size=192), iteration=1, flops=0).to_json()
    with pytest.raises(LayoutError, match=r"192 rows.*128.*make-vocab-size-divisible-by"):
        put_progress(arguments(), saved)
