"""What Trainer keeps beside model and optimizer, as JSON: its state, schedule and callbacks."""

import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.patches.plain import all_live, all_plain

_ON_ENGINE = "DeepSpeedSchedulerWrapper"
"""Accelerate's wrapper of a schedule that the engine has, and that goes with the engine's state."""


def taken(trainer: Any) -> Json:
    """Return what goes to the next round. Called before the first step, too.

    ``loss`` is what was summed since the last log, on this rank.

    Raises:
        RefusedError: Something is not plain enough for JSON; names it.
    """
    state = dataclasses.asdict(trainer.state)
    state["total_flos"] += getattr(trainer, "current_flos", 0) * trainer.args.world_size
    del state["stateful_callbacks"]  # made of the callbacks again
    schedule = trainer.lr_scheduler
    # Before the engine is built it may be a stand-in for one that the engine will have.
    is_own = hasattr(schedule, "state_dict") and type(schedule).__name__ != _ON_ENGINE
    try:
        text = json.dumps(state)
    except (TypeError, ValueError) as error:
        raise RefusedError(
            f"TrainerState holds what JSON cannot ({error}): a callback or a log has put it there. "
            "Log plain numbers."
        ) from error
    return {
        "state": json.loads(text),
        "callbacks": [
            [name, all_plain(values, name)] for name, values in _attributes(trainer, is_live=False)
        ],
        "schedule": all_plain(schedule.state_dict(), "lr_scheduler") if is_own else None,
        "loss": float(getattr(trainer, "_tr_loss", 0.0)),
        "total_loss": float(getattr(trainer, "_total_loss_scalar", 0.0)),
        "initial_step": int(getattr(trainer, "_initial_global_step", 0)),
        "last_logged": int(getattr(trainer, "_globalstep_last_logged", 0)),
    }


def put_state(saved: Mapping[str, Any], trainer: Any) -> None:
    """Restore TrainerState and callbacks, once Trainer would read them from a checkpoint."""
    kept = [(name, all_live(values)) for name, values in saved["callbacks"]]
    for name, target in _attributes(trainer, is_live=True):
        at = next((n for n, (known, _) in enumerate(kept) if known == name), None)
        if at is not None:
            vars(target).update(kept.pop(at)[1])
    trainer.state = type(trainer.state)(
        **copy.deepcopy(saved["state"]),
        stateful_callbacks=[target for _, target in _attributes(trainer, is_live=True)],
    )
    trainer.state.train_batch_size = trainer.args.per_device_train_batch_size


def put_schedule(saved: Mapping[str, Any], trainer: Any) -> None:
    """Restore the learning rates, once Trainer has made its schedule."""
    if saved["schedule"] is None or trainer.lr_scheduler is None:
        return
    schedule = trainer.lr_scheduler
    schedule.load_state_dict(all_live(saved["schedule"]))
    rates = getattr(schedule, "_last_lr", None)
    if rates is not None:  # to make a schedule has set the first ones
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def put_losses(saved: Mapping[str, Any], trainer: Any) -> None:
    """Restore what was summed for the logs, once Trainer has begun to sum anew."""
    trainer._tr_loss += saved["loss"]
    trainer._total_loss_scalar = saved["total_loss"]
    trainer._initial_global_step = saved["initial_step"]
    trainer._globalstep_last_logged = saved["last_logged"]


def _attributes(trainer: Any, *, is_live: bool) -> Iterator[tuple[str, Any]]:
    """Yield callbacks that have a state, by their class's name: their attributes, or themselves.

    Source: ``ExportableState`` of transformers/trainer_callback.py, 5.23.
    """
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if callable(getattr(callback, "state", None)):
            values = callback if is_live else callback.state().get("attributes", {})
            yield type(callback).__name__, values
