"""Sums of Megatron-LM's function over groups of tokens or samples that depend on the layout.

A model with such a sum in its loss or routing is another function at another degree of that axis,
or with another micro-batch, though every tensor of its state is equal. One row a sum: ``rules.py``
keeps the fixed axes, docs/megatron.md shows the rows.

Source: megatron/core and megatron/training of 0.14.0, 0.16.1, 0.17.1, 0.18.2, 0.19.0 and of 0.20
(d98e8a64), each row at its function.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]
"""Arguments by their names in Megatron-LM's namespace, or a configuration's fields by theirs; an
absent one has its default."""
Release = tuple[int, ...]

BLOCKWISE = "blockwise"
"""Value of --muon-tp-mode: orthogonalize each tensor-parallel shard by itself."""
MUONS = ("muon", "adaptive_muon", "dist_muon", "dist_adaptive_muon")
_WHOLE_MATRIX = ("duplicated", "distributed")
"""Values of --muon-tp-mode: orthogonalize the whole matrix, in any layout."""
EVALUATION = "evaluation's micro-batch"
"""Fixed if ``evaluate`` takes the mean over micro-batches."""
_AUXILIARY = ("aux_loss", "seq_aux_loss", "global_aux_loss")


@dataclass(frozen=True, slots=True)
class LayoutSum:
    """One such sum.

    Attributes:
        flag: The flag that asks for it.
        over: The words behind the flag, about the summed tokens or samples.
        stays: Fixed axes, and fixed parts of the passes.
        source: File and function, below ``megatron/``.
        is_on: Whether arguments have it.
        last: The last release with it; None: all have it.
    """

    flag: str
    over: str
    stays: tuple[str, ...]
    source: str
    is_on: Callable[[Values], bool]
    last: Release | None = None

    @property
    def reason(self) -> str:
        """The flag and its sum, as a message says it."""
        return f"{self.flag} {self.over}"


def _has_experts(values: Values) -> bool:
    return bool(values.get("num_experts") or values.get("num_moe_experts"))


def _words(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _is_positive(value: Any) -> bool:
    """Whether a coefficient counts; Megatron-LM refuses one that is no number."""
    try:
        return float(value or 0) > 0
    except (TypeError, ValueError):
        return True


def _balances_by(values: Values, *kinds: str) -> bool:
    """Whether an auxiliary loss of one of these kinds has a coefficient."""
    named = _words(values.get("moe_router_load_balancing_type", "aux_loss"))
    coefficients = _words(values.get("moe_aux_loss_coeff"))
    coefficients += coefficients[-1:] * (len(named) - len(coefficients))
    return _has_experts(values) and any(
        kind in kinds and _is_positive(each)
        for kind, each in zip(named, coefficients, strict=False)
    )


def _scales_by_local_tokens(values: Values) -> bool:
    has_loss = _balances_by(values, *_AUXILIARY) or _is_positive(values.get("moe_z_loss_coeff"))
    return bool(values.get("calculate_per_token_loss")) and _has_experts(values) and has_loss


def _drops(values: Values) -> bool:
    factor = values.get("moe_expert_capacity_factor")
    return _has_experts(values) and factor is not None and not str(factor).startswith("-")


def _is_blockwise(values: Values) -> bool:
    return values.get("optimizer") in MUONS and values.get("muon_tp_mode") not in _WHOLE_MATRIX


def _masks(name: str, begin: str = "") -> Callable[[Values], bool]:
    """Return a test for arguments (set, or with this beginning) that leave tokens out of the loss.

    ``--calculate-per-token-loss`` weighs all alike, except those of MTP, scaled by a pass's own
    count (``process_mtp_loss``).
    """

    def is_on(values: Values) -> bool:
        is_per_token = values.get("calculate_per_token_loss") and not values.get("mtp_num_layers")
        value = values.get(name)
        return bool(value) and str(value).startswith(begin) and not is_per_token

    return is_on


MUON = LayoutSum(
    "--muon-tp-mode",
    "blockwise (the default up to 0.19) orthogonalizes each TP rank's shard by itself; duplicated "
    "and distributed take the whole matrix",
    ("tp",), "core/optimizer/muon.py:TensorParallelMuon.orthogonalize", _is_blockwise,
)  # fmt: skip
_OF_EACH_PASS = (
    "leaves tokens out of the loss, a mean over those of one micro-batch that are left "
    "(--calculate-per-token-loss weighs all alike)"
)
_LOSS_SOURCE = "core/pipeline_parallel/schedules.py:forward_step_calc_loss"
_ROUTER = "core/transformer/moe/router.py:TopKRouter."

SUMS: tuple[LayoutSum, ...] = (
    MUON,
    LayoutSum(
        "--moe-router-load-balancing-type",
        "global_aux_loss counts each expert's tokens over all data-parallel ranks, pass by pass",
        ("dp",), _ROUTER + "_apply_global_aux_loss",
        lambda values: _balances_by(values, "global_aux_loss"),
    ),
    LayoutSum(
        "--moe-router-load-balancing-type",
        "sinkhorn normalizes over one rank's tokens of a pass, a part of the sequence under TP",
        ("tp",), _ROUTER + "sinkhorn_load_balancing",
        lambda values: _has_experts(values)
        and "sinkhorn" in _words(values.get("moe_router_load_balancing_type")),
    ),
    LayoutSum(
        "--moe-expert-capacity-factor",
        "drops tokens beyond a share of one rank's tokens of a pass, a part of the sequence under "
        "TP",
        ("tp",), "core/transformer/moe/moe_utils.py:apply_router_token_dropping", _drops,
    ),
    LayoutSum(
        "--moe-expert-rank-capacity-factor",
        "drops tokens beyond a share of those that an expert-parallel group brings in a pass",
        ("tp", "dp", "ep"), "core/transformer/moe/token_dispatcher.py:_HybridEPManager.dispatch",
        lambda values: values.get("moe_expert_rank_capacity_factor") is not None,
    ),
    LayoutSum(
        "--moe-router-topk-limited-devices",
        "forms groups of experts by expert-parallel ranks",
        ("ep",), "core/transformer/transformer_config.py:TransformerConfig.__post_init__",
        lambda values: bool(values.get("moe_router_topk_limited_devices")),
    ),
    LayoutSum(
        "--calculate-per-token-loss",
        "weighs auxiliary and z losses by one rank's tokens of a pass, not by those of all TP "
        "ranks",
        ("tp",), _ROUTER + "attach_and_log_load_balancing_loss", _scales_by_local_tokens, (0, 18),
    ),
    LayoutSum(
        "--dsa-indexer-loss-coeff",
        "adds the indexer's loss of each pass without dividing by the number of passes",
        ("dp", "micro-batch"),
        "core/transformer/experimental_attention_variant/dsa.py:DSAIndexerLossAutoScaler.backward",
        lambda values: _is_positive(values.get("dsa_indexer_loss_coeff")), (0, 18),
    ),
    LayoutSum(
        "--no-initialization",
        "leaves weights unmarked that TP cuts, so that the norm of the gradient has those of the "
        "first TP rank alone",
        ("tp",), "core/tensor_parallel/layers.py:VocabParallelEmbedding.__init__",
        lambda values: bool(values.get("no_initialization"))
        or values.get("perform_initialization") is False,
    ),
    LayoutSum(
        "--num-experts",
        "balances the experts within a micro-batch, so that it is part of the loss",
        ("micro-batch",), _ROUTER + "routing", _has_experts,
    ),
    LayoutSum(
        "--eod-mask-loss", _OF_EACH_PASS, ("micro-batch",), _LOSS_SOURCE, _masks("eod_mask_loss"),
    ),
    LayoutSum("--sft", _OF_EACH_PASS, ("micro-batch", EVALUATION), _LOSS_SOURCE, _masks("sft")),
    LayoutSum("--fim-data", _OF_EACH_PASS, ("micro-batch",), _LOSS_SOURCE, _masks("fim_data")),
    LayoutSum(
        "--allow-ambiguous-pad-tokens", _OF_EACH_PASS, ("micro-batch",), _LOSS_SOURCE,
        _masks("allow_ambiguous_pad_tokens"),
    ),
    LayoutSum(
        "--encoder-num-layers", "is T5's: it " + _OF_EACH_PASS, ("micro-batch", EVALUATION),
        _LOSS_SOURCE,
        lambda values: bool(values.get("decoder_num_layers"))
        and _masks("encoder_num_layers")(values),
    ),
    LayoutSum(
        "--tokenizer-type", "Bert…: it " + _OF_EACH_PASS, ("micro-batch", EVALUATION),
        _LOSS_SOURCE, _masks("tokenizer_type", "Bert"),
    ),
)  # fmt: skip
"""Every known sum of the kind. None may be left out: fingerprints of the state do not show them."""


def sums_of(values: Values, release: Release | None = None) -> Iterator[LayoutSum]:
    """Yield the sums requested by arguments, or by the fields of a configuration.

    Args:
        release: Release of Megatron-core; None: unknown, any release's sums count.
    """
    for each in SUMS:
        is_past = each.last is not None and release is not None and release[:2] > each.last
        if not is_past and each.is_on(values):
            yield each
