"""``scalai inspect``: what a generation or a checkpoint of any layout holds, from its files."""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from scalai.converters.between.mapping import find_mapping
from scalai.converters.checkpoint import Checkpoint, ReadOptions
from scalai.converters.consistency import verify
from scalai.converters.describe import describe, read_tensor
from scalai.converters.layouts import has_checkpoint, open_checkpoint, unknown_text
from scalai.converters.recorded import check_recorded, check_stated
from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import Box, box_text
from scalai.launch.config.sizes import size_text
from scalai.launch.program import show

SHOWN_PIECES = 8


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "inspect",
        help="show the tensors, layout and step of a generation or a checkpoint",
        description="Show what a generation or a checkpoint holds. PATH is a generation's "
        "directory, a host's or a job's directory in a store, a durable directory, or a "
        "framework's checkpoint; of several the newest.",
    )
    parser.add_argument("path", type=Path, metavar="PATH")
    parser.add_argument(
        "--generation", "--iteration", type=int, metavar="N", help="this one, not the newest"
    )
    parser.add_argument("--cuts", metavar="NAME|TOML", help="as for scalai reshard")
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
    if args.path.exists() and not has_checkpoint(args.path):
        raise RefusedError(
            f"{args.path} holds no committed generation. Name a generation's directory, a host's, "
            f"a job's or a durable one. {unknown_text(args.path)}"
        )
    cuts = find_mapping(args.cuts, "cuts") if args.cuts else None
    options = ReadOptions(iteration=args.generation, cuts=cuts, is_part=True)
    checkpoint = open_checkpoint(args.path, options)
    if args.verify:
        _verify(checkpoint)
    if args.tensor is not None:
        tensor, values = read_tensor(checkpoint, args.tensor)
        _show_tensor(tensor, values, checkpoint.values.step, as_json=args.json)
        return 0
    report = {**describe(checkpoint), "is_verified": args.verify}
    lines = _lines if "generation" in report else _checkpoint_lines
    if args.json:
        print(json.dumps(report))
    else:
        show(*lines(report))
    return 0


def _verify(checkpoint: Checkpoint) -> None:
    """Compute all fingerprints again. Of a part of a generation those of its pieces say enough."""
    if checkpoint.recorded is not None:
        check_recorded(checkpoint, range(len(checkpoint.recorded)), workers=1)
        check_stated(checkpoint)
    else:
        verify(checkpoint, workers=1)


def _show_tensor(tensor: Tensor, values: npt.NDArray[Any], step: int, *, as_json: bool) -> None:
    if as_json:
        content = {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
        print(json.dumps({**content, "values": values.tolist()}))
    else:
        show(f"{tensor.name}  {tensor.dtype}{list(tensor.shape)}  step {step}")
        print(values)


def _checkpoint_lines(report: dict[str, Json]) -> Iterator[str]:
    """Yield a checkpoint's report as text."""
    yield f"layout     {report['layout']}  step {report['step']}  {report['directory']}"
    yield "degrees    " + " ".join(f"{axis}={size}" for axis, size in report["degrees"].items())
    yield f"optimizer  {report['optimizer'] or 'none'}"
    for key, value in report["counters"].items():
        yield f"{key} {value}"
    state = "whole" if report["is_whole"] else f"not whole, {len(report['missing'])} holes"
    yield f"state      {state}, {size_text(report['size_bytes'])} in {report['files']} files"
    if auxiliary := report["beside"]:
        states = f", RNG states of {auxiliary['rng_states']} ranks"
        yield f"saved by   {auxiliary['saved_by']}: {', '.join(auxiliary['files'])}{states}"
    yield from (f"note       {note}" for note in report["notes"])
    yield ""
    width = max((len(tensor["name"]) for tensor in report["tensors"]), default=0)
    for tensor in report["tensors"]:
        kind = f"{tensor['dtype']}{tensor['shape']}"
        size, pieces = size_text(tensor["size_bytes"]), tensor["pieces"]
        yield f"{tensor['name']:{width}}  {size:>10}  {pieces:>4} pieces  {kind}"


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
    yield f"state      {state}, {size_text(report['size_bytes'])}{proof}"
    for host in report["hosts"]:
        ranks = ",".join(map(str, host["ranks"])) or "-"
        yield (
            f"host       {host['host']}  ranks {ranks}  {host['pieces']} pieces  "
            f"{size_text(host['size_bytes'])}  {host['directory']}"
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
        yield f"{tensor['name']:{width}}  {print_}  {size_text(tensor['size_bytes']):>10}  {kind}"
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
