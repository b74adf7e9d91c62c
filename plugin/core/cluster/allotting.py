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
    # sums[j][k]: the greatest sum of the first j jobs with k devices at most.
    sums = np.zeros((len(worths) + 1, devices + 1))
    added = np.empty(devices + 1)
    for job, worth in enumerate(worths):
        before, found = sums[job], sums[job + 1]
        np.add(before, worth[0], out=found)
        for place, size in enumerate(sizes[: len(worth) - 1], 1):
            if size <= devices and worth[place] > -np.inf:
                room = found[size:]
                tried = np.add(before[: devices + 1 - size], worth[place], out=added[size:])
                np.maximum(room, tried, out=room)
    given, left = [0] * len(worths), devices
    for job in range(len(worths) - 1, -1, -1):
        worth, before = worths[job], sums[job]
        best = before[left] + worth[0]
        for place, size in enumerate(sizes[: len(worth) - 1], 1):
            if size <= left and before[left - size] + worth[place] > best:
                best, given[job] = before[left - size] + worth[place], size
        left -= given[job]
    return given


def settle(
    worths: Sequence[Floats],
    sizes: Sequence[int],
    given: Sequence[int],
    present: Sequence[int],
    near: float,
) -> list[int]:
    """Return an allotment in which no noise of a measurement has chosen who grows or shrinks.

    A growth, or the place in a shrinking, moves to a job with fewer devices, or as many and an
    earlier place, where this takes at most the part ``near`` of its worth. No more jobs change.

    Args:
        worths, sizes: As of ``allot``.
        present: Devices of each job now.
        near: Part of a worth; 0: only equal ones move.
    """
    found, place = list(given), {size: at for at, size in enumerate((0, *sizes))}

    def gain(job: int, low: int, high: int) -> float:
        """Worth of the devices from a size to a larger one."""
        worth = worths[job]
        at = place.get(high, len(worth))
        return float(worth[at] - worth[place[low]]) if at < len(worth) else -np.inf

    for _ in found:
        before = list(found)
        for one in range(len(found)):
            for other in range(len(found)):
                if found[one] > present[one] and found[other] == present[other]:
                    count = found[one] - present[one]
                elif found[one] == present[one] and found[other] < present[other]:
                    count = present[other] - found[other]
                else:
                    continue
                left = found[one] - count
                if left not in place or (left, one) <= (found[other], other):
                    continue
                kept = gain(one, left, found[one])
                if gain(other, found[other], found[other] + count) >= (1 - near) * kept:
                    found[one], found[other] = left, found[other] + count
        if found == before:
            break
    return found
