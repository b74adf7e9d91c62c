"""``scalai inspect``: what a generation holds, from its files alone."""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scalai.core.region import Box
from scalai.launch.generation_report import describe, open_generation, read_tensor, verify
from scalai.store.files import box_text

Json = Any

SHOWN_PIECES = 8


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "inspect",
        help="show the tensors, layout, step and fingerprints of a generation",
        description="Show what a generation holds. PATH is a generation's directory, a host's or a "
        "job's directory in a store, or a durable directory; of several generations the newest.",
    )
    parser.add_argument("path", type=Path, metavar="PATH")
    parser.add_argument("--generation", type=int, metavar="N", help="this one, not the newest")
    parser.add_argument("--tensor", metavar="NAME", help="print the values of one tensor")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compute all fingerprints again; exit 4 if one differs",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what was asked for. Raises ``ScalaiError`` where it cannot be read."""
    generation, numbers = open_generation(args.path, args.generation)
    if args.verify:
        verify(generation)
    if args.tensor is not None:
        tensor, values = read_tensor(generation, args.tensor)
        if args.json:
            content = {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
            print(json.dumps({**content, "values": values.tolist()}))
        else:
            print(f"{tensor.name}  {tensor.dtype}{list(tensor.shape)}  step {generation.step}")
            print(values)
        return 0
    report = {**describe(generation), "generations": numbers, "is_verified": args.verify}
    if args.json:
        print(json.dumps(report))
    else:
        print("\n".join(_lines(report)))
    return 0


def _lines(report: dict[str, Json]) -> Iterator[str]:
    """Yield the report as text."""
    about = dict(report["about"])
    degrees = about.pop("degrees", {})
    others = [number for number in report["generations"] if number != report["generation"]]
    yield f"generation {report['generation']}  step {report['step']}" + (
        f"  (also here: {', '.join(map(str, others))})" if others else ""
    )
    yield "degrees    " + " ".join(f"{axis}={size}" for axis, size in degrees.items())
    for key, value in about.items():
        yield f"{key:10} {value if isinstance(value, str) else json.dumps(value)}"
    state = "whole" if report["is_whole"] else f"not whole: {_missing(report['missing'])}"
    proof = ", fingerprints computed again and equal" if report["is_verified"] else ""
    yield f"state      {state}, {_bytes(report['size_bytes'])}{proof}"
    for host in report["hosts"]:
        ranks = ",".join(map(str, host["ranks"])) or "-"
        yield (
            f"host       {host['host']}  ranks {ranks}  {host['pieces']} pieces  "
            f"{_bytes(host['size_bytes'])}  {host['directory']}"
        )
    yield f"scalars    {', '.join(sorted(report['scalars'])) or '-'}"
    yield f"rank state {', '.join(report['rank_state']) or '-'}"
    yield ""
    yield from _table(report["tensors"])


def _table(tensors: Sequence[dict[str, Json]]) -> Iterator[str]:
    """Yield a line a tensor, and below it who holds which boxes."""
    width = max((len(tensor["name"]) for tensor in tensors), default=0)
    for tensor in tensors:
        kind = f"{tensor['dtype']}{tensor['shape']}"
        print_ = tensor["fingerprint"] or "-" * 16
        yield f"{tensor['name']:{width}}  {print_}  {_bytes(tensor['size_bytes']):>10}  {kind}"
        holders: dict[str, list[str]] = {}
        for piece in tensor["pieces"]:
            box = Box(tuple(piece["offset"]), tuple(piece["shape"]))
            place = f"{piece['host']}/{piece['file'].removesuffix('.safetensors')}"
            holders.setdefault(box_text(box), []).append(place)
        for text, places in list(holders.items())[:SHOWN_PIECES]:
            yield f"    {text}  {' '.join(places)}"
        if len(holders) > SHOWN_PIECES:
            yield f"    and {len(holders) - SHOWN_PIECES} more boxes (--json lists all)"


def _missing(missing: Sequence[dict[str, Json]]) -> str:
    first = missing[0]
    box = box_text(Box(tuple(first["offset"]), tuple(first["shape"])))
    return f"{len(missing)} boxes are on none of these hosts, first {first['tensor']}{box}"


def _bytes(size_bytes: int) -> str:
    """Return a size for people, in powers of ten."""
    size, unit = float(size_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
