"""Calls of persons to a job's coordinator, by commands without numpy. ``job``: its name; None: the
person named only the coordinator."""

from dataclasses import dataclass

from scalai.core.messages.shared import JsonText, Request


@dataclass(frozen=True, slots=True)
class Status(Request[JsonText]):
    """Return the state of the job."""

    job: str | None = None


@dataclass(frozen=True, slots=True)
class Scale(Request[JsonText]):
    """Change the numbers of workers and hosts of the job, or its degrees; as ``scalai scale``."""

    nproc: int | None
    nnodes: int | None
    degrees: str | None
    dry_run: bool
    job: str | None = None


@dataclass(frozen=True, slots=True)
class Resume(Request[JsonText]):
    """Go on from this generation, though a newer one is not whole; as ``scalai resume``."""

    generation: int
    dry_run: bool
    job: str | None = None


@dataclass(frozen=True, slots=True)
class ReadSpec(Request[JsonText]):
    """Return the job's specification."""

    job: str | None = None


@dataclass(frozen=True, slots=True)
class ReadReports(Request[JsonText]):
    """Return the newest reports of changes, their folder if any, and the newest step."""

    job: str | None = None


PersonCall = Status | Scale | Resume | ReadSpec | ReadReports
