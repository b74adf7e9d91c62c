"""``scalai history`` and ``scalai plot``: the changes of a job, running or ended, as a table or a
picture."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from scalai.core.errors import PeerError, RefusedError, ScalaiError, UsageError
from scalai.core.jsonable import Json
from scalai.launch.commands.job_commands import add_way, ask
from scalai.launch.commands.job_history import (
    REPORTS,
    History,
    Losses,
    merged,
    read_folder,
    table,
    totals,
)
from scalai.launch.commands.job_losses import (
    PLOT_EXTRA,
    read_losses,
    read_tensorboard,
    tensorboard_of,
)
from scalai.launch.config.endpoint import read_ending
from scalai.launch.coordinator.person_calls import ReadReports
from scalai.launch.program import show
from scalai.store.atomic import replace_file
from scalai.store.places import check_job, default_store_dir

FORMS = (".png", ".svg", ".html")
NO_REPORTS = (
    "A job writes a report of each change with --report-dir DIR; without it a running one has its "
    "newest 16"
)


def add_parser(commands: Any) -> None:
    """Add the commands."""
    about = (
        "Print the changes of a job: when, why, from which layout to which, the pause, steps lost, "
        "bytes moved, the proof. JOB is a job's name, or a folder of --report-dir."
    )
    history = commands.add_parser("history", help="print a job's changes", description=about)
    history.add_argument("--json", action="store_true", help="one JSON object, with whole reports")
    history.set_defaults(run=_history)
    about = (
        "Draw losses and layouts of a job over time, and the cost of each change; of several jobs "
        "their devices over time. JOB is a job's name, or a folder of --report-dir."
    )
    plot = commands.add_parser("plot", help="draw a job's changes", description=about)
    plot.add_argument(
        "-o", dest="out", type=Path, required=True, metavar="FILE",
        help="the picture: .png, .svg, or .html with the table below",
    )  # fmt: skip
    source = plot.add_mutually_exclusive_group()
    source.add_argument(
        "--tensorboard", type=Path, metavar="DIR",
        help="losses: event files in this folder and below (default: --tensorboard-dir or "
        "--logging-dir of a running job's script)",
    )  # fmt: skip
    source.add_argument(
        "--losses", type=Path, metavar="PATH",
        help="losses: the folder of SCALAI_LEDGER_DIR, or JSON lines with step, loss and, if known,"
        " at (seconds since 1970)",
    )  # fmt: skip
    plot.add_argument("--tag", help="name of the loss among TensorBoard's scalars")
    plot.set_defaults(run=_plot)
    which = "a job's name, or a folder of its reports"
    history.add_argument("job", metavar="JOB", help=which)
    plot.add_argument("jobs", metavar="JOB", nargs="+", help=which)
    for parser in (history, plot):
        add_way(parser)


def _history(args: argparse.Namespace) -> int:
    history, _ = _read(args)
    if args.json:
        print(json.dumps(to_json(history)))
        return 0
    show(*table(history))
    show(*(f"note: {note}" for note in history.notes), end="\n" if history.notes else "")
    return 0


def to_json(history: History) -> dict[str, Json]:
    """The history as JSON: reports as they are, in order of time."""
    return {
        "name": history.name,
        **totals(history),
        "reports": list(history.reports),
        "failures": [
            {"at": each.at, "event": each.name, "text": each.text} for each in history.incidents
        ],
        "notes": list(history.notes),
    }


def _plot(args: argparse.Namespace) -> int:
    form = args.out.suffix.lower()
    if form not in FORMS:
        raise UsageError(f"-o {args.out}: expected a name that ends in {', '.join(FORMS)}.")
    if not args.out.parent.is_dir():
        raise UsageError(f"-o {args.out}: there is no folder {args.out.parent}.")
    if len(args.jobs) > 1 and (form == ".html" or args.losses or args.tensorboard):
        raise UsageError("several jobs are drawn as .png or .svg, and without losses.")
    found = [_read(argparse.Namespace(**{**vars(args), "job": job})) for job in args.jobs]
    history, tensorboard = found[0]
    losses, note = _losses(args, history, tensorboard) if len(found) == 1 else (None, "")
    try:
        from scalai.launch.commands import history_picture, jobs_picture
    except ModuleNotFoundError as error:
        raise RefusedError(
            f"matplotlib is not installed ({error}), and draws: {PLOT_EXTRA}"
        ) from error
    kind: Literal["png", "svg"] = "png" if form == ".png" else "svg"
    if len(found) > 1:
        drawing = jobs_picture.picture([each for each, _ in found], kind)
    else:
        drawing = history_picture.picture(history, losses, kind)
    if form == ".html":
        drawing = history_picture.page(history, drawing)
    try:
        replace_file(args.out, drawing, is_durable=False)
    except OSError as error:
        raise ScalaiError(f"-o {args.out} cannot be written: {error.strerror}") from error
    notes = [note for each, _ in found for note in each.notes]
    show(*(f"note: {each}" for each in (*notes, note) if each), str(args.out))
    return 0


def _is_of(losses: Losses, history: History) -> bool:
    """Whether losses begin before the last change and end after the first start."""
    first, last = history.resizes[0].at, history.resizes[-1].at
    begin, end = losses.points[0].at, losses.points[-1].at
    return end >= first - 1.0 and (begin <= last or not history.changes)


def _losses(
    args: argparse.Namespace, history: History, found: Path | None
) -> tuple[Losses | None, str]:
    """Losses, and what is to be said of them; ``found``: the job's folder of TensorBoard."""
    if args.losses is not None:
        losses = read_losses(args.losses, history)
    elif args.tensorboard is not None:
        losses = read_tensorboard(args.tensorboard, args.tag)
    elif found is not None:
        try:
            losses = read_tensorboard(found, args.tag)
        except ScalaiError as error:  # nobody has asked for it
            return None, f"without losses: {error}"
    else:
        return None, "without losses; name them by --tensorboard DIR or --losses PATH"
    is_odd = not _is_of(losses, history)
    return losses, (
        "no loss lies in the time of these changes: are they of another job?" if is_odd else ""
    )


def _read(args: argparse.Namespace) -> tuple[History, Path | None]:
    """The history of a job or a folder, and the folder of TensorBoard named by a running job.

    Raises:
        UsageError: There are no reports; with the way to some.
    """
    folder = Path(args.job)
    # A folder that happens to have the name of a job has no reports.
    if folder.is_dir() and ("/" in args.job or any(folder.glob(REPORTS))):
        return _of_folder(folder, str(folder)), None
    if "/" in args.job:
        raise UsageError(f"{folder} is no directory. Name a job, or the folder of its reports.")
    try:
        told = ask(args, ReadReports())
    except PeerError:
        store = args.store_dir or default_store_dir()
        ending = None if args.coordinator else read_ending(store / check_job(args.job))
        if ending is None or ending.report_dir is None or not Path(ending.report_dir).is_dir():
            raise
        history = _of_folder(Path(ending.report_dir), f"Job {args.job}")
        return replace(history, notes=(*history.notes, str(ending))), None
    history = merged(told, f"Job {args.job}")
    if not history.resizes:
        raise UsageError(f"job {args.job!r} has made no step yet. {NO_REPORTS}.")
    return history, tensorboard_of(told["script_args"], Path(told["directory"]))


def _of_folder(folder: Path, name: str) -> History:
    history = read_folder(folder, name)
    if not history.resizes:
        left_out = "; ".join(history.notes)
        raise UsageError(
            f"{folder} has no reports (resize-*.json){f'; {left_out}' if left_out else ''}. "
            f"{NO_REPORTS}: scalai history JOB."
        )
    return history
