"""Losses of a job's steps: from TensorBoard's event files, the folder of ``SCALAI_LEDGER_DIR``, or
JSON lines."""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from scalai.core.dataset.step_lines import losses_in_order, read_lines
from scalai.core.errors import RefusedError, UsageError
from scalai.core.jsonable import Json
from scalai.launch.commands.job_history import History, Losses, Point, timed

KNOWN = ("lm loss", "train/loss", "Train/Samples/train_loss", "Train/loss", "loss")
"""Names of a training loss, of Megatron-LM, Trainer, DeepSpeed and loops of one's own."""
PLOT_EXTRA = "pip install 'scalai[plot]'"
_LINES = "rank-*.jsonl"


def read_tensorboard(folder: Path, tag: str | None) -> Losses:
    """Read all event files in a folder and below.

    Raises:
        UsageError: There are none, or it is not clear which scalar is the loss.
        RefusedError: TensorBoard is not installed.
    """
    if not folder.is_dir():
        raise UsageError(f"--tensorboard {folder} is no directory.")
    folders = sorted({Path(at) for at, _, names in os.walk(folder) if any(map(_is_events, names))})
    if not folders:
        raise UsageError(f"--tensorboard {folder} has no event files (events.out.tfevents.*).")
    try:
        from tensorboard.backend.event_processing import event_accumulator as events
    except ModuleNotFoundError as error:
        raise RefusedError(
            f"tensorboard is not installed ({error}), and reads event files: {PLOT_EXTRA}"
        ) from error
    # Steps that were lost stay; of what is no scalar nothing is kept.
    sizes = {kind: 0 if kind == events.SCALARS else 1 for kind in events.DEFAULT_SIZE_GUIDANCE}
    found = dict[str, list[Point]]()
    for each in folders:
        scalars = events.EventAccumulator(str(each), size_guidance=sizes, purge_orphaned_data=False)
        scalars.Reload()
        for name in scalars.Tags()[events.SCALARS]:
            found.setdefault(name, []).extend(
                Point(event.wall_time, event.step, event.value) for event in scalars.Scalars(name)
            )
    name = _chosen(found, tag, folder)
    # DeepSpeed counts samples.
    points = sorted(found[name], key=lambda point: point.at)
    return Losses(name, tuple(points), has_steps="samples" not in name.lower())


def _is_events(name: str) -> bool:
    return "tfevents" in name


def _chosen(found: dict[str, list[Point]], tag: str | None, folder: Path) -> str:
    if tag is not None and tag not in found:
        raise UsageError(f"--tag {tag!r} is no scalar in {folder}. There are: {_listed(found)}.")
    named = [name for name in (tag, *KNOWN) if name in found]
    named += [name for name in found if "loss" in name.lower()] if not named else []
    if not named or (named[0] not in (tag, *KNOWN) and len(named) > 1):
        raise UsageError(
            f"it is not clear which scalar in {folder} is the loss: name it by --tag. "
            f"There are: {_listed(found)}."
        )
    name = named[0]
    assert name is not None
    return name


def _listed(found: dict[str, list[Point]]) -> str:
    names = sorted(found, key=lambda name: ("loss" not in name.lower(), name))
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return (", ".join(map(repr, names[:20])) or "none") + more


def read_losses(path: Path, history: History) -> Losses:
    """Read the folder of ``SCALAI_LEDGER_DIR``, or a file of JSON lines with step and loss.

    Raises:
        UsageError: There are no losses.
        StoreError: A line of a ledger is damaged.
    """
    if path.is_dir():
        return _read_ledger(path, history)
    points, given, unread = list[Point](), list[tuple[int, float]](), 0
    with path.open("rb") as file:
        for line in file:
            try:
                entry: Json = json.loads(line)
                step, loss = int(entry["step"]), float(entry["loss"])
            except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
                unread += 1
                continue
            given.append((step, loss))
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if math.isfinite(at := float(entry["at"])):
                    points.append(Point(at, step, loss))
    if not given:
        raise UsageError(
            f"--losses {path} has no losses: {unread} lines, none of them JSON with step and loss. "
            "Name such a file, or the folder of SCALAI_LEDGER_DIR."
        )
    if len(points) == len(given):
        return Losses("loss", tuple(sorted(points, key=lambda point: point.at)))
    return timed(given, history, "loss", path.stat().st_mtime)


def _read_ledger(folder: Path, history: History) -> Losses:
    paths = sorted(folder.glob(_LINES), key=lambda each: (len(each.name), each.name))
    given = losses_in_order([read_lines(each.read_text(), str(each))[0] for each in paths])
    if not given:
        raise UsageError(
            f"--losses {folder}: {len(paths)} files {_LINES}, none of them with a loss. Name the "
            "folder of SCALAI_LEDGER_DIR, or a file of JSON lines with step and loss."
        )
    return timed(given, history, "lm loss", max(each.stat().st_mtime for each in paths))


def tensorboard_of(arguments: Sequence[str], folder: Path) -> Path | None:
    """Folder of a script's flag, if it is here; ``folder``: where the script runs."""
    for place, word in enumerate(arguments):
        flag, _, value = word.partition("=")
        if flag.replace("_", "-") in ("--tensorboard-dir", "--logging-dir"):
            value = value or next(iter(arguments[place + 1 : place + 2]), "")
            found = folder / value
            return found if value and any(_events_below(found)) else None
    return None


def _events_below(folder: Path) -> Iterator[str]:
    return (name for _, _, names in os.walk(folder) for name in names if _is_events(name))
