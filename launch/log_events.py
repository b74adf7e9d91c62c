"""A log line as a value for machines: ``[generation=G round=R] event=NAME key=value ... text``.

``SCHEMA`` is the version of ``LogEvent.to_json`` (docs/monitoring.md).
"""

import ast
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType

from scalai.core.exit_codes import RESUMABLE
from scalai.core.jsonable import Json

SCHEMA = 1
MOST_TEXT = 8192
"""Most characters of an event's text."""
MOST_JSON = 1 << 16
"""Most bytes of an event as JSON; a larger one comes without its facts."""

WARNINGS = frozenset(
    {
        "archive_given_up", "change_failed", "control_refused", "damage", "damaged",
        "function_differs", "given_up", "health_failed", "host_silent", "hung", "lost", "no_answer",
        "no_replica", "no_replica_room", "not_archived", "not_rescued", "refused",
        "replicas_differ", "report_failed", "restart", "snapshot_incomplete", "snapshot_refused",
        "stood_down", "suspected", "unhooked", "went_back", "withdrawn", "workers_failed",
        "wrong_result",
    }
)  # fmt: skip
"""Coordinator's events of a loss, or a danger of one."""
DETAILS = frozenset(
    {
        "ahead", "build", "cold", "commit", "detect", "device", "drain", "drop", "examined",
        "first_step", "freeze", "function_proven", "heard_again", "held", "hook", "interface",
        "late_commit", "load", "measured", "move", "note", "plan", "proof", "recovered",
        "relaunch", "replica_hurried", "replica_rate", "replicated", "rescued", "reserve",
        "restore", "round", "seal", "snapshot", "snapshot_every", "spaced", "standby", "start",
        "stop_workers", "store_memory", "table", "trusted", "warm",
    }
)  # fmt: skip
"""Events within a change, and of each snapshot: ``DEBUG``. A change has one line beside them."""
MILESTONES = frozenset(
    {
        "adopted", "archived", "control", "coordinator", "exit", "join", "leaving", "notice",
        "resized", "resume", "started", "staying",
    }
)  # fmt: skip
"""Events for ``--on-event``, beside all warnings and errors."""

_EVENT = re.compile(r"event=(\w+)(?: code=(\d+))?")
_PAIR = re.compile(r"""\s*([a-z]\w*)=("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\S+)(?=\s|[:;,]|$)""")
_NUMBER = re.compile(r"-?\d{1,15}(\.\d+)?(e[+-]?\d+)?")


@dataclass(frozen=True, slots=True)
class LogEvent:
    """An event of a job.

    Attributes:
        at: Seconds since 1970.
        level: ``DEBUG``, ``INFO``, ``WARNING`` or ``ERROR``.
        who: ``coordinator``, or the host of an agent.
        name: Kind of the event; "note" for lines without one.
        facts: Named values of the line, and those said beside it.
        text: Rest of the line, for a person.
    """

    at: float
    level: str
    who: str
    name: str
    facts: Mapping[str, Json]
    text: str

    @property
    def is_milestone(self) -> bool:
        """Whether ``--on-event`` gets it."""
        return self.name in MILESTONES or self.level not in ("DEBUG", "INFO")

    def to_json(self) -> dict[str, Json]:
        facts = dict(self.facts)
        common = {key: facts.pop(key, None) for key in ("host", "round", "generation")}
        return {
            "schema": SCHEMA,
            "time": datetime.fromtimestamp(self.at, UTC).isoformat(timespec="milliseconds"),
            "level": self.level, "from": self.who, "event": self.name, **common,
            "facts": facts, "text": self.text,
        }  # fmt: skip

    def to_line(self) -> str:
        """One line of JSON, of ``MOST_JSON`` bytes at most."""
        line = json.dumps(found := self.to_json(), default=str)
        if len(line) > MOST_JSON:
            line = json.dumps({**found, "facts": {}, "text": self.text[:256]})
        return line


def read_line(text: str) -> tuple[dict[str, Json], str]:
    """Read a line's leading ``key=value`` pairs. Returns them, and the rest of the line."""
    facts, at = dict[str, Json](), 0
    while (found := _PAIR.match(text, at)) is not None:
        facts[found[1]] = _value(found[2])
        at = found.end()
    return facts, text[at:].lstrip(" :;,")


def _value(text: str) -> Json:
    if text[0] in "'\"":
        try:
            return str(ast.literal_eval(text))
        except (SyntaxError, ValueError):
            return text
    text = text.rstrip(":;,")
    if _NUMBER.fullmatch(text):
        return float(text) if set(text) & set(".e") else int(text)
    return {"True": True, "False": False, "None": None}.get(text, text)


def level_of(text: str, facts: Mapping[str, Json] = MappingProxyType({})) -> int:
    """Level of a coordinator's line."""
    event = _EVENT.search(text)
    name, code = (event[1], event[2]) if event else ("note", None)
    if name == "crashed" or code not in (None, "0", str(RESUMABLE)):
        return logging.ERROR
    if name in WARNINGS or (name == "resized" and facts.get("steps_lost")):
        return logging.WARNING
    return logging.DEBUG if name in DETAILS else logging.INFO


def level_in(record: logging.LogRecord) -> int:
    """Level of a record: details of an agent are logged as the rest."""
    if record.levelno != logging.INFO:
        return record.levelno
    event = _EVENT.search(record.getMessage())
    return logging.DEBUG if event is not None and event[1] in DETAILS else logging.INFO


def event_of(record: logging.LogRecord, who: str) -> LogEvent:
    """The event of a log record; ``facts`` of the record win over those of its line."""
    text = record.getMessage()
    if record.exc_info:
        text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
    found, rest = read_line(text)
    facts = {**found, **getattr(record, "facts", {})}
    name = str(facts.pop("event", "note"))
    level = logging.getLevelName(level_in(record))
    return LogEvent(record.created, level, who, name, facts, rest[:MOST_TEXT])
