"""Hooks that make Megatron-LM's own training scripts elastic, without editing them.

The two main functions, ``setup_model_and_optimizer`` and ``checkpoint_and_decide_exit`` of
``megatron/training/training.py``, are looked up in their module at each call, and are the same from
0.12 on. Decisions are in ``continuation``, ``versions``, and in
``scalai.converters.megatron.rules``, as for the launcher.
"""

import importlib
import inspect
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import wrapt

from scalai.converters.megatron.arguments import TOLD_FACT, told_of
from scalai.converters.megatron.rules import (
    allows_untested,
    even_passes,
    faults_of,
    fixed_axes,
)
from scalai.core.errors import LayoutError, refuse_all
from scalai.core.job.function_proof import Numbers
from scalai.core.jsonable import Json
from scalai.core.release import numbers_of as release_of
from scalai.patches.continuation import choose_source, describe_source
from scalai.patches.hooking import Args, Call, Kwargs, given_to, without
from scalai.patches.megatron import samplers, save_process, shares, step_logs
from scalai.patches.megatron.bare_step import (
    NORM,
    BareStep,
    NormInDouble,
    loss_of,
    numbers_of,
    obstacle_of,
    randomness_of,
    tells_of_steps,
    without_update,
)
from scalai.patches.megatron.samplers import TrainingDraws
from scalai.patches.megatron.saves import TRACKER, AsyncSaves
from scalai.patches.megatron.step_logs import LEDGER_DIR, StepLedger
from scalai.patches.step_proof import agreed, other_streams, tell_numbers
from scalai.patches.versions import MEGATRON
from scalai.runtime.session import Session
from scalai.store.pool import host_memory

log = logging.getLogger(__name__)


def warnings_of(args: Any) -> Iterator[str]:
    """Yield warnings of accepted but surprising flags: one line each, for the log."""
    if getattr(args, "exit_signal_handler", False):
        yield (
            "--exit-signal-handler: a signal that reaches the workers themselves ends the job by "
            "Megatron's own save, not by a resize. Signal the agent instead"
        )
    if getattr(args, "dataloader_type", None) == "external":
        yield (
            "--dataloader-type external: the loader has to begin at args.consumed_train_samples "
            "itself, and its order must not depend on the data-parallel size"
        )
    if getattr(args, "exit_duration_in_mins", None):
        yield "--exit-duration-in-mins counts from the newest start of the workers"
    if getattr(args, "check_for_spiky_loss", False):
        yield "--check-for-spiky-loss collects its first hundred losses anew behind each change"


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Megatron-LM's counters in its arguments.

    ``iteration`` is the number of steps done, the samples are global counts,
    ``num_floating_point_operations_so_far`` is Megatron's own estimate. ``padded_vocab_size``, in
    rows, is fixed: another size is another model.
    """

    iteration: int
    consumed_train_samples: int
    consumed_valid_samples: int
    skipped_train_samples: int
    num_floating_point_operations_so_far: float
    padded_vocab_size: int | None

    def to_json(self) -> Json:
        return asdict(self)


def take_progress(args: Any, iteration: int, flops: float) -> TrainingProgress:
    """Read Megatron-LM's counters from its arguments; the others are in its loop."""
    return TrainingProgress(
        iteration=iteration,
        consumed_train_samples=args.consumed_train_samples,
        consumed_valid_samples=args.consumed_valid_samples,
        skipped_train_samples=args.skipped_train_samples,
        num_floating_point_operations_so_far=float(flops),
        padded_vocab_size=getattr(args, "padded_vocab_size", None),
    )


