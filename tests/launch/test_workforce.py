"""Workers that cannot be started: a change that is not built ahead, a round that fails."""

from typing import Any

import pytest

from scalai.core.commands import Build
from scalai.core.errors import StoreError
from scalai.launch.workforce import Workforce
from support.wire_words import Told, start

START = start(round=3)


class NoRoom:
    """Crews of a host whose shared memory is full, or that has no process left."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def start(self, command: Any) -> None:
        raise self._error


@pytest.mark.parametrize(
    "error", [StoreError("no page"), OSError(11, "Resource temporarily unavailable")]
)
def test_workers_that_cannot_be_started_end_no_agent(error: Exception) -> None:
    told = Told()
    workforce = Workforce("a", "always", NoRoom(error), told)  # type: ignore[arg-type]
    workforce.build(Build(START.workers))
    (not_built,) = told.events
    assert (not_built["event"], not_built["round"]) == ("not_built", 3)
    assert str(error) in not_built["reason"]
    workforce.start(START)
    failed = told.events[-1]
    assert (failed["event"], failed["round"]) == ("failed", 3) and str(error) in failed["reason"]
    assert workforce.crew is None and workforce.end(0.0, lambda: False) == 0
