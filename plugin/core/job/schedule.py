"""At which steps a training is saved on the way: the same on all ranks, without a word between
them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """A snapshot at step ``begin`` (but not at 0) and at each ``every``-th behind it; 0: none."""

    every: int
    begin: int = 0

    def is_due(self, step: int) -> bool:
        """Whether a snapshot belongs to this step."""
        is_begun = step >= max(self.begin, 1)
        return bool(self.every) and is_begun and (step - self.begin) % self.every == 0

    def at(self, step: int, told: "Schedule | None") -> "Schedule":
        """Return which holds at a step, where another one was told: from its own ``begin`` on. Who
        learns of it later than at that step is at once where all others are."""
        return told if told is not None and step >= told.begin else self
