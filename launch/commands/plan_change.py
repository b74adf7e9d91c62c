"""``scalai plan --from``: bytes and time of a change of degrees, and the best target."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalai.converters.megatron.model_shape import sharding_of
from scalai.core.degrees.degrees import AXES, DegreeRequest, Degrees, parse_request, refusal
from scalai.core.errors import RefusedError
from scalai.core.planner.change import ChangeChoice, Option, estimate_of, options_for, plan_change
from scalai.core.planner.columns import Layout
from scalai.core.planner.reconfiguration import Hosts, Reconfiguration, schedule, spread
from scalai.core.planner.search import search
from scalai.core.planner.weighing import RESIDENCE_S
from scalai.launch.commands.plan_model import PlanQuestion
from scalai.launch.commands.plan_picture import picture, sized
from scalai.store.atomic import replace_file

SHOWN_PAIRS = 8


@dataclass(frozen=True, slots=True)
class _Change:
    """A requested change."""

    before: Layout
    before_hosts: Hosts
    there: Hosts
    lost: frozenset[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a change."""
    group = parser.add_argument_group("the cost of a change of degrees")
    add = group.add_argument
    add("--from", dest="before", metavar="DEGREES", help="what runs, such as 'tp8 pp16 dp8'")
    add("--to", dest="after", metavar="DEGREES", help="to what it changes (default: what is best)")
    add("--lost", type=_names, default=frozenset(), metavar="HOST,..",
        help="hosts whose memory is gone; they are called host-0, host-1, ..")  # fmt: skip
    add("--residence", type=_seconds, metavar="S",
        help=f"seconds until the next change (default: {RESIDENCE_S:g}; of a trace: as devices "
        "have stayed before)")  # fmt: skip
    add("--relaunch", type=_seconds, metavar="S", help="measured seconds of a relaunch")
    add("--picture", type=Path, metavar="FILE.svg", help="draw who sends what to whom")


def is_asked(args: argparse.Namespace) -> bool:
    """Whether the command line asks about a change.

    Raises:
        RefusedError: It has flags of a change without --from.
    """
    if args.before is None:
        _refuse_without(args)
        return False
    if any(other is not None for other in (args.range, args.score, args.trace)):
        raise RefusedError("--from is about one change; leave out --range, --score and --trace.")
    if args.picture is not None and args.picture.suffix.lower() != ".svg":
        raise RefusedError(f"{args.picture}: the picture is an SVG; name a file that ends in .svg.")
    return True


def _refuse_without(args: argparse.Namespace) -> None:
    """Refuse flags of a change without --from; a trace allows two of them."""
    given = {"--to": args.after, "--lost": args.lost or None, "--picture": args.picture}
    if args.trace is None:
        given |= {"--residence": args.residence, "--relaunch": args.relaunch}
    without = [flag for flag, value in given.items() if value is not None]
    if without:
        raise RefusedError(f"{without[0]} is about a change; say what runs, by --from DEGREES.")


def report(question: PlanQuestion, args: argparse.Namespace) -> int:
    """Print the cost of the change, and draw it.

    Raises:
        RefusedError: Invalid degrees, absent hosts, too few devices.
    """
    question = _as_it_runs(question, args.sharding is not None)
    before = _layout(question, args.before, "--from", must_fit=False)
    change = _asked(question, args, before)
    residence_s = RESIDENCE_S if args.residence is None else args.residence
    if args.after is None:
        choice = plan_change(
            question.work, question.device, question.limits, before, change.before_hosts,
            change.there, choices=question.choices, calibration=question.calibration,
            residence_s=residence_s, lost=change.lost, relaunch_s=args.relaunch,
        )  # fmt: skip
    else:
        choice = _given(question, args, change)
    taken = choice.taken
    if args.picture is not None:
        _draw(args.picture, change, taken)
    if args.json:
        print(json.dumps(_content(change, choice, residence_s)))
    else:
        _print(question, change, choice, residence_s)
    return 0


def _as_it_runs(question: PlanQuestion, is_sharding_given: bool) -> PlanQuestion:
    """Use the sharding of the script's flags, before and after."""
    if question.arguments is None or is_sharding_given:
        return question
    sharding = (sharding_of(question.arguments),)
    return replace(question, choices=replace(question.choices, sharding=sharding))


