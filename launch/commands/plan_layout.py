"""``scalai plan``: which degrees a model takes on devices, and why; and how well that is known."""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from scalai.converters.deepspeed.config import (
    ACCUMULATION,
    AUTOTP,
    AUTOTP_SIZE,
    MICRO,
    STAGE,
    TRAIN,
    ZERO,
)
from scalai.converters.megatron.arguments import derived_flags
from scalai.converters.megatron.model_shape import offload_of
from scalai.core.degrees.passes import OFFLOADS, RECOMPUTES
from scalai.core.errors import RefusedError, UsageError
from scalai.core.planner.devices import FIGURES, GB, HOST_FIGURE
from scalai.core.planner.score import figures, group_figures, predict_rows
from scalai.core.planner.search import Estimate, LayoutPlan, search
from scalai.launch.commands import plan_change, plan_trace
from scalai.launch.commands.plan_model import PlanQuestion, read_question, read_table

_WIDEST_RANGE = 1024


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "plan",
        help="which degrees a model takes on devices, and why",
        description="Compute the fastest valid layout of a model that fits, and why others lose. "
        "With --score, compare the model of time with measured steps instead.",
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="PATH",
        help="a checkpoint, config.json, or TOML with a table [model]")  # fmt: skip
    add("--gpus", type=_count, metavar="N", help="number of devices")
    add(
        "--range", type=_range, metavar="A:B", help="a table for each number of devices from A to B"
    )
    add("--gpu", default="h100", metavar="NAME", help="device (default: h100)")
    for flag, what in (FIGURES | HOST_FIGURE).items():
        add(f"--{flag}", type=float, metavar="X", help=f"instead of the table's: {what}")
    add("--global-batch-size", type=_count, metavar="N", help="samples of a step; it stays exact")
    add("--micro-batch-size", type=_counts, metavar="N,..", help="allowed micro-batch sizes")
    add("--seq-length", type=_count, metavar="N", help="tokens of a sample")
    add("--vocab", type=_count, metavar="N", help="rows of the embedding")
    add("--precision", metavar="NAME", help="bf16 (default), fp16, fp8 or fp32")
    add("--sharding", type=_stages, metavar="N,..", help="allowed ZeRO stages, 0 to 3")
    add(
        "--recompute",
        type=_some_of(RECOMPUTES),
        metavar="KIND,..",
        help="none, selective, full: allowed kinds",
    )
    add(
        "--offload",
        type=_some_of(OFFLOADS),
        metavar="KIND,..",
        help="none, optimizer-half, optimizer, parameters: state in host memory, the first if it "
        "fits, the others where nothing else does",
    )
    add("--context-parallel", type=_counts, metavar="N,..", help="allowed degrees")
    add("--expert-parallel", type=_counts, metavar="N,..", help="allowed degrees")
    add("--max-tensor-parallel", type=_count, metavar="N", help="default: the devices of a host")
    add("--calibrate", type=Path, metavar="FIT.csv", help="measured steps (docs/degrees.md)")
    add("--source", metavar="NAME", help="source of the measured steps, if the device has several")
    add("--score", type=Path, metavar="ROWS.csv", help="compare predictions with these steps")
    add("--json", action="store_true", help="one JSON object")
    plan_change.add_arguments(parser)
    plan_trace.add_options(parser)
    add("job_arguments", nargs=argparse.REMAINDER, metavar="-- SCRIPT FLAGS",
        help="a Megatron-LM training script with its flags, instead of --model; or a DeepSpeed "
        "script that names its configuration, beside --model")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan, or score. Raises ``RefusedError`` for any input that cannot be used."""
    try:
        if plan_change.is_asked(args):
            return plan_change.report(read_question(args), args)
        if plan_trace.is_asked(args):
            return plan_trace.run_trace(read_question(args), args)
        if args.score is not None:
            return _score(args)
        if (args.gpus is None) == (args.range is None):
            raise RefusedError("give either --gpus N, or --range A:B.")
        question = read_question(args)
        if args.range is not None:
            return _table(question, args.range, args.json)
        return _one(question, args.gpus, args.json)
    except UsageError as error:
        raise RefusedError(str(error)) from error


def _score(args: argparse.Namespace) -> int:
    rows = read_table(args.score)
    measured = read_table(args.calibrate) if args.calibrate is not None else ()
    scored = predict_rows(rows, measured)
    whole, groups = figures(scored), group_figures(scored)
    if args.json:
        print(json.dumps({**whole, "groups": groups}))
        return 0
    for name, value in whole.items():
        print(f"{name:22} {_number(value)}")
    for group in groups:
        named = f"{group['source']} on {group['device']}, {group['model']}, {group['gpus']} devices"
        print(f"\n{named}")
        shown = ("rows", "error_mean", "transfer_error_mean", "regret_mean", "rank_correlation_min")
        print("  " + "  ".join(f"{n} {_number(group[n])}" for n in shown if group[n] is not None))
        if group["never_seen"]:
            print(f"  never measured there: {', '.join(group['never_seen'])}")  # type: ignore[arg-type]
        for why in group["refused"]:  # type: ignore[attr-defined]
            print(f"  counts as an error: {why}")
    return 0


def _plan(question: PlanQuestion, gpus: int) -> LayoutPlan:
    return search(
        question.work, question.device, gpus, question.limits, question.choices,
        question.calibration,
    )  # fmt: skip


def _one(question: PlanQuestion, gpus: int, is_json: bool) -> int:
    plan = _plan(question, gpus)
    flags = _flags(question, plan.best)
    if is_json:
        print(json.dumps(_content(question, gpus, plan, flags)))
        return 0
    best, shape = plan.best, question.work.shape
    size = f"{shape.total_parameters / 1e9:.2f}e9 parameters"
    step = f"{question.work.global_batch} samples of {shape.seq} tokens a step"
    print(f"{size}, {step}, {gpus} of {question.device.name}")
    print(f"{best.layout}: {_seconds(best)}, {best.bytes / GB:.1f} GB" + _idle(best, gpus))
    print("  time:   " + _parts(best.time, 1.0, "s"))
    print("  memory: " + _parts(best.memory, GB, "GB"))
    if flags:
        print(f"  flags:  {' '.join(flags)}")
    if plan.spilled:
        print(f"  offload: {plan.spilled}")
    print(f"  {_trust(question, plan)}")
    print(f"of {plan.valid} valid layouts {plan.fitting} fit; others:")
    for other in plan.runners_up:
        print(f"  {other.layout}: {_seconds(other)}, {other.bytes / GB:.1f} GB; {other.reason}")
    return 0


def _table(question: PlanQuestion, sizes: range, is_json: bool) -> int:
    lines: list[dict[str, Any]] = []
    for gpus in sizes:
        try:
            plan = _plan(question, gpus)
            lines.append(_content(question, gpus, plan, ()))
        except RefusedError as error:
            lines.append({"gpus": gpus, "refused": str(error)})
    if is_json:
        print(json.dumps({"device": question.device.name, "range": lines}))
    else:
        print(f"{'devices':>7}  {'idle':>4}  {'seconds':>9}  {'GB':>6}  layout")
        for line in lines:
            if "refused" in line:
                print(f"{line['gpus']:7}  {'all':>4}  {'none':>9}  {'':6}  {line['refused']}")
            else:
                best = line["best"]
                print(f"{line['gpus']:7}  {best['idle']:4}  {best['seconds']:9.3f}  "
                      f"{best['bytes'] / GB:6.1f}  {best['layout']}")  # fmt: skip
    if all("refused" in line for line in lines):
        raise RefusedError(f"nothing fits on {sizes[0]} to {sizes[-1]} devices.")
    return 0


def _content(
    question: PlanQuestion, gpus: int, plan: LayoutPlan, flags: tuple[str, ...]
) -> dict[str, Any]:
    return {
        "gpus": gpus,
        "device": question.device.name,
        "device_source": question.device.source,
        "parameters": question.work.shape.total_parameters,
        "global_batch": question.work.global_batch,
        "calibrated_by_rows": question.calibration.rows,
        "never_seen": list(plan.never_seen),
        "valid": plan.valid,
        "fitting": plan.fitting,
        "best": _estimate(plan.best),
        "flags": list(flags),
        "spilled": plan.spilled,
        "runners_up": [_estimate(other) for other in plan.runners_up],
    }


def _estimate(one: Estimate) -> dict[str, Any]:
    layout = one.layout
    return {
        "layout": str(layout), **layout.degrees.to_json(), "micro_batch": layout.micro_batch,
        "recompute": layout.recompute, "offload": layout.offload, "sharding": layout.sharding,
        "is_sequence_parallel": layout.is_sequence_parallel, "idle": one.idle,
        "seconds": one.seconds, "interval": [one.low, one.high], "bytes": one.bytes,
        "time": one.time, "memory": one.memory, "reason": one.reason,
    }  # fmt: skip


def _flags(question: PlanQuestion, best: Estimate) -> tuple[str, ...]:
    """Return what a Megatron-LM script is given for the layout, or what a DeepSpeed configuration
    states."""
    if question.deepspeed is not None:
        return _settings(question, best)
    if question.arguments is None:
        return ()
    arguments, layout = question.arguments, best.layout
    # The plan's virtual stages may be other than those that the script began with.
    limits = replace(arguments.limits, fixed=())
    flags, _ = derived_flags(
        replace(arguments, limits=limits), layout.degrees,
        arguments.limits.padded_vocab_size, layout.micro_batch, recompute=layout.recompute,
        offload=None if layout.offload == offload_of(arguments) else layout.offload,
    )  # fmt: skip
    if layout.sharding and "--use-distributed-optimizer" not in arguments.given:
        flags += ("--use-distributed-optimizer",)
    return flags


def _settings(question: PlanQuestion, best: Estimate) -> tuple[str, ...]:
    layout, batch = best.layout, question.work.global_batch
    degrees, micro = layout.degrees, layout.micro_batch
    # AutoTP's ranks count as replicas.
    found = [
        f"{TRAIN}={batch * degrees.tp}", f"{MICRO}={micro}",
        f"{ACCUMULATION}={batch // (micro * degrees.dp)}", f"{ZERO}.{STAGE}={layout.sharding}",
    ]  # fmt: skip
    if degrees.tp > 1:
        found.append(f"{AUTOTP}.{AUTOTP_SIZE}={degrees.tp}")
    if degrees.pp > 1:
        found.append(f"stages={degrees.pp}")
    names = {"optimizer": ("optimizer",), "parameters": ("optimizer", "param")}
    found += [f"{ZERO}.offload_{name}.device=cpu" for name in names.get(layout.offload, ())]
    return tuple(found)


def _trust(question: PlanQuestion, plan: LayoutPlan) -> str:
    rows = question.calibration.rows
    if not rows:
        return "never measured here: from the table of devices alone; --calibrate FIT.csv says more"
    new = f"; never measured: {', '.join(plan.never_seen)}" if plan.never_seen else ""
    return f"calibrated by {rows} measured steps{new}"


def _seconds(one: Estimate) -> str:
    return f"{one.seconds:.3g} s a step ({one.low:.3g} to {one.high:.3g})"


def _idle(one: Estimate, gpus: int) -> str:
    return f", {one.idle} of {gpus} devices idle" if one.idle else ""


def _parts(parts: dict[str, float], unit: float, name: str) -> str:
    shown = sorted(((v / unit, n) for n, v in parts.items() if v), reverse=True)
    return ", ".join(f"{part} {value:.3g} {name}" for value, part in shown)


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _stages(text: str) -> tuple[int, ...]:
    if not set(text.split(",")) <= {"0", "1", "2", "3"}:
        raise argparse.ArgumentTypeError(f"{text!r}: expected ZeRO stages of 0 to 3, such as 1,3")
    return tuple(sorted({int(part) for part in text.split(",")}))


def _some_of(kinds: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        if not set(text.split(",")) <= set(kinds):
            raise argparse.ArgumentTypeError(f"{text!r}: expected some of {', '.join(kinds)}")
        return tuple(kind for kind in kinds if kind in text.split(","))

    return read


def _range(text: str) -> range:
    low, _, high = text.partition(":")
    sizes = range(_count(low), _count(high) + 1)
    if not 0 < len(sizes) <= _WIDEST_RANGE:
        raise argparse.ArgumentTypeError(f"{text!r}: expected A:B of {_WIDEST_RANGE} sizes at most")
    return sizes
