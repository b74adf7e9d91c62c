"""What a step of a real model computes tells whether another layout computes the same function; a
further pass draws no random numbers, and nothing remembers it.

That healthy changes compute the same is checked with each case of ``test_resize``.
"""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from scalai.core.job.function_proof import StepComparison, compare, merged
from scalai.patches.continuation import continue_host_rng, host_rng_state
from scalai.patches.step_proof import RepeatedBatches, bare_pass
from support.training.jobs import Job
from support.training.megatron_layouts import (
    AGAIN,
    BUCKETS,
    DP2,
    DP4,
    EP2,
    MOE,
    PP2,
    SPLIT,
    TP2,
    TP2DP2,
    VPP2,
    Fields,
)
from support.training.resize_case import Result, resize
from support.training.rounds import Player, Seen
from support.training.worker_pool import WorkerPool


class Model(torch.nn.Module):
    """Counts its passes, and draws by a module, by a rate that it has copied, and by its
    configuration's; ``noise`` is nobody's that is known."""

    passes: torch.Tensor

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_dropout=0.5, moe_input_jitter_eps=0.1)
        self.layer = torch.nn.Linear(4, 4)
        self.drop = torch.nn.Dropout(0.5)
        self.dropout_rate = 0.5
        self.noise = noise
        self.dropped = torch.zeros(3), [torch.ones(3)]
        self.drop_table = torch.ones(3)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        x = torch.nn.functional.dropout(self.drop(self.layer(x)), self.dropout_rate)
        x = torch.nn.functional.dropout(x, self.config.hidden_dropout)
        if self.config.moe_input_jitter_eps is not None:
            x = x * torch.rand(x.shape)
        return x + torch.rand(x.shape) if self.noise else x


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_what_draws_is_off_and_what_still_draws_is_told_and_undone(noise: float) -> None:
    model, x = Model(noise), torch.ones(2, 4)
    before = host_rng_state()()
    table: dict[str, Any] = {"seen": [1], "scale": torch.ones(2)}
    scale = table["scale"]
    with bare_pass([model], lambda: host_rng_state()(), continue_host_rng, [table]) as drawn:
        first, second = model(x), model(x)
        table["seen"].append(2)
        table["new"] = 3
        scale.mul_(2)
    assert bool(drawn.found) is bool(noise) is not torch.equal(first, second)
    assert host_rng_state()() == before and model.passes == 0
    assert table["seen"] == [1] and "new" not in table
    assert table["scale"] is scale and scale.tolist() == [1, 1]
    assert (model.drop.p, model.dropout_rate, model.config.hidden_dropout) == (0.5, 0.5, 0.5)
    assert model.config.moe_input_jitter_eps == 0.1


def test_a_pass_that_fails_leaves_no_trace_either() -> None:
    model = Model(0.1)
    before = host_rng_state()()
    with pytest.raises(RuntimeError):
        with bare_pass([model], lambda: host_rng_state()(), continue_host_rng, []):
            model(torch.ones(2, 4))
            model(torch.ones(2, 5))
    assert host_rng_state()() == before and model.passes == 0 and model.drop.p == 0.5


def test_micro_batches_are_read_once_and_what_a_pass_does_to_them_is_its_own() -> None:
    read = []

    def source() -> Any:
        for number in range(9):
            read.append(number)
            yield {"number": torch.tensor(number)}

    batches = RepeatedBatches(source())
    batches.prime()
    assert read == [0]
    for _ in range(2):
        for expected in range(3):
            assert next(batches).pop("number").add_(100) == 100 + expected
        batches.rewind(is_copying=True)
    for _ in range(2):  # a framework that makes a step again
        batches.rewind(is_copying=False)
        assert [int(next(batches)["number"]) for _ in range(3)] == [0, 1, 2]
    assert read == [0, 1, 2]


# ------------------------------------------------------------------ Megatron

TP2SP: Fields = {**TP2, "sequence_parallel": True}
GLOBAL: Fields = {**MOE, "router": "global_aux_loss", "balance": 0.1}


def proof_of(result: Result, *, is_bare: bool = False) -> StepComparison:
    one, other = result.uninterrupted, result.resized
    proof = compare(one.bare, other.bare) if is_bare else compare(one.first, other.first)
    print(proof.text)
    return proof


@pytest.mark.parametrize(
    ("model", "before", "after", "is_same"),
    [
        pytest.param(GLOBAL, DP2, PP2, False, id="global-balancing-loss"),
        pytest.param({**MOE, "capacity": 1.0}, TP2SP, DP2, False, id="capacity"),
        pytest.param({**MOE, "router": "sinkhorn", "top_k": 1}, TP2SP, DP2, False, id="sinkhorn"),
        pytest.param({**MOE, "balance": 0.1}, TP2SP, DP2, True, id="loss-of-each-micro-batch"),
    ],
)
def test_a_model_that_is_a_function_of_its_layout_is_found_by_its_first_step(
    pool: WorkerPool, tmp_path: Path, model: Fields, before: Fields, after: Fields, is_same: bool
) -> None:
    job = {**model, "is_lawless": not is_same}
    result = resize(pool, Job(**{**job, **before}), Job(**{**job, **after}), tmp_path)
    assert proof_of(result).is_same is is_same


