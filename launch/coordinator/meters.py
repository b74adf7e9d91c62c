"""Metrics of a job, by names, units and labels of docs/monitoring.md: readers of its events, and of
what it looks like between them.

Counters begin anew with each coordinator.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client import disable_created_metrics as _without_created
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from scalai.core.jsonable import Json
from scalai.launch.coordinator.sight import JobSight
from scalai.launch.coordinator.spending import REASONS, TRAINS
from scalai.launch.coordinator.timeline import PHASES
from scalai.launch.log_events import LogEvent

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 300, 600)
"""Buckets of changes, in seconds."""
STEP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150)
"""Buckets of steps, in seconds."""
MOST_STEPS = 10_000
"""Most steps between two looks in the histogram."""
_AXES = ("tp", "pp", "dp", "cp", "ep")
_KINDS = ("grow", "shrink", "degrees", "recovery", "notice")
_FAILURES = {"workers_failed": "worker", "lost": "host", "hung": "hang", "health_failed": "health"}
_SNAPSHOTS = {
    "snapshot_refused": "refused", "snapshot_incomplete": "incomplete", "not_rescued": "incomplete",
}  # fmt: skip
_COMMITTED = ("start", "snapshot", "rescued", "recovered")


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of the table.

    Attributes:
        kind, about: Its class and help.
        see: Value of a gauge at a look, or values by label; None: unknown.
        labels: Labels beside ``job``, with their values; none: they come and go.
        buckets: Of a histogram.
    """

    kind: type[Any]
    about: str
    see: Callable[[JobSight], float | Mapping[str, float] | None] | None = None
    labels: Mapping[str, Iterable[str]] = field(default_factory=dict)
    buckets: tuple[float, ...] = SECONDS

    def make(self, name: str, registry: CollectorRegistry) -> Any:
        how = {"buckets": self.buckets} if self.kind is Histogram else {}
        labels = "job", *self.labels
        return self.kind(f"scalai_{name}", self.about, labels, registry=registry, **how)


def _degrees(now: JobSight) -> dict[str, float]:
    return {axis: now.degrees.get(axis, 1 if now.degrees else 0) for axis in _AXES}


METERS: Mapping[str, Metric] = {
    "build": Metric(Info, "Releases of the job."),
    "workers": Metric(Gauge, "Workers in the present round.", lambda now: now.workers),
    "workers_idle": Metric(
        Gauge, "Devices of staying hosts without a worker.", lambda now: now.idle),
    "hosts": Metric(Gauge, "Hosts by state.", lambda now: now.hosts, {"state": ()}),
    "hosts_min": Metric(Gauge, "Least number of hosts (--nnodes).", lambda now: now.hosts_min),
    "hosts_max": Metric(
        Gauge, "Largest number of hosts (--nnodes, scalai scale).", lambda now: now.hosts_max),
    "degree": Metric(Gauge, "Degrees of the present round.", _degrees, {"kind": ()}),
    "step": Metric(Gauge, "Furthest optimizer step of the present round.", lambda now: now.step),
    "last_step_timestamp_seconds": Metric(
        Gauge, "Time of the newest step, in seconds since 1970."),
    "steps": Metric(Counter, "Optimizer steps made, repeated ones included."),
    "samples": Metric(Counter, "Samples of these steps, where the batch is known."),
    "steps_lost": Metric(Counter, "Steps dropped by a return to an older state.", None,
        {"cause": ("lost", "failed", "function", "other")}),
    "step_seconds": Metric(
        Histogram, "Seconds of a step, means between two looks.", buckets=STEP_SECONDS),
    "changes": Metric(Counter, "Changes of the job.", None,
        {"kind": _KINDS, "outcome": ("done", "failed", "withdrawn")}),
    "change_seconds": Metric(Histogram, "Seconds of a change by phase.", None, {"phase": PHASES}),
    "pause_seconds": Metric(
        Histogram, "Seconds without a step at a change.", None, {"kind": _KINDS}),
    "training_seconds": Metric(Counter, "Seconds in which workers could step."),
    "stopped_seconds": Metric(Counter, "Seconds without training.", None, {"reason": REASONS}),
    "wasted_seconds": Metric(
        Counter, "Training seconds of lost steps (wasted progress from disruption)."),
    "generation_age_seconds": Metric(
        Gauge, "Age of the newest generation.", lambda now: now.generation_age_s),
    "generation_bytes": Metric(
        Gauge, "Bytes of the newest generation on all hosts.", lambda now: now.generation_bytes),
    "replicas_behind": Metric(
        Gauge, "Generations newer than the newest with replicas.", lambda now: now.replicas_behind),
    "snapshots": Metric(Counter, "Snapshots by outcome.", None,
        {"outcome": ("committed", "refused", "incomplete")}),
    "durable_age_seconds": Metric(Gauge, "Since the newest archive to --durable-dir."),
    "failures": Metric(Counter, "Failures by kind.", None, {"kind": _FAILURES.values()}),
    "restarts_remaining": Metric(
        Gauge, "Failures that the job still survives.", lambda now: now.restarts_left),
    "notice_remaining_seconds": Metric(
        Gauge, "Time left of leaving hosts with notice.", None, {"host": (), "source": ()}),
    "coordinator_term": Metric(Gauge, "Coordinators of the job so far.", lambda now: now.term),
    "log_events": Metric(
        Counter, "Warnings and errors of the job.", None, {"level": ("WARNING", "ERROR")}),
}  # fmt: skip
"""All metrics of docs/monitoring.md, without prefix and the ending by kind."""


