"""State of megatron's optimizers for each model parameter on this rank, and its small part as JSON:
schedule, loss scale, parameter groups.

Tensors are taken from the optimizers' own parallel lists and range maps, the same from 0.14 to
0.20. Not through their ``sharded_state_dict``: its ``fully_reshardable`` form is silently wrong
with several buckets (0.15.3 to 0.19.0), and not through ``model_param_group_index_map``, which
counts in another order than ``param_groups`` in a group of fp32 and 16-bit parameters.

A later round builds schedule and groups from the flags alone, though the first one may have built
them from flags and a checkpoint (``--load``), and a script may have set some since. So every value
is carried, and has the last word. Only flags changed by a person since the state was written are
followed, by Megatron-LM's own rule (``asked_of``).
"""

import inspect
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.patches.optimizers import Group, check_schedule, put_groups, take_groups, torch_state
from scalai.patches.plain import all_live, all_plain, only_plain, plain

log = logging.getLogger(__name__)

_STEP = "step"
_MASTER = "master_param"
"""Key of the masters in the state of FusedAdam and HybridDeviceOptimizer."""
_KEEPS_MASTERS = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
"""Attribute of an OptimizerConfig: True if the inner optimizer keeps the masters."""
_NO_STATE = (
    "the state of {} does not exist before its first step, and megatron has no function to make "
    "it. Use --optimizer adam or sgd."
)


@dataclass(frozen=True, eq=False, slots=True)
class Owned:
    """Elements ``[low, high)`` of a flattened model parameter, under this rank's optimizer.

    ``main`` is the inner optimizer's tensor: [high - low] fp32 masters, a view of the parameter, or
    the parameter itself. ``state`` is the inner optimizer's own dict for it, without its
    ``master``: a precision-aware optimizer's own elements, in a dtype of its own, or None.
    ``is_sharded``: other data-parallel ranks own the other elements (the distributed optimizer).
    """

    parameter: torch.Tensor
    main: torch.Tensor
    low: int
    high: int
    is_sharded: bool
    state: dict[str, Any]
    master: torch.Tensor | None = None


def leaf_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers with parameters, in order, from inside megatron's chains."""
    if hasattr(optimizer, "chained_optimizers"):
        for link in optimizer.chained_optimizers:
            yield from leaf_optimizers(link)
    elif optimizer is not None and not getattr(optimizer, "is_stub_optimizer", False):
        if optimizer.optimizer is not None:
            yield optimizer


def owned_parameters(optimizer: Any) -> Iterator[Owned]:
    """Yield this rank's optimized parameters, with the state a fresh optimizer lacks."""
    for leaf in leaf_optimizers(optimizer):
        _ensure_state(leaf)
        for parameter, main, low, high in _parameters(leaf):
            state = dict(leaf.optimizer.state[main])
            master = state.pop(_MASTER, None)
            if _counts_by_group(leaf.optimizer):
                state.pop(_STEP, None)
            yield Owned(parameter, main, low, high, is_distributed(leaf), state, master)


def is_distributed(leaf: Any) -> bool:
    """True for the optimizer with state split over data-parallel ranks."""
    return hasattr(leaf, "gbuf_ranges")


