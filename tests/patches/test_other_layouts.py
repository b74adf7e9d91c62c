"""Layouts that Megatron-core's own configuration refuses are found before a change is begun."""

import sys
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from scalai.converters.megatron import arguments
from scalai.core.degrees.degrees import Degrees, ModelLimits, refusal
from scalai.patches.megatron.other_layouts import refused_layouts

pytestmark = pytest.mark.fault

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


def configured(job: Namespace) -> TransformerConfig:
    assert job.is_checked
    return TransformerConfig(
        num_layers=8, hidden_size=64, num_attention_heads=4, pipeline_dtype=torch.float32,
        tensor_model_parallel_size=job.tensor_model_parallel_size,
        pipeline_model_parallel_size=job.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=job.chunks,
        overlap_p2p_comm=job.chunks is not None, batch_p2p_comm=job.chunks is None,
        overlap_p2p_comm_warmup_flush=True,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def framework(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(core_transformer_config_from_args=configured)
    monkeypatch.setitem(sys.modules, "megatron.training.argument_utils", module)


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


def test_flags_that_need_virtual_stages_say_so_before_anything_runs() -> None:
    limits = arguments.read_arguments(FLAGS).limits
    assert "warmup-flush needs them" in str(refusal(Degrees(2, 1, 1), limits))
    assert refusal(Degrees(1, 2, 1, vpp=4), limits) is None
    assert refused_layouts(FLAGS, parsed(), validate, (0, 16, 1)) == []


def test_nothing_is_refused_where_the_present_layout_is_not_taken_so() -> None:
    def stumbles(job: Namespace) -> None:
        raise AssertionError("something that has nothing to do with layouts")

    assert refused_layouts(FLAGS, parsed(), stumbles, (0, 16, 1)) == []
