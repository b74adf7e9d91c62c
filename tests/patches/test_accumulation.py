"""A script that counts the micro-batches of a step itself has to count those of the round."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from scalai.core.errors import RefusedError
from scalai.patches.data.loaders import Feed, FirstBatches
from scalai.patches.deepspeed.micro_batches import Accumulation, AsThen, tell


@contextmanager
def no_sync() -> Iterator[None]:
    yield


def engine_of(each: int) -> Any:
    return SimpleNamespace(
        set_gradient_accumulation_boundary=lambda is_boundary: None,
        no_sync=no_sync,
        backward=lambda loss, retain_graph=False, scale_wrt_gas=True: loss,
        gradient_accumulation_steps=lambda: each,
    )


def by_boundary(engine: Any, micro_batches: int) -> None:
    """As DeepSpeed's documentation has it."""
    engine.set_gradient_accumulation_boundary(False)
    for _ in range(micro_batches - 1):
        engine.backward(1.0)
    engine.set_gradient_accumulation_boundary(is_boundary=True)
    engine.backward(1.0)


def by_no_sync(engine: Any, micro_batches: int) -> None:
    with engine.no_sync():
        for _ in range(micro_batches - 1):
            engine.backward(1.0)
    engine.backward(1.0)


def by_deepspeed(engine: Any, micro_batches: int) -> None:
    """Two losses of one micro-batch count twice: DeepSpeed counts steps, and is right."""
    for _ in range(micro_batches):
        engine.backward(1.0)


@pytest.mark.parametrize("accumulate", [by_boundary, by_no_sync])
@pytest.mark.parametrize("each", [1, 2, 8])
def test_a_number_of_the_scripts_own_is_refused_in_a_round_that_has_another(
    accumulate: Any, each: int
) -> None:
    """More micro-batches than the round has would make the batch larger in silence."""
    engine, accumulation = engine_of(each), Accumulation()
    accumulation.install(engine)
    for _ in range(2):
        accumulate(engine, each)
        accumulation.end_step(each)
    accumulate(engine, 4)
    with pytest.raises(RefusedError, match=f"accumulated 4 micro-batches .* round has {each}"):
        accumulation.end_step(each)


@pytest.mark.parametrize("call", ["1.0, scale_wrt_gas=False", "1.0, False, False"])
def test_losses_that_nobody_divides_by_their_number_are_refused_but_of_trainer(call: str) -> None:
    engine, accumulation = engine_of(2), Accumulation()
    accumulation.install(engine)
    code = f"def backward(engine): return engine.backward({call})"
    script: dict[str, Any] = {"__name__": "__main__"}
    accelerate: dict[str, Any] = {"__name__": "accelerate.utils.deepspeed"}
    for namespace in (script, accelerate):
        exec(code, namespace)
    for called in (script, accelerate):  # Accelerate hands on what its script has said
        with pytest.raises(RefusedError, match="scale_wrt_gas=False"):
            called["backward"](engine)
    trainer: dict[str, Any] = {"__name__": "transformers.trainer", "inner": accelerate["backward"]}
    exec("def train(engine): return inner(engine)", trainer)
    assert trainer["train"](engine) == 1.0
    trainer["inner"] = script["backward"]  # a training_step of a script's own trainer
    assert trainer["train"](engine) == 1.0
    assert engine.backward(1.0, scale_wrt_gas=True) == 1.0


def test_what_deepspeed_or_a_trainer_counts_is_left_to_it() -> None:
    engine, accumulation = engine_of(2), Accumulation()
    accumulation.install(engine)
    by_deepspeed(engine, 4)
    accumulation.end_step(2)
    trainer = {"__name__": "accelerate.utils.deepspeed", "engine": engine}
    exec("engine.set_gradient_accumulation_boundary(is_boundary=True)", trainer)
    by_deepspeed(engine, 4)
    accumulation.end_step(2)


def test_a_number_that_is_stored_follows_what_the_round_has_drawn() -> None:
    has_drawn = False
    stored = AsThen(6, 3, lambda: has_drawn)
    assert (24 // stored, 24 / stored, 5 * stored, stored + 1, str(stored)) == (8, 8.0, 15, 4, "3")
    assert stored == 3 and stored < 4 and hash(stored) == hash(3) and 7 % stored == 1
    has_drawn = True
    assert (24 // stored, 5 * stored, stored + 1, f"{stored}") == (4, 30, 7, "6")
    assert stored == 6 and 7 % stored == 1 and list(range(stored)) == [0, 1, 2, 3, 4, 5]
    assert type(pickle.loads(pickle.dumps(stored))) is int


@pytest.mark.fault
def test_a_script_is_told_the_accumulation_that_belongs_to_the_length_of_its_loaders() -> None:
    engine, feed = engine_of(6), Feed()
    feed.first = FirstBatches(24, 2, 4)
    tell(engine, feed)
    asks = "def ask(engine): return engine.gradient_accumulation_steps() + 0"
    script: dict[str, Any] = {"__name__": "__main__"}
    framework: dict[str, Any] = {"__name__": "deepspeed.runtime.engine"}
    for code in (script, framework):
        exec(asks, code)
    assert (script["ask"](engine), framework["ask"](engine)) == (3, 6)
    feed.is_counting = False  # the script places its data itself, by the ranks of now
    assert script["ask"](engine) == 6
    feed.is_counting = feed.has_drawn = True
    assert script["ask"](engine) == 6
