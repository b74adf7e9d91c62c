"""A script that counts the micro-batches of a step itself has to count those of the round."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from scalai.core.errors import RefusedError
from scalai.patches.deepspeed.accumulation import Accumulation


@contextmanager
def no_sync() -> Iterator[None]:
    yield


def engine_of(each: int) -> Any:
    return SimpleNamespace(
        set_gradient_accumulation_boundary=lambda is_boundary: None,
        no_sync=no_sync,
        backward=lambda loss: loss,
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


def test_what_deepspeed_or_a_trainer_counts_is_left_to_it() -> None:
    engine, accumulation = engine_of(2), Accumulation()
    accumulation.install(engine)
    by_deepspeed(engine, 4)
    accumulation.end_step(2)
    trainer = {"__name__": "accelerate.utils.deepspeed", "engine": engine}
    exec("engine.set_gradient_accumulation_boundary(is_boundary=True)", trainer)
    by_deepspeed(engine, 4)
    accumulation.end_step(2)
