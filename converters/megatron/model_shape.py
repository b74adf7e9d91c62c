"""A model's shape and a step's work, by Megatron-LM's flags.

Source: megatron/training/arguments.py of 0.14.0 to 0.20 (d98e8a64): defaults, and consequences of
other flags.
"""

import re
from collections.abc import Mapping

from scalai.converters.megatron.arguments import OFFLOAD_FRACTIONS, MegatronArguments, integer
from scalai.converters.megatron.rules import Given, fixed_passes, values_of
from scalai.core.degrees.passes import RECOMPUTES, Offload, Recompute
from scalai.core.errors import RefusedError
from scalai.core.planner.columns import NO_SHARDING, OPTIMIZER, Workload
from scalai.core.planner.search import Choices
from scalai.core.planner.shape import ModelShape

NEEDED: Mapping[str, str] = {
    "--num-layers": "the number of layers",
    "--hidden-size": "the width of a layer",
    "--num-attention-heads": "the number of heads",
    "--seq-length": "the length of a sequence",
    "--global-batch-size": "the samples of a step",
}
_UNKNOWN = {
    "--multi-latent-attention": "the size of its parts is not modelled",
    "--hybrid-layer-pattern": "layers of other kinds are not modelled",
    "--encoder-num-layers": "models with an encoder are not modelled",
    "--mtp-num-layers": "layers that predict further tokens are not modelled",
}
_FREQUENCY = re.compile(r"\[[\d,\s]+\](?:\*\d+)?")


def workload_of(arguments: MegatronArguments, vocab: int | None = None) -> Workload:
    """Return the work of a step of a Megatron-LM job.

    Args:
        vocab: Rows of the embedding, if no flag says them.

    Raises:
        RefusedError: A flag is missing, or the model is of a kind without a cost model.
    """
    given = arguments.given
    for flag, why in _UNKNOWN.items():
        if flag in given:
            raise RefusedError(f"{flag}: {why}; choose its degrees by a [degrees] table.")
    batch = arguments.limits.global_batch_size
    missing = [
        f"{flag} ({what})" for flag, what in NEEDED.items()
        if integer(given, flag) is None and not (flag == "--global-batch-size" and batch)
    ]  # fmt: skip
    if missing:
        raise RefusedError(f"the command line lacks {', '.join(missing)}; add it.")
    precision = "fp32"
    for flag, name in (("--fp16", "fp16"), ("--bf16", "bf16"), ("--fp8-format", "fp8")):
        precision = name if flag in given else precision
    gradient = 2 if "--grad-reduce-in-bf16" in given else None
    dropouts = (given.get(f"--{part}-dropout", ("0.1",)) for part in ("hidden", "attention"))
    is_fused = _is_attention_fused(given)
    has_dropout = any(float(words[0]) > 0 if words else True for words in dropouts)
    return Workload(
        _shape(given, vocab), batch or 0, precision, is_fused, has_dropout, gradient,
        expert_tp=arguments.limits.expert_tp, expert_capacity=_expert_capacity(given),
    )  # fmt: skip


def _is_attention_fused(given: Given) -> bool:
    return "--use-flash-attn" in given or not (
        given.get("--transformer-impl") == ("local",)
        or given.get("--attention-backend") in (("unfused",), ("local",))
    )


def choices_of(arguments: MegatronArguments) -> Choices:
    """Return the choices of a search for this job: the distributed optimizer stays if asked for,
    context parallelism is as in the flags, and experts stay as they are spread."""
    given, initial = arguments.given, arguments.initial
    sharding = (OPTIMIZER,) if "--use-distributed-optimizer" in given else (NO_SHARDING, OPTIMIZER)
    return Choices(
        sharding=sharding,
        offload=(offload_of(arguments), *offloads_of(arguments)),
        is_sequence_parallel=arguments.limits.is_sequence_parallel,
        context_parallel=(initial.cp or 1,),
        expert_parallel=(initial.ep or 1,),
    )


def recompute_of(arguments: MegatronArguments) -> Recompute:
    given = arguments.given
    if given.get("--recompute-granularity") == ("full",):
        return "full"
    is_selective = given.get("--recompute-granularity") == ("selective",)
    return "selective" if is_selective or "--recompute-activations" in given else "none"


def more_recompute_of(arguments: MegatronArguments) -> tuple[Recompute, ...]:
    """Return further recomputations for the script, each saving more memory than the one before.
    Its own cannot be taken back by appending flags."""
    own = RECOMPUTES.index(recompute_of(arguments))
    is_fused = _is_attention_fused(arguments.given)
    # Fused attention never keeps its scores: selective saves nothing.
    return tuple(kind for kind in RECOMPUTES[own + 1 :] if kind == "full" or not is_fused)


