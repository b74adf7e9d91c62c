"""Which DeepSpeed checkpoint a script asks for, and of which step it is."""

import re
from pathlib import Path
from typing import Any

from scalai.converters.deepspeed.files import read_dictionary

LATEST = "latest"
_STEP_TAG = re.compile(r"global_step(\d{1,18})")
_STATES = "*mp_rank_00_model_states.pt"
_PLAIN = (bool, int, float, str)
DEEPSPEEDS_OWN = frozenset((
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps",
    "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
    "checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts",
))  # fmt: skip
"""Entries of a checkpoint that are not a script's own (``_common_checkpoint_state``)."""


def checkpoint_tag(load_dir: str, tag: str | None, latest: str = LATEST) -> str | None:
    """Return the tag that ``load_checkpoint`` would load; None: there is no checkpoint.

    Source: ``load_checkpoint`` of deepspeed/runtime/engine.py, 0.19.8.
    """
    if tag is None:
        file = Path(load_dir, latest)
        tag = file.read_text().strip() if file.is_file() else None
    return tag if tag is not None and Path(load_dir, tag).is_dir() else None


def checkpoint_step(load_dir: str, tag: str) -> int | None:
    """Return the step of a checkpoint: by its tag where DeepSpeed chose that, else by what its
    first file says. None: neither says."""
    match = _STEP_TAG.fullmatch(tag)
    if match is not None:
        return int(match[1])
    for file in sorted(Path(load_dir, tag).glob(_STATES)):
        step: Any = read_dictionary(file, trust=False).get("global_steps")
        if isinstance(step, int):
            return step
    return None


def client_state(load_dir: str, tag: str) -> dict[str, Any]:
    """Return what a script saved beside the state: the plain values that are not DeepSpeed's."""
    for file in sorted(Path(load_dir, tag).glob(_STATES)):
        content = read_dictionary(file, trust=False)
        return {
            name: value
            for name, value in content.items()
            if name not in DEEPSPEEDS_OWN and isinstance(value, _PLAIN)
        }
    return {}
