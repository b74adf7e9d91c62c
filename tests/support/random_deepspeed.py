"""Random DeepSpeed jobs, and what we say of them: the coordinator by its limits, then a worker."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from scalai.converters.deepspeed.config import stage_of
from scalai.converters.deepspeed.validity import (
    BF16_SUMS_ARE_BF16,
    offload_fault,
    refuse_invalid,
    stages_of,
)
from scalai.core.degrees.degrees import DegreeRequest, Degrees
from scalai.core.degrees.passes import Offload
from scalai.core.errors import RefusedError, UsageError
from scalai.core.job.membership import Assignment
from scalai.launch.config import script_facts as script
from scalai.launch.config.elastic_config import DeepSpeedConfig, ElasticConfig
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.sizing import Sizing
from scalai.patches.deepspeed.round_config import RoundOrder, batches_of, rewritten

KINDS = ("plain", "auto", "mpu", "pipeline", "grid")
"""A plain model; one that AutoTP cuts; one with an ``mpu`` of its own; a ``PipelineModule`` by a
number of stages; one by a topology, which may have tensor parallelism."""
OPTIONS = parse_options(["--nnodes", "1:8", "--nproc-per-node", "4", "train.py"])
TYPES = ("fp32", "float32", "bf16", "fp16", "half")
MOST_RANKS = 24
NORM_MAY_BE_LEFT_OUT, CUTS_ARE_TOLD, HAS_BF16_MASTERS = (0, 19, 5), (0, 18, 9), (0, 18, 3)
"""Releases from which on, at the latest, a configuration may say so; before the key is unknown."""
CUTS = {
    "use_default_specs": False,
    "layer_specs": [{"patterns": [r"0\.weight$"], "partition_type": "column"}],
}
"""What AutoTP cuts of ``deepspeed_answers``'s models."""


@dataclass(frozen=True)
class Case:
    """A job, and the degrees that somebody asks for.

    Attributes:
        config: DeepSpeed's, as a person has written it.
        stages: The table ``deepspeed.zero_stage``.
        first: Degrees of the first round; None: this is it.
        layers: Of the model.
        micro_batch: Asked for with the degrees; None: nobody did.
        ranks: That are there.
    """

    kind: str
    config: dict[str, Any]
    stages: dict[str, int]
    degrees: Degrees
    first: Degrees | None
    layers: int
    micro_batch: int | None
    ranks: int


@dataclass(frozen=True)
class Verdict:
    """What we say.

    Attributes:
        refused: Why not; None: the round begins.
        by: Who refused: ``job`` before anything runs, ``coordinator``, ``worker``.
        configs: The round's configuration; where there is none, what a person would write, for
            all stages of the job where it is refused whatever the round.
        samples: Of a step's passes; None: refused.
    """

    refused: str | None
    by: str
    configs: tuple[dict[str, Any], ...]
    samples: int | None = None


def judge(case: Case) -> Verdict:
    """Return what we say of a case."""
    order = _order(case, case.degrees)
    try:
        facts, order = _first_round(case, order)
        sizing = Sizing(_spec(case))
    except (RefusedError, UsageError) as error:
        return Verdict(str(error), "job", _plain_in_all_stages(case, order))
    sizing.learn({"facts": facts})
    asked = case.degrees
    micro = f" mbs{case.micro_batch}" if case.micro_batch else ""
    request = f"tp{asked.tp} pp{asked.pp} dp{asked.dp}{micro}"
    why: list[str] = []
    hosts = (("a", case.ranks),)
    ran = Assignment(hosts, case.first, None, "") if case.first is not None else None
    found = sizing.scaled(None, None, request, why.append)(hosts, ran)
    if found is None:
        return Verdict(why[0], "coordinator", (_plain(case, order),))
    try:
        stages = stages_of(case.config, case.stages)
        refuse_invalid(case.config, stages, script.installed_release("deepspeed"))
    except RefusedError as error:
        return Verdict(str(error), "worker", _plain_in_all_stages(case, order))
    try:
        batches = batches_of(case.config, order)
        mine = rewritten(case.config, replace(order, offload=_spilled(case, order)), batches)
    except (RefusedError, UsageError) as error:
        return Verdict(str(error), "worker", (_plain(case, order),))
    return Verdict(None, "", (mine,), batches.passed_samples)


def offered(case: Case) -> Degrees | None:
    """Return what the coordinator takes on its own where nobody asks; None: nothing."""
    sizing = Sizing(_spec(case))
    found = sizing.assign()((("a", case.ranks),), None)
    return found.degrees if found else None


