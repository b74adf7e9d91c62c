"""Live jobs under ``scalai autoscale``, beside the simulator's prediction.

Three jobs (two on megatron-core, one on DeepSpeed) share four devices; one device is lost and comes
back, and a fourth job arrives (``tests/support/autoscaled.py``). A pass of a sample costs a device
0.04 s more, so that a step is faster on two devices though they are processes of one CPU. Three
repetitions; each is predicted from the steps and pauses measured in the other two.

* ``decisions``: sizes that each repetition's decisions led to, in order;
* ``pause_s``: standstill of each change;
* ``prediction_error``: by repetition, the largest |predicted - live| / live of the steps that a
  job has made at the end, over the jobs; ``prediction_mean_error``: their mean;
* ``bound``: 0.15, or twice the spread of the three repetitions where that is more; ``spread``: the
  largest of the jobs' (greatest - least) / mean steps, at one time of the repetition;
* ``same_sizes``: whether the simulator gives every job the same sizes in the same order.

``--picture FILE`` draws the devices by job over time, of the first repetition.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, median

from report import Report

from scalai.core.cluster.application import Application, Asked, Curve, Epoch, Limits, Placement
from scalai.core.cluster.policies import POLICIES
from scalai.core.cluster.simulator import Resources, Rules, Sight, Submission, simulate
from scalai.core.cluster.steady import steady
from scalai.launch.commands.autoscale_view import measured, pause_of
from scalai.launch.commands.job_history import History, read_folder
from scalai.store.atomic import replace_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.autoscaled import CONFIGURATION, Shared, through_all

BATCH = int(str(CONFIGURATION["train_batch_size"]))
"""Samples of a step of each job."""


@dataclass(frozen=True)
class Live:
    """One repetition, in seconds since the autoscaler began.

    Attributes:
        took_s: By job, from its file, or the begin, to the end.
        steps: By job, made in this time.
        start_s: By job, from its file to its first step.
    """

    histories: Mapping[str, History]
    devices: Sequence[tuple[float, int]]
    at_s: Mapping[str, float]
    took_s: Mapping[str, float]
    steps: Mapping[str, int]
    start_s: Mapping[str, float]

    def sizes(self, name: str) -> list[int]:
        return [size for size, _ in groupby(each.ranks for each in self.histories[name].resizes)]


def run(folder: Path, stay: int) -> tuple[Live, Shared]:
    """Lead the jobs through the events once."""
    shared = Shared(folder)
    try:
        through_all(shared, stay)
        end = time.time()
        made = {name: shared.steps(name) for name in shared.jobs}
    finally:
        shared.close()
    begin = shared.told()[0]["at"]
    histories = {n: read_folder(folder / n / "reports", n) for n in shared.jobs}
    at = {name: max(0.0, shared.begun[name] - begin) for name in shared.jobs}
    before = {n: _steps_at(folder / n / "metrics" / "loss.jsonl", begin) for n in shared.jobs}
    starts = {n: h.resizes[0].at - shared.begun[n] for n, h in histories.items()}
    histories = {
        name: History(name, each.resizes, until=(end, made[name]))
        for name, each in histories.items()
    }
    live = Live(
        histories, [(max(0.0, t - begin), count) for t, count in shared.devices], at,
        {name: end - begin - at[name] for name in shared.jobs},
        {name: made[name] - before[name] for name in shared.jobs}, starts,
    )  # fmt: skip
    return live, shared


def _steps_at(path: Path, at: float) -> int:
    return sum(json.loads(line)["at"] <= at for line in path.read_text().splitlines())


@dataclass(frozen=True)
class Predicted:
    """Steps by job at the end, and its sizes."""

    steps: Mapping[str, float]
    sizes: Mapping[str, Sequence[int]]


def predict(live: Live, others: Sequence[Live]) -> Predicted:
    """Predict a repetition from what the others measured."""
    kinds, pauses, jobs = {}, {}, []
    seconds: dict[str, dict[int, float]] = {}
    for name in live.steps:
        tables = [measured(other.histories[name]) for other in others]
        sizes = sorted({devices for table in tables for _, devices in table})
        seconds[name] = {n: median([t[1, n] for t in tables if (1, n) in t]) for n in sizes}
        placed: dict[Placement, Curve] = {
            (n,): tuple((BATCH // n + more, s, 0.0) for more in (0, 1))
            for n, s in seconds[name].items()
        }
        most, long = max(sizes), 100.0 * live.steps[name]  # no job ends
        kinds[name] = Application(
            name, Limits((1, most), (BATCH, BATCH), (1, BATCH)), (long,),
            {BATCH: (Epoch(long, 1.0, 0.0),)}, placed,
            {(1, where[0]): curve for where, curve in placed.items()},
        )  # fmt: skip
        is_there = live.at_s[name] == 0.0
        cost = [pause_of(o.histories[name]) if is_there else o.start_s[name] for o in others]
        pauses[name] = median(cost)
        jobs.append(Submission(name, live.at_s[name], name, Asked(most, BATCH)))
    rules = Rules(1, live.devices[0][1], every_s=60, look_s=2, pauses=pauses, most_s=86400.0)
    resources = [Resources(at, 1, count) for at, count in live.devices]
    policy, sight = steady(POLICIES["goodput"]), Sight(is_batch_free=False)
    outcome = simulate(jobs, kinds, policy, rules, sight, resources=resources)
    end = max(live.at_s[name] + took for name, took in live.took_s.items())
    steps, found = dict.fromkeys(live.steps, 0.0), dict[str, list[int]]()
    for name in steps:
        spans = [each for each in outcome.spans if each.name == name and each.from_s < end]
        for span, until in zip(spans, [*(s.from_s for s in spans[1:]), end], strict=True):
            # The first start of a job that trained before was no start.
            halt = 0.0 if live.at_s[name] == 0.0 and span is spans[0] else pauses[name]
            if span.devices:
                trained_s = max(0.0, until - span.from_s - halt)
                steps[name] += trained_s / seconds[name][span.devices]
        found[name] = [span.devices for span in spans]
    return Predicted(steps, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stay", type=int, default=40, help="steps between two events")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--picture", type=Path, metavar="FILE", help=".svg or .png")
    options = parser.parse_args()
    report, runs = Report("autoscale"), list[Live]()
    for number in range(options.repetitions):
        with tempfile.TemporaryDirectory(prefix="autoscale-") as folder:
            live, shared = run(Path(folder), options.stay)
        runs.append(live)
        report.say(f"repetition {number}: " + "; ".join(
            f"{name} {live.sizes(name)} {live.steps[name]} steps in {took:.0f} s"
            for name, took in live.took_s.items()
        ))  # fmt: skip
        if options.picture is not None and not number:
            draw(options.picture, live, shared)
    report.add("decisions", [{n: live.sizes(n) for n in live.steps} for live in runs])
    report.add("pause_s", [
        {n: [round(r.paused_s or 0.0, 2) for r in h.changes] for n, h in live.histories.items()}
        for live in runs
    ])  # fmt: skip
    worst, means, same = [], [], []
    for live in runs:
        said = predict(live, [other for other in runs if other is not live] or runs)
        errors = {n: abs(said.steps[n] / made - 1) for n, made in live.steps.items()}
        report.say(f"errors {errors}, sizes {said.sizes}")
        worst.append(round(max(errors.values()), 4))
        means.append(round(fmean(errors.values()), 4))
        same.append(all(list(said.sizes[n]) == live.sizes(n) for n in live.steps))
    pace = {n: [live.steps[n] / live.took_s[n] for live in runs] for n in runs[0].steps}
    spread = max((max(each) - min(each)) / fmean(each) for each in pace.values())
    report.add("prediction_error", worst)
    report.add("prediction_mean_error", means)
    report.add("spread", spread)
    report.add("bound", max(0.15, 2 * spread))
    report.add("same_sizes", same)
    report.finish()


def draw(path: Path, live: Live, shared: Shared) -> None:
    from scalai.launch.commands.jobs_picture import picture

    form = "png" if path.suffix == ".png" else "svg"
    drawing = picture(list(live.histories.values()), form, devices=shared.devices)  # type: ignore[arg-type]
    replace_file(path, drawing, is_durable=False)


if __name__ == "__main__":
    main()
