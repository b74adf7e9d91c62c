"""What a script adds on the way, to the optimizer, to its checkpoints, of models that do not train,
is taken, refused or told of; what it does again is compared, and what it keeps itself is seen."""

import importlib
import inspect
import json
import logging
import operator
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalai.core.degrees.batches import Shares
from scalai.core.errors import RefusedError
from scalai.patches.data.clock import Clocks
from scalai.patches.deepspeed import replay as replays
from scalai.patches.deepspeed.beside_engine import Auxiliary
from scalai.patches.deepspeed.engine_hooks import EngineHooks
from scalai.patches.deepspeed.record import ScriptRecord, Stretches
from scalai.patches.deepspeed.replay import Replay
from scalai.patches.hugging_face.loop_hooks import LoopHooks
from scalai.patches.user_script import LOOKS, KeptVariable, OwnState, names_of, script_place


def namespace(**values: Any) -> Any:
    return SimpleNamespace(**values)


def through_json(saved: Any) -> Any:
    return json.loads(json.dumps(saved))


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(2))


def auxiliary() -> Auxiliary:
    clocks = Clocks()
    return Auxiliary(clocks, Replay(clocks))


@pytest.mark.parametrize("is_wrapped", [True, False], ids=["ZeRO", "stage 0"])
def test_parameters_that_join_on_the_way_are_refused(is_wrapped: bool) -> None:
    """Their moments would be in no snapshot, and begin anew at each change."""
    base: Any = torch.optim.AdamW([weight()])
    base.add_param_group({"params": [weight()]})
    optimizer = namespace(optimizer=base) if is_wrapped else base
    auxiliary().start(namespace(optimizer=optimizer), namespace())
    with pytest.raises(RefusedError, match=r"add_param_group .* before deepspeed\.initialize"):
        base.add_param_group({"params": [weight()]})
    assert len(base.param_groups) == 2


@pytest.mark.fault
def test_another_batch_on_the_way_is_refused() -> None:
    engine = namespace(
        optimizer=None, train_batch_size=lambda: 6, set_train_batch_size=lambda size: None
    )
    auxiliary().start(engine, namespace())
    engine.set_train_batch_size(6)
    with pytest.raises(RefusedError, match=r"set_train_batch_size\(12\) changes the batch from 6"):
        engine.set_train_batch_size(12)


