"""``scalai``, the commands around a job: its state, its size, its store, its checkpoints; and the
start of ``scalai-run``.
"""

import importlib
import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence

from scalai.launch.config.parser import Parser
from scalai.launch.program import exit_code_of
from scalai.runtime.processes import without_collections

ABOUT = "The commands around a job: its state, its size, its store, its checkpoints."
MODULES = {
    **dict.fromkeys(("status", "scale", "resume", "coordinator", "doctor"), "job_commands"),
    "inspect": "inspect", "reshard": "reshard", "verify": "verify", "clean": "clean",
    "history": "history", "plot": "history", "chaos": "chaos", "plan": "plan_layout",
    "ledger": "ledger_report", "mount": "mount", "unmount": "mount", "autoscale": "autoscale",
    "background": "background",
}  # fmt: skip
"""Module of each command. Only the module in use is imported: converters take time and memory."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 input refused, 4 verification
    differs.
    """
    parser = Parser(prog="scalai", description=ABOUT)
    version = importlib.metadata.version("scalai")
    parser.add_argument("--version", action="version", version=f"scalai {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    given = sys.argv[1:] if argv is None else argv
    asked = given[0] if given else None
    # All of them for the list of commands.
    wanted = {MODULES[asked]} if asked in MODULES else dict.fromkeys(MODULES.values())
    for name in wanted:
        importlib.import_module(f"scalai.launch.commands.{name}").add_parser(commands)

    def run() -> int:
        arguments = parser.parse_args(given)
        return int(arguments.run(arguments))

    sys.exit(exit_code_of(f"scalai {asked}" if asked in MODULES else "scalai", run))


def scalai_run() -> None:
    """Entry point of ``scalai-run``; also reports a missing torch.

    SIGTERM ends the imports as a job that never began (``RESUMABLE``): without a handler a
    container's process 1 would ignore it until the end of the grace period.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(os.EX_TEMPFAIL))

    def run() -> int:
        with without_collections():
            from scalai.launch.run import main
        main()
        return 0

    sys.exit(exit_code_of("scalai-run", run))


if __name__ == "__main__":
    main()
