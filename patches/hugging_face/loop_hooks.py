"""Hooks of scripts on Accelerate with DeepSpeed.

The engine's hooks count the steps. Accelerate steps learning-rate schedules once a rank: a script
gets the first round's number of ranks for its schedules, and they are stepped as often as there. A
script with its own placement of data gets this round's number; schedules that follow it are stepped
so too.

Source: accelerate/accelerator.py and ``AcceleratedScheduler`` of scheduler.py, 1.15.
"""

import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import wrapt

from scalai.converters.deepspeed.config import ACCUMULATION, BLOCK, MICRO, TRAIN
from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.patches.data.loaders import is_placed
from scalai.patches.deepspeed.beside_engine import OURS
from scalai.patches.deepspeed.engine_hooks import EngineHooks
from scalai.patches.deepspeed.micro_batches import told_accumulation
from scalai.patches.deepspeed.own_schedules import curve_of
from scalai.patches.hooking import Args, Call, Kwargs, given_to
from scalai.patches.hugging_face.sharded_loaders import check_ranks, put_in_order, round_batches
from scalai.patches.plain import all_live, all_plain
from scalai.patches.user_script import is_of_framework
from scalai.runtime.session import Session

log = logging.getLogger(__name__)

_ON_ENGINE = "DeepSpeedSchedulerWrapper"


def taken(wrapper: Any, ranks: int) -> Json:
    """Return the state of a schedule in Accelerate's wrapper; None: the engine has it.

    Args:
        ranks: Number of ranks that step it.
    """
    if type(wrapper).__name__ == _ON_ENGINE:
        return None
    schedule = wrapper.scheduler
    state = all_plain(schedule.state_dict(), "lr_scheduler")
    return {"state": state, "ranks": ranks, "curve": curve_of(schedule)}


def put(saved: Any, wrapper: Any, told: int | None = None) -> tuple[int, bool] | None:
    """Restore a schedule.

    Args:
        told: Number of ranks told to the script, if not the first round's.

    Returns:
        Number of ranks that step it, and True if its functions follow ``told``; None without
        ``told``.
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


_CARRIED = frozenset(("AcceleratedScheduler", "AcceleratedOptimizer", "DataLoaderShard"))
"""Accelerate's own objects among those registered for checkpoints: they go on by themselves."""


@cache
def install(get_session: Callable[[], Session], engines: EngineHooks) -> "LoopHooks":
    """Hook ``accelerate`` when it is imported, once a process."""
    hooks = LoopHooks(get_session, engines)
    wrapt.register_post_import_hook(hooks.hook_accelerator, "accelerate.accelerator")
    wrapt.register_post_import_hook(hooks.hook_scheduler, "accelerate.scheduler")
    wrapt.register_post_import_hook(hook_plugin, "accelerate.utils.dataclasses")
    return hooks


def hook_plugin(module: Any) -> None:
    wrapt.wrap_function_wrapper(module, "DeepSpeedPlugin.fill_match", _pass_over_block)


