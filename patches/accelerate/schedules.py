"""Learning-rate schedules that Accelerate steps once a rank, at another number of ranks.

A script that makes its schedule is told the first round's number of ranks, so its functions are the
first round's, and are stepped as often as there.

Source: ``AcceleratedScheduler`` of accelerate/scheduler.py, 1.15.
"""

from collections.abc import Callable
from typing import Any

from scalai.core.jsonable import Json
from scalai.patches.plain import all_live, all_plain

_ON_ENGINE = "DeepSpeedSchedulerWrapper"


def taken(wrapper: Any) -> Json:
    """Return where the schedule in Accelerate's wrapper stands; None: the engine has it."""
    if type(wrapper).__name__ == _ON_ENGINE:
        return None
    return {"state": all_plain(wrapper.scheduler.state_dict(), "lr_scheduler")}


def put(saved: Any, wrapper: Any) -> None:
    """Restore a schedule."""
    schedule = wrapper.scheduler
    schedule.load_state_dict(all_live(saved["state"]))
    for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate  # to make a schedule has set the first ones


def step(wrapper: Any, plain_step: Callable[..., Any], ranks: int, *args: Any, **kw: Any) -> Any:
    """Step a schedule as often as ``ranks`` ranks do; ``plain_step`` is Accelerate's own."""
    is_plain = not wrapper.step_with_optimizer or wrapper.split_batches
    if is_plain or not wrapper.gradient_state.sync_gradients:
        return plain_step(*args, **kw)
    if any(optimizer.step_was_skipped for optimizer in wrapper.optimizers):
        return None
    for _ in range(ranks):
        total = getattr(wrapper.scheduler, "total_steps", None)
        if total is None or wrapper.scheduler._step_count <= total:
            wrapper.scheduler.step(*args, **kw)
    return None
