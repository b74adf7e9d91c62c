"""How long a DeepSpeed job stands still for a resize, and what elasticity costs without one.

Linear layers with more than 2 GB of fp32 parameters and Adam state under ZeRO-1 change from two
ranks to one and back, global batch 2. Figures of the changes to one rank:

* ``downtime_ratio``: the downtime of a change by DeepSpeed's own universal checkpoint
  (``save_checkpoint`` to memory, ``ds_to_universal`` with two processes, torchrun anew, loaded)
  over that by scalai-run. A downtime is from the end of the last old step to the end of the first
  new step, minus one median step. ``slowed_s`` is not in it: what the old steps lose while the new
  workers build their engines on the same cores. ``lost_ratio`` counts that too.
* ``downtime_ratio_one_model``: the same where memory does not hold two models: the next workers
  run the script up to its engine beside the training (``standby = "brink"``), in ``brink_s`` by
  phase. ``peak_ratio``: the most memory of the workers of both rounds in further such changes
  (their share of private memory, without the store's segments), over that of the larger round;
  the model that a waiting script has built in host memory is not in it
  (``peak_with_copies_gb``).
* ``overhead_ratio``: a step with the hooks over one without, in pairs of alternating order.

``ours_s`` has the phases of the launcher's reports, ``ours_worker_s`` and ``stock_s`` what passes
between the moments that workers note; ``..._cpu_s`` are the same as processor time of a worker.
``--small`` tries all of it with a small model.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from report import Report
from resize_figures import (
    add_one_model,
    add_ours,
    add_overhead,
    add_stock,
    check_losses,
    read_options,
    run_up_to_brink,
)
from resize_runs import Layout, run_by_checkpoint, run_by_scalai

WORKERS = 2
MEMORY_DISK = "/dev/shm"
BRINK_STAGES = ("imported", "entered", "connected", "model")
"""What a worker notes on its way to the brink."""


@dataclass(frozen=True)
class Linears:
    """Square linear layers, in turn on two ranks and on one, and whether the next workers are built
    ahead."""

    hidden: int
    layers: int
    steps: int
    standby: str = "auto"
    prove: str = "never"
    script = Path(__file__).with_name("resize_deepspeed_job.py")

    def layouts(self, rounds: int) -> list[Layout]:
        return [Layout(1 if number % 2 else WORKERS, "tp1 pp1") for number in range(rounds)]

    def flags(self) -> list[str]:
        return ["--hidden", str(self.hidden), "--layers", str(self.layers)]

    def elastic(self, folder: Path) -> tuple[list[str], list[str]]:
        block = {
            "resize": {"settle_s": 0.0, "standby": self.standby, "prove_function": self.prove},
            "probe": {"kind": "none"},
            "deepspeed": {"data_order": "own"},
        }
        return [], self._config(folder, scalai=block)

    def stock(self, folder: Path, layout: Layout) -> list[str]:
        return self._config(folder, checkpoint={"load_universal": True})

    def _config(self, folder: Path, **more: object) -> list[str]:
        """Write the configuration; return the flags that name it."""
        path = folder / f"{'-'.join(more)}.json"
        config = {
            "train_batch_size": WORKERS,
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            **more,
        }
        path.write_text(json.dumps(config))
        return ["--deepspeed_config", str(path)]

    def convert(self, saved: Path) -> Path:
        """Make it universal; what it was made of goes, as two of them do not fit."""
        tag = (saved / "latest").read_text()
        universal = saved.with_name(f"{saved.name}-universal")
        universal.mkdir()
        ran = subprocess.run(
            [
                sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal",
                *("--input_folder", str(saved / tag), "--output_folder", str(universal / tag)),
                *("--num_extract_workers", str(WORKERS), "--num_merge_workers", str(WORKERS)),
                "--inject_missing_state",
            ],
            capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if ran.returncode:
            raise SystemExit(f"ds_to_universal ended with {ran.returncode}:\n{ran.stderr}")
        shutil.rmtree(saved)
        (universal / "latest_universal").write_text(tag)
        return universal


FULL = Linears(hidden=1024, layers=168, steps=6)
SMALL = Linears(hidden=256, layers=8, steps=4)
PAIRED = Linears(hidden=256, layers=48, steps=0)


def main() -> None:
    options = read_options(__doc__, ("downtime", "ours", "brink", "overhead"))
    report = Report("resize_deepspeed")
    job = replace(SMALL if options.small else FULL, standby=options.standby, prove=options.prove)
    wanted = {options.only} if options.only else {"downtime", "ours", "brink", "overhead"}
    folder = Path(tempfile.mkdtemp(prefix="scalai-benchmark-", dir=MEMORY_DISK))
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        if wanted & {"downtime", "ours"}:
            ours = run_by_scalai(folder, job, options.changes, report.say)
            add_ours(report, ours.changes)
            report.add("state_gb", ours.changes[0].report["bytes_written"] / 1e9, "GB")
        if "brink" in wanted:
            at_brink = replace(job, standby="brink")
            brink = run_up_to_brink(report, folder, at_brink, BRINK_STAGES, options.changes)
        if "downtime" in wanted:
            stock = run_by_checkpoint(folder, job, ours.steps, report.say)
            add_stock(report, stock.changes, ours.changes)
            check_losses(report, ours, stock)
            if "brink" in wanted:
                add_one_model(report, brink, stock)
        if "overhead" in wanted:
            add_overhead(report, folder, PAIRED, Layout(1, "tp1 pp1"), options.pairs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.finish()


if __name__ == "__main__":
    main()
