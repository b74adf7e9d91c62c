"""Random command lines of Megatron-LM's pretrain_gpt.py with degrees to change to, and what our
laws say of them."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from scalai.converters.megatron.arguments import derived_flags, read_arguments
from scalai.converters.megatron.model_shape import offloads_of, workload_of
from scalai.core.degrees.degrees import Degrees, refusal
from scalai.core.errors import RefusedError, UsageError

VOCABULARY, PADDING = 128, 16
"""Rows before padding, and the multiple that they are padded to, times TP."""
PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
MOST_RANKS = 64
FLAGS = f"""
  --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
  --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
  --no-bias-dropout-fusion --no-rope-fusion --distributed-backend gloo --lr 1e-3
  --train-samples 100000 --tokenizer-type NullTokenizer --vocab-size 127 --mock-data --bf16
  --make-vocab-size-divisible-by {PADDING}
""".split()


@dataclass(frozen=True, slots=True)
class Case:
    """A script's flags, and the layout that it is to have; ``ranks`` may not be its world size."""

    flags: tuple[str, ...]
    degrees: Degrees
    micro_batch: int | None
    ranks: int
    first_tp: int
    """TP of the job's first round, by which the vocabulary was padded."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What our laws say: a refusal, or what Megatron-LM is given."""

    refused: str | None
    flags: tuple[str, ...]
    rows: int
    """Of the job's embedding."""


