"""A checkpoint's model files: whether DeepSpeed loads them into an engine by itself, and their
values, a step and a script's own. They are read without running any code of the file.

Source: ``load_checkpoint``, ``_load_checkpoint``, ``_load_zero_checkpoint`` and
``_common_checkpoint_state`` of deepspeed/runtime/engine.py, ``SDLoaderBase.load`` of
runtime/state_dict_factory.py, 0.19.8.
"""

import inspect
import io
import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scalai.converters.deepspeed.job import uses_bf16_optimizer, zero_config
from scalai.converters.deepspeed.tag_files import (
    Tag,
    carried,
    find_tag,
    list_files,
    read_dictionary,
)
from scalai.converters.pickles import SEALED, Array, Foreign
from scalai.converters.torch_archive import NewTensor
from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.core.tensors.dtypes import FROM_TORCH
from scalai.patches.deepspeed import parallel_ranks
from scalai.runtime.live import TORCH_DTYPES

_STATES = "*mp_rank_*_model_states.pt"

Shapes = list[list[tuple[str, tuple[int, ...]]]]
"""By flat buffer its parameters, in order."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A script's arguments of ``load_checkpoint``, with their defaults."""

    load_dir: str
    tag: str | None
    load_module_strict: bool
    load_optimizer_states: bool
    load_lr_scheduler_states: bool
    load_module_only: bool
    custom_load_fn: Callable[..., Any] | None

    @classmethod
    def of(
        cls, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> "LoadRequest":
        """Bind a call. Raises ``TypeError`` as the call would."""
        given = inspect.signature(method).bind(*args, **kwargs)
        given.apply_defaults()
        return cls(**{name: given.arguments[name] for name in cls.__slots__})

    @property
    def is_whole(self) -> bool:
        return self.load_optimizer_states and not self.load_module_only

    def directory(self) -> Path | None:
        """Return the checkpoint's directory; None: there is none of a known kind."""
        path = Path(self.load_dir)
        found = find_tag(path, None) if self.tag is None else path / str(self.tag)
        # Without a tag this may be the tag's own directory; DeepSpeed does not take it.
        is_known = found is not None and found != path and any(found.glob(_STATES))
        return found if is_known else None


def is_out_of_scope(engine: Any) -> bool:
    """True if this engine's checkpoints are left to DeepSpeed: universal ones, experts, files on
    each node's disks, an engine without training."""
    return bool(
        engine.load_universal_checkpoint()
        or engine.has_moe_layers
        or engine.use_node_local_storage()
        or engine.optimizer is None
    )


def loads_itself(engine: Any, directory: Path, request: LoadRequest) -> bool:
    """True if DeepSpeed loads this on this rank: the same stage, degrees and flat buffers.

    Raises:
        RefusedError: Files are missing or damaged.
    """
    tag = list_files(directory)
    here = parallel_ranks.degrees(engine)
    tp = len(tag.layers) or len(tag.ranks)
    pp = len(tag.ranks) // tp
    is_3, was_3 = engine.zero_optimization_stage() == 3, tag.ranks[0].is_stage_3
    if not request.is_whole and not is_3 and not was_3:
        # Weights are whole in these files; a pipeline has a file for each layer.
        return tp == here["tp"] and (pp == here["pp"] or bool(tag.layers))
    if (tp, pp, is_3) != (here["tp"], here["pp"], was_3):
        return False
    own = tag.ranks[engine.checkpoint_mp_rank]
    path = tag.directory / own.model[0]
    if not engine.zero_optimization():
        # Where there is no optimizer's state it would fail with a TypeError.
        return not own.optimizer and read_dictionary(path, trust=True).get("optimizer") is not None
    return len(own.optimizer) == here["dp"] and _has_equal_buffers(engine, path)


def _has_equal_buffers(engine: Any, path: Path) -> bool:
    """True if flat buffers hold the same parameters in the same order, for one optimizer."""
    model = read_dictionary(path, trust=True)  # to look at; DeepSpeed itself believes it
    config = model.get("ds_config")
    config = config if isinstance(config, dict) else {}
    was_bf16 = uses_bf16_optimizer(config, zero_config(config).get("stage", 0))
    is_bf16 = type(engine.optimizer).__name__ == "BF16_Optimizer"
    saved = _plain(model.get("param_shapes") or [])
    return is_bf16 == was_bf16 and saved == _plain(engine._get_zero_param_shapes())


def _plain(groups: Any) -> Shapes:
    return [[(name, tuple(shape)) for name, shape in group.items()] for group in groups]


_STEP_TAG = re.compile(r"global_step(\d{1,18})")
_FIRST_STATES = "*mp_rank_00_model_states.pt"
_DEEPSPEEDS_OWN = frozenset((
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps",
    "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
    "checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts",
))  # fmt: skip
"""DeepSpeed's own entries; others are a script's."""


def saved_step(directory: Path) -> int | None:
    """Return the step of a checkpoint: from DeepSpeed's own tag, else from its first file. None:
    unknown."""
    match = _STEP_TAG.fullmatch(directory.name)
    if match is not None:
        return int(match[1])
    step = _first_file(directory).get("global_steps")
    return step if isinstance(step, int) else None


def client_state_of(directory: Path) -> dict[str, Json]:
    """Return a checkpoint's entries of the script, as far as they are JSON."""
    return plain_client_state(_first_file(directory))


def plain_client_state(content: Mapping[str, Any]) -> dict[str, Json]:
    """Return the script's entries with a JSON form from the content of a model file."""
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


_OF_THE_LAYOUT = frozenset((
    "module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "buffer_names", "checkpoint_parallel_dimensions",
))  # fmt: skip
"""Entries true at the saved degrees alone, or with tensors of the state."""
_LOADED = frozenset((
    "skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd",
))  # fmt: skip
"""Entries kept back by ``load_checkpoint``."""


def own_file(engine: Any, tag: Tag) -> Path:
    """Return the model file of a tag saved by this rank, or at other degrees one in its place."""
    here = parallel_ranks.degrees(engine)
    is_alike = len(tag.ranks) == here["tp"] * here["pp"] and len(tag.layers or [1]) == here["tp"]
    files = tag.ranks[engine.checkpoint_mp_rank if is_alike else 0].model
    dp_rank = dist.get_rank(engine.seq_data_parallel_group)
    return tag.directory / files[dp_rank if len(files) == here["dp"] else 0]


def read_values(path: Path) -> dict[str, Any]:
    """Return the entries of a model file valid at any degrees.

    Raises:
        RefusedError: It is damaged, or an entry holds an object of a class that is not plain.
    """
    model = read_dictionary(path, trust=False)
    return {
        key: live_value(carried(value, path), f"{key} in {path}")
        for key, value in model.items()
        if key not in _OF_THE_LAYOUT
    }


def client_state(values: Mapping[str, Any], request: LoadRequest) -> dict[str, Any]:
    """Return the script's part of ``live_values``: all but loaded entries, as ``_load_checkpoint``
    of deepspeed/runtime/engine.py does (0.19.8)."""
    loaded = frozenset() if request.load_module_only else _LOADED
    schedule = {"lr_scheduler"} if request.load_lr_scheduler_states else set()
    return {key: value for key, value in values.items() if key not in loaded | schedule}


def live_value(value: Any, what: str) -> Any:
    """Return a value with torch's tensors and dtypes. Dictionaries are changed in place.

    Args:
        value: A tree of plain values, ``NewTensor`` and stand-ins.
        what: Name of the value, for the message.

    Raises:
        RefusedError: It holds an object of a class that is not plain.
    """
    if isinstance(value, NewTensor):
        data = torch.frombuffer(bytearray(value.content or b""), dtype=torch.uint8)
        return data.view(TORCH_DTYPES[value.dtype]).view(value.shape)
    if isinstance(value, Foreign) or (isinstance(value, type) and issubclass(value, Foreign)):
        return _of_torch(value, what)
    if isinstance(value, dict):
        pairs = [(live_value(key, what), live_value(of, what)) for key, of in value.items()]
        value.clear()
        value.update(pairs)
        if type(value) in SEALED:
            return OrderedDict(value)
    if isinstance(value, list | tuple):
        return type(value)(live_value(entry, what) for entry in value)
    if isinstance(value, Namespace):
        return Namespace(**live_value(vars(value), what))
    return value


def _of_torch(value: Any, what: str) -> Any:
    """Return the dtype, device, array or bytes of a stand-in. Raises as ``live_value``."""
    module, name = value.path
    if isinstance(value, Array):
        return value.array()
    if value.path == ("_io", "BytesIO") and isinstance(value, Foreign):
        return io.BytesIO(value.state[0])
    if module == "torch" and name in FROM_TORCH:
        return getattr(torch, name)
    if (module, name) == ("torch", "device") and isinstance(value, Foreign):
        return torch.device(*value.args)
    raise RefusedError(
        f"{what} holds an object of {module}.{name}, and to make one would run code that the "
        "checkpoint names. Save plain values, or convert the checkpoint by scalai reshard "
        "--trust-pickle to this engine's degrees and stage: then DeepSpeed loads it itself."
    )
