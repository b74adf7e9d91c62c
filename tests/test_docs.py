"""The pages name log lines, tests and files that there are."""

import re
from pathlib import Path

from support.cli_page import PAGE
from support.cli_page import page as page_of_commands
from support.faults import matrix

ROOT = Path(__file__).parents[1]


def test_every_log_line_that_the_page_of_failures_names_is_written_by_the_product() -> None:
    page = (ROOT / "docs" / "failures.md").read_text()
    named = set(re.findall(r"event=([a-z_]+)", page))
    rooms = (ROOT / room for room in ("launch", "plugin", "patches", "converters"))
    sources = (path.read_text() for room in rooms for path in room.rglob("*.py"))
    written = {event for source in sources for event in re.findall(r"event=(\w+)", source)}
    assert len(named) > 60
    assert not named - written


def test_the_matrix_of_faults_has_the_tests_of_every_room() -> None:
    found = matrix()
    assert {path.split("/")[0] for path in found} >= {
        "converters", "core", "end_to_end", "launch", "patches", "runtime", "store", "vfs",
    }  # fmt: skip
    assert sum(map(len, found.values())) > 300


def test_every_file_that_contributing_names_exists() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.findall(r"`(\w+/[\w/.]+)`|\]\(([\w/.]+)\)", page)
    named = {inside or linked for inside, linked in found}
    assert len(named) > 50
    assert not {name for name in named if not (ROOT / name).exists()}


def test_the_page_of_commands_is_made_from_the_parsers() -> None:
    assert PAGE.read_text() == page_of_commands(), "Run: python tests/support/cli_page.py"
