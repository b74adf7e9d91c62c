"""How far workers of the next round go beside the training: the three levels of standby."""

from dataclasses import dataclass
from enum import Enum

from scalai.core.messages.worker_messages import AtBrink, Beside

MEMORY_RESERVE = 1.25
"""Memory of a new worker, relative to the largest present one at the same place."""
HOST_BYTES, DEVICE_BYTES = 512 << 20, 2 << 30
"""Memory of a worker without a model: of a host, by what it has imported and does not share; of a
device, by its context and communicators. Estimates: no device has measured the second one."""

AHEAD = 1.05
"""Most memory of both rounds together, relative to the larger one, where the next workers take some
of theirs beside the training."""

AUTO, ALWAYS, BRINK, NEVER = POLICIES = ("auto", "always", "brink", "never")
"""``[resize] standby``: by the room; two models, whatever the room; the brink at most; nothing."""


class Standby(Enum):
    """A level of standby."""

    MODELS = "models"
    """They build their models beside the present ones."""
    BRINK = "brink"
    """They come as far as they can without it: all is built without storage (Megatron-LM, loops
    with ``begin_build``), or nothing of the engine yet (DeepSpeed)."""
    NOTHING = "nothing"
    """They start once the present workers are gone."""


@dataclass(frozen=True, slots=True)
class RoomBeside:
    """Measured room for ``workers`` more on a host, in bytes.

    Attributes:
        used: Private memory of the largest present worker; 0: none is there.
        free: Free memory of the host.
        on_devices: Whether the state is in device memory.
        device_free: Free memory of the fullest device, per worker on it; None: unknown.
        brink: Memory of the largest present worker at the brink; None: one could not have stopped
            there.
    """

    workers: int
    used: int
    free: int
    on_devices: bool = False
    device_free: int | None = None
    brink: AtBrink | None = None


@dataclass(frozen=True, slots=True)
class StandbyChoice:
    """A level, and the reason against a higher one; empty: there is none."""

    level: Standby
    reason: str = ""


def choose(policy: str, room: RoomBeside) -> StandbyChoice:
    """Choose the level of standby for the next round's workers on a host.

    Args:
        policy: One of ``POLICIES``.
    """
    if policy == NEVER:
        return StandbyChoice(Standby.NOTHING, "[resize] standby is never")
    if policy == ALWAYS or not room.used:
        return StandbyChoice(Standby.MODELS)
    against = _against_models(policy, room)
    if not against:
        return StandbyChoice(Standby.MODELS)
    without = _against_brink(room)
    if not without:
        return StandbyChoice(Standby.BRINK, against)
    return StandbyChoice(Standby.NOTHING, f"{against}; {without}")


def bytes_ahead(needed: int, beside: Beside) -> int:
    """Return how much a worker at the brink may take before the present ones are gone, in bytes.

    Args:
        needed: Its memory once its model is restored.
    """
    room = beside.free - HOST_BYTES - int(beside.used * (MEMORY_RESERVE - 1))
    within = int(max(needed, beside.used) * AHEAD) - beside.used
    return max(0, min(within, room))


def _against_models(policy: str, room: RoomBeside) -> str:
    """Return the reason against two models; empty: there is none."""
    if policy == BRINK:
        return "[resize] standby is brink"
    if room.on_devices:
        return "device memory holds one model ([resize] standby = 'always' builds all the same)"
    needed = int(room.workers * room.used * MEMORY_RESERVE)
    if needed <= room.free:
        return ""
    return f"{room.workers} models may take {_gb(needed)}, {_gb(room.free)} are free"


def _against_brink(room: RoomBeside) -> str:
    """Return the reason against the brink; empty: there is none."""
    if room.brink is None:
        return "the script cannot stop before its model has memory"
    each = max(HOST_BYTES, int(room.brink.host * MEMORY_RESERVE))
    needed, free = room.workers * each, _gb(room.free)
    if needed > room.free:
        return f"{room.workers} workers at the brink may take {_gb(needed)}, {free} are free"
    if not room.on_devices:
        return ""
    if room.device_free is None:
        return "the free memory of the devices is unknown"
    needed = DEVICE_BYTES + int(room.brink.device * MEMORY_RESERVE)
    if room.device_free >= needed:
        return ""
    free = _gb(room.device_free)
    return f"a worker at the brink may take {_gb(needed)} of a device, {free} are free"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
