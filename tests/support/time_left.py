"""A run that has to end by a certain time begins no test after it: ``TESTS_UNTIL``, in seconds
since 1970. On a slow machine so the last crosses wait for another run, and the output says so."""

import os
import time
from collections.abc import Iterator, Mapping

import pytest

UNTIL = "TESTS_UNTIL"
REASON = "no time is left in this run"


def read_until(environment: Mapping[str, str]) -> float | None:
    """Return when the run has to end, None where it may take its time.

    Raises:
        pytest.UsageError: What the environment says is no time.
    """
    value = environment.get(UNTIL)
    if not value:
        return None
    try:
        return float(value)
    except ValueError as error:
        raise pytest.UsageError(
            f"{UNTIL}={value} is no time. Give seconds since 1970, as date +%s prints them."
        ) from error


class TimeLeft:
    """The plugin of pytest that leaves out what comes too late, crosses first."""

    def __init__(self) -> None:
        self._until = read_until(os.environ)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        yield
        if self._until is not None:
            items.sort(key=lambda item: item.get_closest_marker("turns") is not None)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if self._until is not None and time.time() > self._until:
            pytest.skip(REASON)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        late = [
            report for report in terminalreporter.stats.get("skipped", [])
            if REASON in str(report.longrepr)
        ]  # fmt: skip
        if late:
            terminalreporter.write_line(f"{REASON}: {len(late)} tests wait for another one")
