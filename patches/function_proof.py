"""The numbers by which a change is proven to compute the same function, of whichever framework."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from scalai.core.function_proof import Numbers

log = logging.getLogger(__name__)


class NumberedSession(Protocol):
    """What is needed of ``scalai.runtime.session.Session``."""

    def note_numbers(self, numbers: Numbers) -> None:
        """Say what a step has computed before its update."""


def probe(session: NumberedSession, numbers: Callable[[], Numbers]) -> None:
    """Tell the numbers of a step. Whatever goes wrong with them is said, and no failure: the job
    goes on without a proof."""
    try:
        session.note_numbers(numbers())
    except Exception as error:
        log.warning("event=function_unproven the step's numbers are not known: %r", error)


def mean(value: float, group: Any, device: torch.device) -> float:
    """Return the mean over a group of replicas; a collective on them."""
    summed = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(summed, group=group)
    return float(summed.item()) / dist.get_world_size(group)


def randomness_of(modules: list[torch.nn.Module]) -> str:
    """Return why two passes of a model differ by their random streams; empty: they do not."""
    for module in modules:
        for name, part in module.named_modules():
            if isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.p and part.training:
                return f"dropout {part.p:g} ({name}): other degrees have other random streams"
    return ""
