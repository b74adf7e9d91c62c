"""Megatron-LM's command line: the model in it, and the flags to append for other degrees.

Nothing of Megatron-LM is imported. Its parser takes no abbreviations (``allow_abbrev=False`` in
every version from 0.14 on), the last occurrence of a flag wins, and no value begins with ``--``. So
derived flags are appended, and a person's own are never rewritten. ``rules.py`` has the fixed
facts; workers ask it too.

Source: megatron/training/arguments.py of 0.14.0, 0.15.3, 0.16.1, 0.17.1, 0.19.0, 0.20 (d98e8a64);
megatron/core/num_microbatches_calculator.py of 0.14.0 to 0.20 (the step schedule is of 0.20) and
megatron/core/transformer/pipeline_parallel_layer_layout.py of 0.14.0 to 0.20.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scalai.converters.megatron.rules import (
    LAYOUT,
    QUERY_GROUPS_SHARED,
    Given,
    faults_of,
    fixed_axes,
    is_derived_layout,
    layout_of,
    may_have_uneven_stages,
    values_of,
)
from scalai.converters.megatron.sums import EVALUATION, Release, sums_of
from scalai.core.degrees.batches import BatchRamp
from scalai.core.degrees.degrees import DegreeRequest, Degrees, ModelLimits, chunk_group
from scalai.core.degrees.passes import Offload, Recompute
from scalai.core.errors import RefusedError, UsageError, refuse_all

TOLD = (
    "num_attention_heads", "seq_length", "moe_router_topk", "global_batch_size", "hidden_dropout",
    "attention_dropout", "fp8",
)  # fmt: skip
"""Arguments that workers report for readers of their generations: no tensor says them."""
TOLD_FACT = "arguments"
"""Name of the fact with them (``about.facts`` of a generation, docs/format.md)."""


def told_of(arguments: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    plain = (bool, int, float, str)
    return {name: arguments[name] for name in TOLD if isinstance(arguments.get(name), plain)}


RAMP, SCHEDULE = "--rampup-batch-size", "--step-batch-size-schedule"
_FACTORS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def ramp_sizes(words: Sequence[str], final: int) -> tuple[int, ...]:
    """Return the sizes of steps by ``--rampup-batch-size START INCREMENT SAMPLES``, with the final
    one.

    Raises:
        UsageError: It is no ramp to ``final``.
    """
    text = " ".join(words)
    ramp = _ramp(words, final)
    start, samples = ramp.start, ramp.ramp_samples
    if start == final:
        raise UsageError(
            f"--rampup-batch-size {text} begins with the final batch of {final}, by which "
            "Megatron-LM divides by zero; leave it out."
        )
    # Megatron-LM grows by equal numbers of samples: with none it divides by zero.
    if samples < 1:
        raise UsageError(f"--rampup-batch-size {text}: {samples} samples; use 1 or more.")
    return ramp.passed


def _ramp(words: Sequence[str], final: int) -> BatchRamp:
    try:
        start, increment, samples = map(int, words)
        return BatchRamp(start, increment, samples, final)
    except (ValueError, RefusedError) as error:
        text = " ".join(words)
        raise UsageError(f"--rampup-batch-size {text} is no batch-size ramp: {error}") from error


def stated_batch(given: Mapping[str, Sequence[str]]) -> int | BatchRamp | None:
    """Return the global batch stated by flags; None: none is stated, or it is neither of one size
    nor a ramp.

    Raises:
        UsageError: A flag has another kind of value.
    """
    words = given.get("--global-batch-size")
    if not words or SCHEDULE in given:
        return None
    if not words[0].isdecimal():
        raise UsageError(f"--global-batch-size {words[0]} is no whole number.")
    final = int(words[0])
    return _ramp(given[RAMP], final) if RAMP in given else final


def step_sizes(words: Sequence[str]) -> tuple[int, ...]:
    """Return the sizes of ``--step-batch-size-schedule "THRESHOLD:SIZE ..."`` in their order.

    Raises:
        UsageError: It is no such schedule.
    """
    text = " ".join(words)
    steps = []
    for step in text.replace(",", " ").split():
        threshold, separator, size = step.partition(":")
        try:
            if not separator:
                raise ValueError
            steps.append((_number(threshold), _number(size)))
        except (ValueError, OverflowError):
            raise UsageError(
                f"--step-batch-size-schedule: {step!r} is no THRESHOLD:SIZE, such as 250B:1536."
            ) from None
    steps.sort()
    thresholds = [threshold for threshold, _ in steps]
    if not steps or thresholds[0] or len(set(thresholds)) < len(steps):
        raise UsageError(
            f"--step-batch-size-schedule {text!r}: the first threshold must be 0, and no other may "
            "be there twice."
        )
    if min(size for _, size in steps) < 1:
        raise UsageError(f"--step-batch-size-schedule {text!r}: every size must be 1 or more.")
    return tuple(size for _, size in steps)


def _number(text: str) -> int:
    word = text.strip().upper()
    factor = _FACTORS.get(word[-1:], 1)
    return int(float(word[:-1] if factor > 1 else word) * factor)


LAYOUT_FLAG = "--pipeline-model-parallel-layout"
_REPEATED = (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)")
_MOST = 100_000
"""Most characters of a written-out layout."""


def stages_of(text: str) -> tuple[str, ...]:
    """Return the stages of a layout such as ``Et|(tt|)*2,tL``, each as its letters: E (embedding),
    t (layer), m (a layer for further tokens), L (loss).

    Raises:
        UsageError: Another letter stands there, or it is too long.
    """
    written = text.replace(",", "")
    for pattern in _REPEATED:
        counts = re.findall(r"\*(\d+)", written)
        if sum(map(int, counts)) * len(written) > _MOST:
            raise UsageError(f"{LAYOUT_FLAG} {text!r} repeats layers beyond all models.")
        written = re.sub(pattern, lambda found: found[1] * int(found[2]), written)
    unknown = sorted(set(written) - set("EtmL|"))
    if unknown:
        raise UsageError(
            f"{LAYOUT_FLAG} {text!r}: {unknown[0]!r} is no layer; E, t, m, L and | are known."
        )
    return tuple(written.split("|"))


def layout_fault(
    stages: tuple[str, ...], layers: int | None, pp: int, predicted: int = 0
) -> str | None:
    """Return a reason against these stages on ``pp`` pipeline ranks; None: there is none.

    Args:
        predicted: Layers for further tokens (MTP).
    """
    order = "".join(stages)
    if len(stages) % pp:
        return f"{LAYOUT_FLAG} has {len(stages)} stages, which pp={pp} does not divide"
    if order[:1] != "E" or order[-1:] != "L" or order.count("E") + order.count("L") != 2:
        return f"{LAYOUT_FLAG}: the first layer must be E, the last L, and both once"
    if layers is not None and order.count("t") != layers:
        return f"{LAYOUT_FLAG} has {order.count('t')} layers, --num-layers says {layers}"
    if order.count("m") != predicted:
        return f"{LAYOUT_FLAG} has {order.count('m')} m, {_PREDICTED} says {predicted}"
    return None


_UNDERIVED: Mapping[str, str] = {
    "--cpu-offloading-num-layers": "counts layers of a pipeline stage and stays as given",
    "--recompute-num-layers": "counts layers of a pipeline stage and stays as given",
    "--tp-comm-overlap-cfg": "its contents may depend on TP and stay as given",
    "--use-checkpoint-args": "the model comes from the checkpoint; state its limits under [model]",
    "--use-tp-pp-dp-mapping": "ranks stand in the order tp-pp-dp instead of tp-dp-pp",
}
"""Flags that may depend on the degrees, beyond derivation."""

_NEEDS_TP = ("--distribute-saved-activations", "--tp-comm-overlap")
_NEEDS_EVEN_SHARES = {
    "--hybrid-context-parallel", SCHEDULE, "--vision-pretraining", "--cuda-graph-impl",
    "--enable-cuda-graph", "--external-cuda-graph", "--overlap-moe-expert-parallel-comm",
    "--iterations-to-skip",
}  # fmt: skip
"""Samples are not dealt by place, or a filler would not be known as one."""
_BALANCE, _GLOBAL_BALANCE = "--moe-router-load-balancing-type", "global_aux_loss"
"""A filler's tokens would count in other replicas' losses."""
_NEEDS_CHUNKS = ("--overlap-p2p-communication-warmup-flush",)
_LAYERS_PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
_CHUNKS = "--num-virtual-stages-per-pipeline-rank"
_CHUNK_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
_FIRST_STAGE = "--decoder-first-pipeline-num-layers"
_LAST_STAGE = "--decoder-last-pipeline-num-layers"
_PREDICTED = "--mtp-num-layers"
_SHARED_FFN = "--moe-shared-expert-intermediate-size"
_RECOMPUTE: Mapping[Recompute | None, tuple[str, ...]] = {
    "selective": ("--recompute-granularity", "selective"),
    "full": (
        "--recompute-granularity", "full", "--recompute-method", "uniform",
        "--recompute-num-layers", "1",
    ),
}  # fmt: skip
"""Each layer is computed again from its own input, on any number of pipeline stages."""
OFFLOAD_FRACTIONS: Mapping[Offload, str] = {"optimizer-half": "0.5", "optimizer": "1.0"}
"""``--optimizer-offload-fraction``, a share of the parameters that a rank updates."""
_OVERLAPS_SOUNDLY = (0, 16)
"""Before, weights on their way back to the device are not waited for (hybrid_optimizer.py)."""
_PADDED_VOCAB = "--padded-vocab-size"
_EVAL_BATCH, _EVAL_MICRO = "--eval-global-batch-size", "--eval-micro-batch-size"


@dataclass(frozen=True, slots=True)
class MegatronArguments:
    """A command line's flags, the model's limits and the requested degrees."""

    given: Given
    limits: ModelLimits
    initial: DegreeRequest
    release: Release | None = None
    """Of Megatron-core; None: not known."""


def is_megatron(script_args: Sequence[str]) -> bool:
    given = scan(script_args)
    return {"--micro-batch-size", "--num-attention-heads"} <= set(given) or any(
        flag in given for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size")
    )


def read_arguments(
    script_args: Sequence[str],
    *,
    release: Release | None = None,
    allow_untested: bool = False,
) -> MegatronArguments:
    """Read the arguments of a Megatron-LM training script.

    Args:
        release: Release of Megatron-core; None: unknown, the workers' own decides.
        allow_untested: Accept built, but untested features.

    Raises:
        RefusedError: The job cannot be elastic; names every flag in the way, why, and the way out.
        UsageError: A value is not a number.
    """
    given = scan(script_args)
    refuse_all(faults_of(values_of(given), allow_untested=allow_untested))
    initial = _initial(given)
    refuse_all(_stage_faults(given, initial.pp))
    return MegatronArguments(given, _limits(given, initial, release), initial, release)


def derived_flags(
    arguments: MegatronArguments,
    degrees: Degrees,
    padded_vocab_size: int | None,
    micro_batch_size: int | None = None,
    eval_batch_size: int | None = None,
    recompute: Recompute | None = None,
    offload: Offload | None = None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the flags to append for ``degrees``, and one line for each flag left as it is.

    Sequence parallelism needs no flag: Megatron-LM turns it off itself at TP 1 (a flag without a
    value could not be taken back by appending).

    Args:
        padded_vocab_size: Rows of the embedding in the job's first generation; None: unknown yet.
        micro_batch_size: None: as given.
        eval_batch_size: Samples of a step of an evaluation in the job's first round; None: unknown
            yet, or stated by a flag.
        recompute: Recomputation in the backward pass; None: as given.
        offload: State in host memory; None: as given.

    Raises:
        RefusedError: The padded vocabulary or the virtual stages do not fit these degrees.
    """
    given, flags = arguments.given, [
        "--tensor-model-parallel-size", str(degrees.tp),
        "--pipeline-model-parallel-size", str(degrees.pp),
    ]  # fmt: skip
    if degrees.ep > 1 or "--expert-model-parallel-size" in given:
        flags += ["--expert-model-parallel-size", str(degrees.ep)]
    if micro_batch_size is not None and micro_batch_size != arguments.initial.micro_batch_size:
        flags += ["--micro-batch-size", str(micro_batch_size)]
    flags += _RECOMPUTE.get(recompute, ())
    flags += _offloading(offload, arguments.release)
    if arguments.limits.num_experts and degrees.tp > 1 and "--sequence-parallel" not in given:
        flags.append("--sequence-parallel")  # Megatron-LM trains experts under TP no other way.
    flags += _evaluation(arguments, degrees.dp, micro_batch_size, eval_batch_size)
    flags += _vocabulary(given, degrees.tp, padded_vocab_size)
    flags += _virtual_stages(arguments, degrees, micro_batch_size)
    return tuple(flags), tuple(_notes(arguments, degrees, padded_vocab_size))