def test_a_loop_that_counts_its_own_steps_hears_that_it_goes_beyond_its_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is over after so many steps of its own, in each round."""
    model = torch.nn.Linear(1, 1)
    engine = namespace(
        optimizer=torch.optim.SGD(model.parameters()), module=model, global_steps=10,
        lr_scheduler=namespace(total_num_steps=10),
    )  # fmt: skip
    beside = auxiliary()
    beside.start(engine, namespace(registered=()))
    beside.restored(6)
    beside.look()
    assert "event=beyond_plan" not in caplog.text
    engine.global_steps = 11
    beside.look()
    assert "made for 10 steps" in caplog.text and "engine.global_steps" in caplog.text


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_named", [True, False], ids=["file", "dictionary"])
def test_an_engine_that_does_not_train_is_built_on_any_number_of_ranks(
    tmp_path: Path, is_first: bool, is_named: bool
) -> None:
    """DeepSpeed refuses batches that do not come out, which are of no use to a teacher."""
    batches = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}
    stated: dict[str, Any] = {**batches, "optimizer": {"type": None}}
    (tmp_path / "ds.json").write_text(json.dumps(stated))
    seen: dict[str, Any] = {}
    session = namespace(
        facts={} if is_first else {"first_dp": 2}, hold_at_brink=lambda: seen.update(has_waited=1)
    )
    hooks = EngineHooks(lambda: session)

    def initialize(args: Any = None, model: Any = None, optimizer: Any = None,
                   config: Any = None, config_params: Any = None) -> str:  # fmt: skip
        assert seen.pop("has_waited"), "it takes memory of the device, too"
        seen.update(config=config, named=getattr(args, "deepspeed_config", None))
        return "built"

    named = namespace(deepspeed_config=str(tmp_path / "ds.json"))
    arguments = {"args": named} if is_named else {"config_params": stated}
    assert hooks.initialize(initialize, None, (), {"model": object(), **arguments}) == "built"
    if is_first:  # as the script says
        assert seen == {"config": None, "named": named.deepspeed_config if is_named else None}
    else:
        built = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": None}}
        assert seen == {"config": built, "named": None}
    assert named.deepspeed_config == str(tmp_path / "ds.json")


@pytest.mark.parametrize(
    ("stage", "enabled", "waits"),
    [(3, True, True), (None, True, True), (1, True, False), (None, False, False)],
)
def test_a_model_in_shards_is_built_behind_the_brink(
    stage: int | None, enabled: bool, waits: bool
) -> None:
    """A whole one is in host memory before it."""
    done = list[str]()
    session = namespace(
        settings={"zero_stage": stage}, offload=None, hold_at_brink=lambda: done.append("waits")
    )

    def init(module: Any = None, config_dict_or_path: Any = None, enabled: bool = True) -> None:
        done.append("builds")

    EngineHooks(lambda: session).partition(init, None, (), {"enabled": enabled})
    assert done == ["waits"] * waits + ["builds"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_pipeline_is_built_behind_the_brink_where_it_takes_memory_of_a_device(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    monkeypatch.setattr(type(accelerator), "device_name", lambda *_: device)
    done = list[str]()
    session = namespace(pp=1, facts={}, hold_at_brink=lambda: done.append("waits"))

    def build(layers: Any, num_stages: Any = None, topology: Any = None) -> None:
        done.append("builds")

    EngineHooks(lambda: session).make_pipeline(build, None, (), {"layers": [], "num_stages": 1})
    assert done == ["waits"] * (device == "cuda") + ["builds"]


class Ema:
    """What a script registers."""


class AcceleratedScheduler:
    """What Accelerate has prepared, by its name."""


def loop_hooks(logged: list[tuple[str, str]], session: Any = None, engine: Any = None) -> LoopHooks:
    schedules = namespace(stepped_elsewhere=[])
    beside = namespace(schedules=schedules, say=lambda *words: logged.append(words))
    return LoopHooks(lambda: session, namespace(auxiliary=beside, engine=engine))


def test_a_model_that_accelerate_prepares_behind_the_one_that_trains_is_left_alone() -> None:
    """A teacher of a second plugin: an engine that trains is refused by the engine's own hooks."""
    teacher, hooks = torch.nn.Linear(1, 1), loop_hooks([], engine=object())
    assert hooks.prepare(lambda *models: models, namespace(), (teacher,), {}) == (teacher,)


@pytest.mark.parametrize(
    ("is_training", "has_fillers", "left"),
    [(True, True, [0, 1, 2, 3]), (True, False, [*range(6)]), (False, True, [*range(6)])],
    ids=["a pass with fillers", "a whole pass", "an evaluation behind it"],
)
def test_values_of_a_filler_are_left_out_of_gathered_ones(
    is_training: bool, has_fillers: bool, left: list[int]
) -> None:
    """Of three replicas, the last of which has one micro-batch less."""
    pytest.importorskip("accelerate")
    module = torch.nn.Linear(1, 1).train(is_training)
    engine = namespace(module=module, forward=module.forward, backward=lambda loss: None)
    engines = EngineHooks(lambda: None)  # type: ignore[arg-type, return-value]
    engines.engine, accelerator = engine, namespace(gather=lambda data: data)
    engines.accumulation.share(engine, Shares(5, 3), 0)
    engines.accumulation.has_fillers = has_fillers
    hooks = LoopHooks(lambda: None, engines)  # type: ignore[arg-type, return-value]
    hooks._accelerator = accelerator

    def gather_for_metrics(input_data: Any) -> Any:
        return input_data

    given = ({"of all": torch.arange(6)},)
    assert hooks.gather(gather_for_metrics, accelerator, given, {})["of all"].tolist() == left


@pytest.mark.parametrize(("kind", "is_told"), [("NO", True), ("DEEPSPEED", False)])
def test_a_loop_without_an_engine_is_told_of(kind: str, is_told: bool) -> None:
    logged: list[tuple[str, str]] = []
    accelerator = namespace(distributed_type=f"DistributedType.{kind}")
    prepared = (torch.nn.Linear(1, 1),)
    loop_hooks(logged).notice_other_loops(lambda *models: models, accelerator, prepared, {})
    assert [event for event, _ in logged] == ["no_engine"] * is_told
    assert all("ACCELERATE_USE_DEEPSPEED" in text and "--cpu" in text for _, text in logged)


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
    logged, kept = list[tuple[str, str]](), list[Any]()
    accelerator = namespace(state=namespace(deepspeed_plugin=object() if has_engine else None))
    hooks = loop_hooks(logged, namespace(registered=registered))
    hooks.notice_objects(lambda *given: kept.extend(given), accelerator, tuple(objects), {})
    assert kept == objects
    assert [event for event, _ in logged] == ["not_carried"] * is_told
    assert all("(Ema)" in detail and "register_state" in detail for _, detail in logged)


