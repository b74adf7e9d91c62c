"""``scalai doctor``: what an elastic job finds on this host, and what is in its way."""

import argparse
from pathlib import Path
from typing import Any

REFUSED = 3


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor", help="what an elastic job finds on this host, and what is in its way"
    )
    parser.add_argument("--store-dir", type=Path, help="where stores will be, if not in /dev/shm")
    parser.add_argument(
        "job_arguments", nargs=argparse.REMAINDER, metavar="-- SCALAI-RUN ARGUMENTS",
        help="a command line of scalai-run, to be checked as well",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Exit code 0: a job can be run; 3: not so."""
    from scalai.launch.commands.examination import examine  # torch, which other commands do without

    given = arguments.job_arguments
    findings = list(examine(arguments.store_dir, given[1:] if given[:1] == ["--"] else given))
    for finding in findings:
        print(f"{'no' if finding.is_fatal else 'ok'}  {finding.name:14} {finding.text}")
    return REFUSED if any(finding.is_fatal for finding in findings) else 0
