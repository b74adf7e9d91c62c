"""The history of a job as values: its changes from the reports of ``--report-dir``, failures
between them from ``events.jsonl``, and the losses of its steps. Reports are of any version: unknown
values are None, not zero."""

import json
import math
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from scalai.core.jsonable import Json

NO_PAUSE = ("detect", "build", "drain")
"""Phases in which the old round still trains, up to the agreed step."""
EVENTS, EVENTS_SCHEMA = "events.jsonl", 1
FAILURES = (
    "change_failed", "damage", "damaged", "function_differs", "health_failed", "hung", "lost",
    "workers_failed",
)  # fmt: skip
"""Events of a failure, beside all errors; other warnings are not of the training."""
MOST_REPORTS = 5000
"""Most reports of a folder, the newest ones."""
MOST_REPORT_BYTES, MOST_EVENTS_BYTES = 4 << 20, 64 << 20
MOST_INCIDENTS = 2000
LAST_TIME = 250_000_000_000.0
"""About the year 9892."""
UNUSUAL = 5.0
"""Factor of a pace that is not believed."""
REPORTS = "resize-*.json"


@dataclass(frozen=True, slots=True)
class Proof:
    """Proof of a restore: tensors with equal fingerprints, of how many; ``function``: the first
    step beside the old layout's."""

    tensors: int | None
    proven: int | None
    function: str

    @property
    def is_whole(self) -> bool:
        return bool(self.tensors) and self.proven == self.tensors

    def __str__(self) -> str:
        found = [f"{self.proven} of {self.tensors} tensors"] if self.proven is not None else []
        if self.function:
            found.append(f"function {self.function.partition(':')[0]}")
        return ", ".join(found) or "-"


@dataclass(frozen=True, slots=True)
class Resize:
    """One change; None: its report does not say.

    Attributes:
        at: First step after it, in seconds since 1970.
        reason: Its first cause.
        is_recovery: It follows from a failure or a lost host.
        step: Steps kept.
        before, after: Degrees; ``before`` None: the job had none, or its coordinator was new.
        workers: Workers on each host with some.
        paused_s: Seconds without a step; None: a start.
        steps_lost: Steps behind ``step``, made again.
        moved: Bytes by way, ``local`` within hosts and ``remote`` between them.
        seconds: Seconds of each phase, in order.
    """

    at: float
    reason: str
    is_recovery: bool
    step: int
    before: str | None
    after: str
    workers: Mapping[str, int]
    paused_s: float | None
    steps_lost: int | None
    moved: Mapping[str, int]
    proof: Proof
    seconds: Mapping[str, float]

    @property
    def is_start(self) -> bool:
        return self.paused_s is None

    @property
    def ranks(self) -> int:
        return sum(self.workers.values())

    @property
    def world(self) -> str:
        return f"{self.ranks} rank{'s' if self.ranks != 1 else ''}"

    @property
    def layout(self) -> str:
        return f"{self.after}, {self.world}" if self.workers else self.after

    @property
    def bytes_moved(self) -> int | None:
        return sum(self.moved.values()) if self.moved else None


def read_resize(report: Json, at: float = 0.0) -> Resize:
    """Read a report. ``at``: time of one without.

    Raises:
        ValueError: It is no report of a change.
    """
    step = _count(_mapped(report).get("step"))
    if step is None or not isinstance(report.get("after"), str):
        raise ValueError("it names no step and layout after a change")
    seconds, workers = _mapped(report.get("seconds")), _mapped(report.get("workers"))
    phases = {name: _number(value) for name, value in seconds.items()}
    counts = {host: _count(value) for host, value in workers.items()}
    lost = _count(report.get("steps_lost"))
    given = {way: _count(report.get(f"bytes_{way}")) for way in ("local", "remote")}
    reason = _text(report.get("reason")) or "unknown"
    is_recovery = report.get("kind") == "recovery" or bool(_mapped(report.get("failure")))
    before, time = report.get("before"), _number(report.get("at"))
    paused_s = _number(report.get("paused_s"))
    return Resize(
        at=at if time is None else time,
        reason=reason,
        is_recovery=is_recovery or reason.endswith(" is lost"),
        step=step,
        before=before if isinstance(before, str) else None,
        after=report["after"],
        workers={host: count for host, count in counts.items() if count},
        paused_s=paused_s,
        # A report names lost steps only where there are some.
        steps_lost=0 if "steps_lost" not in report and paused_s is not None else lost,
        moved={way: count for way, count in given.items() if count is not None},
        proof=Proof(
            _count(report.get("tensors")), _count(report.get("proven")),
            _text(report.get("function")),
        ),
        seconds={name: value for name, value in phases.items() if value is not None},
    )  # fmt: skip