def _parameters(leaf: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
    """Yield (model parameter, tensor of the inner optimizer, low, high) of one leaf."""
    if is_distributed(leaf):
        models = _flat(leaf.model_float16_groups), _flat(leaf.model_fp32_groups)
        # A precision-aware optimizer works on the 16-bit shards, and keeps their masters itself.
        keeps_masters = getattr(leaf.config, _KEEPS_MASTERS, False)
        halves = leaf.shard_float16_groups if keeps_masters else leaf.shard_fp32_from_float16_groups
        mains = _flat(halves), _flat(leaf.shard_fp32_groups)
        for model, main in zip(chain(*models), chain(*mains), strict=True):
            owned = leaf._get_model_param_range_map(model)["param"]
            yield model, main, owned.start, owned.end
    elif hasattr(leaf, "fp32_from_float16_groups"):  # Float16OptimizerWithFloat16Params
        full = list(_flat(leaf.fp32_from_fp32_groups))
        models = _flat(leaf.float16_groups), iter(full)
        mains = _flat(leaf.fp32_from_float16_groups), iter(full)
        for model, main in zip(chain(*models), chain(*mains), strict=True):
            yield model, main, 0, model.numel()
    elif type(leaf).__name__ == "FP32Optimizer":
        for model in _flat(group["params"] for group in leaf.optimizer.param_groups):
            yield model, model, 0, model.numel()
    else:
        raise RefusedError(
            f"the optimizer {type(leaf).__name__} is not known. Use --optimizer adam or sgd, with "
            "or without --use-distributed-optimizer."
        )


def _flat(groups: Iterable[Iterable[torch.Tensor]]) -> Iterator[torch.Tensor]:
    return chain.from_iterable(groups)


def _ensure_state(leaf: Any) -> None:
    """Give a fresh inner optimizer the state of a job without steps.

    Torch makes it in the first step. Megatron's own ``init_state_fn`` leaves out torch Adam's
    ``step``, so the first step fails.
    """
    inner = leaf.optimizer
    if hasattr(inner, "sub_optimizers"):  # HybridDeviceOptimizer: copies of parameters on the host
        for part in inner.sub_optimizers:
            if not _make_state(part) and not _make_fused_state(part):
                raise RefusedError(_NO_STATE.format(type(part).__name__))
        inner._sync_sub_optimizers_state_to_hdo()
    elif not _make_state(inner):
        _let_megatron_make_state(leaf)


def _make_state(inner: Any) -> bool:
    """Give an optimizer its first-step state; False: it is unknown here."""
    for group in inner.param_groups:
        for parameter in group["params"]:
            if inner.state[parameter]:
                continue
            state = torch_state(inner, parameter, group)
            if state is None:
                return False
            inner.state[parameter].update(state)
    return True


def _make_fused_state(inner: Any) -> bool:
    """Let Transformer Engine's FusedAdam make its state; False: it is another optimizer."""
    if not hasattr(inner, "initialize_state"):
        return False
    takes = inspect.signature(inner.initialize_state).parameters
    remainders = {"store_param_remainders": False} if "store_param_remainders" in takes else {}
    for group in inner.param_groups:
        for parameter in group["params"]:
            if not inner.state[parameter]:
                inner.initialize_state(parameter, **remainders)
    return True


def _let_megatron_make_state(leaf: Any) -> None:
    if leaf.init_state_fn is None:
        raise RefusedError(_NO_STATE.format(type(leaf.optimizer).__name__))
    leaf.init_state_fn(leaf.optimizer, leaf.config)


def _counts_by_group(inner: Any) -> bool:
    """Whether a HybridDeviceOptimizer's steps are told with its groups.

    Transformer Engine's and Apex's FusedAdam count once a group, torch's Adam once a parameter. The
    parts of a hybrid optimizer may be of both; as one they count like the optimizer of a round
    without it.
    """
    if not hasattr(inner, "sub_optimizers"):
        return False
    from megatron.core import optimizer

    return not issubclass(optimizer.Adam, torch.optim.Adam | torch.optim.AdamW)


def _parts_of(inner: Any, group: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the entry with the number of steps of each parameter: a state or a group of the part
    that updates it, and the parameter there."""
    members = {id(inner.param_to_inner_param[parameter]) for parameter in group["params"]}
    for part in inner.sub_optimizers:
        for its in part.param_groups:
            for parameter in its["params"]:
                if id(parameter) in members:
                    state = part.state[parameter]
                    yield (state if _STEP in state else its), parameter


def _steps_of(inner: Any, group: Mapping[str, Any]) -> int:
    """Return the steps of a group of a HybridDeviceOptimizer.

    Raises:
        RefusedError: Its parts have made different numbers of steps.
    """
    found = {int(entry.get(_STEP, 0)) for entry, _ in _parts_of(inner, group)}
    if len(found) > 1:
        raise RefusedError(
            f"the parts of HybridDeviceOptimizer have made {', '.join(map(str, sorted(found)))} "
            "steps; expected one number. Go on from an older state, or from Megatron-LM's own "
            "checkpoint."
        )
    return next(iter(found), 0)


def _put_steps(inner: Any) -> None:
    """Give the parts of a HybridDeviceOptimizer the steps of its groups, and no other copy of them:
    it would overwrite those of its parts."""
    for group in inner.param_groups:
        count = group.pop(_STEP, None)
        if count is None and group["params"]:
            raise RefusedError(
                "the state has no number of steps for a group of HybridDeviceOptimizer. Go on from "
                "Megatron-LM's own checkpoint."
            )
        for entry, _ in _parts_of(inner, group):
            if isinstance(entry.get(_STEP), torch.Tensor):
                entry[_STEP].fill_(int(count))
            else:
                entry[_STEP] = int(count)


Names = Mapping[int, Sequence[str]]
"""Names of the parts of a tensor under the optimizer, by its ``id``."""

_LAW = ("max_lr", "min_lr", "start_wd", "end_wd")
"""A group's keys for ``OptimizerParamScheduler``; they win over its own values."""
_FLAGS = ("use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler")


def take_scalars(
    optimizer: Any, scheduler: Any, names: Names, asked: Json
) -> Callable[[], Mapping[str, Json]]:
    """Return a function that writes down the present scalars of this rank, with the groups of its
    parameters.

    Args:
        asked: Result of ``asked_of``.

    Raises:
        RefusedError: The scheduler has a value without a JSON form.
    """
    leaves = list(leaf_optimizers(optimizer))
    scalers = [leaf.grad_scaler for leaf in leaves if getattr(leaf, "grad_scaler", None)]
    groups = take_groups(_counted(leaves, names))
    taken: dict[str, Json] = {
        "scheduler": all_plain(scheduler.state_dict(), "scheduler") if scheduler else None,
        "schedule": _attributes(scheduler) if _is_megatrons(scheduler) else None,
        "grad_scaler": all_plain(scalers[0].state_dict(), "grad scaler") if scalers else None,
        "asked": asked,
    }
    return lambda: {**taken, "groups": groups()}


def put_scalars(
    scalars: Mapping[str, Any], optimizer: Any, scheduler: Any, names: Names, asked: Json
) -> None:
    """Restore the result of ``take_scalars``, united over all ranks.

    Raises:
        RefusedError: A parameter group of this job was missing in the state, or is ambiguous;
            groups or scheduler do not keep their values; or a person has changed flags of the
            schedule without a choice between flags and state.
    """
    leaves = list(leaf_optimizers(optimizer))
    groups = list(_groups(leaves, names))
    built = [{key: group[key] for key in _LAW if key in group} for group, _ in groups]
    for leaf in leaves:
        scaler = getattr(leaf, "grad_scaler", None)
        if scaler and scalars["grad_scaler"] is not None:
            scaler.load_state_dict(all_live(scalars["grad_scaler"]))
    is_complete = "groups" in scalars
    if not is_complete:
        _put_stated(scalars["param_groups"], groups, may_be_alike=_is_megatrons(scheduler))
    if scheduler and scalars["scheduler"] is not None:
        _put_scheduler(scalars, scheduler)
    if is_complete:  # last: a schedule sets some of it while it is loaded
        put_groups(scalars["groups"], groups)
    for leaf in leaves:
        if _counts_by_group(leaf.optimizer):
            _put_steps(leaf.optimizer)
    if scheduler and scalars["scheduler"] is not None and not _is_megatrons(scheduler):
        check_schedule(scalars["scheduler"], scheduler)
    if asked and scalars["scheduler"] is not None:
        then = scalars.get("asked") or {"schedule": scalars["scheduler"]}
        _follow_flags(then, asked, scheduler, groups, built)


def asked_of(optimizer: Any, scheduler: Any) -> Json:
    """Return Megatron-LM's scheduler and its groups as the flags make them; None for another
    scheduler. Call it before a checkpoint is loaded into them."""
    if not _is_megatrons(scheduler):
        return None
    laws = {
        json.dumps({key: plain(group[key], key) for key in _LAW if key in group}, sort_keys=True)
        for leaf in leaf_optimizers(optimizer)
        for group in leaf.optimizer.param_groups
    }
    schedule = {key: value for key, value in _attributes(scheduler).items() if key != "num_steps"}
    return {"schedule": schedule, "groups": [json.loads(law) for law in sorted(laws)]}


def _groups(leaves: Sequence[Any], names: Names) -> Iterator[Group]:
    for leaf in leaves:
        for group in leaf.optimizer.param_groups:
            members = (names.get(id(parameter), ()) for parameter in group["params"])
            yield group, [name for of in members for name in of]


def _counted(leaves: Sequence[Any], names: Names) -> Iterator[Group]:
    """Yield the groups with their steps, where groups have them."""
    for leaf in leaves:
        is_counted = _counts_by_group(leaf.optimizer)
        for group, members in _groups([leaf], names):
            steps = {_STEP: _steps_of(leaf.optimizer, group)} if is_counted and members else {}
            yield {**group, **steps}, members


def _is_megatrons(scheduler: Any) -> bool:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return isinstance(scheduler, OptimizerParamScheduler)


def _attributes(scheduler: Any) -> dict[str, Json]:
    """Return all numbers of Megatron-LM's scheduler: its ``state_dict`` leaves some to the
    flags."""
    return only_plain({k: v for k, v in vars(scheduler).items() if k not in _FLAGS})


def _put_scheduler(scalars: Mapping[str, Any], scheduler: Any) -> None:
    state = all_live(scalars["scheduler"])
    if not _is_megatrons(scheduler):
        scheduler.load_state_dict(state)
        return
    if scalars.get("schedule"):
        kept = all_live(scalars["schedule"])
        vars(scheduler).update({k: v for k, v in kept.items() if k in vars(scheduler)})
        return
    # Of a checkpoint: its names of the values differ by release, and Megatron-LM knows them.
    flags = {key: getattr(scheduler, key) for key in _FLAGS}
    vars(scheduler).update(dict(zip(_FLAGS, (True, False), strict=True)))
    scheduler.num_steps = 0  # load_state_dict() adds the saved ones
    scheduler.load_state_dict(state)
    vars(scheduler).update(flags)
    scheduler.step(0)  # load_state_dict() has set the groups before it knew all


def _follow_flags(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    scheduler: Any,
    groups: Sequence[Group],
    built: Sequence[Mapping[str, Any]],
) -> None:
    """Follow flags changed by a person since the state was written, if they are chosen.

    Within a run they are the same, and nothing happens.

    Args:
        then, now: Results of ``asked_of``.
        built: Values of each group from the flags.
    """
    changed = [
        f"{key} {value!r} (the state's flags: {then['schedule'][key]!r})"
        for key, value in now["schedule"].items()
        if key in then["schedule"] and then["schedule"][key] != value
    ]
    if "groups" in then and then["groups"] != now["groups"]:
        changed.append(f"groups {now['groups']} (the state's flags: {then['groups']})")
    if not changed:
        return
    takes_state, takes_flags = (getattr(scheduler, key) for key in _FLAGS)
    if not takes_state and not takes_flags:
        raise RefusedError(
            f"flags of the schedule are others than those by which the state was trained: "
            f"{'; '.join(changed)}. Give --override-opt_param-scheduler to go on by the flags, or "
            "--use-checkpoint-opt_param-scheduler to go on as the state was trained."
        )
    which = "by the flags" if takes_flags else "as it was trained"
    log.warning("event=schedule detail=%r", f"{'; '.join(changed)}: the job goes on {which}")
    if takes_flags:
        schedule = all_live(now["schedule"])
        vars(scheduler).update({k: v for k, v in schedule.items() if k in vars(scheduler)})
        for (group, _), law in zip(groups, built, strict=True):
            group.update(law)
        scheduler.step(0)


def _put_stated(
    stated: Mapping[str, Mapping[str, Json]], groups: Sequence[Group], *, may_be_alike: bool
) -> None:
    """Put values of a converted checkpoint's groups, known only by the keys of Megatron-LM's own
    matching.

    Args:
        may_be_alike: True if two groups may have one identity: the scheduler distinguishes them.
    """
    laws: dict[str, tuple[Sequence[str], Json]] = {}
    for group, names in groups:
        known = [key for key in stated if _is_of(group, json.loads(key))]
        if len(known) != 1:
            raise RefusedError(
                f"the group of {', '.join(names[:3]) or 'no parameters'} is {len(known)} of the "
                f"saved state's parameter groups, {sorted(stated)}; expected one. Resume with the "
                "optimizer flags that the job had."
            )
        (identity,) = known
        law = [group.get(key) for key in _LAW]
        others, its = laws.setdefault(identity, (names, law)) if names else (names, law)
        if its != law and not may_be_alike:
            raise RefusedError(
                f"the state says of the group of {names[0]} and of that of {others[0]} the same, "
                f"{identity}, though their learning rates are not the same. Resume with "
                "Megatron-LM's scheduler, or with groups that differ in wd_mult or lr_mult."
            )
        of = {"values": {identity: stated[identity]}, "of": dict.fromkeys(names, identity)}
        put_groups(of, [(group, names)])


def _is_of(group: Mapping[str, Any], identity: Mapping[str, Any]) -> bool:
    return all(group.get(key, group.get(f"pre_{key}")) == v for key, v in identity.items())
