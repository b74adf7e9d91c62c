"""``scalai ledger``: the samples that a job has consumed, as text, JSON or a picture, and the proof
that each was seen just once."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from scalai.core.dataset.drawn import DrawnPass
from scalai.core.dataset.ledger import Ledger, LedgerVerdict, Lost, judge, left_of, name_of
from scalai.core.dataset.step_lines import judge_lines, read_lines, united
from scalai.core.errors import RefusedError, StoreError, UsageError
from scalai.core.exit_codes import DIFFERS
from scalai.core.jsonable import Json
from scalai.launch.agent.durable import FINAL_LEDGER, FINISHED
from scalai.launch.commands.plan_picture import INK, LOST, MOVED, PALE, PAPER, svg, svg_text
from scalai.runtime.consumption import LEDGER
from scalai.store.atomic import replace_file
from scalai.store.manifest import HostManifest, read_saved_manifest
from scalai.store.places import check_job, default_store_dir, find_generations

TAKEN = "#0b6e8f"
MOST_PASSES, MOST_ROUNDS = 24, 200
"""Most bars of passes, the newest ones, and of rounds; a line tells the number of the others."""
_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _BAR = 1100, 220, 30, 84, 34, 18


def picture(title: str, ledger: Ledger, verdict: LedgerVerdict) -> str:
    """Return an SVG.

    A bar is a pass: consumed samples are blue, those before the ledger grey, skipped ones white
    with a red edge, those seen twice red. Below, each round has its steps; steps lost and done
    again lie in orange on a line of their own.
    """
    shown = ledger.passes[-MOST_PASSES:]
    rounds = _TOP + len(shown) * _ROW + 40
    height = rounds + 3 * _ROW + 30
    kept = "No sample was skipped, and none was seen twice"
    says = f"{kept}." if verdict.is_kept else "; ".join(verdict.breaks)
    parts = [svg_text(20, 48, says, fill=INK if verdict.is_kept else LOST)]
    if len(ledger.passes) > len(shown):
        parts.append(svg_text(20, 68, f"{len(ledger.passes) - len(shown)} more bars are not drawn"))
    for place, each in enumerate(shown):
        parts += _pass(each, _TOP + place * _ROW)
    parts += _rounds(ledger, rounds)
    return svg(_WIDTH, height, title, parts)


def _pass(entry: DrawnPass, top: int) -> list[str]:
    """Draw one bar, as long as the pass; for unknown lengths, as its consumed part."""
    length = max(entry.length or 0, entry.taken.end, entry.unproven, 1)
    parts = [
        svg_text(20, top + 13, name_of(entry)),
        _box(0, length, length, top, PAPER, "not consumed", edge=PALE),
        _box(0, entry.unproven, length, top, PALE, "before the ledger began"),
    ]
    for pairs, colour, says in (
        (entry.taken.pairs, TAKEN, "consumed"), (entry.twice.pairs, LOST, "seen twice"),
    ):  # fmt: skip
        parts += [_box(start, stop, length, top, colour, says) for start, stop in pairs]
    for start, stop in entry.skipped.pairs:
        parts.append(_box(start, stop, length, top, PAPER, "skipped", edge=LOST))
    parts.append(svg_text(_LEFT, top + _BAR + 12, "0", size=10))
    parts.append(svg_text(_WIDTH - _RIGHT, top + _BAR + 12, str(length), size=10, anchor="end"))
    return parts


def _rounds(ledger: Ledger, top: int) -> list[str]:
    """Draw the rounds by their steps, and the lost steps."""
    last = max([ledger.at[0], *(lost.until for lost in ledger.lost), 1])
    parts = [svg_text(20, top + 13, "steps of each round"), svg_text(20, top + _ROW + 13, "lost")]
    parts.append(_box(0, ledger.since[0], last, top, PALE, "before the ledger began"))
    shown = list(ledger.rounds())[-MOST_ROUNDS:]
    for place, (stretch, until, _) in enumerate(shown):
        degrees = " ".join(f"{axis}{size}" for axis, size in stretch.degrees.items())
        says = f"{stretch.round}: {degrees}"
        colour = TAKEN if place % 2 == 0 else "#6fb1c7"
        parts.append(_box(stretch.step, until, last, top, colour, says, edge=PAPER))
    parts += [_lost(lost, last, top + _ROW) for lost in ledger.lost[-MOST_ROUNDS:]]
    parts.append(svg_text(_LEFT, top + _BAR + 12, "0", size=10))
    parts.append(svg_text(_WIDTH - _RIGHT, top + _BAR + 12, f"step {last}", size=10, anchor="end"))
    legend = (
        "Blue was consumed, grey came before the ledger, red was seen twice or skipped; orange "
    )
    parts.append(svg_text(20, top + 2 * _ROW + 24, legend + "steps were lost and are done again."))
    return parts


def _lost(lost: Lost, last: int, top: int) -> str:
    return _box(lost.after, lost.until, last, top, MOVED, f"lost by round {lost.round}")


def _box(
    start: int, stop: int, length: int, top: int, colour: str, says: str, *, edge: str = "none"
) -> str:
    """Draw the places from ``start`` to ``stop``, at least 0.75 wide."""
    if stop <= start:
        return ""
    scale = (_WIDTH - _LEFT - _RIGHT) / length
    width = max((stop - start) * scale, 0.75)
    return (
        f'<rect x="{_LEFT + start * scale:.2f}" y="{top}" width="{width:.2f}" height="{_BAR}" '
        f'fill="{colour}" stroke="{edge}"><title>{escape(f"{says}: {start} to {stop}")}</title>'
        "</rect>"
    )


TRIES = 3
"""Tries of a read: a running job drops generations meanwhile."""
_LINES = "rank-*.jsonl"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "ledger",
        help="show which samples a job has consumed, and prove that each was seen once",
        description="Read the ledger of a job's newest generation. verify ends with exit code 4 "
        "where samples were skipped or seen twice.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("verify", "prove that no sample was skipped or seen twice"),
        ("show", "show what was consumed"),
    ):
        action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        action.add_argument(
            "what", metavar="JOB|PATH",
            help="a job of this machine; or the directory of a generation, of a host or a job in a "
            "store, a durable one, or the folder of SCALAI_LEDGER_DIR",
        )  # fmt: skip
        action.add_argument("--generation", type=int, metavar="N", help="this one, not the newest")
        action.add_argument(
            "--store-dir", type=Path, help="folder of the job's stores (default: in /dev/shm)"
        )
        action.add_argument("--picture", type=Path, metavar="FILE.svg", help="also draw a picture")
        action.add_argument("--json", action="store_true", help="one JSON object")
        action.set_defaults(run=run, is_verifying=name == "verify")


def run(args: argparse.Namespace) -> int:
    """Show or verify. Raises ``ScalaiError``: there is no ledger, or it cannot be read."""
    path = _path(args)
    if sorted(path.glob(_LINES)):
        return _of_lines(path, args)
    found = _find(path, args.generation)
    verdict = found.verdict
    if args.picture is not None:
        drawing = picture(f"What {args.what} has consumed", found.ledger, verdict)
        replace_file(args.picture, drawing.encode(), is_durable=False)
    if args.json:
        print(json.dumps(found.to_json()))
    else:
        print("\n".join([*_lines(found), *_verdict_lines(verdict, found.ledger.since[0])]))
    return DIFFERS if args.is_verifying and not verdict.is_kept else 0


@dataclass(frozen=True, slots=True)
class FoundLedger:
    """The ledger of a generation, from the parts at hand; None: of a finished job. ``breaks`` are
    differences between the parts."""

    generation: int | None
    step: int
    samples: int | None
    directory: Path
    ledger: Ledger
    breaks: tuple[str, ...]

    @property
    def verdict(self) -> LedgerVerdict:
        own = judge(self.ledger, self.step, self.samples)
        return LedgerVerdict((*self.breaks, *own.breaks), own.notes)

    def to_json(self) -> dict[str, Json]:
        return {
            "generation": self.generation, "step": self.step, "samples": self.samples,
            "directory": str(self.directory), **self.verdict.to_json(),
            "ledger": self.ledger.to_json(),
        }  # fmt: skip


def _path(args: argparse.Namespace) -> Path:
    """Directory of a path, or of a job by its name."""
    path = Path(args.what)
    if path.is_dir():
        return path
    if path.exists() or "/" in args.what:
        raise UsageError(f"{path} is no directory. Name a job, or a directory with a ledger.")
    folder = (args.store_dir or default_store_dir()) / check_job(args.what)
    if not folder.is_dir():
        raise UsageError(
            f"no job {args.what!r} has a store here (looked for {folder}). Name it by --store-dir, "
            "or name a directory."
        )
    return Path(folder)


def _find(path: Path, number: int | None) -> FoundLedger:
    """Read the ledger of a generation; None: the newest one. A running job may drop it meanwhile;
    then the next one is read."""
    final = sorted(path.glob(f"{FINAL_LEDGER}*.json"))
    if number is None and final and (path / FINISHED).exists():
        return _at_the_end(path, final)
    for left in reversed(range(TRIES)):
        found = find_generations(path)
        if not found or number not in (None, *found):
            wanted = "no generation" if number is None else f"no generation {number}"
            raise UsageError(
                f"{path} holds {wanted}{f', but {sorted(found)}' if found else ''}. Name a "
                "generation's directory, a host's, a job's or a durable one."
            )
        wanted_one = max(found) if number is None else number
        try:
            parts = [read_saved_manifest(each, wanted_one) for each in found[wanted_one]]
            return _united(path, parts)
        except StoreError:
            if not left or all(each.exists() for each in found[wanted_one]):
                raise
    raise AssertionError("the last try raises")


def _at_the_end(path: Path, files: list[Path]) -> FoundLedger:
    """Ledger of a finished job, left by its hosts in a durable directory."""
    ledgers: dict[str, Ledger] = {}
    for file in files:
        host = file.stem.removeprefix(FINAL_LEDGER)
        try:
            ledgers[host] = Ledger.from_json(json.loads(file.read_text()))
        except (OSError, ValueError, RecursionError) as error:
            raise StoreError(
                f"{file}, the ledger at the job's end, is damaged: {error}. The newest generation "
                "that is there, if any, has one of its own step: --generation N."
            ) from error
    try:
        step = int(json.loads((path / FINISHED).read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path / FINISHED}, which says at which step the job has finished, cannot be read "
            f"({error!r})."
        ) from error
    # Of a host that died behind its file the job has made steps more.
    at_the_end = {host: each for host, each in ledgers.items() if each.at[0] == step}
    ledger, breaks = _one_of(at_the_end or ledgers)
    return FoundLedger(None, step, ledger.at[1], path, ledger, breaks)


def _one_of(ledgers: dict[str, Ledger]) -> tuple[Ledger, tuple[str, ...]]:
    """Ledger of all hosts, and the hosts with another one, in words."""
    host, ledger = next(iter(ledgers.items()))
    others = [name for name, each in ledgers.items() if each != ledger]
    return ledger, tuple(f"hosts {host!r} and {other!r} have different ledgers" for other in others)


def _united(path: Path, parts: list[HostManifest]) -> FoundLedger:
    """The one ledger of these parts of a generation."""
    parts.sort(key=lambda part: min(part.ranks, default=1 << 62))
    ledgers: dict[str, Ledger] = {}
    for part in parts:
        if LEDGER in part.scalars:
            try:
                ledgers[part.host] = Ledger.from_json(part.scalars[LEDGER])
            except ValueError as error:
                raise StoreError(
                    f"the ledger in the part of host {part.host!r} in {path} is damaged: {error}. "
                    "Use another generation."
                ) from error
    first = parts[0]
    if not ledgers:
        raise RefusedError(
            f"generation {first.generation} in {path} has no ledger: its job draws none, or the "
            f"hosts that draw samples are not here. Nothing is proven of its {first.step} "
            "steps; a job that goes on from it begins a ledger there."
        )
    ledger, breaks = _one_of(ledgers)
    samples = first.about["consumed_samples"]
    return FoundLedger(
        first.generation, first.step, samples if type(samples) is int else None, path, ledger,
        breaks,
    )  # fmt: skip


def _lines(found: FoundLedger) -> Iterator[str]:
    """Yield the consumed samples as text."""
    ledger = found.ledger
    counted = "" if found.samples is None else f", {found.samples} samples"
    of = "the end" if found.generation is None else f"generation {found.generation}"
    yield f"{of}: step {found.step}{counted}"
    yield "consumed"
    for place, each in enumerate(ledger.passes):
        of = "" if each.length is None else f" of {each.length}"
        times = "" if each.count == 1 else f", {each.count} times"
        seen = "seen at the samplers" if each.is_dealt else "counted"
        left = ", the rest was left" if left_of(ledger, place) else ""
        yield f"  {name_of(each)}: {each.taken}{of}{times}, {seen}{left}"
    yield "rounds"
    for stretch, until, samples in ledger.rounds():
        sizes = [f"{axis}{size}" for axis, size in stretch.degrees.items() if size > 1]
        degrees = " ".join(sizes or ["dp1"] * bool(stretch.degrees))
        steps = f"steps {stretch.step + 1} to {until}" if until > stretch.step else "no step"
        counted = ""
        if samples is not None and stretch.samples is not None:
            counted = f", {samples - stretch.samples} samples"
        yield f"  {stretch.round}: {steps}{counted}{', ' + degrees if degrees else ''}"


def _verdict_lines(verdict: LedgerVerdict, since: int) -> Iterator[str]:
    yield from (f"note: {note}" for note in verdict.notes)
    yield from (f"BROKEN: {text}" for text in verdict.breaks)
    if verdict.is_kept:
        yield (
            "proven"
            + (f" from step {since} on" if since else "")
            + (": no sample was skipped, and none was seen twice")
        )


def _of_lines(path: Path, args: argparse.Namespace) -> int:
    """Show or verify the files of ranks in the folder of ``SCALAI_LEDGER_DIR``."""
    if args.picture is not None:
        raise UsageError("--picture draws the ledger of a generation; name a job or a generation.")
    paths = sorted(path.glob(_LINES), key=lambda each: (len(each.name), each.name))
    files = {each.name: read_lines(each.read_text(), str(each)) for each in paths}
    verdict, steps = judge_lines(files), united(lines for lines, _ in files.values())
    if not steps:
        raise RefusedError(f"the files in {path} have no whole line.")
    last = list(steps.values())[-1]
    summary = {"steps": len(steps), "step": last.step, "samples": last.consumed_samples}
    if args.json:
        print(json.dumps({"directory": str(path), **summary, **verdict.to_json()}))
    else:
        print(f"{len(files)} files: steps {min(steps)} to {last.step}, to sample "
              f"{last.consumed_samples}")  # fmt: skip
        print("\n".join(_verdict_lines(verdict, min(steps) - 1)))
    return DIFFERS if args.is_verifying and not verdict.is_kept else 0
