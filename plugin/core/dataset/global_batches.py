"""Which places of the global order each global batch has: by its number alone, or by the samples
that were consumed."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from scalai.core.degrees.batches import BatchRamp
from scalai.core.errors import RefusedError


@dataclass(frozen=True, slots=True)
class GlobalBatches:
    """Global batches of one size after the other.

    Attributes:
        stages: Where a size begins, as a place, and the size; ascending, the first one at 0. The
            last one has no end.

    Raises:
        RefusedError: A size is not positive.
    """

    stages: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        sizes = [size for _, size in self.stages]
        if min(sizes) < 1:
            raise RefusedError(f"global batches of {sizes} samples: each has 1 or more.")

    @classmethod
    def of(cls, batch: int | BatchRamp) -> "GlobalBatches":
        """Return those of one size, or of a size that grows."""
        return cls(batch.stages if isinstance(batch, BatchRamp) else ((0, batch),))

    def size_at(self, consumed_samples: int) -> int:
        """Return how many samples the batch has that begins there."""
        begins = [begin for begin, _ in self.stages]
        return self.stages[bisect_right(begins, consumed_samples) - 1][1]

    def places(self, number: int) -> tuple[int, int]:
        """Return where the global batch of this number, the first one is 0, begins and ends."""
        ends = [begin for begin, _ in self.stages[1:]]
        for (begin, size), end in zip(self.stages, ends, strict=False):
            batches = (end - begin) // size
            if number < batches:
                return begin + number * size, begin + (number + 1) * size
            number -= batches
        begin, size = self.stages[-1]
        return begin + number * size, begin + (number + 1) * size

    def after(self, consumed_samples: int) -> Iterator[tuple[int, int]]:
        """Yield where each global batch from there on begins, and its size; without end."""
        while True:
            size = self.size_at(consumed_samples)
            yield consumed_samples, size
            consumed_samples += size