def _asked(question: PlanQuestion, args: argparse.Namespace, before: Layout) -> _Change:
    per_host = question.device.per_host
    old = spread(before.degrees.world_size, per_host)
    unknown = sorted(args.lost - {name for name, _ in old})
    if unknown:
        raise RefusedError(
            f"--lost {unknown[0]}: {before.degrees} runs on {old[0][0]} to {old[-1][0]}; name some "
            "of these."
        )
    left = [(name, count) for name, count in old if name not in args.lost]
    devices = args.gpus
    if devices is None and args.after is None:
        raise RefusedError("give --gpus N, the devices that are there after it, or --to DEGREES.")
    if devices is None:
        devices = _degrees(question, args.after, "--to")[0].world_size
    # Hosts that lost nothing are as large as they are; the last one may have had idle devices.
    there = spread(devices, per_host, [name for name, _ in left]) if devices else ()
    return _Change(before, old, there, args.lost)


def _given(question: PlanQuestion, args: argparse.Namespace, change: _Change) -> ChangeChoice:
    after = _layout(question, args.after, "--to", must_fit=True)
    devices, needed = sum(count for _, count in change.there), after.degrees.world_size
    if needed > devices:
        raise RefusedError(
            f"--to {after.degrees} needs {needed} devices, --gpus {devices} are there; use "
            f"--gpus {needed}, or smaller degrees."
        )
    present = estimate_of(
        question.work, question.device, change.before, devices, question.calibration
    )
    estimate = estimate_of(question.work, question.device, after, devices, question.calibration)
    one, = options_for(
        question.work, question.device, [estimate], change.before, change.before_hosts,
        change.there, lost=change.lost, relaunch_s=args.relaunch, step_s=present.seconds,
        calibration=question.calibration,
    )  # fmt: skip
    return ChangeChoice(one, "as given", ())


def _degrees(question: PlanQuestion, text: str, flag: str) -> tuple[Degrees, DegreeRequest]:
    request = parse_request(text)
    if request.dp is None:
        raise RefusedError(f"{flag} {text!r} does not say dp; write for example 'tp8 pp16 dp8'.")
    initial = question.arguments.initial if question.arguments else None
    cp = request.cp or (initial.cp if initial else None) or 1
    ep = request.ep or (initial.ep if initial else None) or 1
    return Degrees(request.tp, request.pp, request.dp, request.vpp, cp, ep), request


def _layout(question: PlanQuestion, text: str, flag: str, *, must_fit: bool) -> Layout:
    """Return these degrees with the fastest fitting micro-batch and recomputation."""
    degrees, request = _degrees(question, text, flag)
    limits, choices, work = question.limits, question.choices, question.work
    micro = request.micro_batch_size
    why = refusal(degrees, limits, micro or 1)
    if why is not None:
        raise RefusedError(f"{flag} {degrees}: {why}. {_nearest(question, degrees.world_size)}")
    fixed = tuple((axis, getattr(degrees, axis), f"{flag} says so") for axis in AXES)
    choices = replace(
        choices,
        context_parallel=(degrees.cp,),
        expert_parallel=(degrees.ep,),
        micro_batches=(micro,) if micro else choices.micro_batches,
        offload=(request.offload,) if request.offload else choices.offload,
        max_tensor_parallel=max(degrees.tp, choices.max_tensor_parallel or 1),
    )
    try:
        plan = search(
            work, question.device, degrees.world_size, replace(limits, fixed=fixed), choices,
            question.calibration,
        )  # fmt: skip
    except RefusedError as error:
        if must_fit:
            raise RefusedError(f"{flag} {degrees}: {error}") from error
        return Layout(
            degrees, micro or 1, "full", choices.sharding[0],
            choices.is_sequence_parallel and degrees.tp > 1,
        )  # fmt: skip
    return plan.best.layout


def _nearest(question: PlanQuestion, devices: int) -> str:
    try:
        best = search(
            question.work, question.device, devices, question.limits, question.choices,
            question.calibration,
        ).best  # fmt: skip
    except RefusedError as error:
        return str(error)
    return f"On {devices} devices {best.layout.degrees} is valid and fits."


def _draw(path: Path, change: _Change, taken: Option) -> None:
    title = f"{change.before.degrees} to {taken.estimate.layout.degrees}"
    text = picture(
        title, change.before, change.before_hosts, taken.estimate.layout, taken.hosts,
        taken.change, change.lost,
    )  # fmt: skip
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise RefusedError(f"{path} cannot be written: {error}. Name another file.") from error


