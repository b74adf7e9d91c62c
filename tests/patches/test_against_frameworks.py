"""What a plan counts is what a rank has of it; what we accept the framework accepts, and what we
refuse it refuses: megatron-core, DeepSpeed and a Megatron-LM checkout are asked themselves."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.deepspeed.config import stage_of
from scalai.converters.deepspeed.validity import workload_of
from scalai.converters.megatron.rules import release_beside
from scalai.core.degrees.degrees import Degrees, ModelLimits, refusal
from scalai.core.degrees.passes import Recompute
from scalai.core.errors import RefusedError
from scalai.core.planner.columns import Cases, Layout, Workload, columns_of, first, last
from scalai.core.planner.devices import device_named
from scalai.core.planner.shape import ModelShape
from scalai.core.planner.step_memory import StepMemory, kept_activations, stage_memory, step_memory
from scalai.core.release import numbers_of
from scalai.launch.config import script_facts as script
from support import megatron_lm_job, random_deepspeed, random_scripts
from support.deepspeed_releases import installed
from support.model_shapes import gpt

HIDDEN, HEADS, MICRO_BATCH, EXPERTS = 128, 4, 2, 4
"""As in ``support/training/megatron_answers.py``."""
SEED = int(os.environ.get("SEED", "20"))


def answers(of: str, cases: Sequence[Any], *words: str, timeout: int = 250) -> list[Any]:
    """Ask a framework of cases, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", f"support.training.{of}_answers", *words],
        input=json.dumps(cases), capture_output=True, text=True, check=True, timeout=timeout,
    )  # fmt: skip
    said: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return said


# ------------------------------------------------------------------ memory

DENSE = {"seq": 64, "vocabulary": 256}
PLAIN: dict[str, Any] = {"bias_activation_fusion": True, "add_bias_linear": True}
GPT = gpt(4, HIDDEN, HEADS, DENSE["vocabulary"], DENSE["seq"])
GROUPED = gpt(
    4, HIDDEN, HEADS, DENSE["vocabulary"], DENSE["seq"], ffn=320, kv_groups=2, is_gated=True
)
NOISE = MICRO_BATCH * DENSE["seq"] * (2 * HIDDEN + HEADS * DENSE["seq"])
"""On a CPU a dropout keeps its noise in 16 bit, where a GPU has a mask of 8."""
ACTIVATIONS: list[tuple[dict[str, Any], ModelShape, Recompute, bool]] = [
    (PLAIN, GPT, "none", False),
    ({**PLAIN, "hidden_dropout": 0.1, "attention_dropout": 0.1}, GPT, "none", True),
    ({**PLAIN, "recompute_granularity": "selective"}, GPT, "selective", False),
    (
        {**PLAIN, "recompute_granularity": "full", "recompute_method": "uniform",
         "recompute_num_layers": 1}, GPT, "full", False,
    ),
    (
        {"bias_activation_fusion": True, "num_query_groups": 2, "gated_linear_unit": True,
         "ffn_hidden_size": 320}, GROUPED, "none", False,
    ),
]  # fmt: skip


def test_a_layers_activations_are_what_autograd_keeps() -> None:
    pytest.importorskip("megatron.core")
    kept = answers("megatron", [{**DENSE, "config": config} for config, *_ in ACTIVATIONS])
    for (_, shape, recompute, has_dropout), measured in zip(ACTIVATIONS, kept, strict=True):
        work = Workload(
            shape, MICRO_BATCH, "bf16", is_attention_fused=False, has_dropout=has_dropout
        )
        layout = Layout(Degrees(1, 1, 1), MICRO_BATCH, recompute)
        counted = float(kept_activations(columns_of([(work, device_named("h100"), layout)]))[0])
        assert counted == pytest.approx(measured - NOISE * has_dropout, rel=0.02)


