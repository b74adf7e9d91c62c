"""Who keeps the others waiting in a training that hangs, judged by where its ranks stand.

In a training whose ranks wait for each other all have made the same step, so the number of steps
rarely tells. Where a rank does not even answer, or stands elsewhere than most, that does.

Source: MegaScale and ByteRobust (ByteDance), "stack aggregation": ranks with the stacks of few are
suspected. Differs in: who waits in a collective is never suspected, and where nothing tells nobody
is named.
"""

from collections import Counter
from collections.abc import Mapping

from scalai.core.messages.events import Stalled

SILENT = "does not answer"
"""How the place of a rank begins that was stopped, or hangs in the kernel."""
COLLECTIVES = "torch/distributed/"
"""Frames of a rank that waits for others, as far as Python knows."""
FRAMES_APART = " < "
"""Between two frames of a place, the innermost first."""

Ranks = Mapping[str, tuple[int, ...]]
"""Ranks by host."""


def behind(stalls: Mapping[str, Stalled]) -> Ranks:
    """Return the ranks for which the others wait, by host; none where nothing tells.

    Args:
        stalls: Of all hosts of the round.
    """
    lowest = min(each.step for each in stalls.values())
    late = {host: each.ranks for host, each in stalls.items() if each.step == lowest}
    if len(late) < len(stalls):
        return late
    places = {rank: place for each in stalls.values() for rank, place in each.where}
    found = _apart(places)
    named = {
        host: tuple(rank for rank, _ in each.where if rank in found)
        for host, each in sorted(stalls.items())
    }
    return {host: ranks for host, ranks in named.items() if ranks}


def _apart(places: Mapping[int, str]) -> frozenset[int]:
    """Return the ranks that stand apart: a minority that does not answer, that waits for nobody
    where others do, or whose innermost frame is not that of most."""
    silent = {rank for rank, place in places.items() if place.startswith(SILENT)}
    if silent and 2 * len(silent) <= len(places):
        return frozenset(silent)
    waiting = {rank for rank, place in places.items() if COLLECTIVES in place}
    busy = places.keys() - waiting
    if busy and 2 * len(busy) <= len(places):
        return frozenset(busy)
    inner = Counter(place.partition(FRAMES_APART)[0] for place in places.values())
    if not inner or len(inner) == 1:
        return frozenset()
    ((most, count),) = inner.most_common(1)
    if 2 * count <= len(places):
        return frozenset()
    others = {rank for rank, place in places.items() if not place.startswith(most)}
    return frozenset(others - waiting)
