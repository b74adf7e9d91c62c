"""How a round computes its passes, beside its degrees: how many samples go through at once, and
what is computed again on the way back."""

from dataclasses import asdict, dataclass
from typing import Literal, get_args

Recompute = Literal["none", "selective", "full"]
"""What the backward pass computes again: nothing, attention, or each layer from its input."""
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
"""From the one that keeps the most activations in memory to the one that keeps the fewest."""
Part = Literal["micro-batch", "recompute", "virtual-stages"]
"""What of a layout a person may free, beside its degrees."""
PARTS: tuple[Part, ...] = get_args(Part)
MEMORY_PARTS: tuple[Part, ...] = ("micro-batch", "recompute")
"""Those of which another choice saves memory."""
MICRO_BATCHES = 32
"""Larger micro-batches are not tried."""


@dataclass(frozen=True, slots=True)
class Passes:
    """``micro_batch_size`` is in samples. None: as the script's flags say."""

    micro_batch_size: int | None = None
    recompute: Recompute | None = None

    def beside(self, other: "Passes") -> str:
        """Return what to write behind degrees so that they are told from those with ``other``
        passes; empty: nothing."""
        is_same = self.micro_batch_size in (None, other.micro_batch_size)
        text = "" if is_same else f"·MBS{self.micro_batch_size}"
        return text + (f"·recompute={self.recompute}" if self.recompute else "")

    def to_json(self) -> dict[str, int | str | None]:
        """Return both by their names."""
        return asdict(self)


AS_GIVEN = Passes()
"""As the script's flags say."""


@dataclass(frozen=True, slots=True)
class Freedom:
    """What of a job may be another than its script's flags say, beside its degrees.

    Attributes:
        own: What the script recomputes by its flags.
        more: What it can be made to recompute instead, each saving more memory than the one before;
            empty: nothing, as where no flag does that.
        fixed: (part, why) that stays, whatever a person allows.
        for_speed: Parts that may differ wherever that is faster.
        for_memory: Parts that may differ where nothing fits into memory as the flags have it.
    """

    own: Recompute = "none"
    more: tuple[Recompute, ...] = ()
    fixed: tuple[tuple[Part, str], ...] = ()
    for_speed: tuple[Part, ...] = ()
    for_memory: tuple[Part, ...] = ()

    def is_free(self, part: Part, *, for_memory: bool) -> bool:
        """Whether ``part`` may differ for speed, or also for memory."""
        allowed = (*self.for_speed, *(self.for_memory if for_memory else ()))
        return part in allowed and part not in dict(self.fixed)

    def recomputes(self, *, for_memory: bool) -> tuple[Recompute | None, ...]:
        """Return what may be recomputed, the flags' own (None) first."""
        more = self.more if self.is_free("recompute", for_memory=for_memory) else ()
        return (None, *more)

    def refusal(self, recompute: Recompute | None) -> str | None:
        """Say why a person cannot have this; None: it can be had."""
        why = dict(self.fixed).get("recompute")
        if recompute in (None, self.own) or (why is None and recompute in self.more):
            return None
        return f"recompute={recompute} cannot be had: {why or f'the script has {self.own}'}"


NO_FREEDOM = Freedom()


def difference(before: Passes, after: Passes, own: Recompute) -> str:
    """Return in words what changes from the passes of one round to those of the next; empty:
    nothing does.

    Args:
        own: What the script recomputes by its flags.
    """
    words = []
    sizes = before.micro_batch_size, after.micro_batch_size
    if None not in sizes and sizes[0] != sizes[1]:
        words.append(f"micro-batch {sizes[0]} -> {sizes[1]}")
    kinds = before.recompute or own, after.recompute or own
    if kinds[0] != kinds[1]:
        words.append(f"recompute {kinds[0]} -> {kinds[1]}")
    return ", ".join(words)


def recompute_of_json(data: object) -> Recompute | None:
    """Raises ``ValueError`` where it is nothing of the kind."""
    for kind in (None, *RECOMPUTES):
        if data == kind:
            return kind
    raise ValueError(f"{data!r} is none of {', '.join(RECOMPUTES)}")
