"""DeepSpeed's configuration of a round: the global batch stays, whatever the degrees."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scalai.converters.deepspeed.validity import stages_of
from scalai.core.errors import RefusedError
from scalai.patches.deepspeed.round_config import (
    RoundOrder,
    batches_of,
    config_of,
    rewritten,
    without_batches,
)
from scalai.patches.deepspeed.unsupported import refuse_unfit_stages

STATED = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}


def rewrite(config: dict[str, Any], order: RoundOrder) -> dict[str, Any]:
    return rewritten(config, order, batches_of(config, order))


@settings(deadline=None)
@given(st.integers(1, 96), st.integers(1, 8), st.integers(1, 12), st.integers(1, 12))
def test_the_global_batch_stays_and_micro_batches_do_not_grow(
    total: int, micro: int, first_dp: int, dp: int
) -> None:
    assume(total % first_dp == 0 and total % dp == 0)
    micro_stated = {"train_batch_size": total, "train_micro_batch_size_per_gpu": micro}
    for config in (micro_stated, {"train_batch_size": total}):
        first = batches_of(config, RoundOrder(1, 1, first_dp))
        usual = config.get("train_micro_batch_size_per_gpu", first.micro_batch_size)
        later = RoundOrder(1, 1, dp, None, total, first.micro_batch_size)
        found = rewrite(config, later)
        size, steps = found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]
        assert found["train_batch_size"] == size * steps * dp == total
        assert size <= usual
        if total // dp % usual == 0:
            assert size == usual


def test_another_batch_in_the_configuration_of_a_job_that_is_started_again_is_taken() -> None:
    later = RoundOrder(1, 1, 2, None, 48, 2)
    found = rewrite(STATED, later)
    assert (found["train_batch_size"], found["train_micro_batch_size_per_gpu"]) == (24, 4)


def test_where_only_micro_batches_are_stated_the_first_round_makes_the_global_batch() -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    assert rewrite(config, RoundOrder(1, 1, 4))["train_batch_size"] == 24
    later = rewrite(config, RoundOrder(1, 1, 3, None, 24, 2))
    assert (later["train_batch_size"], later["gradient_accumulation_steps"]) == (24, 4)


def test_a_request_for_a_micro_batch_wins() -> None:
    found = rewrite(STATED, RoundOrder(1, 1, 2, micro_batch_size=6))
    assert (found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]) == (6, 2)
    with pytest.raises(RefusedError, match="not a multiple"):
        rewrite(STATED, RoundOrder(1, 1, 2, micro_batch_size=5))


@pytest.mark.parametrize(
    ("config", "dp", "said"),
    [
        (STATED, 5, "dp=5 does not divide global_batch_size=24"),
        ({"gradient_accumulation_steps": 2}, 2, "states neither"),
        (
            {**STATED, "managed_gradient_accumulation": False}, 2,
            "managed_gradient_accumulation is false",
        ),
        ({**STATED, "sequence_parallel_size": 2}, 2, r"sequence_parallel_size = 2 \(Ulysses\)"),
        (
            {**STATED, "data_efficiency": {
                "data_sampling": {"curriculum_learning": {"enabled": True}}
            }},
            2, "curriculum_learning",
        ),
    ],
)  # fmt: skip
def test_what_cannot_keep_its_batch_is_refused(config: dict[str, Any], dp: int, said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        rewrite(config, RoundOrder(1, 1, dp))


def test_autotp_in_stage_3_states_no_global_batch() -> None:
    """DeepSpeed reads the configuration twice, with and without tensor-parallel ranks."""
    config = {**STATED, "tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3}}
    found = rewrite(config, RoundOrder(2, 1, 2))
    assert "train_batch_size" not in found
    each = found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"]
    assert each * 2 * 2 == 24
    assert rewrite(config, RoundOrder(2, 1, 2, has_mpu=True))["train_batch_size"] == 24


@pytest.mark.parametrize(("pp", "is_in_stages"), [(2, False), (1, True)])
def test_a_pipeline_with_sharded_gradients_or_autotp_is_refused(
    pp: int, is_in_stages: bool
) -> None:
    order = RoundOrder(1, pp, 2, is_in_stages=is_in_stages)
    with pytest.raises(RefusedError, match=r"pipelines .* know stages 0 and 1"):
        rewrite({**STATED, "zero_optimization": {"stage": 2}}, order)
    cut = RoundOrder(2, pp, 2, is_in_stages=is_in_stages)
    with pytest.raises(RefusedError, match="AutoTP takes all ranks for its own"):
        rewrite({**STATED, "tensor_parallel": {"autotp_size": 2}}, cut)


def test_true_of_old_is_stage_1() -> None:
    config = {**STATED, "zero_optimization": True}
    assert rewrite(config, RoundOrder(1, 1, 2))["zero_optimization"] is True
    assert rewrite(config, RoundOrder(1, 1, 2, zero_stage=3))["zero_optimization"] == {"stage": 3}


def test_stage_and_degrees_are_those_of_the_round_and_the_rest_stays() -> None:
    config = {
        **STATED,
        "zero_optimization": {"stage": 1, "contiguous_gradients": True},
        "tensor_parallel": {"autotp_size": 2, "tp_grain_size": 8},
        "scalai": {},
    }
    # DeepSpeed counts tensor-parallel ranks as replicas: a step has 12 samples.
    assert batches_of(config, RoundOrder(2, 1, 2)).global_batch_size == 12
    assert rewrite(config, RoundOrder(2, 1, 2))["train_batch_size"] == 24
    assert rewrite(config, RoundOrder(1, 1, 2))["train_batch_size"] == 12
    assert rewrite(config, RoundOrder(2, 1, 2, has_mpu=True))["train_batch_size"] == 24
    assert batches_of(config, RoundOrder(2, 1, 2, has_mpu=True)).global_batch_size == 24
    found = rewrite(config, RoundOrder(4, 1, 2, zero_stage=3))
    assert found["zero_optimization"] == {"stage": 3, "contiguous_gradients": True}
    assert found["tensor_parallel"] == {"autotp_size": 4, "tp_grain_size": 8}
    assert rewrite(config, RoundOrder(1, 1, 2))["tensor_parallel"]["autotp_size"] == 0
    assert config["zero_optimization"] == {"stage": 1, "contiguous_gradients": True}
    assert "zero_optimization" not in rewrite(STATED, RoundOrder(1, 1, 2))
    with pytest.raises(RefusedError, match="stages 0 and 1"):
        rewrite(config, RoundOrder(1, 2, 2, zero_stage=2))


def test_the_configuration_is_taken_from_wherever_deepspeed_takes_it(tmp_path: Any) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8}')
    named = Namespace(deepspeed_config=str(path))
    stated = {"train_batch_size": 8}
    for source in ((named, None, None), (None, str(path), None), (None, None, stated)):
        assert config_of(*source) == stated
    assert config_of(Namespace(), None, None) is None


def test_a_model_is_built_in_shards_on_any_number_of_ranks() -> None:
    stated = {**STATED, "gradient_accumulation_steps": 3, "bf16": {"enabled": True}}
    assert without_batches(stated) == {"train_micro_batch_size_per_gpu": 1, "bf16": stated["bf16"]}
    automatic = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2}
    assert without_batches(automatic) == automatic


FP16 = {"fp16": {"enabled": True}}


@pytest.mark.parametrize(
    ("configured", "by_world", "expected"),
    [
        ({}, {}, {0}),
        ({"zero_optimization": {"stage": 2}}, {}, {2}),
        ({"zero_optimization": True}, {}, {1}),
        ({"zero_optimization": {"stage": 2}}, {"4": 1}, {1, 2}),
        ({}, {"default": 1, "4": 3}, {1, 3}),
    ],
)
def test_the_table_and_the_configuration_say_which_stages_a_job_may_have(
    configured: dict[str, Any], by_world: dict[str, int], expected: set[int]
) -> None:
    assert stages_of(configured, by_world) == expected


@pytest.mark.parametrize("version", ["0.18.3", "0.19.8", "0.19.8+abc"])
@pytest.mark.parametrize("scale", [{}, {"loss_scale": 0}, {"loss_scale": 128}])
@pytest.mark.parametrize(("stages", "before"), [({2, 0}, None), ({2}, 0), ({0}, 2)])
def test_fp16_with_and_without_zero_is_refused(
    scale: dict[str, Any], version: str, stages: set[int], before: int | None
) -> None:
    config = {"fp16": {"enabled": True, **scale}}
    with pytest.raises(RefusedError, match=r"stages 0, 2 in one job.*Expected are stage 0 alone"):
        refuse_unfit_stages(config, frozenset(stages), before, version)


@pytest.mark.parametrize("version", ["0.17.6", "0.18.0", "0.18.2"])
def test_stage_2_is_refused_where_it_loses_gradients(version: str) -> None:
    with pytest.raises(RefusedError, match=rf"stage 2 with DeepSpeed {version}.*Use stage 1 or 3"):
        refuse_unfit_stages({}, frozenset({1, 2}), 1, version)


@pytest.mark.parametrize(
    ("config", "stages", "version"),
    [
        (FP16, {0}, "0.19.8"),
        (FP16, {1, 2, 3}, "0.19.8"),
        (FP16, {0, 1}, "0.18.2"),
        (FP16, {0, 3}, "0.16.9"),
        ({"fp16": {"enabled": True, "loss_scale": 1}}, {0, 1}, "0.19.8"),
        ({"fp16": {"enabled": False}}, {0, 1}, "0.19.8"),
        ({"bf16": {"enabled": True}}, {0, 1}, "0.19.8"),
        ({}, {0, 3}, "0.19.8"),
        ({}, {2}, "0.17.5"),
        ({}, {0, 1, 3}, "0.17.6"),
        ({}, {2}, "0.18.3"),
    ],
)
def test_what_goes_on_as_it_was_passes(
    config: dict[str, Any], stages: set[int], version: str
) -> None:
    refuse_unfit_stages(config, frozenset(stages), None, version)


def test_state_in_host_memory_is_stated_and_torch_updates_it_where_nothing_is_compiled() -> None:
    host = {"device": "cpu", "pin_memory": True}
    config = {**STATED, "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}
    order = RoundOrder(1, 1, 2, offload="optimizer")
    found = rewrite(config, order)
    assert found["zero_optimization"] == {"stage": 3, "offload_optimizer": host}
    assert found["optimizer"] == {"type": "AdamW"} and "zero_force_ds_cpu_optimizer" not in found
    both = rewrite(config, replace(order, offload="parameters"))["zero_optimization"]
    assert both == {"stage": 3, "offload_optimizer": host, "offload_param": host}
    torchs = rewrite(config, replace(order, has_cpu_adam=False))
    assert torchs["optimizer"]["params"] == {"torch_adam": True}
    own = rewrite(config, replace(order, has_own_optimizer=True))
    assert own["zero_force_ds_cpu_optimizer"] is False
    assert rewrite(config, RoundOrder(1, 1, 2))["zero_optimization"] == {"stage": 3}
