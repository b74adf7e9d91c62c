"""What ``scalai plan`` is asked about: a model, a batch and devices, from files and flags."""

import argparse
import csv
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from scalai.converters.deepspeed.config import (
    AUTOTP,
    TRAIN,
    find_config,
    refuse_fixed,
    stage_of,
    stated_stages,
    step_samples,
)
from scalai.converters.deepspeed.validity import OFFLOADS, offload_fault, offload_of, refuse_invalid
from scalai.converters.deepspeed.validity import workload_of as deepspeed_workload
from scalai.converters.layouts import find_layout, open_checkpoint, unknown_text
from scalai.converters.megatron.arguments import (
    OFFLOAD_FRACTIONS,
    MegatronArguments,
    is_megatron,
    read_arguments,
)
from scalai.converters.megatron.model_shape import choices_of, workload_of
from scalai.converters.megatron.rules import release_beside
from scalai.converters.megatron.stored_model import StoredModel, read_model
from scalai.core.degrees.degrees import ModelLimits
from scalai.core.errors import RefusedError
from scalai.core.planner.columns import Workload
from scalai.core.planner.devices import (
    FIGURES,
    HOST_FIGURE,
    Device,
    custom_device,
    device_named,
)
from scalai.core.planner.fit import Calibration, uncalibrated
from scalai.core.planner.score import Row, calibrate_rows, limits_of, read_rows
from scalai.core.planner.search import Choices
from scalai.core.planner.shape import ModelShape
from scalai.launch.config.script_facts import (
    AUTOTP_ALONE,
    DEEPSPEED_FIXED,
    installed_release,
    read_table_shape,
)

_GPT = ("gpt2", "gpt_neo", "gpt_bigcode")
_LLAMA = ("llama", "mistral", "qwen2", "qwen3", "mixtral")


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """What is to be planned."""

    work: Workload
    device: Device
    limits: ModelLimits
    choices: Choices
    calibration: Calibration
    arguments: MegatronArguments | None = None
    """Of a Megatron-LM job that the command line names."""
    deepspeed: Mapping[str, Any] | None = None
    """The configuration of a DeepSpeed job that it names."""


def read_question(args: argparse.Namespace) -> PlanQuestion:
    """Read the model, the devices and what was measured.

    Raises:
        RefusedError: Something is missing, unknown or contradicts something else; the message says
            what to give.
    """
    script = args.job_arguments[1:] if args.job_arguments[:1] == ["--"] else args.job_arguments
    found = None if is_megatron(script) else find_config(script)
    if found is None and (args.model is None) == (not script):
        raise RefusedError("give either --model PATH, or a training script's flags behind --.")
    device = _device(args)
    calibration = read_calibration(args.calibrate, device, args.source)
    if found is not None:
        work, limits, choices = _of_deepspeed(script, found.content, args)
        return PlanQuestion(work, device, limits, choices, calibration, deepspeed=found.content)
    if script:
        work, limits, choices, arguments = _of_script(script, args)
        return PlanQuestion(work, device, limits, choices, calibration, arguments)
    work = _work(_stored_model(args.model, args.seq_length, args.vocab), args)
    # No framework is named: as Megatron-LM may divide batch and layers.
    limits = limits_of(work, has_uneven_shares=True, has_uneven_stages=True)
    choices = Choices(offload=("none", *OFFLOAD_FRACTIONS))
    return PlanQuestion(work, device, limits, _narrowed(choices, args), calibration)


def read_table(path: Path) -> tuple[Row, ...]:
    """Read a table of measured steps.

    Raises:
        RefusedError: It is no table, there is no line, or a column is not there.
    """
    if not path.is_file():
        raise RefusedError(f"{path} is no file; name a table of measured steps.")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
    except (csv.Error, UnicodeDecodeError) as error:
        raise RefusedError(f"{path} is no table of comma-separated values: {error}") from error
    if not lines:
        raise RefusedError(f"{path}: no line of measurements; docs/degrees.md lists the columns.")
    missing = sorted({"source", "gpu_type", "iteration_time_s"} - set(lines[0]))
    if missing:
        raise RefusedError(f"{path}: no column {missing[0]!r}; docs/degrees.md lists the columns.")
    return read_rows(lines)


