"""``scalai status``, ``scale`` and ``resume``: what a person asks a running job."""

import argparse
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalai.core.errors import PeerError, UsageError
from scalai.core.messages.shared import JsonText, Request
from scalai.launch.config.endpoint import (
    TOKEN_VARIABLE,
    read_card,
    read_ending,
    split_endpoint,
    take_token,
)
from scalai.launch.config.removed import add_removed_flags, refuse_variables
from scalai.launch.coordinator import person_calls as calls
from scalai.runtime.calls import Channel
from scalai.store.places import check_job, default_store_dir


def add_parser(commands: Any) -> None:
    """Add the three commands."""
    _add_status(commands)
    _add_scale(commands)
    _add_resume(commands)


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", default="default", help="name of the job (default: %(default)s)")
    parser.add_argument(
        "--store-dir", type=Path, help="where the job's stores are, if not in /dev/shm"
    )
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="where the coordinator is, if not on this machine",
    )
    add_removed_flags(parser)


def _ask(arguments: argparse.Namespace, request: Request[JsonText]) -> Any:
    """Ask the job's coordinator."""
    refuse_variables()
    if arguments.coordinator is not None:
        token = take_token(check_job(arguments.job))
        if token is None:
            raise UsageError(f"set {TOKEN_VARIABLE} to the secret that the job was started with.")
        return _answer(split_endpoint(arguments.coordinator), token.encode(), request)
    folder = (arguments.store_dir or default_store_dir()) / check_job(arguments.job)
    card = read_card(folder)
    if card is None:
        raise PeerError(
            f"no job {arguments.job!r} runs here (looked in {folder}). "
            f"{read_ending(folder) or 'Name it by --job, --store-dir or --coordinator.'}"
        )
    return _answer(*card, request)


def _answer(address: tuple[str, int], token: bytes, request: Request[JsonText]) -> Any:
    with contextlib.closing(Channel(address, token)) as channel:
        return channel.call(request).value()


def _add_status(commands: Any) -> None:
    parser = commands.add_parser(
        "status", help="world, degrees, generation, step and last resize of a job"
    )
    _add_job(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_status)


def _status(arguments: argparse.Namespace) -> int:
    status = _ask(arguments, calls.Status())
    if arguments.json:
        print(json.dumps(status))
        return 0
    last, stalls, missing = status.pop("last_resize"), status["no_progress"], status.pop("missing")
    waits = [f"{host}: {what}" for host, what in status.pop("held").items()]
    status["waits_for"] = "; ".join(waits) or missing
    status["workers"] = ", ".join(f"{host}: {count}" for host, count in status["workers"].items())
    status["hosts"] = ", ".join(f"{h} ({of['slots']} slots)" for h, of in status["hosts"].items())
    unhealthy = status.pop("unhealthy_hosts")
    status["unhealthy"] = "; ".join(f"{h}: {why}" for h, why in unhealthy.items()) or None
    failure = status["last_failure"]
    status["last_failure"] = failure and f"{failure['host']}: {failure['kind']}"
    status["no_progress"] = "; ".join(_describe_stall(*stall) for stall in stalls.items()) or None
    for key, value in status.items():
        print(f"{key.replace('_', ' '):16} {value if value is not None else '-'}")
    if last is not None:
        phases = ", ".join(
            f"{name} {value:.2f}" for name, value in last["seconds"].items() if value
        )
        paused = f"paused {last['paused_s']:.2f} s, " if "paused_s" in last else ""
        print(
            f"{'last resize':16} {last.get('before')} -> {last.get('after')}{_passes(last)}: "
            f"{paused}{last['total_s']:.2f} s in all ({phases})"
        )
    return 0


def _passes(last: Mapping[str, Any]) -> str:
    """Return what of the passes a resize has changed."""
    before, after = last.get("passes_before") or {}, last.get("passes_after") or {}
    changed = [
        f", {key.replace('_', ' ')} {before[key] or 'as given'} -> {after[key] or 'as given'}"
        for key in before.keys() & after.keys()
        if before[key] != after[key]
    ]
    return "".join(sorted(changed))


def _describe_stall(host: str, stall: Mapping[str, Any]) -> str:
    ranks = ", ".join(map(str, stall["ranks"]))
    return (
        f"{host}: ranks {ranks} at step {stall['step']} for {stall['for_s']:.0f} s (stacks in the "
        "log of this host's agent)"
    )


def _add_scale(commands: Any) -> None:
    parser = commands.add_parser(
        "scale", help="change the number of workers or hosts of a running job"
    )
    _add_job(parser)
    parser.add_argument("--nproc", type=int, metavar="N", help="workers in total")
    parser.add_argument("--nnodes", type=int, metavar="N", help="hosts at most")
    parser.add_argument("--degrees", metavar="WISH", help="degrees to take, such as 'tp2 pp1'")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be taken and change nothing"
    )
    parser.set_defaults(run=_scale)


def _scale(arguments: argparse.Namespace) -> int:
    if arguments.nproc is None and arguments.nnodes is None and arguments.degrees is None:
        raise UsageError("say what to change: --nproc N, --nnodes N or --degrees 'tp2 pp1'.")
    scale = calls.Scale(
        arguments.nproc, arguments.nnodes, arguments.degrees, dry_run=arguments.dry_run
    )
    _print_reason(_ask(arguments, scale), is_dry=arguments.dry_run)
    return 0


def _print_reason(answer: Mapping[str, Any], *, is_dry: bool) -> None:
    print("dry run, nothing is changed: " * is_dry + answer["reason"])


def _add_resume(commands: Any) -> None:
    parser = commands.add_parser(
        "resume", help="have a job that waits for its newest state go on from an older one"
    )
    _add_job(parser)
    parser.add_argument(
        "--generation", type=int, required=True, metavar="N",
        help="the generation to go on from; newer ones are given up",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be given up and change nothing"
    )
    parser.set_defaults(run=_resume)


def _resume(arguments: argparse.Namespace) -> int:
    answer = _ask(arguments, calls.Resume(arguments.generation, dry_run=arguments.dry_run))
    _print_reason(answer, is_dry=arguments.dry_run)
    return 0
