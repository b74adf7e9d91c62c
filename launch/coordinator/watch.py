"""Readers of a running coordinator: a stream of events, and a look each second
(docs/monitoring.md)."""

import logging
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.feeds import (
    EventReaders,
    EventsFile,
    MetricsFile,
    MetricsServer,
    OnEvent,
)
from scalai.launch.coordinator.live_job import LiveJob
from scalai.launch.coordinator.sight import Lookout

if TYPE_CHECKING:
    from scalai.launch.coordinator.meters import Meters

LOOK_S = 1.0
"""Seconds between two looks at the job."""
END_S, LEAST_S = 10.0, 1.0
"""Longest wait of an ending coordinator for its readers, all together, and for each at least."""

log = logging.getLogger("scalai.coordinator")


class Reader(Protocol):
    """Something that ends with the coordinator."""

    def close(self, within_s: float) -> None: ...


class JobReaders:
    """The readers that a job's command line names.

    Args:
        interface: Address that the coordinator listens at.
    """

    def __init__(
        self, spec: JobSpec, interface: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        options, self._clock, self._looked_at = spec.options, clock, float("-inf")
        self._lookout: Lookout | None = None
        self._has_failed = False
        self.meters: Meters | None = None
        self.server: MetricsServer | None = None
        self._events, self._readers = EventReaders("coordinator"), list[Reader]()
        if spec.report_dir is not None:
            file = EventsFile(spec.report_dir)
            self._events.add(file.hear)
            self._readers.append(file)
        if options.on_event is not None:
            hook = OnEvent(options.on_event, spec.job)
            self._events.add(hook.hear)
            self._readers.append(hook)
        if options.metrics_port is not None or options.metrics_file is not None:
            from scalai.launch.coordinator import meters as of_prometheus

            self.meters = meters = of_prometheus.Meters(_label(spec), *_framework(spec))
            self._events.add(meters.hear)
            if options.metrics_file is not None:
                self._readers.append(MetricsFile(Path(options.metrics_file), meters.text))
            if options.metrics_port is not None:
                address = interface, options.metrics_port
                self.server = MetricsServer(address, meters.text, of_prometheus.CONTENT_TYPE)
                self._readers.append(self.server)
        logging.getLogger("scalai").addHandler(self._events)
        log.setLevel(logging.DEBUG)  # the log itself has less

    def see(self, live: LiveJob) -> None:
        """Look at the job, once a second at most. Callers hold its lock."""
        now = self._clock()
        if self.meters is None or now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        try:
            self._lookout = self._lookout or Lookout(live)
            self.meters.see(self._lookout.look())
        except Exception:  # our own slip: the job needs no metrics
            if not self._has_failed:
                log.exception("event=error in the metrics")
            self._has_failed = True

    def close(self) -> None:
        """End the readers, once they have what was said."""
        end = time.monotonic() + END_S
        for reader in reversed(self._readers):  # the file of events may have more by then
            reader.close(max(LEAST_S, end - time.monotonic()))
        logging.getLogger("scalai").removeHandler(self._events)


def _label(spec: JobSpec) -> str:
    """Name of the job in its metrics: random names of standalone jobs would have no end."""
    is_random = spec.options.is_standalone and spec.job.startswith("standalone-")
    return "standalone" if is_random else spec.job


def _framework(spec: JobSpec) -> tuple[str, str]:
    """Name and version here of the job's framework, as its command line shows it."""
    if not spec.is_elastic:
        return "none", ""
    name = "own"
    if spec.script.arguments is not None:
        name = "megatron-core"
    elif spec.deepspeed is not None:
        name = "deepspeed"
    try:
        return name, version(name) if name != "own" else ""
    except PackageNotFoundError:
        return name, ""
