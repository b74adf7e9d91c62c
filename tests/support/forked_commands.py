"""Runs command lines of ``scalai`` and ``scalai-run`` in forks of one interpreter: importing torch
costs more than all of them.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 60
"""Longest run of a command; later SIGALRM ends it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The exit code of a command, and what it said."""

    code: int
    said: str


def ends(lines: Sequence[Sequence[str]], folder: Path) -> list[Ended]:
    """Run command lines, each of which may begin with ``NAME=value`` of its environment.

    Args:
        lines: Words of each.
        folder: Where they run.
    """
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(lines), stdout=subprocess.PIPE, text=True,
        cwd=folder, timeout=LIMIT_S * 8, check=True,
    )  # fmt: skip
    return [Ended(*found) for found in json.loads(done.stdout)]


def _end_of(words: Sequence[str]) -> tuple[int, str]:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            signal.alarm(LIMIT_S)
            _run(words)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return code, output.read().decode(errors="replace")


def _run(words: Sequence[str]) -> None:
    from scalai.launch import cli

    variables = [word for word in words if "=" in word.partition(" ")[0] and word[0].isupper()]
    for word in variables:
        name, _, os.environ[name] = word.partition("=")
    program, *arguments = words[len(variables) :]
    sys.argv = [program, *arguments]
    code: object = 1
    try:
        (cli.scalai_run if program == "scalai-run" else cli.main)()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)  # the usual end takes torch apart


def _main() -> None:
    import torch  # noqa: F401

    import scalai.launch.run  # noqa: F401
    from scalai.launch import cli

    for name in set(cli.MODULES.values()):
        __import__(f"scalai.launch.commands.{name}")
    found = [_end_of(words) for words in json.load(sys.stdin)]
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
