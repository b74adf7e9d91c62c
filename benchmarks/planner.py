"""How well the planner's model agrees with published measurements: ``--rows ROWS.csv``.

The table has a line a measured step, with the columns that docs/degrees.md lists; it is not part of
the project. Nothing is predicted by a calibration that has seen it:

* ``fit_error_mean``, ``fit_error_max``, ``interval_coverage``, ``interval_half_width``: rows of a
  source, model and number of devices are left out together (a fold), and predicted by a calibration
  of the rest;
* ``regret_mean``, ``regret_max``, ``rank_correlation_min``: groups of five rows or more with the same
  source, device, model, sequence, batch and number of devices are left out one by one;
* ``transfer_error_mean``: every source is predicted by the table of devices alone, no entry of which
  was fitted to any of them; ``transfer_coverage``, ``transfer_half_width``: its intervals.

Folds are the same each time: there is no chance in them, and none in the fit.
"""

import argparse
import csv
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from statistics import fmean

from report import Report, timed

from scalai.core.planner.rows import Row, read_rows
from scalai.core.planner.score import CHOICE, Scored, figures, group_figures, predict_rows


def held_out(rows: Sequence[Row], key: Callable[[Row], Hashable]) -> list[Scored]:
    """Predict each row from all rows with another key."""
    found: dict[int, Scored] = {}
    for fold in dict.fromkeys(key(row) for row in rows):
        mine = [number for number, row in enumerate(rows) if key(row) == fold]
        others = [row for row in rows if key(row) != fold]
        scored = predict_rows([rows[number] for number in mine], others)
        found |= dict(zip(mine, scored, strict=True))
    return [found[number] for number in range(len(rows))]


def score(report: Report, rows: Sequence[Row]) -> None:
    """Add the figures of measured rows."""
    for row in rows:
        if row.refused:
            report.say(f"counts as an error: {row.refused}")
    folds = held_out(rows, lambda row: (row.source, row.model, row.gpus))
    whole = figures(folds)
    errors = [one.error for one in folds]
    report.add("rows", len(rows))
    report.add("rows_refused", whole["rows_refused"])
    report.add("fit_error_mean", fmean(errors))
    report.add("fit_error_max", max(errors))
    for name in ("interval_coverage", "interval_half_width"):
        report.add(name, whole[name])
    left_out = held_out(rows, lambda row: row.group)
    choices = figures(left_out)
    for name in ("regret_mean", "regret_max", "rank_correlation_min"):
        report.add(name, choices[name])
    for one in group_figures(left_out):
        if int(str(one["rows"])) >= CHOICE:
            named = ", ".join(f"{name} {one[name]}" for name in ("source", "model", "gpus", "rows"))
            shown = ("regret_mean", "rank_correlation_min")
            report.say(named + "".join(f", {name} {one[name]:.3f}" for name in shown))
    transfer = predict_rows(rows)
    alone = figures(transfer)
    report.add("transfer_error_mean", alone["transfer_error_mean"])
    report.add("transfer_coverage", alone["interval_coverage"])
    report.add("transfer_half_width", alone["interval_half_width"])
    for source in dict.fromkeys(row.cluster for row in rows):
        mine = [n for n, row in enumerate(rows) if row.cluster == source]
        report.say(
            f"{' on '.join(source)}: {len(mine)} rows, held out "
            f"{fmean(folds[n].error for n in mine):.3f}, from the table alone "
            f"{fmean(transfer[n].error for n in mine):.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, metavar="ROWS.csv", help="measured steps")
    arguments = parser.parse_args()
    report = Report("planner")
    if arguments.rows is None:
        report.say("no --rows ROWS.csv: agreement with measurements is not scored")
    else:
        with arguments.rows.open(newline="") as file:
            rows = read_rows(list(csv.DictReader(file)))
        seconds, _ = timed(lambda: score(report, rows))
        report.add("score_s", seconds, "s")
    report.finish()


if __name__ == "__main__":
    main()
