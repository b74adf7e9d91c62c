"""What a host reports to the coordinator. Reports of one incarnation of an agent are numbered and
count once, in order. Those that the law of the job takes as they are stand in ``events``; of these
here it takes a part."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scalai.core.messages import events
from scalai.core.tensors.collection import Collection


@dataclass(frozen=True, slots=True)
class Sealed:
    """What the workers have written is sealed; ``manifest`` as bytes, None where all had died
    before they wrote. ``reason`` is ``stop``, ``snapshot``, ``start`` or ``emergency``."""

    round: int
    reason: str
    manifest: bytes | None
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Failed:
    """The round cannot go on. ``is_chance``: a signal was the cause, which says nothing of the
    degrees; ``is_refusal``: the workers cannot run the job so, and would say it again."""

    round: int
    reason: str
    out_of_memory: bool = False
    is_chance: bool = False
    is_refusal: bool = False


@dataclass(frozen=True, slots=True)
class Published:
    """All workers of the host have built their models, of these tensors."""

    round: int
    tensors: tuple[str, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Holding:
    """All workers of the host together hold these ``rows``, and its store can hold so many bytes;
    comes before ``Published``, where replicas are kept."""

    round: int
    rows: Collection
    room_bytes: int

    def __post_init__(self) -> None:
        self.rows.check()


@dataclass(frozen=True, slots=True)
class Moved:
    """So many bytes of the state have come from other hosts."""

    round: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Grown:
    """The host holds more of a generation than before: the manifest of its part, as bytes."""

    manifest: bytes


@dataclass(frozen=True, eq=False, slots=True)
class Restored:
    """All workers of the host have filled their memory: ``rows`` of all of them, with the
    fingerprints [rows] of what they read."""

    round: int
    rows: Collection
    fingerprints: npt.NDArray[np.uint64]
    seconds: Mapping[str, float]
    bytes_local: int
    bytes_remote: int

    def __post_init__(self) -> None:
        self.rows.check()
        if self.fingerprints.shape != (len(self.rows),):
            raise ValueError(f"{self.fingerprints.shape} fingerprints of {len(self.rows)} pieces")


@dataclass(frozen=True, slots=True)
class Unproven:
    """What came from other hosts is not what these had committed."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class Suspected:
    """What these hosts gave of a generation is not what they had committed, or they say themselves
    that it is damaged."""

    generation: int
    hosts: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Doubted:
    """The host has given up what it had fetched of a doubted generation: the manifest of what is
    left, None where nothing is."""

    generation: int
    manifest: bytes | None


@dataclass(frozen=True, slots=True)
class Examined:
    """The host has read its part of a generation again, in ``directory``, and names what is
    damaged: ``manifest``, as bytes, is what is left, None where it holds none of it."""

    generation: int
    damage: tuple[str, ...]
    directory: str
    manifest: bytes | None = None


@dataclass(frozen=True, slots=True)
class Attached:
    """What the durable directory holds: manifests as bytes, and numbers that cannot be read with
    the reason."""

    manifests: tuple[bytes, ...]
    damaged: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Leaving:
    """The host was told to drain, by this ``source``; it has so many seconds left (None: no haste),
    and is gone then, whatever becomes of the drain, where that ``is_final``."""

    source: str = ""
    left_s: float | None = None
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class Staying:
    """Every notice was withdrawn by which the host was to leave."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The host can run so many workers."""

    slots: int


HostEvent = (
    events.Built | events.NotBuilt | events.Prepared | events.Held | events.Arrived
    | events.Frozen | events.Rescued | events.Stopped | events.Stepped | events.Unhooked
    | events.Hooked | events.Finished | events.Committed | events.Replicated | events.Saved
    | events.NotSaved | events.Archived | events.Skipped | events.HealthChecked
    | events.Knocked
)  # fmt: skip
"""What the law of the job takes as a host reports it."""

Report = (
    HostEvent | Sealed | Failed | Published | Holding | Moved | Grown | Restored | Unproven
    | Suspected | Doubted | Examined | Attached | Leaving | Staying | Slots
)  # fmt: skip
