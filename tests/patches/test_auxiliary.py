"""What a script adds on the way, to the optimizer, to its checkpoints, of models that do not train,
is taken, refused or told of."""

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalai.core.errors import RefusedError
from scalai.patches.data.clock import Clocks
from scalai.patches.deepspeed import replay as replays
from scalai.patches.deepspeed.beside_engine import Auxiliary
from scalai.patches.deepspeed.engine_hooks import EngineHooks
from scalai.patches.deepspeed.replay import Replay
from scalai.patches.hugging_face.loop_hooks import LoopHooks


def namespace(**values: Any) -> Any:
    return SimpleNamespace(**values)


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize("is_wrapped", [True, False], ids=["ZeRO", "stage 0"])
def test_parameters_that_join_on_the_way_are_refused(is_wrapped: bool) -> None:
    """Their moments would be in no snapshot, and begin anew at each change."""
    clocks = Clocks()
    auxiliary = Auxiliary(clocks, Replay(clocks))
    base: Any = torch.optim.AdamW([weight()])
    base.add_param_group({"params": [weight()]})
    optimizer = namespace(optimizer=base) if is_wrapped else base
    auxiliary.start(namespace(optimizer=optimizer), namespace())
    with pytest.raises(RefusedError, match=r"add_param_group .* before deepspeed\.initialize"):
        base.add_param_group({"params": [weight()]})
    assert len(base.param_groups) == 2


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_named", [True, False], ids=["file", "dictionary"])
def test_an_engine_that_does_not_train_is_built_on_any_number_of_ranks(
    tmp_path: Path, is_first: bool, is_named: bool
) -> None:
    """DeepSpeed refuses batches that do not come out, which are of no use to a teacher."""
    batches = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}
    stated: dict[str, Any] = {**batches, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(stated))
    facts = {} if is_first else {"first_dp": 2}
    hooks = EngineHooks(lambda: namespace(facts=facts))
    seen: dict[str, Any] = {}

    def initialize(args: Any = None, model: Any = None, optimizer: Any = None,
                   config: Any = None, config_params: Any = None) -> str:  # fmt: skip
        seen.update(config=config, named=getattr(args, "deepspeed_config", None))
        return "built"

    named = namespace(deepspeed_config=str(tmp_path / "ds.json"))
    given = {"args": named} if is_named else {"config_params": stated}
    assert hooks.initialize(initialize, None, (), {"model": object(), **given}) == "built"
    if is_first:  # as the script says
        assert seen == {"config": None, "named": named.deepspeed_config if is_named else None}
    else:
        built = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
        assert seen == {"config": built, "named": None}
    assert named.deepspeed_config == str(tmp_path / "ds.json")


def test_a_model_that_accelerate_prepares_behind_the_one_that_trains_is_left_alone() -> None:
    """A teacher of a second plugin: an engine that trains is refused by the engine's own hooks."""
    schedules = namespace(stepped_elsewhere=[])
    engines = namespace(auxiliary=namespace(schedules=schedules), engine=object())
    hooks = LoopHooks(lambda: namespace(), engines)
    teacher = torch.nn.Linear(1, 1)
    assert hooks.prepare(lambda *given: given, namespace(), (teacher,), {}) == (teacher,)


class Ema:
    """What a script registers."""


class AcceleratedScheduler:
    """What Accelerate has prepared, by its name."""


