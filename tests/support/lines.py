"""The log lines of a coordinator, as a list that takes them."""

import logging
from collections.abc import Callable
from typing import Any

from scalai.core.jsonable import Json
from scalai.launch.log_events import LogEvent, event_of, level_of


class Lines(list[str]):
    """Log lines. ``hears``: called with each as an event."""

    def __init__(self) -> None:
        super().__init__()
        self.hears: list[Callable[[LogEvent], Any]] = []

    def __call__(self, text: str, /, **facts: Json) -> None:
        self.append(text)
        for hear in self.hears:
            hear(as_event(text, **facts))


def as_event(text: str, /, **facts: Json) -> LogEvent:
    """The event of a coordinator's line."""
    record = logging.LogRecord("scalai", level_of(text), __file__, 0, text, (), None)
    record.facts = facts
    return event_of(record, "coordinator")