class Meters:
    """The metrics of a job. Any thread may call it.

    Args:
        job: Name of the job, a label of all.
        framework, framework_version: Facts for ``scalai_build_info``.
    """

    def __init__(self, job: str, framework: str = "own", framework_version: str = "") -> None:
        _without_created()  # type: ignore[no-untyped-call]  # it has no types
        self.registry = CollectorRegistry(auto_describe=True)
        self._job, self._lock = job, threading.Lock()
        self._metrics = {name: each.make(name, self.registry) for name, each in METERS.items()}
        self._before: JobSight | None = None
        self._stepped_at: float | None = None
        """Time of the newest step of the present round; None: it has none."""
        self._archived_at: float | None = None
        self._notices: dict[str, tuple[str, float]] = {}
        """Source and end of each leaving host's notice."""
        facts = {"framework": framework, "framework_version": framework_version}
        self._at("build").info({"version": version("scalai"), **facts})
        for name, meter in METERS.items():
            if meter.kind is not Gauge:  # the first increase is seen too
                for values in product(*meter.labels.values()):
                    self._at(name, *values)

    def _at(self, name: str, *labels: str) -> Any:
        return self._metrics[name].labels(self._job, *labels)

    # ------------------------------------------------------------------ events

    def hear(self, event: LogEvent) -> None:
        """Count an event of the coordinator."""
        with self._lock:
            self._hear(event)

    def _hear(self, event: LogEvent) -> None:
        name, facts = event.name, event.facts
        if event.level in ("WARNING", "ERROR"):
            self._at("log_events", event.level).inc()
        if name in _FAILURES:
            self._at("failures", _FAILURES[name]).inc()
        elif name in _SNAPSHOTS:
            self._at("snapshots", _SNAPSHOTS[name]).inc()
        elif name in _COMMITTED:
            if "committed" in facts:
                self._at("snapshots", "committed").inc()
            elif event.text.startswith("refused"):
                self._at("snapshots", "refused").inc()
        elif name in ("withdrawn", "change_failed"):
            kind, outcome = facts.get("change"), "withdrawn" if name == "withdrawn" else "failed"
            self._at("changes", kind if kind in _KINDS else "degrees", outcome).inc()
        elif name == "archived":
            self._archived_at = event.at
        elif name == "notice" and isinstance(facts.get("left_s"), int | float):
            source, left_s = str(facts.get("source", "")), float(facts["left_s"])
            self._notices[str(facts.get("host"))] = source.partition(":")[0], event.at + left_s
        elif name == "resized":
            self._changed(facts)

    def _changed(self, report: Json) -> None:
        kind = report.get("kind")
        if kind in _KINDS:
            self._at("changes", kind, "done").inc()
            self._at("pause_seconds", kind).observe(report.get("paused_s", 0.0))
        for phase, seconds in report.get("seconds", {}).items():
            if phase in PHASES and seconds:
                self._at("change_seconds", phase).observe(seconds)
        if lost := report.get("steps_lost", 0):
            cause = report.get("cause")
            cause = cause if cause in ("lost", "failed", "function") else "other"
            self._at("steps_lost", cause).inc(lost)
            step_s = self._before.step_s if self._before else 0.0
            self._at("wasted_seconds").inc(lost * step_s)

    # ------------------------------------------------------------------ looks

    def see(self, sight: JobSight) -> None:
        """Note the job at a later moment."""
        with self._lock:
            before, self._before = self._before, sight
            self._count(before, sight)
            self._show(sight)

    def _count(self, before: JobSight | None, now: JobSight) -> None:
        """Count steps and seconds since the look before."""
        for use, seconds in now.seconds.items():
            more = max(0.0, seconds - (before.seconds[use] if before else 0.0))
            if use == TRAINS:
                self._at("training_seconds").inc(more)
            else:
                self._at("stopped_seconds", use).inc(more)
        made = now.steps_made - (before.steps_made if before else 0)
        is_same = before is not None and before.round == now.round
        since = self._stepped_at if is_same else None
        if made <= 0:
            self._stepped_at = since
            return
        self._stepped_at = now.at
        self._at("steps").inc(made)
        if now.samples is not None:
            self._at("samples").inc(made * now.samples)
        self._at("last_step_timestamp_seconds").set(time.time())
        if since is not None and now.is_training:
            for _ in range(min(made, MOST_STEPS)):
                self._at("step_seconds").observe((now.at - since) / made)

    def _show(self, now: JobSight) -> None:
        for name, meter in METERS.items():
            found = None if meter.see is None else meter.see(now)
            if isinstance(found, Mapping):
                for label, value in found.items():
                    self._at(name, label).set(value)
            elif found is not None:
                self._at(name).set(found)
        if self._archived_at is not None:
            self._at("durable_age_seconds").set(time.time() - self._archived_at)
        self._metrics["notice_remaining_seconds"].clear()
        self._notices = {h: kept for h, kept in self._notices.items() if h in now.leaving}
        for host, (source, until) in self._notices.items():
            left_s = max(0.0, until - time.time())
            self._at("notice_remaining_seconds", host, source).set(left_s)

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        with self._lock:
            return generate_latest(self.registry)
