"""Recognizes checkpoints DeepSpeed loads into an engine by itself.

Source: ``load_checkpoint``, ``_load_checkpoint`` and ``_load_zero_checkpoint`` of
deepspeed/runtime/engine.py, ``SDLoaderBase.load`` of runtime/state_dict_factory.py, 0.19.8.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalai.converters.deepspeed.files import find_tag, list_files, read_dictionary
from scalai.converters.deepspeed.job import uses_bf16_optimizer, zero_config
from scalai.patches.deepspeed.engine import parallel_ranks

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
