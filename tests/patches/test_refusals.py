"""What cannot change its layout is refused at the start, all of it at once, with the reason;
layouts that Megatron-core's own configuration refuses are found before a change is begun."""

import importlib
import re
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalai.converters.megatron import arguments
from scalai.converters.megatron.sums import SUMS
from scalai.core.degrees.degrees import Degrees, ModelLimits, refusal
from scalai.core.errors import RefusedError
from scalai.patches.continuation import refuse_changed_axes
from scalai.patches.megatron.other_layouts import refused_layouts
from scalai.patches.versions import DEEPSPEED, MEGATRON, KnownVersions


def megatrons() -> Any:
    """Return the module of Megatron's state, which imports Megatron."""
    return importlib.import_module("scalai.patches.megatron.megatron_state")


class LayerWiseDistributedOptimizer(SimpleNamespace):
    """By its name alone."""


def leaf(**values: Any) -> SimpleNamespace:
    """Return an optimizer as megatron has it, with nothing in the way."""
    inner = values.pop("optimizer", SimpleNamespace())
    config = SimpleNamespace(**values.pop("config", {}))
    return SimpleNamespace(is_stub_optimizer=False, optimizer=inner, config=config, **values)


def test_plain_jobs_are_not_refused() -> None:
    megatrons().refuse_unsupported([torch.nn.Linear(2, 2)], leaf())


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (LayerWiseDistributedOptimizer(optimizer=None), "LayerWiseDistributedOptimizer"),
        (
            SimpleNamespace(
                chained_optimizers=[
                    leaf(
                        config={"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.uint8}
                    )
                ]
            ),
            "--exp-avg-dtype uint8",
        ),
        (
            leaf(ddp_config=SimpleNamespace(use_megatron_fsdp=True)),
            "--use-megatron-fsdp: its shards .*use --use-dist",
        ),
    ],
)
def test_optimizers_are_refused_by_name(optimizer: Any, named: str) -> None:
    with pytest.raises(RefusedError, match=named):
        megatrons().refuse_unsupported([torch.nn.Linear(2, 2)], optimizer)


@pytest.mark.parametrize("name", ["mode", "tp_mode"])
def test_blockwise_muon_keeps_its_tensor_parallelism(name: str) -> None:
    muon = leaf(optimizer=SimpleNamespace(**{name: "blockwise"}))
    chained = SimpleNamespace(chained_optimizers=[leaf(), muon])
    assert list(megatrons().fixed_axes([], chained)) == ["cp", "tp"]
    whole = leaf(optimizer=SimpleNamespace(**{name: "duplicated"}))
    assert list(megatrons().fixed_axes([], whole)) == ["cp"]


def test_a_model_keeps_the_axes_whose_ranks_tokens_it_sums() -> None:
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(  # type: ignore[assignment]
        num_moe_experts=4, moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.1
    )
    assert list(megatrons().fixed_axes([model], leaf())) == ["cp", "dp"]


def test_sums_are_where_the_page_says() -> None:
    """As far as the release that is installed has them; a later one has moved none of these."""
    root = Path(importlib.import_module("megatron.core").__file__ or "").parents[1]
    for each in SUMS:
        file, _, function = each.source.partition(":")
        text = (root / file).read_text()
        for name in function.split("."):
            assert re.search(rf"(def|class) {name}\b", text), each.source


def test_what_no_test_has_had_is_refused_until_a_person_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = leaf(config={"use_precision_aware_optimizer": True})
    with pytest.raises(RefusedError, match="SCALAI_ALLOW_UNTESTED=1"):
        megatrons().refuse_unsupported([torch.nn.Linear(2, 2)], optimizer)
    monkeypatch.setenv("SCALAI_ALLOW_UNTESTED", "1")
    megatrons().refuse_unsupported([torch.nn.Linear(2, 2)], optimizer)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"fp8_param": True}, "--fp8-param: parameters are kept in FP8 with scales; leave it out"),
        ({"fp4": "e2m1"}, "--fp4-format: .*train in bf16"),
        ({"fp8": "hybrid"}, "--fp8-format: .*SCALAI_ALLOW_UNTESTED=1"),
    ],
)
def test_models_are_refused_for_what_their_scripts_flags_would_be(
    config: dict[str, Any], named: str
) -> None:
    model: Any = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(**config)
    with pytest.raises(RefusedError, match=named):
        megatrons().refuse_unsupported([model], leaf())


def test_another_context_parallel_degree_is_refused() -> None:
    refuse_changed_axes({"cp": 2}, {"cp": 2, "tp": 4})
    with pytest.raises(RefusedError, match="cp=2 when the state was taken and cp=1 now"):
        refuse_changed_axes({"cp": 2}, {"cp": 1, "tp": 4})


