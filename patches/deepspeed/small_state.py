"""The small part of an engine's training state, as JSON: schedule, loss scale, groups, counters,
steps, and a rank's random number generators.

Steps are carried by the parameter's name, because Adam corrects its bias by them. DeepSpeed keeps
one number for all parameters of a flat buffer, the base optimizer one for each of its parameters.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.patches.continuation import (
    begin_host_rng,
    continue_host_rng,
    host_rng_state,
    restore_rng_state,
    rng_state_of_text,
    seed_of_step,
    text_of_rng_state,
)
from scalai.patches.deepspeed import parallel_ranks
from scalai.patches.deepspeed.masters import Master, Names, Part, groups_of
from scalai.patches.optimizers import check_schedule, put_groups, take_groups
from scalai.patches.plain import all_live, all_plain

_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_OVERRIDE = ("custom_loss_scaler", "external_loss_scale")


def take_loss_scale(optimizer: Any) -> Json:
    """Return the scale and the counters behind its next change; empty without scaling."""
    return {**_taken(_scaler(optimizer), _SCALER), **_taken(optimizer, _OVERRIDE)}


def put_loss_scale(saved: Mapping[str, Json], optimizer: Any) -> None:
    """Set the values of ``take_loss_scale`` known to this optimizer."""
    for owner, keys in ((_scaler(optimizer), _SCALER), (optimizer, _OVERRIDE)):
        for key in keys:
            if key in saved and hasattr(owner, key):
                setattr(owner, key, saved[key])


def _scaler(optimizer: Any) -> Any:
    """Return the scaler: ``LossScaleConfig`` of ZeRO 0 (before 0.18 the optimizer itself), or
    ``LossScaler`` of ZeRO 1 to 3."""
    for name in ("loss_scale_config", "loss_scaler"):
        if hasattr(optimizer, name):
            return getattr(optimizer, name)
    return optimizer if hasattr(optimizer, "cur_iter") else None


def _taken(owner: Any, keys: tuple[str, ...]) -> dict[str, Json]:
    return {key: getattr(owner, key) for key in keys if hasattr(owner, key)}


STEP = "step"
"""The name of the entry in an optimizer's state."""


def take_steps(
    masters: Sequence[Master], vouched: Sequence[Part]
) -> Callable[[], dict[str, float]]:
    """Return a function that writes down the present steps of the parameters of this rank, by
    name."""
    # FusedAdam counts for the last parameter of a group alone, and uses that for all.
    newest: dict[int, int] = {}
    for master in masters:
        count = master.state.get(STEP)
        if isinstance(count, int):
            newest[id(master.group)] = max(count, newest.get(id(master.group), 0))
    counts = _read(master.state[STEP] for master in masters if STEP in master.state)
    steps = {
        id(master): newest.get(id(master.group), counts[id(master.state[STEP])])
        for master in masters
        if STEP in master.state
    }
    return lambda: {
        name: float(steps[id(master)]) for name, master in vouched if id(master) in steps
    }


def _read(entries: Iterable[Any]) -> dict[int, float]:
    """Return numbers and tensors of one element as numbers, by identity. Each device is asked once,
    because an answer waits for its queue."""
    found = {id(entry): entry for entry in entries}
    tensors = defaultdict[torch.device, dict[int, torch.Tensor]](dict)
    for key, entry in found.items():
        if isinstance(entry, torch.Tensor) and entry.device.type != "cpu":
            tensors[entry.device][key] = entry.detach().double().reshape(())
    for of_device in tensors.values():
        found |= dict(zip(of_device, torch.stack([*of_device.values()]).tolist(), strict=True))
    return {key: float(entry) for key, entry in found.items()}


def put_steps(steps: Mapping[str, float], masters: Sequence[Master], names: Names) -> None:
    """Set the steps from ``take_steps``, of all ranks.

    Raises:
        RefusedError: Parameters of one buffer have unequal numbers of steps, or a parameter has
            none.
    """
    for master in masters:
        if STEP not in master.state:
            continue
        members = [names[fragment.parameter] for fragment in master.fragments]
        found = {steps[name]: name for name in members if name in steps}
        missing = [name for name in members if name not in steps]
        if len(found) > 1 or missing:
            raise RefusedError(
                f"the optimizer keeps one number of steps for {len(members)} parameters here, and "
                f"they have made {_text(found, missing)}. Go on with the ZeRO stage and the "
                "parameter groups that the job had."
            )
        for count in found:
            _set(master.state, count)


