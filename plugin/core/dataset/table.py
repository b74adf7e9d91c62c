"""A job's data sets, by its users: the table ``[dataset]``; flags overrule it."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from scalai.core.dataset.order import GlobalBatches
from scalai.core.degrees.batches import BatchRamp
from scalai.core.errors import RefusedError, UsageError
from scalai.core.jsonable import Json

DATASET = "dataset"
"""Key of the table in ``about`` of a generation."""
MOST_TOKENS = 1 << 40
"""Of a sample."""
MOST_BATCH = 1 << 31
"""Samples of a global batch."""
MOST_SIZES = 4096
"""Sizes that a global batch may grow through."""
MOST_SAMPLES = 1 << 60
"""Over which it may grow."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class DatasetTable:
    """Data sets of a job, and their views.

    Attributes:
        sources: Absolute path or fsspec URL by name: a file, a folder, or Megatron's prefix of
            ``.bin`` and ``.idx``.
        record_tokens: Tokens of a sample of a ``.bin``, by name; without it sequences are samples.
        shuffle: Seed of the order, by name, as of ``Shuffled``; without it the order in the file.
        global_batch_size: Samples of a step; None: not known here.
        rampup_batch_size: START, INCREMENT and SAMPLES of the growth to that size, as of
            ``BatchRamp``; empty: no growth.

    Raises:
        UsageError: A value is wrong; the text has the expected form.
    """

    sources: Mapping[str, str] = field(default_factory=dict)
    record_tokens: Mapping[str, int] = field(default_factory=dict)
    shuffle: Mapping[str, int] = field(default_factory=dict)
    global_batch_size: int | None = None
    rampup_batch_size: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, url in self.sources.items():
            if not _NAME.fullmatch(name):
                raise UsageError(
                    f"{name!r} cannot name a data set. Use letters, digits and ._- (at most 100, "
                    "a letter or digit first)."
                )
            is_found_anywhere = url.startswith(("/", "~/")) or "://" in url
            where = "an absolute path, or a URL: it is read from other folders too"
            expect(is_found_anywhere, f"sources.{name}", url, where)
        for name, tokens in self.record_tokens.items():
            is_length = 1 <= tokens <= MOST_TOKENS
            expect(is_length, f"record_tokens.{name}", tokens, f"1 to {MOST_TOKENS} tokens")
        for name, seed in self.shuffle.items():
            is_seed = 0 <= seed < 1 << 63
            expect(is_seed, f"shuffle.{name}", seed, "a seed of 0 or more, below 2^63")
        size = self.global_batch_size
        is_size = size is None or 1 <= size <= MOST_BATCH
        expect(is_size, "global_batch_size", size, f"1 to {MOST_BATCH} samples")
        if self.rampup_batch_size:
            self._check_ramp(list(self.rampup_batch_size))

    def _check_ramp(self, ramp: list[int]) -> None:
        form = "START, INCREMENT and SAMPLES, whole numbers"
        expect(len(ramp) == 3, "rampup_batch_size", ramp, form)
        if self.global_batch_size is None:
            raise UsageError(
                f"rampup_batch_size = {ramp} needs global_batch_size beside it, to which it grows."
            )
        start, increment, samples = ramp
        sizes = (self.global_batch_size - start) // max(increment, 1) + 1
        most = f"0 to {MOST_SAMPLES} SAMPLES, and at most {MOST_SIZES} sizes"
        is_bounded = 0 <= samples <= MOST_SAMPLES and sizes <= MOST_SIZES
        expect(is_bounded, "rampup_batch_size", ramp, most)
        try:
            BatchRamp(start, increment, samples, self.global_batch_size)
        except RefusedError as error:
            raise UsageError(f"rampup_batch_size = {ramp}: {error}") from error

    @classmethod
    def of_batch(cls, batch: int | BatchRamp | None) -> "DatasetTable":
        """Table of a global batch alone."""
        if isinstance(batch, BatchRamp):
            ramp = batch.start, batch.increment, batch.ramp_samples
            return cls(global_batch_size=batch.global_batch_size, rampup_batch_size=ramp)
        return cls(global_batch_size=batch)

    @property
    def batches(self) -> GlobalBatches | None:
        """The global batches; None: they are not known."""
        size = self.global_batch_size
        if size is None or not self.rampup_batch_size:
            return None if size is None else GlobalBatches.of(size)
        start, increment, samples = self.rampup_batch_size
        return GlobalBatches.of(BatchRamp(start, increment, samples, size))

    @property
    def batch_text(self) -> str:
        """The global batch in words."""
        size, ramp = self.global_batch_size, self.rampup_batch_size
        if size is None:
            return "not known"
        if not ramp:
            return f"{size} samples"
        start, increment, over = ramp
        return f"{size} samples, to which it grows from {start} by {increment} over {over} samples"

    def over(self, other: "DatasetTable") -> "DatasetTable":
        """Both tables in one; this one overrules the other, by data set, and the batch with its
        growth."""
        size_of = other if self.global_batch_size is None else self
        return DatasetTable(
            {**other.sources, **self.sources}, {**other.record_tokens, **self.record_tokens},
            {**other.shuffle, **self.shuffle},
            size_of.global_batch_size, size_of.rampup_batch_size,
        )  # fmt: skip

    def checked(self) -> "DatasetTable":
        """The table itself, after all tables are laid over each other. Raises ``UsageError`` for a
        key of an unknown data set."""
        for key, named in (("record_tokens", self.record_tokens), ("shuffle", self.shuffle)):
            unknown = sorted(set(named) - set(self.sources))
            if unknown:
                raise UsageError(f"{key} names {unknown[0]!r}, and sources {sorted(self.sources)}.")
        return self

    def to_json(self) -> dict[str, Json]:
        """Set values, plain."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items() if value
        }  # fmt: skip


def expect(is_met: bool, name: str, found: object, expected: str) -> None:
    """Raise ``UsageError`` for a key with another value than expected."""
    if not is_met:
        raise UsageError(f"{name} = {found!r}; expected {expected}.")
