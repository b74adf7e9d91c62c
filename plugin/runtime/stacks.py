"""Where a worker stands, told on request: a signal has it write the stacks of its threads into a
file of its agent's folder, also while it waits in a collective."""

import faulthandler
import os
import signal
from pathlib import Path

from scalai.runtime.agent_folder import AGENT_DIRECTORY

STACK_SIGNAL = signal.SIGRTMIN + 9
"""A signal that neither the C library nor frameworks use. What has no handler for it would die."""


def stacks_path(directory: Path, pid: int) -> Path:
    """Return where the stacks of a worker are written, below its agent's folder."""
    return directory / f"stacks-{pid}"


def offer_stacks() -> None:
    """Worker, at its start: answer the signal. A process that is forked from it has to do so
    itself.

    Source: faulthandler of CPython, whose handler runs no Python code and so needs no lock.
    """
    directory = os.environ.get(AGENT_DIRECTORY)
    if directory is None:
        return
    file = stacks_path(Path(directory), os.getpid()).open("w")
    _files.append(file)  # it is closed with the object, and the handler has only its descriptor
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)


_files: list[object] = []
