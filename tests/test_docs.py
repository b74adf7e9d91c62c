"""Pages name what there is; whatever a test starts or waits for has a deadline."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli_page import PAGE
from support.cli_page import page as page_of_commands
from support.faults import matrix
from support.layout_page import PAGE as LAYOUT_PAGE
from support.layout_page import page as page_of_layouts

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


def test_the_table_of_layouts_is_made_from_the_converters() -> None:
    text = "Run: python tests/support/layout_page.py"
    assert LAYOUT_PAGE.read_text() == page_of_layouts(), text


TESTS = Path(__file__).parent
STARTS = {"run", "call", "check_call", "check_output"}
WAITS = {"communicate", "wait", "join"}
"""Of processes, threads and events: without an argument they wait for ever."""


def endless(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of calls that may never return."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of, name = node.func.value, node.func.attr
        has_deadline = any(keyword.arg in (None, "timeout") for keyword in node.keywords)
        if isinstance(of, ast.Name) and of.id == "subprocess" and name in STARTS:
            if not has_deadline:
                yield node.lineno
        elif name in WAITS and not node.args and not has_deadline:
            yield node.lineno


def test_every_wait_of_a_test_has_a_deadline() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line in endless(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == [], "give these a timeout"


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("subprocess.run(a)\nprocess.wait()\nthread.join()\nprocess.communicate()", [1, 2, 3, 4]),
        ("subprocess.run(a, timeout=9)\np.wait(9)\nt.join(timeout=9)\n', '.join(a)", []),
        ("subprocess.run(a, **given)\nrun(a)\nsubprocess.Popen(a)", []),
    ],
)
def test_such_waits_are_found(code: str, lines: list[int]) -> None:
    assert list(endless(ast.parse(code))) == lines
