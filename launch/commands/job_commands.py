"""Commands around a job: ``scalai status``, ``scale``, ``resume``, ``coordinator``, ``doctor``.

Imports of torch wait until a command runs: ``scalai --help`` reads this module.
"""

import argparse
import contextlib
import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scalai.core.degrees.degrees import parse_request
from scalai.core.errors import PeerError, UsageError
from scalai.core.exit_codes import REFUSED
from scalai.core.messages.shared import JsonText, Request
from scalai.launch.commands.status import WAIT_S, add_flags, await_change, seconds, show
from scalai.launch.config import slurm
from scalai.launch.config.endpoint import (
    TOKEN_VARIABLE,
    JobEnding,
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
        commands, "status", "Print layout, hosts, state, risk and last change of a job.",
        _status,
    )  # fmt: skip
    add_flags(status)
    scale = _add_asking(
        commands, "scale",
        "Change the number of workers or hosts, or the degrees, of a running job. The request "
        "holds until the next one, also over a restart of the job.", _scale,
    )  # fmt: skip
    scale.add_argument("--nproc", type=int, metavar="N", help="number of workers in total")
    scale.add_argument("--nnodes", type=int, metavar="N", help="largest number of hosts")
    scale.add_argument("--degrees", metavar="WISH", help="degrees, such as 'tp2 pp1'")
    scale.add_argument(
        "--wait", type=seconds, nargs="?", const=WAIT_S, metavar="S",
        help=f"return once the job trains so, at most after S seconds ({WAIT_S:g})",
    )  # fmt: skip
    scale.add_argument(
        "--kubernetes", metavar="JOB",
        help="set the pods of this Indexed Job to --nnodes; for a pod whose service account may "
        "get and patch it",
    )  # fmt: skip
    _add_dry_run(scale, "the change")
    _add_json(scale)
    resume = _add_asking(
        commands, "resume",
        "Let a job that waits for its newest state continue from an older generation. All newer "
        "generations are given up.", _resume,
    )  # fmt: skip
    resume.add_argument(
        "--generation", type=int, required=True, metavar="N", help="generation to continue from"
    )
    _add_dry_run(resume, "the generations to be given up")
    _add_json(resume)
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
    _add_json(doctor)


def _add_asking(commands: Any, name: str, about: str, run: Run) -> argparse.ArgumentParser:
    """A command that asks the coordinator of a job."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    parser.add_argument("--job", default="default", help="name of the job (default: %(default)s)")
    add_way(parser)
    parser.set_defaults(run=run)
    return parser


def add_way(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the way to a job's coordinator."""
    parser.add_argument(
        "--store-dir", type=Path, metavar="DIR",
        help="folder of the job's stores (default: /dev/shm)",
    )  # fmt: skip
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT|slurm",
        help=f"the job's coordinator, if on another machine; needs {TOKEN_VARIABLE}",
    )  # fmt: skip
    add_removed_flags(parser)


def _add_dry_run(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--dry-run", action="store_true", help=f"print {what}, and change nothing")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")


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


def ask(arguments: argparse.Namespace, request: Request[JsonText]) -> Any:
    """Ask the job's coordinator; a job on this machine is found by its card."""
    refuse_variables()
    if arguments.coordinator is not None:
        token = take_token(check_job(arguments.job))
        if token is None:
            raise UsageError(f"set {TOKEN_VARIABLE} to the secret that the job was started with.")
        return _answer(
            split_endpoint(slurm.endpoint(arguments.coordinator)), token.encode(), request
        )
    folder = _folder(arguments)
    card = read_card(folder)
    if card is None:
        raise PeerError(
            f"no job {arguments.job!r} runs here (looked in {folder}). "
            f"{read_ending(folder) or 'Name it by --job, --store-dir or --coordinator.'}"
        )
    return _answer(*card, request)


def _folder(arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.store_dir or default_store_dir()
    return folder / check_job(arguments.job)


def _ending(arguments: argparse.Namespace) -> JobEnding | None:
    """The end of a job that had a coordinator on this machine; None: unknown."""
    if arguments.coordinator is not None:
        return None
    folder = _folder(arguments)
    if not folder.exists():
        raise PeerError(f"the job has ended: {folder} is gone, as after a job with --standalone.")
    return read_ending(folder)


def _answer(address: tuple[str, int], token: bytes, request: Request[JsonText]) -> Any:
    with contextlib.closing(Channel(address, token)) as channel:
        return channel.call(request).value()


def _status(arguments: argparse.Namespace) -> int:
    return show(arguments, lambda: ask(arguments, calls.Status()), lambda: _ending(arguments))


def _scale(arguments: argparse.Namespace) -> int:
    if arguments.nproc is None and arguments.nnodes is None and arguments.degrees is None:
        raise UsageError("say what to change: --nproc N, --nnodes N or --degrees 'tp2 pp1'.")
    if arguments.kubernetes is not None:
        return _scale_kubernetes(arguments)
    if arguments.degrees is not None:
        parse_request(arguments.degrees)  # a slip needs no job to be seen
    scale = calls.Scale(
        arguments.nproc, arguments.nnodes, arguments.degrees, dry_run=arguments.dry_run
    )
    answer = ask(arguments, scale)
    _print_answer(answer, arguments)
    if arguments.wait is None or arguments.dry_run:
        return 0
    return await_change(lambda: ask(arguments, calls.Status()), answer, arguments.wait)


def _scale_kubernetes(arguments: argparse.Namespace) -> int:
    from scalai.launch.commands.kubernetes_job import FLAG, scale_job

    if arguments.nproc is not None or arguments.degrees is not None:
        raise UsageError(
            f"{FLAG} changes the number of pods alone: give it --nnodes N, and --nproc or "
            "--degrees in another call."
        )
    change = scale_job(arguments.kubernetes, arguments.nnodes, is_dry=arguments.dry_run)
    _print_answer({"reason": change}, arguments)
    return 0


def _print_answer(answer: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps({"dry_run": arguments.dry_run, **answer}))
        return
    print("dry run, nothing is changed: " * arguments.dry_run + answer["reason"])
    for line in answer.get("schedule", ()):
        print(f"  {line}")


def _resume(arguments: argparse.Namespace) -> int:
    answer = ask(arguments, calls.Resume(arguments.generation, dry_run=arguments.dry_run))
    _print_answer(answer, arguments)
    return 0


def _coordinator(arguments: argparse.Namespace) -> int:
    from scalai.launch.config.flags import build_parser, parse_options
    from scalai.launch.config.hostfile import expand_for_coordinator
    from scalai.launch.config.job_spec import JobSpec
    from scalai.launch.coordinator.discovery import job_directory
    from scalai.launch.coordinator.process import serve
    from scalai.launch.logs import configure
    from scalai.runtime.handshake import job_key

    given = _job_arguments(arguments)
    expanded = expand_for_coordinator(given, build_parser().parse_args(given))
    options = parse_options(expanded)
    configure("coordinator", options.log_format, options.log_level)
    spec = JobSpec.read(options)
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
    if arguments.json:
        is_ready = not any(finding.is_fatal for finding in findings)
        print(json.dumps({"is_ready": is_ready, "findings": list(map(asdict, findings))}))
        return 0 if is_ready else REFUSED
    for finding in findings:
        print(f"{'no' if finding.is_fatal else 'ok'}  {finding.name:14} {finding.text}")
    return REFUSED if any(finding.is_fatal for finding in findings) else 0
