"""In which order the hosts of a running job take its ranks, so that the fewest bytes cross.

Degrees and who runs them are chosen before (``core/degrees/assignment.py``); here hosts change
places with each other. Where the shape of the model is known bytes are counted, else shares of a
model that all degrees cut alike.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from math import lcm

from scalai.core.degrees.degrees import Degrees
from scalai.core.errors import RefusedError
from scalai.core.job.membership import LOST, Assignment, Place
from scalai.core.planner.columns import Layout, Workload
from scalai.core.planner.model import ModelShape
from scalai.core.planner.overlaps import Overlap, overlaps_of
from scalai.core.planner.placement import Placed, place_by

KNOWN_CHANGES = 16
"""Changes of which it is kept what has been computed."""
WIDTH = 4096
"""Of a layer of a model whose shape is not known: wide enough to be cut by any degree of data
parallelism."""
FINENESS = 8
"""Such a model has at most so many layers by stage, so that few numbers say all."""
WORTH = 0.01
"""Hosts change places where more than this share of what they want need not cross: for less the
first rank, with what it logs and writes, stays where it is."""
MOST_PAIRS = 1 << 15
"""Of hosts and of replicas whose parts each of them wants: more of them keep the order of joining,
because the computation, which the whole job waits for, would take a good part of a second."""

Hosts = tuple[tuple[str, int], ...]


def make_place(work: Workload | None, sharding: Callable[[int], int]) -> Place:
    """Return the function that puts the hosts of an assignment in order.

    Args:
        work: What a step of the job computes; None: it is not known, or not modelled.
        sharding: What data-parallel ranks keep a part of (``columns.py``) on so many ranks.

    The returned function gives the same assignment where no other order is worth it. Ranks of a
    host stay neighbours, and only hosts with as many slots change places.
    """

    @lru_cache(maxsize=KNOWN_CHANGES)
    def overlaps(before: Degrees, after: Degrees) -> tuple[tuple[Overlap, ...], bool]:
        """Return them, and whether they are of the job's own model."""
        layouts = [Layout(each, 1, sharding=sharding(each.world_size)) for each in (before, after)]
        if work is not None:
            try:
                return overlaps_of(work, *layouts), True
            except RefusedError:  # the job has a layout that the formulas do not know
                pass
        return overlaps_of(_even_model(before, after), *layouts), False

    @lru_cache(maxsize=KNOWN_CHANGES)
    def placed(
        ran: Hosts, before: Degrees, hosts: Hosts, after: Degrees, slots: Hosts
    ) -> tuple[Placed, bool]:
        found, is_own = overlaps(before, after)
        return place_by(found, ran, hosts, devices=dict(slots), lost=frozenset({LOST})), is_own

    def place(target: Assignment, ran: Assignment, slots: Hosts) -> Assignment:
        held, wanted = (tuple(w for w in each.workers if w[1]) for each in (ran, target))
        is_as_before = held == wanted and ran.degrees == target.degrees
        if is_as_before or not dict(held).keys() & dict(slots).keys():
            return target
        if len(wanted) * ran.degrees.dp * ran.degrees.cp > MOST_PAIRS:
            return target
        best, is_own = placed(held, ran.degrees, target.workers, target.degrees, slots)
        if best.unplaced_moves - best.moves <= WORTH * best.needed:
            return target
        if not _is_settled(best.hosts, target.workers, dict(slots)):
            return target
        reason = f"{target.reason}; hosts placed: {_saved(best, is_own)}"
        return replace(target, workers=best.hosts, reason=reason)

    return place


def _is_settled(hosts: Hosts, given: Hosts, slots: Mapping[str, int]) -> bool:
    """Whether hosts change places with such of as many slots alone: who assigns ranks to them in
    this order then comes to the same, and no other change follows."""
    return [slots.get(name) for name, _ in hosts] == [slots.get(name) for name, _ in given]


def _saved(best: Placed, is_own: bool) -> str:
    if is_own:
        return f"{best.moves} bytes cross, {best.unplaced_moves} in the order of joining"
    share, before = best.moves / best.needed, best.unplaced_moves / best.needed
    return f"{share:.1%} of what is wanted crosses, {before:.1%} in the order of joining"


def _even_model(before: Degrees, after: Degrees) -> Workload:
    """Return a model of equal layers that both degrees cut into equal parts."""
    heads = lcm(before.tp, after.tp)
    chunks = before.pp * before.vpp, after.pp * after.vpp
    layers = min(lcm(*chunks), FINENESS * max(chunks))
    size = -(-WIDTH // heads)
    hidden = heads * size
    experts = lcm(before.ep, after.ep) if max(before.ep, after.ep) > 1 else 0
    shape = ModelShape(
        layers=layers, hidden=hidden, heads=heads, kv_groups=heads, head_dim=size, ffn=4 * hidden,
        vocab=heads, seq=1, has_bias=False, has_norm_bias=False, experts=experts,
        moe_layers=layers if experts else 0, top_k=1 if experts else 0,
        expert_ffn=4 * hidden if experts else 0,
    )  # fmt: skip
    return Workload(shape, 1)
