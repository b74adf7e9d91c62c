"""Hooks that make a script on transformers' Trainer elastic, without editing it.

The engine is DeepSpeed's, under ``deepspeed.engine_hooks``. These hooks carry Trainer's own state
and counts: its state, schedule and callbacks, as JSON. A later round goes on as Trainer resumes: it
gets its state, and skips the epoch's consumed samples. For the job a step ends at the begin of the
next one, so Trainer's work behind a step (logs, evaluation, checkpoints) is done before a worker
leaves.

Source: transformers/trainer.py and integrations/deepspeed.py, 5.23.
"""

import copy
import dataclasses
import importlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import wrapt

from scalai.converters.deepspeed.config import ACCUMULATION, MICRO, TRAIN
from scalai.core.dataset.drawn import Draw, split
from scalai.core.degrees.batches import Batches
from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.patches.deepspeed.engine_hooks import EngineHooks
from scalai.patches.deepspeed.micro_batches import Accumulation
from scalai.patches.hooking import Args, Call, Kwargs, given_to, without
from scalai.patches.hugging_face.sharded_loaders import EpochBatches, check_ranks, round_batches
from scalai.patches.plain import all_live, all_plain
from scalai.runtime.session import Session

log = logging.getLogger(__name__)

_ON_ENGINE = "DeepSpeedSchedulerWrapper"
"""Accelerate's wrapper of the engine's own schedule, carried with the engine's state."""


def taken(trainer: Any) -> Json:
    """Return Trainer's state for the next round. Called before the first step, too.

    ``loss`` is the sum since the last log, on this rank.

    Raises:
        RefusedError: A value has no JSON form; the message names it.
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
    """Restore the sums for the logs, behind Trainer's reset."""
    trainer._tr_loss += saved["loss"]
    trainer._total_loss_scalar = saved["total_loss"]
    trainer._initial_global_step = saved["initial_step"]
    trainer._globalstep_last_logged = saved["last_logged"]


def _attributes(trainer: Any, *, is_live: bool) -> Iterator[tuple[str, Any]]:
    """Yield callbacks with a state, by class name: their attributes, or themselves.

    Source: ``ExportableState`` of transformers/trainer_callback.py, 5.23.
    """
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if callable(getattr(callback, "state", None)):
            values = callback if is_live else callback.state().get("attributes", {})
            yield type(callback).__name__, values


def _leave_out_fillers(trainer: Any, accumulation: Accumulation, batches: Batches) -> None:
    """Have a trainer count each micro-batch of a step alike in losses, items, tokens and
    operations, and fillers not at all.

    Source: ``training_step``, ``_get_num_items_in_batch`` and ``_run_epoch`` of
    transformers/trainer.py, 5.23.
    """
    own = batches.shares.of_replica(trainer.args.process_index)
    train, items = trainer.training_step, trainer._get_num_items_in_batch

    def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None, *rest: Any) -> Any:
        takes_items = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        is_sum = takes_items and num_items_in_batch is not None
        weight = 1.0 if trainer.args.average_tokens_across_devices else accumulation.own_weight()
        accumulation.weight = weight if is_sum else None
        loss = train(model, inputs, num_items_in_batch, *rest)
        return loss * accumulation.factor

    def num_items(batch_samples: Any, *rest: Any) -> Any:
        is_step = len(batch_samples) == batches.num_micro_batches
        return items(batch_samples[:own] if is_step else batch_samples, *rest)

    trainer.training_step, trainer._get_num_items_in_batch = training_step, num_items
    trainer.get_total_train_batch_size = lambda *_: batches.global_batch_size
    for name in ("_track_num_input_tokens", "floating_point_ops"):
        if hasattr(trainer, name):
            setattr(trainer, name, _of_nothing(getattr(trainer, name), accumulation))


def _why_even(trainer: Any) -> str:
    """Return why each micro-batch of uneven shares could not be weighed; empty: it can."""
    plain = importlib.import_module("transformers.trainer").Trainer.compute_loss
    is_own = getattr(type(trainer), "compute_loss", plain) is not plain
    if is_own and getattr(trainer, "loss_is_scaled_for_ga", None):
        return f"{type(trainer).__name__}.compute_loss scales its loss itself"
    return ""


