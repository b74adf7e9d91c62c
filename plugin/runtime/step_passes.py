"""The passes of a step in a loop of one's own: a number, the one at hand, and its weight.

::

    for _ in job.passes:
        (loss(model, next(drawn)) * job.weight / job.passes).backward()

DP need not divide the batch then (``Shares``): a replica with one micro-batch less repeats its
first one as a filler, with weight zero, so that collectives within a pass meet their partners.

``PassClock`` measures the passes of a step, of any loop.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from scalai.core.degrees.batches import Batches
from scalai.core.errors import RefusedError, UsageError
from scalai.core.planner.meter import WARM_STEPS, WINDOW_STEPS


class _Mark:
    """A moment on this rank: on its device, if it computes on one, else of its processor."""

    def __init__(self) -> None:
        self._at = time.perf_counter()
        self._event: Any = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def has_come(self) -> bool:
        return self._event is None or bool(self._event.query())

    def since(self, begin: "_Mark") -> float:
        """Seconds from an earlier mark, once both have come."""
        if self._event is None or begin._event is None:
            return self._at - begin._at
        return float(begin._event.elapsed_time(self._event)) / 1000.0


class PassClock:
    """Seconds of a pass on this rank, without waits for other replicas: from the begin of a step's
    first pass to the begin of its last one. It waits for no device.

    Args:
        report: Takes the number of windows of ``WINDOW_STEPS`` steps so far, and the usual seconds
            of a pass in the newest.
    """

    def __init__(self, report: Callable[[int, float], None]) -> None:
        self._report = report
        self._begin: _Mark | None = None
        self._on_the_way: deque[tuple[_Mark, _Mark, int]] = deque(maxlen=WINDOW_STEPS)
        self._warm, self._windows = WARM_STEPS, 0
        self._window: list[float] = []

    def begin_pass(self, number: int, passes: int) -> None:
        """Note the begin of a step's pass, by its number from 0 on."""
        if number == 0:
            self._begin = _Mark()
        if number == passes - 1 > 0 and self._begin is not None:
            self._on_the_way.append((self._begin, _Mark(), number))

    def step_ended(self) -> None:
        """Report a window, once the marks of its steps have come."""
        while self._on_the_way and self._on_the_way[0][1].has_come:
            begin, end, passes = self._on_the_way.popleft()
            self._warm -= 1
            if self._warm < 0:
                self._window.append(end.since(begin) / passes)
        if len(self._window) >= WINDOW_STEPS:
            self._windows += 1
            self._report(self._windows, median(self._window))
            self._window = []


class StepPasses(int):
    """Number of passes of a replica in a step, fillers included. Iterating goes over them: the
    session knows each as the one at hand until the next one begins.

    Args:
        dp_rank: Index of the replica.
        hand: The session's pass at hand.
        is_trained: False: passes of an evaluation.
    """

    def __new__(cls, batches: Batches, dp_rank: int, *_: Any, **__: Any) -> "StepPasses":
        return super().__new__(cls, batches.shares.passes_of(dp_rank))

    def __init__(
        self, batches: Batches, dp_rank: int, hand: "PassAtHand", *, is_trained: bool
    ) -> None:
        self._batches, self._dp_rank = batches, dp_rank
        self._hand, self._is_trained = hand, is_trained

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of the passes, from 0 on."""
        return self._hand.over(self, is_trained=self._is_trained)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """A copy is a plain number."""
        return int, (int(self),)

    def is_filler(self, number: int) -> bool:
        """Return whether the pass of this number is a filler."""
        return self._batches.shares.is_filler(number, self._dp_rank)

    def weight(self, number: int) -> float:
        """Return the factor of this pass's loss in a mean over passes and replicas."""
        shares = self._batches.shares
        return 0.0 if self.is_filler(number) else int(self) * shares.dp / shares.micro_batches


@dataclass(slots=True)
class _Pass:
    of: StepPasses
    number: int
    is_asked: bool = False
    """Whether the loop has asked for its weight."""


class PassAtHand:
    """The pass under way in this process, and whether a loop weighs the losses of its steps.

    Args:
        begin_pass: As of ``PassClock``, for the passes of the training.
    """

    def __init__(self, begin_pass: Callable[[int, int], None]) -> None:
        self._begin_pass = begin_pass
        self._of_training: Callable[[], StepPasses] | None = None
        self._is_drawing: Callable[[], bool] | None = None
        self._now: _Pass | None = None
        self._forget_step()

    def _forget_step(self) -> None:
        self._made, self._unasked, self._is_whole = 0, 0, False

    def deal(self, passes: Callable[[], StepPasses], is_drawing: Callable[[], bool] | None) -> None:
        """Set the passes of the training.

        Args:
            passes: Returns those of the step under way.
            is_drawing: Whether this rank has batches, of a loop that weighs its losses; None: the
                loop does not say so.
        """
        self._of_training, self._is_drawing = passes, is_drawing

    @property
    def is_dealt(self) -> bool:
        return self._of_training is not None

    def of_step(self) -> StepPasses:
        """Return the passes of the step under way.

        Raises:
            UsageError: Nothing deals batches.
        """
        if self._of_training is None:
            raise UsageError(
                "job.passes follow from the batches of a step: make scalai.OrderedBatches before."
            )
        return self._of_training()

    def over(self, passes: StepPasses, *, is_trained: bool) -> Iterator[int]:
        """Go over the passes of a step; those of the training are counted."""
        outer = self._now
        try:
            for number in range(passes):
                now = self._now = _Pass(passes, number)
                if is_trained:
                    self._begin_pass(number, int(passes))
                yield number
                if is_trained:
                    self._made += 1
                    self._unasked += not now.is_asked
            self._is_whole = self._is_whole or is_trained
        finally:
            self._now = outer

    @property
    def is_filler(self) -> bool:
        now = self._asked()
        return now.of.is_filler(now.number)

    @property
    def weight(self) -> float:
        now = self._asked()
        return now.of.weight(now.number)

    def step_ended(self, step: int) -> None:
        """Check a step's use of the weights, at any degrees: with even shares they change nothing
        yet.

        Raises:
            RefusedError: The loop says that it weighs its losses, and has not.
        """
        made, unasked, is_whole = self._made, self._unasked, self._is_whole
        self._forget_step()
        if self._is_drawing is None or (is_whole and not (unasked and self._is_drawing())):
            return
        found = f"{unasked} of {made} passes asked for neither job.weight nor job.is_filler"
        if not is_whole:
            found = f"{made} passes were made in `for _ in job.passes`, which has not ended"
        raise RefusedError(
            f"the loop says is_weighted=True of its OrderedBatches, and in step {step} {found}: "
            "with uneven shares its losses would be wrong. Multiply the loss of each pass by "
            "job.weight; or leave is_weighted out, and DP divides the batch."
        )

    def _asked(self) -> _Pass:
        if self._now is None:
            raise UsageError(
                "job.weight and job.is_filler belong to a pass: ask within `for _ in job.passes`."
            )
        self._now.is_asked = True
        return self._now
