"""Prints the matrix of faults and their tests, from the mark ``fault`` on tests: ``make faults``.

A test's name is the sentence that it proves. A mark on a module (``pytestmark``) holds for all of
its tests.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
MARK = "pytest.mark.fault"


def marked(source: str) -> Iterator[str]:
    """Yield the names of the tests in a module's source that carry the mark, in order."""
    tree = ast.parse(source)
    is_all = any(
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "pytestmark"
        and MARK in ast.unparse(node.value)
        for node in tree.body
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[:5] == "test_":
            if is_all or any(MARK in ast.unparse(each) for each in node.decorator_list):
                yield node.name


def matrix(tests: Path = TESTS) -> dict[str, list[str]]:
    """Return the marked tests of each file, by its path below ``tests``."""
    found = {
        str(path.relative_to(tests)): list(marked(path.read_text()))
        for path in sorted(tests.rglob("test_*.py"))
    }
    return {path: names for path, names in found.items() if names}


def main() -> None:
    found = matrix()
    for path, names in found.items():
        print(f"\ntests/{path}")
        for name in names:
            print(f"  {name[5:].replace('_', ' ')}")
    print(f"\n{sum(map(len, found.values()))} tests of faults in {len(found)} files")


if __name__ == "__main__":
    main()
