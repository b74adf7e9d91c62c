"""The hooks around a stand-in for Megatron-LM's training loop, and what they keep and log. Imports
no megatron."""

import json
import struct
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalai.converters.megatron.rules import ALLOW_UNTESTED
from scalai.core.dataset.drawn import Draw
from scalai.core.dataset.step_lines import StepEntry
from scalai.core.degrees.batches import combine_hashes, sample_hashes
from scalai.core.errors import LayoutError, RefusedError, UsageError
from scalai.core.job.function_proof import Numbers
from scalai.patches.continuation import choose_source, describe_source
from scalai.patches.megatron import step_logs, training_hooks
from scalai.patches.megatron.step_logs import StepLedger, samples_of
from scalai.patches.megatron.training_hooks import (
    TrainingHooks,
    checkpoint_step,
    put_progress,
    take_progress,
    warnings_of,
)
from support.ledgers import read_ledger


class FakeSession:
    """Restores the counters of step ``restorable_step``, and drains at ``stop``."""

    run, is_standby, is_proving, is_to_prove, is_compared = "r", False, False, False, False
    is_announced = False
    registered: tuple[Callable[[], Any], Callable[[Any], None]] | None = None

    def __init__(
        self, restorable_step: int | None = None, stop: int | None = None, *, proves: bool = False
    ) -> None:
        self.restorable_step, self.stop, self.proves = restorable_step, stop, proves
        self.facts: dict[str, Any] = {}
        self.attached: Mapping[str, Any] = {}
        self.numbers: list[Numbers] = []
        self.boundaries: list[tuple[int | None, int | None]] = []
        self.within: list[bool] = []
        self.draws: list[tuple[Draw, ...]] = []
        self.even: list[str] = []

    def begin_build(self) -> None:
        self.is_announced = True

    def report_facts(self, **facts: Any) -> None:
        self.facts.update(facts)

    def register_state(self, name: str, get: Callable[[], Any], set: Callable[[Any], None]) -> None:
        self.registered = get, set

    def attach(self, state: Any, *, step: int = 0, samples: int = 0, restore: bool = True) -> bool:
        assert self.is_announced, "its next workers could not stop at the brink"
        self.attached = {"step": step, "samples": samples, "restore": restore}
        self.state = state
        if restore and self.registered:
            get, put = self.registered
            saved = get()
            saved["progress"] |= {"iteration": self.restorable_step, "consumed_train_samples": 40}
            put(saved)
        return restore

    def keep_even(self, why: str) -> None:
        self.even.append(why)

    def note_draws(self, *draws: Draw) -> None:
        self.draws.append(draws)

    def note_sources(self, sources: Mapping[str, Mapping[str, Any]]) -> None:
        self.sources = sources

    def begin_step(self) -> None:
        self.within.append(True)

    def end_step(self) -> None:
        self.within.append(False)

    def boundary(self, step: int | None = None, consumed_samples: int | None = None) -> bool:
        self.boundaries.append((step, consumed_samples))
        self.is_to_prove = self.proves and step == self.stop
        return step == self.stop

    def note_numbers(self, numbers: Numbers) -> None:
        self.numbers.append(numbers)


COUNTERS = {
    "consumed_train_samples": 0, "consumed_valid_samples": 0, "skipped_train_samples": 0,
    "padded_vocab_size": 128,
}  # fmt: skip


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing is saved, evaluated or logged here")


