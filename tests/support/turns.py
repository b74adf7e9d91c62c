"""Crosses take turns: of the cases of a test that is marked ``turns``, a run takes every fourth.

The date (UTC) names the turn, so that four days in a row run all cases. ``TURN=0`` to ``3`` in the
environment takes another turn, ``TURN=all`` every case. A run of named files or tests takes every
case of them.
"""

import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

import pytest

TURNS = 4


@dataclass(frozen=True, slots=True)
class Turn:
    """Whose turn it is. ``number`` None: everybody's. ``reason``: how that was found."""

    number: int | None
    reason: str


def deal(names: Sequence[str]) -> list[int]:
    """Return the turn of each case of one test, from the cases' names.

    Four cases in a row go to four turns. Each goes where its words (``tp2`` and ``pp2`` of
    ``tp2-pp2``, at their places) were least often, so that each turn sees every layout.
    """
    seen: list[Counter[tuple[int, str]]] = [Counter() for _ in range(TURNS)]
    dealt: list[int] = []
    for number, name in enumerate(names):
        words = list(enumerate(name.split("-")))
        taken = dealt[number - number % TURNS :]
        free = [turn for turn in range(TURNS) if turn not in taken]
        turn = min(free, key=lambda turn: sum(seen[turn][word] for word in words))
        seen[turn].update(words)
        dealt.append(turn)
    return dealt


def whose_turn(value: str | None, today: date, *, is_whole_run: bool) -> Turn:
    """Return the turn of a run, by ``TURN`` (``value``) and the date.

    Raises:
        pytest.UsageError: ``value`` is no turn.
    """
    if value == "all":
        return Turn(None, "TURN=all")
    if value:
        if value not in map(str, range(TURNS)):
            raise pytest.UsageError(f"TURN={value} is no turn. Use 0 to {TURNS - 1}, or all.")
        return Turn(int(value), f"TURN={value}")
    if not is_whole_run:
        return Turn(None, "tests are named")
    return Turn((today - date(1970, 1, 1)).days % TURNS, f"{today}")


class TakingTurns:
    """The plugin of pytest that leaves out the cases of other turns, and says so."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._waiting = 0
        reported = getattr(config, "workerinput", {}).get(
            "turn"
        )  # by the process that spreads tests
        self._turn = Turn(*reported) if reported else self._whose(config)

    def _whose(self, config: pytest.Config) -> Turn:
        names_tests = config.args_source is config.ArgsSource.ARGS
        selects = config.option.keyword or config.getoption("lf", False)
        today, is_whole_run = datetime.now(UTC).date(), not (names_tests or selects)
        return whose_turn(os.environ.get("TURN"), today, is_whole_run=is_whole_run)

    def pytest_report_header(self) -> str:
        number, reason = self._turn.number, self._turn.reason
        whose = f"every turn of {TURNS}" if number is None else f"turn {number} of 0 to {TURNS - 1}"
        return f"crosses: {whose} ({reason})"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Iterator[None]:
        # Dealt before the others select, so that a case has the same turn in every run.
        others = self._of_other_turns(items)
        yield
        waiting = [item for item in items if item.nodeid in others]
        items[:] = [item for item in items if item.nodeid not in others]
        self._waiting = len(waiting)
        config.hook.pytest_deselected(items=waiting)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._waiting:
            terminalreporter.write_line(f"crosses: {self._waiting} cases wait for other turns")

    # ------------------------------------------------------------------ several processes (xdist)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a process whose turn it is: it sees other arguments than were given."""
        node.workerinput["turn"] = (self._turn.number, self._turn.reason)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["waiting"] = self._waiting

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Each process has left out the same cases."""
        self._waiting = getattr(node, "workeroutput", {}).get("waiting", self._waiting)

    # ------------------------------------------------------------------ dealing

    def _of_other_turns(self, items: Sequence[pytest.Item]) -> set[str]:
        if self._turn.number is None:
            return set()
        tests: dict[str, list[str]] = defaultdict(list)
        for item in items:
            if item.get_closest_marker("turns"):
                tests[item.nodeid.partition("[")[0]].append(item.nodeid)
        return {
            case
            for test, cases in tests.items()
            for case, turn in zip(cases, deal([_name(case) for case in cases]), strict=True)
            if (turn + _first(test)) % TURNS != self._turn.number
        }


def _first(test: str) -> int:
    """Return the turn with which a test begins: tests of few cases do not all meet in turn 0."""
    return zlib.crc32(test.encode()) % TURNS


def _name(case: str) -> str:
    return case.partition("[")[2].removesuffix("]")
