"""Scalai: change the parallel layout of a running Megatron-LM or DeepSpeed job.

The names in ``__all__`` are the public ones; others may change without notice. Each is imported
when it is first used: ``import scalai`` needs neither torch nor a framework.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalai.core.dataset.order import Blend, Shuffled
    from scalai.core.degrees.batches import BatchRamp
    from scalai.core.errors import (
        AbsentError,
        AnswerError,
        DamageError,
        EndedError,
        LayoutError,
        MemoryShortError,
        MessageError,
        MismatchError,
        PeerError,
        ProofError,
        RefusedError,
        ReplacedError,
        RoomError,
        ScalaiError,
        SilentError,
        StaleError,
        StoreError,
        UnprovenError,
        UsageError,
        VersionError,
    )
    from scalai.core.tensors.slabs import Slabs, zig_zag
    from scalai.patches.deepspeed.deepspeed_state import DeepSpeedState
    from scalai.patches.megatron.megatron_state import MegatronState
    from scalai.patches.replicated import ReplicatedState
    from scalai.runtime.ordered_batches import OrderedBatches
    from scalai.runtime.session import Session, current, elastic
    from scalai.slabs.halo import exchange_halo
    from scalai.slabs.slab_file import SlabFile, read_slab

__version__ = "0.1.0"
__all__ = [
    "AbsentError",
    "AnswerError",
    "BatchRamp",
    "Blend",
    "DamageError",
    "DeepSpeedState",
    "EndedError",
    "LayoutError",
    "MegatronState",
    "MemoryShortError",
    "MessageError",
    "MismatchError",
    "OrderedBatches",
    "PeerError",
    "ProofError",
    "RefusedError",
    "ReplacedError",
    "ReplicatedState",
    "RoomError",
    "ScalaiError",
    "Session",
    "Shuffled",
    "SilentError",
    "SlabFile",
    "Slabs",
    "StaleError",
    "StoreError",
    "UnprovenError",
    "UsageError",
    "VersionError",
    "current",
    "elastic",
    "exchange_halo",
    "read_slab",
    "zig_zag",
]

_PLACES = {
    "BatchRamp": "scalai.core.degrees.batches",
    "Blend": "scalai.core.dataset.order",
    "DeepSpeedState": "scalai.patches.deepspeed.deepspeed_state",
    "MegatronState": "scalai.patches.megatron.megatron_state",
    "OrderedBatches": "scalai.runtime.ordered_batches",
    "ReplicatedState": "scalai.patches.replicated",
    "Session": "scalai.runtime.session",
    "Shuffled": "scalai.core.dataset.order",
    "SlabFile": "scalai.slabs.slab_file",
    "Slabs": "scalai.core.tensors.slabs",
    "current": "scalai.runtime.session",
    "elastic": "scalai.runtime.session",
    "exchange_halo": "scalai.slabs.halo",
    "read_slab": "scalai.slabs.slab_file",
    "zig_zag": "scalai.core.tensors.slabs",
}
"""Where a public name lies, if not among the errors."""

_EXTRAS = {"DeepSpeedState": "deepspeed", "MegatronState": "megatron"}
"""What an installation of Scalai calls the framework that a name needs."""

if not TYPE_CHECKING:  # a type checker would take every name to be there

    def __getattr__(name: str) -> object:
        """Import a public name at its first use.

        Raises:
            AttributeError: It is none. ModuleNotFoundError: What it needs is not installed.
        """
        if name not in __all__:
            raise AttributeError(f"module 'scalai' has no attribute {name!r}; it has {__all__}.")
        place = _PLACES.get(name, "scalai.core.errors")
        try:
            value = getattr(importlib.import_module(place), name)
        except ModuleNotFoundError as error:
            way = f"scalai[{_EXTRAS[name]}] brings it" if name in _EXTRAS else "pip install it"
            raise ModuleNotFoundError(
                f"scalai.{name} needs {error.name}, which is not installed here; {way}.",
                name=error.name,
            ) from error
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Return the public names too, without importing any."""
    return sorted({*globals(), *__all__})
