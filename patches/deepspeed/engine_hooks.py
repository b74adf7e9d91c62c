"""Hooks that make a DeepSpeed script elastic, without editing it.

``deepspeed.initialize`` is wrapped: the configuration is rewritten for the round, and the new
engine takes part in the job. Its entry is the brink of standby workers, or that of ``zero.Init``,
or of a pipeline on devices, before. Decisions are in ``round_config``, ``continuation`` and
``scalai.patches.data``.
"""

import functools
import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed
import wrapt

from scalai.converters.deepspeed.config import ACCUMULATION, TRAIN, StatedBatch
from scalai.converters.deepspeed.validity import refuse_invalid, stages_of
from scalai.converters.megatron.rules import allows_untested
from scalai.core.dataset.drawn import Draw
from scalai.core.degrees.batches import Batches
from scalai.core.errors import RefusedError
from scalai.core.job.function_proof import Numbers
from scalai.core.jsonable import Json
from scalai.core.release import numbers_of
from scalai.patches.data.loaders import Feed, FirstBatches, is_placed
from scalai.patches.deepspeed import micro_batches, small_state, unsupported
from scalai.patches.deepspeed.beside_engine import Auxiliary
from scalai.patches.deepspeed.micro_batches import Accumulation, tell
from scalai.patches.deepspeed.replay import Replay
from scalai.patches.deepspeed.round_config import (
    RoundOrder,
    batches_of,
    config_of,
    has_configured_optimizer,
    rewritten,
    spilled,
    stated_batch,
    without_batches,
)
from scalai.patches.deepspeed.step_numbers import (
    BareBatch,
    StepNumbers,
    obstacle_of,
    without_update,
)
from scalai.patches.deepspeed.unsupported import refuse_unfit_stages
from scalai.patches.hooking import Args, Call, Kwargs, given_to, without
from scalai.patches.step_proof import agreed, counts_samples, random_parts, tell_numbers
from scalai.patches.versions import DEEPSPEED
from scalai.runtime.session import Session
from scalai.store.pool import host_memory

log = logging.getLogger(__name__)

FOR_AN_ENGINE = ("scalai.patches.deepspeed.checkpoints", "scalai.patches.deepspeed.deepspeed_state")
"""Imported before an engine is built, not sooner: the converters that read checkpoints come
along."""
PARTITIONED = 3
"""The ZeRO stage with models built in shards."""


@cache
def install(get_session: Callable[[], Session]) -> "EngineHooks":
    """Hook ``deepspeed`` when it is imported, once a process.

    Args:
        get_session: Returns this worker's session. Asked for when an engine is built, not before:
            a fork server imports DeepSpeed, hooks included, for workers to come.
    """
    hooks = EngineHooks(get_session)
    hooks.auxiliary.install_seeds()
    wrapt.register_post_import_hook(hooks.hook_deepspeed, "deepspeed")
    return hooks


