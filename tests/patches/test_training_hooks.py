"""The hooks around a stand-in for Megatron-LM's training loop. Imports no megatron."""

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from scalai.converters.megatron.rules import ALLOW_UNTESTED
from scalai.core.dataset.drawn import Draw
from scalai.core.errors import RefusedError
from scalai.core.job.function_proof import Numbers
from scalai.patches.megatron import training_hooks
from scalai.patches.megatron.training_hooks import TrainingHooks, warnings_of


class FakeSession:
    """Restores the counters of step ``restorable_step``, and drains at ``stop``."""

    run = "r"

    def __init__(
        self,
        restorable_step: int | None = None,
        stop: int | None = None,
        *,
        is_standby: bool = False,
        proves: bool = False,
    ) -> None:
        self.proves, self.is_proving, self.is_to_prove = proves, False, False
        self.is_compared = False
        self.numbers: list[Numbers] = []
        self.restorable_step = restorable_step
        self.is_standby = is_standby
        self.stop = stop
        self.facts: dict[str, Any] = {}
        self.boundaries: list[tuple[int | None, int | None]] = []
        self.within: list[bool] = []
        self.draws: list[tuple[Draw, ...]] = []
        self.registered: tuple[Callable[[], Any], Callable[[Any], None]] | None = None
        self.attached: Mapping[str, Any] = {}

    def report_facts(self, **facts: Any) -> None:
        self.facts.update(facts)

    def register_state(self, name: str, get: Callable[[], Any], set: Callable[[Any], None]) -> None:
        self.registered = get, set

    def attach(self, state: Any, *, step: int = 0, samples: int = 0, restore: bool = True) -> bool:
        self.attached = {"step": step, "samples": samples, "restore": restore}
        self.state = state
        if restore and self.registered:
            get, put = self.registered
            saved = get()
            saved["progress"] |= {"iteration": self.restorable_step, "consumed_train_samples": 40}
            put(saved)
        return restore

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


class FakeWriter:
    def __init__(self) -> None:
        self.is_closed = False

    def add_scalar(self, tag: str, value: float, step: int | None = None) -> None:
        raise AssertionError("nothing is logged here")

    def close(self) -> None:
        self.is_closed = True


