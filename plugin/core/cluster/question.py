"""The question of a cluster: jobs, devices and the cost of a change in; devices of each job out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Standing:
    """What a job has had so far.

    Attributes:
        devices: Devices now; 0: it waits.
        ran_s: Seconds since submission with devices, standstill included.
        service_s: Device-seconds, standstill included.
        since_s: Seconds with the present devices.
    """

    devices: int = 0
    ran_s: float = 0.0
    service_s: float = 0.0
    since_s: float = inf


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A job as a policy sees it, in the simulator and live.

    Attributes:
        kind: Name that recurs with the same training, for histories.
        submitted_s: On the clock of ``Question.now_s``.
        asked: Devices that a person asked for.
        allowed: Least and most devices.
        rates: Predicted progress a second at its best allowed batch, by devices on the fewest
            hosts; index 0 is 0. Sizes that no valid layout has, or that are not allowed, have 0.
        remaining: Progress until its end, in the unit of ``rates``; None: not stated.
        pause_s: Standstill of a change of its devices.
        priority: Factor of its worth; 1 is usual.
    """

    name: str
    kind: str
    submitted_s: float
    asked: int
    allowed: tuple[int, int]
    standing: Standing
    rates: Floats
    remaining: float | None = None
    pause_s: float = 0.0
    priority: float = 1.0

    @property
    def devices(self) -> int:
        return self.standing.devices


@dataclass(frozen=True, slots=True)
class Ended:
    """A job of the past, for histories."""

    kind: str
    devices: int
    ran_s: float
    user: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """Jobs in order of submission, and devices on equal hosts.

    Attributes:
        near: Part of a gain that lies within the noise of measured speeds.
    """

    now_s: float
    jobs: tuple[ClusterJob, ...]
    hosts: int
    per_host: int
    ended: tuple[Ended, ...] = ()
    near: float = 0.0

    @property
    def devices(self) -> int:
        return self.hosts * self.per_host


Memory = Mapping[str, float]
"""A number of each job that a policy wants back; without it, it begins anew from the jobs."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Devices of each job with any. ``memory`` belongs to the policy."""

    devices: Mapping[str, int]
    memory: Memory = field(default_factory=dict)


Policy = Callable[[Question, Memory], Answer]
