"""Hooks that make a script on transformers' Trainer elastic, without editing it.

The engine is DeepSpeed's, and takes part by ``scalai.patches.deepspeed.training``. Here is what
Trainer itself keeps and counts. A later round goes on as Trainer resumes: it is told its state, and
skips what the epoch has consumed. A step ends for the job where the next one begins, so that what
Trainer does after a step (logs, evaluation, checkpoints) is done before a worker leaves.

Source: transformers/trainer.py and integrations/deepspeed.py, 5.23.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import wrapt

from scalai.converters.deepspeed.config import ACCUMULATION, MICRO, TRAIN
from scalai.core.dataset.drawn import Draw, split
from scalai.core.degrees.batches import Batches
from scalai.core.errors import RefusedError
from scalai.patches.accelerate.batches import check_ranks, round_batches
from scalai.patches.calls import Args, Call, Kwargs
from scalai.patches.data.epochs import EpochBatches
from scalai.patches.deepspeed.training import EngineHooks
from scalai.patches.transformers.carried import put_losses, put_schedule, put_state, taken
from scalai.runtime.session import Session

log = logging.getLogger(__name__)


_NEEDED = ("_init_training_state", "_prepare_for_training", "_run_epoch")
_IN_MEMORY = "the generation"
"""Stands for a checkpoint's directory where Trainer only asks whether it resumes."""


@cache
def install(get_session: Callable[[], Session], engines: EngineHooks) -> "TrainerHooks":
    """Hook ``transformers`` when it is imported, once a process.

    Args:
        get_session: Returns this worker's session.
        engines: The hooks of the engine.
    """
    hooks = TrainerHooks(get_session, engines)
    wrapt.register_post_import_hook(hooks.hook_config, "transformers.integrations.deepspeed")
    wrapt.register_post_import_hook(hooks.hook_trainer, "transformers.trainer")
    return hooks


class TrainerHooks:
    """The hooks and what they remember between two calls. Every rank has them."""

    def __init__(self, get_session: Callable[[], Session], engines: EngineHooks) -> None:
        self._get_session, self._engines = get_session, engines
        self._batches: Batches | None = None
        self._loader: Any = None
        self._ordered: EpochBatches | None = None
        self._has_begun = False
        self._prepared: Any = None
        self._saved: Mapping[str, Any] | None = None
        """What the last round has left; None: nothing."""
        self._trainer: Any = None
        engines.auxiliary.schedules.stepped_elsewhere.append(self._schedules)

    @property
    def has_trainer(self) -> bool:
        """Whether the script trains by Trainer, with DeepSpeed."""
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
        mine = inspect.signature(wrapped).bind(*args, **kwargs).arguments["args"]
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
            TRAIN: batches.global_batch_size,
        }
        for key, size in sizes.items():
            if isinstance(instance.config.get(key), int):
                instance.config[key] = size
        self._batches = batches
        check_ranks(self._get_session(), mine.world_size, "transformers' Trainer")
        return wrapped(*args, **kwargs)

    def order_samples(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Deal the samples of each epoch in one order, whatever the number of ranks."""
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
        given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
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
        return epochs, steps * instance.args.gradient_accumulation_steps

    def prepare(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """What ``begin`` has built is not built again."""
        prepared, self._prepared = self._prepared, None
        return wrapped(*args, **kwargs) if prepared is None else prepared

    def run_epoch(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Let Trainer skip what its first epoch of this round has consumed."""
        given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
        if self._saved is not None:
            given["resume_from_checkpoint"] = given["resume_from_checkpoint"] or _IN_MEMORY
            if not self._has_begun:
                self._has_begun = True
                put_losses(self._saved, instance)
        return wrapped(**given)

    def load_rng_state(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> None:
        """The generation has brought the RNG states, not a checkpoint."""
        if self._saved is None:
            wrapped(*args, **kwargs)

    def begin_step(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Leave, where the job stops here, before callbacks hear of a step that is not made; what
        they set comes behind the comparison with the state, as it came behind the state."""
        if self._engines.is_due:
            self._engines.end_step()
        if self._engines.engine is not None and not self._engines.is_last_proof:
            self._engines.auxiliary.schedules.begin()
        return wrapped(*args, **kwargs)

    def call_back(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """No callback hears of a step that ends at the door of its update."""
        if self._engines.is_last_proof:
            return inspect.signature(wrapped).bind(*args, **kwargs).arguments["control"]
        return wrapped(*args, **kwargs)

    def _drawn(self, step: int) -> Sequence[Draw]:
        """Return what Trainer's step of this number draws of its epochs."""
        assert self._batches is not None and self._ordered is not None
        each, epoch = self._batches.global_batch_size, self._ordered
        return split("trainer", (step - 1) * each, step * each, epoch.samples, epoch.size)

    def _put(self, saved: Any) -> None:
        self._saved = saved

    def _schedules(self) -> list[Any]:
        """Return the schedule that Trainer steps, which ``taken`` carries."""
        schedule = getattr(self._trainer, "lr_scheduler", None)
        return [schedule, getattr(schedule, "scheduler", None)]

    def _takes_part(self, trainer: Any) -> bool:
        return self._batches is not None and bool(trainer.is_deepspeed_enabled)