def _of_nothing(count: Call, accumulation: Accumulation) -> Call:
    """Return a function of a batch that counts nothing of a filler."""

    def counted(inputs: Any) -> Any:
        if accumulation.factor == 0.0:
            tensors = {k: v for k, v in inputs.items() if getattr(v, "ndim", 0) > 0}
            inputs = {key: value[:0] for key, value in tensors.items()}
        return count(inputs)

    return counted


_NEEDED = ("_init_training_state", "_prepare_for_training", "_run_epoch")
_IN_MEMORY = "the generation"
"""Stands for a checkpoint's directory in Trainer's question for a resume."""


@cache
def install(get_session: Callable[[], Session], engines: EngineHooks) -> "TrainerHooks":
    """Hook ``transformers`` when it is imported, once a process."""
    hooks = TrainerHooks(get_session, engines)
    wrapt.register_post_import_hook(hooks.hook_config, "transformers.integrations.deepspeed")
    wrapt.register_post_import_hook(hooks.hook_trainer, "transformers.trainer")
    return hooks


class TrainerHooks:
    """The hooks and their memory between two calls. Every rank has them."""

    def __init__(self, get_session: Callable[[], Session], engines: EngineHooks) -> None:
        self._get_session, self._engines = get_session, engines
        self._batches: Batches | None = None
        self._loader: Any = None
        self._ordered: EpochBatches | None = None
        self._has_begun = self._evaluates_first = False
        self._prepared: Any = None
        self._saved: Mapping[str, Any] | None = None
        """State of the last round; None: none."""
        self._trainer: Any = None
        engines.auxiliary.schedules.stepped_elsewhere.append(self._schedules)

    @property
    def has_trainer(self) -> bool:
        """True if the script trains by Trainer, with DeepSpeed."""
        return self._batches is not None

    def hook_config(self, module: Any) -> None:
        wrapt.wrap_function_wrapper(
            module, "HfTrainerDeepSpeedConfig.trainer_config_process", self.fit_arguments
        )

    def hook_trainer(self, module: Any) -> None:
        missing = [name for name in _NEEDED if not hasattr(module.Trainer, name)]
        if missing:
            log.warning("event=hook framework=transformers missing=%s", ",".join(missing))
            return
        wrapt.wrap_function_wrapper(module, "Trainer.get_train_dataloader", self.order_samples)
        wrapt.wrap_function_wrapper(module, "Trainer._init_training_state", self.begin)
        wrapt.wrap_function_wrapper(module, "Trainer._prepare_for_training", self.prepare)
        wrapt.wrap_function_wrapper(module, "Trainer._run_epoch", self.run_epoch)
        wrapt.wrap_function_wrapper(module, "Trainer._load_rng_state", self.load_rng_state)
        wrapt.wrap_function_wrapper(module, "CallbackHandler.on_step_begin", self.begin_step)
        wrapt.wrap_function_wrapper(module, "CallbackHandler.call_event", self.call_back)

    def fit_arguments(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Spread the first round's global batch over this round's ranks, before Trainer reads it.

        DeepSpeed's ``"auto"`` values then come out right; stated ones follow.
        """
        mine = given_to(wrapped, args, kwargs)["args"]
        if mine.auto_find_batch_size:
            raise RefusedError(
                "auto_find_batch_size changes the batch while it trains. Leave it out, or run "
                "without --elastic."
            )
        batches = round_batches(
            self._get_session(),
            mine.per_device_train_batch_size,
            mine.gradient_accumulation_steps,
            "transformers' Trainer",
        )
        mine.per_device_train_batch_size = batches.micro_batch_size
        mine.gradient_accumulation_steps = batches.num_micro_batches
        sizes = {
            MICRO: batches.micro_batch_size,
            ACCUMULATION: batches.num_micro_batches,
            TRAIN: batches.passed_samples,
        }
        for key, size in sizes.items():
            if isinstance(instance.config.get(key), int):
                instance.config[key] = size
        self._batches, self._engines.total = batches, batches.global_batch_size
        check_ranks(self._get_session(), mine.world_size, "transformers' Trainer")
        return wrapped(*args, **kwargs)

    def order_samples(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Deal the samples of each epoch in one order on any number of ranks."""
        loader = wrapped(*args, **kwargs)
        if self._takes_part(instance):
            assert self._batches is not None
            base = getattr(loader, "base_dataloader", loader)
            plain = getattr(base, "batch_sampler", None)
            plain = getattr(plain, "batch_sampler", plain)  # Accelerate's shard of it
            if plain is None or type(loader).__name__ == "DataLoaderDispatcher":
                raise RefusedError(
                    "an iterable data set, or dispatch_batches, has no order that could be taken "
                    "up. Use a map-style data set, or run without --elastic."
                )
            rank = instance.args.process_index
            ordered = EpochBatches(
                plain.sampler, self._batches, rank, drop_last=instance.args.dataloader_drop_last
            )
            # The loader does not let an attribute be set again; nothing has used it yet.
            vars(base)["batch_sampler"] = self._ordered = ordered
            self._loader = loader
        return loader

    def begin(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Build the engine before Trainer asks how far the training is, because it tells."""
        if not self._takes_part(instance):
            return wrapped(*args, **kwargs)
        given = given_to(wrapped, args, kwargs)
        session = self._get_session()
        self._trainer = instance
        session.register_state("trainer", lambda: taken(instance), self._put)
        self._engines.keeps_order = False
        callbacks = instance.callback_handler.callbacks
        self._engines.keepers = (
            instance,
            *(one for one in callbacks if not callable(getattr(one, "state", None))),
        )
        self._engines.drawn_elsewhere = self._drawn
        self._engines.why_even = _why_even(instance)
        if self._batches is not None and not self._batches.shares.is_even:
            _leave_out_fillers(instance, self._engines.accumulation, self._batches)
        self._prepared = instance._prepare_for_training(
            given["max_steps"], self._loader, given["resume_from_checkpoint"]
        )
        saved = self._saved
        if saved is not None and saved["state"]["global_step"] != self._engines.engine.global_steps:
            # A checkpoint of Trainer's own is newer, and has RNG states of its own.
            saved = self._saved = self._engines.rng_state = None
        if saved is None or not saved["state"]["global_step"]:
            self._saved = None
            return wrapped(*args, **kwargs)
        put_schedule(saved, instance)
        put_state(saved, instance)
        epochs, steps = divmod(instance.state.global_step, given["num_update_steps_per_epoch"])
        instance.state.init_training_references(
            instance, given["max_steps"], given["num_train_epochs"], given["trial"]
        )
        # The first round has evaluated at the start; put back in the first epoch.
        self._evaluates_first, instance.args.eval_on_start = instance.args.eval_on_start, False
        return epochs, steps * instance.args.gradient_accumulation_steps

    def prepare(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Reuse the engine built by ``begin``."""
        prepared, self._prepared = self._prepared, None
        return wrapped(*args, **kwargs) if prepared is None else prepared

    def run_epoch(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Make Trainer skip consumed samples in its first epoch of this round."""
        given = given_to(wrapped, args, kwargs)
        if self._saved is not None:
            given["resume_from_checkpoint"] = given["resume_from_checkpoint"] or _IN_MEMORY
            if not self._has_begun:
                self._has_begun = True
                instance.args.eval_on_start = self._evaluates_first
                put_losses(self._saved, instance)
                with without(instance.args, ["ignore_data_skip"]):  # the job keeps its place
                    return wrapped(**given)
        return wrapped(**given)

    def load_rng_state(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> None:
        """The generation has brought the RNG states, not a checkpoint."""
        if self._saved is None:
            wrapped(*args, **kwargs)

    def begin_step(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Leave, at the job's stop, before callbacks hear of the next step; their settings come
        behind the comparison with the state, as they came behind the state."""
        if self._engines.is_due:
            self._engines.end_step()
        if self._engines.engine is not None and not self._engines.is_last_proof:
            self._engines.auxiliary.schedules.begin()
        return wrapped(*args, **kwargs)

    def call_back(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Keep a step without an update from callbacks."""
        if self._engines.is_last_proof:
            return given_to(wrapped, args, kwargs)["control"]
        return wrapped(*args, **kwargs)

    def _drawn(self, step: int) -> Sequence[Draw]:
        assert self._batches is not None and self._ordered is not None
        each, epoch = self._batches.global_batch_size, self._ordered
        return split("trainer", (step - 1) * each, step * each, epoch.samples, epoch.size)

    def _put(self, saved: Any) -> None:
        self._saved = saved

    def _schedules(self) -> list[Any]:
        schedule = getattr(self._trainer, "lr_scheduler", None)
        return [schedule, getattr(schedule, "scheduler", None)]

    def _takes_part(self, trainer: Any) -> bool:
        return self._batches is not None and bool(trainer.is_deepspeed_enabled)
