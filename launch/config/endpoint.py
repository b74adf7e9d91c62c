"""The coordinator's card: how agents and commands on one machine find a job's coordinator."""

import contextlib
import ctypes
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalai.core.errors import (
    AbsentError,
    PeerError,
    ScalaiError,
    SilentError,
    UnprovenError,
    UsageError,
    VersionError,
)
from scalai.runtime.calls import CONNECT_S, Channel
from scalai.runtime.handshake import job_key
from scalai.store.secure import open_below

TOKEN_VARIABLE = "SCALAI_JOB_TOKEN"
"""Environment variable: the job's secret, where hosts do not share a machine."""
CARD = "coordinator.json"
ENDED = "coordinator.ended.json"
ATTEMPTS, PAUSE_S = 4, 0.2
"""How often a coordinator is asked whose connections break, and how long it is left between."""

TOKEN_CHARACTERS = 16
"""A shorter secret is soon guessed by a false server that was sent one proof."""


def take_token(job: str) -> str | None:
    """Return the key that follows from the job's secret in the environment (``job_key``), None
    where there is none, and take the secret out of there: what this process starts does not inherit
    it, and nobody reads it in ``/proc``.

    Raises:
        UsageError: It is too short.
    """
    secret = os.environ.get(TOKEN_VARIABLE)
    if secret is None:
        return None
    _wipe(TOKEN_VARIABLE, len(os.fsencode(secret)))
    del os.environ[TOKEN_VARIABLE]
    if len(secret) < TOKEN_CHARACTERS:
        raise UsageError(
            f"{TOKEN_VARIABLE} has {len(secret)} characters; at least {TOKEN_CHARACTERS} are "
            "needed so that nobody guesses it. Take the output of: openssl rand -hex 32"
        )
    return job_key(secret, job)


def _wipe(variable: str, size_bytes: int) -> None:
    """Overwrite the value that the process was started with: the kernel shows it for ever."""
    find = ctypes.CDLL(None).getenv
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    place = find(variable.encode())
    if place is not None:
        ctypes.memset(place, ord("*"), size_bytes)


def read_card(
    folder: Path, *, answer_s: float = CONNECT_S, pause_s: float = PAUSE_S
) -> tuple[tuple[str, int], bytes] | None:
    """Return the address and token of a live coordinator that left its card in the job's folder,
    else None.

    Args:
        answer_s: How long it may take to answer.
        pause_s: How long it is left alone after its connection has broken.

    Raises:
        PeerError: There is one, or something else, and it does not answer.
        StoreError: The folder is not this user's alone.
    """
    try:
        with open_below(folder.parent, folder.name) as job:
            text = job.read(CARD)
    except FileNotFoundError:
        return None
    found = _parse(text)
    if found is None or not _answers(*found, answer_s, pause_s):
        return None
    return found


def _parse(text: bytes) -> tuple[tuple[str, int], bytes] | None:
    """Return the address and token of a card, None where it is torn."""
    try:
        card = json.loads(text)
        return (str(card["host"]), int(card["port"])), bytes.fromhex(card["token"])
    except (ValueError, KeyError, TypeError):
        return None


def _answers(address: tuple[str, int], token: bytes, answer_s: float, pause_s: float) -> bool:
    """Whether a coordinator of the job is there. Raises ``PeerError`` where that cannot be told."""
    for attempt in range(ATTEMPTS):
        try:
            Channel(address, token, connect_s=answer_s).close()
            return True
        except VersionError:
            raise
        except (AbsentError, UnprovenError):
            return False
        except PeerError as error:
            if isinstance(error, SilentError) or attempt == ATTEMPTS - 1:
                raise PeerError(
                    f"the job's coordinator at {address[0]}:{address[1]} does not answer ({error}) "
                    "Its process may be paused, or its machine overloaded: look for "
                    "scalai.launch.coordinator.process, and end it if it hangs."
                ) from error
            time.sleep(pause_s)  # it may just have ended
    return False


@dataclass(frozen=True, slots=True)
class Holder:
    """Whose card it is: the how-manieth coordinator of the job, and its process."""

    term: int
    pid: int


def read_holder(folder: Path) -> Holder | None:
    """Return whose card lies in the job's folder, whether it lives or not; None: no card does, so
    no coordinator has died here. Raises ``StoreError`` as ``read_card``."""
    try:
        with open_below(folder.parent, folder.name) as job:
            card = json.loads(job.read(CARD))
        return Holder(int(card["term"]), int(card["pid"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):  # torn
        return Holder(1, 0)


def write_card(folder: Path, address: tuple[str, int], token: bytes, term: int = 1) -> None:
    """Leave the card of this process, readable by this user alone. Raises ``StoreError`` where that
    cannot be."""
    card: Mapping[str, Any] = {
        "host": address[0],
        "port": address[1],
        "token": token.hex(),
        "term": term,
        "pid": os.getpid(),
    }
    with open_below(folder.parent, folder.name) as job:
        job.write(CARD, json.dumps(card).encode())
        with contextlib.suppress(FileNotFoundError):
            job.remove(ENDED)


def write_ending(folder: Path, code: int, reason: str) -> None:
    """Leave word of how the job has ended, for who asks for it. Raises as ``write_card``."""
    ending = {"code": code, "reason": reason, "at": time.time()}
    with open_below(folder.parent, folder.name) as job:
        job.write(ENDED, json.dumps(ending).encode())


def read_ending(folder: Path) -> str:
    """Return how the last job of this name has ended, as a sentence; empty where nobody has said
    it."""
    try:
        with open_below(folder.parent, folder.name) as job:
            found = json.loads(job.read(ENDED))
        ago_s = max(0.0, time.time() - float(found["at"]))
        return f"The last one ended {ago_s:.0f} s ago, exit code {found['code']}: {found['reason']}"
    except (OSError, ScalaiError, ValueError, KeyError, TypeError):
        return ""


def remove_card(folder: Path, of: tuple[str, int] | None = None) -> None:
    """Take the card away, if it is there; only that of the coordinator that listens at ``of``,
    where that is named. Whoever calls holds the lock of the job's folder."""
    with contextlib.suppress(FileNotFoundError), open_below(folder.parent, folder.name) as job:
        found = _parse(job.read(CARD))
        if of is None or (found is not None and found[0] == of):
            job.remove(CARD)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; an IPv6 address stands in brackets."""
    name, _, port = endpoint.rpartition(":")
    is_bracketed = name.startswith("[") and name.endswith("]")
    host = name[1:-1] if is_bracketed else name
    # A colon without brackets: an address, and nobody can tell whether its end is a port.
    if not host or not port.isdecimal() or (":" in host and not is_bracketed):
        raise UsageError(
            f"--coordinator {endpoint} is not HOST:PORT, or [ADDRESS]:PORT with an IPv6 address."
        )
    return host, int(port)


def join_endpoint(host: str, port: int) -> str:
    """Return what ``split_endpoint`` splits into these; ``host`` may stand in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