def read_calibration(path: Path | None, device: Device, source: str | None) -> Calibration:
    """Return what measured steps say of a device; None: nothing is measured.

    Raises:
        RefusedError: No row is of the device, or those of several sources are and none is named.
    """
    if path is None:
        return uncalibrated()
    rows = [row for row in read_table(path) if not row.refused and row.device is not None]
    mine = [row for row in rows if row.device is not None and row.device.name == device.name]
    sources = sorted({row.source for row in mine if source in (None, row.source)})
    if not sources:
        known = (
            ", ".join(sorted({f"{row.source} on {row.cluster[1]}" for row in rows})) or "nothing"
        )
        raise RefusedError(f"{path} says nothing of {device.name} here; it has {known}.")
    if len(sources) > 1:
        raise RefusedError(f"{path} has several sources of {device.name}: {', '.join(sources)}. "
                           "Name one by --source.")  # fmt: skip
    return calibrate_rows([row for row in mine if row.source == sources[0]])


def _work(model: StoredModel, args: argparse.Namespace) -> Workload:
    batch = args.global_batch_size or model.global_batch
    if batch is None:
        raise RefusedError("--global-batch-size is needed beside --model: the samples of a step.")
    return Workload(
        model.shape, batch, args.precision or model.precision, has_dropout=model.has_dropout
    )


def _stored_model(path: Path, seq: int | None, vocab: int | None) -> StoredModel:
    """Read what a checkpoint says of its model, or a file that states a shape alone.

    Raises:
        RefusedError: It is none of them, or does not say enough.
    """
    layout = find_layout(path) if path.is_dir() else None
    if layout is not None and not _has_own_names(layout.name):
        return read_model(open_checkpoint(path), seq, vocab)
    if path.is_dir() and not (path / "config.json").is_file():
        if layout is None:
            raise RefusedError(unknown_text(path))
        raise RefusedError(
            f"{path} ({layout.name}) does not say what its tensors are parts of, such as how many "
            "heads the model has. Give its config.json, which libraries save beside the weights, "
            "or state the model in TOML under [model] (docs/degrees.md)."
        )
    shape = read_shape(path / "config.json" if path.is_dir() else path, seq, vocab)
    # Models with a gate are trained without dropout.
    return StoredModel(shape, "bf16", not shape.is_gated, None)


def _has_own_names(layout: str) -> bool:
    """Whether tensors of this layout are called as the script's own modules are."""
    return layout.startswith("deepspeed") or layout in ("safetensors", "dcp")


def read_shape(path: Path, seq: int | None, vocab: int | None) -> ModelShape:
    """Read a model's shape from Hugging Face's ``config.json``, or from a table [model] of TOML
    with the names of ``ModelShape``.

    Raises:
        RefusedError: It is neither, or of a kind that is not modelled.
    """
    if not path.is_file():
        raise RefusedError(
            f"{path} is no file; give a checkpoint's directory, a config.json, or TOML with a "
            "table [model]."
        )
    try:
        if path.suffix == ".toml":
            return _from_toml(tomllib.loads(path.read_text(encoding="utf-8")), path, seq, vocab)
        return _from_hugging_face(json.loads(path.read_text(encoding="utf-8")), path, seq, vocab)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RefusedError(f"{path} cannot be read: {error}") from error


def _device(args: argparse.Namespace) -> Device:
    figures = {
        flag: value
        for flag in FIGURES | HOST_FIGURE
        if (value := getattr(args, flag.replace("-", "_"))) is not None
    }
    return custom_device(args.gpu, figures) if figures else device_named(args.gpu)


def _of_script(
    script: Sequence[str], args: argparse.Namespace
) -> tuple[Workload, ModelLimits, Choices, MegatronArguments]:
    flags = script[1:] if not script[0].startswith("-") else script
    if not is_megatron(flags):
        raise RefusedError(
            f"{script[0]} is not called as a Megatron-LM training script is; of other scripts "
            "state the model by --model."
        )
    for flag, name in (
        ("--global-batch-size", "global_batch_size"),
        ("--seq-length", "seq_length"),
    ):
        mine = getattr(args, name)
        if mine is not None and flag in flags:
            raise RefusedError(f"{flag} stands before -- and among the script's flags; keep one.")
        if mine is not None:
            flags = [*flags, flag, str(mine)]
    named = None if script[0].startswith("-") else script[0]
    arguments = read_arguments(flags, allow_untested=True, release=release_beside(named))
    work = workload_of(arguments, args.vocab)
    if args.precision:
        raise RefusedError("--precision: the script's flags say it; leave it out.")
    return work, arguments.limits, _narrowed(choices_of(arguments), args), arguments


