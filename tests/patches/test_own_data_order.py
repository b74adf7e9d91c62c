"""A DeepSpeed script that draws in Scalai's own order (``"data_order": "own"``)."""

from pathlib import Path

import numpy as np
import pytest

import scalai
from support.training.rounds import play
from support.training.worker_pool import WorkerPool

SAMPLES, SEED, BATCH = 23, 5, 6
"""Passes end within global batches."""
OWN = {"data_order": "own"}


@pytest.mark.campaign
def test_each_step_draws_its_places_of_the_order_whatever_the_dp(
    rounds_pool: WorkerPool, tmp_path: Path
) -> None:
    rounds = [(2, 3), (1, 8), (2, None)]
    made = play(
        rounds_pool, tmp_path, "draws_in_order", rounds, settings=OWN,
        steps=12, samples=SAMPLES, later=SAMPLES,
    )  # fmt: skip
    assert [ranks[0].ending for ranks in made] == ["left", "left", "finished"]
    order, steps = scalai.Shuffled(SAMPLES, SEED), list[int]()
    for ranks in made:
        for of_ranks in zip(*(seen.notes for seen in ranks), strict=True):
            step = of_ranks[0]["step"]
            places = np.arange(BATCH * (step - 1), BATCH * step)
            drawn = [sample for each in of_ranks for sample in each["drawn"]]
            assert drawn == order.samples_at(places).tolist()
            steps.append(step)
    assert steps == list(range(1, 13))


@pytest.mark.campaign
def test_data_that_changed_between_rounds_is_refused_before_a_step(
    rounds_pool: WorkerPool, tmp_path: Path
) -> None:
    made = play(
        rounds_pool, tmp_path, "draws_in_order", [(2, 2), (1, None)], settings=OWN,
        steps=4, samples=SAMPLES, later=SAMPLES + 1,
    )  # fmt: skip
    assert made[0][0].ending == "left" and not made[1][0].notes
    assert made[1][0].ending.startswith("RefusedError: data set 'samples' is another one")
    assert "size=24 (it was 23)" in made[1][0].ending
