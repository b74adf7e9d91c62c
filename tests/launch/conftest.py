"""Coordinators in the test's own time, closed at its end; and Kubernetes' API server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from support.coordinator_line import MANY, Line
from support.kubernetes_api import Api, seen_from_a_pod


class OpenLine(Protocol):
    def __call__(self, *flags: str, **settings: Any) -> Line: ...


@pytest.fixture
def open_line(tmp_path: Path) -> Iterator[OpenLine]:
    """Open coordinators of jobs, by default one that begins soon with any of four hosts."""
    lines: list[Line] = []

    def opener(*flags: str, **settings: Any) -> Line:
        lines.append(Line(tmp_path, *(flags or MANY), **settings))
        return lines[-1]

    yield opener
    for line in lines:
        line.close()


@pytest.fixture
def line(open_line: OpenLine) -> Line:
    return open_line()


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    with seen_from_a_pod(tmp_path / "api", monkeypatch) as found:
        yield found