def _print(
    question: PlanQuestion, change: _Change, choice: ChangeChoice, residence_s: float
) -> None:
    taken = choice.taken
    size = question.work.shape.total_parameters / 1e9
    print(f"{size:.2f}e9 parameters, {_named(change.before, change.before_hosts)}")
    print(f"  to {_named(taken.estimate.layout, taken.hosts)}: {choice.reason}")
    if taken.change is None:
        print("  nothing changes: no byte moves, and no step is lost")
    else:
        _print_cost(taken.change, taken.unplaced_moves)
    if choice.others:
        print(f"others, in {residence_s:.0f} s:")
    for one, why in choice.others:
        took = "stays" if one.change is None else f"{one.change.total_s:.1f} s to change"
        print(f"  {one.estimate.layout}: {one.estimate.seconds:.3g} s a step, {took}; {why}")


def _print_cost(cost: Reconfiguration, unplaced_moves: int) -> None:
    print(
        f"  {sized(cost.moves)} cross between hosts ({sized(unplaced_moves)} with the hosts in the "
        f"order of joining), {sized(cost.stays)} stay on theirs"
    )
    if cost.missing:
        print(f"  {sized(cost.missing)} are held by no host that is left: they come from replicas "
              "or from a checkpoint")  # fmt: skip
    print(f"  {cost.total_s:.1f} s without a step:")
    for line in schedule(cost, is_ahead=cost.before is not None):
        print(f"    {line}")
    pairs = _pairs(cost)
    for giver, taker, size in pairs[:SHOWN_PAIRS]:
        print(f"    {giver} -> {taker}: {sized(size)}")
    if len(pairs) > SHOWN_PAIRS:
        rest = sum(size for _, _, size in pairs[SHOWN_PAIRS:])
        print(f"    {len(pairs) - SHOWN_PAIRS} more pairs: {sized(rest)}; --json has all")


def _pairs(cost: Reconfiguration) -> list[tuple[str, str, int]]:
    """Return giver, taker and bytes of crossing flows, the largest first."""
    rows, columns = cost.host_bytes.nonzero()
    found = [
        (cost.hosts[row], cost.hosts[column], int(cost.host_bytes[row, column]))
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True)
        if row != column
    ]
    return sorted(found, key=lambda pair: -pair[2])


def _content(change: _Change, choice: ChangeChoice, residence_s: float) -> dict[str, Any]:
    others = [{**_option(one), "reason": why} for one, why in choice.others]
    taken = choice.taken
    pairs = _pairs(taken.change) if taken.change else []
    return {
        "from": {**_layout_json(change.before), "hosts": _hosts_json(change.before_hosts)},
        "to": {**_option(taken), "hosts": _hosts_json(taken.hosts), "reason": choice.reason},
        "residence_s": residence_s,
        "lost": sorted(change.lost),
        "pairs": [{"from": giver, "to": taker, "bytes": size} for giver, taker, size in pairs],
        "others": others,
    }


def _option(one: Option) -> dict[str, Any]:
    cost = one.change
    return {
        **_layout_json(one.estimate.layout), "step_s": one.estimate.seconds,
        "idle": one.estimate.idle, "is_stay": one.is_stay,
        "moves": cost.moves if cost else 0, "unplaced_moves": one.unplaced_moves,
        "stays": cost.stays if cost else None,
        "stays_on_device": cost.stays_on_device if cost else None,
        "missing": cost.missing if cost else 0,
        "seconds": dict(cost.seconds) if cost else {},
        "beside_s": cost.beside_s if cost else 0.0, "total_s": cost.total_s if cost else 0.0,
    }  # fmt: skip


def _layout_json(layout: Layout) -> Mapping[str, Any]:
    return {
        "layout": str(layout), **layout.degrees.to_json(), "micro_batch": layout.micro_batch,
        "recompute": layout.recompute, "offload": layout.offload, "sharding": layout.sharding,
    }  # fmt: skip


def _hosts_json(hosts: Hosts) -> list[dict[str, Any]]:
    return [{"host": name, "ranks": count} for name, count in hosts]


def _named(layout: Layout, hosts: Hosts) -> str:
    ranks = layout.degrees.world_size
    return f"{layout} ({ranks} rank{'s' * (ranks > 1)}, {len(hosts)} host{'s' * (len(hosts) > 1)})"


def _names(text: str) -> frozenset[str]:
    return frozenset(name for name in text.split(",") if name)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds of 0 or more")
    return seconds