class FakeTraining:
    """Names of megatron/training/training.py that the hooks touch."""

    def __init__(self, **arguments: Any) -> None:
        counters = {"consumed_train_samples": 0, "consumed_valid_samples": 0}
        self.job = Namespace(
            **counters, skipped_train_samples=0, padded_vocab_size=128, load=None, rank=0,
            world_size=1, seed=1, finetune=False, pretrained_checkpoint=None, global_batch_size=4,
            train_iters=9, bf16=False, fp16=False,
            micro_batch_size=2, data_parallel_size=1,
        )  # fmt: skip
        vars(self.job).update(arguments)
        self.has_decided = False
        self.loaded_from: list[str | None] = []
        self.closed: list[str] = []
        self.writer = FakeWriter()
        self.ft_integration = SimpleNamespace(shutdown=lambda: self.closed.append("ft"))
        self.one_logger_utils = SimpleNamespace(finish=lambda: self.closed.append("one_logger"))

    def get_args(self) -> Namespace:
        return self.job

    def get_tensorboard_writer(self) -> FakeWriter:
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

    def build_train_valid_test_data_iterators(self, provider: Any) -> Any:
        return None, None, None

    def train_step(self, optimizer: Any = None) -> Any:
        norm = None if optimizer is None else optimizer.step()
        return {}, 0, False, False, 0, norm, None, 0

    def save_checkpoint_and_time(self, iteration: int) -> None:
        raise AssertionError("nothing is saved here")

    def evaluate_and_print_results(self, prefix: str) -> None:
        raise AssertionError("nothing is evaluated here")

    def checkpoint_and_decide_exit(
        self,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        iteration: int,
        num_floating_point_operations_so_far: float,
        checkpointing_context: Any,
        train_data_iterator: Any,
    ) -> bool:
        return self.has_decided

    def maybe_finalize_async_save(self, blocking: bool = False, terminate: bool = False) -> None:
        raise AssertionError("nothing is saved here")

    def save_checkpoint(self, iteration: int, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing is saved here")

    def step(self, iteration: int) -> bool:
        return self.checkpoint_and_decide_exit(None, None, None, iteration, 1e9, {}, None)


@pytest.fixture(autouse=True)
def fake_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = SimpleNamespace(get_pipeline_model_parallel_rank=lambda: 0)
    core = SimpleNamespace(__version__="0.16.1", parallel_state=stages)
    for name, module in (
        ("megatron", SimpleNamespace(core=core)),
        ("megatron.core", core),
        (
            "megatron.core.num_microbatches_calculator",
            SimpleNamespace(update_num_microbatches=lambda **kwargs: None),
        ),
        (
            "scalai.patches.megatron.megatron_state",
            SimpleNamespace(MegatronState=lambda *args, **kwargs: kwargs),
        ),
    ):
        monkeypatch.setitem(sys.modules, name, module)


def hooked(session: FakeSession, **arguments: Any) -> FakeTraining:
    framework = FakeTraining(tensorboard_dir="no such folder", **arguments)
    given: Any = session
    TrainingHooks(lambda: given).hook_training(framework)
    framework.setup_model_and_optimizer("provider", "type")
    return framework


def test_a_fresh_job_makes_its_start_generation_from_what_was_built() -> None:
    session = FakeSession()
    framework = hooked(session)
    assert session.attached == {"step": 0, "samples": 0, "restore": False}
    assert session.facts == {
        "padded_vocab_size": 128, "arguments": {"global_batch_size": 4}, "first_share": [2, 1],
    }  # fmt: skip
    assert framework.loaded_from == [None]


def test_a_first_start_from_a_checkpoint_begins_at_its_step() -> None:
    session = FakeSession()
    hooked(session, load="/checkpoints")
    assert session.attached == {"step": 7, "samples": 28, "restore": False}


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


def test_a_newer_checkpoint_wins_over_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_hooks, "_agreed_checkpoint_step", lambda job: 7)
    session = FakeSession(restorable_step=5)
    framework = hooked(session, load="/checkpoints")
    assert framework.loaded_from == ["/checkpoints"]
    assert session.attached == {"step": 7, "samples": 28, "restore": False}


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
    framework = hooked(session)
    framework.train_step()
    assert session.within == [True, False], "an evaluation or a save may follow"


def test_a_drained_worker_closes_its_writers_and_ends_with_0() -> None:
    framework = hooked(FakeSession(stop=2))
    framework.step(1)
    with pytest.raises(SystemExit) as end:
        framework.step(2)
    assert end.value.code == 0
    assert framework.writer.is_closed
    assert framework.closed == ["ft", "one_logger"]


class FakeOptimizer:
    """As ``MegatronOptimizer``: prepares gradients, and then changes parameters."""

    def __init__(self) -> None:
        self.updates = 0

    def step_with_ready_grads(self) -> bool:
        self.updates += 1
        return True

    def step(self) -> float:
        self.step_with_ready_grads()
        return 2.5


def stopped(**arguments: Any) -> tuple[FakeSession, FakeTraining]:
    """Return a worker that has come to its stop, behind which it is to make a step."""
    session = FakeSession(stop=2, proves=True)
    framework = hooked(session, **arguments)
    assert framework.step(2) is False, "the script goes on to its next step"
    return session, framework


def test_behind_its_stop_a_worker_makes_a_step_without_its_update_and_leaves() -> None:
    session, framework = stopped()
    optimizer = FakeOptimizer()
    with pytest.raises(SystemExit) as end:
        framework.train_step(optimizer)
    assert end.value.code == 0 and optimizer.updates == 0
    assert [(each.norm, each.framework) for each in session.numbers] == [
        (2.5, "megatron-core 0.16.1")
    ]
    assert not session.within, "it is no step of the job"


