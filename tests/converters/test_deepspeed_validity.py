"""What DeepSpeed refuses in a stage is refused before a job comes to have it, by release."""

from typing import Any

import pytest

from scalai.converters.deepspeed.validity import refuse_invalid
from scalai.core.errors import RefusedError

NEWEST, OLDEST = (0, 19, 8), (0, 16, 0)
AUTOTP = {"tensor_parallel": {"autotp_size": 2}}
CPU = {"device": "cpu"}


def zero(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": settings}


@pytest.mark.parametrize(
    ("config", "stages", "release", "why"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, {0}, (), "both enabled"),
        (zero(offload_optimizer={**CPU, "ratio": 0.5}), {1, 3}, (), r"in stage 3 alone \(.*1\)"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, {0, 1}, (), "without ZeRO gradients"),
        ({"gradient_allreduce_op": "SUM"}, {3}, NEWEST, "averaged in stage 3"),
        (zero(compute_grad_norm=False), {3}, (), "stages 1 and 2 alone"),
        (zero(compute_grad_norm=False), {1}, (), "gradient_clipping 1.0 needs"),
        (AUTOTP, {3}, (0, 18, 9), "AutoTP up to stage 2"),
        ({"optimizer": {"type": "SGD"}}, {0, 1}, (), "zero_allow_untested_optimizer"),
        (
            {"fp16": {"fp16_master_weights_and_grads": True}, **zero(offload_optimizer=CPU)},
            {1}, (0, 17, 6), "stage 2 alone",
        ),
    ],
)  # fmt: skip
def test_it_is_refused_with_the_stage_and_the_reason(
    config: dict[str, Any], stages: set[int], release: tuple[int, ...], why: str
) -> None:
    with pytest.raises(RefusedError, match=why):
        refuse_invalid(config, stages, release)


def test_an_optimizer_that_the_script_overrules_is_not_looked_at() -> None:
    config = {"optimizer": {"type": "SGD"}, "fp16": {"enabled": True}, "bf16": {"enabled": True}}
    with pytest.raises(RefusedError, match="both enabled") as refused:
        refuse_invalid(config, {1}, NEWEST, has_own_optimizer=True)
    assert "SGD" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "stages", "release"),
    [
        ({}, {0, 1, 2, 3}, ()),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, {0, 3}, NEWEST),
        ({"bf16": {"enabled": "auto"}, "data_types": {"grad_accum_dtype": "bf16"}}, {0}, NEWEST),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, {0}, OLDEST),
        (AUTOTP, {3}, NEWEST),
        (AUTOTP, {3}, ()),
        (AUTOTP, {2}, OLDEST),
        ({"gradient_allreduce_op": "sum"}, {3}, OLDEST),
        ({"optimizer": {"type": "SGD"}, "zero_allow_untested_optimizer": True}, {1}, NEWEST),
        (zero(compute_grad_norm=False) | {"gradient_clipping": "auto"}, {1}, NEWEST),
    ],
)
def test_what_a_release_takes_or_what_is_not_known_passes(
    config: dict[str, Any], stages: set[int], release: tuple[int, ...]
) -> None:
    refuse_invalid(config, stages, release)