class FakeTraining:
    """Names of megatron/training/training.py that the hooks touch."""

    save_checkpoint_and_time = evaluate_and_print_results = staticmethod(never)
    get_forward_backward_func = staticmethod(never)
    maybe_finalize_async_save = save_checkpoint = staticmethod(never)

    def __init__(self, **arguments: Any) -> None:
        self.job = Namespace(
            **COUNTERS, load=None, rank=0, world_size=1, seed=1, finetune=False,
            pretrained_checkpoint=None, global_batch_size=4, train_iters=9, train_samples=None,
            bf16=False, fp16=False, micro_batch_size=2, data_parallel_size=1,
            tensorboard_dir="no such folder", virtual_pipeline_model_parallel_size=None,
        )  # fmt: skip
        vars(self.job).update(arguments)
        self.has_decided = False
        self.session = FakeSession()
        self.progress: list[tuple[str, bool]] = []
        self.loaded_from: list[str | None] = []
        self.closed: list[str] = []
        self.writer = SimpleNamespace(add_scalar=never, close=self._closing("writer"))
        self.ft_integration = SimpleNamespace(shutdown=self._closing("ft"))
        self.one_logger_utils = SimpleNamespace(finish=self._closing("one_logger"))

    def _closing(self, what: str) -> Callable[[], None]:
        return lambda: self.closed.append(what)

    def get_args(self) -> Namespace:
        return self.job

    def get_tensorboard_writer(self) -> Any:
        return self.writer

    def get_wandb_writer(self) -> None:
        return None

    def setup_model_and_optimizer(self, model_provider: Any, model_type: Any) -> Any:
        self.loaded_from.append(self.job.load)
        self.job.iteration = 7 if self.job.load else 0
        self.job.consumed_train_samples = 4 * self.job.iteration
        self.job.num_floating_point_operations_so_far = 0
        return "model", "optimizer", "scheduler"

    def get_optimizer_param_scheduler(self, optimizer: Any) -> Any:
        return "scheduler"

    def pretrain(self, train_valid_test_dataset_provider: Any, model_provider: Any) -> None:
        self.append_to_progress_log("Starting job")
        self.setup_model_and_optimizer(model_provider, "type")
        self.append_to_progress_log("Saved checkpoint")
        provider = train_valid_test_dataset_provider
        self.given = [self.build_train_valid_test_datasets(provider) for _ in range(2)]

    def append_to_progress_log(self, line: str) -> None:
        self.progress.append((line, bool(self.session.attached)))

    def update_train_iters(self, job: Namespace) -> None:
        job.train_iters = job.train_iters or job.train_samples // job.global_batch_size

    def build_train_valid_test_datasets(self, provider: Any) -> Any:
        assert self.job.train_iters is not None, "evaluations are counted by it"
        return provider()

    def build_train_valid_test_data_iterators(self, provider: Any) -> Any:
        return None, None, None

    def train_step(self, optimizer: Any = None) -> Any:
        norm = None if optimizer is None else optimizer.step()
        return {}, 0, False, False, 0, norm, None, 0

    def checkpoint_and_decide_exit(
        self, model: Any, optimizer: Any, opt_param_scheduler: Any, iteration: int,
        num_floating_point_operations_so_far: float, checkpointing_context: Any,
        train_data_iterator: Any,
    ) -> bool:  # fmt: skip
        return self.has_decided

    def step(self, iteration: int) -> bool:
        return self.checkpoint_and_decide_exit(None, None, None, iteration, 1e9, {}, None)


@pytest.fixture(autouse=True)
def fake_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = SimpleNamespace(get_pipeline_model_parallel_rank=lambda: 0)
    core = SimpleNamespace(__version__="0.16.1", parallel_state=stages)
    batches = SimpleNamespace(update_num_microbatches=lambda **kwargs: None)
    state = SimpleNamespace(MegatronState=lambda *args, **kwargs: kwargs)
    for name, module in (
        ("megatron", SimpleNamespace(core=core)),
        ("megatron.core", core),
        ("megatron.core.num_microbatches_calculator", batches),
        ("scalai.patches.megatron.megatron_state", state),
    ):
        monkeypatch.setitem(sys.modules, name, module)


def hooked(session: Any, *, is_set_up: bool = True, **arguments: Any) -> FakeTraining:
    framework = FakeTraining(**arguments)
    TrainingHooks(lambda: session).hook_training(framework)
    if is_set_up:
        framework.setup_model_and_optimizer("provider", "type")
    return framework


def test_a_fresh_job_makes_its_start_generation_from_what_was_built() -> None:
    session = FakeSession()
    framework = hooked(session)
    assert session.attached == {"step": 0, "samples": 0, "restore": False}
    assert session.facts.pop("host_memory") > 1e9
    assert session.facts == {
        "padded_vocab_size": 128, "arguments": {"global_batch_size": 4}, "first_share": [2, 1],
    }  # fmt: skip
    assert framework.loaded_from == [None]


