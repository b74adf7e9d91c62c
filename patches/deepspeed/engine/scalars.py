"""The small part of an engine's training state: schedule, loss scale, groups, counters. As JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.patches.deepspeed.engine.loss_scale import put_loss_scale, take_loss_scale
from scalai.patches.deepspeed.engine.masters import Master, groups_of
from scalai.patches.deepspeed.engine.steps import put_steps, take_steps
from scalai.patches.param_groups import check_schedule, put_groups, take_groups
from scalai.patches.plain import all_live, all_plain

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def take_scalars(engine: Any, masters: Sequence[Master]) -> Json:
    """Return the scalars of this rank.

    Raises:
        RefusedError: The engine is in the middle of accumulating gradients, or something is not
            plain enough for JSON.
    """
    names, schedule = engine.param_names, engine.lr_scheduler
    return {
        "steps": take_steps(masters, names),
        "groups": take_groups(groups_of(masters, names, vouched=True)),
        "loss_scale": take_loss_scale(engine.optimizer),
        "scheduler": all_plain(schedule.state_dict(), "scheduler") if schedule else None,
        "counters": {key: getattr(engine, key) for key in _COUNTERS},
        "boundaries": _boundaries(engine),
    }


def put_scalars(saved: Mapping[str, Any], engine: Any, masters: Sequence[Master]) -> None:
    """Put back what ``take_scalars`` returned, united over all ranks.

    Raises:
        RefusedError: Steps or parameter groups do not fit the layout of this engine.
    """
    put_steps(saved["steps"], masters, engine.param_names)
    put_loss_scale(saved["loss_scale"], engine.optimizer)
    if engine.lr_scheduler and saved["scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(all_live(saved["scheduler"]))
    # Last: a schedule may set some of it while it is loaded.
    put_groups(saved["groups"], groups_of(masters, engine.param_names, vouched=False))
    if engine.lr_scheduler and saved["scheduler"] is not None:
        check_schedule(saved["scheduler"], engine.lr_scheduler)
    for key in _COUNTERS:
        setattr(engine, key, saved["counters"][key])
    # With another number of ranks a step has another number of micro-batches.
    engine.micro_steps = saved["boundaries"] * engine.gradient_accumulation_steps()


def _boundaries(engine: Any) -> int:
    """Return how often gradients were accumulated in full."""
    accumulation = engine.gradient_accumulation_steps()
    boundaries, rest = divmod(engine.micro_steps, accumulation)
    if rest:
        raise RefusedError(
            f"{rest} of {accumulation} micro-batches of a step are accumulated in gradients, which "
            "are not carried. Call boundary() after engine.step() at the end of an accumulation."
        )
    return int(boundaries)