@pytest.mark.parametrize(
    "what",
    [
        lambda framework: framework.save_checkpoint_and_time(2),
        lambda framework: framework.evaluate_and_print_results("at the end"),
    ],
)
def test_a_script_that_saves_or_evaluates_before_that_step_leaves_without_it(what: Any) -> None:
    session, framework = stopped()
    with pytest.raises(SystemExit) as end:
        what(framework)
    assert end.value.code == 0 and not session.numbers


@pytest.mark.fault
def test_a_step_behind_the_stop_that_raises_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    session, framework = stopped()
    with pytest.raises(SystemExit) as end:
        framework.train_step("no optimizer")
    assert end.value.code == 0 and not session.numbers and "function_unproven" in caplog.text


def test_behind_the_last_step_there_is_none_to_prove() -> None:
    framework = hooked(FakeSession(stop=2, proves=True), train_iters=2)
    with pytest.raises(SystemExit):
        framework.step(2)


def test_what_hangs_on_random_streams_is_told_with_the_numbers() -> None:
    session, framework = stopped(hidden_dropout=0.1, cuda_graph_impl="local")
    with pytest.raises(SystemExit):
        framework.train_step(FakeOptimizer())
    assert "hidden_dropout 0.1" in session.numbers[0].obstacle
    assert "CUDA graphs" in session.numbers[0].obstacle


def test_a_train_step_of_another_kind_makes_no_further_pass_and_it_is_said_why() -> None:
    session, framework = stopped(hidden_dropout=0.1)
    with pytest.raises(SystemExit):
        framework.train_step(FakeOptimizer())
    assert "no data_iterator, model" in session.numbers[0].obstacle


def test_an_unknown_version_is_refused_when_the_model_is_built_not_when_it_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["megatron.core"], "__version__", "0.99.0")
    session = FakeSession()
    with pytest.raises(RefusedError, match=r"0\.99\.0"):
        hooked(session)
    monkeypatch.setenv(ALLOW_UNTESTED, "1")
    hooked(session)


def test_what_stays_is_the_law_of_the_command_line() -> None:
    session = FakeSession()
    hooked(session, optimizer="muon", muon_tp_mode="blockwise")
    assert set(session.state["fixed"]) == {"cp", "tp"}


def test_the_batch_of_an_evaluation_is_told_where_no_flag_states_it() -> None:
    session = FakeSession()
    batch = {"eval_global_batch_size": 4}
    hooked(session, _is_global_batch_size_explicitly_specified=True, **batch)
    assert "eval_batch_size" not in session.facts
    hooked(session, _is_global_batch_size_explicitly_specified=False, **batch)
    assert session.facts["eval_batch_size"] == 4


def test_what_cannot_be_elastic_is_refused_before_the_model_is_built() -> None:
    framework = FakeTraining(decrease_batch_size_if_needed=True)
    session: Any = FakeSession()
    TrainingHooks(lambda: session).hook_training(framework)
    with pytest.raises(RefusedError, match="order of samples"):
        framework.setup_model_and_optimizer("provider", "type")
    assert framework.loaded_from == []


def test_a_question_about_layouts_that_fails_stops_no_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stumbles(job: Any) -> None:
        raise AssertionError("never asked: the command line is this test's")

    training_hooks._UNCHECKED[:] = [(Namespace(), stumbles)]
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
    monkeypatch.setattr(training_hooks, "_UNCHECKED", [])
    job = Namespace(kept=kept)
    given: Any = ((), {"args": job, "defaults": 5}) if is_named else ((job, 5), {})
    assert training_hooks._validate_args(validate_args, None, *given).checked_with == 5
    for parsed, check in training_hooks._UNCHECKED:
        assert not hasattr(parsed, "checked_with") and vars(check(parsed))["checked_with"] == 5
    assert bool(training_hooks._UNCHECKED) is (kept == 3)


def test_surprises_are_said() -> None:
    logged = " ".join(warnings_of(Namespace(exit_signal_handler=True, dataloader_type="external")))
    assert "Signal the agent" in logged
    assert "consumed_train_samples" in logged