@pytest.mark.parametrize(
    ("arguments", "are_opened"),
    [
        ({}, [False, True]),
        ({"train_iters": None, "train_samples": 40}, [False, True]),
        ({"virtual_pipeline_model_parallel_size": 2}, [True, True]),
        ({"phase_transition_iterations": [3]}, [True, True]),
    ],
)
def test_data_sets_are_opened_before_the_ranks_of_a_change_wait(
    arguments: dict[str, Any], are_opened: list[bool]
) -> None:
    """Once; those of a phase and of a virtual stage where Megatron-LM opens them. ``are_opened``:
    whether the job was under way as each of two requests was answered."""
    session = FakeSession(restorable_step=10)
    framework = hooked(session, is_set_up=False, **arguments)

    def provider() -> bool:
        return bool(session.attached)

    provider.is_distributed = True  # type: ignore[attr-defined]
    framework.pretrain(provider, "model")
    assert framework.given == are_opened


def test_a_round_is_in_the_log_of_progress_from_its_begin_on() -> None:
    """Saves of the round before fail where the newest start there is of another size."""
    session = FakeSession()
    framework = hooked(session, is_set_up=False)
    framework.session = session
    framework.pretrain(lambda: None, "model")
    assert framework.progress == [("Starting job", True), ("Saved checkpoint", True)]


def test_data_sets_are_opened_ahead_where_a_configuration_stands_before_their_provider() -> None:
    """As from 0.19 on."""

    class Later(FakeTraining):
        def pretrain(  # type: ignore[override]
            self, cfg_container: Any, train_valid_test_dataset_provider: Any
        ) -> None:
            super().pretrain(train_valid_test_dataset_provider, "model")

    session: Any = FakeSession()
    framework = Later()
    TrainingHooks(lambda: session).hook_training(framework)

    def provider() -> bool:
        return bool(session.attached)

    provider.is_distributed = True  # type: ignore[attr-defined]
    framework.pretrain("configuration", provider)
    assert framework.given == [False, True]


@pytest.mark.parametrize(
    ("generation", "checkpoint", "source"),
    [
        (None, None, "nothing"),
        (None, 100, "checkpoint"),
        (0, None, "generation"),
        (100, 99, "generation"),
        (100, 100, "generation"),
        (100, 101, "checkpoint"),
        (0, 0, "generation"),
    ],
)
def test_the_newer_state_wins_and_the_generation_at_the_same_step(
    generation: int | None, checkpoint: int | None, source: str
) -> None:
    assert choose_source(generation, checkpoint) == source


def test_both_states_are_named_in_the_log() -> None:
    line = describe_source("generation", 120, 100, "/checkpoints")
    assert all(text in line for text in ("step 120", "iteration 100", "/checkpoints"))


@pytest.mark.parametrize("checkpoint", [None, 7, 10])
def test_a_newer_generation_keeps_the_checkpoint_from_being_read(
    checkpoint: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_hooks, "_agreed_checkpoint_step", lambda job: checkpoint)
    session = FakeSession(restorable_step=10)
    framework = hooked(session, load="/checkpoints")
    assert framework.loaded_from == [None]
    assert framework.job.load == "/checkpoints"
    assert session.attached["restore"] is True
    assert (framework.job.iteration, framework.job.consumed_train_samples) == (10, 40)


@pytest.mark.parametrize("generation", [5, None], ids=["an older generation", "none"])
def test_a_newer_checkpoint_wins_over_the_generation(
    generation: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_hooks, "_agreed_checkpoint_step", lambda job: 7)
    session = FakeSession(restorable_step=generation)
    framework = hooked(session, load="/checkpoints")
    assert framework.loaded_from == ["/checkpoints"]
    assert session.attached == {"step": 7, "samples": 28, "restore": False}


