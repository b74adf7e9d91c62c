"""DeepSpeed's configuration: found among a script's arguments, read and refused as by DeepSpeed."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.deepspeed.config import (
    SUMS,
    StatedBatch,
    autotp_size,
    find_config,
    refuse_fixed,
    stage_of,
    stated_stages,
)
from scalai.converters.deepspeed.validity import refuse_invalid
from scalai.core.errors import RefusedError, UsageError

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(content: Any, name: str = "ds.json") -> str:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write_file


@pytest.mark.parametrize(
    "flags",
    [
        ["--deepspeed", "--deepspeed_config", "{}"],
        ["--deepspeed_config={}", "--local_rank", "0"],
        ["--deepspeed", "{}"],
        ["--deepspeed={}", "--fp16"],
        ["--cfg", "{}"],
        ["train", "{}"],
    ],
)
def test_a_block_is_found_wherever_the_file_is_named(flags: list[str], write: Write) -> None:
    path = write({"train_batch_size": 8, "scalai": {"degrees": {"4": "tp2"}}})
    found = find_config([flag.format(path) for flag in flags])
    assert found is not None and found.block == {"degrees": {"4": "tp2"}}
    assert found.name == path


@pytest.mark.fault
def test_without_a_block_only_deepspeeds_flags_name_a_configuration(write: Write) -> None:
    path = write({"train_batch_size": 8})
    found = find_config(["--deepspeed_config", path])
    assert found is not None and found.block is None
    assert find_config(["--model_config", path]) is None
    assert find_config(["--model_config", write("[not json", "other.json")]) is None
    assert find_config(["--deepspeed", "missing.json"]) is None
    with pytest.raises(UsageError, match=r"--deepspeed_config missing\.json: there is no file"):
        find_config(["--deepspeed", "--deepspeed_config", "missing.json"])


def test_base64_and_comments_are_read_as_deepspeed_reads_them(write: Write) -> None:
    pytest.importorskip("hjson")
    content = '{\n  // a comment\n  "train_batch_size": 8,\n  "scalai": {}\n}'
    packed = base64.urlsafe_b64encode(content.encode()).decode()
    for source in (write(content), packed):
        found = find_config(["--deepspeed_config", source])
        assert found is not None and found.block == {}


def test_two_blocks_and_a_block_that_is_none_are_refused(write: Write) -> None:
    one, two = write({"scalai": {}}), write({"scalai": {}}, "two.json")
    with pytest.raises(UsageError, match="both have"):
        find_config(["--deepspeed_config", one, "--other", two])
    found = find_config(["--deepspeed_config", write({"scalai": True})])
    assert found is not None
    with pytest.raises(UsageError, match="not an object"):
        _ = found.block


@pytest.mark.parametrize(
    ("config", "dp", "resolved"),
    [
        ({"train_batch_size": 12}, 4, (12, 3)),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 3}, 4, (12, 1)),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 1}, 4, (12, 1)),
        ({"train_micro_batch_size_per_gpu": 2}, 4, (8, 2)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 4, (24, 2)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2}, 3, (6, 2)),
        ({"gradient_accumulation_steps": 3}, 4, None),
    ],
)
def test_batches_are_resolved_as_deepspeed_does(
    config: dict[str, Any], dp: int, resolved: tuple[int, int] | None
) -> None:
    assert StatedBatch.of(config).resolved(dp) == resolved


def test_a_size_that_is_none_is_named() -> None:
    with pytest.raises(UsageError, match="train_batch_size = '12'"):
        StatedBatch.of({"train_batch_size": "12"})


@pytest.mark.parametrize(
    ("read", "wrong"),
    [
        (stage_of, {"zero_optimization": "auto"}),
        (stage_of, {"zero_optimization": {"stage": 4}}),
        (autotp_size, {"tensor_parallel": {"autotp_size": "auto"}}),
        (autotp_size, {"tensor_parallel": "auto"}),
    ],
)
def test_a_section_of_another_kind_is_named(
    read: Callable[[dict[str, object]], int], wrong: dict[str, object]
) -> None:
    with pytest.raises(UsageError, match=rf"^{next(iter(wrong))}.* = .*; expected "):
        read(wrong)


def test_no_section_of_tensor_parallelism_is_one_rank() -> None:
    assert autotp_size({"tensor_parallel": None}) == autotp_size({}) == 1


def test_a_scripts_own_flags_tell_the_stages() -> None:
    assert stated_stages(["--pipe_parallel_size", "2"]) == 2
    assert stated_stages(["--lr", "1", "--num-stages=4"]) == 4
    assert stated_stages(["--pipeline-parallel-size"]) is None
    assert stated_stages(["--lr", "2"]) is None


PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"
ENABLED = {"enabled": True}


@pytest.mark.fault
@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"gradient_allreduce_op": "SUM"}, "gradient_allreduce_op = sum: .*grow with their number"),
        ({"eigenvalue": ENABLED}, "eigenvalue"),
        ({"progressive_layer_drop": ENABLED}, "progressive_layer_drop"),
        (
            {"compression_training": {"weight_quantization": {"shared_parameters": ENABLED}}},
            "compression_training",
        ),
        ({"data_efficiency": {"data_routing": {"random_ltd": ENABLED}}}, "random_ltd"),
        (
            {"data_efficiency": {"data_sampling": {"curriculum_learning": ENABLED}}},
            "curriculum_learning",
        ),
    ],
)
def test_what_is_summed_over_ranks_or_counted_by_nobody_is_refused_by_its_key(
    config: dict[str, Any], named: str
) -> None:
    with pytest.raises(RefusedError, match=named):
        refuse_fixed(config)


def test_what_is_the_same_at_any_layout_is_taken() -> None:
    refuse_fixed({
        "gradient_allreduce_op": "mean", "prescale_gradients": True, "gradient_clipping": 1.0,
        "gradient_predivide_factor": 2.0, "progressive_layer_drop": {"enabled": False},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
    })  # fmt: skip


def test_the_page_shows_every_key() -> None:
    table = PAGE.read_text().partition("| key | reason |\n|---|---|\n")[2].partition("\n\n")[0]
    assert table.splitlines() == [f"| `{each.named}` | {each.why} |" for each in SUMS]


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
