"""A job's secret: long enough, and nowhere that others look."""

import os
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from scalai.core.errors import UsageError
from scalai.launch.agent.data_plane import DataPeer
from scalai.launch.config.endpoint import TOKEN_VARIABLE, take_token
from scalai.launch.coordinator.discovery import Place
from scalai.runtime.handshake import job_key

pytestmark = pytest.mark.fault

TOKEN = "0123456789abcdef"


def test_a_token_is_in_no_text() -> None:
    for held in (Place(("h", 1), TOKEN.encode()), DataPeer(("h", 1), TOKEN.encode(), "h")):
        assert TOKEN not in repr(held) and TOKEN not in str(held)


def test_what_a_process_starts_does_not_inherit_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert take_token("j") == job_key(TOKEN, "j")
    assert TOKEN_VARIABLE not in os.environ and take_token("j") is None


def test_a_token_that_can_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(UsageError, match=r"5 characters; at least 16.*openssl rand"):
        take_token("j")


def test_the_secret_that_a_process_was_started_with_is_read_nowhere_afterwards() -> None:
    text = (
        "from pathlib import Path; from scalai.launch.config.endpoint import take_token;"
        "import os; key = take_token('j'); found = Path('/proc/self/environ').read_bytes();"
        f"assert {TOKEN!r}.encode() not in found and b'OTHER=value' in found, found; print(key)"
    )
    variables = {**os.environ, TOKEN_VARIABLE: TOKEN, "OTHER": "value"}
    said = subprocess.check_output([sys.executable, "-c", text], env=variables, timeout=120)
    assert said.decode().strip() == job_key(TOKEN, "j")


def test_a_guess_costs_memory_and_what_is_heard_of_one_job_tells_nothing_of_another() -> None:
    """As RFC 7914 has it, by another library."""
    by_hand = Scrypt(salt=b"scalai 4\0j", length=32, n=1 << 14, r=8, p=1).derive(TOKEN.encode())
    assert job_key(TOKEN, "j") == by_hand.hex() != job_key(TOKEN, "k")
