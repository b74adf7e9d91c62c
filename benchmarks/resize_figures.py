"""The figures that ``resize.py`` and ``resize_deepspeed.py`` have in common."""

import argparse
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from report import Report
from resize_memory import WorkersMemory
from resize_runs import Change, Job, Layout, Run, elastic_job, run_by_scalai

from scalai.core.host.standby import POLICIES as STANDBY
from scalai.core.job.function_proof import POLICIES

LOSS_TOLERANCE = 1e-4


def read_options(description: str | None, only: Sequence[str]) -> argparse.Namespace:
    """Return what the command line asks for; ``only`` are the groups of figures that there are."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a small model: only to try it")
    parser.add_argument("--changes", type=int, default=5, help="there, back, there, ...")
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--standby", default="auto", choices=STANDBY)
    parser.add_argument("--prove", default="never", choices=POLICIES)
    parser.add_argument("--only", choices=only)
    return parser.parse_args()


class DeviceMemory:
    """Adds the most memory of the first CUDA device that was used in a block; without one it adds
    nothing."""

    def __init__(self, report: Report, name: str) -> None:
        self._report, self._name = report, name
        self._watch: subprocess.Popen[str] | None = None

    def __enter__(self) -> None:
        if torch.cuda.is_available():
            command = "nvidia-smi --id=0 --query-gpu=memory.used --format=csv,noheader,nounits"
            self._watch = subprocess.Popen(
                [*command.split(), "--loop-ms=100"], stdout=subprocess.PIPE, text=True
            )

    def __exit__(self, *raised: object) -> None:
        if self._watch is not None:
            self._watch.terminate()
            used_mib, _ = self._watch.communicate()
            if said := used_mib.split():
                peak_gb = max(map(int, said)) * 2**20 / 1e9
                self._report.add(f"{self._name}_peak_device_gb", peak_gb, "GB")


def medians(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each entry."""
    return {name: round(median(table[name] for table in tables), 4) for name in tables[0]}


def there(changes: Sequence[Change]) -> list[Change]:
    """Return the changes that do not go back."""
    return list(changes[::2])


def median_downtime_s(changes: Sequence[Change]) -> float:
    return median(change.downtime_s for change in there(changes))


def run_up_to_brink(
    report: Report, folder: Path, job: Job, stages: Sequence[str], changes: int
) -> Run:
    """Run a job whose next workers have no memory for a model before the old ones are gone; add its
    figures. ``stages``: what a worker notes on its way to the brink."""
    timed, watched = folder / "one-model", folder / "watched"
    timed.mkdir()
    with DeviceMemory(report, "one_model"):
        run = run_by_scalai(timed, job, changes, report.say)
    forth = there(run.changes)
    report.add("one_model_downtime_s", median_downtime_s(run.changes), "s")
    report.add("one_model_s", medians([change.report["seconds"] for change in forth]))
    taken = medians([change.stages for change in forth])
    report.add("brink_s", {name: taken[name] for name in stages})
    report.add("one_model_worker_s", taken)
    report.add("one_model_worker_cpu_s", medians([change.cpu for change in forth]))
    watched.mkdir()
    with WorkersMemory(watched / "ours") as memory:
        run_by_scalai(watched, job, 2, report.say)
    report.add("round_gb", [round(size / 1e9, 3) for _, size in sorted(memory.rounds.items())])
    report.add("peak_gb", memory.peak / 1e9, "GB")
    if memory.whole != memory.peak:
        report.add("peak_with_copies_gb", memory.whole / 1e9, "GB")
    report.add("peak_ratio", memory.ratio)
    return run


def add_one_model(report: Report, brink: Run, stock: Run) -> None:
    """Add the ratio of the changes by checkpoint to those by the brink, which train the same."""
    check_losses(report, brink, stock, "loss_difference_one_model")
    ratio = median_downtime_s(stock.changes) / median_downtime_s(brink.changes)
    report.add("downtime_ratio_one_model", ratio)


def add_ours(report: Report, changes: Sequence[Change]) -> None:
    """Add the figures of our changes."""
    forth = there(changes)
    downtime = median(change.downtime_s for change in forth)
    report.add("downtime_s", downtime, "s")
    report.add("downtimes_s", [round(change.downtime_s, 3) for change in changes])
    report.add("slowed_s", median(change.slowed_s for change in forth), "s")
    report.add("step_s", median(change.step_s for change in forth), "s")
    report.add("prove_s", [change.report.get("prove_s") for change in changes])
    report.add("ours_s", medians([change.report["seconds"] for change in forth]))
    report.add("ours_worker_s", medians([change.stages for change in forth]))
    report.add("ours_worker_cpu_s", medians([change.cpu for change in forth]))


def add_stock(report: Report, changes: Sequence[Change], ours: Sequence[Change]) -> None:
    """Add the figures of the changes by checkpoint, and the ratios to ours."""
    forth = there(changes)
    downtime = median(change.downtime_s for change in forth)
    report.add("stock_downtime_s", downtime, "s")
    report.add("stock_downtimes_s", [round(change.downtime_s, 3) for change in changes])
    report.add("stock_s", medians([change.stages for change in forth]))
    report.add("stock_cpu_s", medians([change.cpu for change in forth]))
    lost = median(change.downtime_s + max(0.0, change.slowed_s) for change in there(ours))
    report.add("lost_ratio", downtime / lost)
    report.add("downtime_ratio", downtime / median(change.downtime_s for change in there(ours)))


def add_overhead(report: Report, folder: Path, job: Job, layout: Layout, pairs: int) -> None:
    """Add the cost of the boundary, with the 95 % interval of its median by bootstrap."""
    marks = folder / "overhead"
    marks.mkdir()
    flags = ["--marks", str(marks), "--pairs", str(pairs)]
    with elastic_job(folder, job, "overhead-benchmark", [layout], flags, marks):
        pass
    lines = [json.loads(line) for line in (marks / "round-0-0.jsonl").open()]
    on, off = ([line[key] for line in lines if line["event"] == "pair"] for key in ("on", "off"))
    ratios = np.array(on) / np.array(off)
    chosen = np.random.default_rng(0).integers(0, len(ratios), (4000, len(ratios)))
    interval = np.quantile(np.median(ratios[chosen], axis=1), (0.025, 0.975))
    report.add("overhead_pairs", len(ratios))
    report.add("overhead_step_ms", 1e3 * float(np.median(off)), "ms")
    report.add("overhead_interval", [round(float(value), 5) for value in interval])
    report.add("overhead_ratio", round(float(np.median(ratios)), 5))


def check_losses(report: Report, ours: Run, stock: Run, name: str = "loss_difference") -> None:
    """End if the two ways did not train the same: then the comparison would mean nothing."""
    common = sorted(ours.losses.keys() & stock.losses.keys())
    worst = max(abs(ours.losses[s] - stock.losses[s]) / stock.losses[s] for s in common)
    report.add(name, worst, f"relative, at most, of {len(common)} steps")
    if not worst < LOSS_TOLERANCE:
        raise SystemExit(f"losses differ by {worst}: ours {ours.losses}, stock {stock.losses}")
