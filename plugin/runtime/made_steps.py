"""What steps have computed, told once it is known: nothing waits for a device."""

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from scalai.core.job.function_proof import MOST_STEPS


class MadeSteps:
    """Loss and gradient norm of the newest steps of one rank.

    Args:
        report: Takes a step, its loss and its norm; NaN: not known.
    """

    def __init__(self, report: Callable[[int, float, float], None]) -> None:
        self._report = report
        self._on_the_way: deque[tuple[int, _Copy, _Copy]] = deque(maxlen=MOST_STEPS)

    def note(self, step: int, loss: Any, norm: Any) -> None:
        """A step has ended. What lies on a device is told with a later step, once it has come."""
        self._on_the_way.append((step, _Copy(loss), _Copy(norm)))
        while self._on_the_way and all(copy.is_there for copy in self._on_the_way[0][1:]):
            step, loss, norm = self._on_the_way.popleft()
            self._report(step, loss.value, norm.value)


class _Copy:
    """A number, or a tensor of one on its way from a device into pinned memory."""

    def __init__(self, number: Any) -> None:
        self._number = number
        self._event: Any = None
        if isinstance(number, torch.Tensor) and number.is_cuda:
            self._number = number.detach().to("cpu", non_blocking=True)  # pinned by that
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(number.device))

    @property
    def is_there(self) -> bool:
        return self._event is None or bool(self._event.query())

    @property
    def value(self) -> float:
        return math.nan if self._number is None else float(self._number)
