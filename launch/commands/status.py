"""``scalai status``: a job at one glance, again and again (``--watch``), or as an exit code
(``--check``)."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scalai.core.errors import PeerError
from scalai.core.exit_codes import RESUMABLE
from scalai.launch.config.endpoint import JobEnding

TROUBLED = 3
"""Exit code of ``--check`` for a job that needs a person."""
STANDS_S = 600.0
"""A job that stands still for longer needs a person, in seconds."""
EVERY_S = 2.0
"""Interval of ``--watch``, in seconds."""
SILENT_S = 90.0
"""Longest silence of a watched job, in seconds: another host takes over after 60 s."""
WAIT_S = 600.0
"""Longest wait of ``scale --wait``, in seconds."""
LOOK_S = 0.5
CLEAR = "\033[H\033[J"

StatusFacts = Mapping[str, Any]


def add_flags(parser: argparse.ArgumentParser) -> None:
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print JSON")
    shown.add_argument(
        "--watch", type=seconds, nargs="?", const=EVERY_S, metavar="S",
        help=f"show it every S seconds ({EVERY_S:g}), until the job has ended",
    )  # fmt: skip
    shown.add_argument(
        "--check", action="store_true",
        help=f"print one line; exit code 0: it trains, {TROUBLED}: it needs a person, "
        "1: no answer",
    )  # fmt: skip


def seconds(text: str) -> float:
    """A time of a flag."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.1 <= found <= 86400.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 86400")
    return found


def show(
    arguments: argparse.Namespace,
    ask: Callable[[], StatusFacts],
    ended: Callable[[], JobEnding | None],
) -> int:
    """Print the status; returns the exit code.

    Args:
        ask: Asks the coordinator; raises ``PeerError`` without one.
        ended: Reads the job's end; None: unknown.
    """
    if arguments.watch is not None:
        try:
            return _watch(arguments.watch, ask, ended)
        except KeyboardInterrupt:
            return 0
    status = ask()
    if arguments.json:
        print(json.dumps(status))
    elif arguments.check:
        found = troubles(status)
        print(f"{status['job']}: {'; '.join(found) or _trains(status)}")
        return TROUBLED if found else 0
    else:
        print("\n".join(lines(status)))
    return 0


def _watch(
    every_s: float, ask: Callable[[], StatusFacts], ended: Callable[[], JobEnding | None]
) -> int:
    """Show the status until the job has ended, or nobody has answered for ``SILENT_S``. Returns
    the job's exit code; 1 after a silence."""
    is_screen = sys.stdout.isatty()
    text, heard_at = "", time.monotonic()

    def show(more: str = "") -> None:
        print(CLEAR + "\n".join((text, more)) if is_screen else (more or text) + "\n", flush=True)

    while True:
        try:
            status = ask()
            text, heard_at = "\n".join(lines(status)), time.monotonic()
            show()
            if (end := status["end"]) is not None:
                return _say_end(end["code"], end["reason"])
        except PeerError as error:
            silent_s = time.monotonic() - heard_at
            if not text:
                raise
            if (ending := ended()) is not None:
                return _say_end(ending.code, ending.reason)
            if silent_s > SILENT_S:
                raise
            show(
                f"nobody has answered for {time_text(silent_s)}; waiting up to "
                f"{time_text(SILENT_S)} for a coordinator: {error}"
            )
        time.sleep(every_s)


def _say_end(code: int, reason: str) -> int:
    kinds = {0: "finished", RESUMABLE: "stopped, and the same command goes on"}
    print(f"the job has ended, exit code {code} ({kinds.get(code, 'failed')}): {reason}")
    return code


def await_change(ask: Callable[[], StatusFacts], target: StatusFacts, within_s: float) -> int:
    """Wait until the job trains with these degrees and workers, and print the change. Returns 1 if
    it fails, or takes longer."""
    wanted = target["degrees"], _working(target)
    deadline, failed = time.monotonic() + within_s, None
    while True:
        status = ask()
        if (status["degrees"], _working(status)) == wanted and status["phase"] == "running":
            if (last := status["last_resize"]) is not None:  # a new coordinator knows of none
                print(change_text(last))
            return 0
        failed = status["failed_changes"] if failed is None else failed
        if news := [each for each in status["failed_changes"] if each not in failed]:
            print(f"not possible: {news[-1]}", file=sys.stderr)
            return 1
        if time.monotonic() > deadline:
            said = f"not within {time_text(within_s)}: the job is {_trains(status)}"
            print(f"{said}. It goes on with the change", file=sys.stderr)
            return 1
        time.sleep(LOOK_S)


def _working(status: StatusFacts) -> dict[str, int]:
    return {host: count for host, count in status["workers"].items() if count}


