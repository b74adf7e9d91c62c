"""Passes of a round, beside its degrees: micro-batch, and recomputation in the backward pass."""

from dataclasses import asdict, dataclass
from typing import Literal, get_args

Recompute = Literal["none", "selective", "full"]
"""Recomputation in the backward pass: nothing, attention, or each layer from its input."""
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
"""In order, from the most activations in memory to the fewest."""
Part = Literal["micro-batch", "recompute", "virtual-stages"]
"""Parts of a layout, beside its degrees, for a user to free."""
PARTS: tuple[Part, ...] = get_args(Part)
MEMORY_PARTS: tuple[Part, ...] = ("micro-batch", "recompute")
"""Parts able to save memory."""
MICRO_BATCHES = 32
"""Larger micro-batches are not tried."""


@dataclass(frozen=True, slots=True)
class Passes:
    """``micro_batch_size`` is in samples. None: by the script's flags."""

    micro_batch_size: int | None = None
    recompute: Recompute | None = None

    def beside(self, other: "Passes") -> str:
        """Return a suffix for degrees to distinguish them from those with ``other`` passes; empty:
        equal."""
        is_same = self.micro_batch_size in (None, other.micro_batch_size)
        text = "" if is_same else f"·MBS{self.micro_batch_size}"
        return text + (f"·recompute={self.recompute}" if self.recompute else "")

    def to_json(self) -> dict[str, int | str | None]:
        """Return both by their names."""
        return asdict(self)


AS_GIVEN = Passes()
"""By the script's flags."""


@dataclass(frozen=True, slots=True)
class Freedom:
    """Allowed differences from the script's flags, beside its degrees.

    Attributes:
        own: Recomputation by the script's flags.
        more: Other possible recomputations, each with less memory than the one before; empty: none,
            for example without a flag for it.
        fixed: (part, why) of parts fixed against the user's wish.
        for_speed: Parts free for speed.
        for_memory: Parts free if nothing fits in memory under the flags.
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
        """Return the allowed recomputations, the flags' own (None) first."""
        more = self.more if self.is_free("recompute", for_memory=for_memory) else ()
        return (None, *more)

    def refusal(self, recompute: Recompute | None) -> str | None:
        """Return the reason against this recomputation; None: allowed."""
        why = dict(self.fixed).get("recompute")
        if recompute in (None, self.own) or (why is None and recompute in self.more):
            return None
        return f"recompute={recompute} cannot be had: {why or f'the script has {self.own}'}"


NO_FREEDOM = Freedom()


def difference(before: Passes, after: Passes, own: Recompute) -> str:
    """Return the changes from one round's passes to the next's, in words; empty: none.

    Args:
        own: Recomputation by the script's flags.
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
    """Read a recomputation. Raises ``ValueError`` for anything else."""
    for kind in (None, *RECOMPUTES):
        if data == kind:
            return kind
    raise ValueError(f"{data!r} is none of {', '.join(RECOMPUTES)}")