def _mapped(value: Json) -> dict[str, Json]:
    return value if isinstance(value, dict) else {}


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


def difference(loss: float, reference: float) -> float:
    """Relative difference of a loss to an uninterrupted run's; infinite for a NaN."""
    value = abs(loss - reference) / abs(reference) if reference else abs(loss)
    return math.inf if math.isnan(value) else value


def _number(value: Json) -> float | None:
    """A number of 0 or more, below 10^15."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e15 else None


def _count(value: Json) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


@dataclass(frozen=True, slots=True)
class Incident:
    """A failure, as the coordinator saw it."""

    at: float
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class LayoutStretch:
    """Training in one layout, from its first step to its stop.

    Attributes:
        first: Number of its first step.
        end: Time of its stop; None: unknown.
        last: Number of its last step, lost ones included.
        kept: Number of its last step that was kept.
    """

    resize: Resize
    begin: float
    end: float | None
    first: int
    last: int | None
    kept: int | None

    @property
    def has_lost(self) -> bool:
        """Whether steps of it were lost."""
        return self.last is not None and self.kept is not None and self.kept < self.last

    def time_of(self, step: float, pace_s: float = 0.0) -> float:
        """Time at which a step was made, at a uniform pace; ``pace_s``: seconds of a step, if the
        end is unknown."""
        if self.end is None or self.last is None:
            return self.begin + pace_s * max(0.0, step - self.first)
        share = (step - self.first) / max(1, self.last - self.first)
        return self.begin + (self.end - self.begin) * min(1.0, max(0.0, share))


@dataclass(frozen=True, slots=True)
class History:
    """A job's changes in order of time.

    Attributes:
        name: Of the job, or the folder.
        reports: The changes as reported.
        until: Now and the newest step of a running job; None: it does not run.
        heard: Times of all events, in order.
        notes: What is left out, and what would say more.
    """

    name: str
    resizes: tuple[Resize, ...]
    reports: tuple[Json, ...] = ()
    incidents: tuple[Incident, ...] = ()
    until: tuple[float, int] | None = None
    heard: Sequence[float] = ()
    notes: tuple[str, ...] = ()

    @property
    def changes(self) -> tuple[Resize, ...]:
        return tuple(resize for resize in self.resizes if not resize.is_start)

    @property
    def stretches(self) -> tuple[LayoutStretch, ...]:
        ends = [self._end(resize, after) for resize, after in pairwise(self.resizes)]
        if self.resizes:
            ends.append(self._newest())
        return tuple(
            LayoutStretch(
                resize, resize.at, end and max(end, resize.at), resize.step + 1, made, kept
            )
            for resize, (end, made, kept) in zip(self.resizes, ends, strict=True)
        )

    def _newest(self) -> tuple[float | None, int | None, int | None]:
        """Time and step of the newest news."""
        if self.until is not None:
            return *self.until, self.until[1]
        return self._heard(self.resizes[-1].at, math.inf), None, None

    def _heard(self, since: float, until: float) -> float | None:
        """Time of the last event in between."""
        newest = self.heard[: bisect_left(self.heard, until)][-1:]
        return next((at for at in newest if at > since), None)

    def _end(self, resize: Resize, after: Resize) -> tuple[float | None, int | None, int | None]:
        """Time and step of the stop before a change, and its last kept step."""
        kept = after.step
        made = None if after.steps_lost is None else kept + after.steps_lost
        if after.paused_s is not None:
            return after.at - after.paused_s, made, kept
        # Another run: the end of the one before is known by its last event alone.
        begun = after.at - sum(after.seconds.values())
        return self._heard(resize.at, begun), made, kept


# ---------------------------------------------------------------------- files


def read_folder(folder: Path, name: str) -> History:
    """Read the reports and events of a folder. Raises ``OSError``: it cannot be read."""
    found, notes = [], []
    paths = sorted(folder.glob(REPORTS), key=lambda path: (len(path.name), path.name))
    if len(paths) > MOST_REPORTS:
        notes.append(f"{len(paths) - MOST_REPORTS} older reports are left out")
    for path in paths[-MOST_REPORTS:]:
        try:
            with path.open("rb") as file:
                text, at = file.read(MOST_REPORT_BYTES + 1), path.stat().st_mtime
            if len(text) > MOST_REPORT_BYTES:
                raise ValueError(f"it has more than {MOST_REPORT_BYTES >> 20} MiB")
            report = _parsed(text)
            found.append((read_resize(report, at), report))
        except (OSError, ValueError) as error:
            notes.append(f"{path.name} is left out: {_why(error)}")
    incidents, heard, more = _read_events(folder / EVENTS)
    return history_of(name, found, incidents, heard, (*notes, *more))


def history_of(
    name: str, found: Iterable[tuple[Resize, Json]], incidents: Sequence[Incident] = (),
    heard: Sequence[float] = (), notes: Sequence[str] = (),
) -> History:  # fmt: skip
    """The history of these changes, in order of time."""
    ordered = sorted(found, key=lambda pair: pair[0].at)
    known, layout = [], None
    for resize, report in ordered:
        # A new coordinator does not know what ran.
        if resize.before is None and not resize.is_start:
            resize = replace(resize, before=layout)
        layout = resize.after
        known.append((resize, report))
    return History(
        name, tuple(resize for resize, _ in known), tuple(report for _, report in known),
        tuple(incidents), None, heard, tuple(notes),
    )  # fmt: skip


def merged(told: Mapping[str, Json], name: str) -> History:
    """The history of a running job: of its folder, if that is here, and of the reports that its
    coordinator tells (``ReadReports``)."""
    folder = told["report_dir"]
    is_here = folder is not None and Path(folder).is_dir()
    kept = read_folder(Path(folder), name) if is_here else history_of(name, ())
    found, notes = list(zip(kept.resizes, kept.reports, strict=True)), list(kept.notes)
    here = {resize.at for resize in kept.resizes}
    for report in told["reports"]:
        try:
            resize = read_resize(report)
        except ValueError as error:
            notes.append(f"a report is left out: {error}")
            continue
        if resize.at not in here:
            found.append((resize, report))
    if len(found) == len(told["reports"]) >= told["most"]:
        notes.append(f"a coordinator keeps the newest {told['most']}; --report-dir keeps all")
    history = history_of(name, found, kept.incidents, kept.heard, notes)
    return replace(history, until=(float(told["at"]), int(told["step"])))


def _parsed(text: bytes | str) -> Json:
    try:
        return json.loads(text, parse_constant=lambda name: None)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return f"it is torn or no JSON ({error})"
    return str(error.strerror or error) if isinstance(error, OSError) else str(error)


def _read_events(path: Path) -> tuple[list[Incident], list[float], list[str]]:
    """Failures, and times of all events; none without the file."""
    incidents, heard, unread = list[Incident](), list[float](), 0
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MOST_EVENTS_BYTES))
            lines = file.read(MOST_EVENTS_BYTES).splitlines()
    except FileNotFoundError:
        return [], [], []
    except OSError as error:
        return [], [], [f"{path.name} is left out: {_why(error)}"]
    for line in lines[1 if size > MOST_EVENTS_BYTES else 0 :]:
        try:
            event = _parsed(line)
            if event["schema"] != EVENTS_SCHEMA:
                raise ValueError
            at = datetime.fromisoformat(event["time"]).timestamp()
            heard.append(at)
            is_failure = event["level"] == "ERROR" or event["event"] in FAILURES
            if is_failure and event["from"] == "coordinator":
                host = f"host {event['host']}: " if event.get("host") else ""
                incidents.append(Incident(at, str(event["event"]), f"{host}{event['text']}"))
        except (ValueError, KeyError, TypeError):
            unread += 1
    notes = [f"{unread} lines of {path.name} are torn or of another version"] if unread else []
    if len(incidents) > MOST_INCIDENTS:
        notes.append(f"{len(incidents) - MOST_INCIDENTS} older failures are left out")
    return incidents[-MOST_INCIDENTS:], sorted(heard), notes


# ---------------------------------------------------------------------- losses


@dataclass(frozen=True, slots=True)
class Point:
    """The loss of a step, made at ``at`` in seconds since 1970."""

    at: float
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses in order of time; a step made again comes again.

    Attributes:
        name: Their name.
        has_steps: ``Point.step`` counts steps; else samples, say.
        is_timed: Times are measured; else they follow from the changes.
    """

    name: str
    points: tuple[Point, ...]
    has_steps: bool = True
    is_timed: bool = True
    lost: tuple[bool, ...] = field(init=False)
    """Whether each point was lost: its step, or an earlier one, was made again later."""

    def __post_init__(self) -> None:
        least, lost = math.inf, list[bool]()
        for point in reversed(self.points):
            lost.append(point.step >= least)
            least = min(least, point.step)
        object.__setattr__(self, "lost", tuple(reversed(lost)))


