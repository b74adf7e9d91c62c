"""Places in ``megatron.training`` that need CUDA or a compiler. Patched when they are imported."""

import importlib.metadata
import importlib.util
import queue
import sys
from collections.abc import Iterator
from functools import wraps
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import torch

from scalai.patches.megatron.cpu_emulation.replacement import (
    nothing,
    replace,
    returning,
    when_imported,
)

HELPERS = "megatron.core.datasets.helpers_cpp"
DEVICES = 8
"""What ``torch.cuda.device_count()`` answers: initialize.py skips model parallelism at 0."""


def install() -> None:
    """Register the patches."""
    replace(torch.cuda, device_count=returning(DEVICES))
    when_imported("megatron.training.initialize", _initialize_without_cuda)
    when_imported("megatron.legacy.fused_kernels", _no_fused_kernels)
    when_imported("megatron.core.datasets", _helpers_of_the_wheel)
    when_imported("megatron.core.datasets.utils", _no_compilation_of_helpers)
    when_imported("megatron.core.dist_checkpointing.strategies.filesystem_async", _queue_in_process)
    when_imported("megatron.core.dist_checkpointing.strategies.torch", _saves_of_copies)
    _never_run_the_script_again()


def _initialize_without_cuda(initialize: Any) -> None:
    original = initialize.initialize_megatron

    @wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "allow_no_cuda": True})

    # set_jit_fusion_options() warms fused kernels up on the GPU.
    replace(initialize, initialize_megatron=initialize_megatron, set_jit_fusion_options=nothing())


def _no_fused_kernels(fused_kernels: Any) -> None:
    replace(fused_kernels, load=nothing())  # runs nvcc; in 0.14 to 0.16


def _wheel_helpers() -> Iterator[Path]:
    """Yield the compiled dataset helpers of the installed megatron-core, if there are any."""
    for file in importlib.metadata.files("megatron-core") or ():
        if file.name.startswith("helpers_cpp") and file.suffix == ".so":
            yield Path(str(file.locate()))


def _helpers_of_the_wheel(datasets: Any) -> None:
    """Where a checkout has no compiled dataset helpers take the wheel's, with the same API."""
    if importlib.util.find_spec(HELPERS) is not None:
        return
    for path in _wheel_helpers():
        spec = importlib.util.spec_from_file_location(HELPERS, path)
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[HELPERS] = module
            return


def _no_compilation_of_helpers(datasets_utils: Any) -> None:
    original = datasets_utils.compile_helpers

    @wraps(original)
    def compile_helpers() -> None:
        if HELPERS not in sys.modules and importlib.util.find_spec(HELPERS) is None:
            original()

    replace(datasets_utils, compile_helpers=compile_helpers)


def _queue_in_process(filesystem_async: Any) -> None:
    """A synchronous save needs no process for its queue."""
    name = "get_write_results_queue"  # from 0.17 on
    name = name if hasattr(filesystem_async, name) else f"_{name}"
    between_processes, within = getattr(filesystem_async, name), queue.Queue[Any]()

    @wraps(between_processes)
    def get_queue(*args: Any, **kwargs: Any) -> Any:
        return between_processes(*args, **kwargs) if _saves_asynchronously() else within

    replace(filesystem_async, **{name: get_queue})


def _saves_of_copies(strategies_torch: Any) -> None:
    """Megatron takes what lies in host memory for a copy of what lies on the device already; here
    it is the model itself, which the next steps change while it is written."""
    planner = strategies_torch.MCoreSavePlanner
    resolve_data = planner.resolve_data

    @wraps(resolve_data)
    def resolve_copy(self: Any, item: Any) -> Any:
        data = resolve_data(self, item)
        is_shared = torch.is_tensor(data) and _saves_asynchronously()
        return data.detach().clone() if is_shared else data

    replace(planner, resolve_data=resolve_copy)


def _saves_asynchronously() -> bool:
    global_vars = sys.modules.get("megatron.training.global_vars")
    return bool(getattr(getattr(global_vars, "_GLOBAL_ARGS", None), "async_save", False))


def _never_run_the_script_again() -> None:
    """Python's spawned processes import the script, which imports megatron before it is patched,
    and takes 4 s and 200 MB a process. What a save's processes run is not the script's."""
    get_data = spawn.get_preparation_data

    @wraps(get_data)
    def get_preparation_data(name: str) -> dict[str, Any]:
        data = get_data(name)
        return {key: value for key, value in data.items() if not key.startswith("init_main")}

    replace(spawn, get_preparation_data=get_preparation_data)
