"""Steps counted by a pipeline's script: those of earlier rounds are repeated without computation.

A script of a later round runs from its beginning. ``while engine.global_steps < n`` and loops over
batches find the training's position; ``for step in range(n): engine.train_batch()`` does not. If a
script has neither read the engine's counters nor drawn a batch before its first ``train_batch``,
finished steps return their losses at once, and the script sees the counters of then.
"""

import base64
import functools
import sys
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from scalai.core.jsonable import Json
from scalai.patches.data.clock import Clocks
from scalai.patches.deepspeed.checkpoint.agreement import ranks_of
from scalai.patches.user_script import is_of_framework

FETCHED_TOGETHER = 100
"""Losses kept on the device: fetching one waits for its whole step."""

KEPT = 8192
"""Newest losses carried to the next round."""


class Replay:
    """The steps of one pipeline engine, as its script counts them.

    Args:
        clocks: Position in the data.

    Attributes:
        on_step: Called at the begin of a step, with True for a step of an earlier round.
        on_forgotten: Called with the detail once losses are dropped.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self.on_step: Callable[[bool], None] = lambda is_over: None
        self.on_forgotten: Callable[[str], None] = lambda detail: None
        self._engine: Any = None
        self._begun: int | None = None
        """Steps before the first step of the first round's script."""
        self._resumed: int | None = None
        """The same of this round's script, if it differs."""
        self._losses = array("f")
        """Of the steps since then, but for the newest ones."""
        self._forgotten = 0
        """How many of the oldest are kept no more."""
        self._newest: list[torch.Tensor] = []
        """Those of the newest, on their device: they are fetched together."""
        self._left = 0
        """Steps until the script reaches the training's position."""
        self._has_begun = False
        self._was_asked = False
        self.is_behind = False
        """True while the script repeats an earlier round."""

    def show(self, pipeline_engine: Any) -> None:
        """Make all engines of a class show the counters of their script's step."""
        for name in ("global_steps", "global_samples"):
            setattr(pipeline_engine, name, _ShownCounter(name, self))

    def install(self, engine: Any) -> None:
        self._engine = engine
        method = engine.train_batch

        @functools.wraps(method)
        def train_batch(*args: Any, **kwargs: Any) -> Any:
            if not self._has_begun:
                self._begin()
            self.on_step(self._left > 0)
            if self._left:
                return self._step_again()
            self.is_behind = False
            loss = method(*args, **kwargs)
            self._newest.append(torch.as_tensor(loss).detach().float().mean())
            if len(self._newest) == FETCHED_TOGETHER:
                self._fetch()
            return loss

        engine.train_batch = train_batch

    @property
    def counts_steps(self) -> bool:
        """True if a script that counts its own steps reaches the training's position."""
        return self._engine is not None

    def take(self) -> Json:
        """Return the script's first step, and the losses since then."""
        self._fetch()
        losses = base64.b64encode(self._losses.tobytes()).decode()
        return {"begun": self._begun, "losses": losses, "forgotten": self._forgotten}

    def put(self, saved: dict[str, Any]) -> None:
        self._begun = saved["begun"]
        self._losses = array("f", base64.b64decode(saved["losses"]))
        self._forgotten = saved["forgotten"]

    def restart(self) -> None:
        """Begin anew at a checkpoint loaded by the script."""
        self._begun, self._has_begun, self._was_asked = None, False, False
        self._losses, self._newest, self._forgotten = array("f"), [], 0

    def begin_at(self, step: int | None) -> None:
        """The script of this round begins behind a checkpoint of this step; None: it is not
        known."""
        self._resumed = step

    def behind(self, engine: Any) -> int:
        """Return the script's distance to the training, in steps. The question may be the script's
        search for its place."""
        if engine is not self._engine:
            return 0
        self._was_asked |= not self._has_begun
        return self._left

    def _begin(self) -> None:
        """Decide at the script's first step, on all ranks alike."""
        self._has_begun = True
        done = self._engine.global_steps
        if self._begun is None:
            self._begun = done
            return
        # There is a loss of each of its calls, also where it has gone back on the way.
        made = self._forgotten + len(self._losses)
        left = made if self._resumed is None else done - self._resumed
        if left > 0:
            finds_its_place = np.array([self._was_asked or self._clocks.have_drawn])
            if not ranks_of(self._engine).any_of(finds_its_place)[0]:
                self._left = left

    def _fetch(self) -> None:
        if self._newest:
            self._losses.extend(torch.stack(self._newest).tolist())
            self._newest.clear()
        if (more := len(self._losses) - KEPT) > 0:
            del self._losses[:more]
            self._forgotten += more
            self.on_forgotten(
                f"the losses of the newest {KEPT} steps are kept: where a later round goes through "
                "older ones, train_batch returns the oldest of these"
            )

    def _step_again(self) -> torch.Tensor:
        loss = self._losses[max(0, len(self._losses) - self._left)]
        self._left -= 1
        self.is_behind = True
        return torch.tensor(loss, device=self._engine.device)


class _ShownCounter:
    """An engine's counter, in the place of its attribute: the script's own while it is behind."""

    def __init__(self, name: str, replay: Replay) -> None:
        self._name, self._replay = name, replay

    def __get__(self, engine: Any, owner: type | None = None) -> Any:
        if engine is None:
            return self
        try:
            value = vars(engine)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None
        if is_of_framework(sys._getframe(1)):
            return value
        each = 1 if self._name == "global_steps" else engine.train_batch_size()
        return value - self._replay.behind(engine) * each

    def __set__(self, engine: Any, value: Any) -> None:
        vars(engine)[self._name] = value
