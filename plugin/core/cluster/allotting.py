"""Devices of many jobs with the greatest sum of their worths, exactly."""

from collections.abc import Sequence

import numpy as np

from scalai.core.cluster.question import Floats


def sizes_of(most: int, per_host: int) -> list[int]:
    """Return the sizes a job may take: any within a host, then whole hosts."""
    within = list(range(1, min(most, per_host) + 1))
    return within + list(range(2 * per_host, most + 1, per_host))


def allot(worths: Sequence[Floats], sizes: Sequence[int], devices: int) -> list[int]:
    """Return the devices of each job, 0 or one of ``sizes``, that maximize the sum of worths.

    Args:
        worths: Of each job, the worth of 0 devices and of each of ``sizes``; ``-inf``: not allowed.

    Source:
        Saxena et al. (MASCOTS 2020), the dynamic program over jobs and devices; differs in: jobs
        may wait, and devices may idle. O(jobs·devices·sizes).
    """
    best = np.zeros(devices + 1)
    chosen = np.zeros((len(worths), devices + 1), dtype=np.int16)
    for job, worth in enumerate(worths):
        # best[k]: the greatest sum with k devices at most; ascending, so that devices may idle.
        found = best + worth[0]
        for place, size in enumerate(sizes[: len(worth) - 1], 1):
            if size > devices or worth[place] == -np.inf:
                continue
            tried = best[: devices + 1 - size] + worth[place]
            room = found[size:]
            better = tried > room + 1e-12
            chosen[job, size:][better] = place
            np.copyto(room, tried, where=better)
        best = found
    given = [0] * len(worths)
    left = devices
    for job in range(len(worths) - 1, -1, -1):
        place = int(chosen[job, left])
        given[job] = sizes[place - 1] if place else 0
        left -= given[job]
    return given