SPARSE = {"seq": 128, "vocabulary": 512}
GATED = {
    "gated_linear_unit": True, "bias_activation_fusion": True, "moe_ffn_hidden_size": 256,
    "num_query_groups": 2,
}  # fmt: skip
SHARED = {**GATED, "moe_shared_expert_intermediate_size": 384}
PADDED = {"moe_pad_expert_input_to_capacity": True}
KEPT: tuple[dict[str, Any], ...] = (
    {"config": {}},
    {"config": {"moe_router_topk": 1, "moe_router_pre_softmax": True}},
    {"config": {"moe_router_topk": 4}},
    {"config": GATED},
    {"config": SHARED},
    {"config": {"num_moe_experts": 16}},
    {"config": {"moe_expert_capacity_factor": 1.5, **PADDED}},
    {"config": {"moe_expert_capacity_factor": 0.5, **PADDED}},
    {"config": {"recompute_granularity": "selective"}},
    {"config": {"moe_token_dispatcher_type": "allgather"}},
    {"config": {}, "dp": 4, "ep": 4},
    {"config": {}, "tp": 2},
    {"config": {}, "tp": 2, "etp": 1},
    {"config": {}, "tp": 4, "dp": 2, "etp": 2, "ep": 2},
    {"config": {}, "tp": 2, "dp": 2, "etp": 1, "ep": 4},
)


def with_experts(case: dict[str, Any]) -> dict[str, Any]:
    return {**SPARSE, **case, "config": {"num_moe_experts": EXPERTS, **case["config"]}}


def columns(case: dict[str, Any], layers: int, moe_layers: int) -> Cases:
    config, tp = case["config"], case.get("tp", 1)
    shape = ModelShape(
        layers=layers, hidden=HIDDEN, heads=HEADS, ffn=4 * HIDDEN, vocab=SPARSE["vocabulary"],
        seq=SPARSE["seq"], kv_groups=config.get("num_query_groups", HEADS),
        head_dim=HIDDEN // HEADS, positions=SPARSE["seq"],
        is_gated=config.get("gated_linear_unit", False),
        has_bias=config.get("add_bias_linear", False), is_tied=case.get("is_tied", True),
        experts=config.get("num_moe_experts", EXPERTS), moe_layers=moe_layers,
        top_k=config.get("moe_router_topk", 2),
        expert_ffn=config.get("moe_ffn_hidden_size", 4 * HIDDEN),
        shared_ffn=config.get("moe_shared_expert_intermediate_size", 0),
    )  # fmt: skip
    work = Workload(
        shape, 2 * MICRO_BATCH * case.get("dp", 1), "bf16",
        is_attention_fused=False, has_dropout=False, expert_tp=case.get("etp"),
        expert_capacity=config.get("moe_expert_capacity_factor", 1.0),
    )  # fmt: skip
    degrees = Degrees(tp, case.get("pp", 1), case.get("dp", 1), ep=case.get("ep", 1))
    recompute = config.get("recompute_granularity", "none")
    layout = Layout(degrees, MICRO_BATCH, recompute, int(case.get("is_sharded", 1)), tp > 1)
    return columns_of([(work, device_named("h100"), layout)])


def test_a_layer_with_experts_keeps_what_autograd_keeps() -> None:
    pytest.importorskip("megatron.core")
    wrong = {}
    for case, measured in zip(KEPT, answers("megatron", [*map(with_experts, KEPT)]), strict=True):
        counted = float(kept_activations(columns(case, 2, 2), is_moe=True)[0])
        if counted != pytest.approx(measured, rel=0.1):
            wrong[json.dumps(case)] = counted / measured
    assert not wrong


