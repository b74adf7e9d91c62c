"""Learning-rate schedules that Accelerate steps once a rank, at another number of ranks.

A script may say its schedule in steps of one rank, whatever the ranks (as its first round said it),
or in steps times ranks (as it would say it at this number). Which it did is asked of the schedule:
its functions are computed where the first round's were.

Source: ``AcceleratedScheduler`` of accelerate/scheduler.py, 1.15.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from scalai.core.jsonable import Json
from scalai.patches.plain import all_live, all_plain

log = logging.getLogger(__name__)
_PROBED = tuple(2**power for power in range(12))
"""Optimizer steps at which functions are compared."""
_ON_ENGINE = "DeepSpeedSchedulerWrapper"


def taken(wrapper: Any, first_ranks: int) -> Json:
    """Return where a schedule stands; None: the engine has it.

    Args:
        wrapper: Accelerate's, around the schedule.
        first_ranks: How many ranks step it.
    """
    if type(wrapper).__name__ == _ON_ENGINE:
        return None
    schedule = wrapper.scheduler
    return {
        "state": all_plain(schedule.state_dict(), "lr_scheduler"),
        "ranks": first_ranks,
        "probes": _probes(schedule, first_ranks),
    }


def put(saved: Any, wrapper: Any, ranks: int) -> int:
    """Restore a schedule.

    Returns:
        How many ranks step it: the first round's number or, where the script has said its schedule
        for this one, ``ranks``.
    """
    schedule, first = wrapper.scheduler, int(saved["ranks"])
    state = all_live(saved["state"])
    stepping = first
    if ranks != first and saved["probes"] is not None:
        is_first, is_now = (_probes(schedule, n) == saved["probes"] for n in (first, ranks))
        if is_now and not is_first:
            stepping = ranks
            state["last_epoch"] = state["last_epoch"] // first * ranks
        elif not is_first:
            log.warning(
                "event=schedule detail='it is another one than in the first round; goes on as it "
                "was stepped there'"
            )
    schedule.load_state_dict(state)
    for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate  # to make a schedule has set the first ones
    return stepping


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


def _probes(schedule: Any, ranks: int) -> Sequence[Sequence[float]] | None:
    """Return what the functions of a LambdaLR say; None: it is made of none."""
    functions = getattr(schedule, "lr_lambdas", None)
    if functions is None:
        return None
    return [[float(function(at * ranks)) for at in _PROBED] for function in functions]