@pytest.mark.parametrize(
    ("model", "before", "after", "is_same"),
    [
        pytest.param(BUCKETS, DP2, TP2, True, id="dp2-to-tp2"),
        pytest.param({}, PP2, VPP2, True, id="pp2-to-virtual-stages"),
        pytest.param({**MOE, "jitter": 0.1, "balance": 0.1}, EP2, {**EP2, **DP4}, True,
                     id="experts-with-jitter"),
        pytest.param(GLOBAL, DP2, PP2, False, id="global-balancing-loss"),
    ],
)  # fmt: skip
def test_with_dropout_a_further_pass_without_it_tells_whether_the_function_is_the_same(
    pool: WorkerPool, tmp_path: Path, model: Fields, before: Fields, after: Fields, is_same: bool
) -> None:
    job = {**model, "dropout": 0.1, "proves": True, "is_lawless": True}
    result = resize(pool, Job(**{**job, **before}), Job(**{**job, **after}), tmp_path)
    assert proof_of(result, is_bare=True).is_same is is_same
    assert proof_of(result).is_same is False, "dropout"


@pytest.mark.parametrize(
    "job",
    [
        {**TP2DP2, **BUCKETS},
        {**VPP2},
        {**EP2, **MOE, "jitter": 0.1, "balance": 0.1, "has_expert_bias": True},
        {**DP2, **GLOBAL, "predicted": 1},
        {**DP2, "precision": "fp16", "loss_scale": 2.0**20, **SPLIT},
        pytest.param({**DP2, "precision": "bf16", **AGAIN}, marks=pytest.mark.campaign),
    ],
)
def test_the_further_pass_leaves_no_trace(pool: WorkerPool, tmp_path: Path, job: Fields) -> None:
    given = {"dropout": 0.1, "is_lawless": True, **job}
    result = resize(pool, Job(**given), Job(**given, proves=True), tmp_path)
    alone, proven = result.uninterrupted, result.resized
    assert result.randomness == "rng=continued" and proven.bare is not None
    assert not proven.bare.obstacle
    for what in ("losses", "norms", "skipped", "ends"):
        assert getattr(proven, what) == getattr(alone, what)


# ------------------------------------------------------------------ DeepSpeed


def change_of(made: list[list[Seen]]) -> tuple[StepComparison, Any, Any]:
    """Return the proof of a change, and the numbers on both sides."""
    old, new = made
    assert [note["step"] for note in old[0].notes] == [1, 2, 3], "the script sees no step behind it"
    before, after = merged(old[0].numbers[-1], old[1].numbers[-1]), new[0].numbers[0]
    proof = compare(before, after)
    print(proof.text)
    return proof, before, after


@pytest.mark.parametrize(
    ("stage", "dropout", "is_by_rank", "is_same"),
    [
        (0, 0.0, False, True), (1, 0.0, False, True), (3, 0.0, False, True),
        (1, 0.0, True, False), (1, 0.1, False, None),
    ],
)  # fmt: skip
def test_an_engine_makes_the_step_behind_its_stop_without_its_update_and_leaves(
    play: Player, stage: int, dropout: float, is_by_rank: bool, is_same: bool | None
) -> None:
    config = {"zero_optimization": {"stage": stage}}
    given = {"epochs": 2, "config": config, "dropout": dropout, "is_by_rank": is_by_rank}
    proof, before, _ = change_of(
        play("trains", [(2, 3), (1, 5)], settings={"proves": True}, **given)
    )
    assert before is not None and before.norm is not None and before.loss is not None
    assert proof.is_same is is_same
    assert before.framework.startswith("deepspeed ")
    assert not dropout or "draws random numbers" in proof.text


@pytest.mark.parametrize(
    ("dropout", "is_by_rank", "is_same"),
    [(0.0, False, True), (0.1, False, True), (0.1, True, False)],
)
def test_a_pipeline_with_dropout_makes_a_further_pass_without_it_on_both_sides(
    play: Player, dropout: float, is_by_rank: bool, is_same: bool
) -> None:
    settings = {"proves": True, "compares": True, "stages": [2, 1]}
    given = {"steps": 8, "dropout": dropout, "is_by_rank": is_by_rank}
    made = play("trains_in_stages", [(2, 3), (1, 5)], settings=settings, **given)
    proof, _, after = change_of(made)
    assert proof.is_same is is_same
    assert after.is_random is bool(dropout)


def test_the_further_pass_of_a_pipeline_leaves_no_trace(play: Player) -> None:
    seen = []
    for compares in (True, False):
        settings = {"compares": compares, "stages": [2, 2]}
        made = play(
            "trains_in_stages", [(2, 3), (2, None)], at=str(compares), settings=settings,
            steps=8, dropout=0.1,
        )  # fmt: skip
        assert not (compares and made[1][0].numbers[0].obstacle)
        seen.append([each.notes for ranks in made for each in ranks])
    assert seen[0] == seen[1]


def test_kept_streams_of_random_numbers_are_those_of_their_step() -> None:
    kept, before = host_rng_state(), host_rng_state()()
    drawn = random.random(), np.random.rand(), torch.rand(1)
    continue_host_rng(kept())
    assert kept() == before == host_rng_state()()
    assert drawn == (random.random(), np.random.rand(), torch.rand(1))
