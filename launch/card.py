"""The coordinator's card: how agents and commands on one machine find a job's coordinator."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalai.core.errors import PeerError, UsageError
from scalai.runtime.messages import Channel

TOKEN_VARIABLE = "SCALAI_JOB_TOKEN"
"""Environment variable: the job's secret, where hosts do not share a machine."""
CARD = "coordinator.json"


def read_card(folder: Path) -> tuple[tuple[str, int], bytes] | None:
    """Return the address and token of a live coordinator that left its card in the job's folder,
    else None."""
    try:
        card = json.loads((folder / CARD).read_text())
        address, token = (str(card["host"]), int(card["port"])), bytes.fromhex(card["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none, or being replaced
    try:
        Channel(address, token).close()
    except PeerError:
        return None
    return address, token


def write_card(folder: Path, address: tuple[str, int], token: bytes) -> None:
    """Leave the card, readable by this user alone."""
    card: Mapping[str, Any] = {"host": address[0], "port": address[1], "token": token.hex()}
    aside = folder / f".{CARD}.{os.getpid()}"
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(json.dumps(card))
    os.replace(aside, folder / CARD)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"--coordinator {endpoint} is not HOST:PORT.")
    return host, int(port)
