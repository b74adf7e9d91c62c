"""A GPT that changes its layout four times while it trains, beside one that never does.

    python examples/demo.py [--framework megatron|deepspeed | --data-view mount] [--data FILE]

Two hosts start, one leaves, another joins, then the job is scaled to 3 ranks and to 1. Every change
takes another parallel layout; the state goes from memory to memory.
The losses must be those of a run that nobody interrupts. Hosts are agents on this machine.
With ``--data-view mount`` the story is that of ``demo_mount.py``: samples as files.

Exit codes: 0 all checks hold, 1 the demonstration failed, 4 a check does not hold.
"""

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import demo_mount
from demo_frameworks import FRAMEWORKS, SCHEDULE_STEPS, Framework
from demo_hosts import DemoError, compile_first, make_place, no_process_left
from demo_picture import draw
from demo_story import ORDINARY_STEPS, Change, check
from demo_training import RESUMABLE, Setting, Training
from demo_words import (
    change_line,
    check_lines,
    end_line,
    introduction,
    phase_table,
)

from scalai import ScalaiError

ROOT = Path(__file__).resolve().parents[1]
STEPS_BETWEEN = 20
"""Steps to train before the next change."""
MOST_STEPS = 10 * SCHEDULE_STEPS
"""The story ends long before."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    story = parser.add_mutually_exclusive_group()
    story.add_argument(
        "--framework", choices=FRAMEWORKS, default="megatron", help="default: %(default)s"
    )
    story.add_argument(
        "--data-view", choices=["mount"], help="show how ranks read their samples from files"
    )
    parser.add_argument("--data", type=Path, help="text to train on (default: Python's own docs)")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build" / "demo",
        help="folder for logs and the picture (default: %(default)s)",
    )
    options = parser.parse_args()
    if options.data is not None and not options.data.is_file():
        parser.error(f"--data {options.data} is not a file.")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        if options.data_view == "mount":
            return demo_mount.demonstrate(options.data, options.out)
        return demonstrate(FRAMEWORKS[options.framework], options.data, options.out)
    except (DemoError, ScalaiError) as error:
        print(f"\nThe demonstration failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped; every process is ended and the store removed.", file=sys.stderr)
        return 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def demonstrate(framework: Framework, data: Path | None, out: Path) -> int:
    """Train twice, compare, print and draw. Returns the exit code."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    store = make_place()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, store, ignore_errors=True)
        stack.enter_context(no_process_left())
        print(introduction(framework, data), flush=True)
        if framework.compiles:
            print("\n  The framework's extension is compiled, once a machine ...", flush=True)
            compile_first(framework.compiles, out / "compile.log")
        setting = Setting(framework, data, store, out)
        elastic = Training(setting, "elastic", hosts=2, steps=MOST_STEPS)
        _tell(framework.story, elastic)
        steps = elastic.run.last_step
        print(f"\n  Now {steps} steps without any change ...\n", flush=True)
        reference = Training(setting, "reference", hosts=1, steps=steps)
        _train_to_the_end(reference, steps)
    resizes = elastic.resizes()
    checks = check(
        elastic.run,
        reference.run,
        resizes,
        (elastic.first, reference.first),
        elastic.saved_step(),
        framework.story,
    )
    picture = draw(elastic.history(), elastic.run, reference.run, out / "scalai-demo.png")
    print(phase_table(elastic.run, resizes, framework.story))
    print(check_lines(checks))
    print(f"\n  picture   {picture}\n  took      {time.monotonic() - began:.0f} s")
    return 0 if all(one.is_kept for one in checks) else 4


def _tell(story: Sequence[Change], training: Training) -> None:
    """Carry out the story, until the last host has left."""
    for number, change in enumerate(story, start=1):
        _begin(change, training)
        resize = training.wait_for_round(number)
        if change.kind == "start":
            training.keep_first_generation(hosts=2)
        if change.kind == "leave":
            training.hosts.wait_for_end(change.host, 0)
        # How long the training stood still is known once some ordinary steps are done.
        training.wait_for_step(resize.step + ORDINARY_STEPS + 1)
        print(change_line(change, resize, training.run), flush=True)
        training.wait_for_step(resize.step + STEPS_BETWEEN)
    # Hosts that have no workers just go; the last one leaves the state on disk.
    for host in sorted(training.hosts.names, key=lambda host: host in resize.workers):
        training.hosts.tell_to_leave(host)
        training.hosts.wait_for_end(host, RESUMABLE if host in resize.workers else 0)
    print(end_line(training.run), flush=True)


def _train_to_the_end(training: Training, steps: int) -> None:
    """Train on one host, without any change, until the script ends."""
    training.hosts.start("r")
    training.wait_for_round(1)
    training.keep_first_generation(hosts=1)
    for step in range(1, steps + 1):
        training.wait_for_step(step)
    training.hosts.wait_for_end("r", 0)


def _begin(change: Change, training: Training) -> None:
    """Make the change happen; it goes on while this returns."""
    match change.kind:
        case "start":
            training.hosts.start("a")
            training.hosts.start("b")
        case "leave":
            training.hosts.tell_to_leave(change.host)
        case "join":
            training.hosts.start(change.host)
        case "scale":
            training.scale(change.workers)


if __name__ == "__main__":
    sys.exit(main())