def timed(
    steps: Iterable[tuple[int, float]], history: History, name: str, until: float | None = None
) -> Losses:
    """Give losses without times those that follow from the changes.

    Args:
        steps: Step and loss, in the order made; a step made again comes again.
        until: Time of the last one, if known.
    """
    given = list(steps)
    stretches = list(history.stretches)
    pace_s, place, before = pace_of(stretches), 0, -math.inf
    if stretches and given and stretches[-1].end is None and until is not None:
        last, newest = stretches[-1], max(step for step, _ in given)
        took_s, usual_s = until - last.begin, pace_s * (newest - last.first)
        # The time of a file that was copied, say, tells nothing.
        if len(stretches) == 1 or usual_s / UNUSUAL < took_s < usual_s * UNUSUAL:
            stretches[-1] = replace(last, end=max(until, last.begin), last=newest)
    points = []
    for step, loss in given:
        place = _stretch_of(stretches, place, step, before)
        before = step
        at = stretches[place].time_of(step, pace_s) if stretches else float(step)
        points.append(Point(at, step, loss))
    return Losses(name, tuple(points), is_timed=False)


def _stretch_of(stretches: Sequence[LayoutStretch], place: int, step: int, before: float) -> int:
    """Place of the stretch that made a step, from that of the step before on."""
    is_again = step <= before
    for other in range(place + is_again, len(stretches)):
        first, last = stretches[other].first, stretches[other].last
        if first <= step and (last is None or step <= last):
            return other
    return place


