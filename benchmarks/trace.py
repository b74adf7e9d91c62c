"""How well the replay of a trace agrees with a job that goes through it:
``make bench NAME=trace``.

A small GPT on megatron-core trains on one host while its devices come and go, a few minutes each.
In the same run, before the trace, the job is measured: seconds a step at each of its layouts, and
what a change between two of them takes. With these alone ``planner/trace_replay.py`` says which
layouts the job runs when, and how many steps it makes; then the job is taken through the trace, and
its steps are counted.

* ``trace_error``: |simulated - measured steps| / measured, median of the runs; ``trace_errors``;
* ``simulated_steps``, ``measured_steps``, ``changes``: of each run;
* ``step_s``: by layout, ``change_s``: by pair of them, as measured before the trace: seconds that a
  change takes from the steps, which go on while the next workers are built;
* ``phases_s``: median seconds by phase of the launcher's reports of the trace's changes.

A run takes the seconds of the trace and four minutes before it; three runs of 600 s, the default,
42 minutes. The machine has to be quiet: what else runs counts as an error. All of it is tried by
``--seconds 90 --runs 1``.
"""

import argparse
import shutil
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

from report import Report
from resize import MEMORY_DISK, Gpt
from trace_run import Calibrated, Run, run_trace

from scalai.core.planner.columns import Layout
from scalai.core.planner.trace import Trace, TraceEvent
from scalai.core.planner.trace_replay import (
    Account,
    Menu,
    Policy,
    Terms,
    TracePiece,
    account,
    by_table,
    replay,
)

JOB = Gpt(hidden=256, layers=4, steps=12, seq_length=128, global_batch=8)
PATTERNS = (
    ((0.0, 2), (0.22, 1), (0.4, 2), (0.55, 1), (0.8, 2)),
    ((0.0, 1), (0.15, 2), (0.45, 1), (0.6, 2), (0.75, 1), (0.9, 2)),
    ((0.0, 2), (0.3, 1), (0.5, 2), (0.7, 1), (0.85, 2)),
)
"""Of each run: from which part of the trace on there are how many devices."""
LEAST_CHANGES = 4


def trace_of(number: int, seconds: float) -> Trace:
    """Return the trace of a run."""
    pattern = PATTERNS[number % len(PATTERNS)]
    return Trace(tuple(TraceEvent(at * seconds, gpus) for at, gpus in pattern), seconds)


def simulated(trace: Trace, found: Calibrated) -> tuple[tuple[TracePiece, ...], Account]:
    """Return what the job makes of a trace, by what was measured before it, at the fastest layout
    of all devices that are there: it changes with each event, whatever that gains."""
    menu = Menu(found.step_s)
    sizes = {one.degrees.world_size: menu.only(partial(has_size, one)) for one in found.step_s}
    table = {size: of.on(size)[0] for size, of in sizes.items()}
    policy = Policy("table", by_table(table), found.cost, kept_every_s=0.0)
    pieces = replay(trace, policy, table[trace.events[0].gpus], Terms())
    return pieces, account(pieces, menu)


def has_size(one: Layout, other: Layout) -> bool:
    return one.degrees.world_size == other.degrees.world_size


def add(report: Report, runs: list[Run]) -> None:
    """Add the figures of all runs."""
    errors = [abs(run.simulated_steps / run.measured_steps - 1) for run in runs]
    report.add("trace_error", median(errors))
    report.add("trace_errors", [round(error, 4) for error in errors])
    report.add("simulated_steps", [round(run.simulated_steps, 1) for run in runs])
    report.add("measured_steps", [round(run.measured_steps, 1) for run in runs])
    report.add("changes", [len(run.reports) for run in runs])
    report.add("step_s", [run.calibrated.steps_shown() for run in runs])
    report.add("change_s", [run.calibrated.changes_shown() for run in runs])
    phases = [one["seconds"] for run in runs for one in run.reports]
    report.add("phases_s", {name: round(median(p[name] for p in phases), 3) for name in phases[0]})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="of the trace")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--calibration", type=float, default=12.0, metavar="SECONDS",
                        help="in which a layout is measured, each time")  # fmt: skip
    options = parser.parse_args()
    report = Report("trace")
    report.add("trace_s", options.seconds, "s")
    runs = []
    for number in range(options.runs):
        folder = Path(tempfile.mkdtemp(prefix="scalai-benchmark-", dir=MEMORY_DISK))
        try:
            trace = trace_of(number, options.seconds)
            runs.append(run_trace(folder, JOB, trace, simulated, options.calibration, report.say))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if len(runs[-1].reports) < LEAST_CHANGES:
            raise SystemExit(f"{len(runs[-1].reports)} changes were made, not {LEAST_CHANGES}")
    add(report, runs)
    report.finish()


if __name__ == "__main__":
    main()
