"""``scalai``: the commands around a job: its state, its size, its store, its checkpoints."""

import argparse
import json
import math
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scalai.core.errors import PeerError, ScalaiError, UsageError
from scalai.launch import clean, doctor, inspect, reshard, verify
from scalai.launch.card import TOKEN_VARIABLE, read_card, split_endpoint
from scalai.runtime.messages import Channel
from scalai.store.places import default_store_dir


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 input refused, 4 verification
    differs."""
    parser = argparse.ArgumentParser(prog="scalai", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_status(commands)
    _add_scale(commands)
    _add_coordinator(commands)
    inspect.add_parser(commands)
    reshard.add_parser(commands)
    verify.add_parser(commands)
    clean.add_parser(commands)
    doctor.add_parser(commands)
    arguments = parser.parse_args(argv)
    try:
        code = arguments.run(arguments)
    except ScalaiError as error:
        print(f"scalai {arguments.command}: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


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


def _call(arguments: argparse.Namespace, method: str, **values: Any) -> Any:
    """Ask the job's coordinator."""
    if arguments.coordinator is not None:
        token = os.environ.get(TOKEN_VARIABLE)
        if token is None:
            raise UsageError(f"set {TOKEN_VARIABLE} to the secret that the job was started with.")
        return Channel(split_endpoint(arguments.coordinator), token.encode()).call(method, **values)
    folder = (arguments.store_dir or default_store_dir()) / arguments.job
    card = read_card(folder)
    if card is None:
        raise PeerError(
            f"no job {arguments.job!r} runs here (looked in {folder}). Name it by --job, "
            f"--store-dir or --coordinator."
        )
    return Channel(*card).call(method, **values)


def _add_status(commands: Any) -> None:
    parser = commands.add_parser(
        "status", help="world, degrees, generation, step and last resize of a job"
    )
    _add_job(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_status)


def _status(arguments: argparse.Namespace) -> int:
    status = _call(arguments, "status")
    if arguments.json:
        print(json.dumps(status))
        return 0
    last = status.pop("last_resize")
    status["workers"] = ", ".join(f"{host}: {count}" for host, count in status["workers"].items())
    status["hosts"] = ", ".join(f"{h} ({of['slots']} slots)" for h, of in status["hosts"].items())
    for key, value in status.items():
        print(f"{key.replace('_', ' '):16} {value if value is not None else '-'}")
    if last is not None:
        phases = ", ".join(
            f"{name} {value:.2f}" for name, value in last["seconds"].items() if value
        )
        print(
            f"{'last resize':16} {last.get('before')} -> {last.get('after')} in "
            f"{last['total_s']:.2f} s ({phases})"
        )
    return 0


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
    target = _call(
        arguments,
        "scale",
        nproc=arguments.nproc,
        nnodes=arguments.nnodes,
        degrees=arguments.degrees,
        dry_run=arguments.dry_run,
    )
    print(target["reason"])
    return 0


def _add_coordinator(commands: Any) -> None:
    parser = commands.add_parser(
        "coordinator", help="serve a job from a stable endpoint, before its agents start"
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT",
        help="where to listen, if not where the agents' command line says",
    )  # fmt: skip
    parser.add_argument(
        "job_arguments", nargs=argparse.REMAINDER, metavar="-- SCALAI-RUN ARGUMENTS",
        help="the agents' command line, without the program's name",
    )  # fmt: skip
    parser.set_defaults(run=_coordinator)


def _coordinator(arguments: argparse.Namespace) -> int:
    from scalai.launch.coordinator_process import serve
    from scalai.launch.hostfile import expand_for_coordinator
    from scalai.launch.job import JobSpec
    from scalai.launch.logs import configure
    from scalai.launch.options import build_parser
    from scalai.launch.places import job_directory

    configure("coordinator")
    given = arguments.job_arguments
    given = given[1:] if given[:1] == ["--"] else given
    spec = JobSpec.read(expand_for_coordinator(given, build_parser().parse_args(given)))
    endpoint = arguments.listen or spec.options.coordinator
    if endpoint is None:
        raise UsageError(
            "say where to listen: --listen HOST:PORT, or among the agents' flags --coordinator or "
            "a --hostfile of several hosts."
        )
    host, port = split_endpoint(endpoint)
    token = os.environ.get(TOKEN_VARIABLE)
    if token is None:
        token = secrets.token_hex(32)
        print(f"export {TOKEN_VARIABLE}={token}   # on every host, before scalai-run", flush=True)
    # Started by hand, before its agents: it waits for them as long as it takes.
    return serve(spec, job_directory(spec), host, port, token.encode(), math.inf)


if __name__ == "__main__":
    main()
