"""``scalai plan --trace``: policies for a changing number of devices."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

from scalai.core.degrees.degrees import DegreeRequest, parse_request
from scalai.core.errors import RefusedError, UsageError
from scalai.core.planner.columns import Layout
from scalai.core.planner.devices import GB
from scalai.core.planner.reconfiguration import Rates
from scalai.core.planner.trace import Trace, read_trace
from scalai.core.planner.trace_replay import (
    CAUSES,
    CHECKPOINT_S,
    SNAPSHOT_S,
    STORAGE,
    Account,
    Prices,
    Terms,
    TraceCase,
    TracePiece,
    account,
    build_case,
    replay,
)
from scalai.launch.commands.plan_model import PlanQuestion

MINUTE = 60.0
MOST_BYTES = 10_000_000


@dataclass(frozen=True, slots=True)
class Replayed:
    """One policy's way through a trace."""

    name: str
    pieces: tuple[TracePiece, ...]
    account: Account


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a trace; ``--trace`` turns the command into a replay."""
    group = parser.add_argument_group("a trace of devices")
    add = group.add_argument
    add("--trace", type=Path, metavar="EVENTS.csv",
        help="compare policies on devices that come and go (docs/degrees.md)")  # fmt: skip
    add("--until", type=_minutes, metavar="MINUTES", help="when the trace ends")
    every = f"(default: {CHECKPOINT_S / MINUTE:g})"
    add("--checkpoint-every", type=_minutes, metavar="MINUTES",
        help=f"between checkpoints on durable storage {every}")  # fmt: skip
    every = f"(default: {SNAPSHOT_S / MINUTE:g})"
    add("--snapshot-minutes", type=_minutes, metavar="MINUTES",
        help=f"between generations in the memory of other hosts {every}")  # fmt: skip
    add("--storage-gb-s", type=_rate, metavar="X",
        help=f"rate of whole checkpoints, GB/s (default: {STORAGE / GB:g})")  # fmt: skip
    add("--start", type=_request, metavar="DEGREES", help="at the beginning, such as 'tp2 pp4'")
    add("--degrees", type=_entry, metavar="N=DEGREES", action="append",
        help="a policy with these on N devices; once for each N")  # fmt: skip


def is_asked(args: argparse.Namespace) -> bool:
    """Whether the command line asks about a trace.

    Raises:
        RefusedError: It has flags of a trace, but names none; or it says how many devices there
            are, which a trace does.
    """
    if args.trace is None:
        given = {
            "--until": args.until, "--start": args.start, "--degrees": args.degrees,
            "--checkpoint-every": args.checkpoint_every, "--storage-gb-s": args.storage_gb_s,
            "--snapshot-minutes": args.snapshot_minutes,
        }  # fmt: skip
        without = [flag for flag, value in given.items() if value is not None]
        if without:
            raise RefusedError(f"{without[0]} is about a trace; name it, by --trace EVENTS.csv.")
        return False
    if args.gpus is not None or args.range is not None:
        raise RefusedError("--trace says how many devices there are; leave out --gpus.")
    return True


def run_trace(question: PlanQuestion, args: argparse.Namespace) -> int:
    """Replay the trace and report each policy's result.

    Raises:
        RefusedError: The table, or given degrees, cannot be used, or nothing is ever valid.
    """
    trace = _read(args.trace, args.until)
    rates = Rates() if args.relaunch is None else Rates(relaunch_s=args.relaunch)
    prices = Prices(
        checkpoint_every_s=_given(args.checkpoint_every, CHECKPOINT_S),
        snapshot_every_s=_given(args.snapshot_minutes, SNAPSHOT_S),
        storage=_given(args.storage_gb_s, STORAGE / GB) * GB,
        residence_s=args.residence,
        rates=rates,
    )
    case = build_case(
        trace, question.work, question.device, question.limits, question.choices,
        question.calibration, prices, start=args.start, table=_table(args.degrees),
    )  # fmt: skip
    found = replay_all(trace, case, prices)
    if args.json:
        print(json.dumps(_content(question, trace, case, prices, found)))
    else:
        _print(question, trace, case, found)
    return 0


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def replay_all(trace: Trace, case: TraceCase, prices: Prices) -> tuple[Replayed, ...]:
    """Return what each policy makes of the trace. Who can runs ``case.start`` when it begins."""
    terms = Terms(prices.residence_s, prices.checkpoint_every_s)
    is_there = case.start.degrees.world_size <= trace.events[0].gpus
    begin = case.start if is_there else None
    found = []
    for policy in case.policies:
        pieces = replay(trace, policy, begin, terms)
        found.append(Replayed(policy.name, pieces, account(pieces, case.menu)))
    return tuple(found)


def _read(path: Path, until_s: float | None) -> Trace:
    if not path.is_file():
        raise RefusedError(f"{path} is no file; name a table with the columns time_min and gpus.")
    if path.stat().st_size > MOST_BYTES:
        raise RefusedError(f"{path} is larger than {MOST_BYTES} bytes; use a shorter trace.")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (UnicodeDecodeError, OSError) as error:
        raise RefusedError(f"{path} cannot be read: {error}") from error
    return read_trace(lines, str(path), until_s)


def _table(entries: list[tuple[int, DegreeRequest]] | None) -> dict[int, DegreeRequest]:
    found: dict[int, DegreeRequest] = {}
    for gpus, request in entries or []:
        if gpus in found:
            raise RefusedError(f"--degrees has two entries for {gpus} devices; keep one.")
        found[gpus] = request
    return found


def _print(
    question: PlanQuestion, trace: Trace, case: TraceCase, found: tuple[Replayed, ...]
) -> None:
    sizes = trace.sizes
    some = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"
    print(
        f"{question.work.shape.total_parameters / 1e9:.2f}e9 parameters, {len(trace.events)} "
        f"events in {trace.seconds / MINUTE:g} min, {some} of {question.device.name}"
    )
    if trace.is_end_assumed:
        print(
            f"  it does not say when it ends: at {trace.end_s / MINUTE:g} min, as the last event "
            "lasts as long as the median of the others (--until says otherwise)"
        )
    for gpus, why in case.refused.items():
        print(f"  on {gpus}: {why}")
    ideal = found[0].account.ideal_steps
    print(f"  always the best at no cost: {ideal:.0f} steps")
    print(f"{'':10}  {'steps':>8}  {'goodput':>7}  {'changes':>7}   minutes lost by cause")
    print(f"{'':10}  {'':8}  {'':7}  {'':7}  " + "  ".join(f"{cause:>9}" for cause in _SHORT))
    for one in found:
        its = one.account
        lost = "  ".join(f"{its.lost_s[cause] / MINUTE:9.1f}" for cause in CAUSES)
        print(f"{one.name:10}  {its.steps:8.0f}  {its.goodput:7.1%}  {its.changes:7}  {lost}")
    for one in found:
        print(f"{one.name:10}  " + "; ".join(_ran(one)))


_SHORT = ("changing", "redone", "idle", "slower", "waiting")
assert len(_SHORT) == len(CAUSES)


def _ran(one: Replayed) -> list[str]:
    """Return what ran on each number of devices, longest first where there was more than one."""
    seconds: dict[int, dict[str, float]] = {}
    for piece in one.pieces:
        if piece.gpus:
            name = "waits" if piece.layout is None else str(piece.layout)
            of = seconds.setdefault(piece.gpus, {})
            of[name] = of.get(name, 0.0) + piece.seconds
    return [
        f"{gpus}: " + ", then ".join(sorted(of, key=lambda name: -of[name]))
        for gpus, of in sorted(seconds.items())
    ]


def _content(
    question: PlanQuestion,
    trace: Trace,
    case: TraceCase,
    prices: Prices,
    found: tuple[Replayed, ...],
) -> dict[str, Any]:
    return {
        "device": question.device.name,
        "parameters": question.work.shape.total_parameters,
        "global_batch": question.work.global_batch,
        "calibrated_by_rows": question.calibration.rows,
        "seconds": trace.seconds,
        "events": [
            {"at_s": one.at_s, "gpus": one.gpus, "kind": "failure" if one.is_failure else "planned"}
            for one in trace.events
        ],
        "end_s": trace.end_s,
        "end_is_assumed": trace.is_end_assumed,
        "refused": {str(gpus): why for gpus, why in case.refused.items()},
        "relaunch_s": prices.rates.relaunch_s,
        "checkpoint_every_s": prices.checkpoint_every_s,
        "snapshot_every_s": prices.snapshot_every_s,
        "residence_s": prices.residence_s,
        "ideal_steps": found[0].account.ideal_steps,
        "policies": {one.name: _policy(one, case) for one in found},
    }


def _policy(one: Replayed, case: TraceCase) -> dict[str, Any]:
    its = one.account
    return {
        "steps": its.steps,
        "goodput": its.goodput,
        "useful_s": its.useful_s,
        "lost_s": dict(its.lost_s),
        "idle_device_s": its.idle_device_s,
        "changes": its.changes,
        "timeline": [
            {
                "begin_s": piece.begin_s, "end_s": piece.end_s, "state": piece.state,
                "gpus": piece.gpus, **_layout(piece.layout, case.menu.seconds),
            }
            for piece in one.pieces
        ],
    }  # fmt: skip


def _layout(layout: Layout | None, seconds: Mapping[Layout, float]) -> dict[str, Any]:
    if layout is None:
        return {"layout": None}
    return {"layout": str(layout), "step_s": seconds[layout]}


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = inf
    if not isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return value


def _rate(text: str) -> float:
    value = _number(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate; use more than 0")
    return value


def _minutes(text: str) -> float:
    value = _number(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; use more than 0 minutes")
    return value * MINUTE


def _request(text: str) -> DegreeRequest:
    try:
        return parse_request(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _entry(text: str) -> tuple[int, DegreeRequest]:
    size, _, degrees = text.partition("=")
    if not size.strip().isdecimal() or int(size) < 1 or not degrees:
        raise argparse.ArgumentTypeError(f"{text!r}: expected devices and degrees, as 8='tp2 pp4'")
    return int(size), _request(degrees)