@pytest.mark.parametrize(
    ("tracker", "ckpt_step", "is_finetune", "step"),
    [
        (None, None, False, None),
        (None, 50, False, None),
        ("100", None, False, 100),
        ("100\n", None, False, 100),
        ("100", 50, False, 50),
        ("release", None, False, 0),
        ("100", None, True, 0),
    ],
)
def test_the_iteration_of_a_checkpoint_is_what_megatron_would_count_from(
    tracker: str | None, ckpt_step: int | None, is_finetune: bool, step: int | None
) -> None:
    assert checkpoint_step(tracker, ckpt_step, is_finetune) == step


def test_counters_survive_a_change_of_the_workers_and_the_vocabularys_padding_has_to() -> None:
    counted = {"consumed_train_samples": 96, "consumed_valid_samples": 24}
    before = Namespace(**{**COUNTERS, **counted, "skipped_train_samples": 8})
    saved = take_progress(before, iteration=12, flops=3.5e9).to_json()
    after = Namespace(**COUNTERS)
    put_progress(after, saved)
    assert (after.iteration, after.num_floating_point_operations_so_far) == (12, 3.5e9)
    assert take_progress(after, 12, 3.5e9).to_json() == saved
    with pytest.raises(LayoutError, match=r"192 rows.*128.*make-vocab-size-divisible-by"):
        put_progress(after, {**saved, "padded_vocab_size": 192})


def test_the_boundary_comes_after_the_decision_of_the_framework() -> None:
    session = FakeSession(stop=2)
    framework = hooked(session)
    framework.job.consumed_train_samples = 4
    assert framework.step(1) is False
    framework.has_decided = True
    assert framework.step(2) is True
    assert session.boundaries == [(1, 4)]


@pytest.mark.fault
def test_a_step_is_under_way_while_megatron_makes_it_and_not_behind_it() -> None:
    session = FakeSession()
    hooked(session).train_step()
    assert session.within == [True, False], "an evaluation or a save may follow"


def test_a_drained_worker_closes_its_writers_and_ends_with_0() -> None:
    framework = hooked(FakeSession(stop=2))
    framework.step(1)
    with pytest.raises(SystemExit) as end:
        framework.step(2)
    assert end.value.code == 0
    assert framework.closed == ["writer", "ft", "one_logger"]


class FakeOptimizer:
    """As ``MegatronOptimizer``: prepares gradients, and then changes parameters."""

    updates = 0

    def step_with_ready_grads(self) -> bool:
        self.updates += 1
        return True

    def step(self) -> float:
        self.step_with_ready_grads()
        return 2.5


def behind_its_stop(
    act: Callable[[FakeTraining], Any], stop: int = 2, **arguments: Any
) -> FakeSession:
    """Have a worker that is to make a step behind its stop act there, and see it leave with 0."""
    session = FakeSession(stop=stop, proves=True)
    framework = hooked(session, **arguments)
    assert framework.step(stop) is False, "the script goes on to its next step"
    with pytest.raises(SystemExit) as end:
        act(framework)
    assert end.value.code == 0
    return session


def test_behind_its_stop_a_worker_makes_a_step_without_its_update_and_leaves() -> None:
    optimizer = FakeOptimizer()
    session = behind_its_stop(lambda framework: framework.train_step(optimizer))
    assert optimizer.updates == 0 and not session.within, "it is no step of the job"
    (numbers,) = session.numbers
    assert (numbers.norm, numbers.framework) == (2.5, "megatron-core 0.16.1")


@pytest.mark.parametrize(
    "act",
    [
        lambda framework: framework.save_checkpoint_and_time(2),
        lambda framework: framework.evaluate_and_print_results("at the end"),
    ],
)
def test_a_script_that_saves_or_evaluates_before_that_step_leaves_without_it(act: Any) -> None:
    assert not behind_its_stop(act).numbers


@pytest.mark.fault
def test_a_step_behind_the_stop_that_raises_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    session = behind_its_stop(lambda framework: framework.train_step("no optimizer"))
    assert not session.numbers and "function_unproven" in caplog.text