def _of_deepspeed(
    script: Sequence[str], config: Mapping[str, Any], args: argparse.Namespace
) -> tuple[Workload, ModelLimits, Choices]:
    """Return what the configuration of a DeepSpeed job says beside its model."""
    if args.model is None:
        raise RefusedError("a DeepSpeed script does not say its model; state it by --model too.")
    if args.precision:
        raise RefusedError("--precision: the configuration says it; leave it out.")
    stages = args.sharding or (stage_of(config),)
    refuse_fixed(config)
    refuse_invalid(config, stages, installed_release("deepspeed"), has_own_optimizer=True)
    batch, stated = args.global_batch_size, step_samples(config)
    if (batch is None) == (stated is None):
        raise RefusedError(
            f"give the samples of a step, by --global-batch-size or by {TRAIN} of the "
            "configuration, not by both."
        )
    shape = _stored_model(args.model, args.seq_length, args.vocab).shape
    work = deepspeed_workload(config, shape, batch or stated or 0)
    fixed = list(DEEPSPEED_FIXED)
    if AUTOTP not in config:
        fixed.append(("tp", 1, f"the configuration has no {AUTOTP} (AutoTP)"))
    if stated_stages(script) is None:
        fixed.append(("pp", 1, "no flag of the script states stages, such as --num-stages"))
    limits = limits_of(
        work, fixed=tuple(fixed), no_tp_in_stages=AUTOTP_ALONE, has_uneven_shares=True,
        has_uneven_stages=True,
    )  # fmt: skip
    own, fault = offload_of(config), offload_fault(config, stages)
    offload = (own,) if fault else (own, *OFFLOADS)
    choices = Choices(sharding=stages, offload=offload, is_sequence_parallel=False)
    return work, limits, _narrowed(choices, args)


def _narrowed(choices: Choices, args: argparse.Namespace) -> Choices:
    given: dict[str, Any] = {
        "micro_batches": args.micro_batch_size, "recompute": args.recompute,
        "offload": args.offload,
        "sharding": args.sharding, "context_parallel": args.context_parallel,
        "expert_parallel": args.expert_parallel, "max_tensor_parallel": args.max_tensor_parallel,
    }  # fmt: skip
    values = {f.name: getattr(choices, f.name) for f in fields(choices)}
    return Choices(**{**values, **{k: v for k, v in given.items() if v is not None}})


def _from_toml(
    content: Mapping[str, Any], path: Path, seq: int | None, vocab: int | None
) -> ModelShape:
    table = content.get("model")
    if not isinstance(table, Mapping):
        raise RefusedError(f"{path} has no table [model].")
    sizes = {**table}
    sizes |= {"seq": seq} if seq else {}
    sizes |= {"vocab": vocab} if vocab else {}
    return read_table_shape(sizes, f"{path}: [model]")


def _from_hugging_face(
    config: Mapping[str, Any], path: Path, seq: int | None, vocab: int | None
) -> ModelShape:
    kind = str(config.get("model_type", "none"))

    def size(*names: str, default: int | None = None) -> int:
        for name in names:
            if isinstance(config.get(name), int):
                return int(config[name])
        if default is None:
            raise RefusedError(f"{path} has no {' or '.join(names)}.")
        return default

    if kind not in (*_GPT, *_LLAMA):
        raise RefusedError(
            f"{path}: models of type {kind!r} are not modelled; {', '.join((*_GPT, *_LLAMA))} are. "
            "State the shape in TOML, under [model]."
        )
    hidden, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
    longest = size("max_position_embeddings", "n_positions")
    is_llama, experts = kind in _LLAMA, size("num_local_experts", default=0)
    layers = size("num_hidden_layers", "n_layer")
    ffn = size("intermediate_size", "n_inner", default=4 * hidden)
    return ModelShape(
        layers=layers, hidden=hidden, heads=heads, ffn=ffn, vocab=vocab or size("vocab_size"),
        seq=seq or longest, kv_groups=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=hidden // heads), positions=0 if is_llama else longest,
        is_gated=is_llama, is_tied=bool(config.get("tie_word_embeddings", not is_llama)),
        has_bias=not is_llama, has_norm_bias=not is_llama, has_qkv_bias=kind == "qwen2",
        experts=experts, moe_layers=layers if experts else 0,
        top_k=size("num_experts_per_tok", default=2) if experts else 0,
        expert_ffn=ffn if experts else 0,
    )  # fmt: skip
