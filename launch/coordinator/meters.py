"""Metrics of a job, by names, units and labels of docs/monitoring.md: readers of its events, and of
what it looks like between them.

Counters begin anew with each coordinator.
"""

import threading
import time
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client import disable_created_metrics as _without_created
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from scalai.core.jsonable import Json
from scalai.launch.coordinator.sight import Sight
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
_STATES = ("training", "spare", "draining", "lost")
_AXES = ("tp", "pp", "dp", "cp", "ep")
_KINDS = ("grow", "shrink", "degrees", "recovery", "notice")
_FAILURES = {"workers_failed": "worker", "lost": "host", "hung": "hang", "health_failed": "health"}
_SNAPSHOTS = {
    "snapshot_refused": "refused", "snapshot_incomplete": "incomplete", "not_rescued": "incomplete",
}  # fmt: skip
_COMMITTED = ("start", "snapshot", "rescued", "recovered")


class Meters:
    """The metrics of a job. Any thread may call it.

    Args:
        job: Name of the job, a label of all.
        framework, framework_version: Facts for ``scalai_build_info``.
    """

    def __init__(self, job: str, framework: str = "own", framework_version: str = "") -> None:
        _without_created()  # type: ignore[no-untyped-call]  # it has no types
        self.registry = registry = CollectorRegistry(auto_describe=True)
        self._job = job
        self._lock = threading.Lock()
        self._before: Sight | None = None
        self._stepped_at: float | None = None
        """Time of the newest step of the present round; None: it has none."""
        self._archived_at: float | None = None
        self._notices: dict[str, tuple[str, float]] = {}
        """Source and end of each leaving host's notice."""

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(f"scalai_{name}", about, ("job", *labels), registry=registry)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"scalai_{name}", about, ("job", *labels), registry=registry)

        def histogram(
            name: str, about: str, *labels: str, buckets: tuple[float, ...] = SECONDS
        ) -> Histogram:
            given = ("job", *labels)
            return Histogram(f"scalai_{name}", about, given, buckets=buckets, registry=registry)

        build = Info("scalai_build", "Releases of the job.", ("job",), registry=registry)
        build.labels(job).info(
            {
                "version": version("scalai"), "framework": framework,
                "framework_version": framework_version,
            }
        )  # fmt: skip
        self._workers = gauge("workers", "Workers in the present round.")
        self._idle = gauge("workers_idle", "Devices of staying hosts without a worker.")
        self._hosts = gauge("hosts", "Hosts by state.", "state")
        self._hosts_min = gauge("hosts_min", "Least number of hosts (--nnodes).")
        self._hosts_max = gauge("hosts_max", "Largest number of hosts (--nnodes, scalai scale).")
        self._degree = gauge("degree", "Degrees of the present round.", "kind")
        self._step = gauge("step", "Furthest optimizer step of the present round.")
        self._last_step = gauge(
            "last_step_timestamp_seconds", "Time of the newest step, in seconds since 1970."
        )
        self._steps = counter("steps", "Optimizer steps made, repeated ones included.")
        self._samples = counter("samples", "Samples of these steps, where the batch is known.")
        self._lost = counter("steps_lost", "Steps dropped by a return to an older state.", "cause")
        self._step_s = histogram(
            "step_seconds", "Seconds of a step, means between two looks.", buckets=STEP_SECONDS
        )
        self._changes = counter("changes", "Changes of the job.", "kind", "outcome")
        self._phase_s = histogram("change_seconds", "Seconds of a change by phase.", "phase")
        self._pause_s = histogram("pause_seconds", "Seconds without a step at a change.", "kind")
        self._training_s = counter("training_seconds", "Seconds in which workers could step.")
        self._stopped_s = counter("stopped_seconds", "Seconds without training.", "reason")
        self._wasted_s = counter(
            "wasted_seconds", "Training seconds of lost steps (wasted progress from disruption)."
        )
        self._age = gauge("generation_age_seconds", "Age of the newest generation.")
        self._bytes = gauge("generation_bytes", "Bytes of the newest generation on all hosts.")
        self._behind = gauge("replicas_behind", "Generations newer than the newest with replicas.")
        self._snapshots = counter("snapshots", "Snapshots by outcome.", "outcome")
        self._durable = gauge("durable_age_seconds", "Since the newest archive to --durable-dir.")
        self._failures = counter("failures", "Failures by kind.", "kind")
        self._restarts = gauge("restarts_remaining", "Failures that the job still survives.")
        self._notice = gauge(
            "notice_remaining_seconds", "Time left of leaving hosts with notice.", "host", "source"
        )
        self._term = gauge("coordinator_term", "Coordinators of the job so far.")
        self._events = counter("log_events", "Warnings and errors of the job.", "level")
        self._begin()

    def _begin(self) -> None:
        """Show counters from 0 on: the first increase is seen too."""
        job = self._job
        for kind in _KINDS:
            for outcome in ("done", "failed", "withdrawn"):
                self._changes.labels(job, kind, outcome)
            self._pause_s.labels(job, kind)
        for phase in PHASES:
            self._phase_s.labels(job, phase)
        for reason in REASONS:
            self._stopped_s.labels(job, reason)
        for failure in _FAILURES.values():
            self._failures.labels(job, failure)
        for outcome in ("committed", "refused", "incomplete"):
            self._snapshots.labels(job, outcome)
        for level in ("WARNING", "ERROR"):
            self._events.labels(job, level)
        for cause in ("lost", "failed", "function", "other"):
            self._lost.labels(job, cause)
        for each in (self._steps, self._samples, self._step_s, self._training_s, self._wasted_s):
            each.labels(job)

    # ------------------------------------------------------------------ events

    def hear(self, event: LogEvent) -> None:
        """Count an event of the coordinator."""
        with self._lock:
            self._hear(event)

    def _hear(self, event: LogEvent) -> None:
        job, name, facts = self._job, event.name, event.facts
        if event.level in ("WARNING", "ERROR"):
            self._events.labels(job, event.level).inc()
        if name in _FAILURES:
            self._failures.labels(job, _FAILURES[name]).inc()
        elif name in _SNAPSHOTS:
            self._snapshots.labels(job, _SNAPSHOTS[name]).inc()
        elif name in _COMMITTED:
            if "committed" in facts:
                self._snapshots.labels(job, "committed").inc()
            elif event.text.startswith("refused"):
                self._snapshots.labels(job, "refused").inc()
        elif name in ("withdrawn", "change_failed"):
            kind, outcome = facts.get("change"), "failed"
            outcome = "withdrawn" if name == "withdrawn" else "failed"
            self._changes.labels(job, kind if kind in _KINDS else "degrees", outcome).inc()
        elif name == "archived":
            self._archived_at = event.at
        elif name == "notice" and isinstance(facts.get("left_s"), int | float):
            source, left_s = str(facts.get("source", "")), float(facts["left_s"])
            self._notices[str(facts.get("host"))] = source.partition(":")[0], event.at + left_s
        elif name == "resized":
            self._changed(facts)

    def _changed(self, report: Json) -> None:
        job, kind = self._job, report.get("kind")
        if kind in _KINDS:
            self._changes.labels(job, kind, "done").inc()
            self._pause_s.labels(job, kind).observe(report.get("paused_s", 0.0))
        for phase, seconds in report.get("seconds", {}).items():
            if phase in PHASES and seconds:
                self._phase_s.labels(job, phase).observe(seconds)
        if lost := report.get("steps_lost", 0):
            cause = report.get("cause")
            cause = cause if cause in ("lost", "failed", "function") else "other"
            self._lost.labels(job, cause).inc(lost)
            step_s = self._before.step_s if self._before else 0.0
            self._wasted_s.labels(job).inc(lost * step_s)

    # ------------------------------------------------------------------ looks

    def see(self, sight: Sight) -> None:
        """Note the job at a later moment."""
        with self._lock:
            before, self._before = self._before, sight
            self._count(before, sight)
            self._show(sight)

    def _count(self, before: Sight | None, now: Sight) -> None:
        """Count steps and seconds since the look before."""
        job = self._job
        for use, seconds in now.seconds.items():
            more = max(0.0, seconds - (before.seconds[use] if before else 0.0))
            if use == TRAINS:
                self._training_s.labels(job).inc(more)
            else:
                self._stopped_s.labels(job, use).inc(more)
        made = now.steps_made - (before.steps_made if before else 0)
        is_same = before is not None and before.round == now.round
        since = self._stepped_at if is_same else None
        if made <= 0:
            self._stepped_at = since
            return
        self._stepped_at = now.at
        self._steps.labels(job).inc(made)
        if now.samples is not None:
            self._samples.labels(job).inc(made * now.samples)
        self._last_step.labels(job).set(time.time())
        if since is not None and now.is_training:
            for _ in range(min(made, MOST_STEPS)):
                self._step_s.labels(job).observe((now.at - since) / made)

    def _show(self, now: Sight) -> None:
        job = self._job
        self._workers.labels(job).set(now.workers)
        self._idle.labels(job).set(now.idle)
        for state in _STATES:
            self._hosts.labels(job, state).set(now.hosts[state])
        self._hosts_min.labels(job).set(now.hosts_min)
        self._hosts_max.labels(job).set(now.hosts_max)
        for axis in _AXES:
            self._degree.labels(job, axis).set(now.degrees.get(axis, 0 if not now.degrees else 1))
        self._step.labels(job).set(now.step)
        if now.generation_age_s is not None:
            self._age.labels(job).set(now.generation_age_s)
        self._bytes.labels(job).set(now.generation_bytes)
        self._behind.labels(job).set(now.replicas_behind)
        if self._archived_at is not None:
            self._durable.labels(job).set(time.time() - self._archived_at)
        self._restarts.labels(job).set(now.restarts_left)
        self._term.labels(job).set(now.term)
        self._notice.clear()
        self._notices = {h: kept for h, kept in self._notices.items() if h in now.leaving}
        for host, (source, until) in self._notices.items():
            self._notice.labels(job, host, source).set(max(0.0, until - time.time()))

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        with self._lock:
            return generate_latest(self.registry)