@pytest.mark.fault
@pytest.mark.parametrize("is_restarted", [True, False], ids=["other arguments", "as before"])
def test_what_trains_otherwise_than_before_is_refused_unless_a_person_has_changed_arguments(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_restarted: bool
) -> None:
    first, then = auxiliary(), auxiliary()
    monkeypatch.setattr(sys, "argv", ["train.py", "--local_rank=1", "--epochs", "3"])
    saved = through_json(first.record.take())
    epochs = "4" if is_restarted else "3"
    monkeypatch.setattr(sys, "argv", ["train.py", "--local_rank=0", "--epochs", epochs])
    then.record.put(saved)
    if is_restarted:
        with caplog.at_level(logging.WARNING):
            then.differs("it is another curve", "Make the same")
        assert "event=differs" in caplog.text and "3, 4" in caplog.text
    else:
        with pytest.raises(RefusedError, match=rf"{HERE}:\d+: it is another curve. Make the same"):
            then.differs("it is another curve", "Make the same")


def test_another_batch_by_the_script_than_the_states_is_refused() -> None:
    hooks = EngineHooks(lambda: namespace(facts={"global_batch_size": 24}))
    hooks._compare_batch(24)
    with pytest.raises(RefusedError, match=r"train_batch_size 16, the job trains with 24\. State"):
        hooks._compare_batch(16)


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
    saved = through_json(first.take())
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
    assert hooks.after_a_step(name, lambda: "loss")() == "loss"
    assert ended == [3] * is_pipeline


# ------------------------------------------------------------------ the record of what it does


@given(st.lists(st.sampled_from("aab"), max_size=60), st.integers(0, 40))
def test_what_is_folded_is_kept_whole(letters: list[str], times: int) -> None:
    stretches = [[letter, f"{letter}'s event"] for letter in letters] * (1 + times % 4)
    kept = Stretches()
    for stretch in stretches:
        assert not kept.add(stretch)
    assert list(Stretches(through_json(kept.nodes))) == stretches


def test_a_million_regular_passes_need_no_more_than_a_few() -> None:
    kept = Stretches()
    for epoch in range(20_000):
        kept.add(["a pass", "an evaluation"] + ["a save"] * (epoch % 5 == 4))
    assert len(json.dumps(kept.nodes)) < 200 and sum(1 for _ in kept) == 20_000


def record(said: list[str]) -> ScriptRecord:
    return ScriptRecord(lambda *words: said.append("differs"), said.append, str)


def test_of_a_record_that_has_become_too_long_the_newest_part_is_kept_and_that_is_said() -> None:
    said: list[str] = []
    first, then = record(said), record(said)
    for number in range(4000):
        first.begin("a pass", is_over=False)
        first.stepped()
        first.note(f"a seed of {number**2}")
    saved = through_json(first.take())
    assert len(json.dumps(saved)) <= 64 << 10
    assert said and all("KiB" in detail for detail in said)
    kept = list(Stretches(saved["over"], saved["dropped"]))
    assert len(kept) == 4000 and kept[0] is None and kept[-1] == ["a pass", f"a seed of {3998**2}"]
    said.clear()
    then.put(saved)
    for number in range(3999):  # of the dropped ones nothing is known
        then.begin("a pass", is_over=True)
        then.note(f"a seed of {number**2 if number >= saved['dropped'] - 1 else 0}")
    assert not said