KNOWN = [
    *((MEGATRON, v) for v in ("0.14.0", "0.15.3", "0.16.1", "0.17.0rc0", "0.18.2", "0.20.0rc0")),
    *((DEEPSPEED, v) for v in ("0.16.0", "0.17.6", "0.18.9", "0.19.8", "0.19.8+abc")),
]
UNKNOWN = [
    *((MEGATRON, v, r"0\.14 to 0\.20") for v in ("0.13.1", "0.21.0", "1.14.0", "main")),
    *((DEEPSPEED, v, r"0\.16 to 0\.19") for v in ("0.15.4", "0.20.0", "1.16.0")),
]


@pytest.mark.parametrize(("framework", "version"), KNOWN)
def test_known_versions_pass_without_a_word(framework: KnownVersions, version: str) -> None:
    assert framework.check(version, allow_untested=False) is None


@pytest.mark.parametrize(("framework", "version", "known"), UNKNOWN)
def test_unknown_versions_are_refused_unless_allowed(
    framework: KnownVersions, version: str, known: str
) -> None:
    with pytest.raises(RefusedError, match=rf"{known}.*SCALAI_ALLOW_UNTESTED=1"):
        framework.check(version, allow_untested=False)
    assert version in (framework.check(version, allow_untested=True) or "")


# ------------------------------------------------------------------ other layouts

FLAGS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 1 --global-batch-size 12 --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2 --overlap-p2p-communication-warmup-flush"
).split()
WORDS = "only compatible with overlap_p2p_comm"


def parsed(**values: Any) -> Namespace:
    """Return the namespace of ``FLAGS`` before Megatron-LM has checked it."""
    given = {
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "rank": 0,
        "num_virtual_stages_per_pipeline_rank": 2, "world_size": 2, "is_checked": False,
        "sequence_parallel": False,
    }  # fmt: skip
    return Namespace(**{**given, **values})


def validate(job: Namespace) -> None:
    """As ``validate_args``: without chunks point-to-point communication does not overlap."""
    chunks = job.num_virtual_stages_per_pipeline_rank
    job.chunks = chunks if job.pipeline_model_parallel_size > 1 and chunks > 1 else None
    job.is_checked = True


def configured(job: Namespace) -> Any:
    assert job.is_checked
    return importlib.import_module("megatron.core.transformer").TransformerConfig(
        num_layers=8, hidden_size=64, num_attention_heads=4, pipeline_dtype=torch.float32,
        tensor_model_parallel_size=job.tensor_model_parallel_size,
        pipeline_model_parallel_size=job.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=job.chunks,
        overlap_p2p_comm=job.chunks is not None, batch_p2p_comm=job.chunks is None,
        overlap_p2p_comm_warmup_flush=True,
    )  # fmt: skip


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(core_transformer_config_from_args=configured)
    monkeypatch.setitem(sys.modules, "megatron.training.argument_utils", module)


@pytest.mark.fault
@pytest.mark.usefixtures("framework")
def test_what_a_configuration_refuses_is_told_with_its_reason_and_not_offered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arguments, "_NEEDS_CHUNKS", ())  # the flags say it, of this one
    job = parsed()
    found = refused_layouts(FLAGS, job, validate, (0, 16, 1))
    assert job == parsed(), "a copy is asked for"
    assert [2, 1, 1] in [each[:3] for each in found]
    assert all(each[2] == 1 and WORDS in str(each[3]) for each in found)
    limits = ModelLimits(refused=tuple(tuple(each) for each in found))  # type: ignore[misc]
    assert WORDS in str(refusal(Degrees(2, 1, 4), limits))
    assert refusal(Degrees(1, 2, 1, vpp=2), limits) is None


@pytest.mark.fault
@pytest.mark.usefixtures("framework")
def test_flags_that_need_virtual_stages_say_so_before_anything_runs() -> None:
    limits = arguments.read_arguments(FLAGS).limits
    assert "warmup-flush needs them" in str(refusal(Degrees(2, 1, 1), limits))
    assert refusal(Degrees(1, 2, 1, vpp=4), limits) is None
    assert refused_layouts(FLAGS, parsed(), validate, (0, 16, 1)) == []


@pytest.mark.fault
@pytest.mark.usefixtures("framework")
def test_nothing_is_refused_where_the_present_layout_is_not_taken_so() -> None:
    def stumbles(job: Namespace) -> None:
        raise AssertionError("something that has nothing to do with layouts")

    assert refused_layouts(FLAGS, parsed(), stumbles, (0, 16, 1)) == []