def layouts() -> list[dict[str, Any]]:
    """Return every layout of up to 16 ranks of a model of 4 layers, 4 heads and 4 experts."""
    found = []
    for tp, pp, dp, ep, etp in product((1, 2, 4), repeat=5):
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
        {"moe_layers": 3, "is_sharded": False, "is_tied": False, "config": SHARED},
        {"moe_layers": 3, "is_sharded": False, "config": {"add_bias_linear": True}},
    ]
    cases = [
        {**kind, **layout, "layers": 4}
        for kind in kinds
        for layout in layouts()
        # Megatron-LM has experts with biases without tensor parallelism of their own only.
        if layout["etp"] == 1 or not kind["config"].get("add_bias_linear")
    ]
    assert len(cases) > 150
    mine, wrong = cases[quarter::4], []
    asked = answers("megatron", [*map(with_experts, mine)])
    for case, ranks in zip(mine, asked, strict=True):
        x = columns(case, 4, case["moe_layers"])
        for stage, measured in ((first(x), ranks[0]), (last(x), ranks[1])):
            memory = stage_memory(x, stage)
            counted = {part: float(getattr(memory, part)[0]) for part in measured}
            if counted != measured:
                wrong.append((case, counted, measured))
    assert not wrong


SHAPE = gpt(2, 32, 4, 64, 32)
PARTS = 8
"""Parameters of one size, so that none lies on two ranks."""
BF16 = {"bf16": {"enabled": True}}
PRECISIONS: list[dict[str, Any]] = [
    {},
    BF16,
    {"fp16": {"enabled": True, "loss_scale": 1}},
    {**BF16, "data_types": {"grad_accum_dtype": "fp32"}},
]
BUCKET = 1024


def config_of(world: int, stage: int, precision: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_batch_size": 4 * world, "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 0.001}},
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": BUCKET, "stage3_param_persistence_threshold": 0,
        },
        **precision,
    }  # fmt: skip


def estimate(world: int, config: dict[str, Any]) -> StepMemory:
    work = workload_of(config, SHAPE, 4 * world)
    layout = Layout(Degrees(1, 1, world), 2, "none", stage_of(config))
    return step_memory(columns_of([(work, device_named("a100"), layout)]))


