"""Fixed facts of a Megatron-LM job: one law for flags, arguments and checkpoints."""

import re
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.megatron import sums
from scalai.converters.megatron.arguments import read_arguments
from scalai.converters.megatron.model_shape import offloads_of
from scalai.converters.megatron.rules import (
    even_passes,
    faults_of,
    fixed_axes,
    fixed_passes,
    summed_axes,
    values_of,
)
from scalai.core.degrees.degrees import Degrees, refusal
from scalai.core.errors import RefusedError

pytestmark = pytest.mark.fault

GPT = "--num-layers 8 --num-attention-heads 8 --micro-batch-size 2 --global-batch-size 24"
PARSED = {"global_batch_size": 24, "optimizer": "adam", "dataloader_type": "single"}


def faults(values: dict[str, Any], *, allow_untested: bool = False) -> str:
    return "\n".join(faults_of({**PARSED, **values}, allow_untested=allow_untested))


REFUSED = [
    ("--use-megatron-fsdp", {"use_megatron_fsdp": True}, "use --use-distributed-optimizer"),
    ("--use-torch-fsdp2", {"use_torch_fsdp2": True}, "use --use-distributed-optimizer"),
    ("--fp8-format hybrid", {"fp8": "hybrid"}, "SCALAI_ALLOW_UNTESTED=1"),
    ("--fp8-param-gather", {"fp8_param_gather": True}, "kept in FP8"),
    ("--fp4-format=e2m1", {"fp4": "e2m1"}, "train in bf16"),
    ("--yaml-cfg x.yaml", {"yaml_cfg": "x.yaml"}, "write them as flags"),
    ("--decrease-batch-size-if-needed", {"decrease_batch_size_if_needed": True},
     "order of samples"),
    ("--use-mp-args-from-checkpoint-args", {"use_mp_args_from_checkpoint_args": True}, "degrees"),
    ("--inprocess-restart", {"inprocess_restart": True}, "restarts the workers"),
    ("--perform-rl-step", {"perform_rl_step": True}, "makes its own data"),
    ("--skip-train", {"skip_train": True}, "nothing is trained"),
    ("--non-persistent-ckpt-type local", {"non_persistent_ckpt_type": "local"}, "fits one layout"),
    ("--optimizer dist_muon", {"optimizer": "dist_muon"}, "whole parameters"),
    ("--optimizer muon --use-distributed-optimizer",
     {"optimizer": "muon", "use_layer_wise_distributed_optimizer": True},
     "without --use-distributed-optimizer"),
    ("--optimizer soap", {"optimizer": "soap"}, "not one value for each"),
    ("--use-precision-aware-optimizer --exp-avg-dtype fp8",
     {"use_precision_aware_optimizer": True, "exp_avg_dtype": "torch.uint8"}, "--exp-avg-dtype"),
    ("--tensor-parallel-num-weight-shards 4",
     {"tensor_parallel_num_weight_shards": 4, "gtp_weight_remat_size": 2}, "split beyond TP"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "parsed", "why"), REFUSED, ids=[flags.split()[0] for flags, _, _ in REFUSED]
)
def test_flags_and_parsed_arguments_are_refused_alike_with_the_way_out(
    flags: str, parsed: dict[str, Any], why: str
) -> None:
    with pytest.raises(RefusedError, match=why) as caught:
        read_arguments(f"{GPT} {flags}".split())
    assert any(flag in str(caught.value) for flag in flags.replace("=", " ").split())
    assert why in faults(parsed)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"dataloader_type": "cyclic", "data_sharding": False},
        {"dataloader_type": "cyclic"},
        {
            "use_precision_aware_optimizer": True,
            "optimizer_cpu_offload": True,
            "exp_avg_dtype": "torch.bfloat16",
        },
        {"exp_avg_dtype": "torch.uint8"},  # without the optimizer that would use it
        {"tensor_parallel_num_weight_shards": 2, "gtp_weight_remat_size": 1},
        {"optimizer": "muon"},
        {"optimizer_cpu_offload": True, "num_distributed_optimizer_instances": 2},
    ],
)
def test_what_goes_is_not_refused(values: dict[str, Any]) -> None:
    assert not faults(values)


