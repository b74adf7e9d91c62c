"""``engine.offload_states()``: while states are away nothing is written, and once they are back
they lie elsewhere.

Source: deepspeed/runtime/engine.py and runtime/zero/offload_states.py, 0.19.8.
"""

import functools
from collections.abc import Callable
from typing import Any

from scalai.runtime.session import Session


def install(engine: Any, session: Session) -> None:
    """Have an engine tell the session where its state lies once it is back."""
    method: Callable[..., Any] | None = getattr(engine, "reload_states", None)
    if method is None:  # before 0.15
        return

    @functools.wraps(method)
    def reload_states(*args: Any, **kwargs: Any) -> None:
        from scalai.patches.deepspeed.state import DeepSpeedState

        was_away = is_away(engine)
        method(*args, **kwargs)
        if was_away:
            state = DeepSpeedState(engine)
            session.renew(state, step=session.step, samples=session.consumed_samples)

    engine.reload_states = reload_states


def is_away(engine: Any) -> bool:
    """Whether some of the state is offloaded."""
    return bool(getattr(engine.optimizer, "offloaded_states", None))
