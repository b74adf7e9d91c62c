"""Where this rank stands on megatron's parallel axes."""

from collections.abc import Mapping

import megatron.core
from megatron.core import parallel_state

from scalai.core.release import numbers_of


def release() -> tuple[int, ...]:
    """Return the numbers of Megatron-core's release."""
    return numbers_of(megatron.core.__version__)


def degrees() -> Mapping[str, int]:
    """Return the sizes of the parallel axes; ``vpp`` is the number of model chunks a stage."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "vpp": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "etp": parallel_state.get_expert_tensor_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
    }


def coordinate() -> str:
    """Return this rank's position, ``tp0-pp1-dp0``, with ``-cp1`` where contexts are split.

    Expert ranks are no axis of their own: megatron lays them over the data-parallel ranks.
    """
    position = (
        f"tp{parallel_state.get_tensor_model_parallel_rank()}"
        f"-pp{parallel_state.get_pipeline_model_parallel_rank()}"
        f"-dp{parallel_state.get_data_parallel_rank()}"
    )
    if parallel_state.get_context_parallel_world_size() > 1:
        position += f"-cp{parallel_state.get_context_parallel_rank()}"
    return position
