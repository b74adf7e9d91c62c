"""A trace: when how many devices are there, read from a table."""

from collections.abc import Sequence
from csv import reader
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from statistics import median

from scalai.core.errors import RefusedError
from scalai.core.planner.shape import LARGEST

TIMES = {
    "time_s": 1.0, "time_min": 60.0, "time_h": 3600.0, "seconds": 1.0, "minutes": 60.0,
    "hours": 3600.0, "second": 1.0, "minute": 60.0, "hour": 3600.0,
}  # fmt: skip
"""Names of the column of times, with the seconds of its unit."""
DEVICES = ("gpus", "devices")
KINDS = ("planned", "failure", "end")
MOST_EVENTS = 100_000


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """From ``at_s`` on there are so many devices.

    ``is_failure``: the change was not announced, and took devices that were in use.
    """

    at_s: float
    gpus: int
    is_failure: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """Events, ascending; the last of them lasts until ``end_s``.

    ``is_end_assumed``: the table does not say when it ends.
    """

    events: tuple[TraceEvent, ...]
    end_s: float
    is_end_assumed: bool = False

    @property
    def seconds(self) -> float:
        return self.end_s - self.events[0].at_s

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of devices, ascending, without 0."""
        return tuple(sorted({event.gpus for event in self.events} - {0}))


def read_trace(lines: Sequence[str], name: str, until_s: float | None = None) -> Trace:
    """Read a table of comma-separated values with a header.

    Columns: one of ``TIMES``, one of ``DEVICES``, and ``kind``, which may be left out: ``planned``
    (default), ``failure``, or ``end`` in the last line. Lines that begin with # are comments. A
    last line with no devices ends the trace too, where ``until_s`` does not; without an end the
    last event lasts as long as the median of the others.

    Raises:
        RefusedError: Anything else, by the number of its line.
    """
    rows = [
        (number, [cell.strip() for cell in row])
        for number, text in enumerate(lines, 1)
        if text.strip() and not text.lstrip().startswith("#")
        for row in reader([text])
    ]
    if not rows:
        raise RefusedError(f"{name} is empty. {_WANTED}")
    header = [cell.lower() for cell in rows[0][1]]
    time, unit = _time_column(header, name)
    devices = _device_column(header, name)
    kind = header.index("kind") if "kind" in header else None
    if len(rows) == 1:
        raise RefusedError(f"{name} has a header and no line below it. {_WANTED}")
    if len(rows) > MOST_EVENTS:
        raise RefusedError(f"{name} has {len(rows)} lines; use {MOST_EVENTS} at most.")
    read: list[tuple[float, int, str]] = []
    for number, row in rows[1:]:
        where = f"{name}, line {number}"
        if len(row) != len(header):
            raise RefusedError(f"{where}: {len(row)} cells below a header of {len(header)}.")
        at_s = _time(row[time], where) * unit
        if read and at_s <= read[-1][0]:
            raise RefusedError(
                f"{where}: {row[time]} is not after the time of the line before; sort the lines "
                "by time, one for each change."
            )
        word = row[kind].lower() if kind is not None and row[kind] else "planned"
        if word not in KINDS:
            raise RefusedError(f"{where}: kind {row[kind or 0]!r} is none of {', '.join(KINDS)}.")
        read.append((at_s, _count(row[devices], where, is_end=word == "end"), word))
    return _ended(read, name, until_s)


def _ended(read: list[tuple[float, int, str]], name: str, until_s: float | None) -> Trace:
    ends = [place for place, (_, _, word) in enumerate(read) if word == "end"]
    if ends and ends[0] != len(read) - 1:
        raise RefusedError(f"{name}: only the last line may have the kind 'end'.")
    last_s, last_gpus, _ = read[-1]
    has_end = bool(ends) or (last_gpus == 0 and until_s is None and len(read) > 1)
    events = tuple(
        TraceEvent(at_s, gpus, word == "failure")
        for at_s, gpus, word in (read[:-1] if has_end else read)
    )
    if not events or not any(event.gpus for event in events):
        raise RefusedError(f"{name}: at no time is there a device. {_WANTED}")
    if has_end and until_s is not None:
        raise RefusedError(f"{name} ends by its last line; leave out --until.")
    if has_end:
        return Trace(events, last_s)
    if until_s is not None:
        if until_s <= last_s:
            raise RefusedError(
                f"--until is {until_s:g} s, and the last line of {name} is at {last_s:g} s; end "
                "the trace after it."
            )
        return Trace(events, until_s)
    if len(events) == 1:
        raise RefusedError(
            f"{name} has one event and no end: add a line of kind 'end', or say --until MINUTES."
        )
    usual = median(after.at_s - before.at_s for before, after in pairwise(events))
    return Trace(events, last_s + usual, is_end_assumed=True)


_WANTED = (
    "It needs a header such as time_min,gpus,kind (time_s for seconds; kind, which may be left "
    "out, is planned, failure or end) and a line for each change."
)


def _time_column(header: Sequence[str], name: str) -> tuple[int, float]:
    found = [(place, TIMES[cell]) for place, cell in enumerate(header) if cell in TIMES]
    if len(found) != 1:
        told = "no column of times in a unit" if not found else "several columns of times"
        raise RefusedError(
            f"{name}: {told} among {', '.join(header)}; have one of time_s, time_min and time_h."
        )
    return found[0]


def _device_column(header: Sequence[str], name: str) -> int:
    found = [place for place, cell in enumerate(header) if cell in DEVICES]
    if len(found) != 1:
        told = "no column" if not found else "several columns"
        raise RefusedError(
            f"{name}: {told} of devices among {', '.join(header)}; have one called gpus."
        )
    return found[0]


def _time(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value >= 0):
        raise RefusedError(f"{where}: {text!r} is no time of 0 or more.")
    return value


def _count(text: str, where: str, *, is_end: bool) -> int:
    if is_end and not text:
        return 0
    if not (text.isascii() and text.isdecimal()) or int(text) > LARGEST:
        raise RefusedError(
            f"{where}: {text!r} is no number of devices; use 0 (the job waits) to {LARGEST}."
        )
    return int(text)