@pytest.mark.turns
def test_weights_gradients_and_optimizer_are_those_of_an_engine_in_every_stage() -> None:
    pytest.importorskip("deepspeed")
    total = SHAPE.total_parameters
    assert total % (4 * PARTS) == 0
    cases = [
        (world, config_of(world, stage, precision), [total // PARTS] * PARTS)
        for world, precision, stage in product((1, 2, 4), PRECISIONS, range(4))
        if stage or "data_types" not in precision
    ]
    for (world, config, _), found in zip(cases, answers("deepspeed", cases), strict=True):
        mine = estimate(world, config)
        expected = {name: float(getattr(mine, name)[0]) for name in found}
        assert found == expected, (world, config)


def test_buckets_and_what_updates_the_masters_are_counted() -> None:
    none, one = (estimate(4, config_of(4, stage, BF16)).buffers[0] for stage in (0, 1))
    total = SHAPE.total_parameters
    assert none == pytest.approx(4 * total)
    assert one == pytest.approx(4 * total / 4 + 2 * BUCKET)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"bf16": {"enabled": "auto"}}, "the precision is not known"),
        *(
            ({"zero_optimization": {"stage": 3, part: {"device": device}}}, "is not modelled")
            for part, device in (("offload_optimizer", "nvme"), ("offload_param", "cpu"))
        ),
    ],
    ids=["precision", "optimizer", "parameters"],
)
def test_what_is_not_known_or_offloaded_is_not_modelled(config: dict[str, Any], said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        workload_of(config, SHAPE, 8)


# ------------------------------------------------------------------ layouts

LAYOUTS, MOST_RANKS = 2_400, 32


def agree(
    cases: Sequence[Any], ours: Sequence[str | None], theirs: Sequence[str | None],
    least: tuple[int, int], decision: str = "-",
) -> None:  # fmt: skip
    """See that a framework refuses what we do but by a ``decision`` of ours, and that of all cases
    more than these parts are accepted and refused."""
    different = [
        (case, mine, his)
        for case, mine, his in zip(cases, ours, theirs, strict=True)
        if (mine is None) != (his is None) and decision not in (mine or "")
    ]
    assert not different, "\n\n".join(map(str, different[:10]))
    both = Counter(mine is None for mine in ours)
    assert both[True] > len(cases) // least[0] and both[False] > len(cases) // least[1]


def random_layout(draw: random.Random) -> dict[str, int]:
    """Return sizes of which about a third make up a job."""
    while True:
        tp, pp, dp = (draw.choice(of) for of in ((1, 2, 3, 4, 8), (1, 2, 3, 4), (1, 2, 3, 4, 6)))
        cp = draw.choice((1, 1, 1, 2))
        if tp * pp * dp * cp <= MOST_RANKS:
            break
    heads = draw.choice((4, 8, 12, 16, 24))
    experts = draw.choice((0, 0, 4, 6, 8))
    return {
        "world": tp * pp * dp * cp, "tp": tp, "pp": pp, "dp": dp, "cp": cp,
        "vpp": draw.choice((1, 1, 2, 3)), "ep": draw.choice((1, 2, 4)) if experts else 1,
        "layers": draw.choice((4, 6, 8, 12, 24)), "heads": heads, "experts": experts,
        "groups": draw.choice([groups for groups in (1, 2, 4, heads) if heads % groups == 0]),
        "batch": draw.choice((12, 24, 48, 72, 144)), "micro_batch": draw.choice((1, 1, 1, 2, 3)),
        "seq": draw.choice((64, 66)),
    }  # fmt: skip


def our_refusal(layout: dict[str, int]) -> str | None:
    limits = ModelLimits(
        num_attention_heads=layout["heads"], num_query_groups=layout["groups"],
        num_layers=layout["layers"], global_batch_size=layout["batch"],
        seq_length=layout["seq"], num_experts=layout["experts"] or None,
        ffn_hidden_size=64 * layout["heads"],
    )  # fmt: skip
    degrees = Degrees(**{axis: layout[axis] for axis in ("tp", "pp", "dp", "vpp", "cp", "ep")})
    return refusal(degrees, limits, layout["micro_batch"])


@pytest.mark.turns
def test_what_we_accept_megatron_accepts_and_what_we_refuse_it_refuses() -> None:
    pytest.importorskip("megatron.core")
    draw = random.Random(20)
    drawn = [random_layout(draw) for _ in range(LAYOUTS)]
    theirs = answers("megatron", [{"layout": layout} for layout in drawn])
    agree(drawn, [our_refusal(layout) for layout in drawn], theirs, (5, 5))


CASES, CAMPAIGN_CASES, RELEASE_CASES = 160, 2_400, 600
RELEASES = ("0.16.9", "0.17.6", "0.18.9")
DECISION = "AutoTP takes all ranks for its own"
"""DeepSpeed builds some of such engines, by chance of equal degrees; docs/degrees.md says why we do
not."""
NOT_TAKEN = "DeepSpeed would not take its configuration"


def cases_of(count: int, release: str = "0.19.8") -> list[random_deepspeed.Case]:
    draw = random.Random(SEED)
    return [random_deepspeed.random_case(draw, numbers_of(release)) for _ in range(count)]


def compare_with_deepspeed(cases: list[random_deepspeed.Case]) -> None:
    """Compare who accepts, and what samples a step then has."""
    ours = [random_deepspeed.judge(case) for case in cases]
    asked = [
        (case.ranks, case.kind, case.degrees.tp, case.degrees.pp, case.layers, config)
        for case, mine in zip(cases, ours, strict=True)
        for config in mine.configs
    ]
    said, theirs = iter(answers("deepspeed", asked, timeout=400)), []
    for mine in ours:
        each = [next(said) for _ in mine.configs]
        theirs.append(next((one for one in each if one[0] is not None), each[0]))
    refused = [mine.refused for mine in ours]
    agree(cases, refused, [his for his, _ in theirs], (4, 4), DECISION)
    for case, mine, (_, has) in zip(cases, ours, theirs, strict=True):
        if mine.refused is None and has is not None:
            assert (has[0], has[3]) == (mine.samples, case.degrees.dp), (case, mine, has)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [CASES, pytest.param(CAMPAIGN_CASES, marks=pytest.mark.campaign)])
