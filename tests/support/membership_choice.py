"""How a simulated job chooses the workers of its hosts."""

from dataclasses import replace

from scalai.core.degrees.degrees import Degrees
from scalai.core.degrees.passes import Recompute
from scalai.core.job import membership as m


def assign_all(minimum: int = 1, allowed: tuple[int, ...] = (1, 2, 3, 4, 6, 8)) -> m.Assign:
    """Return an assignment that takes the largest allowed number of workers."""

    def assign(hosts: tuple[tuple[str, int], ...], ran: m.Assignment | None) -> m.Assignment | None:
        world = max((n for n in allowed if n <= sum(s for _, s in hosts)), default=0)
        if len(hosts) < minimum or not world:
            return None
        workers = []
        left = world
        for name, slots in hosts:
            workers.append((name, min(slots, left)))
            left -= workers[-1][1]
        return m.Assignment(tuple(workers), Degrees(1, 1, world), 1, f"dp={world}")

    return assign


def ran(degrees: Degrees, recompute: Recompute | None = None) -> m.Assignment:
    """Return what ran on one host."""
    return m.Assignment((("a", degrees.world_size),), degrees, None, "it ran", recompute)


def turn_round(
    target: m.Assignment, ran: m.Assignment, slots: tuple[tuple[str, int], ...]
) -> m.Assignment:
    """A ``Place`` that never leaves hosts where they are."""
    return replace(target, workers=target.workers[::-1])