def test_what_could_not_be_tried_goes_where_a_person_says_so() -> None:
    assert not faults({"fp8": "hybrid"}, allow_untested=True)
    assert faults({"fp8": "hybrid", "fp8_param_gather": True}, allow_untested=True)
    assert "FusedAdam" in faults({"use_precision_aware_optimizer": True})
    assert not faults({"use_precision_aware_optimizer": True}, allow_untested=True)
    assert read_arguments([*GPT.split(), "--fp8-format", "hybrid"], allow_untested=True)


FIXED = [
    ("--optimizer muon", {"optimizer": "muon"}, "tp", "orthogonalizes each"),
    ("--optimizer muon --muon-tp-mode blockwise",
     {"optimizer": "muon", "muon_tp_mode": "blockwise"}, "tp", "--muon-tp-mode blockwise"),
    ("--moe-mlp-glu-interleave-size 32", {"moe_mlp_glu_interleave_size": 32}, "tp", "gate and up"),
    ("--encoder-num-layers 4 --decoder-num-layers 4",
     {"encoder_num_layers": 4, "decoder_num_layers": 4}, "pp", "T5 without pipeline parallelism"),
    ("--mtp-num-layers 1", {"mtp_num_layers": 1, "num_layers": 8}, "pp", "with tied embeddings"),
    ("--pipeline-model-parallel-layout Et*8L --overlap-param-gather-with-optimizer-step",
     {"pipeline_model_parallel_layout": "Et*8L", "num_layers": 8,
      "overlap_param_gather_with_optimizer_step": True}, "pp", "this number of stages"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "parsed", "axis", "why"), FIXED, ids=[flags for flags, *_ in FIXED]
)
def test_what_stays_stays_on_both_sides_with_the_reason(
    flags: str, parsed: dict[str, Any], axis: str, why: str
) -> None:
    assert why in dict(fixed_axes({**PARSED, **parsed}))[axis]
    limits = read_arguments(f"{GPT} {flags}".split()).limits
    other = {"tp": 2} if axis == "tp" else {"pp": 2}
    other |= {"vpp": 2} if axis == "vpp" else {}
    if axis != "vpp":
        refused = str(refusal(Degrees(**{"tp": 1, "pp": 1, "dp": 1, **other}), limits))
        assert f"{axis}=2 must stay 1" in refused


@pytest.mark.parametrize("mode", ["duplicated", "distributed"])
def test_muon_over_whole_matrices_changes_its_tensor_parallelism(mode: str) -> None:
    values = {"optimizer": "muon", "muon_tp_mode": mode}
    assert set(dict(fixed_axes(values))) == {"cp"}


def test_flags_become_the_arguments_that_they_set() -> None:
    given = {"--fp8-format": ("e4m3",), "--no-data-sharding": (), "--betas": ("0.9", "0.95")}
    assert values_of(given) == {
        "fp8": "e4m3",
        "no_data_sharding": True,
        "data_sharding": False,
        "betas": ("0.9", "0.95"),
    }


SPILLING = "--use-distributed-optimizer --bf16"
"""Flags with which the optimizer may go to host memory."""


@pytest.mark.parametrize(
    ("flags", "fixed"),
    [
        ("", {}),
        ("--num-experts 4", {"micro-batch": "part of the loss"}),
        ("--eod-mask-loss", {"micro-batch": "--calculate-per-token-loss"}),
        ("--eod-mask-loss --calculate-per-token-loss", {}),
        ("--dataloader-type external", {"micro-batch": "order"}),
        ("--cpu-offloading-num-layers 2", {"recompute": "--cpu-offloading-num-layers"}),
        ("--cpu-offloading-num-layers 0 --cuda-graph-impl none", {}),
        ("--cuda-graph-impl local", {"recompute": "--cuda-graph-impl"}),
        ("--recompute-activations", {"recompute": "--recompute-granularity selective"}),
    ],
)
def test_what_of_the_passes_stays_is_said_with_the_reason(
    flags: str, fixed: dict[str, str]
) -> None:
    flags = f"{GPT} {SPILLING} {flags}"
    found = dict(fixed_passes(values_of(read_arguments(flags.split()).given)))
    assert found.keys() == fixed.keys()
    for part, why in found.items():
        assert fixed[part] in why


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--bf16", "--use-distributed-optimizer"),
        ("--use-distributed-optimizer", "no masters of fp32 weights"),
        (f"{SPILLING} --optimizer sgd", "--optimizer adam"),
        (f"{SPILLING} --overlap-param-gather-with-optimizer-step", "does not go with it"),
        (f"{SPILLING} --use-precision-aware-optimizer --optimizer-cpu-offload", "stays as given"),
    ],
)
def test_an_optimizer_that_cannot_go_to_the_host_is_said_to_stay(flags: str, why: str) -> None:
    read = read_arguments(f"{GPT} {flags}".split())
    assert why in dict(fixed_passes(values_of(read.given)))["offload"]
    assert offloads_of(read) == ()


