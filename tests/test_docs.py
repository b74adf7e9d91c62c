"""The pages name tests and files that there are."""

import re
from pathlib import Path

from scalai.launch.chaos.kinds import KINDS

ROOT = Path(__file__).parents[1]


def test_every_test_that_the_table_of_failures_names_exists() -> None:
    page = (ROOT / "docs" / "failures.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|") and "`" in line]
    missing, found = [], 0
    for row in rows:
        path = ""
        for named in re.findall(r"`((?:tests/[\w/]+\.py)?(?:::\w+)?)`", row.split(" | ", 2)[-1]):
            own, _, test = named.partition("::")
            path = own or path
            found += 1
            file = ROOT / path
            if not file.is_file() or (test and f"def {test}(" not in file.read_text()):
                missing.append(named)
    assert found > 100
    assert not missing


def test_every_file_that_contributing_names_exists() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.findall(r"`(\w+/[\w/.]+)`|\]\(([\w/.]+)\)", page)
    named = {inside or linked for inside, linked in found}
    assert len(named) > 50
    assert not {name for name in named if not (ROOT / name).exists()}


def test_every_kind_of_chaos_has_its_row_and_shows_one_that_there_is() -> None:
    page = (ROOT / "docs" / "failures.md").read_text()
    rows, _, own = page.partition("## Injecting faults")
    shown = set()
    for row in rows.splitlines():
        cells = row.split(" | ")
        if row.startswith("| ") and len(cells) > 3:
            shown |= set(re.findall(r"`([a-z0-9-]+)`", cells[3]))
    assert shown <= KINDS.keys() and len(shown) > 21
    table = {
        f"| `{k.name}` | {k.about} | {k.effect.value} | {k.loss.value} |" for k in KINDS.values()
    }
    assert table <= set(own.splitlines())
