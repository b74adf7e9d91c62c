"""The coordinator's card: the way from agents and commands on one machine to a job's
coordinator."""

import contextlib
import ctypes
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
"""Environment variable with the job's secret, for hosts on several machines."""
CARD = "coordinator.json"
ENDED = "coordinator.ended.json"
ATTEMPTS, PAUSE_S = 4, 0.2
"""Attempts at a coordinator after broken connections, and seconds between them."""

HIGHEST_PORT = 65535
TOKEN_CHARACTERS = 16
"""Least length of a secret: a false server with one proof soon guesses a shorter one."""


def take_token(job: str) -> str | None:
    """Return the key of the job's secret in the environment (``job_key``), or None.

    Removes the secret from the environment: child processes do not inherit it, and ``/proc`` does
    not show it.

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
    """Overwrite the initial value of a variable; the kernel would show it for ever."""
    find = ctypes.CDLL(None).getenv
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    place = find(variable.encode())
    if place is not None:
        ctypes.memset(place, ord("*"), size_bytes)


def read_card(
    folder: Path, *, answer_s: float = CONNECT_S, pause_s: float = PAUSE_S
) -> tuple[tuple[str, int], bytes] | None:
    """Return the address and token of a live coordinator from the card in the job's folder, or
    None.

    Args:
        answer_s: Seconds to wait for an answer.
        pause_s: Seconds to wait after a broken connection.

    Raises:
        PeerError: A coordinator, or another process, is there and does not answer.
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
    """Return the address and token of a card, None for a torn one."""
    try:
        card = json.loads(text)
        return (str(card["host"]), int(card["port"])), bytes.fromhex(card["token"])
    except (ValueError, KeyError, TypeError):
        return None


def _answers(address: tuple[str, int], token: bytes, answer_s: float, pause_s: float) -> bool:
    """Whether a coordinator of the job is there. Raises ``PeerError`` if unknown."""
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
                    f"the job's coordinator at {join_endpoint(*address)} does not answer ({error}) "
                    "Its process may be paused, or its machine overloaded: look for "
                    "scalai.launch.coordinator.process, and end it if it hangs."
                ) from error
            time.sleep(pause_s)  # it may just have ended
    return False


@dataclass(frozen=True, slots=True)
class CardHolder:
    """Owner of a card: the coordinator's number in the job, from 1, and its process."""

    term: int
    pid: int


def read_holder(folder: Path) -> CardHolder | None:
    """Return the owner of the card in the job's folder, alive or dead; None: no card, so no
    coordinator died here. Raises ``StoreError`` as ``read_card``."""
    try:
        with open_below(folder.parent, folder.name) as job:
            card = json.loads(job.read(CARD))
        return CardHolder(int(card["term"]), int(card["pid"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):  # torn
        return CardHolder(1, 0)


def write_card(folder: Path, address: tuple[str, int], token: bytes, term: int = 1) -> None:
    """Write this process's card, readable by this user alone. Raises ``StoreError`` on failure."""
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


@dataclass(frozen=True, slots=True)
class JobEnding:
    """End of a job; ``report_dir``: folder of its reports, None: none."""

    code: int
    reason: str
    at: float
    report_dir: str | None = None

    def __str__(self) -> str:
        ago_s = max(0.0, time.time() - self.at)
        return f"The last one ended {ago_s:.0f} s ago, exit code {self.code}: {self.reason}"


def write_ending(folder: Path, code: int, reason: str, report_dir: Path | None = None) -> None:
    """Record the end of the job for later readers. Raises as ``write_card``."""
    reports = None if report_dir is None else str(report_dir.absolute())
    ending = asdict(JobEnding(code, reason, time.time(), reports))
    with open_below(folder.parent, folder.name) as job:
        job.write(ENDED, json.dumps(ending).encode())


def read_ending(folder: Path) -> JobEnding | None:
    """Return the end of the last job of this name; None: unknown."""
    try:
        with open_below(folder.parent, folder.name) as job:
            found = json.loads(job.read(ENDED))
        reports = found.get("report_dir")
        return JobEnding(
            int(found["code"]), str(found["reason"]), float(found["at"]),
            reports if isinstance(reports, str) else None,
        )  # fmt: skip
    except (OSError, ScalaiError, ValueError, KeyError, TypeError, AttributeError):
        return None


def remove_card(folder: Path, of: tuple[str, int] | None = None) -> None:
    """Remove the card, if any; with ``of`` only the card of the coordinator at this address. The
    caller holds the lock of the job's folder."""
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
    is_port = port.isdecimal() and int(port) <= HIGHEST_PORT
    if not host or not is_port or (":" in host and not is_bracketed):
        raise UsageError(
            f"--coordinator {endpoint} is not HOST:PORT, or [ADDRESS]:PORT with an IPv6 address "
            f"(a port is {HIGHEST_PORT} at most)."
        )
    return host, int(port)


def join_endpoint(host: str, port: int) -> str:
    """Return the inverse of ``split_endpoint``; ``host`` may stand in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
