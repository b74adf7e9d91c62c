"""What a model sums over tokens that a layout regroups: by flags, by parsed arguments, by
configurations, and on the page."""

import re
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.megatron import sums
from scalai.converters.megatron.arguments import read_arguments
from scalai.converters.megatron.rules import fixed_axes, fixed_passes, summed_axes, values_of
from scalai.core.degrees.degrees import Degrees, refusal

PAGE = Path(__file__).parents[2] / "docs" / "megatron.md"
GPT = "--num-layers 8 --num-attention-heads 8 --micro-batch-size 2 --global-batch-size 24"
MOE = "--num-experts 4 --moe-router-load-balancing-type"
EXPERTS = {"num_experts": 4}
GLOBAL = "counts each expert's tokens over all data-parallel ranks"
LOCAL = "weighs auxiliary and z losses by one rank's tokens"

ASKED: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("", {}, {}),
    ("--num-experts 4", EXPERTS, {}),
    ("--no-initialization", {"perform_initialization": False}, {"tp": "leaves weights unmarked"}),
    (
        f"{MOE} global_aux_loss --moe-aux-loss-coeff 1e-2",
        {
            **EXPERTS, "moe_router_load_balancing_type": "global_aux_loss",
            "moe_aux_loss_coeff": 0.01,
        },
        {"dp": GLOBAL},
    ),
    (
        f"{MOE} seq_aux_loss global_aux_loss --moe-aux-loss-coeff 1e-2 1e-3",
        {
            **EXPERTS, "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
            "moe_aux_loss_coeff": [0.01, 0.001],
        },
        {"dp": GLOBAL},
    ),
    (
        f"{MOE} seq_aux_loss global_aux_loss --moe-aux-loss-coeff 1e-2 0",
        {
            **EXPERTS, "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
            "moe_aux_loss_coeff": [0.01, 0.0],
        },
        {},
    ),
    (
        f"{MOE} aux_loss --moe-aux-loss-coeff 1e-2",
        {**EXPERTS, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01},
        {},
    ),
    (
        f"{MOE} sinkhorn",
        {**EXPERTS, "moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
        {"tp": "sinkhorn normalizes"},
    ),
    (
        "--num-experts 4 --moe-expert-capacity-factor 1.0",
        {**EXPERTS, "moe_expert_capacity_factor": 1.0},
        {"tp": "drops tokens"},
    ),
    (
        "--num-experts 4 --moe-expert-capacity-factor -1",
        {**EXPERTS, "moe_expert_capacity_factor": -1.0},
        {},
    ),
    (
        "--num-experts 4 --moe-expert-rank-capacity-factor 1.5",
        {**EXPERTS, "moe_expert_rank_capacity_factor": 1.5},
        dict.fromkeys(("tp", "dp", "ep"), "expert-parallel group"),
    ),
    (
        "--num-experts 4 --moe-aux-loss-coeff 1e-2 --calculate-per-token-loss",
        {
            **EXPERTS, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01,
            "calculate_per_token_loss": True,
        },
        {"tp": LOCAL},
    ),
    (
        "--num-experts 4 --moe-z-loss-coeff 1e-3 --calculate-per-token-loss",
        {**EXPERTS, "moe_z_loss_coeff": 1e-3, "calculate_per_token_loss": True},
        {"tp": LOCAL},
    ),
    (
        "--num-experts 4 --calculate-per-token-loss",
        {**EXPERTS, "moe_aux_loss_coeff": 0.0, "calculate_per_token_loss": True},
        {},
    ),
    ("--calculate-per-token-loss", {"calculate_per_token_loss": True}, {}),
    (
        "--dsa-indexer-loss-coeff 0.1",
        {"dsa_indexer_loss_coeff": 0.1},
        {"dp": "without dividing by the number of passes"},
    ),
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
    rows = re.findall(r"^\| `(--\S+)` \| (.*) \| (.*) \| `(\S+:\S+)` \|$", PAGE.read_text(), re.M)
    assert rows == [
        (
            each.flag,
            each.over + ("" if each.last is None else " (up to {}.{})".format(*each.last)),
            ", ".join(each.stays),
            each.source,
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
