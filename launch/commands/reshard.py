"""``scalai reshard``: a checkpoint at other degrees, or in another layout."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from scalai.converters.between.adapting import TargetRequest, adapted
from scalai.converters.between.mapping_files import find_mapping, read_mapping
from scalai.converters.between.reference import Reference, read_reference
from scalai.converters.between.translation import INVENTED, LEFT_OUT
from scalai.converters.checkpoint import Checkpoint, ReadOptions, Values, WriteOptions
from scalai.converters.checksums import Checked
from scalai.converters.engine import Limits, Outlook, look_ahead, reshard, table_bytes_of
from scalai.converters.hugging_face.carrying import accompanied
from scalai.converters.journal import RunPart
from scalai.converters.layouts import LAYOUTS, layout_named, open_checkpoint
from scalai.converters.megatron.model_limits import limits_of
from scalai.converters.megatron.modules import expert_of
from scalai.converters.suspects import find_suspects
from scalai.core.degrees.degrees import Degrees, refusal
from scalai.core.errors import RefusedError
from scalai.launch.config.sizes import parse_size, size_text, worker_number
from scalai.launch.program import show
from scalai.store.pool import available_memory

AXES = ("tp", "pp", "dp", "vpp", "ep", "etp", "cp")
FALLBACK_MEMORY = 1 << 30
TIME_PER_BYTE_S = 1 / 4e8
"""Of one worker, with proof, on the machine that this was written on: for the outlook only."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    names = ", ".join(layout.name for layout in LAYOUTS)
    parser = subparsers.add_parser(
        "reshard",
        help="turn a checkpoint into one for other degrees, or of another layout",
        description="Write the state in SRC to DST for other degrees. What SRC holds is found by "
        "looking; SRC is never written. A killed run goes on where it stopped.",
    )
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("destination", type=Path, metavar="DST")
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=int, metavar="N", help=f"{axis} of the target")
    parser.add_argument("--to", metavar="LAYOUT", help=f"{names} (default: that of SRC)")
    parser.add_argument(
        "--optimizer", choices=("distributed", "whole"),
        help="whether ranks will share the optimizer's state (default: as in SRC)",
    )  # fmt: skip
    parser.add_argument("--iteration", type=int, metavar="N", help="this one, not the newest")
    parser.add_argument(
        "--args-from", type=Path, metavar="CKPT|TOML",
        help="another checkpoint of the target's job, or a file about it, for what SRC lacks",
    )  # fmt: skip
    parser.add_argument(
        "--mapping",
        metavar="NAME|TOML",
        help="names of another framework: gpt, gpt_neox, llama or a file",
    )
    parser.add_argument(
        "--cuts", metavar="NAME|TOML",
        help="how DeepSpeed's tensor-parallel ranks cut parameters: gpt, llama or a file",
    )  # fmt: skip
    parser.add_argument(
        "--repad", type=int, nargs="?", const=0, metavar="ROWS",
        help="pad the vocabulary anew: to ROWS, or as the target's framework does",
    )  # fmt: skip
    parser.add_argument("--memory", metavar="SIZE", help="at most (default: a quarter of the free)")
    parser.add_argument(
        "--workers", type=worker_number, default=min(os.cpu_count() or 1, 8), metavar="N",
        help="processes (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--part", metavar="I/N", default="1/1",
        help="do one of N parts, on a host of its own; the last one to end finishes DST",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it exists")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    parser.add_argument(
        "--trust-pickle", action="store_true",
        help="let pickles name classes of unknown packages; each is named in the log",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Reshard. Raises ``ScalaiError`` where it cannot be done."""
    part = RunPart.parse(args.part)
    cuts = find_mapping(args.cuts, "cuts") if args.cuts else None
    options = ReadOptions(args.trust_pickle, args.iteration, cuts)
    stated = None
    if args.args_from:
        stated = read_reference(args.args_from, replace(options, iteration=None))
    order = None if stated is None else stated.order
    found = open_checkpoint(args.source, replace(options, order=order))
    layout = layout_named(args.to or found.layout)
    source, reference = adapted(found, _requested(layout.name, args, stated))
    degrees = _degrees(source, args)
    _check_degrees(source, degrees, reference)
    is_split = None if args.optimizer is None else args.optimizer == "distributed"
    target = layout.lay_out(source, WriteOptions(degrees, is_split, reference, cuts))
    target = accompanied(source, target, degrees)
    free = available_memory(unknown=4 * FALLBACK_MEMORY)
    limits = Limits(free // 4, args.workers, table_bytes_of(source, target))
    memory = (
        parse_size(args.memory) if args.memory else max(limits.memory_bytes, limits.least_bytes)
    )
    limits = replace(limits, memory_bytes=memory)
    tell = _tell_json if args.json else _tell
    what = {"layout": found.layout, "path": str(found.directory), "step": found.values.step}
    tell("source", {**what, "degrees": dict(found.values.degrees)})
    tell("target", {"layout": target.layout, "path": str(args.destination), "degrees": degrees})
    for note in (*target.notes, *find_suspects(source, is_sample=True)):
        tell(*_event(note))
    if args.dry_run:
        _, outlook = look_ahead(source, target, limits)
        tell("outlook", _outlook(outlook, limits))
        return 0
    progress = _progress_json() if args.json else _progress_bar()
    report = reshard(
        source, target, args.destination, limits,
        overwrite=args.overwrite, part=part, progress=progress,
    )  # fmt: skip
    if report is None:
        tell("part", {"part": str(part), "done": "the last one to end finishes the destination"})
        return 0
    tell("done", {
        "tensors": len(report["fingerprints"]),
        "bytes": report["bytes"],
        "seconds": report["seconds"],
        "resumed_tasks": report["resumed_tasks"],
        "proof": "fingerprints at both ends are equal",
        "source": str(Checked(**report["checksums"])),
    })  # fmt: skip
    return 0


def _requested(layout: str, args: argparse.Namespace, stated: Reference | None) -> TargetRequest:
    mapping = read_mapping(find_mapping(args.mapping)) if args.mapping else None
    return TargetRequest(layout, mapping, stated, args.repad, args.tp)


def _event(note: str) -> tuple[str, dict[str, Any]]:
    """Return a note as an event: what is left out and what is invented are events of their own."""
    for beginning in (LEFT_OUT, INVENTED):
        if note.startswith(beginning):
            return beginning.removesuffix(": "), {"text": note.removeprefix(beginning)}
    return "note", {"text": note}


def _degrees(source: Checkpoint, args: argparse.Namespace) -> dict[str, int]:
    """Return the degrees of the target: those given, else the source's."""
    given = {axis: value for axis in AXES if (value := getattr(args, axis)) is not None}
    degrees = {**source.values.degrees, **given}
    if "pp" in given and "vpp" not in given:
        degrees["vpp"] = 1
    names = (tensor.name for tensor in source.placed.collection.tensors)
    if "etp" in degrees and "etp" not in given and all(expert_of(name) is None for name in names):
        degrees["etp"] = degrees.get("tp", 1)  # Megatron states it of models without experts too
    return degrees


def _check_degrees(source: Checkpoint, degrees: dict[str, int], reference: Values | None) -> None:
    """Raise ``RefusedError`` where the model cannot be cut so."""
    known = {axis: degrees.get(axis, 1) for axis in ("tp", "pp", "vpp", "cp", "ep")}
    # Without --dp enough ranks for the experts: the batch is the job's, not the checkpoint's.
    ranks = degrees.get("dp") or known["ep"] * degrees.get("etp", 1)
    values = source.values if source.values.arguments or reference is None else reference
    limits = limits_of(values, source.placed.collection.tensors)
    reason = refusal(Degrees(dp=ranks, **known), limits)
    if reason is None:
        return
    rows, tp = limits.padded_vocab_size, known["tp"]
    if rows is not None and rows % tp and f"vocabulary of {rows} rows" in reason:
        raise RefusedError(
            f"tp={tp} does not divide the padded vocabulary of {rows} rows. Give --repad, which "
            "pads it anew (losses will differ), or choose another --tp."
        )
    raise RefusedError(f"{reason}. Choose other degrees.")


def _outlook(outlook: Outlook, limits: Limits) -> dict[str, Any]:
    seconds = outlook.write_bytes * TIME_PER_BYTE_S / limits.workers
    values = {key: value for key, value in asdict(outlook).items() if key != "unused"}
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(outlook.unused.items()))
    return {
        **values,
        "workers": limits.workers,
        "about_seconds": round(seconds, 1),
        "no_tensors_there": kinds or "none",
    }