def put_progress(args: Any, saved: Mapping[str, Json]) -> None:
    """Set Megatron-LM's counters from ``TrainingProgress.to_json``.

    Raises:
        LayoutError: The vocabulary is padded to another size than before.
    """
    progress = TrainingProgress(**saved)
    here = getattr(args, "padded_vocab_size", None)
    before = progress.padded_vocab_size
    if here != before:
        raise LayoutError(
            f"the vocabulary was padded to {before} rows and is padded to {here} here; padded rows "
            f"are trained, so this would be another model. Use --make-vocab-size-divisible-by N "
            f"with N times the tensor-parallel size dividing {before}."
        )
    args.iteration = progress.iteration
    args.consumed_train_samples = progress.consumed_train_samples
    args.consumed_valid_samples = progress.consumed_valid_samples
    args.skipped_train_samples = progress.skipped_train_samples
    args.num_floating_point_operations_so_far = progress.num_floating_point_operations_so_far


def checkpoint_step(tracker: str | None, ckpt_step: int | None, is_finetune: bool) -> int | None:
    """Return the iteration of ``--load``, or None without a checkpoint.

    Args:
        tracker: Content of ``latest_checkpointed_iteration.txt``; None: no such file.
        ckpt_step: ``--ckpt-step``, which overrides the tracker.
        is_finetune: True for ``--finetune``, which takes the weights and counts from 0.
    """
    if tracker is None:
        return None
    if is_finetune:
        return 0
    if ckpt_step is not None:
        return ckpt_step
    text = tracker.strip()
    return int(text) if text.isdigit() else 0  # "release" has no iteration


SAMPLERS = ("megatron.training.datasets.data_samplers", "megatron.legacy.data.data_samplers")
"""Modules of the samplers: from 0.16 on, and before."""
FIM = "megatron.training.datasets.fim_dataset"
FIRST_SHARE = "first_share"
"""Under this name it is told how the first round dealt: micro-batch size and replicas."""
CUDA_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
LOADED_FROM = ("load", "pretrained_checkpoint")
"""Arguments of ``setup_model_and_optimizer`` for a checkpoint to load."""
NO_CHECKPOINT = -1
"""Stands for "no checkpoint" in a number all ranks agree on."""


@cache
def install(get_session: Callable[[], Session]) -> None:
    """Hook ``megatron.training`` when it is imported, once a process.

    Args:
        get_session: Returns this worker's session. Asked for when the model is built, not before:
            a fork server imports Megatron-LM, hooks included, for workers to come.
    """
    hooks = TrainingHooks(get_session)
    wrapt.register_post_import_hook(hooks.hook_training, "megatron.training.training")
    wrapt.register_post_import_hook(hooks.hook_global_vars, "megatron.training.global_vars")
    wrapt.register_post_import_hook(_hook_arguments, "megatron.training.arguments")
    wrapt.register_post_import_hook(_hook_indexed, "megatron.core.datasets.indexed_dataset")
    wrapt.register_post_import_hook(samplers.hook_fim, FIM)
    save_process.install()
    shares.install()
    for name in SAMPLERS:
        wrapt.register_post_import_hook(hooks.draws.hook, name)
        wrapt.register_post_import_hook(samplers.hook_samplers, name)


