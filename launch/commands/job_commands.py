"""Commands around a job: ``scalai status``, ``scale``, ``resume``, ``coordinator``, ``doctor``.

Imports of torch wait until a command runs: ``scalai --help`` reads this module.
"""

import argparse
import contextlib
import json
import math
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scalai.core.degrees.degrees import parse_request
from scalai.core.errors import PeerError, UsageError
from scalai.core.exit_codes import REFUSED
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

Run = Callable[[argparse.Namespace], int]


def add_parser(commands: Any) -> None:
    """Add the commands."""
    status = _add_asking(
        commands, "status", "Print world, degrees, generation, step and last resize of a job.",
        _status,
    )  # fmt: skip
    status.add_argument("--json", action="store_true", help="print JSON")
    scale = _add_asking(
        commands, "scale",
        "Change the number of workers or hosts, or the degrees, of a running job. The request "
        "holds until the next one, also over a restart of the job.", _scale,
    )  # fmt: skip
    scale.add_argument("--nproc", type=int, metavar="N", help="number of workers in total")
    scale.add_argument("--nnodes", type=int, metavar="N", help="largest number of hosts")
    scale.add_argument("--degrees", metavar="WISH", help="degrees, such as 'tp2 pp1'")
    _add_dry_run(scale, "the change")
    resume = _add_asking(
        commands, "resume",
        "Let a job that waits for its newest state continue from an older generation. All newer "
        "generations are given up.", _resume,
    )  # fmt: skip
    resume.add_argument(
        "--generation", type=int, required=True, metavar="N", help="generation to continue from"
    )
    _add_dry_run(resume, "the generations to be given up")
    coordinator = _add_with_job(
        commands, "coordinator",
        "Serve a job from a stable endpoint, before its agents start.", _coordinator,
        "the agents' command line, without the program's name",
    )  # fmt: skip
    coordinator.add_argument(
        "--listen", metavar="HOST:PORT", help="address (default: --coordinator of the command line)"
    )
    doctor = _add_with_job(
        commands, "doctor",
        "Check this host for elastic jobs: versions, memory, devices, network, locks of builds. "
        "Exit code 3: a job cannot run here.", _doctor,
        "a command line of scalai-run, to check as well",
    )  # fmt: skip
    doctor.add_argument(
        "--store-dir", type=Path, metavar="DIR", help="folder of the stores (default: /dev/shm)"
    )


def _add_asking(commands: Any, name: str, about: str, run: Run) -> argparse.ArgumentParser:
    """A command that asks the coordinator of a job."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    parser.add_argument("--job", default="default", help="name of the job (default: %(default)s)")
    parser.add_argument(
        "--store-dir", type=Path, metavar="DIR",
        help="folder of the job's stores (default: /dev/shm)",
    )  # fmt: skip
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT",
        help=f"the job's coordinator, if on another machine; needs {TOKEN_VARIABLE}",
    )  # fmt: skip
    add_removed_flags(parser)
    parser.set_defaults(run=run)
    return parser


def _add_dry_run(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--dry-run", action="store_true", help=f"print {what}, and change nothing")


def _add_with_job(
    commands: Any, name: str, about: str, run: Run, rest: str
) -> argparse.ArgumentParser:
    """A command with a command line of ``scalai-run`` behind ``--``."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    parser.add_argument(
        "job_arguments", nargs=argparse.REMAINDER, metavar="-- SCALAI-RUN ARGUMENTS", help=rest
    )
    parser.set_defaults(run=run)
    return parser


def _job_arguments(arguments: argparse.Namespace) -> list[str]:
    given: list[str] = arguments.job_arguments
    return given[1:] if given[:1] == ["--"] else given


def _ask(arguments: argparse.Namespace, request: Request[JsonText]) -> Any:
    """Ask the job's coordinator; a job on this machine is found by its card."""
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
    """The passes changed by a resize, as text."""
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


def _scale(arguments: argparse.Namespace) -> int:
    if arguments.nproc is None and arguments.nnodes is None and arguments.degrees is None:
        raise UsageError("say what to change: --nproc N, --nnodes N or --degrees 'tp2 pp1'.")
    if arguments.degrees is not None:
        parse_request(arguments.degrees)  # a slip needs no job to be seen
    scale = calls.Scale(
        arguments.nproc, arguments.nnodes, arguments.degrees, dry_run=arguments.dry_run
    )
    _print_reason(_ask(arguments, scale), is_dry=arguments.dry_run)
    return 0


def _print_reason(answer: Mapping[str, Any], *, is_dry: bool) -> None:
    print("dry run, nothing is changed: " * is_dry + answer["reason"])


def _resume(arguments: argparse.Namespace) -> int:
    answer = _ask(arguments, calls.Resume(arguments.generation, dry_run=arguments.dry_run))
    _print_reason(answer, is_dry=arguments.dry_run)
    return 0


def _coordinator(arguments: argparse.Namespace) -> int:
    from scalai.launch.config.flags import build_parser, parse_options
    from scalai.launch.config.hostfile import expand_for_coordinator
    from scalai.launch.config.job_spec import JobSpec
    from scalai.launch.coordinator.discovery import job_directory
    from scalai.launch.coordinator.process import serve
    from scalai.launch.logs import configure
    from scalai.runtime.handshake import job_key

    configure("coordinator")
    given = _job_arguments(arguments)
    expanded = expand_for_coordinator(given, build_parser().parse_args(given))
    spec = JobSpec.read(parse_options(expanded))
    endpoint = arguments.listen or spec.options.coordinator
    if endpoint is None:
        raise UsageError(
            "say where to listen: --listen HOST:PORT, or among the agents' flags --coordinator or "
            "a --hostfile of several hosts."
        )
    host, port = split_endpoint(endpoint)
    token = take_token(spec.job)
    if token is None:
        secret = secrets.token_hex(32)
        print(f"export {TOKEN_VARIABLE}={secret}   # on every host, before scalai-run", flush=True)
        token = job_key(secret, spec.job)
    # Started by hand, before its agents: there is no deadline for them.
    return serve(spec, job_directory(spec), host, port, token.encode(), math.inf)


def _doctor(arguments: argparse.Namespace) -> int:
    """Print the report. Exit code 0: a job can run here; 3: it cannot."""
    from scalai.launch.commands.doctor import examine

    findings = list(examine(arguments.store_dir, _job_arguments(arguments)))
    for finding in findings:
        print(f"{'no' if finding.is_fatal else 'ok'}  {finding.name:14} {finding.text}")
    return REFUSED if any(finding.is_fatal for finding in findings) else 0