class Job:
    """Rounds of a script over five passes of two steps."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._saved: Any = None
        self._done = 0

    def play(
        self, stop_at: int, script: Callable[[ScriptRecord, int], None], first: str = "a seed of 5"
    ) -> None:
        """Run a round from the script's beginning to a step.

        Args:
            script: What it does behind a pass of this number.
            first: What it does before its engine is there.
        """
        record = ScriptRecord(
            lambda *words: self.said.append(": ".join(words[::-1])), print, lambda: "train.py:7"
        )
        record.note(first)
        if self._saved is not None:
            record.put(through_json(self._saved))
        record.note("a load of newest")
        record.note_told("a loader of 2 micro-batches")
        steps = 0
        for number in range(5):
            record.begin("a pass over loader-0", is_over=steps + 2 <= self._done)
            for _ in range(2):
                steps += 1
                if steps > self._done:
                    record.stepped()
                    record.note("an evaluation")
                    record.note(f"what follows from step {steps}")
                if steps == stop_at:
                    if steps % 2 == 0:  # a job stops where its next step begins
                        script(record, number)
                        record.begin("a pass over loader-0", is_over=False)
                    self._saved, self._done = record.take(), steps
                    return
            script(record, number)


def usual(record: ScriptRecord, number: int, last: str = "") -> None:
    for _ in range(3):
        record.note("an evaluation")
    if number % 2:
        record.note("a save of epoch_#")
    if last:
        record.note(last)


@pytest.mark.parametrize("stops", [(1, 3, 9), (2, 4, 8), (5, 6, 7)], ids=str)
def test_a_script_that_does_the_same_again_is_not_told_of(stops: tuple[int, ...]) -> None:
    """In any round, wherever it was left; nor one that leaves out what was done."""
    job = Job()
    for stop in stops:
        job.play(stop, usual)
    job.play(10, lambda record, number: None)
    assert not job.said


@pytest.mark.parametrize(
    ("script", "first", "said"),
    [
        (
            lambda record, number: record.note("a save of best"), "a seed of 5",
            "train.py:7: behind pass 1 the script has a save of best, and had ",
        ),
        (
            lambda record, number: usual(record, number, "an evaluation"), "a seed of 5",
            "train.py:7: behind pass 2 the script has an evaluation, and had a save of epoch_#",
        ),
        (usual, "a seed of 6", "at its beginning the script has a seed of 6, and had a seed of 5"),
        (
            lambda record, number: record.begin("a pass over loader-1", is_over=True),
            "a seed of 5", "begins a pass over loader-1, and began a pass over loader-0 then",
        ),
    ],
    ids=["a save more", "another order", "a seed", "other data"],
)  # fmt: skip
def test_a_script_that_does_something_else_is_told_the_line_then_and_now_once(
    script: Callable[[ScriptRecord, int], None], first: str, said: str
) -> None:
    job = Job()
    job.play(7, usual)
    job.play(8, script, first)
    (told,) = job.said
    assert said in told and ("is_replaying" in told) == ("beginning" not in said)


def test_arguments_that_a_person_has_changed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    for seed, stop_at in (("5", 7), ("6", 8)):
        monkeypatch.setattr(sys, "argv", ["train.py", "--seed", seed])
        job.play(stop_at, usual, f"a seed of {seed}")
    (told,) = job.said
    assert "Its arguments have changed: 5, 6." in told


def test_a_checkpoint_that_is_newer_begins_the_record_anew() -> None:
    said: list[str] = []
    first, then = record(said), record(said)
    first.begin("a pass", is_over=False)
    first.stepped()
    first.begin("a pass", is_over=False)
    then.put(first.take())
    then.note("a load of newest")
    then.restart()
    then.begin("another pass", is_over=False)
    then.stepped()
    taken = then.take()
    assert isinstance(taken, dict) and taken["over"] == [["its beginning", "a load of newest"]]
    assert taken["newest"] == ["another pass"] and not said
    then.note("an evaluation")
    then.begin("a third pass", is_over=False)
    assert taken["newest"] == ["another pass"] and len(taken["over"]) == 1, "it is of its time"


def test_a_loaders_workers_that_are_forked_are_compared_with_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They seed themselves, and what the first round's had noted was gone with them."""
    said: list[str] = []
    first, then = record(said), record(said)
    first.note("a seed of 7")
    first.stepped()
    then.put(through_json(first.take()))
    then.note("a seed of 7")
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    then.note("a seed of 8")
    assert not said
    monkeypatch.undo()
    then.note("a seed of 8")
    assert said == ["differs"]


# ------------------------------------------------------------------ what it keeps itself

HERE = Path(__file__).name


class Shadow:
    def __init__(self, model: torch.nn.Module) -> None:
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}


def caller() -> FrameType:
    """Return the frame of the function that calls this one."""
    here = inspect.currentframe()
    assert here is not None and here.f_back is not None
    return here.f_back


class Loop:
    """A trainer or a callback as people write them: counts in attributes."""

    def __init__(self) -> None:
        self.steps = 0
        self.rate = 3

    def train(self, own: OwnState, engine: Any) -> list[KeptVariable]:
        kept: list[KeptVariable] = []
        for _ in range(LOOKS):
            self.steps += 1
            kept = own.look(caller(), engine)
        return kept


