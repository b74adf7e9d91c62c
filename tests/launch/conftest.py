"""Coordinators in the test's own time, closed at its end."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from support.coordinator_line import MANY, Line


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
