"""How long a job takes until it is where it was, after a host has died with its memory.

A GPT on megatron-core (fp32, distributed optimizer) trains with PP2 DP2 on three hosts of this
machine (``recovery_hosts.py``), four ranks, and goes on with PP3 DP1 on the two that are left.
Every 10 steps there is a state that outlives a host: for Scalai a snapshot in memory, with
replicas; for torchrun (3 nodes or 2, ``--max-restarts``) a torch_dist checkpoint on a memory disk
that all hosts reach. A host is killed 5 steps behind the last of these; on both sides the survivors
and their degrees are the same. Figures:

* ``recovery_ratio``: from the kill until the last step that had been made is passed, with torchrun
  over with Scalai, medians; connections are reset. ``blackhole_ratio``: the wire is pulled out
  first.
* ``recovery_s``, ``stock_s``: that time; ``..._parts_s``: what the workers note on the way.
* ``steps_lost``: steps that were made once more.
* ``snapshot_overhead_ratio``: 10 steps with a snapshot and its replicas, over 10 without, in turn,
  with the 95 % interval of the median by bootstrap; ``stall_s``: for how long a snapshot keeps the
  training from going on; ``cpu_s_gb``: its processor time, of all processes, by GB of state.
* ``coordinator_loss_s``: from the death of the coordinator's process until the job takes a
  ``scale`` again from another one, and the steps that were lost by it; ``coordinator_host_loss_s``:
  the same where its host dies, which has no workers, and the next one needs the lease.
* ``notice_s``: from a notice of 30 s until the host that is to be taken away has ended by itself,
  what it held is elsewhere (15 s are the aim), and until the others have made a step without it.

Detection: both sides' settings are printed. torchrun's collectives give up after ``--timeout-s``
(torch's default is half an hour); its rendezvous and Scalai have their defaults.
"""

import argparse
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from recovery_coordinator import figures
from recovery_hosts import Hosts
from recovery_notice import figures as notice_figures
from recovery_runs import (
    NAMES,
    Recovery,
    ScalaiSide,
    Size,
    TorchrunSide,
    recover,
    run_blocks,
)
from report import Report

KINDS = ("reset", "blackhole", "overhead", "coordinator", "notice")
MEMORY_DISK = "/dev/shm"
FULL = Size(hidden=768, layers=12)
SMALL = Size(hidden=256, layers=6)
LONG_STEPS = 12
"""Samples of a step where snapshots are weighed against steps: one takes a second at least."""
LOSS_TOLERANCE = 1e-4


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a small model: only to try it")
    parser.add_argument("--runs", type=int, default=5, help="deaths of each kind, on each side")
    parser.add_argument("--pairs", type=int, default=30, help="of blocks of steps")
    parser.add_argument("--timeout-s", type=float, default=30.0, help="of torchrun's collectives")
    parser.add_argument("--only", choices=KINDS)
    return parser.parse_args()


def add_recovery(report: Report, kind: str, ours: list[Recovery], stock: list[Recovery]) -> None:
    """Add the figures of one kind of death."""
    for name, found in (("recovery", ours), ("stock", stock)):
        report.add(f"{name}_s_{kind}", round(median(each.total_s for each in found), 2), "s")
        report.add(f"{name}_each_s_{kind}", [round(each.total_s, 2) for each in found])
        parts = found[0].parts
        report.add(
            f"{name}_parts_s_{kind}",
            {part: round(median(each.parts[part] for each in found), 2) for part in parts},
        )
        report.add(f"{name}_steps_lost_{kind}", [each.steps_lost for each in found])
    common = sorted(set.intersection(*(set(each.losses) for each in (*ours, *stock))))
    worst = max(
        abs(each.losses[step] - stock[0].losses[step]) / stock[0].losses[step]
        for each in (*ours, *stock)
        for step in common
    )
    report.add(f"loss_difference_{kind}", worst, f"relative, at most, of {len(common)} steps")
    if not worst < LOSS_TOLERANCE:
        raise SystemExit(f"losses differ by {worst}: the two sides did not train the same")
    ratio = median(e.total_s for e in stock) / median(e.total_s for e in ours)
    report.add("recovery_ratio" if kind == "reset" else f"{kind}_ratio", ratio)


def add_overhead(report: Report, folder: Path, size: Size, pairs: int) -> None:
    """Add what snapshots and their replicas cost while nothing fails."""
    found = run_blocks(folder, size, pairs, report.say)
    ratios = np.array([one.with_s / one.without_s for one in found])
    chosen = np.random.default_rng(0).integers(0, len(ratios), (4000, len(ratios)))
    interval = np.quantile(np.median(ratios[chosen], axis=1), (0.025, 0.975))
    step_s = median(one.without_s for one in found) / 10
    report.add("overhead_pairs", len(ratios))
    report.add("overhead_step_s", step_s, "s")
    report.add("overhead_interval", [round(float(value), 4) for value in interval])
    report.add("snapshot_overhead_ratio", float(np.median(ratios)))
    stall_s = median(one.stall_s for one in found)
    report.add("stall_s", stall_s, "s")
    report.add("stall_of_step", stall_s / step_s)
    cpu_s = median(one.with_cpu_s - one.without_cpu_s for one in found)
    report.add("cpu_s_gb", cpu_s / (size.state_bytes / 1e9), "s/GB")


def main() -> None:
    options = read_options()
    report = Report("recovery")
    size = SMALL if options.small else FULL
    report.add("state_gb", size.state_bytes / 1e9, "GB")
    sides = ScalaiSide(size), TorchrunSide(size, options.timeout_s)
    for side in sides:
        report.add(f"settings_{side.name}", side.settings)
    folder = Path(tempfile.mkdtemp(prefix="scalai-benchmark-", dir=MEMORY_DISK))
    try:
        for kind in ("reset", "blackhole"):
            if options.only not in (None, kind):
                continue
            found: dict[str, list[Recovery]] = {side.name: [] for side in sides}
            for number in range(options.runs):
                for side in sides:
                    home = folder / f"{kind}-{number}-{side.name}"
                    home.mkdir()
                    with Hosts(NAMES, home) as hosts:
                        one = recover(hosts, side, home, is_cut=kind == "blackhole")
                    shutil.rmtree(home)
                    found[side.name].append(one)
                    report.say(f"{kind} {side.name}: {one.total_s:.2f} s {one.parts}")
            add_recovery(report, kind, found["scalai"], found["torchrun"])
        if options.only in (None, "overhead"):
            longer = replace(size, global_batch=LONG_STEPS)
            add_overhead(report, folder, longer, options.pairs)
        if options.only in (None, "coordinator"):
            for name, losses in figures(size, folder, options.runs).items():
                kind = "coordinator_loss" if name == "process" else f"coordinator_{name}_loss"
                report.add(f"{kind}_s", round(median(one.seconds for one in losses), 2), "s")
                report.add(f"{kind}_each_s", [round(one.seconds, 2) for one in losses])
                report.add(f"{kind}_steps_lost", [one.steps_lost for one in losses])
        if options.only in (None, "notice"):
            notices = notice_figures(size, folder, options.runs)
            report.add("notice_s", round(median(one.left_s for one in notices), 2), "s")
            report.add("notice_each_s", [round(one.left_s, 2) for one in notices])
            goes_on_s = median(one.goes_on_s for one in notices)
            report.add("notice_goes_on_s", round(goes_on_s, 2), "s")
            report.add("notice_steps_lost", [one.steps_lost for one in notices])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.finish()


if __name__ == "__main__":
    main()
