"""Passes of a round, beside its degrees: micro-batch, recomputation in the backward pass, and state
in host memory."""

from dataclasses import asdict, dataclass
from typing import Literal, get_args

Recompute = Literal["none", "selective", "full"]
"""Recomputation in the backward pass: nothing, attention, or each layer from its input."""
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
"""In order, from the most activations in memory to the fewest."""
Offload = Literal["none", "optimizer-half", "optimizer", "parameters"]
"""State in host memory: nothing, masters and moments of half of the parameters or of all, the
weights too."""
OFFLOADS: tuple[Offload, ...] = get_args(Offload)
"""In order, from the most state in device memory to the least."""
Part = Literal["micro-batch", "recompute", "virtual-stages", "offload"]
"""Parts of a layout, beside its degrees, for a user to free."""
PARTS: tuple[Part, ...] = get_args(Part)
MEMORY_PARTS: tuple[Part, ...] = ("micro-batch", "recompute", "offload")
"""Parts able to save memory."""
SPEED_PARTS: tuple[Part, ...] = ("micro-batch", "recompute", "virtual-stages")
"""Parts able to make steps faster."""
MICRO_BATCHES = 32
"""Larger micro-batches are not tried."""


@dataclass(frozen=True, slots=True)
class Passes:
    """``micro_batch_size`` is in samples. None: by the script's flags."""

    micro_batch_size: int | None = None
    recompute: Recompute | None = None
    offload: Offload | None = None

    def beside(self, other: "Passes") -> str:
        """Return a suffix for degrees to distinguish them from those with ``other`` passes; empty:
        equal."""
        is_same = self.micro_batch_size in (None, other.micro_batch_size)
        text = "" if is_same else f"·MBS{self.micro_batch_size}"
        text += f"·recompute={self.recompute}" if self.recompute else ""
        return text + (f"·offload={self.offload}" if self.offload else "")

    def to_json(self) -> dict[str, int | str | None]:
        """Return them by their names."""
        return asdict(self)


AS_GIVEN = Passes()
"""By the script's flags."""


@dataclass(frozen=True, slots=True)
class Freedom:
    """Allowed differences from the script's flags, beside its degrees.

    Attributes:
        own, own_offload: Recomputation, and state in host memory, by the script's flags.
        more: Other possible recomputations, each with less memory than the one before; empty: none,
            for example without a flag for it.
        offloads: Other possible states in host memory, likewise.
        fixed: (part, why) of parts fixed against the user's wish.
        for_speed: Parts free for speed.
        for_memory: Parts free if nothing fits in memory under the flags.
    """

    own: Recompute = "none"
    more: tuple[Recompute, ...] = ()
    fixed: tuple[tuple[Part, str], ...] = ()
    for_speed: tuple[Part, ...] = ()
    for_memory: tuple[Part, ...] = ()
    own_offload: Offload = "none"
    offloads: tuple[Offload, ...] = ()

    def is_free(self, part: Part, *, for_memory: bool) -> bool:
        """Whether ``part`` may differ for speed, or also for memory."""
        allowed = (*self.for_speed, *(self.for_memory if for_memory else ()))
        return part in allowed and part not in dict(self.fixed)

    def recomputes(self, *, for_memory: bool) -> tuple[Recompute | None, ...]:
        """Return the allowed recomputations, the flags' own (None) first."""
        more = self.more if self.is_free("recompute", for_memory=for_memory) else ()
        return (None, *more)

    @property
    def spills(self) -> tuple[Offload, ...]:
        """States in host memory for layouts that fit in no other way."""
        return self.offloads if self.is_free("offload", for_memory=True) else ()

    def refusal(self, recompute: Recompute | None, offload: Offload | None = None) -> str | None:
        """Return the reason against this recomputation, or this state in host memory; None:
        allowed."""
        why: dict[str, str] = {str(part): reason for part, reason in self.fixed}
        for part, asked, own, more in (
            ("recompute", recompute, self.own, self.more),
            ("offload", offload, self.own_offload, self.offloads),
        ):
            if asked in (None, own) or (part not in why and asked in more):
                continue
            other = f"; {' or '.join(more)} can" if more and part not in why else ""
            reason = why.get(part) or f"the script has {own}"
            return f"{part}={asked} cannot be had: {reason}{other}"
        return None

    def differing(self, passes: Passes) -> Passes:
        """Return passes without what the script's flags say themselves."""
        again, spilled = passes.recompute, passes.offload
        return Passes(
            passes.micro_batch_size,
            None if again == self.own else again,
            None if spilled == self.own_offload else spilled,
        )


NO_FREEDOM = Freedom()


def difference(before: Passes, after: Passes, freedom: Freedom = NO_FREEDOM) -> str:
    """Return the changes from one round's passes to the next's, in words; empty: none."""
    words = []
    sizes = before.micro_batch_size, after.micro_batch_size
    if None not in sizes and sizes[0] != sizes[1]:
        words.append(f"micro-batch {sizes[0]} -> {sizes[1]}")
    again = before.recompute or freedom.own, after.recompute or freedom.own
    spilled = before.offload or freedom.own_offload, after.offload or freedom.own_offload
    for name, (then, now) in (("recompute", again), ("offload", spilled)):
        if then != now:
            words.append(f"{name} {then} -> {now}")
    return ", ".join(words)


def recompute_of_json(data: object) -> Recompute | None:
    """Read a recomputation. Raises ``ValueError`` for anything else."""
    for kind in (None, *RECOMPUTES):
        if data == kind:
            return kind
    raise ValueError(f"{data!r} is none of {', '.join(RECOMPUTES)}")


def offload_of_json(data: object) -> Offload | None:
    """Read a state in host memory. Raises ``ValueError`` for anything else."""
    for kind in (None, *OFFLOADS):
        if data == kind:
            return kind
    raise ValueError(f"{data!r} is none of {', '.join(OFFLOADS)}")
