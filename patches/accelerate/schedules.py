"""Learning-rate schedules that Accelerate steps once a rank, at another number of ranks.

A script that makes its schedule is told the first round's number of ranks, so its functions are the
first round's, and are stepped as often as there. One that places its data itself is told the number
of now: where its functions follow that, they are stepped so too.

Source: ``AcceleratedScheduler`` of accelerate/scheduler.py, 1.15.
"""

from collections.abc import Callable
from typing import Any

from scalai.core.jsonable import Json
from scalai.patches.deepspeed.own_schedules import curve_of
from scalai.patches.plain import all_live, all_plain

_ON_ENGINE = "DeepSpeedSchedulerWrapper"


def taken(wrapper: Any, ranks: int) -> Json:
    """Return where the schedule in Accelerate's wrapper stands; None: the engine has it.

    Args:
        ranks: How many step it.
    """
    if type(wrapper).__name__ == _ON_ENGINE:
        return None
    schedule = wrapper.scheduler
    state = all_plain(schedule.state_dict(), "lr_scheduler")
    return {"state": state, "ranks": ranks, "curve": curve_of(schedule)}


def put(saved: Any, wrapper: Any, told: int | None = None) -> tuple[int, bool] | None:
    """Restore a schedule.

    Args:
        told: The number of ranks that the script was told, where that is not the first round's.

    Returns:
        How many ranks step it, and whether its functions follow ``told``; None without that.
    """
    schedule, state = wrapper.scheduler, all_live(saved["state"])
    before = int(saved["ranks"])
    follows = told not in (None, before) and saved["curve"] != curve_of(schedule)
    ranks = told if follows and told is not None else before
    if follows:
        state["last_epoch"] = state["last_epoch"] * ranks // before
    schedule.load_state_dict(state)
    for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate  # to make a schedule has set the first ones
    return None if told is None else (ranks, follows)


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
