"""``scalai`` in this process."""

import contextlib
import io
import json

import pytest

from scalai.launch import cli

Capsys = pytest.CaptureFixture[str]


def run(*words: object) -> int:
    """Run ``scalai`` and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, words)])
    return int(ended.value.code or 0)


def logged(capsys: Capsys, *words: object) -> tuple[int, str]:
    """Run ``scalai``; return its exit code and what it said."""
    capsys.readouterr()
    code = run(*words)
    said = capsys.readouterr()
    return code, said.out + said.err


def reported(*words: object) -> dict[str, list[str]]:
    """Run ``scalai`` with ``--json``; it succeeds. Return the texts of its events by kind."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert run(*words, "--json") == 0
    found: dict[str, list[str]] = {}
    for line in output.getvalue().splitlines():
        event = json.loads(line)
        found.setdefault(event["event"], []).append(event.get("text", ""))
    return found