def scan(script_args: Sequence[str]) -> Given:
    """Return each flag of a command line with the values behind it, however many its kind takes."""
    given: dict[str, tuple[str, ...]] = {}
    current: str | None = None
    for word in script_args:
        if word.startswith("--"):
            current, has_value, value = word.partition("=")
            given[current] = (value,) if has_value else ()
        elif current is not None:
            given[current] += (word,)
    return given


def integer(given: Given, *names: str) -> int | None:
    """Return the number behind the first of these flags; None: none is given.

    Raises:
        UsageError: The value is no whole number.
    """
    for name in names:
        if name not in given:
            continue
        values = given[name]
        try:
            return int(values[0])
        except (IndexError, ValueError):
            shown = values[0] if values else "nothing"
            raise UsageError(f"{name} has {shown!r} behind it; expected a whole number.") from None
    return None


def _initial(given: Given) -> DegreeRequest:
    pp = integer(given, "--pipeline-model-parallel-size") or 1
    return DegreeRequest(
        tp=integer(given, "--tensor-model-parallel-size") or 1,
        pp=pp,
        vpp=_initial_chunks(given, pp),
        cp=integer(given, "--context-parallel-size") or 1,
        ep=integer(given, "--expert-model-parallel-size") or 1,
        micro_batch_size=integer(given, "--micro-batch-size"),
    )


