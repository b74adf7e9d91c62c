"""How far a DeepSpeed checkpoint is, and what a script saved beside its state.

Source: ``_common_checkpoint_state`` of deepspeed/runtime/engine.py, 0.19.8.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalai.converters.deepspeed.files import read_dictionary
from scalai.core.jsonable import Json

_STEP_TAG = re.compile(r"global_step(\d{1,18})")
_FIRST_STATES = "*mp_rank_00_model_states.pt"
_DEEPSPEEDS_OWN = frozenset((
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps",
    "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
    "checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts",
))  # fmt: skip
"""Entries that are not a script's own."""


def checkpoint_step(directory: Path) -> int | None:
    """Return the step of a checkpoint: by its tag where DeepSpeed chose that, else by what its
    first file says. None: neither says."""
    match = _STEP_TAG.fullmatch(directory.name)
    if match is not None:
        return int(match[1])
    step = _first_file(directory).get("global_steps")
    return step if isinstance(step, int) else None


def client_state(directory: Path) -> dict[str, Json]:
    """Return what a script saved beside the state of a checkpoint, as far as it is JSON."""
    return plain_client_state(_first_file(directory))


def plain_client_state(content: Mapping[str, Any]) -> dict[str, Json]:
    """Return of what ``load_checkpoint`` returns the entries that are a script's own and JSON."""
    own = {name: value for name, value in content.items() if name not in _DEEPSPEEDS_OWN}
    return {name: value for name, value in own.items() if _is_json(value)}


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | float | str)


def _first_file(directory: Path) -> dict[str, Any]:
    # Classes become stand-ins, and nothing of the file runs.
    for file in sorted(directory.glob(_FIRST_STATES)):
        return read_dictionary(file, trust=True)
    return {}
