"""Random number generators of one rank, as JSON."""

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from scalai.patches.megatron import grid
from scalai.runtime.live import Json

_STEP_STRIDE = 1_000_003
"""Prime, so that the offsets which megatron adds to a seed never meet another step's seed."""


def state() -> Json:
    """Return the state of all generators of this rank, and the degrees under which it is valid."""
    kind, keys, position, has_gauss, gauss = _numpy_state()
    return {
        "degrees": dict(grid.degrees()),
        "python": list(random.getstate()),
        "numpy": [kind, _text(keys.tobytes()), position, has_gauss, gauss],
        "torch": _tensor_text(torch.get_rng_state()),
        "cuda": _tensor_text(torch.cuda.get_rng_state()),
        "tracker": {
            name: _tensor_text(_tensor_state(value))
            for name, value in _tracker().get_states().items()
        },
    }


def restore(saved: Json | None, seed: int, step: int) -> str:
    """Continue the streams of this coordinate, or begin new ones where the degrees changed.

    Never a mix: some of megatron's streams are equal on all tensor-parallel ranks, so with other
    degrees all ranks begin new ones, which ``seed`` and ``step`` determine.

    Returns:
        One line for the log that says which.
    """
    here = dict(grid.degrees())
    if saved is not None and saved["degrees"] == here:
        _continue(saved)
        return "rng=continued"
    before = _text_of(saved["degrees"]) if saved is not None else "none"
    _begin(seed, step)
    return f"rng=reseeded seed={seed} step={step} degrees_before={before} degrees={_text_of(here)}"


def _continue(saved: Mapping[str, Any]) -> None:
    version, keys, gauss = saved["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, words, *rest = saved["numpy"]
    np.random.set_state((kind, np.frombuffer(_bytes(words), dtype=np.uint32), *rest))
    torch.set_rng_state(_text_tensor(saved["torch"]))
    torch.cuda.set_rng_state(_text_tensor(saved["cuda"]))
    tracker = _tracker()
    states = tracker.get_states()
    for name, text in saved["tracker"].items():
        current = states.get(name)
        if isinstance(current, torch.Generator):  # a tracker for CUDA graphs
            current.set_state(_text_tensor(text))
        else:
            states[name] = _text_tensor(text)
    tracker.set_states(states)


def _begin(seed: int, step: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    stage = parallel_state.get_pipeline_model_parallel_rank()
    # As in Megatron-LM's _set_random_seed: stages have streams of their own, replicas do not.
    seed = (seed + _STEP_STRIDE * (step + 1)) % 2**31 + 100 * stage
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def _numpy_state() -> tuple[str, np.ndarray[Any, np.dtype[np.uint32]], int, int, float]:
    state = np.random.get_state(legacy=True)
    assert isinstance(state, tuple)  # numpy's own typing allows a dict too
    return state


def _tracker() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def _tensor_state(value: torch.Tensor | torch.Generator) -> torch.Tensor:
    return value.get_state() if isinstance(value, torch.Generator) else value


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _tensor_text(state: torch.Tensor) -> str:
    return _text(state.cpu().numpy().tobytes())


def _text_tensor(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(_bytes(text), dtype=np.uint8).copy())


def _text_of(degrees: Mapping[str, int]) -> str:
    return ",".join(f"{axis}{size}" for axis, size in degrees.items() if size > 1) or "all1"