@pytest.mark.parametrize(
    ("parsed", "why"),
    [
        ({"num_experts": 8}, "--num-experts: replicas exchange"),
        ({"virtual_pipeline_model_parallel_size": 2}, "in groups"),
        ({"fp8": "hybrid"}, "--fp8-format"),
        ({"iterations_to_skip": [7]}, "--iterations-to-skip"),
        ({"dataloader_type": "external"}, "by place"),
        ({"num_experts": None, "iterations_to_skip": [], "cuda_graph_impl": "none"}, ""),
    ],
)
def test_replicas_make_equally_many_passes_where_they_meet_in_one(
    parsed: dict[str, Any], why: str
) -> None:
    found = even_passes({**PARSED, **parsed})
    assert why in found and bool(why) == bool(found)


@pytest.mark.parametrize("flag", ["--hybrid-override-pattern", "--hybrid-layer-pattern"])
def test_layers_of_mamba_are_not_offered_to_be_computed_again(flag: str) -> None:
    fixed = dict(fixed_passes(values_of({flag: ("M-M*",)})))
    assert "Mamba" in fixed["recompute"] or "other kinds" in fixed["recompute"]
    assert "recompute" not in dict(fixed_passes(values_of({})))


PAGE = Path(__file__).parents[2] / "docs" / "megatron.md"
MOE = "--num-experts 4 --moe-router-load-balancing-type"
EXPERTS = {"num_experts": 4}
GLOBAL = "counts each expert's tokens over all data-parallel ranks"
LOCAL = "weighs auxiliary and z losses by one rank's tokens"

BALANCING, AUX = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
TWO = "seq_aux_loss global_aux_loss --moe-aux-loss-coeff 1e-2"
PER_TOKEN = {"calculate_per_token_loss": True}
OF_EXPERTS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("", {}, {}),
    ("--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2",
     {BALANCING: "global_aux_loss", AUX: 0.01}, {"dp": GLOBAL}),
    (f"--moe-router-load-balancing-type {TWO} 1e-3",
     {BALANCING: ["seq_aux_loss", "global_aux_loss"], AUX: [0.01, 0.001]}, {"dp": GLOBAL}),
    (f"--moe-router-load-balancing-type {TWO} 0",
     {BALANCING: ["seq_aux_loss", "global_aux_loss"], AUX: [0.01, 0.0]}, {}),
    ("--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2",
     {BALANCING: "aux_loss", AUX: 0.01}, {}),
    ("--moe-router-load-balancing-type sinkhorn",
     {BALANCING: "sinkhorn", AUX: 0.0}, {"tp": "sinkhorn normalizes"}),
    ("--moe-expert-capacity-factor 1.0",
     {"moe_expert_capacity_factor": 1.0}, {"tp": "drops tokens"}),
    ("--moe-expert-capacity-factor -1", {"moe_expert_capacity_factor": -1.0}, {}),
    ("--moe-expert-rank-capacity-factor 1.5", {"moe_expert_rank_capacity_factor": 1.5},
     dict.fromkeys(("tp", "dp", "ep"), "expert-parallel group")),
    ("--moe-aux-loss-coeff 1e-2 --calculate-per-token-loss",
     {BALANCING: "aux_loss", AUX: 0.01, **PER_TOKEN}, {"tp": LOCAL}),
    ("--moe-z-loss-coeff 1e-3 --calculate-per-token-loss",
     {"moe_z_loss_coeff": 1e-3, **PER_TOKEN}, {"tp": LOCAL}),
    ("--calculate-per-token-loss", {AUX: 0.0, **PER_TOKEN}, {}),
]  # fmt: skip
ASKED = [
    ("", {}, {}),
    ("--no-initialization", {"perform_initialization": False}, {"tp": "leaves weights unmarked"}),
    *(
        (f"--num-experts 4 {flags}", {**EXPERTS, **parsed}, stays)
        for flags, parsed, stays in OF_EXPERTS
    ),
    ("--calculate-per-token-loss", PER_TOKEN, {}),
    ("--dsa-indexer-loss-coeff 0.1", {"dsa_indexer_loss_coeff": 0.1},
     {"dp": "without dividing by the number of passes"}),
    ("--optimizer muon", {"optimizer": "muon"}, {"tp": "orthogonalizes each TP rank's shard"}),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "parsed", "stays"), ASKED, ids=[flags for flags, *_ in ASKED])
