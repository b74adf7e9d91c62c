"""``scalai chaos``: faults against a running job, and what becomes of them."""

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from scalai.core.errors import UsageError
from scalai.launch.chaos.fault_run import Chaos, FaultPlan, alone
from scalai.launch.chaos.injectors import describe
from scalai.launch.chaos.kinds import KINDS, parse
from scalai.launch.chaos.verdicts import Verdict, compare, draw, table
from scalai.launch.coordinator.held_states import committed_fingerprints
from scalai.store.generation import load_generation
from scalai.store.places import check_job, default_store_dir, find_generations

FAILED = 4


def add_parser(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "chaos",
        help="inject faults into a running job, and judge what becomes of them",
        description="Injects a seeded schedule of faults into a job, one after the other, each "
        "once the job trains on all its hosts again; what was injected is undone at the end. Run "
        "it on the machine of the hosts that are to be struck. Agents that end are started again "
        "as they were. Writes events.jsonl, verdict.json, verdict.txt and verdict.png to --out.",
        epilog="Exit codes: 0 every fault was seen and survived as stated, 4 one was not, 1 and 2 "
        "it could not be done, 130 interrupted.",
    )
    parser.add_argument("job", nargs="?", default="default", help="name of the job")
    parser.add_argument(
        "--store-dir", type=Path, help="folder of the stores (default: in /dev/shm)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the schedule (default: %(default)s)"
    )
    parser.add_argument(
        "--faults", default="kill-worker", metavar="KIND[@step=N|@s=S|@station=PLACE],...",
        help="kinds of faults; see --list (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--every", type=int, default=20, metavar="STEPS",
        help="steps between the recovery from one fault and the next (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=1, help="repetitions of each kind (default: %(default)s)"
    )
    parser.add_argument(
        "--hosts", default="", metavar="HOST,...", help="strike these hosts only, all of them here"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("scalai-chaos"),
        help="folder of the results (default: %(default)s)",
    )
    parser.add_argument(
        "--wait-s", type=float, default=120.0, metavar="S",
        help="a fault that is not seen, or a job that is not back, for so long has failed "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--no-restart", action="store_true", help="start no ended agent again")
    parser.add_argument(
        "--log", type=Path, action="append", default=[], metavar="FILE",
        help="an agent's log, if not the file behind an agent's output on this machine",
    )  # fmt: skip
    _add_judging(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the schedule alone")
    parser.add_argument("--list", action="store_true", help="print the kinds of faults, and exit")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def _add_judging(parser: argparse.ArgumentParser) -> None:
    """Add the flags that compare a run with one that nobody interrupted."""
    parser.add_argument(
        "--losses", type=Path, metavar="FILE", help="the job's losses: JSON lines with steps"
    )
    parser.add_argument(
        "--reference", type=Path, metavar="FILE", help="losses of an uninterrupted run"
    )
    parser.add_argument(
        "--loss-key",
        default="loss",
        metavar="KEY",
        help="key of the loss in these lines (default: %(default)s)",
    )
    parser.add_argument(
        "--final", type=Path, metavar="DIR",
        help="with --judge: folder of the job's final state (<durable-dir>/<job>)",
    )  # fmt: skip
    parser.add_argument(
        "--reference-final", type=Path, metavar="DIR", help="final state of the other run"
    )
    parser.add_argument(
        "--judge", action="store_true",
        help="inject nothing: compare losses and final states for the schedule in --out",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Inject, and judge. Raises ``UsageError`` where there is nothing to inject into."""
    if args.list:
        print(json.dumps({"kinds": describe().splitlines()}) if args.json else describe())
        return 0
    if args.judge:
        return _judge(args)
    faults = [text for text in args.faults.split(",") if text.strip()]
    if args.every < 1 or args.rounds < 1 or not faults:
        raise UsageError("--every and --rounds are 1 or more, and --faults names a kind.")
    wanted = tuple(KINDS) if faults == ["all"] else tuple(faults)
    folder = (args.store_dir or default_store_dir()).resolve() / check_job(args.job)
    plan = FaultPlan(
        args.seed, tuple(map(parse, wanted)), args.every, args.out, args.rounds, args.wait_s,
        not args.no_restart, tuple(args.log), tuple(filter(None, args.hosts.split(","))),
    )  # fmt: skip
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    with alone(folder), _ends_as_interrupt():
        chaos = Chaos(folder, plan, say)
        schedule = chaos.prepare()
        if args.dry_run:
            lines = list(map(str, schedule))
            print(json.dumps({"schedule": lines}) if args.json else "\n".join(lines))
            return 0
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "events.jsonl").unlink(missing_ok=True)
        try:
            verdict = chaos.run(schedule)
        except KeyboardInterrupt:
            say("interrupted: what was injected is undone")
            _write(args.out, Verdict(plan.seed, tuple(chaos.outcomes)))
            raise
    verdict = _compared(args, verdict)
    _write(args.out, verdict)
    print(json.dumps(verdict.to_json()) if args.json else table(verdict))
    return 0 if verdict.holds else FAILED


@contextmanager
def _ends_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that all is undone; Ctrl-C does also
    where whoever started this ignores it."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {
        n: signal.signal(n, interrupt) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write(out: Path, verdict: Verdict) -> None:
    (out / "verdict.json").write_text(json.dumps(verdict.to_json(), indent=1) + "\n")
    (out / "verdict.txt").write_text(table(verdict) + "\n")
    draw(verdict.to_json(), out / "verdict.png")


def _compared(args: argparse.Namespace, verdict: Verdict) -> Verdict:
    if args.losses is None or args.reference is None:
        return verdict
    reference = dict(read_losses(args.reference, args.loss_key))
    return replace(verdict, losses=compare(read_losses(args.losses, args.loss_key), reference))


def read_losses(path: Path, key: str) -> list[tuple[int, float]]:
    """Return step and loss of each line of a file. Raises ``UsageError`` where a line has none."""
    found = []
    try:
        text = path.read_text()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}. Name a file of JSON lines.") from error
    for number, line in enumerate(text.splitlines(), 1):
        # The last line may be on its way, and one of a process that was killed may be torn.
        with suppress(json.JSONDecodeError):
            each = json.loads(line)
            if not isinstance(each, dict) or not {"step", key} <= each.keys():
                raise UsageError(f"{path}, line {number}: no 'step' and {key!r}. See --loss-key.")
            found.append((int(each["step"]), each[key]))
    return found


def final_fingerprints(folder: Path) -> tuple[int, Mapping[str, int]]:
    """Return the step and the fingerprints by tensor of the newest generation of a folder."""
    generations = find_generations(folder)
    if not generations:
        raise UsageError(f"{folder} holds no generation. Name <durable-dir>/<job>.")
    manifests = load_generation(max(generations.items())[1]).hosts
    hosts = list(manifests.values()) if isinstance(manifests, Mapping) else list(manifests)
    return hosts[0].step, committed_fingerprints(hosts)


def _judge(args: argparse.Namespace) -> int:
    """Compare with what a schedule has left, and write the verdict anew."""
    path = args.out / "verdict.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no verdict ({error}). Inject faults first.") from error
    verdict = _compared(args, Verdict(found["seed"], ()))
    if args.final is not None and args.reference_final is not None:
        (step, own), (other_step, other) = map(
            final_fingerprints, (args.final, args.reference_final)
        )
        if step != other_step:
            raise UsageError(
                f"{args.final} is of step {step}, {args.reference_final} of step {other_step}. Let "
                "the uninterrupted run end at the same step."
            )
        verdict = replace(verdict, fingerprints=(own, other))
    judged = verdict.to_json()
    for key in ("losses", "fingerprints"):
        found[key] = judged[key] or found.get(key)
    found["differs"] = list(verdict.wrong[:5])
    found["holds"] = not found["failed"] and found["passed"] > 0 and not verdict.wrong
    path.write_text(json.dumps(found, indent=1) + "\n")
    draw(found, args.out / "verdict.png")
    print(json.dumps(found) if args.json else "\n".join(verdict.wrong) or "nothing differs")
    return 0 if found["holds"] else FAILED
