"""What a plan counts for a model with experts is what a rank has of it on megatron-core."""

import json
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

from scalai.core.degrees.degrees import Degrees, ModelLimits, refusal
from scalai.core.planner.columns import Cases, Layout, Workload, columns_of
from scalai.core.planner.devices import device_named
from scalai.core.planner.model import ModelShape
from scalai.core.planner.stage import first, last
from scalai.core.planner.step_memory import kept_activations, stage_memory

HIDDEN, HEADS, SEQ, MICRO_BATCH, VOCABULARY, EXPERTS = 128, 4, 128, 2, 512, 4
"""As in ``support/training/expert_memory.py``."""
GATED = {
    "gated_linear_unit": True, "bias_activation_fusion": True, "moe_ffn_hidden_size": 256,
    "num_query_groups": 2,
}  # fmt: skip
CASES: tuple[dict[str, Any], ...] = (
    {"config": {}},
    {"config": {"moe_router_topk": 1, "moe_router_pre_softmax": True}},
    {"config": {"moe_router_topk": 4}},
    {"config": GATED},
    {"config": {**GATED, "moe_shared_expert_intermediate_size": 384}},
    {"config": {"num_moe_experts": 16}},
    {"config": {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}},
    {"config": {"moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True}},
    {"config": {"recompute_granularity": "selective"}},
    {"config": {"moe_token_dispatcher_type": "allgather"}},
    {"config": {}, "dp": 4, "ep": 4},
    {"config": {}, "tp": 2},
    {"config": {}, "tp": 2, "etp": 1},
    {"config": {}, "tp": 4, "dp": 2, "etp": 2, "ep": 2},
    {"config": {}, "tp": 2, "dp": 2, "etp": 1, "ep": 4},
)


def asked(cases: list[dict[str, Any]]) -> list[Any]:
    full = [{**case, "config": {"num_moe_experts": EXPERTS, **case["config"]}} for case in cases]
    done = subprocess.run(
        [sys.executable, "-m", "support.training.expert_memory"], input=json.dumps(full),
        capture_output=True, text=True, check=True, timeout=250,
    )  # fmt: skip
    said: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def shape_of(case: dict[str, Any], layers: int, moe_layers: int) -> ModelShape:
    config = case["config"]
    has_bias = config.get("add_bias_linear", False)
    return ModelShape(
        layers=layers, hidden=HIDDEN, heads=HEADS, ffn=4 * HIDDEN, vocab=VOCABULARY, seq=SEQ,
        kv_groups=config.get("num_query_groups", HEADS), head_dim=HIDDEN // HEADS, positions=SEQ,
        is_gated=config.get("gated_linear_unit", False), has_bias=has_bias,
        is_tied=case.get("is_tied", True), experts=config.get("num_moe_experts", EXPERTS),
        moe_layers=moe_layers, top_k=config.get("moe_router_topk", 2),
        expert_ffn=config.get("moe_ffn_hidden_size", 4 * HIDDEN),
        shared_ffn=config.get("moe_shared_expert_intermediate_size", 0),
    )  # fmt: skip


def columns(case: dict[str, Any], layers: int, moe_layers: int) -> Cases:
    tp = case.get("tp", 1)
    recompute = case["config"].get("recompute_granularity", "none")
    work = Workload(
        shape_of(case, layers, moe_layers), 2 * MICRO_BATCH * case.get("dp", 1), "bf16",
        is_attention_fused=False, has_dropout=False, expert_tp=case.get("etp"),
        expert_capacity=case["config"].get("moe_expert_capacity_factor", 1.0),
    )  # fmt: skip
    degrees = Degrees(tp, case.get("pp", 1), case.get("dp", 1), ep=case.get("ep", 1))
    layout = Layout(degrees, MICRO_BATCH, recompute, int(case.get("is_sharded", 1)), tp > 1)
    return columns_of([(work, device_named("h100"), layout)])


def test_a_layer_with_experts_keeps_what_autograd_keeps() -> None:
    pytest.importorskip("megatron.core")
    kept = asked(list(CASES))
    wrong = {}
    for case, measured in zip(CASES, kept, strict=True):
        counted = float(kept_activations(columns(case, 2, 2), is_moe=True)[0])
        if counted != pytest.approx(measured, rel=0.1):
            wrong[json.dumps(case)] = counted / measured
    assert not wrong


def layouts() -> list[dict[str, Any]]:
    """Return every layout of up to 16 ranks of a model of 4 layers, 4 heads and 4 experts."""
    found = []
    for tp, pp, dp, ep, etp in product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4)):
        limits = ModelLimits(
            num_attention_heads=HEADS, num_layers=4, num_experts=EXPERTS, expert_tp=etp
        )
        degrees = Degrees(tp, pp, dp, ep=ep)
        if degrees.world_size <= 16 and refusal(degrees, limits, 1) is None:
            found.append({"tp": tp, "pp": pp, "dp": dp, "ep": ep, "etp": etp})
    return found


@pytest.mark.turns
@pytest.mark.parametrize("quarter", range(4))
def test_each_stage_has_the_state_that_its_ranks_have(quarter: int) -> None:
    pytest.importorskip("megatron.core")
    kinds: list[dict[str, Any]] = [
        {"moe_layers": 4, "is_sharded": True, "config": {}},
        {"moe_layers": 3, "is_sharded": False, "is_tied": False,
         "config": {**GATED, "moe_shared_expert_intermediate_size": 384}},
        {"moe_layers": 3, "is_sharded": False, "config": {"add_bias_linear": True}},
    ]  # fmt: skip
    cases = [
        {**kind, **layout, "layers": 4}
        for kind in kinds
        for layout in layouts()
        # Megatron-LM has experts with biases without tensor parallelism of their own only.
        if layout["etp"] == 1 or not kind["config"].get("add_bias_linear")
    ]
    assert len(cases) > 150
    mine, wrong = cases[quarter::4], []
    for case, ranks in zip(mine, asked(mine), strict=True):
        x = columns(case, 4, case["moe_layers"])
        for stage, measured in ((first(x), ranks[0]), (last(x), ranks[1])):
            memory = stage_memory(x, stage)
            for part in ("weights", "gradients", "optimizer"):
                counted = float(getattr(memory, part)[0])
                if counted != measured[part]:
                    wrong.append((case, part, counted, measured[part]))
    assert not wrong
