"""``scalai reshard``: a checkpoint at other degrees, or in another layout."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scalai.converters.between.mapping import find_mapping
from scalai.converters.between.translation import INVENTED, LEFT_OUT
from scalai.converters.checkpoint import ReadOptions
from scalai.converters.checksums import Checked
from scalai.converters.engine import Conversion
from scalai.converters.journal import RunPart
from scalai.converters.layouts import LAYOUTS, READ_ALONE
from scalai.converters.reshard_request import AXES, ReshardRequest, prepare
from scalai.launch.config.sizes import parse_size, size_text, worker_number
from scalai.launch.program import show

TIME_PER_BYTE_S = 1 / 4e8
"""Seconds a byte of one worker, with proof, as measured on two cores: for the outlook only."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    names = ", ".join(layout.name for layout in LAYOUTS if layout.name not in READ_ALONE)
    parser = subparsers.add_parser(
        "reshard",
        help="turn a checkpoint into one for other degrees, or of another layout",
        description="Write the state in SRC to DST for other degrees. The layout of SRC is "
        "detected; SRC is never written. The same command continues a killed run.",
    )
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("destination", type=Path, metavar="DST")
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=int, metavar="N", help=f"{axis} of the target")
    parser.add_argument("--to", metavar="LAYOUT", help=f"{names} (default: that of SRC)")
    parser.add_argument(
        "--optimizer", choices=("distributed", "whole"),
        help="distributed: ranks share the optimizer's state; whole: each has all "
        "(default: as in SRC)",
    )  # fmt: skip
    parser.add_argument("--iteration", type=int, metavar="N", help="this one, not the newest")
    parser.add_argument(
        "--args-from", type=Path, metavar="CKPT|TOML",
        help="another checkpoint of the target's job, or a file about it, for what SRC lacks",
    )  # fmt: skip
    parser.add_argument(
        "--mapping",
        metavar="NAME|TOML",
        help="names of another framework: of a class (qwen3, mixtral, gpt2 ...), or a file",
    )
    parser.add_argument(
        "--merge-adapter", type=Path, metavar="DIR",
        help="merge this PEFT adapter (LoRA) into SRC, the safetensors of its base",
    )  # fmt: skip
    parser.add_argument(
        "--cuts", metavar="NAME|TOML",
        help="how DeepSpeed's tensor-parallel ranks cut parameters: gpt, llama or a file",
    )  # fmt: skip
    parser.add_argument(
        "--repad", type=int, nargs="?", const=0, metavar="ROWS",
        help="pad the vocabulary anew: to ROWS, or as the target's framework does",
    )  # fmt: skip
    parser.add_argument(
        "--memory", metavar="SIZE", help="most memory (default: a quarter of the free)"
    )
    parser.add_argument(
        "--workers", type=worker_number, default=min(os.cpu_count() or 1, 8), metavar="N",
        help="processes (default: one for each CPU, 8 at most)",
    )  # fmt: skip
    parser.add_argument(
        "--part", metavar="I/N", default="1/1",
        help="part I of N, each on its own host; the last one to end finishes DST",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it exists")
    parser.add_argument("--dry-run", action="store_true", help="print the plan only")
    parser.add_argument(
        "--trust-pickle", action="store_true",
        help="let pickles name classes of unknown packages; each is named in the log",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Reshard. Raises ``ScalaiError`` where it cannot be done."""
    request = _request(args)
    prepared = prepare(request)
    found, conversion = prepared.found, prepared.conversion
    tell = _tell_json if args.json else _tell
    about = {"layout": found.layout, "path": str(found.directory), "step": found.values.step}
    tell("source", {**about, "degrees": dict(found.values.degrees)})
    tell("target", {
        "layout": conversion.target.layout, "path": str(request.destination),
        "degrees": dict(prepared.degrees),
    })  # fmt: skip
    for note in prepared.notes():
        tell(*_event(note))
    if args.dry_run:
        tell("outlook", _outlook(conversion))
        return 0
    report = conversion.run(_progress_json() if args.json else _progress_bar())
    if report is None:
        done = "the last one to end finishes the destination"
        tell("part", {"part": str(request.part), "done": done})
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


def _request(args: argparse.Namespace) -> ReshardRequest:
    part = RunPart.parse(args.part)
    cuts = find_mapping(args.cuts, "cuts") if args.cuts else None
    return ReshardRequest(
        args.source,
        args.destination,
        degrees={axis: size for axis in AXES if (size := getattr(args, axis)) is not None},
        read=ReadOptions(args.trust_pickle, args.iteration, cuts),
        layout=args.to,
        is_split=None if args.optimizer is None else args.optimizer == "distributed",
        args_from=args.args_from,
        mapping=args.mapping,
        adapter=args.merge_adapter,
        repad=args.repad,
        memory_bytes=parse_size(args.memory) if args.memory else None,
        workers=args.workers,
        part=part,
        overwrite=args.overwrite,
    )


def _event(note: str) -> tuple[str, dict[str, Any]]:
    """Return a note as an event; losses and inventions are events of their own."""
    for beginning in (LEFT_OUT, INVENTED):
        if note.startswith(beginning):
            return beginning.removesuffix(": "), {"text": note.removeprefix(beginning)}
    return "note", {"text": note}


def _outlook(conversion: Conversion) -> dict[str, Any]:
    outlook, workers = conversion.outlook, conversion.limits.workers
    values = {key: value for key, value in asdict(outlook).items() if key != "unused"}
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(outlook.unused.items()))
    return {
        **values,
        "workers": workers,
        "about_seconds": round(outlook.write_bytes * TIME_PER_BYTE_S / workers, 1),
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
    """Return a function that draws a bar on a terminal, with rate and time to go."""
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
