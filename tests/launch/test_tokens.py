"""A job's secret: long enough, and nowhere that others look."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scalai.core.errors import UsageError
from scalai.launch.agent.data_plane import Peer
from scalai.launch.config.endpoint import TOKEN_VARIABLE, take_token
from scalai.launch.coordinator.discovery import Place

TOKEN = "0123456789abcdef"


def test_a_token_is_in_no_text() -> None:
    for held in (Place(("h", 1), TOKEN.encode()), Peer(("h", 1), TOKEN.encode(), "h")):
        assert TOKEN not in repr(held) and TOKEN not in str(held)


def test_what_a_process_starts_does_not_inherit_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert take_token() == TOKEN
    assert TOKEN_VARIABLE not in os.environ and take_token() is None


def test_a_token_that_can_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(UsageError, match=r"5 characters; at least 16.*openssl rand"):
        take_token()


@pytest.mark.parametrize("program", ["run", "cli"])
def test_both_launchers_refuse_it(tmp_path: Path, program: str) -> None:
    command = {
        "run": ["--coordinator", "127.0.0.1:1", "--store-dir", str(tmp_path), "script.py"],
        "cli": ["coordinator", "--listen", "127.0.0.1:0", "--", "script.py"],
    }[program]
    ended = subprocess.run(
        [sys.executable, "-m", f"scalai.launch.{program}", *command],
        env={**os.environ, TOKEN_VARIABLE: "short"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 2, ended
    assert "at least 16 are needed" in ended.stderr