def _tell(event: str, values: dict[str, Any]) -> None:
    shown = []
    for key, value in values.items():
        if isinstance(value, dict):
            shown += [f"{name}={size}" for name, size in value.items()]
        else:
            is_size = key == "bytes" or key.endswith("_bytes")
            shown.append(f"{key}={size_text(value) if is_size else value}")
    show(f"{event:8} {values['text'] if 'text' in values else '  '.join(shown)}")


def _tell_json(event: str, values: dict[str, Any]) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def _progress_json() -> Callable[[int, int], None]:
    began = time.monotonic()

    def show(done: int, total: int) -> None:
        seconds = round(time.monotonic() - began, 3)
        _tell_json("progress", {"done_bytes": done, "total_bytes": total, "seconds": seconds})

    return show


def _progress_bar() -> Callable[[int, int], None]:
    """Return what draws a bar on a terminal, with rate and time to go."""
    began, first = time.monotonic(), [-1]

    def show(done: int, total: int) -> None:
        if not sys.stderr.isatty():
            return
        first[0] = done if first[0] < 0 else first[0]
        seconds = time.monotonic() - began
        rate = (done - first[0]) / seconds if seconds > 0 else 0.0
        left = f"{(total - done) / rate:.0f} s to go" if rate else ""
        bar = "#" * (30 * done // max(total, 1))
        line = f"\r[{bar:30}] {size_text(done)} of {size_text(total)}, {size_text(int(rate))}/s"
        print(f"{line} {left:16}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return show
