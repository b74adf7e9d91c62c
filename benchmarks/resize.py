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
* ``downtime_ratio_one_model``: the same where memory does not hold two models: the next workers
  come up to the brink beside the training (``standby = "brink"``), in ``brink_s`` by phase.
  ``peak_ratio``: the most memory of the workers of both rounds in further such changes (their
  share of private memory, without the store's segments), over that of the larger round.
* ``move_ratio``: snapshot, move and restore over two copies of the same bytes, from memory into
  shared memory and back, all touched before, by as many processes. Not in it: the fingerprints
  (``fingerprint_s``) and the first touch of memory (``page_fault_s``).
* ``prove_s``: the step of the old workers by which a change is proven to compute the same function,
  beside the start of the next ones (``--prove always``; ``never``, the default, makes none).
* ``overhead_ratio``: a step with ``boundary`` over one without, in pairs of alternating order.

``ours_s`` has the phases of the launcher's reports, ``ours_worker_s`` and ``stock_s`` what passes
between the moments that workers note; ``..._cpu_s`` are the same as processor time of a worker.
``--small`` tries all of it with a small model.

On a CUDA device the state has 8.5 GB, TP2 on two ranks of the one device
(``tests/support/one_device`` on ``PYTHONPATH``) becomes one rank, ``move_ratio`` is left out
(``device.py`` has the copies of a device), and ``..._peak_device_gb`` is the most memory of the
device that was used, by anybody.
"""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from report import Report
from resize_figures import (
    DeviceMemory,
    add_one_model,
    add_ours,
    add_overhead,
    add_stock,
    check_losses,
    read_options,
    run_up_to_brink,
    there,
)
from resize_runs import Change, Layout, run_by_checkpoint, run_by_scalai
from warm_copies import copy_seconds

WORKERS = 2
VOCABULARY = 1024
MEMORY_DISK = "/dev/shm"
BRINK_STAGES = ("imported", "entered", "connected", "built")
"""What a worker notes on its way to the brink."""


@dataclass(frozen=True)
class Gpt:
    """A GPT of some size, in turn as TP2 DP1 and TP1 DP2, and whether its next workers stand
    by."""

    hidden: int
    layers: int
    steps: int
    standby: str = "auto"
    prove: str = "never"
    seq_length: int = 32
    global_batch: int = WORKERS
    script = Path(__file__).with_name("resize_job.py")

    def layouts(self, rounds: int) -> list[Layout]:
        # NCCL's ranks on one device exchange gradients far slower than ranks on their own.
        one = Layout(1 if torch.cuda.is_available() else WORKERS, "tp1 pp1")
        two = Layout(WORKERS, f"tp{WORKERS} pp1")
        return [one if number % 2 else two for number in range(rounds)]

    def flags(self) -> list[str]:
        sizes = {
            "hidden": self.hidden, "layers": self.layers, "vocabulary": VOCABULARY,
            "seq-length": self.seq_length, "global-batch-size": self.global_batch,
        }  # fmt: skip
        return [part for name, size in sizes.items() for part in (f"--{name}", str(size))]

    def elastic(self, folder: Path) -> tuple[list[str], list[str]]:
        config = folder / "elastic.toml"
        config.write_text(
            f'[degrees]\n{WORKERS} = "tp{WORKERS} pp1"\n1 = "tp1 pp1"\n'
            f"[model]\nnum_attention_heads = {self.hidden // 64}\nnum_layers = {self.layers}\n"
            f"padded_vocab_size = {VOCABULARY}\nglobal_batch_size = {self.global_batch}\n"
            f'micro_batch_size = 1\n[resize]\nsettle_s = 0.0\nstandby = "{self.standby}"\n'
            f'prove_function = "{self.prove}"\n'
            '[probe]\nkind = "none"\n'
        )
        return ["--elastic", str(config)], []

    def stock(self, folder: Path, layout: Layout) -> list[str]:
        return ["--tp", layout.degrees[2]]

    def convert(self, saved: Path) -> Path:
        return saved


FULL = Gpt(hidden=1024, layers=14, steps=6)
ON_DEVICE = replace(FULL, hidden=2048)
SMALL = Gpt(hidden=256, layers=2, steps=4)
PAIRED = Gpt(hidden=256, layers=4, steps=0)


def add_moves(report: Report, changes: Sequence[Change], runs: int) -> None:
    """Add what our changes did with bytes, beside plain copies of as many."""
    seconds, faults, prints, ratios = [], [], [], []
    reports = [change.report for change in there(changes)]
    written, restored = reports[0]["bytes_written"], reports[0]["bytes_local"]
    report.add("state_gb", written / 1e9, "GB")
    report.add("restored_gb", restored / 1e9, "GB")
    shares = written // WORKERS, restored // WORKERS
    copies = median(copy_seconds(*shares, WORKERS, runs))
    for entry in reports:
        phases = entry["seconds"]
        fault, hashed = entry["page_fault_s"], entry["snapshot_proof_s"]
        moved = phases["snapshot"] - hashed + phases["move"] + phases["restore"] - fault
        seconds.append(moved)
        faults.append(fault)
        prints.append(hashed + phases["proof"])
        ratios.append(moved / copies)
    report.add("warm_copies_s", copies, "s")
    report.add("warm_copy_gb_s", 1e-9 * (written + restored) / copies, "GB/s")
    report.add("move_s", median(seconds), "s")
    report.add("page_fault_s", median(faults), "s")
    report.add("fingerprint_s", median(prints), "s")
    report.add("move_ratio", median(ratios))


def main() -> None:
    options = read_options(__doc__, ("downtime", "ours", "brink", "move", "overhead"))
    report = Report("resize")
    has_device = torch.cuda.is_available()
    size = SMALL if options.small else ON_DEVICE if has_device else FULL
    job = replace(size, standby=options.standby, prove=options.prove)
    wanted = {options.only} if options.only else {"downtime", "ours", "brink", "move", "overhead"}
    folder = Path(tempfile.mkdtemp(prefix="scalai-benchmark-", dir=MEMORY_DISK))
    try:
        if wanted & {"downtime", "ours", "move"}:
            with DeviceMemory(report, "ours"):
                ours = run_by_scalai(folder, job, options.changes, report.say)
            add_ours(report, ours.changes)
            if not has_device:
                add_moves(report, ours.changes, runs=5)
        if "brink" in wanted:
            at_brink = replace(job, standby="brink")
            brink = run_up_to_brink(report, folder, at_brink, BRINK_STAGES, options.changes)
        if "downtime" in wanted:
            with DeviceMemory(report, "stock"):
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