def _initial_chunks(given: Given, pp: int) -> int:
    layout = given.get(LAYOUT_FLAG)
    if layout:
        return max(1, len(stages_of(layout[0])) // pp)
    layers = _counted_layers(given)
    per_chunk = integer(given, _LAYERS_PER_CHUNK)
    if per_chunk and layers:
        return max(1, layers // pp // per_chunk)
    return integer(given, _CHUNKS) or 1


def _counted_layers(given: Given) -> int | None:
    layers = integer(given, "--num-layers", "--decoder-num-layers")
    return None if layers is None else layers + _extra_layers(given)


def _own_stages(given: Given, initial: DegreeRequest) -> tuple[int, int] | None:
    """Return PP and VPP of stages that a person states; VPP 0: of any, None: nobody does."""
    if LAYOUT_FLAG in given:
        return None if is_derived_layout(values_of(given)) else (initial.pp, initial.vpp)
    return (initial.pp, 0) if {_FIRST_STAGE, _LAST_STAGE} & set(given) else None


def _extra_layers(given: Given) -> int:
    return sum(f"--account-for-{part}-in-pipeline-split" in given for part in ("embedding", "loss"))


def _limits(given: Given, initial: DegreeRequest, release: Release | None) -> ModelLimits:
    needs_tp = next((flag for flag in _NEEDS_TP if flag in given), None)
    has_groups = "--group-query-attention" in given and "--multi-latent-attention" not in given
    experts = integer(given, "--num-experts") or None
    values = values_of(given)
    is_uneven = may_have_uneven_stages(values)
    # Layers of several kinds, or a layout beside them, are divided in a way of their own.
    is_stated = values.get("hybrid_layer_pattern") or (values.get(LAYOUT) and not is_uneven)
    final, others = _batches(given)
    ffn = _ffn_hidden_size(given)
    is_dense = experts is None or given.get("--moe-layer-freq", ("1",)) != ("1",)
    return ModelLimits(
        num_attention_heads=integer(given, "--num-attention-heads"),
        num_query_groups=integer(given, "--num-query-groups") if has_groups else None,
        num_layers=None if is_stated else integer(given, "--num-layers", "--decoder-num-layers"),
        padded_vocab_size=integer(given, _PADDED_VOCAB),
        global_batch_size=final,
        micro_batch_size=initial.micro_batch_size,
        seq_length=integer(given, "--seq-length", "--encoder-seq-length"),
        num_experts=experts,
        qkv_rows=_qkv_rows(given),
        ffn_hidden_size=ffn if is_dense else None,
        expert_ffn_hidden_size=(integer(given, "--moe-ffn-hidden-size") or ffn)
        if experts
        else None,
        shared_ffn_hidden_size=integer(given, _SHARED_FFN) if experts else None,
        expert_tp=integer(given, "--expert-tensor-parallel-size"),
        ramp_batch_sizes=others,
        eval_batch_size=None if _EVAL_MICRO in given else integer(given, _EVAL_BATCH),
        evaluates_one_micro_batch=SCHEDULE in given and not {_EVAL_BATCH, _EVAL_MICRO} & set(given),
        eval_micro_batch_stays=any(EVALUATION in each.stays for each in sums_of(values, release)),
        optimizer_instances=integer(given, "--num-distributed-optimizer-instances") or 1,
        has_uneven_stages=is_uneven,
        own_stages=_own_stages(given, initial) if is_uneven else None,
        has_uneven_shares=not _NEEDS_EVEN_SHARES & set(given)
        and _GLOBAL_BALANCE not in given.get(_BALANCE, ())
        and given.get("--dataloader-type", ("single",)) in (("single",), ("cyclic",)),
        extra_layers=_extra_layers(given),
        first_stage_layers=integer(given, _FIRST_STAGE),
        last_stage_layers=integer(given, _LAST_STAGE),
        is_sequence_parallel="--sequence-parallel" in given or experts is not None,
        is_query_group_shared=release is None or release >= QUERY_GROUPS_SHARED,
        min_pp_with_vpp=3 if "--no-overlap-p2p-communication" in given else 2,
        min_tp=1 if needs_tp is None else 2,
        min_tp_reason="" if needs_tp is None else f"{needs_tp} needs tensor parallelism",
        chunk_group=integer(given, _CHUNK_GROUP),
        needs_chunks=next((f"{flag} needs them" for flag in _NEEDS_CHUNKS if flag in given), ""),
        fixed=tuple(_fixed(given, initial, release)),
    )


def _qkv_rows(given: Given) -> int | None:
    heads, hidden = integer(given, "--num-attention-heads"), integer(given, "--hidden-size")
    size = integer(given, "--kv-channels") or (hidden // heads if hidden and heads else None)
    if not heads or size is None or "--multi-latent-attention" in given:
        return None
    is_grouped = "--group-query-attention" in given
    groups = (integer(given, "--num-query-groups") if is_grouped else None) or heads
    gate = heads if "--attention-output-gate" in given else 0
    return (heads + 2 * groups + gate) * size


def _ffn_hidden_size(given: Given) -> int | None:
    stated = integer(given, "--ffn-hidden-size")
    hidden = integer(given, "--hidden-size")
    if stated is not None or hidden is None:
        return stated
    # The default of validate_args; a gated unit is narrowed to a multiple of 64.
    return int((4 * hidden * 2 / 3) / 64) * 64 if "--swiglu" in given else 4 * hidden


def _batches(given: Given) -> tuple[int | None, tuple[int, ...]]:
    """Return the final global batch size, and the job's other sizes, ascending."""
    final = integer(given, "--global-batch-size")
    sizes: tuple[int, ...] = ()
    if SCHEDULE in given:
        sizes = step_sizes(given[SCHEDULE])
        final = final or sizes[-1]
    elif RAMP in given and final is not None:
        sizes = ramp_sizes(given[RAMP], final)
    return final, tuple(sorted(set(sizes) - {final}))


def _evaluation(
    arguments: MegatronArguments, dp: int, micro: int | None, batch: int | None
) -> Iterator[str]:
    """Yield flags for the same samples of an evaluation's step at any number of replicas.

    Without a stated batch, Megatron-LM evaluates micro-batch times DP samples a step: those of the
    first round are kept. Its losses are sums over micro-batches of any size.
    """
    given, micro = arguments.given, micro or arguments.initial.micro_batch_size
    stated = integer(given, _EVAL_BATCH)
    if batch is not None and evaluates_by_replicas(arguments):
        yield from (_EVAL_BATCH, str(batch))
        stated = batch
    if stated is None or micro is None or _EVAL_MICRO in given:
        return
    if stated % dp == 0:
        share = math.gcd(stated // dp, micro)
        if share != micro:
            yield from (_EVAL_MICRO, str(share))


def _stage_faults(given: Given, pp: int) -> Iterator[str]:
    if is_derived_layout(values_of(given)):
        return  # it replaces the others
    ways = [flag for flag in (_LAYERS_PER_CHUNK, _CHUNKS, LAYOUT_FLAG) if flag in given]
    if len(ways) > 1:
        yield f"{' and '.join(ways)} both say what stages have; keep one"
    ends = [flag for flag in (_FIRST_STAGE, _LAST_STAGE) if flag in given]
    if ends and _LAYERS_PER_CHUNK in given:
        yield f"{ends[0]}: virtual stages are then stated by {_CHUNKS}, not {_LAYERS_PER_CHUNK}"
    if ends and _extra_layers(given):
        yield f"{ends[0]}: embedding and loss cannot count as layers beside it; keep one"
    layout = given.get(LAYOUT_FLAG)
    if layout:
        if ends or _extra_layers(given):
            flag = ends[0] if ends else "--account-for-..-in-pipeline-split"
            yield f"{LAYOUT_FLAG} and {flag} both say what stages have; keep one"
        stages, predicted = stages_of(layout[0]), integer(given, _PREDICTED) or 0
        fault = layout_fault(stages, integer(given, "--num-layers"), pp, predicted)
        yield from [fault] if fault else []


def _fixed(
    given: Given, initial: DegreeRequest, release: Release | None
) -> Iterator[tuple[str, int, str]]:
    for axis, why in fixed_axes(values_of(given), release):
        # No flag states DP.
        yield axis, 0 if axis == "dp" else getattr(initial, axis) or 1, why


def _offloading(offload: Offload | None, release: Release | None) -> Iterator[str]:
    """Yield the flags for masters and moments in host memory.

    The optimizer there takes the way of the precision-aware one through Megatron-LM, with torch's
    Adam in fp32.
    """
    fraction = None if offload is None else OFFLOAD_FRACTIONS.get(offload)
    if fraction is None:
        return
    yield from ("--use-precision-aware-optimizer", "--optimizer-cpu-offload")
    yield from ("--optimizer-offload-fraction", fraction)
    if release is not None and release >= _OVERLAPS_SOUNDLY:
        yield "--overlap-cpu-optimizer-d2h-h2d"


def _vocabulary(given: Given, tp: int, padded: int | None) -> Iterator[str]:
    pinned = integer(given, _PADDED_VOCAB)
    if padded is None:
        return
    if padded % tp:
        raise RefusedError(
            f"the vocabulary is padded to {padded} rows, which tp={tp} does not divide, and "
            "padding is trained: it cannot change. Use a tp that divides it."
        )
    if pinned is not None and pinned != padded:
        raise RefusedError(
            f"{_PADDED_VOCAB} {pinned} is given, but the job's state has {padded} rows. Give "
            f"{_PADDED_VOCAB} {padded}, or begin a new job."
        )
    if pinned is None:
        # Megatron-LM pads to a multiple of divisor * tp.
        yield from ("--make-vocab-size-divisible-by", str(padded // tp))


def _virtual_stages(
    arguments: MegatronArguments, degrees: Degrees, micro: int | None
) -> Iterator[str]:
    given, limits = arguments.given, arguments.limits
    if _CHUNK_GROUP in given and degrees.vpp > 1:
        size = micro or arguments.initial.micro_batch_size or 1
        yield from (_CHUNK_GROUP, str(chunk_group(degrees, limits, size)))
    if any(axis == "vpp" for axis, _, _ in limits.fixed) and degrees.vpp == arguments.initial.vpp:
        return
    pp, vpp = limits.own_stages or (0, 0)
    if vpp and degrees.pp == pp:
        return
    layers, own = _counted_layers(given), limits.num_layers
    is_even = layers is not None and layers % (degrees.pp * degrees.vpp) == 0
    is_as_given = degrees.pp == pp if pp else is_even and LAYOUT_FLAG not in given
    if limits.has_uneven_stages and own and not is_as_given:
        predicted = integer(given, _PREDICTED) or 0
        yield from (LAYOUT_FLAG, layout_of(own, degrees.pp, degrees.vpp, predicted))
        return
    if _LAYERS_PER_CHUNK in given:
        if layers is None or layers % (degrees.pp * degrees.vpp):
            raise RefusedError(
                f"{_LAYERS_PER_CHUNK} cannot be derived for {degrees}: --num-layers is {layers}. "
                f"Use {_CHUNKS}, or other degrees."
            )
        # A whole stage in one chunk is how the interleaved schedule is turned off again.
        yield from (_LAYERS_PER_CHUNK, str(layers // (degrees.pp * degrees.vpp)))
    elif _CHUNKS in given or degrees.vpp > 1:
        yield from (_CHUNKS, str(degrees.vpp))


def underived_notes(arguments: MegatronArguments) -> Iterator[str]:
    """Yield a line for each given flag that may depend on the degrees."""
    for flag, reason in _UNDERIVED.items():
        if flag in arguments.given:
            yield f"{flag}: {reason}"
    if own := arguments.limits.own_stages:
        for flag in (LAYOUT_FLAG, _FIRST_STAGE, _LAST_STAGE):
            if flag in arguments.given:
                yield f"{flag}: holds at pp={own[0]}; at another pp, stages are as even as can be"


def evaluates_by_replicas(arguments: MegatronArguments) -> bool:
    """Whether no flag states the samples of a step of an evaluation."""
    return not {"--global-batch-size", _EVAL_BATCH} & set(arguments.given)


def _notes(
    arguments: MegatronArguments, degrees: Degrees, padded_vocab_size: int | None
) -> Iterator[str]:
    given = arguments.given
    yield from underived_notes(arguments)
    if "--sequence-parallel" in given and degrees.tp == 1:
        yield "--sequence-parallel: Megatron-LM turns it off itself, because tp=1"
    if padded_vocab_size is None and _PADDED_VOCAB not in given:
        yield (
            "--make-vocab-size-divisible-by: stays as given; the size that the first start pads to "
            "is kept from then on"
        )
