"""Service of a job as the past of its kind and user predicts it; a queue by it; and hosts kept on
by predicted demand."""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from scalai.core.cluster.question import Ended
from scalai.core.errors import RefusedError

_ROLLING = 50
"""Newest jobs that count for a prediction."""
_ENOUGH = 3
"""Jobs from which on a narrower history is believed."""


class Forecast:
    """Rolling means of the seconds that jobs ran, by kind and devices, kind, user, and all.

    Source:
        Helios (Hu et al., SC 2021), the rolling estimate of its quasi-shortest-service-first
        scheduler; differs in: no learned model beside it.
    """

    def __init__(self, past: Iterable[Ended] = ()) -> None:
        self._of: dict[tuple[str, ...], deque[float]] = {}
        for one in past:
            self.add(one)

    def add(self, one: Ended) -> None:
        for key in _keys(one.kind, one.user, one.devices):
            self._of.setdefault(key, deque(maxlen=_ROLLING)).append(one.ran_s)

    def seconds(self, kind: str, user: str, devices: int) -> float | None:
        """Return the predicted seconds; None: nothing has ended yet."""
        *narrow, every = _keys(kind, user, devices)
        for key in narrow:
            if len(found := self._of.get(key, ())) >= _ENOUGH:
                return fmean(found)
        return fmean(self._of[every]) if every in self._of else None


def _keys(kind: str, user: str, devices: int) -> list[tuple[str, ...]]:
    size = str(devices)
    return [("kind", kind, user, size), ("kind", kind, user), ("user", user), ("all",)]


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job of fixed length that waits for its devices once and keeps them."""

    at_s: float
    devices: int
    seconds: float
    kind: str = ""
    user: str = ""


@dataclass(frozen=True, slots=True)
class Served:
    """Begin and predicted seconds of each job, in the order given; busy devices over time.

    ``predicted_s``: None where nothing had ended before the submission.
    """

    begin_s: tuple[float, ...]
    predicted_s: tuple[float | None, ...]
    busy: tuple[tuple[float, int], ...] = field(repr=False)

    def mean_completion_s(self, jobs: Sequence[QueuedJob]) -> float:
        return fmean(
            begin + job.seconds - job.at_s for begin, job in zip(self.begin_s, jobs, strict=True)
        )


def serve(
    jobs: Sequence[QueuedJob], devices: int, *, by_service: bool, is_known: bool = False
) -> Served:
    """Serve jobs in order of submission, or of predicted device-seconds; the first one blocks.

    Args:
        is_known: An oracle: the prediction is the truth.

    Raises:
        RefusedError: A job wants more devices than there are.
    """
    largest = max((job.devices for job in jobs), default=0)
    if largest > devices:
        raise RefusedError(
            f"a job wants {largest} devices of {devices}; give more, or leave it out."
        )
    begins = [0.0] * len(jobs)
    said: list[float | None] = [None] * len(jobs)
    forecast = Forecast()
    queue: list[tuple[float, int]] = []
    ends: list[tuple[float, int]] = []
    busy: list[tuple[float, int]] = []
    free = devices
    order = sorted(range(len(jobs)), key=lambda at: (jobs[at].at_s, at))
    arrived = 0
    while arrived < len(order) or queue or ends:
        upcoming = jobs[order[arrived]].at_s if arrived < len(order) else float("inf")
        now = min(upcoming, ends[0][0] if ends else float("inf"))
        while ends and ends[0][0] <= now:
            _, at = heapq.heappop(ends)
            free += jobs[at].devices
            forecast.add(Ended(jobs[at].kind, jobs[at].devices, jobs[at].seconds, jobs[at].user))
        while arrived < len(order) and jobs[order[arrived]].at_s <= now:
            at = order[arrived]
            job = jobs[at]
            told = forecast.seconds(job.kind, job.user, job.devices)
            said[at] = job.seconds if is_known else told
            rank = (said[at] or 0.0) * job.devices if by_service else 0.0
            heapq.heappush(queue, (rank, arrived))
            arrived += 1
        while queue and jobs[order[queue[0][1]]].devices <= free:
            at = order[heapq.heappop(queue)[1]]
            begins[at] = now
            free -= jobs[at].devices
            heapq.heappush(ends, (now + jobs[at].seconds, at))
        busy.append((now, devices - free))
    return Served(tuple(begins), tuple(said), tuple(busy))


@dataclass(frozen=True, slots=True)
class PowerRule:
    """When hosts are switched.

    Attributes:
        spare: Hosts on beyond the demand.
        rest_steps: Steps after a switch without switching off.
        ahead_steps: Steps for which demand is predicted.
        day_steps: Steps of a day.
    """

    spare: int
    rest_steps: int = 10
    ahead_steps: int = 18
    day_steps: int = 144


def hosts_on(demand: Sequence[int], on: int, rested: int, rule: PowerRule) -> int:
    """Return the hosts to keep on after the newest step.

    Args:
        demand: Hosts in use at each past step, the newest last.
        on: Hosts on now.
        rested: Steps since the last switch.

    Source:
        Helios (SC 2021), cluster energy saving; differs in: the demand ahead is predicted by that
        of yesterday's same hours and the trend since, without a learned model.
    """
    now = demand[-1]
    ahead = max(_expected(demand, rule), now)
    if on < now + rule.spare // 2:
        return ahead + rule.spare
    is_falling = now <= demand[-1 - min(rule.rest_steps, len(demand) - 1)]
    if rested >= rule.rest_steps and is_falling and on > ahead + rule.spare:
        return ahead + rule.spare
    return on


def _expected(demand: Sequence[int], rule: PowerRule) -> int:
    """Return the greatest demand expected ahead."""
    recent = max(demand[-rule.ahead_steps :])
    if len(demand) <= rule.day_steps:
        return recent
    start = len(demand) - rule.day_steps
    then = demand[start - 1]
    rise = max(demand[start : start + rule.ahead_steps]) - then
    return max(demand[-1] + rise, round(0.5 * (recent + demand[-1])))
