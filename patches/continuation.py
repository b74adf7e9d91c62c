"""How a job continues: its state, its fixed degrees, its random numbers."""

import base64
import random
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch

from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json

Source = Literal["generation", "checkpoint", "nothing"]


def choose_source(generation_step: int | None, checkpoint_step: int | None) -> Source:
    """Choose the newer state. At the same step it is the generation, which is exact in any layout.

    Args:
        generation_step: Step of the restorable generation; None: there is none.
        checkpoint_step: Iteration of the checkpoint under ``--load``; None: there is none.
    """
    if generation_step is None:
        return "nothing" if checkpoint_step is None else "checkpoint"
    if checkpoint_step is not None and checkpoint_step > generation_step:
        return "checkpoint"
    return "generation"


def describe_source(
    source: Source, generation_step: int | None, checkpoint_step: int | None, load: str | None
) -> str:
    """Return one line for the log, with both states."""
    generation = "none" if generation_step is None else f"step {generation_step}"
    checkpoint = "none" if checkpoint_step is None else f"iteration {checkpoint_step}"
    return (
        f"event=continue source={source} generation={generation!r} checkpoint={checkpoint!r} "
        f"load={load}"
    )


def refuse_changed_axes(before: Mapping[str, int], here: Mapping[str, int]) -> None:
    """Check degrees against those of the state.

    Raises:
        RefusedError: One of them changed.
    """
    for axis, size in before.items():
        if here[axis] != size:
            raise RefusedError(
                f"{axis}={size} when the state was taken and {axis}={here[axis]} now; this degree "
                f"cannot change. Start with {axis}={size}."
            )


_STEP_STRIDE = 1_000_003
"""Prime: an offset added to a seed by a framework never meets another step's seed."""


def host_rng_state() -> Callable[[], dict[str, Json]]:
    """Return a function that writes down the present state of Python's, numpy's and torch's
    generators of this process."""
    python, (kind, keys, *rest), own = random.getstate(), _numpy_state(), torch.get_rng_state()
    return lambda: {
        "python": list(python),
        "numpy": [kind, _text(keys.tobytes()), *rest],
        "torch": text_of_rng_state(own),
    }


def continue_host_rng(saved: Mapping[str, Any]) -> None:
    """Continue with the result of ``host_rng_state``."""
    version, keys, gauss = saved["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, words, *rest = saved["numpy"]
    np.random.set_state((kind, np.frombuffer(_bytes(words), dtype=np.uint32), *rest))
    torch.set_rng_state(rng_state_of_text(saved["torch"]))


def begin_host_rng(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_of_step(seed: int, step: int, stage: int) -> int:
    """Return the seed of a step's new RNG states. Pipeline stages have their own, as in
    Megatron-LM's _set_random_seed; replicas do not."""
    return (seed + _STEP_STRIDE * (step + 1)) % 2**31 + 100 * stage


def restore_rng_state(
    saved: Json | None,
    here: Mapping[str, int],
    seed: int,
    step: int,
    *,
    go_on: Callable[[Mapping[str, Any]], None],
    begin: Callable[[], None],
) -> str:
    """Continue all RNG states of this rank if the layout is the saved one, else begin new ones.
    Never a mix: some are equal on several ranks.

    Args:
        saved: States of all generators, with their layout under ``degrees``; None: there are none.
        here: This round's layout.
        seed: Determines new RNG states, with ``step``.
        go_on: Continues with the saved states.
        begin: Begins new ones.

    Returns:
        One line for the log.
    """
    if saved is not None and saved["degrees"] == here:
        go_on(saved)
        return "rng=continued"
    begin()
    before = text_of_degrees(saved["degrees"]) if saved is not None else "none"
    after = text_of_degrees(here)
    return f"rng=reseeded seed={seed} step={step} degrees_before={before} degrees={after}"


def text_of_rng_state(state: torch.Tensor) -> str:
    """Return the state of one of torch's generators as text."""
    return _text(state.cpu().numpy().tobytes())


def rng_state_of_text(text: str) -> torch.Tensor:
    """Return the state from the text of ``text_of_rng_state``, [bytes] uint8."""
    return torch.from_numpy(np.frombuffer(_bytes(text), dtype=np.uint8).copy())


def text_of_degrees(degrees: Mapping[str, int]) -> str:
    """Return degrees for one line of the log: those above 1."""
    return ",".join(f"{axis}{size}" for axis, size in degrees.items() if size > 1) or "all1"


def _numpy_state() -> tuple[str, np.ndarray[Any, np.dtype[np.uint32]], int, int, float]:
    state = np.random.get_state(legacy=True)
    assert isinstance(state, tuple)  # numpy's own typing allows a dict too
    return state


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
