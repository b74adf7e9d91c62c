"""How fast a checkpoint is resharded offline, beside a plain copy and beside the frameworks.

All on one disk, files brought to disk on both sides, from files that are not in memory where the
machine lets its page cache be dropped (``cold``), unless ``--warm`` is given. Figures:

* ``cp_ratio``: our rate over that of ``cp`` of the same files, of a Megatron ``torch_dist``
  checkpoint of at least 8 GB (parameters, Adam) from TP2 to TP4, whole command. ``cp_ratio_net``:
  without interpreter, imports and planning. ``cp_ratio_unproven``: whole, but nothing is
  fingerprinted or read back. The files have checksums, as torch saves them.
* ``dcp_ratio``: ``cp_ratio`` of that state in torch's DCP, from two ranks to four.
* with ``--beside CHECKOUT``, another one of this project (with its ``.venv``) whose command takes
  turns with ours: ``beside_ratio`` and ``universal_beside_ratio``, its seconds over ours, and
  ``cpu_ratio``, our processor time over its.
* ``peak_gb``: the most anonymous and shared memory of all its processes together, at any time;
  ``budget_gb``: what ``--memory`` allowed.
* ``megatron_ratio``: Megatron's own load and save at new degrees, under torchrun with the model
  built, over ours, whole commands, of a checkpoint of some 2 GB.
* ``universal_ratio``: DeepSpeed's ``ds_to_universal`` over ours, whole commands, of a ZeRO-1
  checkpoint of some 2 GB (bf16, two ranks).
* ``universal_cp_ratio``: our rate over that of ``cp`` of the same files, to that layout.
* ``by_ranks_s``: seconds for that state from ZeRO-1 checkpoints of 4, 32 and 256 ranks.

``--small`` tries all of it with little data.
"""

import argparse
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from report import Report
from reshard_runs import (
    Command,
    Ran,
    copy_files,
    drop_caches,
    grow,
    scalai,
    scalai_of,
    scalai_unproven,
    size_bytes,
    to_universal,
    torchrun,
)
from stored_checksums import fill_in

from scalai.converters.checkpoint import REPORT
from scalai.launch.config.sizes import parse_size

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Size:
    """How large the models are, and how many bytes the grown checkpoint has at least."""

    hidden: int
    layers: int
    grown_bytes: int
    ranks: tuple[int, ...]


FULL = Size(hidden=1024, layers=14, grown_bytes=8 * 10**9, ranks=(4, 32, 256))
SMALL = Size(hidden=256, layers=2, grown_bytes=10**8, ranks=(4, 8))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="little data: only to try it")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--memory", default="1GB", help="what our command may use")
    parser.add_argument("--dir", type=Path, help="where to work (default: the temporary directory)")
    parser.add_argument("--warm", action="store_true", help="leave in memory what is there")
    parser.add_argument("--beside", type=Path, help="a checkout of another release to compare with")
    parser.add_argument("--only", choices=("cp", "megatron", "deepspeed"))
    return parser.parse_args()


