"""Gradients that a script accumulates by a number of its own.

DeepSpeed then does not count micro-batches: a step has those that the script gave it, whatever the
configuration says. As long as both say the same, a step has the samples that it is known by; in a
round with other replicas a number of the script's own is wrong.

Source: ``set_gradient_accumulation_boundary`` and ``no_sync`` of deepspeed/runtime/engine.py,
0.19.8.
"""

import functools
import sys
from typing import Any

from scalai.core.errors import RefusedError
from scalai.patches.calls import Call

_DECIDES = ("set_gradient_accumulation_boundary", "no_sync")
_NOT_THE_SCRIPT = frozenset(("accelerate", "deepspeed", "scalai", "transformers"))


class Accumulation:
    """How many micro-batches the script of one engine gives to a step, where it decides on that."""

    def __init__(self) -> None:
        self._is_the_scripts = False
        self._micro_batches = 0

    def install(self, engine: Any) -> None:
        """Take note of what the script calls."""
        for name in _DECIDES:
            if hasattr(engine, name):
                setattr(engine, name, self._noting(getattr(engine, name)))
        engine.backward = self._counting(engine.backward)

    def end_step(self, each: int) -> None:
        """Check, behind an optimizer step, what it was made of.

        Args:
            each: Micro-batches that a step has in this round.

        Raises:
            RefusedError: It had another number, and the script has decided on it.
        """
        made, self._micro_batches = self._micro_batches, 0
        if self._is_the_scripts and made not in (0, each):
            raise RefusedError(
                f"the script has accumulated {made} micro-batches by no_sync() or "
                f"set_gradient_accumulation_boundary(); a step of this round has {each}, which "
                "follow the number of replicas. Count them by engine.gradient_accumulation_steps() "
                "and state their number in DeepSpeed's configuration; or call engine.step() behind "
                "each, and let DeepSpeed count them."
            )

    def _noting(self, method: Call) -> Call:
        @functools.wraps(method)
        def decide(*args: Any, **kwargs: Any) -> Any:
            caller = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
            self._is_the_scripts |= caller not in _NOT_THE_SCRIPT
            return method(*args, **kwargs)

        return decide

    def _counting(self, method: Call) -> Call:
        @functools.wraps(method)
        def backward(*args: Any, **kwargs: Any) -> Any:
            self._micro_batches += 1
            return method(*args, **kwargs)

        return backward
