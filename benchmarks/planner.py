"""How well the planner's model agrees with published measurements, and how fast it searches:
``make bench NAME=planner ROWS=ROWS.csv``.

The table has a line a measured step, with the columns that docs/degrees.md lists; it is not part of
the project. Nothing is predicted by a calibration that has seen it:

* ``fit_error_mean``, ``fit_error_max``, ``interval_coverage``, ``interval_half_width``: rows of a
  source, model and number of devices are left out together (a fold), and predicted by a
  calibration of the rest;
* ``regret_mean``, ``regret_max``, ``rank_correlation_min``: groups of five rows or more with the
  same source, device, model, sequence, batch and number of devices are left out one by one;
* ``transfer_error_mean``: every source is predicted by the table of devices alone, no entry of
  which was fitted to any of them; ``transfer_coverage``, ``transfer_half_width``: its intervals;
* ``search_s_512``, ``search_s_16384``: how long the search takes for a GPT-3 175B on 512 H100, and
  for a model of a trillion parameters on 16,384;
* ``placement_ratio``: bytes that cross between hosts in ten changes of a GPT-3 175B, with hosts
  where the fewest do, over those with hosts in the order of joining;
* ``published_error_mean``, ``published_error_max`` (``--reconfigurations TABLE.csv``): the model's
  seconds of reconfigurations against published ones; ``published_held_out_error_mean``: of rows
  that were left out.

Folds are the same each time: there is no chance in them, and none in the fit.
"""

import argparse
import csv
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from planner_changes import gpt, placement, published
from report import Report, median_s, timed

from scalai.core.planner.columns import Workload
from scalai.core.planner.devices import device_named
from scalai.core.planner.score import (
    CHOICE,
    Row,
    Scored,
    figures,
    group_figures,
    limits_of,
    predict_rows,
    read_rows,
)
from scalai.core.planner.search import search


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


def search_times(report: Report) -> None:
    """Add how long searches take."""
    device = device_named("h100")
    small = Workload(gpt(96, 12_288, 96, 2_048), 1_536)
    large = Workload(gpt(128, 25_600, 160, 2_048), 12_288)
    for work, devices in ((small, 512), (large, 16_384)):
        plan = search(work, device, devices, limits_of(work))
        seconds = median_s(partial(search, work, device, devices, limits_of(work)))
        report.say(f"{devices} devices: {plan.best.layout}, of {plan.valid} valid layouts")
        report.add(f"search_s_{devices}", seconds, "s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, metavar="ROWS.csv", help="measured steps")
    parser.add_argument("--reconfigurations", type=Path, metavar="TABLE.csv",
                        help="published seconds of reconfigurations")  # fmt: skip
    arguments = parser.parse_args()
    report = Report("planner")
    search_times(report)
    placement(report)
    if arguments.reconfigurations is not None:
        published(report, arguments.reconfigurations)
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
