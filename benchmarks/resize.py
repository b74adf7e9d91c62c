"""How long training stands still for a resize, and what elasticity costs a job that is not resized.

A GPT on megatron-core with more than 2 GB of parameters and Adam state (fp32, distributed
optimizer, one bucket) changes from TP2 DP1 to TP1 DP2 and back, two ranks on one host, global batch
2 of 32 tokens so that the state and not the arithmetic is large. Figures of the changes to TP1 DP2:

* ``downtime_ratio``: the downtime of a change by Megatron's own torch_dist checkpoint (saved fully
  reshardable to memory, torchrun anew, loaded) over that by scalai-run. A downtime is from the end
  of the last old step to the end of the first new step, minus one median step. In both ways the
  weights that are about to be loaded are not initialised first. ``slowed_s`` is not in it: what
  the old steps lose while the new workers build their models on the same cores. ``lost_ratio``
  counts that too.
* ``move_ratio``: deposit, move and restore over two copies of the same bytes, from memory into
  shared memory and back, all touched before, by as many processes. Not in it: the fingerprints
  (``fingerprint_s``) and the first touch of memory (``page_fault_s``).
* ``overhead_ratio``: a step with ``boundary`` over one without, in pairs of alternating order.

``ours_s`` has the phases of the launcher's reports, ``ours_worker_s`` and ``stock_s`` what passes
between the moments that workers note; ``..._cpu_s`` are the same as processor time of a worker.
``--small`` tries all of it with a small model.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from report import Report
from resize_runs import WORKERS, Change, Run, Size, elastic_job, run_by_checkpoint, run_by_scalai
from warm_copies import copy_seconds

FULL = Size(hidden=1024, layers=14, steps=6)
SMALL = Size(hidden=256, layers=2, steps=4)
PAIRED = Size(hidden=256, layers=4, steps=0)
MEMORY_DISK = "/dev/shm"
LOSS_TOLERANCE = 1e-4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a small model: only to try it")
    parser.add_argument("--changes", type=int, default=5, help="there, back, there, ...")
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--build-ahead", default="auto", choices=("auto", "never"))
    parser.add_argument("--only", choices=("downtime", "ours", "move", "overhead"))
    return parser.parse_args()


def medians(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each entry."""
    return {name: round(median(table[name] for table in tables), 4) for name in tables[0]}


def there(changes: Sequence[Change]) -> list[Change]:
    """Return the changes from TP2 DP1 to TP1 DP2."""
    return list(changes[::2])


def add_ours(report: Report, changes: Sequence[Change]) -> None:
    """Add the figures of our changes."""
    forth = there(changes)
    downtime = median(change.downtime_s for change in forth)
    report.add("downtime_s", downtime, "s")
    report.add("downtimes_s", [round(change.downtime_s, 3) for change in changes])
    report.add("slowed_s", median(change.slowed_s for change in forth), "s")
    report.add("step_s", median(change.step_s for change in forth), "s")
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


def add_moves(report: Report, changes: Sequence[Change], runs: int) -> None:
    """Add what our changes did with bytes, beside plain copies of as many."""
    seconds, faults, prints, ratios = [], [], [], []
    told = [change.report for change in there(changes)]
    deposited, restored = told[0]["bytes_deposited"], told[0]["bytes_local"]
    report.add("state_gb", deposited / 1e9, "GB")
    report.add("restored_gb", restored / 1e9, "GB")
    shares = deposited // WORKERS, restored // WORKERS
    copies = median(copy_seconds(*shares, WORKERS, runs))
    for entry in told:
        phases = entry["seconds"]
        fault, hashed = entry["page_fault_s"], entry["deposit_proof_s"]
        moved = phases["deposit"] - hashed + phases["move"] + phases["restore"] - fault
        seconds.append(moved)
        faults.append(fault)
        prints.append(hashed + phases["proof"])
        ratios.append(moved / copies)
    report.add("warm_copies_s", copies, "s")
    report.add("warm_copy_gb_s", 1e-9 * (deposited + restored) / copies, "GB/s")
    report.add("move_s", median(seconds), "s")
    report.add("page_fault_s", median(faults), "s")
    report.add("fingerprint_s", median(prints), "s")
    report.add("move_ratio", median(ratios))


def add_overhead(report: Report, folder: Path, pairs: int) -> None:
    """Add the cost of the boundary, with the 95 % interval of its median by bootstrap."""
    marks = folder / "overhead"
    marks.mkdir()
    flags = [*PAIRED.flags(), "--marks", str(marks), "--pairs", str(pairs)]
    with elastic_job(folder, PAIRED, "overhead-benchmark", flags, marks, workers=1):
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


def check_losses(report: Report, ours: Run, stock: Run) -> None:
    """End if the two ways did not train the same: then the comparison would mean nothing."""
    common = sorted(ours.losses.keys() & stock.losses.keys())
    worst = max(abs(ours.losses[s] - stock.losses[s]) / stock.losses[s] for s in common)
    report.add("loss_difference", worst, f"relative, at most, of {len(common)} steps")
    if not worst < LOSS_TOLERANCE:
        raise SystemExit(f"losses differ by {worst}: ours {ours.losses}, stock {stock.losses}")


def main() -> None:
    options = arguments()
    report = Report("resize")
    size = replace(SMALL if options.small else FULL, build_ahead=options.build_ahead)
    wanted = {options.only} if options.only else {"downtime", "ours", "move", "overhead"}
    folder = Path(tempfile.mkdtemp(prefix="scalai-benchmark-", dir=MEMORY_DISK))
    try:
        if wanted & {"downtime", "ours", "move"}:
            ours = run_by_scalai(folder, size, options.changes, report.say)
            add_ours(report, ours.changes)
            add_moves(report, ours.changes, runs=5)
        if "downtime" in wanted:
            stock = run_by_checkpoint(folder, size, ours.steps, report.say)
            add_stock(report, stock.changes, ours.changes)
            check_losses(report, ours, stock)
        if "overhead" in wanted:
            add_overhead(report, folder, options.pairs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.finish()


if __name__ == "__main__":
    main()