def model() -> Any:
    return torch.nn.Linear(2, 2)


def mine(kept: Sequence[KeptVariable]) -> dict[str, KeptVariable]:
    """Return what was found in this file, by name."""
    return {one.name: one for one in kept if one.place.startswith(HERE)}


def text_at(place: str) -> str:
    return Path(__file__).read_text().splitlines()[int(place.rpartition(":")[2]) - 1]


def test_what_changes_with_every_step_is_found_and_nothing_else() -> None:
    ours = model()
    engine, own = namespace(module=ours), OwnState()
    shadow, meter, reference = Shadow(ours), Loop(), model()
    averaged = torch.optim.swa_utils.AveragedModel(ours)
    done, seen, epoch, is_last, total, lines = 100, 0, 4, False, 0.0, [0]
    kept: list[KeptVariable] = []
    for place, _ in enumerate(range(LOOKS)):
        rate = 1.0 / (place + 1)
        batch = {"rows": torch.rand(3)}
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.add_(1.0)
            next(iter(shadow.values.values())).add_(1.0)
        averaged.update_parameters(ours)
        meter.steps += 2
        total += rate
        seen += 12
        done += 1
        lines.append(place)
        kept = own.look(caller(), engine)
    assert own.is_done and (epoch, is_last, reference, batch) is not None
    found = mine(kept)
    assert set(found) == {"shadow", "meter", "averaged", "done", "seen", "total"}
    assert {name for name, one in found.items() if one.is_count} == {"done", "seen"}
    assert [found[name].is_fresh for name in ("done", "seen")] == [False, True]
    assert "shadow, meter" in text_at(found["meter"].place)


@pytest.mark.parametrize("is_keeper", [False, True], ids=["a trainer", "what a trainer calls"])
def test_attributes_of_a_scripts_own_object_are_looked_at(is_keeper: bool) -> None:
    loop, own, engine, kept = Loop(), OwnState(), namespace(module=model()), list[KeptVariable]()
    if not is_keeper:
        kept = loop.train(own, engine)
    for _ in range(LOOKS if is_keeper else 0):
        loop.steps += 1
        kept = own.look(caller(), engine, [loop, torch.nn.Linear(1, 1)])
    steps = mine(kept)["self.steps"]
    assert steps.is_fresh and "self.rate" not in mine(kept) and (len(kept) == 1 or not is_keeper)
    assert "self.steps = 0" in text_at(steps.place)


class Opaque:
    """What no look from outside can read, as proxies of servers are."""

    def __init__(self) -> None:
        self.total = torch.ones(2)

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            raise ConnectionError("the server has gone")
        return super().__getattribute__(name)


def test_what_cannot_be_read_is_passed_over_and_does_not_end_the_training() -> None:
    """Spectra, sparse graphs, weights that are not there yet, values of foreign classes."""
    engine, own, opaque, done = namespace(module=model()), OwnState(), Opaque(), 0
    total = torch.zeros((), dtype=torch.complex64)
    kept: list[KeptVariable] = []
    for _ in range(LOOKS):
        total += 1j
        done += 1
        spectra = {"rows": torch.full((2, 3), done * 1j)}
        graph = {"adjacency": torch.eye(3).to_sparse()}
        frozen = {"weight": torch.empty(2, device="meta")}
        kept = own.look(caller(), engine)
    assert own.is_done and (opaque, spectra, graph, frozen) is not None
    assert set(mine(kept)) == {"done"}


def test_the_line_of_the_script_is_told_and_not_that_of_a_library() -> None:
    here = caller().f_lineno + 1
    (place,) = map(operator.call, [script_place])  # through what is not the script
    assert place == f"{HERE}:{here}"


def test_a_file_that_cannot_be_read_binds_no_names(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def (")
    assert not names_of(str(tmp_path / "broken.py")).lines
    assert not names_of(str(tmp_path / "none.py")).lines


def test_a_count_of_enumerate_is_found_where_it_decides() -> None:
    ours = model()
    engine, own, kept = namespace(module=ours), OwnState(), list[KeptVariable]()
    for number, _ in enumerate(range(LOOKS)):
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.add_(1.0)
        if number == 100:
            break
        kept = own.look(caller(), engine)
    assert [(one.name, one.is_enumerated) for one in mine(kept).values()] == [("number", True)]