class Benchmark:
    """One run of the benchmark: its folder, its sizes, its figures."""

    def __init__(self, options: argparse.Namespace, folder: Path, report: Report) -> None:
        self._size = SMALL if options.small else FULL
        self._runs: int = options.runs
        self._memory: str = options.memory
        self._beside: Path | None = options.beside
        self._folder = folder
        self._report = report
        self._forget: Callable[[], bool] = (lambda: False) if options.warm else drop_caches
        self._marks = folder / "marks"
        self._marks.mkdir()

    def megatron(self) -> Path:
        """Return a checkpoint that Megatron has saved at TP2."""
        saved = self._folder / "megatron"
        self._train(["--tp", "2", "--steps", "1", "--save", str(saved)], "0")
        self._report.add("megatron_gb", size_bytes(saved) / 1e9, "GB")
        return saved

    def beside_cp(self, saved: Path) -> None:
        """Add the figures beside ``cp``."""
        large = self._folder / "large"
        grow(saved, large, self._size.grown_bytes, tp=2)
        fill_in(large)
        (large / REPORT).unlink()  # what trains leaves none
        size = size_bytes(large)
        self._report.add("size_gb", size / 1e9, "GB")
        copied, ours, net, unproven, peaks = [], [], [], [], []
        cpu_s, before, cpu_before_s = [], [], []
        flags = ["--tp", "4", "--memory", self._memory]
        for _ in range(self._runs):
            copied.append(self._timed(copy_files, large).seconds)
            run = self._timed(scalai, large, *flags)
            ours.append(run.seconds)
            net.append(run.working_s)
            peaks.append(run.peak_bytes)
            cpu_s.append(run.cpu_s)
            if self._beside is not None:
                other = self._timed(scalai_of(self._beside), large, *flags)
                before.append(other.seconds)
                cpu_before_s.append(other.cpu_s)
            unproven.append(self._timed(scalai_unproven, large, *flags).seconds)
            self._report.say(f"cp {copied[-1]:.1f} s, ours {ours[-1]:.1f} s, net {net[-1]:.1f} s")
        cp = median(copied)
        self._report.add("cp_s", cp, "s")
        self._report.add("cp_gb_s", size / 1e9 / cp, "GB/s")
        self._report.add("ours_s", median(ours), "s")
        self._report.add("cp_ratio", cp / median(ours))
        self._report.add("cp_ratio_net", cp / median(net))
        self._report.add("cp_ratio_unproven", cp / median(unproven))
        self._report.add("cpu_s_gb", median(cpu_s) / (size / 1e9), "s/GB")
        if before:
            self._report.add("beside_s", median(before), "s")
            self._report.add("beside_ratio", median(before) / median(ours))
            self._report.add("cpu_ratio", median(cpu_s) / median(cpu_before_s))
        self._report.add("peak_gb", max(peaks) / 1e9, "GB")
        self._report.add("budget_gb", parse_size(self._memory) / 1e9, "GB")
        self._beside_cp_as_dcp(large)
        shutil.rmtree(large)

    def _beside_cp_as_dcp(self, large: Path) -> None:
        """Add the figure of the same state in torch's DCP: of two ranks, for four."""
        stored = self._folder / "dcp"
        scalai(large, stored, "--to", "dcp", "--dp", "2", "--memory", self._memory)
        fill_in(stored)
        (stored / REPORT).unlink()
        copied, ours = [], []
        for _ in range(self._runs):
            copied.append(self._timed(copy_files, stored).seconds)
            ours.append(self._timed(scalai, stored, "--dp", "4", "--memory", self._memory).seconds)
            self._report.say(f"as dcp: cp {copied[-1]:.1f} s, ours {ours[-1]:.1f} s")
        self._report.add("dcp_ratio", median(copied) / median(ours))
        shutil.rmtree(stored)

    def beside_megatron(self, saved: Path) -> None:
        """Add the figures beside Megatron's own load and save: TP2 to TP1 and DP2."""
        theirs, ours = [], []
        for run in range(self._runs):
            self._forget()
            again = self._folder / "again"
            flags = ["--tp", "1", "--steps", "0", "--load", str(saved), "--save", str(again)]
            theirs.append(self._train(flags, f"load-{run}").seconds)
            shutil.rmtree(again)
            ours.append(self._timed(scalai, saved, "--tp", "1", "--memory", self._memory).seconds)
            self._report.say(f"Megatron {theirs[-1]:.1f} s, ours {ours[-1]:.1f} s")
        self._report.add("megatron_s", median(theirs), "s")
        self._report.add("beside_megatron_s", median(ours), "s")
        self._report.add("megatron_ratio", median(theirs) / median(ours))

    def beside_deepspeed(self) -> None:
        """Add the figures beside ``ds_to_universal``, and how time grows with the ranks."""
        saved = self._folder / "deepspeed"
        shape = ["--hidden", str(self._size.hidden), "--layers", str(self._size.layers)]
        torchrun([str(HERE / "reshard_deepspeed.py"), *shape, "--save", str(saved)])
        self._report.add("deepspeed_gb", size_bytes(saved) / 1e9, "GB")
        theirs, copied, ours, before = [], [], [], []
        flags = ["--to", "deepspeed_universal", "--memory", self._memory]
        for _ in range(self._runs):
            theirs.append(self._timed(to_universal, saved).seconds)
            copied.append(self._timed(copy_files, saved).seconds)
            ours.append(self._timed(scalai, saved, *flags).seconds)
            if self._beside is not None:
                before.append(self._timed(scalai_of(self._beside), saved, *flags).seconds)
            self._report.say(
                f"ds_to_universal {theirs[-1]:.1f} s, cp {copied[-1]:.1f} s, ours {ours[-1]:.1f} s"
            )
        self._report.add("universal_s", median(theirs), "s")
        self._report.add("universal_cp_s", median(copied), "s")
        self._report.add("beside_universal_s", median(ours), "s")
        self._report.add("universal_ratio", median(theirs) / median(ours))
        self._report.add("universal_cp_ratio", median(copied) / median(ours))
        if before:
            self._report.add("universal_beside_ratio", median(before) / median(ours))
        self._report.add(
            "by_ranks_s", {str(n): self._from_ranks(saved, n) for n in self._size.ranks}
        )

    def _from_ranks(self, saved: Path, ranks: int) -> float:
        """Return the seconds from a checkpoint of so many ranks to one of two."""
        split = self._folder / f"of-{ranks}"
        scalai(saved, split, "--dp", str(ranks))
        seconds = [self._timed(scalai, split, "--dp", "2").seconds for _ in range(self._runs)]
        shutil.rmtree(split)
        return round(median(seconds), 3)

    def _timed(self, command: Command, source: Path, *flags: str) -> Ran:
        """Run a command; its files go."""
        self._forget()
        destination = self._folder / "destination"
        ran = command(source, destination, *flags)
        shutil.rmtree(destination)
        return ran

    def _train(self, flags: list[str], number: str) -> Ran:
        """Run the Megatron job."""
        size = ["--hidden", str(self._size.hidden), "--layers", str(self._size.layers)]
        marks = ["--marks", str(self._marks), "--round", number]
        return torchrun([str(HERE / "resize_job.py"), *size, *marks, *flags])


def main() -> None:
    options = arguments()
    report = Report("reshard")
    folder = Path(tempfile.mkdtemp(prefix="scalai-benchmark-", dir=options.dir))
    try:
        report.add("cold", not options.warm and drop_caches())
        benchmark = Benchmark(options, folder, report)
        if options.only != "deepspeed":
            saved = benchmark.megatron()
            if options.only != "megatron":
                benchmark.beside_cp(saved)
            if options.only != "cp":
                benchmark.beside_megatron(saved)
        if options.only in (None, "deepspeed"):
            benchmark.beside_deepspeed()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.finish()


if __name__ == "__main__":
    main()