def test_axes_whose_ranks_tokens_are_summed_stay_by_flags_and_by_arguments(
    flags: str, parsed: dict[str, Any], stays: dict[str, str]
) -> None:
    for values in (parsed, values_of(read_arguments(f"{GPT} {flags}".split()).given)):
        found = {axis: why for axis, why in fixed_axes(values) if axis != "cp"}
        assert found.keys() == stays.keys()
        for axis, why in stays.items():
            assert why in found[axis]


def test_a_configuration_says_it_as_its_flags_do() -> None:
    """Loops of one's own have no flags, and call experts by another name."""
    configured = {
        "num_moe_experts": 4, "moe_router_load_balancing_type": ["global_aux_loss"],
        "moe_aux_loss_coeff": [0.1], "moe_expert_capacity_factor": 1.0,
    }  # fmt: skip
    assert [axis for axis, _ in summed_axes(configured)] == ["dp", "tp"]


def test_a_release_that_sums_over_all_ranks_keeps_nothing() -> None:
    values = {**EXPERTS, "moe_z_loss_coeff": 1e-3, "calculate_per_token_loss": True}
    assert "tp" in dict(fixed_axes(values, (0, 18, 2)))
    assert "tp" not in dict(fixed_axes(values, (0, 19, 0)))


def test_dp_stays_that_of_the_first_round_once_it_is_known() -> None:
    flags = f"{GPT} {MOE} global_aux_loss --moe-aux-loss-coeff 1e-2"
    limits = read_arguments(flags.split()).limits
    assert refusal(Degrees(1, 1, 2), limits) is None and refusal(Degrees(1, 1, 4), limits) is None
    begun = limits.with_first_dp(2)
    assert refusal(Degrees(1, 2, 2), begun) is None
    assert "dp=4 must stay 2: --moe-router-load" in str(refusal(Degrees(1, 1, 4), begun))


@pytest.mark.parametrize(
    ("flags", "is_fixed"),
    [
        ("--fim-data", True),
        ("--sft", True),
        ("--allow-ambiguous-pad-tokens", True),
        ("--tokenizer-type BertWordPieceLowerCase", True),
        ("--tokenizer-type NullTokenizer", False),
        ("--sft --calculate-per-token-loss", False),
        ("--sft --calculate-per-token-loss --mtp-num-layers 1", True),
        ("--dsa-indexer-loss-coeff 0.1", True),
    ],
)
def test_micro_batches_stay_where_each_has_a_mean_of_its_own(flags: str, is_fixed: bool) -> None:
    found = dict(fixed_passes(values_of(read_arguments(f"{GPT} {flags}".split()).given)))
    assert ("micro-batch" in found) == is_fixed


def test_the_page_shows_every_sum() -> None:
    rows = re.findall(r"^\| `(--\S+)` \| (.*) \| (.*) \|$", PAGE.read_text(), re.M)
    assert rows == [
        (
            each.flag,
            each.over + ("" if each.last is None else " (up to {}.{})".format(*each.last)),
            ", ".join(each.stays),
        )
        for each in sums.SUMS
    ]


@pytest.mark.parametrize("flags", ["--sft", "--encoder-num-layers 2 --decoder-num-layers 2"])
def test_an_evaluation_keeps_its_micro_batch_where_it_is_a_mean_over_them(flags: str) -> None:
    asked = f"{GPT} {flags} --eval-global-batch-size 12"
    limits = read_arguments(asked.split()).limits
    assert refusal(Degrees(1, 1, 3), limits) is None
    assert "evaluation" in str(refusal(Degrees(1, 1, 4), limits))
    assert (
        refusal(Degrees(1, 1, 4), read_arguments(asked.replace(flags, "").split()).limits) is None
    )
