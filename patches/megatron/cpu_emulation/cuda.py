"""``torch.cuda`` and device arguments, answered by the CPU."""

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.nvtx
import torch.cuda.random

from scalai.patches.megatron.cpu_emulation.stubs import nothing, replace, returning

CPU = torch.device("cpu")
FACTORIES = (
    "tensor zeros ones empty full rand randn randint arange linspace eye as_tensor empty_strided "
    "empty_like zeros_like ones_like full_like rand_like randn_like"
).split()


def install() -> None:
    """Replace what asks for a CUDA device. ``torch.cuda.is_available()`` stays False."""
    _replace_devices()
    _replace_tensor_methods()
    _replace_streams()
    _replace_generators()
    _replace_properties()
    # jit_fuser is torch.compile: it would want a C++ compiler and ten seconds a rank.
    replace(torch, compile=_compile_nothing)


def _is_cuda(device: Any) -> bool:
    return (
        device.startswith("cuda")
        if isinstance(device, str)
        else getattr(device, "type", None) == "cuda"
    )


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(factory)
    def build(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return build


def _replace_devices() -> None:
    # megatron uses the current device only as `device=` of a factory and as an index of
    # default_generators.
    replace(torch.cuda, current_device=returning(CPU), set_device=nothing(), synchronize=nothing())
    # A torch that was built for CUDA counts devices for it, which are replaced as well.
    replace(torch.cuda, is_available=returning(False))
    for name in FACTORIES:
        replace(torch, **{name: _on_cpu(getattr(torch, name))})


def _replace_tensor_methods() -> None:
    original_to, original_type = torch.Tensor.to, torch.Tensor.type

    def same(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    @wraps(original_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(
            CPU if isinstance(arg, str | torch.device) and _is_cuda(arg) else arg for arg in args
        )
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original_to(self, *args, **kwargs)

    @wraps(original_type)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The optimizers test `param.type() == 'torch.cuda.FloatTensor'` (optimizer.py,
        # distrib_optimizer.py).
        found = original_type(self, *args, **kwargs)
        if args or kwargs or not isinstance(found, str) or found.startswith("torch.cuda."):
            return found
        return found.replace("torch.", "torch.cuda.", 1)

    replace(torch.Tensor, torch.nn.Module, cuda=same)
    replace(torch.Tensor, to=to, type=type_, pin_memory=same, record_stream=nothing())


class Event:
    """A CUDA event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class Stream:
    """A CUDA stream on which everything is done at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: Any) -> None: ...


def _no_context(*args: Any, **kwargs: Any) -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()


def _replace_streams() -> None:
    stream = Stream()
    replace(
        torch.cuda,
        Stream=Stream,
        Event=Event,
        current_stream=returning(stream),
        default_stream=returning(stream),
        set_stream=nothing(),
        stream=_no_context,
        is_current_stream_capturing=returning(False),
    )
    replace(torch.cuda.nvtx, range_push=nothing(), range_pop=nothing(), mark=nothing())


class _OneGenerator(tuple[torch.Generator, ...]):
    """``torch.cuda.default_generators``: whichever device asks, the CPU's generator."""

    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator


def _replace_generators() -> None:
    # One generator serves as CPU and CUDA generator, so that megatron's tracker keeps its meaning.
    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(int(value))

    def call_now(callback: Callable[[], None], **kwargs: Any) -> None:
        callback()

    replace(
        torch.cuda,
        torch.cuda.random,
        get_rng_state=get_state,
        set_rng_state=set_state,
        manual_seed=seed,
        manual_seed_all=seed,
    )
    replace(
        torch.cuda, default_generators=_OneGenerator(), _lazy_call=call_now, _lazy_init=nothing()
    )
    # The tracker warns at each fork that the CPU's generator moved; here it is the one that has to.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _replace_properties() -> None:
    replace(
        torch.cuda,
        memory_allocated=returning(0),
        max_memory_allocated=returning(0),
        memory_reserved=returning(0),
        max_memory_reserved=returning(0),
        device_memory_used=returning(0),
        memory_stats=lambda *args, **kwargs: defaultdict(int),
        empty_cache=nothing(),
        reset_peak_memory_stats=nothing(),
        # Read for the validation of arguments and the choice of fused kernels.
        get_device_properties=returning(
            SimpleNamespace(
                major=8, minor=0, name="cpu", total_memory=24 << 30, multi_processor_count=1
            )
        ),
        get_device_capability=returning((8, 0)),
        get_device_name=returning("cpu"),
    )


def _compile_nothing(model: Any = None, *args: Any, **kwargs: Any) -> Any:
    return model if model is not None else (lambda function: function)