def test_behind_the_last_step_there_is_none_to_prove() -> None:
    framework = hooked(FakeSession(stop=2, proves=True), train_iters=2)
    with pytest.raises(SystemExit):
        framework.step(2)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"cuda_graph_impl": "local"}, ["hidden_dropout 0.1", "CUDA graphs"]),
        ({}, ["no data_iterator, model"]),
    ],
    ids=["random streams", "a train_step of another kind"],
)
def test_why_no_further_pass_is_made_is_told_with_the_numbers(
    flags: dict[str, Any], said: list[str]
) -> None:
    session = behind_its_stop(
        lambda framework: framework.train_step(FakeOptimizer()), hidden_dropout=0.1, **flags
    )
    assert all(text in session.numbers[0].obstacle for text in said)


def test_a_session_hears_why_replicas_make_equally_many_passes() -> None:
    hooked(session := FakeSession())
    assert session.even == []
    hooked(session, num_experts=8)
    assert "--num-experts" in session.even[0]


def test_an_unknown_version_is_refused_when_the_model_is_built_not_when_it_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["megatron.core"], "__version__", "0.99.0")
    with pytest.raises(RefusedError, match=r"0\.99\.0"):
        hooked(FakeSession())
    monkeypatch.setenv(ALLOW_UNTESTED, "1")
    hooked(FakeSession())


def test_what_stays_is_the_law_of_the_command_line() -> None:
    session = FakeSession()
    hooked(session, optimizer="muon", muon_tp_mode="blockwise")
    assert set(session.state["fixed"]) == {"cp", "tp"}


@pytest.mark.parametrize("is_stated", [True, False])
def test_the_batch_of_an_evaluation_is_told_where_no_flag_states_it(is_stated: bool) -> None:
    session = FakeSession()
    flags: dict[str, Any] = {
        "_is_global_batch_size_explicitly_specified": is_stated,
        "eval_global_batch_size": 4,
    }
    hooked(session, **flags)
    assert session.facts.get("eval_batch_size") == (None if is_stated else 4)


def test_what_cannot_be_elastic_is_refused_before_the_model_is_built() -> None:
    framework = hooked(FakeSession(), is_set_up=False, decrease_batch_size_if_needed=True)
    with pytest.raises(RefusedError, match="order of samples"):
        framework.setup_model_and_optimizer("provider", "type")
    assert framework.loaded_from == []


def test_a_question_about_layouts_that_fails_stops_no_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training_hooks.UNCHECKED[:] = [(Namespace(), never)]  # the command line is this test's
    session = FakeSession()
    hooked(session)
    assert "event=layouts_not_asked" in caplog.text
    assert "refused_layouts" not in session.facts


class Uncopied:
    """What a script keeps among its arguments."""

    def __deepcopy__(self, memo: object) -> object:
        raise RuntimeError("not a leaf")


@pytest.mark.parametrize("kept", [3, Uncopied()])
@pytest.mark.parametrize("is_named", [True, False])
def test_arguments_are_checked_whatever_a_script_keeps_in_them_and_however_it_gives_them(
    kept: object, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def validate_args(args: Any, defaults: object = None) -> Any:
        args.checked_with = defaults
        return args

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(training_hooks, "UNCHECKED", [])
    job = Namespace(kept=kept)
    given: Any = ((), {"args": job, "defaults": 5}) if is_named else ((job, 5), {})
    assert training_hooks.check_args(validate_args, None, *given).checked_with == 5
    for parsed, check in training_hooks.UNCHECKED:
        assert not hasattr(parsed, "checked_with") and vars(check(parsed))["checked_with"] == 5
    assert bool(training_hooks.UNCHECKED) is (kept == 3)


def test_surprises_are_said() -> None:
    logged = " ".join(warnings_of(Namespace(exit_signal_handler=True, dataloader_type="external")))
    assert "Signal the agent" in logged and "consumed_train_samples" in logged


# ------------------------------------------------------------------ logs of steps


def ledger_of(
    monkeypatch: pytest.MonkeyPatch, folder: Path, rank: int, *, counts: bool
) -> StepLedger:
    monkeypatch.setattr(step_logs, "is_counting_rank", lambda: counts)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    return StepLedger(folder, "r", round_number=2)


def test_consumed_samples_are_hashed_once_and_written_a_line_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new folder"
    batches = [{"tokens": torch.arange(4 * n, 4 * n + 8).view(2, 4)} for n in range(4)]
    train = SimpleNamespace(iterable=iter(batches))
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}, {"lr": 0.25}])
    book = ledger_of(monkeypatch, folder, 3, counts=True)
    book.count((train, None, None), lambda: False)
    for step in (1, 2):
        next(train.iterable), next(train.iterable)
        book.keep_loss({"lm loss": torch.tensor(3.0 / step)})
        book.write(step, 4 * step, optimizer)
    entries = read_ledger(folder)
    assert [entry.loss for entry in entries.values()] == [3.0, 1.5]
    hashed = combine_hashes(*(sample_hashes(batch["tokens"].numpy()) for batch in batches[2:]))
    assert (entries[2].samples_hash, entries[2].lr) == (hashed, 0.5)
    assert json.loads((folder / "rank-3.jsonl").read_text().splitlines()[0])["round"] == 2


