"""``scalai verify``: is a checkpoint whole, and are two the same state?"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

from scalai.converters.between.mapping import find_mapping, named_mapping
from scalai.converters.between.megatron_described import shape_arguments
from scalai.converters.between.model_config import (
    config_arguments,
    contradictions,
    unknown_notes,
)
from scalai.converters.between.translation import (
    has_own_modules,
    heads_of,
    in_our_names,
    is_in_our_names,
)
from scalai.converters.checkpoint import CONFIG, Checkpoint, ReadOptions, parameters_of
from scalai.converters.checksums import count_checksums
from scalai.converters.consistency import compare, find_repeats, verify
from scalai.converters.layouts import open_checkpoint
from scalai.converters.megatron.model_limits import Heads
from scalai.converters.recorded import is_recorded
from scalai.converters.suspects import find_suspects, guess_text
from scalai.core.exit_codes import DIFFERS
from scalai.core.tensors.fingerprint import VERSION
from scalai.launch.config.sizes import worker_number
from scalai.launch.program import show


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "verify",
        help="check a checkpoint, or compare two of any layouts",
        description="Check that A is whole and agrees with itself; with B, that both are the same "
        "state. Exit code 4 where something differs.",
    )
    parser.add_argument("one", type=Path, metavar="A")
    parser.add_argument("two", type=Path, metavar="B", nargs="?")
    parser.add_argument(
        "--workers",
        type=worker_number,
        default=min(os.cpu_count() or 1, 8),
        metavar="N",
        help="processes (default: one for each CPU, 8 at most)",
    )
    parser.add_argument("--mapping", metavar="NAME|TOML", help="names of another framework")
    parser.add_argument("--cuts", metavar="NAME|TOML", help="as for scalai reshard")
    parser.add_argument("--trust-pickle", action="store_true", help="as for scalai reshard")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify. Raises ``ScalaiError`` where a checkpoint cannot be read or contradicts itself."""
    one, *others = _open(args)
    if not others:
        prints = verify(one, args.workers)
        lacking = count_checksums(one, is_proven=is_recorded(one, prints)).lacking
        notes = [*one.notes, *filter(None, [lacking])]
        warnings = list(find_suspects(one))
        if one.directory.resolve() != args.one.resolve():
            warnings += find_repeats(one, _options(args), args.workers)
        texts = {name: f"{value:016x}" for name, value in sorted(prints.items())}
        if args.json:
            content = {
                "layout": one.layout, "notes": notes, "warnings": warnings,
                "fingerprint_version": VERSION, "fingerprints": texts,
            }  # fmt: skip
            print(json.dumps(content))
        else:
            show(
                f"{one.directory} ({one.layout}) is whole: {len(texts)} tensors at step "
                f"{one.values.step}, replicas and second copies equal.",
                *(f"note: {note}" for note in notes),
                *(f"warning: {warning}" for warning in warnings),
            )
        return 0
    two = others[0]
    models, warnings = _other_models(one, two)
    lines = [*_other_tensors(one, two)]
    if one.values.step != two.values.step:
        lines.append(f"steps {one.values.step} and {two.values.step}")
    lines += [*models, *compare(one, two, args.workers)]
    warnings += [f"{of.directory}: {guess_text(of)}" for of in (one, two) if of.guessed]
    if args.json:
        print(json.dumps({"is_equal": not lines, "differences": lines, "warnings": warnings}))
    else:
        show(
            *(lines or [f"equal: {len(one.placed.collection.tensors)} tensors"]),
            *(f"warning: {warning}" for warning in warnings),
        )
    return DIFFERS if lines else 0


def _other_tensors(one: Checkpoint, two: Checkpoint) -> Iterator[str]:
    """Yield one sentence where the two are not of one model."""
    left, right = (
        {tensor.name: tensor for tensor in of.placed.collection.tensors} for of in (one, two)
    )
    both = left.keys() & right.keys()
    alone, others = len(left.keys() ^ right.keys()), sum(left[n] != right[n] for n in both)
    if alone or others:
        yield (
            f"{one.directory} and {two.directory} are different models: {alone} tensors are in one "
            f"of them only, {others} have another shape or dtype, {len(both) - others} are common"
        )


def _other_models(one: Checkpoint, two: Checkpoint) -> tuple[list[str], list[str]]:
    """Return where Megatron's arguments make another model of the tensors than the ``config.json``
    of the other checkpoint, and what nobody knows of it. Raises ``RefusedError`` where no arguments
    make the same."""
    lines, notes = list[str](), list[str]()
    for mine, other in ((one, two), (two, one)):
        config, arguments = mine.values.extra.get(CONFIG), other.values.arguments
        if config and arguments and other.values.framework == "megatron":
            shaped = shape_arguments(parameters_of(mine), None)
            said, _ = config_arguments(config, shaped, mine.directory)
            lines += contradictions(said, arguments)
            notes += unknown_notes(config)
    return lines, notes


def _options(args: argparse.Namespace) -> ReadOptions:
    cuts = find_mapping(args.cuts, "cuts") if args.cuts else None
    return ReadOptions(args.trust_pickle, cuts=cuts)


def _open(args: argparse.Namespace) -> list[Checkpoint]:
    """Open A, and B if there is one; with a mapping under our names."""
    options = _options(args)
    found = [open_checkpoint(path, options) for path in (args.one, args.two) if path is not None]
    if args.mapping is None:
        return found
    mapping, heads = named_mapping(args.mapping), Heads()
    for checkpoint in found:
        heads = heads.or_else(heads_of(checkpoint))
    is_local = any(has_own_modules(one.values) for one in found)
    return [
        one
        if is_in_our_names(one, mapping)
        else in_our_names(one, mapping, heads, is_local=is_local)[0]
        for one in found
    ]