class TrainingHooks:
    """The hooks and their memory between two calls. Every rank has them."""

    _session: Session
    _training: Any
    _decide_signature: inspect.Signature
    _ledger: StepLedger | None = None

    def __init__(self, get_session: Callable[[], Session]) -> None:
        self._get_session = get_session
        self._iteration = 0
        self._flops = 0.0
        self._wandb_run_id = ""
        self._is_reduced = False
        self._notes: list[Callable[[], object]] | None = []
        """Lines for the log of progress, until the round has begun. None: it has."""
        self._asked: Json = None
        self._start_wandb: Call | None = None
        self._makes_data_sets: Call | None = None
        self._data_sets: Any = None
        self._saves = AsyncSaves()
        self.draws = TrainingDraws()

    def hook_training(self, training: Any) -> None:
        self._training = training
        self._decide_signature = inspect.signature(training.checkpoint_and_decide_exit)
        for name, hook in (
            ("pretrain", self.pretrain),
            ("append_to_progress_log", self.note_progress),
            ("setup_model_and_optimizer", self.setup_model_and_optimizer),
            ("get_optimizer_param_scheduler", self.build_scheduler),
            ("build_train_valid_test_datasets", self.build_data_sets),
            ("build_train_valid_test_data_iterators", self.build_data_iterators),
            ("train_step", self.train_step),
            ("checkpoint_and_decide_exit", self.checkpoint_and_decide_exit),
            ("save_checkpoint_and_time", self._unless_proving),
            ("evaluate_and_print_results", self._unless_proving),
        ):
            wrapt.wrap_function_wrapper(training, name, hook)
        shares.hook_training(training)
        self._saves.hook(training)

    def hook_global_vars(self, global_vars: Any) -> None:
        # Weights & Biases is started once the identity of its run is restored. Nobody asks for it
        # before the training loop.
        self._start_wandb = global_vars._set_wandb_writer
        global_vars._set_wandb_writer = lambda args: None

    def pretrain(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        given = given_to(wrapped, args, kwargs)  # the first is the configuration, from 0.19 on
        self._makes_data_sets = given["train_valid_test_dataset_provider"]
        return wrapped(*args, **kwargs)

    def note_progress(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Keep the start of a round out of ``--log-progress`` until the round before has ended: its
        saves would fail, without a start of their own size behind that of another one."""
        if self._notes is None:
            return wrapped(*args, **kwargs)
        self._notes.append(partial(wrapped, *args, **kwargs))
        return None

    def setup_model_and_optimizer(
        self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs
    ) -> Any:
        """Build, then continue from the newer of our generation and the checkpoint of --load."""
        from scalai.patches.megatron.megatron_state import MegatronState

        job, session = self._training.get_args(), self._get_session()
        self._session = session
        release = self._check(job)
        if getattr(job, "async_save", False):
            self._saves.begin(session)
        self._keep_first_degrees(job)
        is_restoring = self._is_generation_newer(job)
        self._open_data_sets(job)
        # Else it would read a checkpoint that is overwritten.
        with without(job, LOADED_FROM) if is_restoring else nullcontext():
            session.begin_build()
            built = wrapped(*args, **kwargs)
        model, optimizer, scheduler = built
        self._iteration, self._flops = job.iteration, job.num_floating_point_operations_so_far
        self._wandb_run_id = _run_id(job)
        session.report_facts(
            host_memory=host_memory(),
            padded_vocab_size=job.padded_vocab_size,
            **{TOLD_FACT: told_of(vars(job))},
        )
        if why := even_passes(vars(job)):
            session.keep_even(why)
        is_stated = getattr(job, "_is_global_batch_size_explicitly_specified", True)
        if not is_stated and job.eval_global_batch_size == job.global_batch_size:
            # Micro-batch times DP: a change of DP may not change what an evaluation sees.
            session.report_facts(eval_batch_size=job.eval_global_batch_size)
        self._ask_of_layouts(release)
        session.register_state("megatron_training", self._take, self._put)
        fixed = dict(fixed_axes(vars(job), release))
        session.is_measured = True
        session.attach(
            MegatronState(
                model, optimizer, scheduler, seed=job.seed, fixed=fixed, asked=self._asked
            ),
            step=job.iteration,
            samples=job.consumed_train_samples,
            restore=is_restoring,
        )
        notes, self._notes = self._notes or [], None
        for note in notes:
            note()
        self._continue_writers(job)
        return built

    def build_scheduler(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Note the schedule from the flags, before a checkpoint is loaded into it."""
        from scalai.patches.megatron.optimizer_state import asked_of

        scheduler = wrapped(*args, **kwargs)
        self._asked = asked_of(scheduler.optimizer, scheduler)
        return scheduler

    def build_data_iterators(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        job = self._training.get_args()
        iterators = self.draws.build(job.consumed_train_samples, wrapped, args, kwargs)
        self._session.note_sources(self.draws.sources(vars(job)))
        if self._ledger:
            watch = self.draws.newest
            self._ledger.count(iterators, lambda: watch is not None and watch.is_filler)
        return iterators

    def _open_data_sets(self, job: Any) -> None:
        """Open the data sets before the old workers of a change stop: many of them take long.

        Every round does so before its ranks wait for each other in ``attach``: their processes meet
        in barriers there. Stages of a virtual pipeline have data sets of their own, and those of a
        phase depend on the progress that ``attach`` restores.
        """
        makes = self._makes_data_sets
        has_others = job.virtual_pipeline_model_parallel_size or getattr(
            job, "phase_transition_iterations", None
        )
        if getattr(makes, "is_distributed", False) and not has_others:
            if job.train_samples:  # their steps, by which evaluations are counted: once
                self._training.update_train_iters(job)
            self._data_sets = self._training.build_train_valid_test_datasets(makes)

    def build_data_sets(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        opened, self._data_sets = self._data_sets, None
        is_first = opened is not None and args == (self._makes_data_sets,) and not kwargs
        return opened if is_first else wrapped(*args, **kwargs)

    def train_step(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        if self._session.is_to_prove:
            tell_numbers(self._session, lambda: self._numbers(wrapped, args, kwargs))
            _leave(self._training)
        self._session.begin_step()
        is_first = self._session.is_proving
        make = self._first_step if is_first else lambda step, args, kwargs: step(*args, **kwargs)
        result = make(wrapped, args, kwargs)
        self._session.end_step()
        if self._is_reduced and tells_of_steps():
            self._session.note_made(loss_of(result), result[NORM])
        if self._ledger:
            self._ledger.keep_loss(result[0])
        return result

    def checkpoint_and_decide_exit(
        self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs
    ) -> bool:
        """Our boundary, after Megatron's own evaluation and save of this step."""
        bound = self._decide_signature.bind(*args, **kwargs).arguments
        self._iteration = bound["iteration"]
        self._flops = bound["num_floating_point_operations_so_far"]
        samples = self._training.get_args().consumed_train_samples
        if self._ledger:
            self._ledger.write(self._iteration, samples, bound["optimizer"])
        if wrapped(*args, **kwargs):
            return True  # Megatron itself has decided to end
        drawn = self.draws.step(_pipeline_stage())
        if drawn is not None:
            self._session.note_draws(*drawn)
        self._saves.at_boundary(self._training.maybe_finalize_async_save)
        if self._session.boundary(self._iteration, samples):
            self._saves.leave()
            is_last = self._iteration >= (self._training.get_args().train_iters or 0)
            if is_last or not self._session.is_to_prove:
                _leave(self._training)
        return False

    def _first_step(self, train_step: Call, args: Args, kwargs: Kwargs) -> Any:
        """Make the round's first step, and tell its numbers: in a comparison with random numbers,
        those of a further pass without any."""
        given, job = given_to(train_step, args, kwargs), self._training.get_args()
        random = randomness_of(job, given.get("model", []))
        bare, obstacle = None, obstacle_of(job, given)
        if self._session.is_compared:
            device = torch.cuda.current_device()
            random, obstacle = agreed(random, device), agreed(obstacle, device)
            if random and not obstacle:
                bare = BareStep(self._training, train_step, given)
        told = bare.make(is_first=True) if bare is not None else None
        began = time.monotonic()
        with NormInDouble(given["optimizer"]) as norm:
            result = bare.real() if bare is not None else train_step(*args, **kwargs)
        unlike = other_streams(random, obstacle)
        tell_numbers(self._session, partial(self._first_numbers, told, result, began, norm, unlike))
        return result

    def _first_numbers(
        self, told: Numbers | None, result: Any, began: float, norm: NormInDouble, unlike: str
    ) -> Numbers:
        """Return the numbers of the round's first step; they show if later ones are of all
        replicas, or of this one's share alone."""
        numbers = numbers_of(self._training, result, began, norm, unlike)
        mine = loss_of(result)
        if mine is not None and numbers.loss is not None:
            self._is_reduced = math.isclose(float(mine), numbers.loss, rel_tol=1e-9)
        return numbers if told is None else told

    def _numbers(self, train_step: Call, args: Args, kwargs: Kwargs) -> Numbers:
        """Make a step up to the door of its update."""
        given, job = given_to(train_step, args, kwargs), self._training.get_args()
        began, optimizer = time.monotonic(), given["optimizer"]
        random, obstacle = randomness_of(job, given.get("model", [])), obstacle_of(job, given)
        if random and not obstacle:
            return BareStep(self._training, train_step, given).make(is_first=False)
        with without_update(optimizer), NormInDouble(optimizer) as norm:
            result = train_step(*args, **kwargs)
        return numbers_of(self._training, result, began, norm, other_streams(random, obstacle))

    def _unless_proving(self, wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Before the step behind its stop a worker neither saves nor evaluates: it leaves."""
        if self._session.is_to_prove:
            _leave(self._training)
        return wrapped(*args, **kwargs)

    def _check(self, job: Any) -> tuple[int, ...]:
        """Refuse a job without elasticity, before anything is built; return Megatron-core's
        release."""
        import megatron.core

        is_allowed = allows_untested(os.environ)
        warning = MEGATRON.check(megatron.core.__version__, allow_untested=is_allowed)
        refuse_all(faults_of(vars(job), allow_untested=is_allowed))
        if job.rank == 0:
            for line in (*filter(None, [warning]), *warnings_of(job)):
                log.warning("event=hook detail=%r", line)
        if LEDGER_DIR in os.environ:
            round_number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
            directory = Path(os.environ[LEDGER_DIR])
            self._ledger = StepLedger(directory, self._session.run, round_number)
        return release_of(megatron.core.__version__)

    def _ask_of_layouts(self, release: tuple[int, ...]) -> None:
        """Tell the layouts refused by Megatron-LM's own classes, once."""
        from scalai.patches.megatron.other_layouts import REFUSED, refused_layouts

        if not UNCHECKED or REFUSED in self._session.facts:
            return
        try:
            found = refused_layouts(sys.argv[1:], *UNCHECKED.pop(), release)
        except Exception as error:  # nothing depends on it
            log.warning("event=layouts_not_asked %r", error)
        else:
            self._session.report_facts(**{REFUSED: found})

    def _keep_first_degrees(self, job: Any) -> None:
        """Tell the degrees of the job's begin; random samplers keep their order."""
        here = [job.micro_batch_size, job.data_parallel_size]
        first = self._session.facts.get(FIRST_SHARE, here)
        self._session.report_facts(**{FIRST_SHARE: first})
        if getattr(job, "dataloader_type", None) == "cyclic":
            self.draws.first = first[0], first[1]

    def _is_generation_newer(self, job: Any) -> bool:
        """True to restore our generation. Called by all ranks: they agree on the checkpoint."""
        generation = self._session.restorable_step
        if generation is None:
            return False
        if self._session.is_standby:
            return (
                True  # the training that still runs will snapshot after any checkpoint of its own
            )
        checkpoint = _agreed_checkpoint_step(job)
        source = choose_source(generation, checkpoint)
        if job.rank == 0:
            log.warning(describe_source(source, generation, checkpoint, job.load))
        return source == "generation"

    def _take(self) -> Json:
        progress = take_progress(self._training.get_args(), self._iteration, self._flops)
        run = {"wandb_run_id": self._wandb_run_id} if self._wandb_run_id else {}
        return {"progress": progress.to_json(), "saves": self._saves.places.run, **run}

    def _put(self, saved: Any) -> None:
        from megatron.core.num_microbatches_calculator import update_num_microbatches

        job = self._training.get_args()
        put_progress(job, saved["progress"])
        self._iteration, self._flops = job.iteration, job.num_floating_point_operations_so_far
        self._wandb_run_id = saved.get("wandb_run_id", self._wandb_run_id)
        self._saves.places.run = saved["saves"]
        # As load_checkpoint() does: else the loop takes a grown batch for a reason to save.
        update_num_microbatches(consumed_samples=job.consumed_train_samples, verbose=True)

    def _continue_writers(self, job: Any) -> None:
        writer = self._training.get_tensorboard_writer()
        if writer and self._session.restorable_step is not None:
            step_logs.skip_written_steps(writer, step_logs.written_steps(Path(job.tensorboard_dir)))
        if self._start_wandb is not None and _writes_wandb(job):
            wandb = importlib.import_module("wandb")
            with step_logs.resumed_run(wandb, self._wandb_run_id):
                self._start_wandb(job)


def _pipeline_stage() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_pipeline_model_parallel_rank())


def _leave(training: Any) -> None:
    """End this worker as Megatron's own exit does, but without its last collectives.

    train() would gather all parameters and wait for all ranks: for nothing, and for ever if a rank
    is lost now. The evaluation and the save after train() belong to the end of the job.
    """
    writer, wandb = training.get_tensorboard_writer(), training.get_wandb_writer()
    if writer:
        writer.close()
    if wandb:
        wandb.finish()
    training.ft_integration.shutdown()
    training.one_logger_utils.finish()
    raise SystemExit(0)


def _hook_indexed(module: Any) -> None:
    from scalai.patches.megatron import indexed_source  # with it comes fsspec

    indexed_source.hook(module)


def _check_cache(flags: Mapping[str, Any]) -> None:
    from scalai.patches.megatron import indexed_source

    indexed_source.check_cache(flags)


def _hook_arguments(arguments: Any) -> None:
    for check in (shares.check_args, check_args):
        wrapt.wrap_function_wrapper(arguments, "validate_args", check)


UNCHECKED: list[tuple[Any, Callable[[Any], object]]] = []
"""This process's arguments before Megatron-LM's checks, and the checking function."""


def check_args(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Before CUDA begins: Megatron refuses TP above 1 without this, and TP 1 may become more."""
    if CUDA_CONNECTIONS not in os.environ:
        log.info("event=hook %s=1, which tensor parallelism needs", CUDA_CONNECTIONS)
        os.environ[CUDA_CONNECTIONS] = "1"
    if os.environ.get("RANK") == "0":
        with suppress(Exception):  # a script's own argument that nobody can copy
            given = given_to(wrapped, args, kwargs)
            parsed = given.pop(next(iter(given)))
            others = tuple(given.values())
            UNCHECKED[:] = [(deepcopy(parsed), lambda job: wrapped(job, *others))]
    job = wrapped(*args, **kwargs)
    _check_cache(vars(job))
    if getattr(job, "async_save", False):
        save_process.tie_children()  # the first is started with the process groups
    return job


def _agreed_checkpoint_step(job: Any) -> int | None:
    """Return the iteration under --load, the newest seen by any rank. A collective, if --load."""
    if job.load is None:
        return None
    tracker = Path(job.load, TRACKER)
    text = tracker.read_text() if tracker.is_file() else None
    step = checkpoint_step(text, getattr(job, "ckpt_step", None), job.finetune)
    agreed = torch.tensor(
        [NO_CHECKPOINT if step is None else step], device=torch.cuda.current_device()
    )
    torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MAX)
    found = int(agreed.item())
    return None if found == NO_CHECKPOINT else found


def _writes_wandb(job: Any) -> bool:
    return bool(getattr(job, "wandb_project", "")) and job.rank == job.world_size - 1


def _run_id(job: Any) -> str:
    """Return the identity of a new run; the user's own choice, if there is one, wins."""
    return os.environ.get("WANDB_RUN_ID", secrets.token_hex(4)) if _writes_wandb(job) else ""
