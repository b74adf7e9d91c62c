"""Finding a job's coordinator, or starting it beside the first agent."""

import fcntl
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scalai.core.errors import PeerError, UsageError
from scalai.launch.card import CARD, TOKEN_VARIABLE, read_card, split_endpoint
from scalai.launch.job import JobSpec
from scalai.runtime.messages import Channel
from scalai.store.places import default_store_dir

JOIN_TIMEOUT_S = 60.0


def job_directory(spec: JobSpec) -> Path:
    """Return this machine's folder of the job, made if it is not there."""
    folder = (spec.store_dir or default_store_dir()) / spec.job
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job's coordinator is, the job's token, and whether this agent has just started it."""

    address: tuple[str, int]
    token: bytes
    is_new: bool = False


def find_coordinator(spec: JobSpec) -> Place:
    """Return where the job's coordinator is; start one beside this agent where there is none.

    Agents on one machine find it by a card in the job's folder. With ``--coordinator HOST:PORT`` it
    is started on that host by the first agent there; other hosts wait for it.

    Raises:
        UsageError: Several hosts, and no token in the environment.
        PeerError: Nobody answers there within the time.
    """
    endpoint, folder = spec.options.coordinator, job_directory(spec)
    if endpoint is None or _is_here(split_endpoint(endpoint)[0]):
        with _one_at_a_time(folder):
            card = read_card(folder)
            if card is not None:
                return Place(*card)
            return Place(*_start_coordinator(spec, folder, endpoint), is_new=True)
    token = os.environ.get(TOKEN_VARIABLE)
    if token is None:
        raise UsageError(
            f"the coordinator {endpoint} is on another host; set {TOKEN_VARIABLE} to the same "
            f"secret on all hosts, "
            "for example to the output of: openssl rand -hex 32"
        )
    address = split_endpoint(endpoint)
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while True:
        try:
            Channel(address, token.encode()).close()
            return Place(address, token.encode())
        except PeerError as error:
            if time.monotonic() > deadline:
                raise PeerError(
                    f"no coordinator at {endpoint} after {JOIN_TIMEOUT_S:.0f} s ({error}). Start "
                    f"the agent of that "
                    "host, or `scalai coordinator` there."
                ) from error
            time.sleep(0.2)


def _start_coordinator(
    spec: JobSpec, folder: Path, endpoint: str | None
) -> tuple[tuple[str, int], bytes]:
    """Start a coordinator that outlives this agent, and wait until it answers."""
    (folder / CARD).unlink(missing_ok=True)
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(32)
    host, port = split_endpoint(endpoint) if endpoint else ("127.0.0.1", 0)
    process = subprocess.Popen(
        [sys.executable, "-m", "scalai.launch.coordinator_process", str(folder), f"{host}:{port}"],
        stdin=subprocess.PIPE,
        env={**os.environ, TOKEN_VARIABLE: token},
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(spec.to_json()).encode())
    process.stdin.close()
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while time.monotonic() < deadline:
        card = read_card(folder)
        if card is not None:
            return card
        if process.poll() is not None:
            break
        time.sleep(0.02)
    raise PeerError(
        f"the coordinator does not answer (exit code {process.poll()}). Is {host}:{port} free? "
        f"Name another "
        "--coordinator HOST:PORT."
    )


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Keep two agents of one machine from both starting a coordinator."""
    with open(folder / "coordinator.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_here(host: str) -> bool:
    """Whether an address of ``host`` can be bound on this machine."""
    try:
        for family, kind, *_, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as probe:
                try:
                    probe.bind(address)
                    return True
                except OSError:
                    continue
    except socket.gaierror as error:
        raise UsageError(
            f"--coordinator names host {host!r}, which is unknown: {error}."
        ) from error
    return False