def pace_of(stretches: Iterable[LayoutStretch]) -> float:
    """Usual seconds of a step; 1 where nothing tells."""
    paces = [
        (each.end - each.begin) / (each.last - each.first)
        for each in stretches
        if each.end is not None and each.last is not None and each.last > each.first
    ]
    return statistics.median(paces) if paces else 1.0


# ---------------------------------------------------------------------- text


def table(history: History) -> Iterator[str]:
    """Yield the changes as lines for a person, and failures between them."""
    zone = zone_at(history.resizes[-1].at if history.resizes else 0.0)
    head = ("", f"when ({zone})", "reason", "layout", "ranks", "paused", "steps lost", "moved")
    rows = [_cells(resize, number) for number, resize in enumerate(history.resizes, start=1)]
    widths = [max(len(row[n]) for row in [head, *rows]) for n in range(len(head))]
    incidents = deque(history.incidents)
    yield _row((*head, "proof"), widths)
    for resize, report, row in zip(history.resizes, history.reports, rows, strict=True):
        while incidents and incidents[0].at <= resize.at:
            yield _incident_line(incidents.popleft(), widths[0])
        yield _row(row, widths)
        if why := _text(_mapped(report).get("steps_lost_why")):
            yield f"{'':{widths[0]}}  steps lost: {_cut(why, 160)}"
    yield from (_incident_line(each, widths[0]) for each in incidents)
    yield summary(history)