def judge(case: Case, *, release: tuple[int, ...] | None) -> Verdict:
    """Apply the laws of a running job, and of ``scalai plan``, to a case."""
    multiple = PADDING * case.first_tp
    padded = -(-VOCABULARY // multiple) * multiple
    if "--padded-vocab-size" in case.flags:
        padded = int(case.flags[case.flags.index("--padded-vocab-size") + 1])
    each = case.degrees.world_size // case.degrees.dp
    if case.ranks % each:
        return Verdict(f"{case.ranks} ranks are no multiple of {each}", _plain(case), padded)
    degrees = replace(case.degrees, dp=case.ranks // each)
    try:
        arguments = read_arguments(case.flags, release=release)
        limits = replace(arguments.limits, padded_vocab_size=padded)
        # The planner does not speak of layers for further tokens, a running job does.
        given = {flag: of for flag, of in arguments.given.items() if flag != "--mtp-num-layers"}
        workload_of(replace(arguments, given=given), VOCABULARY)
        why = refusal(degrees, limits, case.micro_batch)
        # As where nothing fits, if it is offered.
        offload = next(reversed(offloads_of(arguments)), None) if case.ranks % 3 else None
        flags, _ = derived_flags(
            replace(arguments, limits=limits), degrees, padded, case.micro_batch, offload=offload,
        )  # fmt: skip
    except (RefusedError, UsageError) as error:
        return Verdict(str(error), _plain(case), padded)
    return Verdict(why, (*case.flags, *flags), padded)


def _plain(case: Case) -> tuple[str, ...]:
    """What a person would write for the degrees, where nothing can be derived."""
    sizes, flags = case.degrees, list(case.flags)
    if PER_CHUNK in flags and sizes.vpp > 1:
        at = flags.index(PER_CHUNK)
        del flags[at : at + 2]
    is_stated = {"--pipeline-model-parallel-layout", PER_CHUNK} & set(flags)
    return (
        *flags, "--tensor-model-parallel-size", str(sizes.tp),
        "--pipeline-model-parallel-size", str(sizes.pp),
        "--expert-model-parallel-size", str(sizes.ep),
        *(() if is_stated or sizes.vpp == 1
          else ("--num-virtual-stages-per-pipeline-rank", str(sizes.vpp))),
        *(("--micro-batch-size", str(case.micro_batch)) if case.micro_batch else ()),
    )  # fmt: skip


def random_case(draw: random.Random, *, has_newest_flags: bool) -> Case:
    """Return a case; about a third of them are valid.

    Args:
        has_newest_flags: Whether flags of Megatron-LM 0.18 and later may be there, or of those
            before.
    """
    while True:
        case = _any(draw, has_newest_flags)
        if case.ranks <= MOST_RANKS:
            return case


def _any(draw: random.Random, has_newest_flags: bool) -> Case:
    pick = draw.choice
    degrees = Degrees(
        pick((1, 1, 2, 2, 3, 4, 8)), pick((1, 1, 2, 2, 3, 4)), pick((1, 2, 2, 3, 4, 5, 6)),
        cp=pick((1, 1, 1, 1, 2, 4)),
    )  # fmt: skip
    layers, final = pick((2, 4, 6, 7, 8, 11, 12, 12)), pick((12, 24, 24, 48, 72, 96))
    flags, words = _model(draw, layers, final)
    degrees = replace(degrees, ep=_experts(draw, flags, words))
    _switches(draw, flags, words)
    vpp = _stages(draw, flags, words, layers, degrees.pp)
    _batches(draw, flags, final, has_newest_flags)
    first = replace(degrees, vpp=vpp)
    flags |= {
        "tensor-model-parallel-size": first.tp, "pipeline-model-parallel-size": first.pp,
        "context-parallel-size": first.cp, "expert-model-parallel-size": first.ep,
    }  # fmt: skip
    degrees, micro_batch = first, None
    if draw.random() < 0.5:
        degrees = _changed(draw, first, has_experts="num-experts" in flags)
        micro_batch = pick((None, 1, 2, 4))
    ranks = degrees.world_size + (pick((1, 2)) if draw.random() < 0.03 else 0)
    return Case((*FLAGS, *_given(flags), *words), degrees, micro_batch, ranks, first.tp)


def _model(draw: random.Random, layers: int, final: int) -> tuple[dict[str, object], list[str]]:
    """Return flags of a dense model and its ``final`` batch: with values, and without."""
    pick, maybe = draw.choice, draw.random
    heads, words = pick((4, 8, 8, 12, 24)), list[str]()
    flags: dict[str, object] = {
        "num-layers": layers, "hidden-size": heads * 16,
        "num-attention-heads": heads, "seq-length": pick((48, 48, 64, 66)),
        "max-position-embeddings": 96, "micro-batch-size": pick((1, 1, 1, 2, 3)),
        "global-batch-size": final,
    }  # fmt: skip
    if maybe() < 0.4:
        groups = pick([size for size in (1, 2, 3, 4, 6, heads) if size <= heads])
        flags["num-query-groups"] = groups
        words.append("--group-query-attention")
    if maybe() < 0.2:
        flags["kv-channels"] = pick((8, 16, 32))
    if maybe() < 0.15:
        flags["hidden-size"] = pick((96, 100, 120))
    if maybe() < 0.3:
        flags["ffn-hidden-size"] = pick((64, 96, 96, 100, 192))
    return flags, words


def _experts(draw: random.Random, flags: dict[str, object], words: list[str]) -> int:
    """Add experts to some models; return over how many ranks they are spread."""
    pick, maybe = draw.choice, draw.random
    if maybe() >= 0.3:
        return 1
    flags |= {
        "num-experts": pick((4, 6, 8)), "moe-router-topk": 2,
        "moe-token-dispatcher-type": "alltoall",
    }  # fmt: skip
    words.append("--disable-bias-linear")
    if maybe() < 0.3:
        flags["expert-tensor-parallel-size"] = pick((1, 1, 2))
    if maybe() < 0.3:
        flags["moe-ffn-hidden-size"] = pick((32, 48, 50))
    return pick((1, 2, 2, 3, 4))


def _switches(draw: random.Random, flags: dict[str, object], words: list[str]) -> None:
    """Add what is on or off, and what belongs to it."""
    for word, share in (
        ("--swiglu", 0.3), ("--sequence-parallel", 0.4), ("--use-distributed-optimizer", 0.4),
        ("--untie-embeddings-and-output-weights", 0.3), ("--no-overlap-p2p-communication", 0.1),
    ):  # fmt: skip
        if draw.random() < share:
            words.append(word)
    if "--use-distributed-optimizer" in words and draw.random() < 0.3:
        flags["num-distributed-optimizer-instances"] = draw.choice((2, 2, 3))
    if draw.random() < 0.1:
        flags["padded-vocab-size"] = draw.choice((128, 132, 144, 160))


def _changed(draw: random.Random, first: Degrees, *, has_experts: bool) -> Degrees:
    """Return degrees that the script's own may change to."""
    pick = draw.choice
    degrees = replace(first, tp=pick((1, 2, 3, 4)), dp=pick((1, 2, 3, 4, 5, 6)))
    if draw.random() < 0.8:
        degrees = replace(degrees, pp=pick((1, 2, 3, 4)), vpp=pick((1, 1, 2, 3)))
    return replace(degrees, ep=pick((1, 2, 4))) if has_experts else degrees


def _given(flags: Mapping[str, object]) -> list[str]:
    return [
        word for name, value in flags.items()
        for word in (f"--{name}", *(value if isinstance(value, tuple) else (str(value),)))
    ]  # fmt: skip


def _stages(
    draw: random.Random, flags: dict[str, object], words: list[str], layers: int, pp: int
) -> int:
    """Add flags of the pipeline's stages; return virtual stages."""
    kind, predicted = draw.random(), draw.choice((0, 0, 0, 0, 1, 2))
    if predicted:
        flags |= {"mtp-num-layers": predicted, "position-embedding-type": "rope"}
        words.append("--untie-embeddings-and-output-weights")
    if kind < 0.4:
        return 1
    if kind < 0.55:
        vpp = draw.choice((1, 2, 2, 3))
        flags["num-virtual-stages-per-pipeline-rank"] = vpp
        return vpp
    if kind < 0.7:
        each = flags["num-layers-per-virtual-pipeline-stage"] = draw.choice((1, 1, 2, 3))
        return max(1, layers // pp // each)
    if kind < 0.8:
        words += draw.choice((
            ["--account-for-embedding-in-pipeline-split"],
            ["--account-for-loss-in-pipeline-split"],
            ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"],
        ))  # fmt: skip
        return 1
    vpp = 1
    if kind < 0.92:
        if draw.random() < 0.7:
            flags["decoder-first-pipeline-num-layers"] = draw.choice((1, 2, 3, 4))
        if draw.random() < 0.7:
            flags["decoder-last-pipeline-num-layers"] = draw.choice((1, 2, 3))
        if draw.random() < 0.4:
            vpp = flags["num-virtual-stages-per-pipeline-rank"] = 2
        if draw.random() < 0.1:
            words.append("--account-for-loss-in-pipeline-split")
        return vpp
    vpp = draw.choice((1, 1, 2))
    stages = pp * vpp + (draw.random() < 0.1)
    cuts = sorted(draw.choices(range(layers + 1), k=stages - 1))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
    sizes[-1] += draw.random() < 0.1
    rest = "|".join("t" * size for size in sizes)
    last = "m" * (predicted + (draw.random() < 0.1))
    flags["pipeline-model-parallel-layout"] = f"E{rest}{last}L"
    if draw.random() < 0.1:
        words.append("--account-for-embedding-in-pipeline-split")
    return vpp


def _batches(
    draw: random.Random, flags: dict[str, object], final: int, has_newest_flags: bool
) -> None:
    """Add flags of batches that differ from the final one."""
    kind = draw.random()
    if kind < 0.15 and not has_newest_flags:  # 0.18 and later ignore it
        start, step = draw.choice((2, 4, 6, 12)), draw.choice((2, 4, 6, 12))
        flags["rampup-batch-size"] = (str(start), str(step), draw.choice(("60", "100", "120")))
    elif kind < 0.22 and has_newest_flags:
        flags["eval-global-batch-size"] = draw.choice((4, 12, 24))
    elif kind < 0.3 and has_newest_flags:
        del flags["global-batch-size"]
        start = draw.choice((4, 6, 12, 24))
        flags["step-batch-size-schedule"] = f"0:{start} 3K:{final}"
    if draw.random() < 0.05:
        flags["microbatch-group-size-per-virtual-pipeline-stage"] = draw.choice((2, 4, 6))
