"""Ranks that hold the same parameter cut it alike.

Where ZeRO's partitions meet in a parameter depends on what lies beside it, so a tied weight is cut
elsewhere on another stage of a pipeline, and a whole parameter on another tensor-parallel rank if
the shards beside it are uneven. Boxes of one tensor have to be equal wherever they overlap: every
rank cuts at the ends of all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from scalai.patches.deepspeed.engine import grid
from scalai.patches.deepspeed.engine.masters import Master

Cuts = tuple[int, ...]


def cut_alike(engine: Any, masters: Sequence[Master]) -> list[Master]:
    """Return the masters with the cuts of all ranks that hold the same parameters united.

    Those ranks exchange a few numbers for each parameter; without pipeline and tensor parallelism
    nothing is done. Call it on every rank.
    """
    cuts = {id(f.parameter): f.cuts for master in masters for f in master.fragments}
    for group, parameters in _sharers(engine):
        own = [cuts.get(id(parameter), ()) for parameter in parameters]
        for parameter, united in zip(parameters, _united(own, group, engine.device), strict=True):
            cuts[id(parameter)] = united
    return [
        replace(
            master,
            fragments=tuple(replace(f, cuts=cuts[id(f.parameter)]) for f in master.fragments),
        )
        for master in masters
    ]


def _sharers(engine: Any) -> Iterator[tuple[Any, list[torch.Tensor]]]:
    """Yield groups of ranks, this one among them, and the parameters that all of them hold.

    Source: ``PipelineModule._index_tied_modules``, runtime/pipe/module.py (0.16.0 to 0.19.8).
    """
    from deepspeed.utils import bwc

    tensor_parallel = grid.tensor_parallel(engine)
    if tensor_parallel.size > 1:
        named = engine.module.named_parameters()
        whole = [p for name, p in named if not tensor_parallel.is_cut(name, p)]
        yield bwc.bwc_tensor_model_parallel_group(engine.mpu), whole
    tied = getattr(engine.module, "tied_comms", {})
    for key in sorted(tied):
        yield tied[key]["group"], list(tied[key]["module"].parameters())


def _united(own: Sequence[Cuts], group: Any, device: torch.device) -> list[Cuts]:
    """Return for each parameter the cuts of all ranks of the group. Collective."""
    counts = torch.tensor([len(cuts) for cuts in own], dtype=torch.int64, device=device)
    most = torch.stack(_gathered(counts, group)).amax(0).tolist()
    # Padded to equal lengths: what is cut at 0 is not cut.
    padded = [cut for cuts, n in zip(own, most, strict=True) for cut in (*cuts, *[0] * n)[:n]]
    flat = torch.tensor(padded, dtype=torch.int64, device=device)
    ranks = [iter(values.tolist()) for values in _gathered(flat, group)]
    return [tuple(sorted({next(r) for r in ranks for _ in range(n)} - {0})) for n in most]


def _gathered(values: torch.Tensor, group: Any) -> list[torch.Tensor]:
    others = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    if values.numel():
        dist.all_gather(others, values, group=group)
    return others