def test_ranks_that_read_no_samples_write_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = SimpleNamespace(iterable="untouched")
    book = ledger_of(monkeypatch, tmp_path, 0, counts=False)
    book.count((train, None, None), lambda: False)
    book.count((None, None, None), lambda: False)
    book.keep_loss({})
    book.write(1, 4, SimpleNamespace(param_groups=[]))
    assert train.iterable == "untouched"
    assert read_ledger(tmp_path)[1] == StepEntry(2, 1, 4, samples_hash=0, loss=None, lr=None)


@pytest.mark.parametrize(
    "names", [["tokens"], ["text"], ["text_enc", "text_dec"]], ids=["GPT", "BERT", "T5"]
)
def test_the_samples_of_every_model_are_counted(names: list[str]) -> None:
    parts = {name: torch.arange(8 * n, 8 * n + 8).view(2, 4) for n, name in enumerate(names)}
    assert samples_of({"loss_mask": torch.ones(2, 4), **parts}).shape == (2, 4 * len(names))


def test_a_batch_of_unknown_names_is_refused_by_them() -> None:
    with pytest.raises(UsageError, match="have images, labels; known are tokens"):
        samples_of({"images": torch.ones(1), "labels": torch.ones(1)})


def test_steps_that_the_log_holds_are_not_written_twice() -> None:
    written: list[tuple[str, int | None]] = []
    writer = SimpleNamespace(add_scalar=lambda tag, value, step=None: written.append((tag, step)))
    step_logs.skip_written_steps(writer, {"lm loss": 7, "lm loss vs samples": 56})
    for step in (7, 8):
        writer.add_scalar("lm loss", 1.0, step)
        writer.add_scalar("lm loss vs samples", 1.0, 8 * step)
        writer.add_scalar("new", 1.0, step)
    writer.add_scalar("without a step", 1.0)
    assert written == [
        ("new", 7), ("lm loss", 8), ("lm loss vs samples", 64), ("new", 8),
        ("without a step", None),
    ]  # fmt: skip


def test_a_run_is_continued_under_its_identity_and_wandb_is_left_as_it_was() -> None:
    calls: list[dict[str, Any]] = []
    wandb = SimpleNamespace(init=lambda **kwargs: calls.append(kwargs))
    original = wandb.init
    with step_logs.resumed_run(wandb, "abcd1234"):
        wandb.init(project="p")
    assert calls == [{"id": "abcd1234", "resume": "allow", "project": "p"}]
    assert wandb.init is original


def test_the_newest_log_tells_the_newest_steps_also_where_its_end_is_torn(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(1, 6):
            writer.add_scalar("lm loss", 1.0, step)
            writer.add_scalar("lm loss vs samples", 1.0, 8 * step)
    (log,) = tmp_path.iterdir()
    with log.open("ab") as file:
        file.write(struct.pack("<Q", 1000) + b"killed here")
    newest = {"lm loss": 5, "lm loss vs samples": 40}
    assert step_logs.written_steps(tmp_path) == newest
    assert step_logs.written_steps(tmp_path, records=2) == newest