def _spilled(case: Case, order: RoundOrder) -> Offload | None:
    """Return a state in host memory that we would choose; None: none, or none here."""
    stage = stage_of(case.config) if order.zero_stage is None else order.zero_stage
    if offload_fault(case.config, {stage}) or case.ranks % 2:
        return None
    return "parameters" if stage == 3 and case.ranks % 4 else "optimizer"


def _order(case: Case, degrees: Degrees) -> RoundOrder:
    stage = case.stages.get(str(degrees.world_size), case.stages.get("default"))
    return RoundOrder(
        degrees.tp, degrees.pp, degrees.dp, case.micro_batch, zero_stage=stage,
        has_mpu=case.kind == "mpu", is_in_stages=case.kind in ("pipeline", "grid"),
        has_fillers=True,
    )  # fmt: skip


def _first_round(case: Case, order: RoundOrder) -> tuple[Mapping[str, Any], RoundOrder]:
    """Return what the first round has told, and what a later one is asked for."""
    if case.first is None:
        return {}, order
    first = replace(_order(case, case.first), micro_batch_size=None)
    batches = batches_of(case.config, first)
    facts: dict[str, Any] = {"global_batch_size": batches.global_batch_size}
    if order.is_in_stages:
        facts["pipeline_layers"] = case.layers
        facts |= {"is_in_stages": True} if case.first.pp == 1 else {}
    return facts, replace(
        order, global_batch_size=batches.global_batch_size,
        usual_micro_batch_size=batches.micro_batch_size,
    )  # fmt: skip


def _spec(case: Case) -> JobSpec:
    flags = ("--num-stages", str(case.degrees.pp)) if case.kind == "pipeline" else ()
    default = None
    if case.kind in ("mpu", "grid"):
        default = DegreeRequest(case.degrees.tp, case.degrees.pp)
    config = ElasticConfig(
        default_degrees=default, deepspeed=DeepSpeedConfig(zero_stage=case.stages)
    )
    return JobSpec(replace(OPTIONS, script_args=flags), "", config, case.config)


def _plain_in_all_stages(case: Case, order: RoundOrder) -> tuple[dict[str, Any], ...]:
    stages = stages_of(case.config, case.stages) if case.stages else {order.zero_stage}
    return tuple(_plain(case, replace(order, zero_stage=each)) for each in stages)


def _plain(case: Case, order: RoundOrder) -> dict[str, Any]:
    """Return what a person would write for the degrees, where nothing can be derived."""
    mine = dict(case.config)
    if order.zero_stage is not None:
        stated = mine.get("zero_optimization")
        mine["zero_optimization"] = {
            **(stated if isinstance(stated, dict) else {}), "stage": order.zero_stage,
        }  # fmt: skip
    if order.global_batch_size is not None:
        mine["train_batch_size"] = order.global_batch_size * (
            order.tp if case.kind == "auto" else 1
        )
        mine.pop("gradient_accumulation_steps", None)
    if order.micro_batch_size is not None:
        mine["train_micro_batch_size_per_gpu"] = order.micro_batch_size
        mine.pop("gradient_accumulation_steps", None)
    if "tensor_parallel" in mine:
        size = order.tp if order.tp > 1 else 0
        mine["tensor_parallel"] = {**mine["tensor_parallel"], "autotp_size": size}
    return mine


def random_case(draw: random.Random, release: tuple[int, ...]) -> Case:
    """Return a case; about half of them are valid. Of how many layers a pipeline is made only its
    first round can tell."""
    while True:
        case = _any(draw, release)
        is_known = case.first is not None or case.degrees.pp <= case.layers
        if case.degrees.world_size <= MOST_RANKS and is_known:
            return case