def troubles(status: StatusFacts) -> list[str]:
    """Reasons to wake a person; none: the job trains."""
    found = [_stall(*stall) for stall in status["no_progress"].items()]
    if status["missing"]:
        found.append(f"waits for {time_text(status['phase_s'])}: {status['missing']}")
    elif not status["is_training"] and status["phase_s"] > STANDS_S:
        found.append(f"{status['phase']} for {time_text(status['phase_s'])}")
    if status["restarts_left"] == 0:
        found.append("no restart is left: the next failure ends it")
    return found


def lines(status: StatusFacts) -> Iterator[str]:
    """The status for a person, a line each."""
    for name, text in _rows(status):
        yield f"{name:14} {text}"


def _rows(status: StatusFacts) -> Iterator[tuple[str, str]]:
    yield "job", f"{status['job']}: {_trains(status)}"
    if status["degrees"] is not None:
        passes = [
            f", {part.replace('_', ' ')} {status[part]}"
            for part in ("micro_batch_size", "recompute", "offload")
            if status[part]
        ]
        yield "layout", f"{status['degrees']} on {status['world_size']} ranks{''.join(passes)}"
        yield "because", str(status["reason"])
    yield "hosts", ", ".join(_hosts(status)) or "none"
    for host, why in status["idle_hosts"].items():
        yield "", f"{host} is idle: {why}"
    yield "state", _state(status)
    if (waits := "; ".join(f"{host}: {what}" for host, what in status["held"].items())) or (
        waits := status["missing"] or ""
    ):
        yield "waits for", waits
    for stall in status["no_progress"].items():
        yield "stands still", _stall(*stall)
    yield "restarts left", str(status["restarts_left"])
    if (last := status["last_resize"]) is not None:
        yield "last change", change_text(last)
    for failed in status["failed_changes"]:
        yield "not possible", failed
    if (failure := status["last_failure"]) is not None:
        yield "last failure", f"host {failure['host']}: {failure['reason'] or failure['kind']}"
    if (refusal := status["last_refusal"]) is not None:
        ago, asked = time_text(time.time() - refusal["at"]), refusal["asked"]
        yield "last refusal", f"{ago} ago, {refusal['who']} asked {asked}: {refusal['why']}"


def _trains(status: StatusFacts) -> str:
    step = f"at step {status['step']}" if status["round"] else "it has not begun"
    which = f"round {status['round']}, coordinator {status['term']}"
    return f"{status['phase']} for {time_text(status['phase_s'])}, {step} ({which})"


def _hosts(status: StatusFacts) -> Iterator[str]:
    for host, about in status["hosts"].items():
        workers = status["workers"].get(host, 0)
        yield f"{host} ({workers} of {about['slots']} slots)"


def _state(status: StatusFacts) -> str:
    if status["generation"] is None:
        return "none is kept yet"
    age = status["generation_age_s"]
    text = f"generation {status['generation']} of step {status['generation_step']}"
    text += f", {time_text(age)} old" if age is not None else ""
    if status["next_snapshot_step"] is not None:
        text += f"; the next at step {status['next_snapshot_step']}"
    lost = status["host_loss"]
    if lost["steps"] is None:
        return f"{text}; {lost['why']}"
    return f"{text}; a lost host costs at most {lost['steps']} steps: {lost['why']}"


def _stall(host: str, stall: Mapping[str, Any]) -> str:
    ranks = ", ".join(map(str, stall["ranks"]))
    return (
        f"{host}: ranks {ranks} at step {stall['step']} for {stall['for_s']:.0f} s (stacks in the "
        "log of this host's agent)"
    )


def change_text(last: Mapping[str, Any]) -> str:
    """The report of a change, in a line."""
    phases = ", ".join(f"{name} {value:.2f}" for name, value in last["seconds"].items() if value)
    paused = f"paused {last['paused_s']:.2f} s, " if "paused_s" in last else ""
    ago_s = max(0.0, time.time() - last["at"])
    lost = f", {last['steps_lost']} steps lost" if last.get("steps_lost") else ""
    return (
        f"{time_text(ago_s)} ago, {last['reason']}: {last.get('before')} -> {last.get('after')}"
        f"{_passes(last)}: {paused}{last['total_s']:.2f} s in all ({phases}){lost}"
    )


def _passes(last: Mapping[str, Any]) -> str:
    """The passes changed by a resize, as text."""
    before, after = last.get("passes_before") or {}, last.get("passes_after") or {}
    changed = [
        f", {key.replace('_', ' ')} {before[key] or 'as given'} -> {after[key] or 'as given'}"
        for key in before.keys() & after.keys()
        if before[key] != after[key]
    ]
    return "".join(sorted(changed))


def time_text(seconds: float) -> str:
    """A duration, in at most two units."""
    whole = int(max(0.0, seconds))
    for (large, length), (small, part) in ((("d", 86400), ("h", 3600)), (("h", 3600), ("min", 60))):
        if whole >= length:
            return f"{whole // length} {large} {whole % length // part} {small}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"
