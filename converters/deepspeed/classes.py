"""Objects of DeepSpeed's classes that its checkpoints hold as pickles.

Source: deepspeed 0.19.8: ``ZeroStageEnum`` of runtime/zero/config.py, ``fragment_address`` of
utils/tensor_fragment.py, ``SubparamShape`` of checkpoint/universal_checkpoint.py.
"""

from collections.abc import Mapping
from typing import Any

from scalai.converters.deepspeed.flat import Span
from scalai.converters.pickles import Foreign, foreign


def zero_stage(stage: int) -> Foreign:
    """Return a stage as DeepSpeed's configuration has it."""
    return foreign("deepspeed.runtime.zero.config", "ZeroStageEnum")(stage)


def fragment(span: Span) -> Foreign:
    """Return where a part of a parameter lies in a rank's buffer."""
    address = foreign("deepspeed.utils.tensor_fragment", "fragment_address")
    return made(address, {"numel": span.high - span.low, "start": span.at})


def made(cls: type[Foreign], state: Mapping[str, Any]) -> Foreign:
    """Return an object as pickle makes it: by ``__new__`` and a state, without a call."""
    new = cls.__new__(cls)
    new.__setstate__(dict(state))
    return new


def sub_parameters(shape: tuple[Any, ...], dim: int) -> Foreign:
    """Return what a universal checkpoint says of a parameter that is made of several.

    ``shape`` has their sizes as a tuple at ``dim``.
    """
    cls = foreign("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
    return made(cls, {"patterns": [], "shape": shape, "partition_dim": dim})
