"""The ZeRO stages of a job: what would fork is refused before it begins."""

from typing import Any

import pytest

from scalai.converters.deepspeed.validity import stages_of
from scalai.core.errors import RefusedError
from scalai.patches.deepspeed.unsupported import refuse_unfit_stages

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
@pytest.mark.parametrize("fp16", [{}, {"loss_scale": 0}, {"loss_scale": 128}])
def test_fp16_with_and_without_zero_is_refused(fp16: dict[str, Any], version: str) -> None:
    config = {"fp16": {"enabled": True, **fp16}}
    with pytest.raises(RefusedError, match=r"stages 0, 2 in one job.*Expected are stage 0 alone"):
        refuse_unfit_stages(config, frozenset({2, 0}), None, version)
    for before, stages in ((0, {2}), (2, {0})):
        with pytest.raises(RefusedError, match="stages 0, 2 in one job"):
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