def _any(draw: random.Random, release: tuple[int, ...]) -> Case:
    pick, maybe = draw.choice, draw.random
    kind = pick(("plain", *KINDS, "pipeline"))
    has_cuts = release >= CUTS_ARE_TOLD
    kind = "plain" if kind == "auto" and not has_cuts else kind
    degrees = _degrees(draw, kind)
    first = _degrees(draw, kind) if maybe() < 0.5 else None
    config: dict[str, Any] = {
        **_optimizer(draw), **_batch(draw, degrees.tp if kind == "auto" else 1), **_precision(draw),
    }  # fmt: skip
    stage = pick((0, 1, 1, 2, 3))
    if maybe() < 0.9:
        config["zero_optimization"] = {"stage": stage, **_zero(draw)}
        if release < NORM_MAY_BE_LEFT_OUT:
            config["zero_optimization"].pop("compute_grad_norm", None)
    if release < HAS_BF16_MASTERS and "bf16" in config:
        config["bf16"].pop("bf16_master_weights_and_grads", None)
    elif maybe() < 0.3:
        config["zero_optimization"] = pick((True, False))
    if (
        release < BF16_SUMS_ARE_BF16
        and config.get("data_types", {}).get("grad_accum_dtype") == "bf16"
    ):
        del config["data_types"]  # where it is a pipeline's alone, DeepSpeed says
    if maybe() < 0.06:
        config["gradient_allreduce_op"] = "mean"
    if kind == "auto" or (has_cuts and kind in ("pipeline", "grid") and maybe() < 0.05):
        size = degrees.tp if degrees.tp > 1 else 0
        config["tensor_parallel"] = {"autotp_size": size, "partition_config": CUTS}
    ranks = degrees.world_size
    stages: dict[str, int] = {}
    if maybe() < 0.3:
        stages[pick(("default", str(ranks)))] = pick((0, 1, 2, 3))
    has_batch = "train_batch_size" in config  # else the first micro-batch makes it
    layers, asks = pick((2, 3, 4, 6)), has_batch and maybe() < 0.15
    micro_batch = pick((1, 2, 3)) if asks else None
    case = Case(kind, config, stages, degrees, first, layers, micro_batch, ranks)
    return case if _has_first_round(case) else replace(case, first=None)


def is_stated(config: Mapping[str, Any]) -> bool:
    """Whether a configuration says how large a batch is."""
    return {"train_batch_size", "train_micro_batch_size_per_gpu"} & config.keys() != set()


def _has_first_round(case: Case) -> bool:
    first = case.first
    try:
        if first is not None:
            batches_of(case.config, _order(case, first))
        return first is not None and first.pp <= case.layers
    except (RefusedError, UsageError):
        return False


def _optimizer(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.9:
        params = {"torch_adam": draw.random() < 0.7, "lr": 0.001}
        return {"optimizer": {"type": draw.choice(("Adam", "AdamW")), "params": params}}
    config: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"lr": 0.001}}}
    return config | ({"zero_allow_untested_optimizer": True} if draw.random() < 0.5 else {})


def _degrees(draw: random.Random, kind: str) -> Degrees:
    pick = draw.choice
    tp = pick((1, 2, 2, 3, 4)) if kind in ("auto", "mpu", "grid") else 1
    pp = pick((1, 2, 2, 3, 4)) if kind in ("pipeline", "grid") else 1
    return Degrees(tp, pp, pick((1, 2, 2, 3, 4, 5)))


def _batch(draw: random.Random, counted: int) -> dict[str, Any]:
    pick = draw.choice
    sizes = {
        "train_batch_size": pick((None, 12, 24, 24, 30, 48, 60)),
        "train_micro_batch_size_per_gpu": pick((None, None, 1, 2, 3, 4)),
        "gradient_accumulation_steps": pick((None, None, None, 1, 2)),
    }
    if sizes["train_batch_size"] and draw.random() < 0.9:
        sizes["train_batch_size"] *= counted
    return {name: size for name, size in sizes.items() if size is not None}


def _precision(draw: random.Random) -> dict[str, Any]:
    pick, maybe = draw.choice, draw.random
    config: dict[str, Any] = {}
    kind = pick(("fp32", "bf16", "bf16", "fp16", "both" if maybe() < 0.3 else "fp32"))
    if kind in ("bf16", "both"):
        config["bf16" if maybe() < 0.8 else "bfloat16"] = {"enabled": True}
    if kind in ("fp16", "both"):
        config["fp16"] = {"enabled": True, "loss_scale": pick((0, 1, 128))}
    if maybe() < 0.15:
        config["data_types"] = {pick(("grad_accum_dtype", "param_dtype")): pick(TYPES)}
    for name in ("fp16", "bf16"):
        if maybe() < 0.04:
            config[name] = {**config.get(name, {}), f"{name}_master_weights_and_grads": True}
    return config


def _zero(draw: random.Random) -> dict[str, Any]:
    pick, maybe = draw.choice, draw.random
    zero: dict[str, Any] = {}
    if maybe() < 0.1:
        zero["offload_optimizer"] = {"device": pick(("cpu", "none"))}
        if maybe() < 0.4:
            zero["offload_optimizer"]["ratio"] = pick((0.5, 1.0, 1))
    if maybe() < 0.05:
        zero["offload_param"] = {"device": "cpu"}
    if maybe() < 0.05:
        zero["compute_grad_norm"] = pick((True, False))
    if maybe() < 0.2:
        zero["overlap_comm"] = pick((True, False))
    return zero