def _set(state: dict[str, Any], count: float) -> None:
    if isinstance(state[STEP], torch.Tensor):
        state[STEP].fill_(count)
    else:
        state[STEP] = int(count)


def _text(found: Mapping[float, str], missing: Sequence[str]) -> str:
    parts = [f"{count:g} ({name})" for count, name in sorted(found.items())]
    return ", ".join([*parts, *(f"an unknown number ({name})" for name in missing[:3])])


_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def take_scalars(
    engine: Any, masters: Sequence[Master], vouched: Sequence[Part]
) -> Callable[[], Json]:
    """Return a function that writes down the present scalars of this rank.

    Args:
        vouched: ``vouched_parts`` of the masters.

    Raises:
        RefusedError: The engine is in the middle of accumulating gradients, or something is not
            plain enough for JSON.
    """
    schedule = engine.lr_scheduler
    groups = take_groups(groups_of(masters, engine.param_names, vouched))
    steps = take_steps(masters, vouched)
    taken: dict[str, Json] = {
        "loss_scale": take_loss_scale(engine.optimizer),
        "scheduler": all_plain(schedule.state_dict(), "scheduler") if schedule else None,
        "counters": {key: getattr(engine, key) for key in _COUNTERS},
        "boundaries": _boundaries(engine),
    }
    return lambda: {**taken, "steps": steps(), "groups": groups()}


def put_scalars(saved: Mapping[str, Any], engine: Any, masters: Sequence[Master]) -> None:
    """Restore the result of ``take_scalars``, united over all ranks.

    Raises:
        RefusedError: Steps or parameter groups do not fit the layout of this engine.
    """
    put_steps(saved["steps"], masters, engine.param_names)
    put_loss_scale(saved["loss_scale"], engine.optimizer)
    if engine.lr_scheduler and saved["scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(all_live(saved["scheduler"]))
    # Last: a schedule may set some of it while it is loaded.
    put_groups(saved["groups"], groups_of(masters, engine.param_names))
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


def rng_state(engine: Any) -> Callable[[], dict[str, Json]]:
    """Return a function that writes down the present state of all generators of this rank, with its
    layout."""
    layout, host, device = _layout(engine), host_rng_state(), _accelerator().get_rng_state()
    tracked = dict(_tracker().get_states())  # it replaces its tensors and changes none
    return lambda: {
        "degrees": layout,
        **host(),
        "device": text_of_rng_state(device),
        "tracker": {name: text_of_rng_state(value) for name, value in tracked.items()},
    }


def restore_rng(engine: Any, saved: Json | None, seed: int, step: int) -> str:
    """Continue the RNG states of this coordinate, or begin new ones in another layout.

    New ones are equal on all ranks except for a pipeline's stages, as DeepSpeed's users seed them;
    ``seed`` and ``step`` determine them.

    Returns:
        One line for the log.
    """
    return restore_rng_state(
        saved, _layout(engine), seed, step,
        go_on=continue_rng,
        begin=lambda: _begin_rng(seed_of_step(seed, step, parallel_ranks.stage(engine))),
    )  # fmt: skip


def _layout(engine: Any) -> dict[str, int]:
    """Return all degrees and the ZeRO stage, which orders the runs of modules."""
    return {**parallel_ranks.degrees(engine), "zero": engine.zero_optimization_stage()}


def continue_rng(saved: Mapping[str, Any]) -> None:
    continue_host_rng(saved)
    _accelerator().set_rng_state(rng_state_of_text(saved["device"]))
    if saved["tracker"]:
        _tracker().set_states({k: rng_state_of_text(text) for k, text in saved["tracker"].items()})


def _begin_rng(seed: int) -> None:
    begin_host_rng(seed)
    _accelerator().manual_seed_all(seed)
    if _tracker().get_states():
        _checkpointing().model_parallel_cuda_manual_seed(seed)


def _tracker() -> Any:
    """Return the RNG states of model-parallel regions, of activation checkpointing."""
    return _checkpointing().get_cuda_rng_tracker()


def _checkpointing() -> Any:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    return checkpointing


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()
