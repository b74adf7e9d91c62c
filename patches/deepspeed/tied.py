"""Modules that several stages of a pipeline have: their weights are one tensor.

Each stage's ZeRO partitions cut them elsewhere, because other parameters lie beside them. Boxes of
one tensor have to be equal wherever they overlap, so every stage cuts at the ends of all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from scalai.patches.deepspeed.flat import Fragment
from scalai.patches.deepspeed.masters import Master


def cut_alike(engine: Any, masters: Sequence[Master]) -> list[Master]:
    """Return the masters with the cuts of tied modules of all stages united.

    The ranks that have a tied module exchange two numbers for each of its parameters; without a
    pipeline nothing is done. Call it on every rank.

    Source: ``PipelineModule._index_tied_modules``, runtime/pipe/module.py (0.16.0 to 0.19.8).
    """
    present = {id(f.parameter): f for master in masters for f in master.fragments}
    cuts: dict[int, tuple[int, ...]] = {}
    tied = getattr(engine.module, "tied_comms", {})
    for key in sorted(tied):
        members = list(tied[key]["module"].parameters())
        rows = _exchange([_regular(p, present) for p in members], tied[key]["group"], engine.device)
        for place, parameter in enumerate(members):
            united = {
                cut
                for stage in rows
                for cut in range(stage[place][0], parameter.numel(), stage[place][1])
            }
            cuts[id(parameter)] = tuple(sorted(united))
    return [
        replace(master, fragments=tuple(_with(fragment, cuts) for fragment in master.fragments))
        for master in masters
    ]


def _regular(parameter: torch.Tensor, fragments: Mapping[int, Fragment]) -> tuple[int, int]:
    """Return the first cut of a parameter here, and the distance of the others."""
    numel = max(parameter.numel(), 1)
    cuts = fragments[id(parameter)].cuts if id(parameter) in fragments else ()
    first = cuts[0] if cuts else numel
    return first, cuts[1] - cuts[0] if len(cuts) > 1 else numel


def _exchange(
    own: Sequence[tuple[int, int]], group: Any, device: torch.device
) -> list[list[list[int]]]:
    """Return what every rank of the group has, [ranks][parameters][2]."""
    mine = torch.tensor(own, dtype=torch.int64, device=device).view(-1, 2)
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, mine, group=group)
    return [values.tolist() for values in others]


def _with(fragment: Fragment, cuts: Mapping[int, tuple[int, ...]]) -> Fragment:
    key = id(fragment.parameter)
    return replace(fragment, cuts=cuts[key]) if key in cuts else fragment
