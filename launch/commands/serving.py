"""``scalai coordinator``: a job's coordinator at a stable endpoint, started by hand."""

import argparse
import math
import secrets
from typing import Any

from scalai.core.errors import UsageError
from scalai.launch.config.endpoint import TOKEN_VARIABLE, split_endpoint, take_token


def add_parser(commands: Any) -> None:
    """Add the command."""
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
    from scalai.launch.config.flags import build_parser, parse_options
    from scalai.launch.config.hostfile import expand_for_coordinator
    from scalai.launch.config.job import JobSpec
    from scalai.launch.coordinator.discovery import job_directory
    from scalai.launch.coordinator.process import serve
    from scalai.launch.logs import configure
    from scalai.runtime.handshake import job_key

    configure("coordinator")
    given = arguments.job_arguments
    given = given[1:] if given[:1] == ["--"] else given
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
    # Started by hand, before its agents: it waits for them as long as it takes.
    return serve(spec, job_directory(spec), host, port, token.encode(), math.inf)
