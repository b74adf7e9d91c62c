"""Whatever a test starts or waits for has a deadline: what hangs fails, in minutes, by name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

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