@pytest.mark.parametrize(
    ("registered", "has_engine", "objects", "is_told"),
    [
        (("accelerate", "data"), True, [AcceleratedScheduler(), Ema()], True),
        (("accelerate", "ema"), True, [Ema()], False),
        ((), True, [AcceleratedScheduler()], False),
        ((), False, [Ema()], False),
    ],
    ids=["not carried", "the script's", "prepared", "no engine"],
)
def test_what_only_checkpoints_keep_is_told_of(
    registered: tuple[str, ...], has_engine: bool, objects: list[Any], is_told: bool
) -> None:
    logged: list[tuple[str, str]] = []
    schedules = namespace(stepped_elsewhere=[])
    auxiliary = namespace(schedules=schedules, say=lambda *words: logged.append(words))
    session = namespace(registered=registered)
    hooks = LoopHooks(lambda: session, namespace(auxiliary=auxiliary))
    plugin = object() if has_engine else None
    accelerator = namespace(state=namespace(deepspeed_plugin=plugin))
    kept: list[Any] = []
    hooks.notice_objects(lambda *given: kept.extend(given), accelerator, tuple(objects), {})
    assert kept == objects
    assert [event for event, _ in logged] == ["not_carried"] * is_told
    assert all("(Ema)" in detail and "register_state" in detail for _, detail in logged)


@pytest.mark.fault
@pytest.mark.parametrize("is_restarted", [True, False], ids=["other arguments", "as before"])
def test_what_trains_otherwise_than_before_is_refused_unless_a_person_has_changed_arguments(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_restarted: bool
) -> None:
    clocks = Clocks()
    first, then = (Auxiliary(clocks, Replay(clocks)) for _ in range(2))
    monkeypatch.setattr(sys, "argv", ["train.py", "--local_rank=1", "--epochs", "3"])
    saved = json.loads(json.dumps(first.record.take()))
    epochs = "4" if is_restarted else "3"
    monkeypatch.setattr(sys, "argv", ["train.py", "--local_rank=0", "--epochs", epochs])
    then.record.put(saved)
    with caplog.at_level(logging.WARNING):
        if is_restarted:
            then.differs("it is another curve", "Make the same")
            assert "event=differs" in caplog.text and "3, 4" in caplog.text
        else:
            with pytest.raises(
                RefusedError, match=r"test_auxiliary.py:\d+: it is another curve. M"
            ):
                then.differs("it is another curve", "Make the same")


def test_of_a_pipelines_losses_the_newest_go_to_the_next_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All steps are gone through again, whatever is kept of them."""
    nobody = namespace(any_of=lambda values: values)
    monkeypatch.setattr(replays, "ranks_of", lambda engine: nobody)
    steps, said = 2 * replays.KEPT, list[str]()

    def engine(done: int) -> Any:
        return namespace(
            global_steps=done, device="cpu", train_batch=lambda: torch.tensor(float(made.pop()))
        )

    made = list(range(steps))[::-1]
    first, first_engine = Replay(Clocks()), engine(0)
    first.on_forgotten = said.append
    first.install(first_engine)
    losses = [float(first_engine.train_batch()) for _ in range(steps)]
    saved = json.loads(json.dumps(first.take()))
    assert len(json.dumps(saved)) < 64 << 10 and said
    then, then_engine = Replay(Clocks()), engine(steps)
    then.put(saved)
    then.install(then_engine)
    again = [float(then_engine.train_batch()) for _ in range(steps)]
    kept = replays.KEPT
    assert again[-kept:] == losses[-kept:] and set(again[:-kept]) == {losses[-kept]}
    made.append(-1)
    assert float(then_engine.train_batch()) == -1


@pytest.mark.fault
@pytest.mark.parametrize("is_pipeline", [True, False])
def test_a_step_of_a_pipeline_begins_behind_its_evaluation_too(is_pipeline: bool) -> None:
    """``eval_batch`` leaves the model in ``eval()``; a stop would never be come to."""
    session = namespace(
        begin_step=lambda: None, is_to_prove=False, is_proving=False, is_compared=False
    )
    hooks, ended = EngineHooks(lambda: session), list[int]()
    hooks.engine = namespace(module=namespace(training=False), global_steps=3)
    hooks.auxiliary.record.uses_modes = hooks.is_due = True
    hooks.auxiliary.schedules.begin = lambda **given: None  # type: ignore[method-assign]
    hooks.end_step = lambda: ended.append(3)  # type: ignore[method-assign]
    name = "train_batch" if is_pipeline else "forward"
    assert hooks._after_a_step(name, lambda: "loss")() == "loss"
    assert ended == [3] * is_pipeline