def _pass_over_block(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Hide our block from Accelerate, which fills in values ``auto`` and refuses unknown ones."""
    key = args[0] if args else kwargs["ds_key_long"]
    return None if str(key).startswith(f"{BLOCK}.") else wrapped(*args, **kwargs)


class LoopHooks:
    """The hooks and their memory between two calls. Every rank has them.

    ``is_another`` returns True if another loop around the engine, Trainer's, counts the steps.
    """

    def __init__(self, get_session: Callable[[], Session], engines: EngineHooks) -> None:
        self._get_session, self._engines = get_session, engines
        self.is_another: Callable[[], bool] = lambda: False
        self._accelerator: Any = None
        self._saved: Mapping[str, Any] | None = None
        """State of the last round; None: none."""
        self._stepping: dict[int, int] = {}
        """Number of ranks that step a schedule, by the identity of Accelerate's wrapper, if not the
        first round's."""
        self._accumulates = False
        engines.auxiliary.schedules.stepped_elsewhere.append(self._schedules)

    def hook_accelerator(self, module: Any) -> None:
        self._tell_script(module.Accelerator)
        wrapt.wrap_function_wrapper(module, "Accelerator.prepare", self.notice_other_loops)
        wrapt.wrap_function_wrapper(module, "Accelerator._prepare_deepspeed", self.prepare)
        wrapt.wrap_function_wrapper(module, "Accelerator.prepare_data_loader", self.prepare_loader)
        wrapt.wrap_function_wrapper(module, "Accelerator.accumulate", self.accumulate)
        wrapt.wrap_function_wrapper(module, "Accelerator.backward", self.backward)
        wrapt.wrap_function_wrapper(module, "Accelerator.gather_for_metrics", self.gather)
        wrapt.wrap_function_wrapper(module, "Accelerator.load_state", self.load_state)
        wrapt.wrap_function_wrapper(module, "Accelerator.save_state", self.save_state)
        wrapt.wrap_function_wrapper(module, "Accelerator.save_model", self.save_model)
        name = "Accelerator.register_for_checkpointing"
        wrapt.wrap_function_wrapper(module, name, self.notice_objects)

    def _tell_script(self, kind: Any) -> None:
        """Make accelerators tell scripts the numbers of ranks and of micro-batches behind the
        length of their loaders: the first round's, until the round's first draw."""
        ranks, micro_batches = kind.num_processes.fget, kind.gradient_accumulation_steps
        feed = self._engines.feed

        def num_processes(accelerator: Any) -> int:
            now = int(ranks(accelerator))
            has_engine = getattr(accelerator.state, "deepspeed_plugin", None) is not None
            is_now = feed.has_drawn or not has_engine or self.is_another()
            if is_now or is_of_framework(sys._getframe(1)):
                return now
            session = self._get_session()
            if not is_placed(session):
                return now
            then = int(session.facts.get("first_dp", now))
            self._engines.auxiliary.record.note_told(f"{then} processes")
            if then != now:
                self._engines.auxiliary.say(
                    "ranks_then",
                    f"until its first batch the script is told the {then} ranks of the first round,"
                    f" from which its schedules follow; this round has {now}. Where it counts the "
                    "ranks of now (means, logs), ask accelerator.num_processes within the loop",
                )
            return then

        def accumulation(accelerator: Any) -> int:
            now = int(micro_batches.fget(accelerator))
            if accelerator is not self._accelerator:
                return now
            return told_accumulation(now, feed, sys._getframe(1))

        kind.num_processes = property(num_processes)
        kind.gradient_accumulation_steps = property(accumulation, micro_batches.fset)

    def hook_scheduler(self, module: Any) -> None:
        wrapt.wrap_function_wrapper(module, "AcceleratedScheduler.step", self.step_schedule)

    def prepare_loader(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Have a loader keep its order on any number of ranks."""
        loader = wrapped(*args, **kwargs)
        has_engine = getattr(instance.state, "deepspeed_plugin", None) is not None
        if has_engine and not self.is_another() and not _is_ordered(loader):
            put_in_order(loader, self._engines.feed, instance.process_index)
        return loader

    def notice_other_loops(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Say why a loop without DeepSpeed is not elastic."""
        result = wrapped(*args, **kwargs)
        is_model = any(isinstance(arg, torch.nn.Module) for arg in args)
        if is_model and str(instance.distributed_type).rpartition(".")[2] != "DEEPSPEED":
            self._engines.auxiliary.say(
                "no_engine",
                f"Accelerate has built no DeepSpeed engine ({instance.distributed_type}): the job "
                "runs as it is, and cannot change its ranks. Without `accelerate launch` set "
                "ACCELERATE_USE_DEEPSPEED=true and ACCELERATE_DEEPSPEED_CONFIG_FILE, or give it a "
                "DeepSpeedPlugin; cpu=True (--cpu) turns DeepSpeed off: begin with "
                "accelerate.PartialState(cpu=True) instead",
            )
        return result

    def prepare(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Build the engine, and have Accelerate accumulate as it does."""
        session, engines = self._get_session(), self._engines
        has_model = any(isinstance(arg, torch.nn.Module) for arg in args)
        # A model behind the one that trains: a teacher, or the engine's hooks refuse it.
        if self.is_another() or not has_model or engines.engine is not None:
            return wrapped(*args, **kwargs)
        check_ranks(session, instance.num_processes, "Accelerate")
        if session.facts:
            self._fit(instance, args)
        self._accelerator = instance
        engines.feed.way_out = (
            "Prepare a map-style DataLoader in Accelerate's own seedable order, without "
            "split_batches, dispatch_batches, use_stateful_dataloader and skip_first_batches. "
            "Accelerate takes the smallest batch of the loaders that are prepared together for the "
            "engine's micro-batch: evaluate in batches that are not smaller than the training's, "
            "or state train_micro_batch_size_per_gpu in DeepSpeed's configuration"
        )
        self._keep_schedule(instance.state.deepspeed_plugin)
        session.register_state("accelerate", self._take, self._put)
        result = wrapped(*args, **kwargs)
        batches = engines.feed.batches
        if engines.engine is None or batches is None:
            raise RefusedError(
                "accelerator.prepare has built no engine that trains. Give it model, optimizer and "
                "data loader in one call, or run without --elastic."
            )
        instance.gradient_accumulation_steps = batches.num_micro_batches
        if self._saved is not None:
            self._put_schedules(self._saved)
        return result

    def _fit(self, accelerator: Any, prepared: Args) -> None:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        sizes = [size for arg in prepared if (size := getattr(arg, "batch_size", None))]
        batches = round_batches(
            self._get_session(), max(sizes, default=1), accelerator.gradient_accumulation_steps,
            "Accelerate",
        )  # fmt: skip
        config[MICRO] = batches.micro_batch_size
        config[ACCUMULATION] = batches.num_micro_batches
        config[TRAIN] = batches.passed_samples
        self._engines.total = batches.global_batch_size

    def _keep_schedule(self, plugin: Any) -> None:
        """Make the engine build the first round's schedule: its "auto" values follow from the
        number of ranks."""
        config, stored = plugin.deepspeed_config, self._get_session().facts.get("schedule", {})
        parameters = (config.get("scheduler") or {}).get("params", {})
        automatic = [name for name, value in parameters.items() if value == "auto"]

        def settle(made: Any) -> None:
            stated = (made.get("scheduler") or {}).get("params", {})
            stated.update((name, stored[name]) for name in automatic if name in stored)
            kept = {name: stated[name] for name in automatic if name in stated}
            self._get_session().report_facts(schedule=kept)

        self._engines.settle_config = settle

    def accumulate(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Note a loop with its own accumulation of gradients."""
        self._accumulates = True
        return wrapped(*args, **kwargs)

    def backward(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Accumulate gradients for a loop without accumulation, if this round needs it."""
        is_mine = instance is self._accelerator
        if is_mine and not self._accumulates and instance.gradient_accumulation_steps > 1:
            instance._do_sync()
        return wrapped(*args, **kwargs)

    def gather(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Leave out of gathered values those of a filler. A step has whole global batches: nothing
        else is left out."""
        accumulation, engine = self._engines.accumulation, self._engines.engine
        is_training = torch.is_grad_enabled() and engine is not None and engine.module.training
        if instance is not self._accelerator or not (is_training and accumulation.has_fillers):
            return wrapped(*args, **kwargs)
        data = given_to(wrapped, args, kwargs)["input_data"]
        operations = importlib.import_module("accelerate.utils.operations")
        if isinstance(data, list) and not any(map(torch.is_tensor, data)):
            return operations.gather_object([] if accumulation.is_filler else data)
        gathered = instance.gather(data)
        return operations.recursively_apply(accumulation.without_fillers, gathered)

    def step_schedule(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Step a schedule as often as the script intends; not again in epochs of earlier rounds."""
        auxiliary = self._engines.auxiliary
        auxiliary.record.note(f"a step of {type(instance.scheduler).__name__}")
        if self._accelerator is not None and auxiliary.is_behind():
            return None
        ranks = self._stepping.get(id(instance), self._get_session().facts.get("first_dp"))
        if ranks is None or self._accelerator is None or ranks == self._accelerator.num_processes:
            return wrapped(*args, **kwargs)
        return step(instance, wrapped, ranks, *args, **kwargs)

    def load_state(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Take nothing of a checkpoint the engine has not taken."""
        result = wrapped(*args, **kwargs)
        if instance is self._accelerator and self._saved is not None:
            if self._engines.auxiliary.is_resuming:
                self._put_schedules(self._saved)
                for loader in filter(_is_ordered, instance._dataloaders):
                    loader.batch_sampler.count_on()
            else:
                self._engines.rng_state = None
        return result

    def save_state(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Save, but not in epochs of earlier rounds: the state under their names would be of a
        later step, without the engine's part."""
        if instance is not self._accelerator or not self._engines.auxiliary.is_behind():
            return wrapped(*args, **kwargs)
        given = given_to(wrapped, args, kwargs)
        log.info("event=save skipped='this was trained on in an earlier round'")
        names = instance.project_configuration
        if not names.automatic_checkpoint_naming:
            return given.get("output_dir")
        names.iteration += 1  # the next one's name comes out as it would have
        return str(Path(instance.project_dir, "checkpoints", f"checkpoint_{names.iteration - 1}"))

    def save_model(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Keep today's weights out of files of earlier epochs."""
        self._engines.auxiliary.record.note("a save of the model")
        if instance is self._accelerator and self._engines.auxiliary.is_behind():
            log.info("event=save skipped='this was trained on in an earlier round'")
            return None
        return wrapped(*args, **kwargs)

    def notice_objects(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Warn of objects kept by ``save_state`` and lost by a change."""
        kinds = sorted({type(one).__name__ for one in args if type(one).__name__ not in _CARRIED})
        is_told = set(self._get_session().registered) - OURS
        if kinds and not is_told and getattr(instance.state, "deepspeed_plugin", None) is not None:
            self._engines.auxiliary.say(
                "not_carried",
                f"register_for_checkpointing({', '.join(kinds)}): save_state keeps it, and a "
                "change makes it anew. Carry it by scalai.elastic().register_state, before "
                "accelerator.prepare",
            )
        return wrapped(*args, **kwargs)

    def _schedules(self) -> list[Any]:
        wrappers = self._accelerator._schedulers if self._accelerator is not None else ()
        return [wrapper.scheduler for wrapper in wrappers]

    def _take(self) -> Json:
        first = int(self._get_session().facts.get("first_dp", self._accelerator.num_processes))
        return {
            "schedules": [
                taken(wrapper, self._stepping.get(id(wrapper), first))
                for wrapper in self._accelerator._schedulers
            ]
        }

    def _put(self, saved: Mapping[str, Any]) -> None:
        self._saved = saved

    def _put_schedules(self, saved: Mapping[str, Any]) -> None:
        # Before the first step there were none: those of the script begin.
        for stored, wrapper in zip(saved["schedules"], self._accelerator._schedulers, strict=False):
            if stored is None:
                continue
            told = None if is_placed(self._get_session()) else self._accelerator.num_processes
            stepping = put(stored, wrapper, told)
            if stepping is not None:
                self._stepping[id(wrapper)], follows = stepping
                if follows:
                    self._engines.auxiliary.schedules.following.add(id(wrapper.scheduler))


def _is_ordered(loader: Any) -> bool:
    return type(getattr(loader, "batch_sampler", None)).__name__ == "ShardedBatches"
