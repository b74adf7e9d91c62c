"""The folder between the workers of a host and their agent: socket, token, stacks on request.

Sockets are reached by the folder's descriptor: a socket's path has room for 107 bytes only, and
names of hosts and jobs on a cluster are longer. On a signal a worker writes the stack of its main
thread into this folder, also during a collective.
"""

import faulthandler
import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from scalai.core.messages.shared import Request
from scalai.runtime.calls import Channel
from scalai.store.secure import Folder

Answer = TypeVar("Answer")

AGENT_DIRECTORY = "SCALAI_AGENT"
"""Environment variable: directory with the agent's socket, token and control page."""
SOCKET = "agent.sock"
TOKEN = "token"
CONNECT_S = 120.0
"""Longest wait of a worker for its own agent, possibly busy or paused."""

STACK_SIGNAL = signal.SIGRTMIN + 9
"""A signal unused by the C library and frameworks. A process without a handler for it would die."""


def call_agent(directory: str) -> Channel:
    """Return a worker's connection to the agent of this directory.

    A call may take as long as the agent lives: others of the job may have to come first.

    Raises:
        PeerError: The agent does not answer.
        StoreError: The directory is not this user's alone.
    """
    with Folder.open(Path(directory)) as folder:
        path, token = folder.reach(SOCKET), folder.read(TOKEN)
        return Channel(path, token, call_s=None, connect_s=CONNECT_S)


def round_number() -> int:
    """Return the number of this worker's round, as torchrun counts them, from 1."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1


def tell_agent(request: Callable[[int, int], Request[Answer]]) -> Answer:
    """Call the agent of this worker beside the worker's session: it may have none.

    Args:
        request: Returns the request of a rank and a round.

    Raises:
        PeerError: The agent does not answer, or has ended this round.
    """
    with closing(call_agent(os.environ[AGENT_DIRECTORY])) as channel:
        return channel.call(request(int(os.environ.get("RANK", "0")), round_number()))


def stacks_path(directory: Path, pid: int) -> Path:
    """Return the file of a worker's stacks, below its agent's folder."""
    return directory / f"stacks-{pid}"


def offer_stacks() -> None:
    """Worker, at its start: answer the signal. A fork must call this itself.

    Source: faulthandler of CPython: its handler runs no Python code and so needs no lock. For the
    same reason it may not read the frames of other threads, which go on: their memory may be gone,
    and the process with it.
    """
    directory = os.environ.get(AGENT_DIRECTORY)
    if directory is None:
        return
    file = stacks_path(Path(directory), os.getpid()).open("w")
    _files.append(file)  # the file closes with the object; the handler has only its descriptor
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=False, chain=False)


_files: list[object] = []