class EngineHooks:
    """The hooks and their memory between two calls. Every rank has them.

    Attributes:
        feed: The process's data loaders.
        replay: The steps counted by a pipeline's script.
        auxiliary: State and actions of the script beside the engine.
        engine: The engine in the job; None before it is built.
        keeps_order: True if a step's samples are counted here; else a framework around the engine
            counts them.
        is_due: True if a step has ended and the job was not told.
        rng_state: RNG states for the first step; None: the running ones.
        drawn_elsewhere: Returns the draws of a step by its number, from a framework around the
            engine, without ``keeps_order``; None: unknown.
        keepers: The script's objects called by a framework around the engine.
        accumulation: The micro-batches of a step.
        why_even: Reason of a framework around the engine against uneven shares; empty: none.
        total: Samples of a step, from a framework around the engine whose configuration counts
            fillers; None: the configuration's.
        settle_config: Changes the engine's configuration for a framework around the engine.
    """

    _version: str
    numbers: StepNumbers
    told: Numbers | None = None

    def __init__(self, get_session: Callable[[], Session]) -> None:
        self._get_session = get_session
        self.feed = Feed()
        self.replay = Replay(self.feed.clocks)
        self.auxiliary = Auxiliary(self.feed.clocks, self.replay)
        self.accumulation = Accumulation()
        self.why_even = ""
        self.total: int | None = None
        self.engine: Any = None
        self.keeps_order = True
        self.is_due = False
        self.rng_state: Json = None
        self.drawn_elsewhere: Callable[[int], Sequence[Draw]] | None = None
        self.keepers: Sequence[Any] = ()
        self.settle_config: Callable[[dict[str, Any]], None] = lambda config: None

    def hook_deepspeed(self, deepspeed: Any) -> None:
        self._version = deepspeed.__version__
        self.feed.install()
        self.auxiliary.install()
        self.feed.on_pass = lambda name, facts: self._session.note_sources({name: facts})
        self.feed.observer = self.auxiliary
        self.replay.on_forgotten = self.auxiliary.forgets
        self.replay.on_step = lambda is_over: self.auxiliary.record.begin("a step", is_over=is_over)
        self.auxiliary.schedules.on_step = lambda kind: self.auxiliary.record.note(
            f"a step of {kind}"
        )
        self.feed.is_evaluating = self._is_evaluating
        self.feed.first_dp = lambda: self._session.facts.get("first_dp")
        micro_batches.install(self.feed)
        unsupported.install()
        pipe = importlib.import_module("deepspeed.runtime.pipe.module")
        self.replay.show(importlib.import_module("deepspeed.runtime.pipe.engine").PipelineEngine)
        zero = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
        wrapt.wrap_function_wrapper(deepspeed, "initialize", self.initialize)
        wrapt.wrap_function_wrapper(pipe, "PipelineModule.__init__", self.make_pipeline)
        wrapt.wrap_function_wrapper(zero, "Init.__init__", self.partition)

    def initialize(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Build the engine of this round and restore the generation into it."""
        given = given_to(wrapped, args, kwargs)
        sources = given.get("config"), given.pop("config_params", None)
        config = config_of(given.get("args"), *sources)
        has_optimizer = given.get("optimizer") is not None or has_configured_optimizer(config or {})
        if config is None:
            return wrapped(*args, **kwargs)  # nothing to read
        if not has_optimizer:
            self._session.hold_at_brink()
            if not self._session.facts:
                return wrapped(*args, **kwargs)  # nothing to train
            # Batches that came out on the first round's ranks need not on these, for no use.
            given["config"] = without_batches(config)
            with _without_named_config(given.get("args")):
                return wrapped(**given)
        if self.engine is not None:
            raise RefusedError(
                "deepspeed.initialize is called for a second engine that trains; the state of one "
                "engine a process is carried. Train the models one after another in jobs of their "
                "own, or run without --elastic."
            )
        warning = DEEPSPEED.check(self._version, allow_untested=allows_untested(os.environ))
        self.settle_config(config)
        if self.total is not None:
            config[TRAIN] = self.total
        order = self._order(given, config)
        if any(isinstance(source, Mapping) for source in sources):
            order = replace(order, first_dp=self._session.facts.get("first_dp"))
        if not (order.is_in_stages and order.has_fillers):
            why = "the script makes the passes of a step"
            self._session.keep_even(why if order.has_fillers else "data_order is own")
            order = replace(order, paces=())
        stages = stages_of(config, self._session.settings.get("zero_stages", {}))
        has_own = given.get("optimizer") is not None
        refuse_invalid(config, stages, numbers_of(self._version), has_own_optimizer=has_own)
        refuse_unfit_stages(config, stages, self._session.facts.get("zero_stage"), self._version)
        batches = batches_of(config, order)
        first = self._first() or batches
        first = FirstBatches(batches.global_batch_size, first.micro_batch_size, first.dp)
        self.feed.start(batches, first, StatedBatch.of(config).micro or batches.micro_batch_size)
        self.feed.is_counting = self.keeps_order and is_placed(self._session)
        given["config"] = rewritten(config, order, batches)
        for name in FOR_AN_ENGINE:
            importlib.import_module(name)
        self._session.hold_at_brink()
        with _without_named_config(given.get("args")):
            built = wrapped(**given)
        if torch.distributed.get_rank() == 0:
            log.warning(
                "event=hook framework=deepspeed global_batch_size=%d micro_batch_size=%d "
                "accumulation=%d dp=%d zero_stage=%d", batches.global_batch_size,
                batches.micro_batch_size, batches.num_micro_batches, batches.dp,
                built[0].zero_optimization_stage(),
            )  # fmt: skip
            if warning:
                log.warning("event=hook detail=%r", warning)
        fault = unsupported.offload_fault(given.get("optimizer"))
        self._session.report_facts(offload_fault=fault, host_memory=host_memory())
        stated = stated_batch(config, order).train
        if stated not in (None, batches.global_batch_size):
            self.auxiliary.say(
                "ranks_then",
                f"the script states {TRAIN} {stated}, by this round's ranks; the job keeps the "
                f"{batches.global_batch_size} samples of the first round's. State it independent "
                "of the ranks",
            )
        self._take_part(built[0], has_made_config=order.first_dp is not None)
        return built

    def make_pipeline(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> None:
        """Cut a pipeline into as many stages as this round has."""
        given = given_to(wrapped, args, kwargs)
        topology, session = given.get("topology"), self._session
        stages = given.get("num_stages") if topology is None else topology.get_dim("pipe")
        if stages != session.pp and (topology is not None or not session.facts):
            raise RefusedError(
                f"the script builds a pipeline of {stages} stages, this round has PP{session.pp}. "
                f'Say [degrees] default = "pp{stages}" in the elastic configuration'
                + ("." if topology is None else ", and build topology from scalai.elastic().pp.")
            )
        if topology is None:
            given["num_stages"] = session.pp
        accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
        if accelerator.device_name() != "cpu":  # it moves its layers to the device (0.19.8)
            session.hold_at_brink()
        wrapped(**given)

    def partition(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> None:
        """Build a model under ``zero.Init`` as this round's stage wants it, whole or in shards."""
        given = given_to(wrapped, args, kwargs)
        name = "config_dict_or_path" if "config_dict_or_path" in given else "config"
        config = config_of(None, given.get(name), None)
        if config is not None:
            order = RoundOrder(1, 1, 1, offload=self._session.offload)
            given[name] = spilled(without_batches(config), order)
        if self._session.settings.get("zero_stage") not in (None, PARTITIONED):
            given["enabled"] = False
        if given.get("enabled", True):
            self._session.hold_at_brink()
        wrapped(**given)

    def count_step(self) -> None:
        """An optimizer step has ended: its samples are consumed."""
        self._session.end_step()
        if self.feed.is_counting and _draws_samples(self.engine):
            self.accumulation.end_step(self.engine.gradient_accumulation_steps())
            self.feed.step()
            self._session.note_draws(*self.feed.clocks.draws)
        elif self.feed.is_counting:
            self._session.note_draws()
        elif self.drawn_elsewhere is not None:
            self._session.note_draws(*self.drawn_elsewhere(self.engine.global_steps))
        # Accelerate calls the engine's step once an accumulation, not once a micro-batch.
        engine, each = self.engine, self.engine.gradient_accumulation_steps()
        engine.micro_steps = -(-engine.micro_steps // each) * each
        self.is_due = True
        self.auxiliary.stepped()
        if self.keeps_order or self.keepers:
            self.auxiliary.look(self.keepers)

    def end_step(self) -> None:
        """End a step behind the script's work: leave if the job stops here."""
        self.is_due = False
        assert self.feed.batches is not None
        samples = self.feed.batches.global_batch_size
        if self._session.boundary(self.engine.global_steps, samples=samples):
            if not self._session.is_to_prove:
                _leave(self.engine)
            without_update(self.engine)
            self.numbers.begin()

    def _loaded(self) -> None:
        """Forget the newest step: a checkpoint stands in its place."""
        self.is_due = False

    @property
    def is_last_proof(self) -> bool:
        """True if the current step has no update, and is the last: only the job hears of it."""
        return self._session.is_to_prove

    @property
    def _session(self) -> Session:
        return self._get_session()

    def _is_evaluating(self) -> bool:
        """True if the script has turned ``train()`` off."""
        is_training = self.engine is None or self.engine.module.training
        return self.auxiliary.record.uses_modes and not is_training

    def _noting_modes(self, train: Call) -> Call:
        """``engine.eval()`` calls it, too."""

        @functools.wraps(train)
        def note(mode: bool = True) -> Any:
            self.auxiliary.record.uses_modes = True
            return train(mode)

        return note

    def _noting_evaluations(self, evaluate: Call) -> Call:
        @functools.wraps(evaluate)
        def note(*args: Any, **kwargs: Any) -> Any:
            self.auxiliary.evaluates()
            return evaluate(*args, **kwargs)

        return note

    def _first(self) -> FirstBatches | None:
        facts = self._session.facts
        if "first_dp" not in facts:
            return None
        return FirstBatches(
            facts["global_batch_size"], facts["first_micro_batch_size"], facts["first_dp"]
        )

    def _order(self, given: Mapping[str, Any], config: Mapping[str, Any]) -> RoundOrder:
        session, first = self._session, self._first()
        model, optimizer = given.get("model"), given.get("optimizer")
        if session.offload and (fault := unsupported.offload_fault(optimizer)):
            raise RefusedError(f"offload={session.offload} cannot be had: {fault}.")
        is_compiled = (
            bool(session.offload) and optimizer is None and unsupported.needs_cpu_adam(config)
        )
        return RoundOrder(
            session.tp,
            session.pp,
            session.dp,
            session.micro_batch_size,
            first.global_batch_size if first else None,
            first.micro_batch_size if first else None,
            session.settings.get("zero_stage"),
            given.get("mpu") is not None,
            isinstance(model, importlib.import_module("deepspeed.pipe").PipelineModule),
            is_placed(session),
            session.offload,
            optimizer is not None,
            not is_compiled or unsupported.has_cpu_adam(),
            session.paces or (),
        )

    def _take_part(self, engine: Any, *, has_made_config: bool) -> None:
        """Restore the generation into a new engine, and hook its methods.

        Args:
            has_made_config: True if a later round's script made the configuration.
        """
        from scalai.patches.deepspeed.checkpoints import Checkpoints
        from scalai.patches.deepspeed.deepspeed_state import DeepSpeedState

        session, first, batches = self._session, self.feed.first, self.feed.batches
        assert first is not None and batches is not None
        if (shared := getattr(engine, "sequence_parallel_size", 1)) != 1:
            raise RefusedError(
                f"the engine has sequence_parallel_size {shared} (Ulysses), and the ranks that "
                "share a sequence would change with the others. Leave it out, or run without "
                "--elastic."
            )
        if engine.dp_world_size != session.dp:
            raise RefusedError(
                f"the engine has {engine.dp_world_size} data-parallel ranks, this round has "
                f"DP{session.dp} (TP{session.tp}, PP{session.pp}). Build mpu and mesh from "
                "scalai.elastic().tp and .pp."
            )
        checkpoints = Checkpoints(
            engine, session, self.feed.clocks, self.replay, self.auxiliary, self._loaded
        )
        has_uneven_shares = self._may_be_uneven(engine, batches)
        session.report_facts(
            global_batch_size=first.global_batch_size,
            first_micro_batch_size=first.micro_batch_size,
            first_dp=first.dp,
            has_uneven_shares=has_uneven_shares,
            zero_stage=engine.zero_optimization_stage(),
        )
        session.register_state("data", self.feed.clocks.take, self.feed.clocks.put)
        session.register_state("loaded", checkpoints.take, checkpoints.put)
        session.register_state("beside", self.auxiliary.take, self.auxiliary.put)
        record = self.auxiliary.record
        session.register_state("record", record.take, record.put)
        record.uses_modes = engine.module.training
        engine.train = self._noting_modes(engine.train)
        is_pipeline = _is_pipeline(engine)
        if is_pipeline:
            session.report_facts(pipeline_layers=engine.module._num_layers)
            if session.pp == 1:  # else the script may build a plain model for one stage
                session.report_facts(is_in_stages=True)
            session.register_state("steps", self.replay.take, self.replay.put)
        self.engine = engine
        self.auxiliary.start(engine, session)
        is_restored = session.attach(DeepSpeedState(engine))
        if is_restored:
            if has_made_config:
                self._compare_batch(batches.global_batch_size)
            self.auxiliary.restored(session.step)
            self.rng_state = small_state.rng_state(engine)()
            micro_batches.draw_anew(engine)
        checkpoints.install()
        tell(engine, self.feed)
        if not is_pipeline:
            self.accumulation.install(engine)
        if not batches.shares.is_even:
            replica = torch.distributed.get_rank(engine.data_parallel_group)
            self.feed.deal_to(replica)
            if is_pipeline:
                engine.eval_batch = micro_batches.evaluating(engine.eval_batch, batches.shares)
            else:
                self.accumulation.share(engine, batches.shares, replica)
            _count_without_fillers(engine, batches)
        if is_pipeline and not (batches.shares.is_even and session.paces is None):
            replica = torch.distributed.get_rank(engine.data_parallel_group)
            micro_batches.PipelinePasses(
                engine, batches.shares, replica, session.begin_pass
            ).install()
        self.numbers = StepNumbers(engine, self._version, is_pipeline=is_pipeline)
        for name in ("train_batch",) if is_pipeline else ("forward", "backward"):
            setattr(engine, name, self.after_a_step(name, getattr(engine, name)))
        name = "train_batch" if is_pipeline else "step"
        setattr(engine, name, self._counting_steps(getattr(engine, name)))
        if is_pipeline:
            engine.eval_batch = self._noting_evaluations(engine.eval_batch)
        if is_pipeline and is_placed(session):
            self.replay.install(engine)

    def _compare_batch(self, stated: int) -> None:
        """Compare the global batch of a script's own configuration with the state's: a changed
        file is a person's choice.

        Raises:
            RefusedError: It is another one, and no person has changed the script's arguments.
        """
        known = self._session.facts.get("global_batch_size")
        if known not in (None, stated):
            self.auxiliary.differs(
                f"the script gives DeepSpeed {TRAIN} {stated}, the job trains with {known}",
                f"State {TRAIN} independent of the number of ranks; for another one change an "
                "argument of the script, or name DeepSpeed's file in its arguments",
            )

    def _may_be_uneven(self, engine: Any, batches: Batches) -> bool:
        """Whether DP need not divide the batch. A collective of all ranks.

        Raises:
            RefusedError: It must, and does not in this round.
        """
        why = agreed(self.why_even or counts_samples(engine.module), engine.device)
        if why and not batches.shares.is_even:
            total, world = batches.global_batch_size, self._session.world_size
            even = next(dp for dp in range(batches.dp - 1, 0, -1) if total % dp == 0)
            raise RefusedError(
                f"DP{batches.dp} does not divide the batch of {total} samples, and shares have to "
                f"be even: {why}. Say a DP that divides it in [degrees], for example "
                f'"{world}" = "dp{even}".'
            )
        if why and torch.distributed.get_rank() == 0:
            log.warning("event=even_shares DP divides the batch: %s", why)
        if why:
            self._session.keep_even(why)
        return not why and is_placed(self._session)

    def after_a_step(self, name: str, method: Call) -> Call:
        """End the last step at the begin of the next one: by then the script has logged, evaluated
        and saved, so its work in a step is done once, before a change or after it.

        A pipeline's ``train_batch`` is a step: ``eval_batch`` leaves the model in ``eval()``. A
        backward pass belongs to a step, too: a model may be trained in ``eval()``.
        """

        is_pipeline = name == "train_batch"

        @functools.wraps(method)
        def begin(*args: Any, **kwargs: Any) -> Any:
            is_step = name != "forward" or (not self._is_evaluating() and torch.is_grad_enabled())
            if not is_pipeline:
                self.feed.use(is_trained=is_step)
            if not is_step:
                self.auxiliary.record.note("an evaluation")
            if is_step:
                if self.is_due:
                    self.end_step()
                if self._session.is_to_prove:
                    return self._comparing(name, method, args, kwargs)
                self.auxiliary.record.uses_modes |= self.engine.module.training
                self.auxiliary.schedules.begin()
                self._continue_rng_state()
                self._session.begin_step()
                if self._session.is_compared:
                    return self._comparing(name, method, args, kwargs)
                if self._session.is_proving:
                    return self._measuring(name, method, args, kwargs)
            return method(*args, **kwargs)

        return begin

    def _comparing(self, name: str, method: Call, args: Args, kwargs: Kwargs) -> Any:
        """Make a pass of a step to be compared with another layout's. If it draws random numbers
        and is the engine's own, make a further one before, without any."""
        engine, session = self.engine, self._session
        if name != "train_batch":
            return self._measuring(name, method, args, kwargs)
        random = agreed(random_parts(engine.module), engine.device)
        self.numbers.obstacle = agreed(obstacle_of(engine), engine.device)
        if not random or self.numbers.obstacle:
            return method(*args, **kwargs)
        bare = BareBatch(engine, method, args, kwargs)
        is_first = not session.is_to_prove
        told = self.told = bare.make(self.numbers, tp=session.tp, is_first=is_first)
        if session.is_to_prove:
            tell_numbers(session, lambda: told)
            _leave(engine)
        return bare.real()

    def _measuring(self, name: str, method: Call, args: Args, kwargs: Kwargs) -> Any:
        if name == "backward":
            loss = args[0] if args else kwargs.get("loss")
            factor = self.accumulation.next_factor()
            self.numbers.note_loss(loss, factor, is_share=kwargs.get("scale_wrt_gas") is False)
        elif name == "forward":
            return self.numbers.forward(method, args, kwargs)
        return method(*args, **kwargs)

    def _continue_rng_state(self) -> None:
        """Continue RNG states of the last round, despite the script's draws before its first step:
        a loader draws a number at its begin."""
        rng_state, self.rng_state = self.rng_state, None
        if rng_state is not None:
            small_state.restore_rng(self.engine, rng_state, 0, self.engine.global_steps)

    def _counting_steps(self, method: Call) -> Call:
        @functools.wraps(method)
        def step(*args: Any, **kwargs: Any) -> Any:
            before, session = self.engine.global_steps, self._session
            if session.is_proving:
                self.numbers.at_the_door()
            result = method(*args, **kwargs)
            if self.engine.global_steps != before:
                if session.is_proving:
                    told, self.told = self.told, None
                    tell_numbers(session, lambda: told or self.numbers.take(result, tp=session.tp))
                if session.is_to_prove:
                    _leave(self.engine)
                if torch.distributed.get_rank() == 0:
                    session.note_made(*self.numbers.known(result))
                self.numbers.begin()
                self.count_step()
            return result

        return step


def _count_without_fillers(engine: Any, batches: Batches) -> None:
    """Have an engine that was built with the samples of all passes count those of the batch."""
    stated = engine._config.train_batch_size
    size = stated // batches.passed_samples * batches.global_batch_size
    engine._config.train_batch_size = size
    if TRAIN in engine.config:  # checkpoints keep it; the accumulation follows
        engine.config[TRAIN] = size
        engine.config.pop(ACCUMULATION, None)
    for name in ("tput_timer", "batch_timer"):
        if hasattr(engine, name):
            getattr(engine, name).batch_size = size


def _is_pipeline(engine: Any) -> bool:
    pipe = importlib.import_module("deepspeed.runtime.pipe.engine")
    return isinstance(engine, pipe.PipelineEngine)


def _draws_samples(engine: Any) -> bool:
    """True if this rank reads samples: in a pipeline the first and the last stage."""
    return not _is_pipeline(engine) or engine.is_first_stage() or engine.is_last_stage()


def _leave(engine: Any) -> None:
    """End this worker. The code behind the training loop belongs to the end of the job."""
    tensorboard = getattr(getattr(engine, "monitor", None), "tb_monitor", None)
    if tensorboard is not None and tensorboard.summary_writer is not None:
        tensorboard.summary_writer.flush()
    raise SystemExit(0)


def _without_named_config(args: Any) -> AbstractContextManager[None]:
    """Make DeepSpeed read the given configuration, not the one named by ``args``."""
    names = ("deepspeed_config", "deepscale_config")
    return without(args, [name for name in names if hasattr(args, name)])
