"""Everything that needs a CUDA device, on one of them: ``make gpu``.

Runs, one after another, the tests of device memory, unmodified scripts that change their layout on
NCCL with several ranks on the one device, and the benchmarks of a change and of copies. Each part
has a limit, and so has the whole; a part for which no time is left, or that lacks something, is
named. ``--only`` takes some parts. The last line is JSON: the outcome of each part, and the figures
of the benchmarks.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from report import Report

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"


@dataclass(frozen=True)
class Part:
    """One command: ``arguments`` of Python, and its limit in seconds."""

    arguments: Sequence[str]
    limit_s: float


def tests(chosen: str, limit_s: float, case: str = "", workers: int = 0) -> Part:
    """Return the tests of a file or folder below ``tests``, or one of them, as a part; ``case`` is
    in the names of those wanted."""
    flags = ["-m", "pytest", "-q", "-ra", "-n", str(workers), "-p", "no:cacheprovider"]
    flags += ["-m", "campaign or not campaign", "-k", case]
    return Part([*flags, str(TESTS / chosen)], limit_s)


def benchmark(name: str, *flags: str, limit_s: float) -> Part:
    return Part([str(ROOT / "benchmarks" / f"{name}.py"), *flags], limit_s)


PARTS = {
    "memory": tests("cuda", limit_s=120.0, workers=4),
    "pause": benchmark(
        "resize", "--only", "downtime", "--changes", "1", "--standby", "never", limit_s=160.0
    ),
    "pause_brink": benchmark("resize", "--only", "brink", "--changes", "1", limit_s=120.0),
    "pretrain_gpt": tests(
        "end_to_end/test_pretrain_gpt.py::"
        "test_losses_samples_and_rates_are_those_of_the_uninterrupted_run",
        case="mock",
        limit_s=180.0,
    ),
    "deepspeed": tests(
        "end_to_end/test_deepspeed.py::"
        "test_a_script_without_a_line_of_ours_goes_through_other_dps_and_stages",
        limit_s=150.0,
    ),
    "pause_two_models": benchmark(
        "resize", "--only", "ours", "--changes", "1", "--standby", "always", limit_s=100.0
    ),
    "deepspeed_stage_3": tests(
        "end_to_end/test_deepspeed.py::test_every_stage_goes_through_four_changes_of_dp[3]",
        limit_s=150.0,
    ),
    "copies": benchmark("device", limit_s=90.0),
}


def run(part: Part, limit_s: float, output: Path) -> tuple[str, dict[str, Any]]:
    """Run a part, its output into a file. Returns its outcome, and the figures of a benchmark."""
    here = [str(TESTS / "support" / "one_device"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, here)), "OMP_NUM_THREADS": "1",
        "DS_BUILD_OPS": "0", "TURN": "all",
    }  # fmt: skip
    with output.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *part.arguments], cwd=ROOT, env=environment, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"not done in {limit_s:.0f} s", {}
        finally:  # also where a person interrupts
            _end(process)
    last = (output.read_text().strip().splitlines() or [""])[-1]
    if code:
        return f"exit code {code}: {last[:200]}", {}
    return ("done", json.loads(last)) if last.startswith("{") else (last, {})


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a part, if it runs on: a test then ends its jobs, and a benchmark removes its folder."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(15.0)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--limit-s", type=float, default=480.0, help="of all (default: 480)")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "gpu" / "logs")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("make gpu: torch sees no CUDA device on this machine")
    options.logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.limit_s
    report = Report("gpu")
    report.add("device", torch.cuda.get_device_name())
    report.add("torch", torch.__version__)
    outcomes: dict[str, str] = {}
    for name in options.only:
        began, part = time.monotonic(), PARTS[name]
        left_s = end - began
        if left_s < 20.0:
            outcomes[name] = "no time was left"
        else:
            output = options.logs / f"{name}.log"
            outcomes[name], figures = run(part, min(part.limit_s, left_s), output)
            if figures:
                report.add(name, figures)
        took_s = time.monotonic() - began
        report.say(f"{name}: {outcomes[name]}, {took_s:.0f} s; {options.logs / name}.log")
    report.add("outcomes", outcomes)
    report.finish()
    if any(not one.startswith("done") and " passed" not in one for one in outcomes.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