def _row(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.rjust(width) if n in (0, 5, 6, 7) else cell.ljust(width)
        for n, (cell, width) in enumerate(zip(row, widths, strict=False))
    ]
    return "  ".join([*cells, *row[len(widths) :]]).rstrip()


def _incident_line(incident: Incident, width: int) -> str:
    text = _cut(f"{incident.name.replace('_', ' ')}: {incident.text}".rstrip(": "), 120)
    return f"{'!':>{width}}  {when(incident.at)}  {text}"


def _cells(resize: Resize, number: int) -> tuple[str, ...]:
    layout = resize.after if resize.before is None else f"{resize.before} -> {resize.after}"
    hosts = f"{resize.ranks} on {len(resize.workers)} host{'s' if len(resize.workers) != 1 else ''}"
    return (
        str(number), when(resize.at), _cut(reason_of(resize)), layout,
        hosts if resize.workers else "-", seconds_text(resize.paused_s),
        "-" if resize.steps_lost is None else str(resize.steps_lost),
        bytes_text(resize.bytes_moved), str(resize.proof),
    )  # fmt: skip


def reason_of(resize: Resize) -> str:
    """The reason, and the step of a start that resumes."""
    if resize.is_start and resize.step:
        return f"{resize.reason}, from step {resize.step}"
    return resize.reason


def _cut(text: str, most: int = 44) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def when(at: float) -> str:
    """Local time; of an impossible one the nearest possible."""
    return datetime.fromtimestamp(min(max(at, 0.0), LAST_TIME)).strftime("%Y-%m-%d %H:%M:%S")


def zone_at(at: float) -> str:
    """Name of the local time."""
    return datetime.fromtimestamp(min(max(at, 0.0), LAST_TIME)).astimezone().tzname() or ""


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def bytes_text(count: int | None) -> str:
    if count is None:
        return "-"
    size, unit = float(count), 0
    while size >= 999.5 and unit < 5:
        size, unit = size / 1000, unit + 1
    return f"{size:.{0 if not unit or size >= 99.5 else 1}f} {BYTES[unit]}"


BYTES = ("B", "kB", "MB", "GB", "TB", "PB")


def totals(history: History) -> dict[str, Json]:
    """Sums over the changes; null: no report says."""
    resizes, changes = history.resizes, history.changes
    paused = [each.paused_s for each in changes if each.paused_s is not None]
    lost = [each.steps_lost for each in resizes if each.steps_lost is not None]
    moved = [each.bytes_moved for each in resizes if each.bytes_moved is not None]
    return {
        "changes": len(changes),
        "paused_s": round(sum(paused), 6),
        "steps_lost": sum(lost) if lost or not changes else None,
        "bytes_moved": sum(moved) if moved or not changes else None,
    }


def summary(history: History) -> str:
    """The sums as a sentence."""
    found = totals(history)
    changes, lost = found["changes"], found["steps_lost"]
    return (
        f"{changes} change{'s' if changes != 1 else ''}: {seconds_text(found['paused_s'])} without "
        f"a step, {'unknown' if lost is None else lost} steps lost, "
        f"{'unknown bytes' if found['bytes_moved'] is None else bytes_text(found['bytes_moved'])} "
        "moved"
    )
