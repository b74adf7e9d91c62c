"""What cannot change its layout is refused at the start, all of it at once, with the reason."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalai.core.errors import RefusedError
from scalai.patches.faults import refuse_changed_axes
from scalai.patches.megatron.refusals import refuse_arguments, refuse_unsupported


class LayerWiseDistributedOptimizer(SimpleNamespace):
    """By its name alone."""


class HybridDeviceOptimizer(SimpleNamespace):
    """By its name alone."""


def leaf(**values: Any) -> SimpleNamespace:
    """Return an optimizer as megatron has it, with nothing in the way."""
    inner = values.pop("optimizer", SimpleNamespace())
    config = SimpleNamespace(**values.pop("config", {}))
    return SimpleNamespace(is_stub_optimizer=False, optimizer=inner, config=config, **values)


def test_plain_jobs_are_not_refused() -> None:
    refuse_arguments(SimpleNamespace(use_distributed_optimizer=True, async_save=False))
    refuse_unsupported([torch.nn.Linear(2, 2)], leaf())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2"),
        ({"use_precision_aware_optimizer": True}, "--use-precision-aware-optimizer"),
        ({"optimizer_cpu_offload": True}, "--optimizer-cpu-offload"),
        ({"num_distributed_optimizer_instances": 2}, "--num-distributed-optimizer-instances 2"),
        ({"fp8_param_gather": True}, "--fp8-param-gather"),
        ({"async_save": True}, "--async-save"),
    ],
)
def test_flags_are_refused_by_name(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(RefusedError, match=named):
        refuse_arguments(SimpleNamespace(**arguments))


def test_everything_in_the_way_is_named_at_once() -> None:
    with pytest.raises(RefusedError, match=r"(?s)async-save.*use-torch-fsdp2"):
        refuse_arguments(SimpleNamespace(use_torch_fsdp2=True, async_save=True))


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (LayerWiseDistributedOptimizer(optimizer=None), "LayerWiseDistributedOptimizer"),
        (leaf(optimizer=HybridDeviceOptimizer()), "HybridDeviceOptimizer"),
        (leaf(config={"use_precision_aware_optimizer": True}), "use_precision_aware_optimizer"),
        (leaf(ddp_config=SimpleNamespace(use_megatron_fsdp=True)), "use_megatron_fsdp"),
        (
            leaf(ddp_config=SimpleNamespace(num_distributed_optimizer_instances=2), gbuf_ranges=[]),
            "instances 2",
        ),
        (SimpleNamespace(chained_optimizers=[leaf(config={"optimizer_cpu_offload": 1})]), "cpu"),
    ],
)
def test_optimizers_are_refused_by_name(optimizer: Any, named: str) -> None:
    with pytest.raises(RefusedError, match=named):
        refuse_unsupported([torch.nn.Linear(2, 2)], optimizer)


def test_models_with_scaled_parameters_are_refused() -> None:
    model: Any = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(fp8_param=True)
    with pytest.raises(RefusedError, match="fp8_param"):
        refuse_unsupported([model], leaf())


def test_another_context_parallel_degree_is_refused() -> None:
    refuse_changed_axes({"cp": 2}, {"cp": 2, "tp": 4})
    with pytest.raises(RefusedError, match="cp=2 when the state was taken and cp=1 now"):
        refuse_changed_axes({"cp": 2}, {"cp": 1, "tp": 4})
