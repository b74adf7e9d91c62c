"""Places in ``megatron.core`` and ``megatron.training`` with a need of CUDA, Apex, Transformer
Engine or a compiler: patched on import."""

import copy
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

from scalai.patches.megatron.cpu_emulation.stubs import nothing, replace, returning, when_imported


def install() -> None:
    when_imported("megatron.core.utils", _no_transformer_engine)
    when_imported("megatron.core.transformer.torch_norm", _norm_with_sequence_parallel)
    when_imported("megatron.core.transformer.moe.moe_utils", _router_without_transformer_engine)
    when_imported("megatron.core.optimizer.distrib_optimizer", _checkpoints_of_torch_adam)
    when_imported("megatron.core.optimizer.cpu_offloading.hybrid_optimizer", _offload_of_a_cpu)


def _no_transformer_engine(utils: Any) -> None:
    """Let questions for a version of Transformer Engine be answered where there is none."""
    original = utils.is_te_min_version

    @wraps(original)
    def is_te_min_version(*args: Any, **kwargs: Any) -> bool:
        return utils.get_te_version() is not None and bool(original(*args, **kwargs))

    replace(utils, is_te_min_version=is_te_min_version)


def _norm_with_sequence_parallel(torch_norm: Any) -> None:
    """WrappedTorchNorm refuses sequence parallel; mark its parameters as Apex's layer norm does."""
    original = torch_norm.WrappedTorchNorm.__new__

    def build(cls: Any, config: Any, hidden_size: int, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = plain.persist_layer_norm = False
        norm = original(cls, plain, hidden_size, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    replace(torch_norm.WrappedTorchNorm, __new__=build)


def _router_without_transformer_engine(moe_utils: Any) -> None:
    if not hasattr(moe_utils, "te_general_gemm"):  # else a NameError in the router
        replace(moe_utils, te_general_gemm=None)


def _checkpoints_of_torch_adam(distrib_optimizer: Any) -> None:
    """Mend Megatron's own save and load of the distributed optimizer for torch's Adam (0.16.1).

    Four faults: state_dict() asserts that a step was taken; load_state_dict() shares one ``step``
    tensor among all parameters, to which torch then adds 1 a parameter;
    _set_main_param_and_optimizer_states() misses ``step`` or copies back a stale one, and writes to
    views of leaves that require gradients.
    """
    cls = distrib_optimizer.DistributedOptimizer
    state_dict, load_state_dict = cls.state_dict, cls.load_state_dict
    set_states = cls._set_main_param_and_optimizer_states

    @wraps(state_dict)
    def state_dict_after_a_step(self: Any) -> Any:
        if not self.is_stub_optimizer:
            _make_adam_state(self.optimizer)
        return state_dict(self)

    @wraps(load_state_dict)
    def load_with_own_steps(self: Any, state: Any) -> Any:
        result = load_state_dict(self, state)
        if not self.is_stub_optimizer:
            for values in self.optimizer.state.values():
                if torch.is_tensor(values.get("step")):
                    values["step"] = values["step"].clone()
        return result

    @wraps(set_states)
    def set_states_with_step(self: Any, model_param: Any, tensors: Any) -> Any:
        group, order = self.model_param_group_index_map[model_param]
        values = self.optimizer.state.get(self.optimizer.param_groups[group]["params"][order], {})
        if "step" in values:
            tensors = {**tensors, "step": values["step"]}
        with torch.no_grad():
            return set_states(self, model_param, tensors)

    replace(
        cls,
        state_dict=state_dict_after_a_step,
        load_state_dict=load_with_own_steps,
        _set_main_param_and_optimizer_states=set_states_with_step,
    )


def _offload_of_a_cpu(hybrid_optimizer: Any) -> None:
    """Let HybridDeviceOptimizer copy parameters to the host as if they lay on a device."""
    cls = hybrid_optimizer.HybridDeviceOptimizer
    original = cls._get_sub_optimizer_param_groups

    def parts(groups: Any, *, copies: Any, are_copies: bool) -> list[dict[str, Any]]:
        chosen = [
            {**group, "params": [p for p in group["params"] if (p in copies) == are_copies]}
            for group in groups
        ]
        return [group for group in chosen if group["params"]]

    @wraps(original)
    def split(self: Any, offload_fraction: float) -> Any:
        torch.Tensor.is_cuda = property(lambda tensor: True)  # type: ignore[assignment]
        try:
            _, groups, copy_of, copies, masters = original(self, offload_fraction)
        finally:
            del torch.Tensor.is_cuda  # the built-in one is of the class below it
        host = parts(groups, copies=copies, are_copies=True)
        device = parts(groups, copies=copies, are_copies=False)
        return host, device, copy_of, copies, masters

    replace(cls, _get_sub_optimizer_param_groups=split)


def _make_adam_state(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


HELPERS = "megatron.core.datasets.helpers_cpp"
DEVICES = 8
"""Answer of ``torch.cuda.device_count()``: initialize.py skips model parallelism at 0."""


def install_training() -> None:
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
    """Give a checkout without compiled dataset helpers the wheel's, with the same API."""
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
    """Copy tensors of an asynchronous save: Megatron takes those in host memory for copies of the
    device's; here they are the model itself, changed by the next steps."""
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
    """Keep spawned processes from importing the script, which imports megatron before it is
    patched, in 4 s and 200 MB a process. Processes of a save do not run the script."""
    get_data = spawn.get_preparation_data

    @wraps(get_data)
    def get_preparation_data(name: str) -> dict[str, Any]:
        data = get_data(name)
        return {key: value for key, value in data.items() if not key.startswith("init_main")}

    replace(spawn, get_preparation_data=get_preparation_data)
