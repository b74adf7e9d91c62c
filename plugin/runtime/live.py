"""What a framework's adapter gives the runtime: the live state of one rank, as slots over its own
memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from scalai.core.collection import Tensor
from scalai.core.jsonable import Json
from scalai.core.region import Piece


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """Live memory of this rank that is part of a global tensor.

    ``buffer`` [elements] is a flat, detached view of the framework's own memory, of the tensor's
    dtype; ``pieces`` say which boxes of ``tensor`` lie where in it. ``is_held``: this rank vouches
    for these elements, they may be deposited.
    ``is_wanted``: a restore must fill them. Stale copies are wanted, not held; a range of a
    parameter that is wanted whole elsewhere is held, not wanted.
    """

    tensor: Tensor
    buffer: torch.Tensor
    pieces: tuple[Piece, ...]
    is_held: bool = True
    is_wanted: bool = True


class LiveState(Protocol):
    """The training state of one rank of a live job. Nothing here communicates with other ranks."""

    @property
    def coordinate(self) -> str:
        """Position of this rank on the parallel axes, such as ``tp0-pp1-dp0``: the key of its
        ``rank_state``."""

    def slots(self) -> Sequence[Slot]:
        """List all tensors of this rank. Called once, after the model and the optimizer are built;
        the buffers stay valid and in place until the process ends."""

    def scalars(self) -> Mapping[str, Json]:
        """Return what is not a tensor and equal on all ranks that have it (schedule, loss scale,
        parameter groups).

        Nested mappings of all ranks are united; where two ranks differ the lowest rank's value
        stays."""

    def load_scalars(self, scalars: Mapping[str, Json]) -> None:
        """Put back what the union of all ranks' ``scalars()`` was."""

    def rank_state(self) -> Json:
        """Return what belongs to this rank alone (random number generators)."""

    def load_rank_state(self, state: Json | None, step: int) -> str:
        """Put back this coordinate's state, or derive a new one from ``step`` where there is None
        (the degrees changed).

        Returns one line for the log that says which."""