def test_what_we_accept_deepspeed_accepts_and_what_we_refuse_it_refuses(count: int) -> None:
    deepspeed = pytest.importorskip("deepspeed")
    compare_with_deepspeed(cases_of(count, deepspeed.__version__))


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.timeout(900)
@pytest.mark.parametrize("release", RELEASES)
def test_so_it_is_in_other_releases(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = installed(release, tmp_path / "release")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(script, "installed_release", lambda _: numbers_of(release))
    compare_with_deepspeed(cases_of(RELEASE_CASES, release))


def test_once_a_round_has_told_of_its_model_no_worker_refuses_what_is_offered() -> None:
    cases = [case for case in cases_of(CASES) if random_deepspeed.is_stated(case.config)]
    judged = [(case, random_deepspeed.judge(case)) for case in cases]
    # A configuration that a worker refuses at any degrees is refused in the first round.
    late = [case for case, found in judged if found.by == "worker" and NOT_TAKEN not in str(found)]
    # A script may build a plain model for one stage: only a round of one stage tells.
    assert all(case.first is None or case.first.pp > 1 for case in late)
    assert all(case.degrees.pp == 1 for case in late)


def test_nothing_is_offered_on_its_own_that_the_script_does_not_cut() -> None:
    for case in cases_of(CASES):
        if case.kind == "plain" and random_deepspeed.judge(case).by != "job":
            degrees = random_deepspeed.offered(case)
            assert degrees is None or degrees.model_parallel == 1


# ------------------------------------------------------------------ a Megatron-LM checkout

SCRIPT_CASES = 2_000
STEP_SCHEDULES = (0, 18)
"""From this release on there are schedules of batches instead of ramps."""
CHECKOUTS = megatron_lm_job.CHECKOUTS or ("none",)
GLOBAL_BATCH, EPOCH, CONSUMED = 24, 240, 48
DEALT = ((1, 1), (24, 1), (4, 2), (2, 2), (1, 8), (3, 4), (2, 3))
"""Micro-batch, and DP."""

needs_checkout = pytest.mark.skipif(
    megatron_lm_job.skip_reason() is not None, reason=megatron_lm_job.skip_reason() or ""
)


@needs_checkout
@pytest.mark.timeout(600)
@pytest.mark.turns
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=[Path(one).name for one in CHECKOUTS])
def test_what_we_accept_a_checkout_accepts_and_what_we_refuse_it_refuses(checkout: str) -> None:
    """Its parser, its process groups, its model and its schedule."""
    release = release_beside(str(Path(checkout, "pretrain_gpt.py")))
    assert release is not None
    draw, has_newest = random.Random(SEED), release >= STEP_SCHEDULES
    cases = [
        random_scripts.random_case(draw, has_newest_flags=has_newest) for _ in range(SCRIPT_CASES)
    ]
    ours = [random_scripts.judge(case, release=release) for case in cases]
    asked = [(c.ranks, mine.flags, mine.rows) for c, mine in zip(cases, ours, strict=True)]
    theirs = answers("megatron_lm", asked, checkout, timeout=500)
    shown = [(str(case.degrees), *each) for case, each in zip(cases, asked, strict=True)]
    agree(shown, [mine.refused for mine in ours], theirs, (6, 3))


@needs_checkout
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_the_micro_batch_moves_no_sample_to_another_global_batch(kind: str) -> None:
    cases = [(kind, EPOCH, CONSUMED, GLOBAL_BATCH, micro, dp) for micro, dp in DEALT]
    found = answers("megatron_lm", cases, str(megatron_lm_job.CHECKOUT), timeout=240)
    assert all(batches == found[0] for batches in found)
    assert sum(map(len, found[0])) == 5 * GLOBAL_BATCH
