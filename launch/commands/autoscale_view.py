"""A live job as a policy sees it: speeds and pauses from its own history."""

import math
import statistics
from collections.abc import Callable, Mapping

import numpy as np

from scalai.core.cluster.question import ClusterJob, Floats, Standing
from scalai.core.cluster.speeds import first_rates, fit, usual_size
from scalai.launch.commands.autoscale_jobs import JobFile, Seen
from scalai.launch.commands.job_history import History

PAUSE_S = 10.0
"""Standstill of a change until one is measured, in seconds."""
FEW_STEPS = 3
"""Steps of a stretch that say something about its speed."""


def pause_of(history: History | None) -> float:
    """Usual standstill of a change by choice, in seconds."""
    resizes = () if history is None else history.changes
    found = [each.paused_s for each in resizes if each.paused_s and not each.is_recovery]
    return statistics.median(found) if found else PAUSE_S


def measured(history: History | None) -> Mapping[tuple[int, int], float]:
    """Seconds of a step by (hosts, devices), over all stretches with steps enough."""
    steps, seconds = dict[tuple[int, int], int](), dict[tuple[int, int], float]()
    for each in () if history is None else history.stretches:
        size = len(each.resize.workers), each.resize.ranks
        if each.end is None or each.last is None or each.last - each.first < FEW_STEPS:
            continue
        steps[size] = steps.get(size, 0) + each.last - each.first
        seconds[size] = seconds.get(size, 0.0) + each.end - each.begin
    return {size: seconds[size] / made for size, made in steps.items() if size[1]}


def view(
    file: JobFile,
    seen: Seen,
    now: float,
    per_host: int,
    *,
    most: int,
    is_valid: Callable[[int], bool],
    pending: tuple[int, float] | None = None,
) -> ClusterJob:
    """The job as a policy sees it.

    Args:
        most: Most devices that it can have.
        is_valid: Whether it can have a size.
        pending: A size that was asked for, and the seconds since.
    """
    history = seen.history if seen.workers else None
    resizes = () if history is None else history.resizes
    begun = resizes[0].at - sum(resizes[0].seconds.values()) if resizes else file.at
    stretches = () if history is None else history.stretches
    service = sum(each.resize.ranks * ((each.end or now) - each.begin) for each in stretches)
    since = now - resizes[-1].at if resizes else math.inf
    devices = seen.devices
    if pending is not None and devices:
        devices, since = pending
    least = min(file.devices[0], most)
    asked = min(max(file.asked, least), most)
    rates = _rates(history, asked, (least, most), per_host)
    for size in range(len(rates)):
        if size and size != devices and not is_valid(size):
            rates[size] = 0.0
    step = seen.status["step"] if seen.status is not None else 0
    return ClusterJob(
        file.name, file.name, min(file.at, begun), asked, (least, most),
        Standing(devices, max(0.0, now - begun) if devices else 0.0, service, since),
        rates, None if file.steps is None else float(max(0, file.steps - step)),
        pause_of(history), file.priority,
    )  # fmt: skip


def _rates(history: History | None, asked: int, allowed: tuple[int, int], per_host: int) -> Floats:
    """Steps a second by devices: from the job's own steps, as in the simulator, at its constant
    global batch, which counts as 1."""
    rows = {
        (hosts, devices, 1.0 / devices): (seconds, 0.0)
        for (hosts, devices), seconds in measured(history).items()
        if seconds > 0
    }
    if not rows:
        return first_rates(asked, allowed)
    model = fit(rows, asked, per_host, (1.0 / usual_size(asked, per_host), 1))
    least, most = allowed
    devices = np.arange(1, most + 1)
    rates: Floats = 1.0 / model.step(-(-devices // per_host), devices, 1.0 / devices)
    rates[: least - 1] = 0.0
    return np.concatenate([[0.0], rates])