def offload_of(arguments: MegatronArguments) -> Offload:
    """Return the optimizer's state in host memory by the script's flags, the least of a kind."""
    given = arguments.given
    if "--optimizer-cpu-offload" not in given:
        return "none"
    share = float(given.get("--optimizer-offload-fraction", ("1",))[0])
    kinds = [kind for kind, least in OFFLOAD_FRACTIONS.items() if share >= float(least)]
    return kinds[-1] if kinds else "none"


def offloads_of(arguments: MegatronArguments) -> tuple[Offload, ...]:
    """Return further states in host memory for the script, each with less on the device."""
    fixed = dict(fixed_passes(values_of(arguments.given), arguments.release))
    return () if "offload" in fixed else tuple(OFFLOAD_FRACTIONS)


def sharding_of(arguments: MegatronArguments) -> int:
    """Return the sharding over the script's data-parallel ranks, as ``columns.py`` counts it."""
    return OPTIMIZER if "--use-distributed-optimizer" in arguments.given else NO_SHARDING


def _shape(given: Given, vocab: int | None) -> ModelShape:
    layers, hidden = integer(given, "--num-layers") or 0, integer(given, "--hidden-size") or 0
    heads = integer(given, "--num-attention-heads") or 0
    if not heads or (hidden % heads and "--kv-channels" not in given):
        raise RefusedError(
            f"--num-attention-heads {heads} does not divide --hidden-size {hidden}; use a divisor, "
            "or state --kv-channels."
        )
    is_gated = "--swiglu" in given
    # The default of validate_args; a gated unit is narrowed to a multiple of 64.
    default = int((4 * hidden * 2 / 3) / 64) * 64 if is_gated else 4 * hidden
    ffn = integer(given, "--ffn-hidden-size") or default
    groups = integer(given, "--num-query-groups") if "--group-query-attention" in given else None
    kind = (given.get("--position-embedding-type") or ("learned_absolute",))[0]
    positions = integer(given, "--max-position-embeddings", "--seq-length") or 0
    experts = integer(given, "--num-experts") or 0
    return ModelShape(
        layers=layers, hidden=hidden, heads=heads, ffn=ffn, vocab=_vocab(given, vocab),
        seq=integer(given, "--seq-length") or 0, kv_groups=groups or heads,
        head_dim=integer(given, "--kv-channels") or hidden // heads,
        positions=positions if kind == "learned_absolute" else 0,
        is_gated=is_gated,
        is_tied="--untie-embeddings-and-output-weights" not in given,
        has_bias="--disable-bias-linear" not in given,
        has_qkv_bias="--add-qkv-bias" in given,
        has_norm_bias=given.get("--normalization") != ("RMSNorm",),
        experts=experts,
        moe_layers=_moe_layers(given, layers) if experts else 0,
        top_k=(integer(given, "--moe-router-topk") or 2) if experts else 0,
        expert_ffn=(integer(given, "--moe-ffn-hidden-size") or ffn) if experts else 0,
        shared_ffn=(integer(given, "--moe-shared-expert-intermediate-size") or 0) if experts else 0,
    )  # fmt: skip


def _expert_capacity(given: Given) -> float:
    """Return experts' rows over copies of tokens: rows above the capacity are dropped, rows below
    it padded on request."""
    stated = given.get("--moe-expert-capacity-factor")
    factor = float(stated[0]) if stated else 1.0
    return factor if "--moe-pad-expert-input-to-capacity" in given else min(factor, 1.0)


def _vocab(given: Given, vocab: int | None) -> int:
    padded = integer(given, "--padded-vocab-size")
    rows = padded or vocab or integer(given, "--vocab-size")
    if rows is None:
        raise RefusedError(
            "the size of the vocabulary is known once the tokenizer is loaded; state it by --vocab "
            "or by the job's own --padded-vocab-size."
        )
    if padded:
        return padded
    multiple = integer(given, "--make-vocab-size-divisible-by") or 128
    return -(-rows // multiple) * multiple


def _moe_layers(given: Given, layers: int) -> int:
    """Return the number of layers with experts: each ``N``-th, or those of a pattern of 0 and 1."""
    text = "".join(given.get("--moe-layer-freq") or ("1",)).replace(" ", "")
    if text.isdecimal() and int(text):
        return len(range(0, layers, int(text)))
    parts = _FREQUENCY.findall(text)
    pattern: list[str] = []
    for part in parts:
        inner, _, times = part.partition("]")
        pattern += inner[1:].split(",") * int(times[1:] or 1)
    if len(pattern) != layers or set(pattern) - {"0", "1"}:
        raise RefusedError(
            f"--moe-layer-freq {text} is no pattern of 0 and 1 for {layers} layers, such as "
            f"([0]*1+[1]*{layers - 1})."
        )
    return pattern.count("1")
